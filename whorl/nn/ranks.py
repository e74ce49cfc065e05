"""Ranks that hold a model together: which part each has, and how parts become a whole again."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import collectives

_FEW_BYTES = 1 << 19  # gathered by a rank: below this a second collective costs more than the bytes it saves


class Unit(NamedTuple):
    """The rows and the columns of a matrix that only make sense together: shares are cut at multiples of these."""

    rows: int = 1
    columns: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Tensor parallelism: this process is `rank` of `size` that hold a model together."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed's; None: all processes
    unit: Unit = Unit()  # noqa: RUF009 (a tuple); of all the formats that the model's weights are in

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor parallel: rank {self.rank} of {self.size}; expected 0 <= rank < size")

    @property
    def cut(self) -> int:
        """Where a size is cut that is the rows of one matrix and the columns of another, as a feed-forward one is."""
        return math.lcm(*self.unit)

    def share(self, what: str, total: int, *, unit: int = 1) -> slice:
        """This rank's part of `total` rows, cut at multiples of `unit`. Parts are equal where they can be, else cut at
        multiples of 16 for the sake of aligned reads, or where that leaves a rank nothing, at any unit."""
        aligned = math.lcm(unit, 16)
        if total % (self.size * unit) and total % 16 == 0 and total >= aligned * self.size:
            unit = aligned
        units = -(-total // unit)  # the last may be cut short
        if units < self.size:
            of = f" units of {unit}" if unit > 1 else ""
            raise ValueError(
                f"tensor parallel: {what}: {units}{of} cannot be shared by {self.size} ranks: take {units} or fewer"
            )
        first, end = (units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return slice(first, min(end, total))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[slice, slice]:
        """This rank's query heads and the key heads they see.

        Key heads are shared with all their queries. Where there are more ranks than key heads, a rank has one, several
        ranks have the same, and those share its queries.
        """
        group = num_heads // num_kv_heads
        if num_heads < self.size:
            self.share("query heads", num_heads)  # refuses
        if num_kv_heads >= self.size:
            kv = self.share("key heads", num_kv_heads)
            return slice(kv.start * group, kv.stop * group), kv
        head = self.rank * num_kv_heads // self.size
        first, end = (-(-each * self.size // num_kv_heads) for each in (head, head + 1))  # ranks that have this head
        mine = Ranks(rank=self.rank - first, size=end - first).share(f"query heads of key head {head}", group)
        return slice(head * group + mine.start, head * group + mine.stop), slice(head, head + 1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of x [T, N], in rank order, in fp32 and rounded once: a row's bits are its own affair.

        Each rank adds up T / size rows and hands them round, so as many bytes move as in an all-reduce. Few bytes take
        one turn instead of two: every rank gets all parts and adds them up itself, to the same bits. In a captured
        graph it is one node, which `whorl.passes` may take apart.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling() or self.size * x.nbytes > _FEW_BYTES:
            return collectives.ordered_all_reduce(x, collectives.group_name(self.group))
        all_parts = x.new_empty(self.size * x.shape[0], x.shape[1])
        _all_gather(all_parts, x.contiguous(), self.group)
        return self._add(all_parts).to(x.dtype)

    def _add(self, parts: Tensor) -> Tensor:
        first, *others = parts.unflatten(0, (self.size, -1)).float()
        for other in others:
            first = first + other
        return first

    def gather(self, x: Tensor) -> Tensor:
        """x [T, N] of every rank side by side: [T, size * N]."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], x.shape[1])
        _all_gather(out, x.contiguous(), self.group)
        return out.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)


def _all_gather(out: Tensor, x: Tensor, group: Any) -> None:
    from torch import distributed

    # torch 2.13 has given it another name and warns of the old one
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, x, group=group)


ONE = Ranks()
