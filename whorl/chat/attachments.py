"""Pictures and videos from files that the user names, for the message that comes next."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from whorl.media import MediaError, MediaItem, Place, Processor
from whorl.media.pixels import Pixels


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """name: of the file, for the user."""

    name: str
    item: MediaItem
    place: Place

    @property
    def num_tokens(self) -> int:
        return self.place.num_tokens * max(1, len(self.place.seconds))


class Attachments:
    """Reads files for one model. processor: None: it is made of the model's folder when the first file is read."""

    def __init__(self, model: str | Path | None, processor: Processor | None = None) -> None:
        self._model, self._given = model, processor

    def read(self, kind: Literal["image", "video"], file: str) -> Attachment:
        """A video may be a folder, too: its pictures, by name, are the frames. ValueError says what is wrong."""
        path = Path(file).expanduser()
        processor = self._processor
        try:
            item = self._pixels(processor, kind, path).item()
        except MediaError as error:
            raise ValueError(f"{path}: {error}") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        return Attachment(path.name, item, Place.of(item, processor.merge_size))

    def _pixels(self, processor: Processor, kind: str, path: Path) -> Pixels:
        most = processor.limits.max_bytes
        if kind == "image":
            return processor.image(_bytes(path, most))
        if path.is_dir():
            return processor.frames([_bytes(each, most) for each in sorted(path.iterdir()) if each.is_file()])
        return processor.video(_bytes(path, most))

    @cached_property
    def _processor(self) -> Processor:
        if self._given is not None:
            return self._given
        from whorl.engine.weights import resolve

        made = Processor.from_folder(resolve(self._model), num_processes=1)
        if made is None:
            raise ValueError(f"{self._model or 'the default model'} takes text alone, no pictures and no videos")
        return made


def _bytes(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most + 1)  # the processor refuses what has more
