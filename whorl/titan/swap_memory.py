"""Where AdamW's moments lie: on the host by parameter, on the device in chunks that parameters are cut into."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from whorl.device import FinishedEvent, host_buffer
from whorl.titan.moments import BLOCK, Format

Formats = tuple[Format, Format]  # of the first and the second moment
# A parameter is cut at multiples of what the CUDA kernel gives a block, and so of any vector of the CPU's:
# then no element moves between a kernel's vector body and its tail, which may round differently.
CUT = 1 << 16


@dataclass(frozen=True, slots=True)
class Span:
    """Elements start to stop of a parameter, at `offset` in a chunk."""

    param: Tensor
    start: int
    stop: int
    offset: int


@dataclass(slots=True)
class Bucket:
    """What is updated by one call; its parameters have one group and one dtype."""

    group: int
    dtype: torch.dtype
    pieces: list[Span] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class Slot:
    """Device memory for a chunk: for each moment the parts of its format."""

    memory: list[list[Tensor]]
    loaded: Any = field(default_factory=FinishedEvent)
    stored: Any = field(default_factory=FinishedEvent)


@dataclass(slots=True)
class Host:
    """The moments of a parameter's local part, flat, in the order of its memory."""

    moments: list[list[Tensor]]
    is_lent: bool = False  # a state dict has them: the next update writes into new memory


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x.detach()


def memory_order(x: Tensor) -> list[int]:
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda i: (-strides[i], i))


def flat(x: Tensor, order: list[int]) -> Tensor:
    return x.permute(order).reshape(-1)


def cut(groups: list[list[Tensor]], room: int) -> list[Bucket]:
    """Chunks of at most `room` elements, in the order of the parameters."""
    chunks: list[Bucket] = []
    for index, params in enumerate(groups):
        chunk: Bucket | None = None
        for param in params:
            size, start = local(param).numel(), 0
            while start < size:
                if chunk is None or chunk.dtype != param.dtype:
                    chunk = Bucket(index, param.dtype)
                    chunks.append(chunk)
                left = room - chunk.size
                take = size - start if size - start <= left else left // CUT * CUT
                if take == 0:
                    chunk = None
                    continue
                chunk.pieces.append(Span(param, start, start + take, chunk.size))
                chunk.size += -(-take // BLOCK) * BLOCK  # vectors and scales start on a boundary
                start += take
    return chunks


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    """The same tensors in the same groups."""
    return len(a) == len(b) and all(
        len(x) == len(y) and all(p is q for p, q in zip(x, y, strict=True)) for x, y in zip(a, b, strict=True)
    )


def flat_parameter(param: Tensor) -> Tensor:
    here = local(param)
    return here.permute(memory_order(here)).view(-1)


def flat_gradient(param: Tensor) -> Tensor:
    grad = cast(Tensor, param.grad)
    if grad.is_sparse:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has a sparse gradient: AdamW takes dense ones")
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return flat(local(grad), memory_order(local(param)))


def shaped(param: Tensor, values: Tensor | None) -> Tensor:
    """Flat values in the shape and the sharding of `param`; None: a tensor without memory."""
    here = local(param)
    order = memory_order(here)
    if values is None:
        values = torch.empty(here.numel(), dtype=param.dtype, device="meta")
    inverse = sorted(range(len(order)), key=order.__getitem__)
    plain = values[: here.numel()].view([here.shape[i] for i in order]).permute(inverse)
    if not isinstance(param, DTensor):
        return plain
    # Not DTensor.from_local: that would move it to the device of the mesh.
    meta = TensorMeta(param.shape, param.stride(), plain.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    return DTensor(plain, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


# ---- memory


def new_host(param: Tensor, formats: Formats) -> Host:
    """Memory for the moments of a parameter, of zeros."""
    here = local(param)

    def part(dtype: torch.dtype, values: int) -> Tensor:
        return host_buffer(-(-here.numel() // values) * dtype.itemsize, here.device.type).view(dtype)

    return Host([[part(*p) for p in form.parts(here.dtype)] for form in formats])


def move(formats: Formats, chunk: Bucket, slot: Slot, hosts: dict[Tensor, Host], *, back: bool = False) -> None:
    """From the host to the device; `back`: the other way."""
    for piece in chunk.pieces:
        for i, form in enumerate(formats):
            of_host, of_device = hosts[piece.param].moments[i], views(formats, chunk, slot, piece)[i]
            for (_, values), there, here in zip(form.parts(chunk.dtype), of_host, of_device, strict=True):
                there = there[piece.start // values : -(-piece.stop // values)]
                there.copy_(here, non_blocking=True) if back else here.copy_(there, non_blocking=True)


def views(formats: Formats, chunk: Bucket, slot: Slot, piece: Span) -> list[list[Tensor]]:
    """A piece's moments on the device, each in the parts of its format."""
    found = []
    for form, memory in zip(formats, slot.memory, strict=True):
        parts = []
        for (dtype, values), part in zip(form.parts(chunk.dtype), memory, strict=True):
            start, size = piece.offset // values, -(-(piece.stop - piece.start) // values)
            parts.append(part.view(dtype)[start : start + size])
        found.append(parts)
    return found
