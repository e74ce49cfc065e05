"""The mixture of experts of gpt-oss: with biases, a clipped activation, and gate and up in alternating rows."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from whorl import ops

from .experts import Experts
from .ranks import ONE, Ranks
from .weight import Destination, Formats, Index, Matrix, Part, Weighted


@runtime_checkable
class StackFormat(Protocol):
    """A format whose checkpoints have all matrices of a stack in one tensor of each kind."""

    def stack_destinations(
        self, matrix: Matrix, shape: tuple[int, ...], index: Index
    ) -> Iterator[tuple[str, Destination]]:
        """Yield the tensors of a stack by the end of their names. shape: of the full stack; index: this rank's part."""


class ClippedExperts(Experts):
    """E feed-forward networks of C -> F -> C channels with biases, of which each token uses `per_token`.

    The activation is that of `ops.clipped_experts`, with its alpha and limit. Rows of gate (even) and up (odd)
    alternate. Ranks shard F; the output is summed over ranks, of which the first adds the bias of down.
    """

    gate_up_bias: Tensor
    down_bias: Tensor

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        *,
        per_token: int,
        alpha: float,
        limit: float,
        ranks: Ranks = ONE,
    ) -> None:
        Weighted.__init__(self)
        if ranks.experts is not None:
            raise ValueError("ep: experts of gpt-oss cannot be divided among ranks; shard them (tp)")
        self.own = slice(0, num_experts)
        if ranks.segments:
            raise ValueError("tp_segments: experts with a bias, such as gpt-oss's, are not cut into segments")
        self.num_experts, self.per_token, self.ranks, self.segments = num_experts, per_token, ranks, 0
        self.alpha, self.limit, self.width, self.full_inner = alpha, limit, width, inner
        self.inner = ranks.share("expert size", inner, unit=ranks.cut)
        rows, columns = slice(2 * self.inner.start, 2 * self.inner.stop), slice(0, width)
        inner_size = self.inner.stop - self.inner.start
        gate_up, down = [], []
        for entry in range(num_experts):
            shape, name = (2 * inner, width), f"{entry}.gate_up_proj"
            gate_up.append(Part(name=name, shape=shape, rows=rows, columns=columns, entry=entry))
            shape, name = (width, inner), f"{entry}.down_proj"
            down.append(Part(name=name, shape=shape, rows=columns, columns=self.inner, entry=entry))
        self.gate_up_proj = Matrix((num_experts, 2 * inner_size, width), gate_up)
        self.down_proj = Matrix((num_experts, width, inner_size), down)

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        super().create_parameters(name, formats, dtype)
        for key, matrix in (("gate_up_bias", self.gate_up_proj), ("down_bias", self.down_proj)):
            values = torch.empty(matrix.shape[:2], dtype=dtype)
            self.register_parameter(key, nn.Parameter(values, requires_grad=False))

    def matmuls(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self.gate_up_proj.adapter is not None or self.down_proj.adapter is not None:
            raise ValueError("experts of gpt-oss take no adapters; adapt the other layers")
        (gate_up, up_scales), (down, down_scales) = _weight(self.gate_up_proj), _weight(self.down_proj)
        stacks = (gate_up, up_scales, self.gate_up_bias, down, down_scales, self.down_bias)
        return ops.clipped_experts(x, *stacks, weights, ids, alpha=self.alpha, limit=self.limit)  # type: ignore[no-any-return]

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        num, every = self.num_experts, slice(0, self.num_experts)
        rows, columns = slice(2 * self.inner.start, 2 * self.inner.stop), slice(0, self.width)
        stacks: tuple[tuple[str, Matrix, tuple[int, int], Index], ...] = (
            ("gate_up_proj", self.gate_up_proj, (2 * self.full_inner, self.width), (rows, columns)),
            ("down_proj", self.down_proj, (self.width, self.full_inner), (columns, self.inner)),
        )
        for key, matrix, shape, index in stacks:
            if matrix.format.has_weight:  # plain files have [E, inputs, outputs]
                stored, at = (num, *shape[::-1]), (every, *index[::-1])
                yield f"{name}.{key}", Destination(into=matrix.weight.mT, shape=stored, index=at)
            elif isinstance(matrix.format, StackFormat):
                for end, destination in matrix.format.stack_destinations(matrix, (num, *shape), (every, *index)):
                    yield f"{name}.{key}_{end}", destination
            else:
                raise ValueError(f"{name}.{key}: experts of gpt-oss are plain or MXFP4, not {matrix.format}")
        yield f"{name}.gate_up_proj_bias", self._bias(self.gate_up_bias, 2 * self.full_inner, rows)
        yield f"{name}.down_proj_bias", self._bias(self.down_bias, self.width, columns)

    def _bias(self, into: Tensor, size: int, index: slice) -> Destination:
        return Destination(into=into, shape=(self.num_experts, size), index=(slice(0, self.num_experts), index))

    def randomize(self, generator: torch.Generator) -> None:
        super().randomize(generator)
        self.gate_up_bias.fill_(0.1)
        self.down_bias.fill_(0.1)

    def finish(self) -> None:
        if self.ranks.rank:
            self.down_bias.zero_()
        super().finish()

    @property
    def num_values(self) -> int:
        return super().num_values + self.gate_up_bias.numel() + self.down_bias.numel()


def _weight(matrix: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weight of a stack as `ops.clipped_experts` takes it: codes with scales, or values."""
    codes = getattr(matrix, "codes", None)
    return (matrix.format.values(matrix), None) if codes is None else (codes, matrix.scales)
