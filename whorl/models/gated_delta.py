"""The gated delta layer of Qwen3-Next and Qwen3.5: a recurrence in place of attention.

A token's queries, keys and values pass a short convolution over the tokens before it; then each value head keeps a
matrix, its state, from which it reads with the query, and in which it corrects what the key finds there. A running
sequence stores the state at its last multiple of 64 tokens and rows of the tokens since then (`whorl.ops.gated_delta`).
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import ops
from whorl.models.qwen3_next_config import DeltaConfig, Qwen3NextConfig
from whorl.nn import Destination, Linear, Mix, Mixer, Packed, Plain, Ranks, RMSNorm, StateSpec, Step
from whorl.ops.gated_delta import CHUNK, delta_tensors
from whorl.ops.gated_delta.layout import MOST_ROWS

# What the recurrence stores for a sequence, in the order in which its operator takes it; the convolution has the rest.
_OF_THE_RULE = ("state", "rounded", "keys", "deltas", "decays", "errors", "inverses")
_SLOWEST, _FASTEST = 2e-4, 2e-2  # decay rates of random heads: over 64 tokens a state keeps 0.99 to 0.4 of itself


class Heads(NamedTuple):
    """This rank's heads: q and k [channels of all key heads], v [channels of all value heads], and the heads."""

    keys: slice
    values: slice
    key_heads: slice
    value_heads: slice

    @classmethod
    def of(cls, sizes: DeltaConfig, ranks: Ranks) -> "Heads":
        keys, group = ranks.share("key heads", sizes.key_heads), sizes.value_heads // sizes.key_heads
        values = slice(keys.start * group, keys.stop * group)
        return cls(_channels(keys, sizes.key_dim), _channels(values, sizes.value_dim), keys, values)


def _channels(heads: slice, dim: int) -> slice:
    return slice(heads.start * dim, heads.stop * dim)


class Rows(Plain):
    """Parameters of which this rank has some ranges of rows. stored: the shapes in checkpoints; rows: the ranges."""

    def __init__(self, rows: Sequence[slice], **stored: tuple[int, ...]) -> None:
        count = sum(part.stop - part.start for part in rows)
        super().__init__(**{key: (count, *shape[1:]) for key, shape in stored.items()})
        self.rows, self.stored = rows, stored

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for (key, shape), parameter in zip(self.stored.items(), self.parameters(), strict=True):
            into = parameter.split([part.stop - part.start for part in self.rows])
            first, *more = (
                Destination(into=piece, shape=shape, index=(part, *(slice(0, size) for size in shape[1:])))
                for piece, part in zip(into, self.rows, strict=True)
            )
            yield f"{name}.{key}", Destination(into=first.into, shape=shape, index=first.index, more=tuple(more))


class Convolution(Rows):
    """The weight [channels, 1, width] of a causal convolution of every channel by itself."""

    def __init__(self, rows: Sequence[slice], channels: int, width: int) -> None:
        super().__init__(rows, weight=(channels, 1, width))
        self.width = width

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(std=self.width**-0.5, generator=generator)


class Decays(Rows):
    """What a head's decay is computed from: A_log and dt_bias, [value heads] fp32 whatever the model's dtype."""

    dtype = torch.float32
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, rows: slice, heads: int) -> None:
        super().__init__([rows], A_log=(heads,), dt_bias=(heads,))

    def destinations(self, name: str) -> Iterator[tuple[str, Destination]]:
        for source, destination in super().destinations(name):
            layer, _, key = source.rpartition(".")
            yield f"{layer.rpartition('.')[0]}.{key}", destination

    def randomize(self, generator: torch.Generator) -> None:
        rates = torch.logspace(0, 1, len(self.A_log), base=_FASTEST / _SLOWEST, device=self.A_log.device) * _SLOWEST
        self.A_log.copy_(rates.log())
        self.dt_bias.zero_()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaState(StateSpec):
    """What the layer stores for a running sequence."""

    def step_bytes(self, num_keys: int) -> int:
        """Return the bytes that a decode step reads and writes: the rounded state, half of the rows that there are room
        for, and once in 64 steps the state itself, both ways, with its rounded copy."""
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in (self.kept | self.open).items()}  # type: ignore[operator]
        rounded, kept = sizes["rounded"], sizes["state"] + sizes["tail"]
        rows = sum(sizes[name] for name in self.open) - rounded
        return rounded + rows // 2 + (2 * kept + rounded) // self.grid


