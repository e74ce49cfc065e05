"""What a trainer says of the tensors before they come, and how several lie in one buffer."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Batch = list[tuple[str, Tensor]]
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
}
MOST_TENSORS = 1 << 20


class TransferError(RuntimeError):
    """The tensors did not come, or not as they were announced."""


@dataclass(frozen=True, slots=True)
class Announced:
    """A tensor that is to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view_of(self, flat: Tensor) -> Tensor:
        """Return the tensor whose bytes are `flat`, uint8, sharing its memory where that is aligned."""
        if flat.data_ptr() % self.dtype.itemsize:
            flat = flat.clone()
        return flat.view(self.dtype).view(self.shape)


_last: tuple[list[Any], list["Announced"]] = [], []  # a trainer announces the same tensors with every update


def announced(update_info: Mapping[str, Any]) -> list[Announced]:
    """Return the tensors of `names`, `dtype_names` and `shapes`; ValueError if these are not three equal lists."""
    global _last
    lists = [update_info.get(key) for key in ("names", "dtype_names", "shapes")]
    if lists != _last[0]:
        _last = lists, _announced(*lists)
    return _last[1]


def _announced(names: Any, dtypes: Any, shapes: Any) -> list[Announced]:
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise ValueError("update_info: expected lists names, dtype_names and shapes")
    if not len(names) == len(dtypes) == len(shapes) or len(names) > MOST_TENSORS:
        raise ValueError(f"update_info: {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes")
    tensors = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"update_info: {name!r} has dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"update_info: {name!r} has shape {shape!r}, expected a list of sizes")
        tensors.append(Announced(name, DTYPES[dtype], tuple(shape)))
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ValueError("update_info: a name comes twice")
    return tensors


def chunks(tensors: list[Announced], buffer_bytes: int) -> Iterator[list[Announced]]:
    """Yield the tensors of each buffer of vLLM's packed form: tensors are added until their bytes exceed the size."""
    chunk: list[Announced] = []
    size = 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.nbytes
        if size > buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def unpacked(chunk: list[Announced], buffer: Tensor) -> Batch:
    """Return the tensors that lie one behind the other in a buffer of bytes."""
    dtype = chunk[0].dtype if chunk else torch.uint8
    if all(tensor.dtype == dtype for tensor in chunk) and buffer.data_ptr() % dtype.itemsize == 0:
        values = buffer.view(dtype).split([math.prod(tensor.shape) for tensor in chunk])
        return [(tensor.name, part.view(tensor.shape)) for tensor, part in zip(chunk, values, strict=True)]
    parts = buffer.split([tensor.nbytes for tensor in chunk])
    return [(tensor.name, tensor.view_of(part)) for tensor, part in zip(chunk, parts, strict=True)]
