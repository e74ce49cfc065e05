"""How much a stranger's picture or video may take."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds.

    max_bytes: of one picture or video as it is sent. max_pixels: width times height that a file declares, looked at
    before anything is decoded. max_frames: that a video is made of, or a list of them. max_items: of one request.
    decode_seconds: of CPU time for one picture or video, and `WALL` times as many by the clock. decode_memory: beside
    what a decoder takes when idle. fetch_seconds: for all that one request has fetched.
    """

    max_bytes: int = 32 << 20
    max_pixels: int = 64 << 20
    max_frames: int = 65536
    max_items: int = 64
    decode_seconds: float = 20.0
    decode_memory: int = 2 << 30
    fetch_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"media: {name} is {getattr(self, name)}, expected more than 0")


WALL = 4  # how many times its CPU time a decoder may take by the clock, on a machine with other things to do
