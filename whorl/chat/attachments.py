"""Reads pictures and videos from files, to attach them to the next message."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from whorl.media import MediaError, MediaItem, Placeholder, Processor
from whorl.media.pixels import Pixels


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """A picture or video that belongs to a message. name: of its file, to show to the user."""

    name: str
    item: MediaItem
    place: Placeholder

    @property
    def num_tokens(self) -> int:
        return self.place.num_tokens * max(1, len(self.place.seconds))


class Attachments:
    """Reads files for one model. processor: None: it is created from the model's folder for the first file."""

    def __init__(self, model: str | Path | None, processor: Processor | None = None) -> None:
        self._model, self._initial_processor = model, processor

    def read(self, kind: Literal["image", "video"], file: str) -> Attachment:
        """Read a picture or a video. A video may be a folder, whose pictures, sorted by name, are the frames.

        Raises ValueError when the file cannot be read or the model takes text only.
        """
        path = Path(file).expanduser()
        processor = self._processor
        try:
            item = self._pixels(processor, kind, path).item()
        except MediaError as error:
            raise ValueError(f"{path}: {error}") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        return Attachment(path.name, item, Placeholder.for_item(item, processor.merge_size))

    def _pixels(self, processor: Processor, kind: str, path: Path) -> Pixels:
        most = processor.limits.max_bytes
        if kind == "image":
            return processor.image(_bytes(path, most))
        if path.is_dir():
            return processor.frames([_bytes(frame, most) for frame in sorted(path.iterdir()) if frame.is_file()])
        return processor.video(_bytes(path, most))

    @cached_property
    def _processor(self) -> Processor:
        if self._initial_processor is not None:
            return self._initial_processor
        from whorl.engine.weights import resolve

        processor = Processor.from_folder(resolve(self._model), num_processes=1)
        if processor is None:
            raise ValueError(f"{self._model or 'the default model'} takes text only, no pictures and no videos")
        return processor


def _bytes(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most + 1)  # one byte more, so that the processor refuses larger files
