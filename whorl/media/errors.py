"""What is said of a picture or video that is not taken. Nothing in it comes from a decoder."""

from typing import Literal

Kind = Literal["invalid", "too_large", "too_costly", "not_fetched"]


class MediaError(ValueError):
    """The message is for whoever sent it. kind: of what is wrong."""

    def __init__(self, message: str, kind: Kind = "invalid") -> None:
        super().__init__(message)
        self.kind = kind


_SENTENCES: dict[str, tuple[str, Kind]] = {
    "format": ("it is not a PNG, JPEG or WebP picture", "invalid"),
    "video_format": ("it is not an MP4 or WebM video in H.264, HEVC, VP8, VP9 or AV1", "invalid"),
    "broken": ("it cannot be decoded: it is broken, or not what it claims to be", "invalid"),
    "ratio": ("it has {} x {} pixels: one side is more than {} times the other", "invalid"),
    "few_frames": ("the video has {} frame; at least {} are needed", "invalid"),
    "sizes_differ": ("the frames of the video differ in size", "invalid"),
    "pixels": ("it declares {} x {} pixels; up to {} are taken", "too_large"),
    "frames": ("it has more than {} frames", "too_large"),
    "memory": ("decoding it takes more memory than is allowed", "too_costly"),
}


class DecodeError(MediaError):
    """code: of one of the sentences above; numbers: what goes into it. detail: for the log.

    So one process tells another what is wrong, and every word that a client reads is ours.
    """

    def __init__(self, code: str, *numbers: int, detail: str = "") -> None:
        text, kind = _SENTENCES[code]
        super().__init__(text.format(*numbers), kind)
        self.code, self.numbers, self.detail = code, numbers, detail
