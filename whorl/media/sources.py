"""Reads the bytes behind a URL that a client sent. No other module opens files or connections for clients.

data: URIs are always allowed; http(s): only from allowed hosts (`http_source`); file: only below one folder.
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
_FRAMES = "video/jpeg"  # vLLM's type for frames sent as pictures: their base64, separated by commas
_IMAGES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_VIDEOS = ("video/mp4", "video/webm", "video/quicktime", "video/x-matroska", "video/matroska")
_FRAME_KINDS = (_FRAMES, "video/png", "video/webp")
_ALLOWED = {"image": "PNG, JPEG, WebP and GIF", "video": "MP4, WebM and frames as pictures (video/jpeg)"}


@dataclass(frozen=True, slots=True)
class Source:
    """The bytes of a picture or video. parts: one, or a video's frames as pictures. fps: of the frames, if known."""

    parts: tuple[bytes, ...]
    is_frames: bool = False
    fps: float | None = None


class Sources:
    """Reads media. hosts, folder: what may be read beside data: URIs. Raises ValueError if they are invalid."""

    def __init__(self, limits: Limits, *, hosts: Sequence[str] = (), folder: str | Path | None = None) -> None:
        self._limits, self._http = limits, HttpSource(hosts)
        path = None if folder is None else Path(folder).expanduser().absolute()
        self._folder = None if path is None else path.resolve()
        # The folder's path as it was written and with its links resolved: a URL may use either.
        self._names = {name.parts[1:] for name in (path, self._folder) if name is not None}
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"media_folder: {folder} is not a folder")

    def read(self, url: str, kind: str, *, deadline: float | None = None) -> Source:
        """Read a URL. kind: "image" or "video". deadline: for fetching, on `time.monotonic`'s clock.

        Raises MediaError when the URL is not allowed, cannot be read, or is too large.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _from_data(url, kind, self._limits)
        if scheme in ("http", "https"):
            until = time.monotonic() + self._limits.fetch_seconds if deadline is None else deadline
            return Source((self._http.fetch(url, max_bytes=self._limits.max_bytes, deadline=until),))
        if scheme == "file":
            return Source((self._from_file(url),))
        raise MediaError("its URL is not allowed: expected data:, or http(s) or file: where this server allows them")

    def _from_file(self, url: str) -> bytes:
        """Return the bytes of a file: URL; MediaError if it is not below the folder."""
        if self._folder is None:
            raise MediaError("this server reads no files: send the file itself as a data: URI")
        parts = _path(url)
        prefix = next((name for name in self._names if parts[: len(name)] == name and len(parts) > len(name)), None)
        if prefix is None:
            raise MediaError("it is not in the folder that this server reads from")
        try:
            return read_below(self._folder, parts[len(prefix) :], self._limits.max_bytes)
        except OSError:
            raise MediaError("there is no such file in the folder that this server reads from") from None


def _path(url: str) -> tuple[str, ...]:
    """Return the components of a file: URL's path."""
    try:
        path = unquote(url[len("file:") :], errors="strict") if url.isascii() else ""
    except UnicodeDecodeError:
        path = ""
    path = path.removeprefix("//localhost") if path.startswith("//localhost/") else path.removeprefix("//")
    parts = tuple(path.split("/")[1:])
    if not path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise MediaError("its URL is not allowed: expected file:///FOLDER/NAME")
    return parts


def read_below(folder: Path, parts: Sequence[str], max_bytes: int) -> bytes:
    """Read a regular file below a folder.

    Each component is opened relative to the folder that was opened before it, and no link is followed, so that nothing
    can be swapped between a check and the reading. Raises OSError when there is no such file, MediaError when it is too
    large.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            descriptor = _open_in(descriptor, part, flags | os.O_DIRECTORY)
        # O_NONBLOCK, as opening a named pipe would wait for a writer.
        descriptor = _open_in(descriptor, parts[-1], flags | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a file")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return check_size(file.read(max_bytes + 1), max_bytes)
    finally:
        os.close(descriptor)


def _open_in(folder: int, name: str, flags: int) -> int:
    """Open a name in an open folder, and close the folder."""
    try:
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def check_size(data: bytes, max_bytes: int) -> bytes:
    """Return the data; raise MediaError when it has more than max_bytes bytes."""
    if len(data) > max_bytes:
        raise MediaError(f"it has more than {max_bytes} bytes", "too_large")
    return data


def _from_data(url: str, kind: str, limits: Limits) -> Source:
    """Read a data: URI in base64 (RFC 2397). Its media type must be allowed; the decoder then checks the bytes."""
    comma = url.find(",", 0, _MAX_HEAD)
    match = _DATA.fullmatch(url[:comma]) if comma > 0 else None
    if match is None or match["base64"] is None:
        raise MediaError("its data: URI is not allowed: expected data:image/png;base64, and the bytes")
    media_type = (match["kind"] or "text/plain").lower()
    is_frames = kind == "video" and media_type in _FRAME_KINDS
    if not is_frames and media_type not in (_IMAGES if kind == "image" else _VIDEOS):
        raise MediaError(f"it is {media_type}; {_ALLOWED[kind]} are allowed")
    if (len(url) - comma) // 4 * 3 > limits.max_bytes + limits.max_frames:
        raise MediaError(f"it has more than {limits.max_bytes} bytes", "too_large")
    if is_frames:
        if url.count(",") - 1 >= limits.max_frames:
            raise MediaError(f"it has more than {limits.max_frames} frames", "too_large")
        parts = tuple(_decode_base64(text) for text in url[comma + 1 :].split(","))
        return Source(parts, is_frames=True, fps=_fps(match["parameters"]))
    return Source((check_size(_decode_base64(url[comma + 1 :]), limits.max_bytes),))


def _decode_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise MediaError("its data: URI is not base64") from None


def _fps(parameters: str) -> float | None:
    values = [text.partition("=")[2] for text in parameters.lower().split(";") if text.startswith("fps=")]
    if not values:
        return None
    try:
        return float(values[-1])
    except ValueError:
        raise MediaError(f"the video's fps is {values[-1]!r}, expected a number") from None
