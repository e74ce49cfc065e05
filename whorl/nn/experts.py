"""The feed-forward networks of a mixture of experts."""

from collections.abc import Iterator

from torch import Tensor, nn

from whorl import ops

from .ranks import ONE, Ranks
from .step import Rows
from .weight import ALL, Slot, parameter


class Experts(nn.Module):
    """E feed-forward networks of C -> F -> C, stacked; ranks share F."""

    def __init__(self, num_experts: int, width: int, inner: int, *, ranks: Ranks = ONE) -> None:
        super().__init__()
        self.shape, self.ranks = (num_experts, width, inner), ranks
        self.inner = ranks.share("expert size", inner)
        held = self.inner.stop - self.inner.start
        self.gate_up_proj = parameter(num_experts, 2 * held, width)
        self.down_proj = parameter(num_experts, width, held)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, rows: Rows) -> Tensor:
        return self.ranks.sum(ops.experts(x, self.gate_up_proj, self.down_proj, weights, ids, rows=rows))

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        num_experts, width, inner = self.shape
        for expert in range(num_experts):
            gate, up = self.gate_up_proj[expert].chunk(2)
            source, index = f"{name}.{expert}", (self.inner, ALL)
            yield f"{source}.gate_proj.weight", Slot(into=gate, shape=(inner, width), index=index)
            yield f"{source}.up_proj.weight", Slot(into=up, shape=(inner, width), index=index)
            down = Slot(into=self.down_proj[expert], shape=(width, inner), index=(ALL, self.inner))
            yield f"{source}.down_proj.weight", down