class GatedNorm(Plain):
    """RMSNorm of every value head, times silu of its gate; the weight [D] is fp32 whatever the model's dtype."""

    dtype = torch.float32

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(weight=(size,))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the normalized x [T, H, D] times silu(gate [T, H, D])."""
        return ops.gated_rms_norm.unchecked(x, gate, self.weight, self.eps)  # type: ignore[no-any-return]

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1)


class GatedDelta(Mixer):
    """The gated delta layer, with projections as Qwen3.5 stores them."""

    def __init__(self, config: Qwen3NextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self.sizes, self.heads = layer, config.delta, Heads.of(config.delta, ranks)
        self.add_projections(config.hidden_size, ranks)
        keys, inner = self.key_channels, self.value_channels
        rows = [self.heads.keys, shifted(self.heads.keys, keys), shifted(self.heads.values, 2 * keys)]
        self.conv1d = Convolution(rows, 2 * keys + inner, config.delta.kernel)
        self.decays = Decays(self.heads.value_heads, config.delta.value_heads)
        self.norm = GatedNorm(config.delta.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(inner, config.hidden_size, shard="row", parts=(self.heads.values,), ranks=ranks)
        self.mixed_size = self.out_proj.shape[1]
        self.num_key_heads, self.num_value_heads = (part.stop - part.start for part in self.heads[2:])

    @property
    def key_channels(self) -> int:
        """The channels of all queries, on all ranks together; also those of all keys."""
        return self.sizes.key_heads * self.sizes.key_dim

    @property
    def value_channels(self) -> int:
        """The channels of all values, on all ranks together."""
        return self.sizes.value_heads * self.sizes.value_dim

    def add_projections(self, width: int, ranks: Ranks) -> None:
        """Add the projections: `in_proj` to q, k, v and z, `in_proj_ba` to b and a. They are two, because quantised
        checkpoints leave the second one alone."""
        heads, keys, values = self.heads, self.key_channels, self.value_channels
        qkv = [heads.keys, shifted(heads.keys, keys), shifted(heads.values, 2 * keys)]
        pieces = [*(("in_proj_qkv", part) for part in joined(qkv)), ("in_proj_z", heads.values)]
        outputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values}
        self.in_proj = Linear(width, outputs, shard="column", pieces=pieces, ranks=ranks)
        gates = dict.fromkeys(("in_proj_b", "in_proj_a"), self.sizes.value_heads)
        self.in_proj_ba = Linear(width, gates, shard="column", parts=[heads.value_heads] * 2, ranks=ranks)

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        return self._mixed(self.in_proj(x), x, mix)

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        qkvz, x, residual = self.in_proj.after_norm(norm, x, residual)
        return self._mixed(qkvz, x, *arguments), residual

    def cache_spec(self, dtype: torch.dtype) -> StateSpec:
        sizes = self.sizes
        kept, rows = delta_tensors(
            self.num_key_heads, self.num_value_heads, sizes.key_dim, sizes.value_dim, sizes.kernel, dtype
        )
        return DeltaState(
            kind="gated delta rule", grid=CHUNK, kept=kept, open=rows, rolls_back=True, most_rows=MOST_ROWS
        )

    def flops(self, num_tokens: int) -> float:
        """Return the FLOPs of a prompt: in each chunk the products of keys and queries with the state, those of rows
        with one another, and the update of the state."""
        sizes, group = self.sizes, self.num_value_heads // self.num_key_heads
        of_state = 3 * sizes.key_dim * sizes.value_dim
        of_rows = CHUNK * (2 * sizes.key_dim / group + 2 * sizes.value_dim)
        return 2.0 * num_tokens * self.num_value_heads * (of_state + of_rows)

    def mix(  # type: ignore[override]
        self, qkv: Tensor, ba: Tensor, gate: Tensor, rotary: Any, step: Step, cache: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the heads' outputs with norm and gate, [T, value channels], and bring the states in the sequences'
        lanes up to date."""
        assert step.lanes is not None, "a recurrence needs the lanes of its sequences"
        where = step.lanes, step.query_starts, step.context_lens
        states, gate = [cache[name] for name in _OF_THE_RULE], self._by_head(gate)
        out = torch.empty(gate.shape, dtype=qkv.dtype, device=qkv.device)
        if step.is_decode:
            parameters = self._taps, self.decays.A_log, self.decays.dt_bias, self.norm.weight
            conv, options = (cache["tail"], cache["inputs"]), {"scale": self.scale, "eps": self.norm.eps}
            options["most"] = MOST_ROWS if step.may_draft else 1
            ops.gated_delta_step.unchecked(qkv, ba, gate, *parameters, out, *conv, *states, *where, **options)
            return out.flatten(1)
        y = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        ops.causal_conv_lanes.unchecked(qkv, self._taps, y, cache["tail"], cache["inputs"], *where)
        ops.gated_delta_lanes.unchecked(*self._heads(y, ba), out, *states, *where, scale=self.scale)
        return self.norm(out, gate).flatten(1)  # type: ignore[no-any-return]

    def mix_packed(  # type: ignore[override]
        self, qkv: Tensor, ba: Tensor, gate: Tensor, rotary: Any, packed: Packed
    ) -> Tensor:
        y = ops.causal_conv(qkv, self._taps, packed.starts)
        out = ops.gated_delta(*self._heads(y, ba), packed.starts, scale=self.scale)
        return self.norm(out, self._by_head(gate)).flatten(1)  # type: ignore[no-any-return]

    @property
    def scale(self) -> float:
        return float(self.sizes.key_dim**-0.5)

    @property
    def _taps(self) -> Tensor:
        return self.conv1d.weight.squeeze(1)

    def _heads(self, qkv: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what the recurrence takes: q, k and v [T, H, D], g and beta [T, HV].

        qkv: the convolution's output. ba: what beta and the decay are computed from.
        """
        keys = self.num_key_heads * self.sizes.key_dim
        qk = ops.l2_norm.unchecked(qkv[:, : 2 * keys].unflatten(1, (2 * self.num_key_heads, -1)))
        v = self._by_head(qkv[:, 2 * keys :])
        b, a = ba.split(self.num_value_heads, -1)
        g, beta = ops.delta_gates.unchecked(a, b, self.decays.A_log, self.decays.dt_bias)
        return qk[:, : self.num_key_heads], qk[:, self.num_key_heads :], v, g, beta

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.num_value_heads, -1))

    def _mixed(self, qkvz: Tensor, x: Tensor, mix: Mix) -> Tensor:
        """Return the layer's output. qkvz: q, k, v and z of x."""
        inner = self.mixed_size
        return self.out_proj(mix(self, qkvz[:, :-inner], self.in_proj_ba(x), qkvz[:, -inner:]))


class GatedDeltaByHead(GatedDelta):
    """The gated delta layer, with projections as Qwen3-Next stores them: by key head, everything of a head together."""

    def add_projections(self, width: int, ranks: Ranks) -> None:
        heads, sizes = self.heads.key_heads, self.sizes
        group = sizes.value_heads // sizes.key_heads
        values, outputs = group * sizes.value_dim, {"in_proj_qkvz": 2 * self.key_channels + 2 * self.value_channels}
        pieces = _by_head("in_proj_qkvz", heads, (sizes.key_dim, sizes.key_dim, values, values))
        self.in_proj = Linear(width, outputs, shard="column", pieces=pieces, ranks=ranks)
        gates = {"in_proj_ba": 2 * sizes.value_heads}
        pieces = _by_head("in_proj_ba", heads, (group, group))
        self.in_proj_ba = Linear(width, gates, shard="column", pieces=pieces, ranks=ranks)


def _by_head(name: str, heads: slice, sizes: Sequence[int]) -> list[tuple[str, slice]]:
    """Return the pieces of a projection that has parts of these sizes for each head: all first parts, then the next."""
    starts = list(itertools.accumulate(sizes, initial=0))
    return [
        (name, slice(head * starts[-1] + first, head * starts[-1] + end))
        for first, end in itertools.pairwise(starts)
        for head in range(heads.start, heads.stop)
    ]


def shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def joined(parts: Sequence[slice]) -> list[slice]:
    """Return ranges with those joined that follow each other."""
    whole: list[slice] = []
    for part in parts:
        if whole and whole[-1].stop == part.start:
            whole[-1] = slice(whole[-1].start, part.stop)
        else:
            whole.append(part)
    return whole
