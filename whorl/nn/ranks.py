"""The ranks of a tensor-parallel group: which shard each has, and how shards are summed and gathered."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import collectives

_FEW_BYTES = 1 << 19  # gathered by a rank: with fewer, a second collective costs more than the bytes it saves


class Unit(NamedTuple):
    """The rows and columns of a matrix that cannot be separated: shards are cut at multiples of these."""

    rows: int = 1
    columns: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """A tensor-parallel group: this process is `rank` of `size` that hold a model together.

    Raises ValueError unless 0 <= rank < size.
    """

    rank: int = 0
    size: int = 1
    group: Any = None  # a process group of torch.distributed; None: all processes
    unit: Unit = Unit()  # noqa: RUF009 (a tuple); common to all formats of the model's weights

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor parallel: rank {self.rank} of {self.size}; expected 0 <= rank < size")

    @property
    def cut(self) -> int:
        """The unit at which the inner size of a feed-forward network is cut.

        It is rows of the first matrix (gate, up) and columns of the second (down), so it must fit both units.
        """
        return math.lcm(*self.unit)

    def share(self, name: str, total: int, *, unit: int = 1) -> slice:
        """Return this rank's share of `total` rows, columns or heads, cut at multiples of `unit`.

        Shares are equal where that is possible. Otherwise, where `total` is a multiple of 16, they are cut at multiples
        of 16, too, for aligned reads, unless a rank would have nothing. name: what is shared, for the error. Raises
        ValueError when there are fewer units than ranks.
        """
        aligned = math.lcm(unit, 16)
        if total % (self.size * unit) and total % 16 == 0 and total >= aligned * self.size:
            unit = aligned
        units = -(-total // unit)  # the last unit may be partial
        if units < self.size:
            of = f" units of {unit}" if unit > 1 else ""
            raise ValueError(
                f"tensor parallel: {name}: {units}{of} cannot be shared by {self.size} ranks: take {units} or fewer"
            )
        first, end = (units * rank // self.size * unit for rank in (self.rank, self.rank + 1))
        return slice(first, min(end, total))

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[slice, slice]:
        """Return this rank's query heads and the KV heads they attend to.

        A KV head goes with all its query heads. With more ranks than KV heads, several ranks have the same KV head, and
        they share its query heads. Raises ValueError when there are fewer query heads than ranks.
        """
        group = num_heads // num_kv_heads
        if num_heads < self.size:
            self.share("query heads", num_heads)  # raises the error
        if num_kv_heads >= self.size:
            kv = self.share("key heads", num_kv_heads)
            return slice(kv.start * group, kv.stop * group), kv
        head = self.rank * num_kv_heads // self.size
        first, end = (
            -(-kv_head * self.size // num_kv_heads) for kv_head in (head, head + 1)
        )  # ranks that have this head
        share = Ranks(rank=self.rank - first, size=end - first).share(f"query heads of key head {head}", group)
        return slice(head * group + share.start, head * group + share.stop), slice(head, head + 1)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of x [T, N], in rank order, in fp32 and rounded once.

        Therefore the bits of a token do not depend on the other tokens. Each rank sums T / size rows and sends them to
        the others, which moves as many bytes as an all-reduce. A small x takes one collective instead of two: every
        rank gathers all summands and adds them itself, to the same bits. In a captured graph the sum is one node, which
        `whorl.passes` may split.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling() or self.size * x.nbytes > _FEW_BYTES:
            return collectives.ordered_all_reduce(x, collectives.group_name(self.group))
        summands = x.new_empty(self.size * x.shape[0], x.shape[1])
        _all_gather(summands, x.contiguous(), self.group)
        return self._add(summands).to(x.dtype)

    def _add(self, summands: Tensor) -> Tensor:
        total, *addends = summands.unflatten(0, (self.size, -1)).float()
        for addend in addends:
            total = total + addend
        return total

    def gather(self, x: Tensor) -> Tensor:
        """Return the x [T, N] of all ranks next to each other, in rank order: [T, size * N]."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], x.shape[1])
        _all_gather(out, x.contiguous(), self.group)
        return out.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)


def _all_gather(out: Tensor, x: Tensor, group: Any) -> None:
    from torch import distributed

    # torch 2.13 renamed it and warns of the old name.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, x, group=group)


ONE = Ranks()
