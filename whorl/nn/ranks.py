"""The ranks of a tensor-parallel group: which shard each has, and how shards are summed and gathered.

With sequence parallelism, in a call inside `sharing`, a rank has only its share of the tokens from a sum over ranks to
the next matmul that needs all of them: residual and norms are [ceil(T / p), C] there. The sum is a reduce-scatter
(`Ranks.sum`), and the matmul gathers its input (`all_tokens`). The bits are those of any other call, unless int8 rounds
what is gathered.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import collectives

from .segments import tree_sum

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
    experts: "Ranks | None" = None  # among whom whole experts are divided; None: every rank has a shard of each
    segments: int = 0  # into which row-parallel matmuls cut K, see segments.py; 0: one for each rank, in rank order

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor parallel: rank {self.rank} of {self.size}; expected 0 <= rank < size")
        if self.segments and (self.segments & (self.segments - 1) or self.segments % self.size):
            raise ValueError(
                f"tensor parallel: {self.segments} segments for {self.size} ranks, expected a power of two that is a "
                f"multiple of the ranks"
            )

    def own_segments(self, name: str, total: int, share: slice) -> int:
        """Return how many segments of `total` channels this rank has; share: its channels.

        Raises ValueError where `share` is not a branch of the tree.
        """
        size = total // self.size
        if total % self.segments or share != slice(self.rank * size, (self.rank + 1) * size):
            raise ValueError(
                f"tensor parallel: {name}: {total} channels cannot be cut into {self.segments} equal segments of which "
                f"rank {self.rank} of {self.size} has channels {share.start} to {share.stop}: take fewer ranks, or "
                f"none of tp_segments"
            )
        return self.segments // self.size

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
        # The ranks that have this head.
        first, end = (-(-kv_head * self.size // num_kv_heads) for kv_head in (head, head + 1))
        share = Ranks(rank=self.rank - first, size=end - first).share(f"query heads of key head {head}", group)
        return slice(head * group + share.start, head * group + share.stop), slice(head, head + 1)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of x [T, N], in rank order, in fp32 and rounded once.

        Therefore the bits of a token do not depend on the other tokens. Each rank sums T / size rows and sends them to
        the others, which moves as many bytes as an all-reduce. A small x takes one collective instead of two: every
        rank gathers all summands and adds them itself, to the same bits. Inside `sharing` a rank gets its tokens' sums
        only.
        """
        if self.size == 1:
            return x
        if (shared := SHARED.get()) is not None:
            return shared.scatter(x)
        if self.size * x.nbytes > _FEW_BYTES:
            return collectives.ordered_all_reduce(x, collectives.group_name(self.group))
        summands = collectives.gather_rows(x, self.size, self.group)
        return collectives.sum_in_rank_order(summands.view(self.size, *x.shape), x.dtype)

    def sum_segments(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of all ranks' segments in one tree; parts: this rank's, [T, N] each. Rounded once."""
        own = tree_sum(parts)
        if self.size == 1:
            return own.to(parts[0].dtype)
        # A single segment is sent as it is; a sum of several has more bits than their dtype.
        sent = parts[0] if len(parts) == 1 else own
        totals = collectives.gather_rows(sent, self.size, self.group).view(self.size, *own.shape)
        return tree_sum(totals.unbind()).to(parts[0].dtype)

    def gather(self, x: Tensor) -> Tensor:
        """Return the x [T, N] of all ranks next to each other, in rank order: [T, size * N]."""
        if self.size == 1:
            return x
        return collectives.gather_rows(x, self.size, self.group).view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def own_rows(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, ...] that are this rank's; fewer on the last ranks."""
        count = collectives.rows_per_rank(x.shape[0], self.size)
        return x[self.rank * count : (self.rank + 1) * count]

    def padded(self, x: Tensor, total: int) -> Tensor:
        """Return this rank's rows of `total` with zeros, so that every rank has as many."""
        missing = collectives.rows_per_rank(total, self.size) - x.shape[0]
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x

    def all_rows(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, one after the other."""
        return x if self.size == 1 else collectives.gather_rows(x, self.size, self.group)

    def exchange(self, rows: Tensor, owners: Tensor) -> Tensor:
        """Return the rows of all choices of this rank's tokens, [tokens * K, C], from the ranks that computed them.

        owners: [T, K], the rank that computed each choice, known to all. rows: [n, C], those of this rank's choices in
        the order of `owners`. A rank's tokens are those of `collectives.local_rows`. Rows are moved, never added.
        """
        per_rank = collectives.rows_per_rank(owners.shape[0], self.size) * owners.shape[1]
        flat = owners.flatten()
        own = flat[self.rank * per_rank : (self.rank + 1) * per_rank]
        readers = (flat == self.rank).nonzero().flatten() // per_rank
        places = [(own == rank).nonzero().flatten() for rank in range(self.size)]
        sent = readers.bincount(minlength=self.size).tolist()
        received = collectives.exchange_rows(rows, sent, [len(place) for place in places], self.group)
        out = rows.new_empty(len(own), rows.shape[1])
        out[torch.cat(places)] = received
        return out


ONE = Ranks()


# ---- sequence parallelism


@dataclass(kw_only=True, slots=True)
class SharedTokens:
    """The tokens of a call that the ranks of a group share: each has the rows of ceil(T / p) of them, the last ones
    padded with zeros. summed, gathered: the bytes of a token in every exchange of the call.

    tokens: T. group: its name. quantize: gathers send int8 with a scale for each token, which rounds. fuse: part by
    part, a matmul runs beside the exchange before or after it.
    """

    tokens: int
    group: str
    quantize: bool = False
    fuse: bool = False
    summed: list[int] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    num_fused: int = 0

    def scatter(self, x: Tensor) -> Tensor:
        """Return the sums over ranks of this rank's tokens, of x [T, N]."""
        self.summed.append(x.shape[1] * x.element_size())
        return collectives.ordered_reduce_scatter(x, self.group)

    def scatter_matmul(self, multiply: collectives.Multiply, x: Tensor, width: int) -> Tensor:
        """Return `scatter` of multiply(x), [T, width]."""
        if not self.fuse:
            return self.scatter(multiply(x))
        self.summed.append(width * x.element_size())
        self.num_fused += 1
        return collectives.overlapped_reduce_scatter(x, multiply, width, self.group)

    def gather(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """Return all ranks' x, [T, N]. exact: never quantised."""
        if format := self._format(x, exact=exact):
            return collectives.all_gather_quantized(x, self.tokens, self.group, format)
        return collectives.all_gather(x, self.tokens, self.group)

    def gather_matmul(
        self, multiply: collectives.Multiply, x: Tensor, width: int, *, as_codes: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return multiply of `gather` of x, [T, width], and `gather` of x. as_codes: multiply quantises its rows, which
        are gathered as these codes; then the second is not exact."""
        if not self.fuse and not as_codes:
            x = self.gather(x)
            return multiply(x), x
        if as_codes:
            format = "codes"
            self.gathered.append(x.shape[1] + collectives.SCALE_BYTES)
        else:
            format = self._format(x)
        if not self.fuse:
            rows = collectives.all_gather_quantized(x, self.tokens, self.group, format)
            return multiply(rows).to(x.dtype), rows
        self.num_fused += 1
        x, y = collectives.overlapped_all_gather(x, [(multiply, width)], self.tokens, self.group, format)
        return y, x

    def _format(self, x: Tensor, *, exact: bool = False) -> str:
        """Return the format in which x is gathered, "" for its own; its bytes are counted."""
        is_quantized = self.quantize and not exact and x.shape[1] >= collectives.MIN_QUANTIZED
        self.gathered.append(x.shape[1] + collectives.SCALE_BYTES if is_quantized else x.shape[1] * x.element_size())
        return "int8" if is_quantized else ""


SHARED: ContextVar[SharedTokens | None] = ContextVar("shared tokens", default=None)


@contextlib.contextmanager
def sharing(shared: SharedTokens) -> Iterator[None]:
    """Let the ranks share the tokens of the model's forward that is called in this context."""
    token = SHARED.set(shared)
    try:
        yield
    finally:
        SHARED.reset(token)


def all_tokens(x: Tensor, *, exact: bool = False) -> Tensor:
    """Return x [T, N] of all tokens; inside `sharing`, x is of this rank's and is gathered. exact: never quantised."""
    shared = SHARED.get()
    return x if shared is None else shared.gather(x, exact=exact)


def own_tokens(x: Tensor) -> Tensor:
    """Return the rows of x [T, N] that this rank has: all, except inside `sharing`."""
    shared = SHARED.get()
    return x if shared is None else collectives.local_rows(x, shared.group)
