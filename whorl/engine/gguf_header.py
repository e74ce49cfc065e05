"""The header of a GGUF file: its keys with their values, and where its tensors lie. For tokenizers, too: no torch here.

The gguf package's reader makes four numpy views for every string of an array: 4 s for a vocabulary of 49152 with its
merges, against 0.2 s here. Tensors are read in `weights.gguf`.
"""

import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string, before it
_DEEPEST = 8  # arrays in arrays; files in use have none
_MOST_DIMS = 4  # of a tensor, as llama.cpp has it
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Cursor:
    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        self._check(count)
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def string(self) -> str:
        (length,) = self.scalars("Q", 1)
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise struct.error("the file ends inside a string")
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Many at once, without a call for each: a vocabulary and its merges are a hundred thousand."""
        data, at, end = self.data, self.at, len(self.data)
        unpack, found = _LENGTH.unpack_from, []
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + unpack(data, at)[0]
            if at > end:
                raise struct.error("the file ends inside a string")
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def _check(self, count: int) -> None:
        """No value is smaller than a byte: a count that the file cannot hold is damage, not work."""
        if count > len(self.data) - self.at:
            raise struct.error(f"{count} values are announced, and {len(self.data) - self.at} bytes are left")

    def value(self, kind: int, depth: int = 0) -> Any:
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
    metadata: dict[str, Any]
    tensors: list[tuple[str, tuple[int, ...], int, int]]  # name, dims (innermost first), type, offset
    start: int  # of the data
    data: mmap


def read_header(path: Path) -> Header:
    """Keys and tensors in one pass: a vocabulary makes the keys long."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file: it does not start with 'GGUF'")
        data = mmap(file.fileno(), 0, access=ACCESS_READ)
    cursor = Cursor(data)
    cursor.at = 4
    try:
        (version,) = cursor.scalars("I", 1)
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version}; versions 2 and 3, little-endian, can be read")
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
    """Every key of the header with its value; strings that are not UTF-8 get replacement characters."""
    return read_header(path).metadata
