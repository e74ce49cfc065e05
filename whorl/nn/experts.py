"""A mixture of experts: the feed-forward networks, and a router that is balanced by a bias."""

from collections.abc import Iterable, Iterator
from types import MappingProxyType

import torch
from torch import Tensor

from whorl import ops

from .ranks import ONE, SHARED, Ranks
from .segments import expert_segments
from .weight import Destination, Format, Formats, Forms, Index, Matrix, Part, Plain, Routing, Weighted


class Experts(Weighted):
    """E feed-forward networks (SwiGLU) of C -> F -> C channels, of which each token uses `per_token`.

    num_experts: E; width: C; inner: F. The matrices of all experts are stacked, gate above up: gate_up_proj
    [E, 2 F, C] and down_proj [E, C, F]. Ranks shard F; the output is summed over ranks. With `ranks.experts` each rank
    has E / ranks whole experts instead, and the outputs of choices are exchanged: the bits are those of one rank.
    """

    def __init__(self, num_experts: int, width: int, inner: int, *, per_token: int, ranks: Ranks = ONE) -> None:
        super().__init__()
        self.num_experts, self.per_token, self.ranks = num_experts, per_token, ranks
        self.own = _own_experts(num_experts, ranks)
        self.inner = ranks.share("expert size", inner, unit=ranks.cut) if ranks.experts is None else slice(0, inner)
        self.segments = ranks.own_segments("expert size", inner, self.inner) if ranks.segments else 0
        inner_size, all_columns = self.inner.stop - self.inner.start, slice(0, width)
        gate_up, down = [], []
        for entry, expert in enumerate(range(num_experts)[self.own]):
            for first, name in ((0, "gate_proj"), (inner_size, "up_proj")):
                shape, source = (inner, width), f"{expert}.{name}"
                part = Part(name=source, shape=shape, rows=self.inner, columns=all_columns, first=first, entry=entry)
                gate_up.append(part)
            name, shape = f"{expert}.down_proj", (width, inner)
            down.append(Part(name=name, shape=shape, rows=all_columns, columns=self.inner, entry=entry))
        num_own = self.own.stop - self.own.start
        self.gate_up_proj = Matrix((num_own, 2 * inner_size, width), gate_up)
        self.down_proj = Matrix((num_own, width, inner_size), down)
        self.gate_up_proj.takes_adapters = self.down_proj.takes_adapters = ranks.experts is None

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        self.gate_up_proj.create_parameters(f"{name}.gate_up_proj", formats, dtype)
        self.down_proj.create_parameters(f"{name}.down_proj", formats, dtype)
        if self.gate_up_proj.format != self.down_proj.format:
            raise ValueError(
                f"{name}: experts must have one format, and the checkpoint has gate and up in "
                f"{self.gate_up_proj.format}, down in {self.down_proj.format}"
            )

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, C]; x: [T, C]; weights, ids: [T, K], of `ops.route`.

        Inside `sharing` it is that of this rank's tokens.
        """
        if self.segments:
            return self.ranks.sum_segments(self._segments(x, weights, ids))
        if self.ranks.experts is None:
            return self.ranks.sum(self.matmuls(x, weights, ids))
        own = self.ranks.experts.padded(self._divided(self.ranks.experts, x, weights, ids), len(x))
        return own if SHARED.get() is not None else self.ranks.experts.all_rows(own)[: len(x)]

    def _divided(self, ranks: Ranks, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the output of this rank's tokens: each rank computes the choices of its experts, for all tokens, and
        adds the choices of its tokens, in the order of one rank."""
        num_own, k = self.own.stop - self.own.start, ids.shape[1]
        owners = ids // num_own
        choices = (owners.flatten() == ranks.rank).nonzero().flatten()
        rows, places, counts = ops.permute(x[choices // k], ids.flatten()[choices, None] - self.own.start, num_own)
        hidden = ops.glu(self.gate_up_proj.format.grouped(self.gate_up_proj, rows, counts))
        outputs = self.down_proj.format.grouped(self.down_proj, hidden, counts)[places.flatten()]
        outputs = ranks.exchange(outputs, owners)
        order = torch.arange(len(outputs), dtype=torch.int32, device=x.device).view(-1, k)
        return ops.unpermute(outputs, order, ranks.own_rows(weights)[: len(order)])  # type: ignore[no-any-return]

    def _segments(self, x: Tensor, weights: Tensor, ids: Tensor) -> list[Tensor]:
        stacks = self.gate_up_proj, self.down_proj
        if any(stack.adapter is not None or not stack.format.has_weight for stack in stacks):
            raise ValueError("tp_segments: experts must be plain, without adapters")
        gate_up, down = (stack.format.values(stack) for stack in stacks)
        return expert_segments(x, gate_up, down, weights, ids, self.segments)

    def matmuls(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return this rank's summand of the output.

        This is the one place where experts multiply. Where an adapter adds to one of the two matmuls, they run one
        after the other instead of in one kernel, for all tokens: a token's bits do not depend on the others' adapters.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        if gate_up.adapter is None and down.adapter is None:
            return gate_up.format.experts(gate_up, down, x, weights, ids)
        rows, *routing = ops.permute(x, ids, self.num_experts)
        hidden = ops.glu(_adapted(gate_up, rows, Routing(*routing)))
        return ops.unpermute(_adapted(down, hidden, Routing(*routing)), routing[0], weights)  # type: ignore[no-any-return]

    def elsewhere(self, name: str) -> Iterable[str]:
        own = range(self.num_experts)[self.own]
        return (f"{name}.{expert}." for expert in range(self.num_experts) if expert not in own)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        yield from self.gate_up_proj.destinations(f"{name}.gate_up_proj")
        yield from self.down_proj.destinations(f"{name}.down_proj")

    def forms(self, name: str) -> Iterator[Forms]:
        """Yield the forms of both stacks: a tensor for each expert's projection, or one for all, as transformers has it
        in memory whatever its checkpoints have."""
        names = "gate_up_proj", "down_proj"
        for key, stack, whole in zip(names, (self.gate_up_proj, self.down_proj), self.stacked(), strict=True):
            yield dict(stack.destinations(f"{name}.{key}")), {f"{name}.{key}": whole}

    def stacked(self) -> tuple[Destination, Destination]:
        """Return the destinations of gate_up_proj [E, 2 F, C] and down_proj [E, C, F], which may come transposed."""
        num, width, inner = self.num_experts, self.down_proj.shape[1], self.down_proj.parts[0].shape[1]
        all_experts, all_columns, shard = self.own, slice(0, width), self.inner
        gate_up, down = self.gate_up_proj.weight, self.down_proj.weight
        if shard == slice(0, inner):
            first = _stacked(gate_up, (num, 2 * inner, width), (all_experts, slice(0, 2 * inner), all_columns))
        else:  # a rank's rows of gate and of up are two ranges of the checkpoint's tensor
            gate, up = gate_up.chunk(2, 1)
            second = _stacked(
                up, (num, 2 * inner, width), (all_experts, slice(inner + shard.start, inner + shard.stop), all_columns)
            )
            first = _stacked(gate, (num, 2 * inner, width), (all_experts, shard, all_columns), second)
        return first, _stacked(down, (num, width, inner), (all_experts, all_columns, shard))

    def randomize(self, generator: torch.Generator) -> None:
        self.gate_up_proj.randomize(generator)
        self.down_proj.randomize(generator)

    def finish(self) -> None:
        self.gate_up_proj.finish()
        self.down_proj.finish()

    def unpack(self, plain: Format) -> None:
        self.gate_up_proj.unpack(plain)
        self.down_proj.unpack(plain)

    def step_bytes(self, batch: int) -> float:
        """Return the bytes of as many experts as `independent` returns; a real step may read others."""
        return self.read_bytes(self.independent(batch))

    def read_bytes(self, num_distinct: float) -> float:
        """Return the bytes of so many experts."""
        num_own = self.own.stop - self.own.start
        return sum(parameter.nbytes for parameter in self.parameters()) / num_own * num_distinct / self._num_shares

    @property
    def _num_shares(self) -> int:
        """How many ranks divide the experts."""
        return 1 if self.ranks.experts is None else self.ranks.experts.size

    def independent(self, batch: int) -> float:
        """Return how many different experts `batch` tokens use, in the mean, if they choose uniformly and independently
        of each other: E (1 - (1 - K / E)^B)."""
        return self.num_experts * (1 - (1 - self.per_token / self.num_experts) ** batch)

    @property
    def num_values(self) -> int:
        return self.gate_up_proj.num_values + self.down_proj.num_values

    def prompt_flops(self, num_tokens: int) -> float:
        dense_flops = self.gate_up_proj.prompt_flops(num_tokens) + self.down_proj.prompt_flops(num_tokens)
        return dense_flops * self.per_token / self.num_experts


class StackedExperts(Experts):
    """Experts of checkpoints that store all of them in two tensors, [E, 2 F, C] and [E, C, F], or transposed.

    A quantised checkpoint of such a model has separate tensors for each expert, as for `Experts`.
    """

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        if not self.gate_up_proj.format.has_weight:
            yield from super().destinations(name)
            return
        gate_up, down = self.stacked()
        yield f"{name}.gate_up_proj", gate_up
        yield f"{name}.down_proj", down


def _own_experts(num_experts: int, ranks: Ranks) -> slice:
    """Return the experts that this rank has; ValueError if they cannot be divided equally."""
    if ranks.experts is None:
        return slice(0, num_experts)
    if num_experts % ranks.experts.size:
        raise ValueError(f"ep is {ranks.experts.size}, expected a divisor of the model's {num_experts} experts")
    return ranks.experts.share("experts", num_experts)


def _adapted(stack: Matrix, rows: Tensor, routing: Routing) -> Tensor:
    """Return the product of sorted rows with the matrices of a stack, and what its adapter adds."""
    y = stack.format.grouped(stack, rows, routing.counts)
    return y if stack.adapter is None else stack.adapter(y, rows, routing)


def _stacked(into: Tensor, shape: tuple[int, ...], index: Index, *more: Destination) -> Destination:
    return Destination(into=into, shape=shape, index=index, more=more, is_either_way=True)


class Router(Plain):
    """The linear layer that scores E experts, and the bias that is added to scores only for choosing among them.

    Weight [E, C] and bias [E] are fp32 whatever the model's dtype: rounded scores would choose other experts.
    """

    dtype = torch.float32
    sources = MappingProxyType({"bias": "e_score_correction_bias"})

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__(weight=(num_experts, width), bias=(num_experts,))
        self.width, self.num_experts = width, num_experts

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [T, E] fp32 of x [T, C], without the bias; `ops.route` makes scores of them."""
        return ops.linear.unchecked(x.float(), self.weight)  # type: ignore[no-any-return]

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=self.width**-0.5, generator=generator)
        self.bias.zero_()

    def prompt_flops(self, num_tokens: int) -> float:
        return 2 * self.width * self.num_experts * num_tokens
