"""A matrix product of which each rank may hold a part."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from whorl import ops

from .ranks import ONE, Ranks
from .step import Rows
from .weight import Slot, parameter


class Linear(nn.Module):
    """y = x W^T + b. `outputs` may name several projections of the checkpoint, held as one weight.

    shard "column": each rank holds a share of every projection's rows; "row": a share of the columns, and y is summed
    over ranks. parts: this rank's rows of each projection, or its columns; default: `Ranks.share`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        shard: Literal["column", "row"] | None = None,
        parts: Sequence[slice] | None = None,
        ranks: Ranks = ONE,
    ) -> None:
        super().__init__()
        self.sizes = {"": outputs} if isinstance(outputs, int) else dict(outputs)
        self.ranks = ranks if shard else ONE
        cut = {"inputs": inputs} if shard == "row" else self.sizes
        shares = parts or [self.ranks.share(name or "outputs", size) for name, size in cut.items()]
        whole = [slice(0, size) for size in self.sizes.values()]
        self.rows = whole if shard == "row" else list(shares)
        self.columns = shares[0] if shard == "row" else slice(0, inputs)
        self.inputs, self.is_summed = inputs, shard == "row"
        self.splits = [rows.stop - rows.start for rows in self.rows]
        self.weight = parameter(sum(self.splits), self.columns.stop - self.columns.start)
        self.bias = parameter(sum(self.splits)) if bias else None

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        if not self.is_summed or self.ranks.size == 1:
            return ops.linear.unchecked(x, self.weight, self.bias, rows=rows)
        y = self.ranks.sum(ops.linear.unchecked(x, self.weight, rows=rows))
        return y if self.bias is None else y + self.bias

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        weights = self.weight.split(self.splits)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(self.splits)
        parent = name.rpartition(".")[0]
        for (part, size), rows, weight, bias in zip(self.sizes.items(), self.rows, weights, biases, strict=True):
            source = f"{parent}.{part}" if part else name
            yield f"{source}.weight", Slot(into=weight, shape=(size, self.inputs), index=(rows, self.columns))
            if bias is not None:
                yield f"{source}.bias", Slot(into=bias, shape=(size,), index=(rows,))
