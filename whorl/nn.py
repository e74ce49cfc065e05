"""What models are made of: a step's tensors, the paged cache, and layers that know which part of a weight a rank holds.

A layer is built with the rank's share of its weights and says, as `Slot`s, where each tensor of a Hugging Face
checkpoint goes: into which view of which parameter, and which rows and columns of it. The loader needs nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from whorl import collectives, ops
from whorl.rope_config import RopeConfig
from whorl.rope_table import RopeTable, get_rope

Rows = Literal["prompt", "decode", "batch"]
Index = tuple[slice, ...]
_FEW_BYTES = 1 << 19  # gathered by a rank: below this a second collective costs more than the bytes it saves
ALL = slice(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The tensors of one forward call: T tokens of B sequences, those of a sequence side by side.

    rows: which class of kernels runs; a token's class is its role (prompt or generated), whatever runs beside it.
    max_position: highest position + 1, known on the host so that nothing waits for the device.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: block * block_size + offset of each token's cache entry; -1 writes none
    block_tables: Tensor  # [B, MB] int32
    query_starts: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32: keys that the last query of each sequence sees, new tokens included
    rows: Rows
    max_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """What one layer keeps for a token on this rank, stated before blocks are laid out."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys a query sees, itself included; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """One layer's blocks: k and v [num_blocks, block_size, HK, D]."""

    k: Tensor
    v: Tensor

    @classmethod
    def empty(
        cls, spec: CacheSpec, num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        return cls(
            k=torch.zeros(shape, dtype=dtype, device=device),
            v=torch.zeros(shape, dtype=dtype, device=device),
        )


class Model(Protocol):
    """What the engine needs of a model."""

    config: Any
    vocab_size: int
    max_length: int  # longest sequence the rotary table serves

    def cache_specs(self) -> list[CacheSpec]: ...

    def forward(self, step: Step, caches: Sequence[KVCache]) -> Tensor:
        """Hidden states [T, C], final norm included; writes the tokens' keys and values into the caches."""

    def logits(self, hidden: Tensor, *, rows: Rows = "decode") -> Tensor:
        """[N, V] fp32 from hidden [N, C]."""


# ---- ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Tensor parallelism: this process is `rank` of `size` that hold a model together."""

    rank: int = 0
    size: int = 1
    group: Any = None  # torch.distributed's; None: all processes

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor parallel: rank {self.rank} of {self.size}; expected 0 <= rank < size")

    def share(self, what: str, total: int) -> slice:
        """This rank's part of `total` rows. Parts are equal where they can be, else cut at multiples of 16 for the sake
        of aligned reads, or where that leaves a rank nothing, anywhere."""
        unit = 16 if total % self.size and total % 16 == 0 and total >= 16 * self.size else 1
        units = total // unit
        if units < self.size:
            raise ValueError(
                f"tensor parallel: {what}: {units} cannot be shared by {self.size} ranks: take {units} or fewer"
            )
        return slice(units * self.rank // self.size * unit, units * (self.rank + 1) // self.size * unit)

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


# ---- layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a checkpoint's tensor goes: its `index` part is copied `into` a view of a parameter."""

    into: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: Index


def _parameter(*shape: int) -> nn.Parameter:
    """Not initialised: a model without its weights is refused by the loader."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


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
        self.weight = _parameter(sum(self.splits), self.columns.stop - self.columns.start)
        self.bias = _parameter(sum(self.splits)) if bias else None

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


class Vocabulary(nn.Module):
    """One row per token, for the embedding and for the head. Ranks share the rows; the last may hold fewer."""

    def __init__(self, size: int, width: int, *, ranks: Ranks = ONE) -> None:
        super().__init__()
        self.size, self.ranks = size, ranks
        per_rank = -(-size // ranks.size)
        self.start = min(ranks.rank * per_rank, size)
        self.stop = min(self.start + per_rank, size)
        self.weight = _parameter(per_rank, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return nn.functional.embedding(token_ids, self.weight)
        is_mine = (token_ids >= self.start) & (token_ids < self.stop)
        rows = nn.functional.embedding((token_ids - self.start) * is_mine, self.weight)
        return self.ranks.sum(torch.where(is_mine[:, None], rows, 0))

    def logits(self, hidden: Tensor, rows: Rows) -> Tensor:
        return self.ranks.gather(ops.linear.unchecked(hidden, self.weight, rows=rows))[:, : self.size].float()

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        into = self.weight[: self.stop - self.start]
        shape = (self.size, self.weight.shape[1])
        yield f"{name}.weight", Slot(into=into, shape=shape, index=(slice(self.start, self.stop), ALL))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = _parameter(size), eps

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        if residual is None:
            return ops.rms_norm.unchecked(x, self.weight, self.eps), x
        return ops.add_rms_norm.unchecked(x, residual, self.weight, self.eps)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(into=self.weight, shape=tuple(self.weight.shape), index=(ALL,))


class Experts(nn.Module):
    """E feed-forward networks of C -> F -> C, stacked; ranks share F."""

    def __init__(self, num_experts: int, width: int, inner: int, *, ranks: Ranks = ONE) -> None:
        super().__init__()
        self.shape, self.ranks = (num_experts, width, inner), ranks
        self.inner = ranks.share("expert size", inner)
        held = self.inner.stop - self.inner.start
        self.gate_up_proj = _parameter(num_experts, 2 * held, width)
        self.down_proj = _parameter(num_experts, width, held)

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


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every tensor a checkpoint must hold for this model, by Hugging Face's name."""
    found: dict[str, Slot] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | Vocabulary | RMSNorm | Experts):
            found.update(module.slots(name))
    return found


# ---- attention


LONGEST = 1 << 24  # tokens of a sequence: beyond all models, and a table of them is 8 GiB


class Rope:
    """The rotary table of a model, long enough for `max_length` tokens, and its rows for a step.

    dynamic and longrope have other frequencies past a length. Here they are those of max_length for every token: were
    they those of the longest sequence at hand, a token's result would depend on what runs beside it.
    """

    def __init__(self, config: RopeConfig, max_length: int | None = None) -> None:
        if config.is_dual_chunk:
            raise ValueError("dual chunk attention is not supported: remove dual_chunk_attention_config to run without")
        limit = config.table_rows
        if max_length is not None and max_length > limit and not config.depends_on_length:
            raise ValueError(
                f"sequences of {max_length} tokens were asked for, and the model was made for {limit}: ask for at most "
                f"{limit}, or give config.json a rope scaling (YaRN) that reaches further"
            )
        if (max_length or limit) > LONGEST:
            raise ValueError(f"config.json: {limit} positions; ask for a maximum length of at most {LONGEST}")
        self.table: RopeTable = get_rope(config, rows=max_length)
        self.max_length = self.table.rows
        self._cos_sin: Tensor | None = None

    def rows(self, step: Step) -> Tensor:
        """[T, R], once a step for all layers."""
        if step.max_position > self.max_length:
            raise ValueError(
                f"position {step.max_position - 1} is past the {self.max_length} tokens this model was loaded for; "
                f"load it with a larger max_length"
            )
        if self._cos_sin is None or self._cos_sin.device != step.positions.device:
            self._cos_sin = self.table.cos_sin(step.positions.device, seq_len=self.max_length)
        return self._cos_sin[step.positions]


def attend(q: Tensor, step: Step, cache: KVCache, *, scale: float, window: int | None) -> Tensor:
    """Every query sees its sequence's cache, new keys and values included: [T, HQ, D]."""
    return ops.paged_attention.unchecked(
        q,
        cache.k,
        cache.v,
        step.block_tables,
        step.query_starts,
        step.context_lens,
        scale=scale,
        window=window or 0,
        rows=step.rows,
    )
