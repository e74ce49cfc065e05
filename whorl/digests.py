"""Digests of the files in a folder, in the format of `sha256sum`: `sha256sum -c SHA256SUMS` checks them as well.

A file is hashed while it is written, by a thread of its own, so that it is not read again.
"""

import hashlib
import io
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FILE = "SHA256SUMS"
_BLOCK = 1 << 22  # bytes that are read, or written and hashed, at a time
_THREADS = min(8, os.cpu_count() or 1)


class _HashedFile(io.FileIO):
    """A new file whose blocks are hashed by a thread while they are written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.sha = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        hashed, written = self._thread.submit(self.sha.update, view), 0
        try:
            while written < len(view):
                written += super().write(view[written:])
        finally:
            hashed.result()
        return written

    def close(self) -> None:
        super().close()
        self._thread.shutdown()


class DigestedFile(io.BufferedWriter):
    """A new binary file, written from its start to its end, with the digest of what was written."""

    def __init__(self, path: Path) -> None:
        self._file = _HashedFile(path)
        super().__init__(self._file, _BLOCK)

    def fileno(self) -> int:
        self.flush()  # os.fsync is given this number, and must not miss what is in the buffer
        return super().fileno()

    def digest(self) -> str:
        """Return the SHA-256 of the file in hexadecimal; the file must be closed."""
        return self._file.sha.hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    sha, block = hashlib.sha256(), bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            sha.update(memoryview(block)[:count])
    return sha.hexdigest()


def write(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of files in a folder, by name."""
    (folder / FILE).write_text("".join(f"{value}  {name}\n" for name, value in sorted(digests.items())))


def read(folder: Path) -> dict[str, str]:
    """Return the digests in a folder by the name of the file; raises ValueError when `write` did not write them."""
    lines = (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    entries = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in lines]
    for line, entry in zip(lines, entries, strict=True):
        if entry is None:
            raise ValueError(f"{FILE} has the line {line!r:.90}, expected a digest, two spaces and the name of a file")
    return {entry[2]: entry[1] for entry in entries if entry is not None}


def check(folder: Path, names: Collection[str]) -> None:
    """Raise ValueError unless these files of a folder are those that its digests were written for."""
    expected, pool = read(folder), ThreadPoolExecutor(_THREADS)
    try:
        for name, actual in zip(names, pool.map(lambda name: digest(folder / name), names), strict=True):
            if actual != expected.get(name):
                listed = f"{expected[name][:12]}..." if name in expected else "none"
                raise ValueError(
                    f"{name} is not as it was written: its SHA-256 is {actual[:12]}..., and {FILE} has {listed}. "
                    f"Restore it from a copy, or remove {FILE} to use it as it is"
                )
    finally:
        pool.shutdown(cancel_futures=True)
