"""Text from the command line and standard input: bytes that are not valid text give an error that names them."""

import io
import os
import sys
from pathlib import Path
from typing import Any


def prepare_streams() -> None:
    """Let standard input keep bytes that it cannot decode, for `as_text` to report, and print ? for what stdout cannot
    encode.

    If the locale's encoding is ASCII, input is read as UTF-8.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = sys.stdin.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else sys.stdin.encoding, errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def as_text(text: str, label: str) -> str:
    """Return the text; raise ValueError when it has undecodable bytes, which Python keeps as lone surrogates.

    label: what the message calls the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        fault = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a surrogate pair (U+{code:04X})"
        raise ValueError(f"{label} is not UTF-8 text: {fault} after {error.start} characters") from None
    return text


def as_argument(text: str | None, label: str) -> str | None:
    """Check a command line argument like `as_text`, but decode its bytes as UTF-8 whatever the locale is."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return as_text(os.fsencode(text).decode("utf-8", "surrogateescape"), label)
    return text


def read_file(file: str, label: str) -> str:
    """Return the text of a file; raise ValueError, which begins with the label, when it cannot be read."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{label}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{label}: is not UTF-8 text: {error}") from error


def read_stdin() -> str:
    """Read all of standard input."""
    prepare_streams()
    stream: Any = sys.stdin
    return as_text(stream.read(), "standard input")
