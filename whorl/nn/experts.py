"""The feed-forward networks of a mixture of experts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .ranks import ONE, Ranks
from .weight import Format, Formats, Index, Matrix, Part, Slot, Weighted
from .weights.dense import Dense


class Experts(Weighted):
    """E feed-forward networks of C -> F -> C, stacked, of which a token takes `per_token`; ranks share F."""

    def __init__(self, num_experts: int, width: int, inner: int, *, per_token: int, ranks: Ranks = ONE) -> None:
        super().__init__()
        self.num_experts, self.per_token, self.ranks = num_experts, per_token, ranks
        self.inner = ranks.share("expert size", inner, unit=ranks.cut)
        held, whole = self.inner.stop - self.inner.start, slice(0, width)
        gate_up, down = [], []
        for entry in range(num_experts):
            for first, name in ((0, "gate_proj"), (held, "up_proj")):
                shape, source = (inner, width), f"{entry}.{name}"
                part = Part(name=source, shape=shape, rows=self.inner, columns=whole, first=first, entry=entry)
                gate_up.append(part)
            name, shape = f"{entry}.down_proj", (width, inner)
            down.append(Part(name=name, shape=shape, rows=whole, columns=self.inner, entry=entry))
        self.gate_up_proj = Matrix((num_experts, 2 * held, width), gate_up)
        self.down_proj = Matrix((num_experts, width, held), down)

    def hold(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        self.gate_up_proj.hold(f"{name}.gate_up_proj", formats, dtype)
        self.down_proj.hold(f"{name}.down_proj", formats, dtype)
        if self.gate_up_proj.format != self.down_proj.format:
            raise ValueError(
                f"{name}: experts have one format, and the checkpoint has gate and up in {self.gate_up_proj.format}, "
                f"down in {self.down_proj.format}"
            )

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        product = self.gate_up_proj.format.experts
        return self.ranks.sum(product(self.gate_up_proj, self.down_proj, x, weights, ids))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield from self.gate_up_proj.slots(f"{name}.gate_up_proj")
        yield from self.down_proj.slots(f"{name}.down_proj")

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
        """Of the experts that a batch chooses if routing is uniform: a share of 1 - (1 - K / E)^B."""
        return super().step_bytes(batch) * (1 - (1 - self.per_token / self.num_experts) ** batch)

    @property
    def num_values(self) -> int:
        return self.gate_up_proj.num_values + self.down_proj.num_values

    def prompt_flops(self, num_tokens: int) -> float:
        all_of_them = self.gate_up_proj.prompt_flops(num_tokens) + self.down_proj.prompt_flops(num_tokens)
        return all_of_them * self.per_token / self.num_experts


class StackedExperts(Experts):
    """The same of checkpoints that hold all experts in two tensors, [E, 2 F, C] and [E, C, F], or transposed.

    Where weights are quantised the format names its own tensors, one by one.
    """

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        if not isinstance(self.gate_up_proj.format, Dense):
            yield from super().slots(name)
            return
        num, width, inner = self.num_experts, self.down_proj.shape[1], self.down_proj.parts[0].shape[1]
        every, whole, held = slice(0, num), slice(0, width), self.inner
        gate_up, down = self.gate_up_proj.weight, self.down_proj.weight
        if held == slice(0, inner):
            first = _stacked(gate_up, (num, 2 * inner, width), (every, slice(0, 2 * inner), whole))
        else:  # a rank's rows of gate and of up lie apart
            gate, up = gate_up.chunk(2, 1)
            second = _stacked(up, (num, 2 * inner, width), (every, slice(inner + held.start, inner + held.stop), whole))
            first = _stacked(gate, (num, 2 * inner, width), (every, held, whole), second)
        yield f"{name}.gate_up_proj", first
        yield f"{name}.down_proj", _stacked(down, (num, width, inner), (every, whole, held))


def _stacked(into: Tensor, shape: tuple[int, ...], index: Index, *more: Slot) -> Slot:
    return Slot(into=into, shape=shape, index=index, more=more, is_either_way=True)
