"""Limits on the pictures and videos that clients send."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on media. Sizes are in bytes, times in seconds. Raises ValueError for a limit that is not positive.

    max_bytes: size of one picture or video as it is sent. max_pixels: width times height that a file declares, checked
    before anything is decoded. max_request_pixels: of all pictures of one request together; a video counts none, as
    decode_seconds limits it. max_frames: frames of a video file or of a list of pictures. max_items: pictures and
    videos of one request; max_of_kind: the same for "image" and "video". decode_seconds: CPU time for one picture or
    video; the wall-clock limit is four times that. decode_memory: memory for decoding, beyond what an idle decoder
    uses. fetch_seconds: wall-clock time to fetch all media of one request.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 64 << 20
    max_request_pixels: int = 1 << 30
    max_frames: int = 65536
    max_items: int = 64
    max_of_kind: Mapping[str, int] = field(default_factory=dict)
    decode_seconds: float = 20.0
    decode_memory: int = 2 << 30
    fetch_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "max_of_kind" and not getattr(self, name) > 0:
                raise ValueError(f"media: {name} is {getattr(self, name)}, expected more than 0")
