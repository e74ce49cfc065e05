"""Text as the command line gives and takes it: bytes that are not text are named, and end nothing."""

import io
import os
import sys
from typing import Any


def prepare_streams() -> None:
    """Let standard input hand bytes on that it cannot decode, for `as_text` to name; print what cannot be encoded as ?.

    Where the locale says ASCII, which is every byte below 128, input is taken for UTF-8.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = sys.stdin.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646")
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else sys.stdin.encoding, errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def as_text(text: str, what: str) -> str:
    """The text; ValueError where it holds bytes that could not be decoded, which Python keeps as half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        found = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a surrogate pair (U+{code:04X})"
        raise ValueError(f"{what} is not UTF-8 text: {found} behind {error.start} characters") from None
    return text


def as_argument(text: str | None, what: str) -> str | None:
    """A command line argument as `as_text` takes it, whatever the locale made of its bytes."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return as_text(os.fsencode(text).decode("utf-8", "surrogateescape"), what)
    return text


def read_stdin() -> str:
    """All of standard input."""
    prepare_streams()
    stream: Any = sys.stdin
    return as_text(stream.read(), "standard input")
