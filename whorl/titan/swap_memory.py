"""Memory of AdamW's moments: on the host by parameter, on the device in buckets of parameter spans.

A format stores a moment as one or more flat tensors, its parts (see `moments.py`). `parts` are those of the first
moment, then those of the second, in the order of `parts_of`.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from whorl.device import host_buffer
from whorl.streams import FinishedEvent
from whorl.titan.moments import BLOCK, Format

Formats = tuple[Format, Format]  # the formats of the first and of the second moment
# Parameters are divided only at multiples of this many elements. It is the work of a CUDA block and a multiple of every
# CPU vector, so that no element moves between the vector loop of a kernel and its tail, which may round differently.
ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class Span:
    """The elements `start` to `stop` of the flat local shard of a parameter, at element `offset` of a bucket."""

    param: Tensor
    start: int
    stop: int
    offset: int


@dataclass(slots=True)
class Bucket:
    """The spans that one kernel call updates; their parameters have the same group and dtype."""

    group: int  # index into the optimizer's param_groups
    dtype: torch.dtype
    spans: list[Span] = field(default_factory=list)
    size: int = 0  # elements, with the padding after each span


@dataclass(slots=True)
class DeviceBuffer:
    """Device memory for one bucket: the parts of both moments, as bytes."""

    parts: list[Tensor]
    loaded: Any = field(default_factory=FinishedEvent)  # the event after the last load into this buffer
    stored: Any = field(default_factory=FinishedEvent)  # the event after the last store from it


@dataclass(slots=True)
class HostMoments:
    """The moments of the local shard of a parameter, flat, in the memory order of the parameter."""

    parts: list[Tensor]
    is_lent: bool = False  # a state dict refers to them, so that the next update writes into new memory


def parts_of(formats: Formats, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """For moments of `dtype`, return the dtype of each part and how many values one element of it covers."""
    return [part for moment_format in formats for part in moment_format.parts(dtype)]


def by_moment(parts: list[Tensor]) -> list[list[Tensor]]:
    """Return the parts of the first and of the second moment, which has as many."""
    count = len(parts) // 2
    return [parts[:count], parts[count:]]


def local(x: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the tensor itself, detached; both share memory with x."""
    return x.to_local() if isinstance(x, DTensor) else x.detach()


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions in order of decreasing stride: permuted by it, a dense tensor is contiguous."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda i: (-strides[i], i))


def flatten(x: Tensor, order: list[int]) -> Tensor:
    """Return x flat, with its dimensions in this order."""
    return x.permute(order).reshape(-1)


def split_into_buckets(groups: list[list[Tensor]], capacity: int) -> list[Bucket]:
    """Return buckets of at most `capacity` elements that cover the local shards of the parameters in order.

    groups: the parameters of each group of the optimizer; a bucket never crosses groups or dtypes.
    """
    buckets: list[Bucket] = []
    for index, params in enumerate(groups):
        bucket: Bucket | None = None
        for param in params:
            size, start = local(param).numel(), 0
            while start < size:
                if bucket is None or bucket.dtype != param.dtype:
                    bucket = Bucket(index, param.dtype)
                    buckets.append(bucket)
                free = capacity - bucket.size
                length = size - start if size - start <= free else free // ALIGNMENT * ALIGNMENT
                if length == 0:
                    bucket = None
                    continue
                bucket.spans.append(Span(param, start, start + length, bucket.size))
                bucket.size += -(-length // BLOCK) * BLOCK  # align the start of the next span for vectors and scales
                start += length
    return buckets


def are_same_groups(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    """Return whether both lists have the same tensors in the same groups."""
    return [[*map(id, group)] for group in a] == [[*map(id, group)] for group in b]


def flat_parameter(param: Tensor) -> Tensor:
    """Return a flat view of the local shard of a parameter, in memory order."""
    shard = local(param)
    return shard.permute(memory_order(shard)).view(-1)


def flat_gradient(param: Tensor) -> Tensor:
    """Return the local gradient of a parameter, flat, in the memory order of the parameter.

    Raises ValueError when the gradient is sparse.
    """
    grad = cast(Tensor, param.grad)
    if grad.is_sparse:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has a sparse gradient; AdamW needs a dense one")
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return flatten(local(grad), memory_order(local(param)))


def unflatten(param: Tensor, values: Tensor | None) -> Tensor:
    """Return flat values, in memory order, as a view in the shape and sharding of `param`.

    For None the result is in float32 on the meta device, which has shapes but no memory.
    """
    shard = local(param)
    order = memory_order(shard)
    if values is None:
        values = torch.empty(shard.numel(), dtype=torch.float32, device="meta")
    inverse = sorted(range(len(order)), key=order.__getitem__)
    shaped = values[: shard.numel()].view([shard.shape[i] for i in order]).permute(inverse)
    if not isinstance(param, DTensor):
        return shaped
    # DTensor.from_local would move the tensor to the device of the mesh.
    meta = TensorMeta(param.shape, param.stride(), shaped.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, tensor_meta=meta)
    return DTensor(shaped, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


# ---- memory


def new_host(param: Tensor, formats: Formats) -> HostMoments:
    """Return host memory for the moments of a parameter, filled with zeros."""
    shard = local(param)
    parts = [(dtype, -(-shard.numel() // values)) for dtype, values in parts_of(formats, shard.dtype)]
    return HostMoments([host_buffer(size * dtype.itemsize, shard.device.type).view(dtype) for dtype, size in parts])


def move(
    formats: Formats, bucket: Bucket, buffer: DeviceBuffer, hosts: dict[Tensor, HostMoments], *, back: bool = False
) -> None:
    """Start to copy the moments of a bucket from the host to the device, or with `back` from the device to the host.

    The copies run on the current stream. hosts: the host moments by parameter.
    """
    covered = [values for _, values in parts_of(formats, bucket.dtype)]
    for span in bucket.spans:
        on_device = views(formats, bucket, buffer, span)
        for values, host_part, device_part in zip(covered, hosts[span.param].parts, on_device, strict=True):
            host_part = host_part[span.start // values : -(-span.stop // values)]
            target, source = (host_part, device_part) if back else (device_part, host_part)
            target.copy_(source, non_blocking=True)


def views(formats: Formats, bucket: Bucket, buffer: DeviceBuffer, span: Span) -> list[Tensor]:
    """Return views of the parts of a span's moments in a device buffer."""
    parts = []
    for (dtype, values), part in zip(parts_of(formats, bucket.dtype), buffer.parts, strict=True):
        start, size = span.offset // values, -(-(span.stop - span.start) // values)
        parts.append(part.view(dtype)[start : start + size])
    return parts
