"""Read the header of a GGUF file: its metadata, and where its tensors lie. Tokenizers use it too, so no torch here.

The gguf package's reader creates four numpy views for every string of an array: 4 s for a vocabulary of 49152 with its
merges, against 0.2 s here. Tensors are read in `weights.gguf`.
"""

import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # precedes every string
_DEEPEST = 8  # nesting of arrays; files in use have none
_MOST_DIMS = 4  # of a tensor, the limit of llama.cpp
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Cursor:
    """Reads values of a GGUF header one after the other; struct.error if the file ends or is damaged."""

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        self._check(count)
        fields = struct.Struct(f"<{count}{code}")
        values = fields.unpack_from(self.data, self.at)
        self.at += fields.size
        return values

    def string(self) -> str:
        (length,) = self.scalars("Q", 1)
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise struct.error("the file ends inside a string")
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Read many strings without a function call for each: a vocabulary with its merges has a hundred thousand."""
        data, at, end = self.data, self.at, len(self.data)
        unpack, strings = _LENGTH.unpack_from, []
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + unpack(data, at)[0]
            if at > end:
                raise struct.error("the file ends inside a string")
            strings.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return strings

    def _check(self, count: int) -> None:
        """Raise for a count that the file cannot hold, as every value takes at least a byte: the file is damaged."""
        if count > len(self.data) - self.at:
            raise struct.error(f"the header announces {count} values, and {len(self.data) - self.at} bytes are left")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of GGUF's type `kind`: a scalar, a string, or an array as a list. depth: arrays around it."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (inner,), (count,) = self.scalars("I", 1), self.scalars("Q", 1)
            self._check(count)
            if inner in _SCALARS:
                return list(self.scalars(_SCALARS[inner], count))
            if inner == _STRING:
                return self.strings(count)
            if depth == _DEEPEST:
                raise struct.error(f"arrays are nested more than {_DEEPEST} deep")
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} is unknown")
        return self.scalars(_SCALARS[kind], 1)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of a GGUF file, and the mapped file itself."""

    metadata: dict[str, Any]
    tensors: list[tuple[str, tuple[int, ...], int, int]]  # name, dims (innermost first), type, offset
    start: int  # first byte of the tensors' data
    data: mmap


def read_header(path: Path) -> Header:
    """Read metadata and tensor descriptions in one pass; ValueError if the file is not GGUF or is damaged."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file: it does not start with 'GGUF'")
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    cursor = Cursor(data)
    cursor.at = 4
    try:
        (version,) = cursor.scalars("I", 1)
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version is {version}, expected 2 or 3, little-endian")
        num_tensors, num_keys = cursor.scalars("Q", 2)
        metadata = {cursor.string(): cursor.value(*cursor.scalars("I", 1)) for _ in range(num_keys)}
        tensors = []
        for _ in range(num_tensors):
            name, (num_dims,) = cursor.string(), cursor.scalars("I", 1)
            if not 1 <= num_dims <= _MOST_DIMS:
                raise struct.error(f"tensor {name} has {num_dims} dims")
            dims, (kind,), (offset,) = cursor.scalars("Q", num_dims), cursor.scalars("I", 1), cursor.scalars("Q", 1)
            tensors.append((name, dims, kind, offset))
    except struct.error as error:
        raise ValueError(f"{path}: the GGUF header is cut off or damaged: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment is {alignment!r}, expected a number of bytes, 1 or more")
    return Header(metadata=metadata, tensors=tensors, start=-(-cursor.at // alignment) * alignment, data=data)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return every key of the header with its value; bytes that are not UTF-8 become replacement characters."""
    return read_header(path).metadata
