"""Errors for pictures and videos that are refused. No text of a decoder gets into their messages."""

from typing import Literal

Kind = Literal["invalid", "too_large", "too_costly", "not_fetched"]


class MediaError(ValueError):
    """A picture or video is refused. The message is for the client that sent it; kind: the kind of the error."""

    def __init__(self, message: str, kind: Kind = "invalid") -> None:
        super().__init__(message)
        self.kind = kind


_SENTENCES: dict[str, tuple[str, Kind]] = {
    "format": ("it is not a PNG, JPEG, WebP or GIF picture", "invalid"),
    "video_format": ("it is not an MP4 or WebM video in H.264, HEVC, VP8, VP9 or AV1", "invalid"),
    "broken": ("it cannot be decoded: it is broken, or not what it claims to be", "invalid"),
    "ratio": ("it has {} x {} pixels: one side is more than {} times the other", "invalid"),
    "few_frames": ("the video has {} frame; at least {} are needed", "invalid"),
    "sizes_differ": ("the frames of the video differ in size", "invalid"),
    "pixels": ("it declares {} x {} pixels; up to {} are allowed", "too_large"),
    "frames": ("it has more than {} frames", "too_large"),
    "memory": ("decoding it takes more memory than is allowed", "too_costly"),
}


class DecodeError(MediaError):
    """A picture or video cannot be decoded.

    code: the key of one of the sentences above; numbers: its arguments; detail: for the log only. The decoder's process
    sends only the code and the numbers, so that it cannot choose the words that a client reads.
    """

    def __init__(self, code: str, *numbers: int, detail: str = "") -> None:
        text, kind = _SENTENCES[code]
        super().__init__(text.format(*numbers), kind)
        self.code, self.numbers, self.detail = code, numbers, detail
