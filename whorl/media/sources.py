"""From a URL that a client sent to bytes. Nothing else fetches or opens: a processor gets bytes, never a name.

data: URIs always; http(s): from hosts that the server names (`http_source`); file: below one folder.
"""

import binascii
import os
import re
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from .errors import MediaError
from .http_source import HttpSource
from .limits import Limits

_KIND, _PARAMETER = r"[a-z0-9.+-]+/[a-z0-9.+-]+", r";[a-z0-9-]+=[a-z0-9.+-]+"
_DATA = re.compile(
    rf"data:(?P<kind>{_KIND})?(?P<parameters>({_PARAMETER})*)(?P<base64>;base64)?", re.IGNORECASE | re.ASCII
)
_MAX_HEAD = 256
_FRAMES = "video/jpeg"  # vLLM's spelling of frames that are pictures: their base64, with commas between
_IMAGES = ("image/png", "image/jpeg", "image/jpg", "image/webp")
_VIDEOS = ("video/mp4", "video/webm", "video/quicktime", "video/x-matroska", "video/matroska")
_FRAME_KINDS = (_FRAMES, "video/png", "video/webp")
_TAKEN = {"image": "PNG, JPEG and WebP", "video": "MP4, WebM and frames as pictures (video/jpeg)"}


@dataclass(frozen=True, slots=True)
class Source:
    """parts: one, or the frames of a video that come as pictures. fps: of those, where it was said."""

    parts: tuple[bytes, ...]
    is_frames: bool = False
    fps: float | None = None


class Sources:
    """hosts, folder: what is taken beside data: URIs. ValueError where they cannot be."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        hosts: Sequence[str] = (),
        folder: str | Path | None = None,
        http: HttpSource | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._http = http or HttpSource(hosts)
        given = None if folder is None else Path(folder).expanduser().absolute()
        self._folder = None if given is None else given.resolve()
        self._names = {each.parts[1:] for each in (given, self._folder) if each is not None}
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"media_folder: {folder} is not a folder")

    def read(self, url: str, kind: str, *, deadline: float | None = None) -> Source:
        """kind: "image" or "video". deadline: for what has to be fetched, on `time.monotonic`'s clock."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _from_data(url, kind, self._limits)
        if scheme in ("http", "https"):
            until = time.monotonic() + self._limits.fetch_seconds if deadline is None else deadline
            return Source((self._http.fetch(url, max_bytes=self._limits.max_bytes, deadline=until),))
        if scheme == "file":
            return Source((self._from_file(url),))
        raise MediaError("its URL is not taken: expected data:, or http(s) or file: where this server allows them")

    def _from_file(self, url: str) -> bytes:
        if self._folder is None:
            raise MediaError("this server reads no files: send the file itself as a data: URI")
        parts = _path(url)
        above = next((name for name in self._names if parts[: len(name)] == name and len(parts) > len(name)), None)
        if above is None:
            raise MediaError("it is not in the folder that this server reads from")
        try:
            return read_below(self._folder, parts[len(above) :], self._limits.max_bytes)
        except OSError:
            raise MediaError("there is no such file in the folder that this server reads from") from None


def _path(url: str) -> tuple[str, ...]:
    """Of a file: URL, step by step."""
    try:
        path = unquote(url[len("file:") :], errors="strict") if url.isascii() else ""
    except UnicodeDecodeError:
        path = ""
    path = path.removeprefix("//localhost") if path.startswith("//localhost/") else path.removeprefix("//")
    parts = tuple(path.split("/")[1:])
    if not path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise MediaError("its URL is not taken: expected file:///FOLDER/NAME")
    return parts


def read_below(folder: Path, parts: Sequence[str], max_bytes: int) -> bytes:
    """A plain file. Each step is taken from the folder that was opened before, and no link is followed, so that nothing
    can be changed between a look and the reading."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            at = _step(at, part, flags | os.O_DIRECTORY)
        at = _step(at, parts[-1], flags | os.O_NONBLOCK)  # a pipe would wait for a writer
        status = os.fstat(at)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a file")
        with os.fdopen(os.dup(at), "rb") as file:
            return limited(file.read(max_bytes + 1), max_bytes)
    finally:
        os.close(at)


def _step(at: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)


def limited(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise MediaError(f"it has more than {max_bytes} bytes", "too_large")
    return data


def _from_data(url: str, kind: str, limits: Limits) -> Source:
    """RFC 2397, in base64. The kind that it names is compared with what is taken; the decoder sees for itself."""
    comma = url.find(",", 0, _MAX_HEAD)
    match = _DATA.fullmatch(url[:comma]) if comma > 0 else None
    if match is None or match["base64"] is None:
        raise MediaError("its data: URI is not taken: expected data:image/png;base64, and the bytes")
    named = (match["kind"] or "text/plain").lower()
    is_frames = kind == "video" and named in _FRAME_KINDS
    if not is_frames and named not in (_IMAGES if kind == "image" else _VIDEOS):
        raise MediaError(f"it is {named}; {_TAKEN[kind]} are taken")
    if (len(url) - comma) // 4 * 3 > limits.max_bytes + limits.max_frames:
        raise MediaError(f"it has more than {limits.max_bytes} bytes", "too_large")
    if is_frames:
        if url.count(",") - 1 >= limits.max_frames:
            raise MediaError(f"it has more than {limits.max_frames} frames", "too_large")
        parts = tuple(_decoded(text) for text in url[comma + 1 :].split(","))
        return Source(parts, is_frames=True, fps=_fps(match["parameters"]))
    return Source((limited(_decoded(url[comma + 1 :]), limits.max_bytes),))


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise MediaError("its data: URI is not base64") from None


def _fps(parameters: str) -> float | None:
    found = [each.partition("=")[2] for each in parameters.lower().split(";") if each.startswith("fps=")]
    if not found:
        return None
    try:
        return float(found[-1])
    except ValueError:
        raise MediaError(f"the video's fps is {found[-1]!r}, expected a number") from None
