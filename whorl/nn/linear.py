"""A linear layer whose weight may be sharded over ranks."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from .ranks import ONE, SHARED, Ranks
from .segments import linear_segments
from .weight import Destination, Formats, Matrix, Norm, Part, by_tensor


class Linear(Matrix):
    """y = x W^T + b, where W may have several projections of the checkpoint one below the other.

    inputs: columns of W. outputs: rows of W, or the rows of each projection by its name in the checkpoint. shard: how W
    is split over ranks, by Megatron's names. "column": each rank has a share of every projection's rows; "row": a share
    of the columns, and y is summed over ranks; None: every rank has all of W. parts: this rank's rows of each
    projection or, with "row", its columns; default: shares as equal as possible (`Ranks.share`).
    pieces: instead of `parts`, this rank's rows in the order of W, each a range of a named projection: for projections
    whose rows are in another order in the checkpoint, or are not one range on a rank.
    Attribute splits: this rank's rows of each projection, or of each piece.
    """

    bias: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        shard: Literal["column", "row"] | None = None,
        parts: Sequence[slice] | None = None,
        pieces: Sequence[tuple[str, slice]] | None = None,
        ranks: Ranks = ONE,
    ) -> None:
        sizes = {"": outputs} if isinstance(outputs, int) else dict(outputs)
        ranks = ranks if shard else ONE
        sharded = {"inputs": inputs} if shard == "row" else sizes
        columns = slice(0, inputs)
        if pieces is None:
            shares = parts or [ranks.share(name or "outputs", size, unit=ranks.cut) for name, size in sharded.items()]
            rows = [slice(0, size) for size in sizes.values()] if shard == "row" else shares
            columns = shares[0] if shard == "row" else columns
            pieces = list(zip(sizes, rows, strict=True))
        splits = [rows.stop - rows.start for _, rows in pieces]
        super().__init__(
            (sum(splits), columns.stop - columns.start),
            [
                Part(name=name, shape=(sizes[name], inputs), rows=rows, columns=columns, first=first)
                for (name, rows), first in zip(pieces, itertools.accumulate(splits, initial=0), strict=False)
            ],
        )
        self.ranks, self.splits, self.has_bias = ranks, splits, bias
        self.segments = 0
        if shard == "row" and ranks.segments:
            self.segments = ranks.own_segments("inputs of a row-parallel matmul", inputs, columns)
        # Outputs are summed, over ranks or over segments.
        self.is_partial = (shard == "row" and ranks.size > 1) or self.segments > 0

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        super().create_parameters(name, formats, dtype)
        if self.segments and not self.format.has_weight:
            raise ValueError(f"{name}: tp_segments needs plain weights, and these are {self.format}")
        self.bias = None  # a plain attribute, which is looked up faster than a parameter
        if self.has_bias:
            self.bias = nn.Parameter(torch.empty(self.shape[0], dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_partial:
            return self.matmul(x)[0]
        if self.segments:
            y = self.ranks.sum_segments(self._segments(x))
        elif (shared := SHARED.get()) is not None and self.adapter is None:
            y = shared.scatter_matmul(lambda rows: self.matmul(rows)[0], x, self.shape[0])
        else:
            y = self.ranks.sum(self.matmul(x)[0])
        return y if self.bias is None else y + self.bias

    def _segments(self, x: Tensor) -> list[Tensor]:
        if self.adapter is not None or SHARED.get() is not None:
            raise ValueError("tp_segments: neither adapters nor sequence parallelism are possible with it")
        return linear_segments(x, self.format.values(self), self.segments)

    def matmul(
        self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None, *, reads_alone: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y, normed, total): total = x + residual, normed = norm(total), and y = normed W^T + b.

        This is the one place where the layer multiplies, with the norm before it fused or not, and where an adapter
        adds to the result. norm None: x is multiplied as it is. Where the output is summed over ranks, y is this rank's
        summand, without the bias. Where ranks share tokens, x, residual and total are of this rank's tokens.
        reads_alone: the caller does not use `normed`, so ranks may exchange it as the codes that the format multiplies.
        """
        bias = None if self.is_partial else self.bias
        if norm is None:
            y, normed, total = self.format.linear(self, x, bias), x, x
        elif (shared := SHARED.get()) is not None:
            normed, total = norm(x, residual)
            as_codes = reads_alone and self.adapter is None and self.format.multiplies_codes
            bias = bias.float() if as_codes and bias is not None else bias
            y, normed = shared.gather_matmul(
                lambda rows: self.format.linear(self, rows, bias), normed, self.shape[0], as_codes=as_codes
            )
        else:
            y, normed, total = self.format.norm_linear(self, norm, x, residual, bias)
        return (y if self.adapter is None else self.adapter(y, normed)), normed, total

    def after_norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, *, reads_alone: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y, normed, total): total = x + residual, normed = norm(total), and y, this layer's output for normed.

        One kernel computes all of them where there is one. It is not for layers whose output is summed over ranks,
        because their input is a shard. residual None: total is x. reads_alone: as for `matmul`.
        """
        assert not self.is_partial, "the input of a row-sharded layer is a shard, which cannot be normalised"
        return self.matmul(x, norm, residual, reads_alone=reads_alone)

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        yield from super().destinations(name)
        if self.bias is not None:
            yield from by_tensor((f"{part.source(name)}.bias", self._bias(part)) for part in self.parts).items()

    def _bias(self, part: Part) -> Destination:
        assert self.bias is not None
        return Destination(into=self.bias[part.place], shape=part.shape[:1], index=(part.rows,))

    def randomize(self, generator: torch.Generator) -> None:
        super().randomize(generator)
        if self.bias is not None:
            self.bias.fill_(1)

    @property
    def num_values(self) -> int:
        return super().num_values + self.shape[0] * self.has_bias


class PlainLinear(Linear):
    """A linear layer that is never quantised, whatever config.json says of linear layers."""

    def create_parameters(self, name: str, formats: Formats, dtype: torch.dtype) -> None:
        from .weights.dense import ALL_DENSE  # imported here, because that module imports this package

        super().create_parameters(name, ALL_DENSE, dtype)
