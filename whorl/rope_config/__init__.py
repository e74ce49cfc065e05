"""The rotary configuration of a model: frequencies, attention factor, sections, channel order.

`RopeConfig` is frozen and needs no torch, so that the tables, the kernels and the doctor share one source.
`RopeConfig.from_hf` reads a Hugging Face configuration in any of its spellings, `RopeConfig.from_keywords` plain
arguments. frequencies.py and docs/rope.md have the formulas of each type; whorl/rope_table.py makes cos/sin
tables.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .checks import LAYOUTS, STYLES, UNCOMPUTABLE, WHERE, YARN_TYPES, check, check_positive, check_types, require
from .families import DEFAULT_BASE
from .frequencies import FREQUENCIES, yarn_mscale
from .hugging_face import SCALING_KEYS, UnknownFamilyWarning, keywords
from .scaling import first, rope_type_of, rotary_size, scaling_fields, sections_of

__all__ = [
    "LAYOUTS",
    "STYLES",
    "UNCOMPUTABLE",
    "WHERE",
    "YARN_TYPES",
    "DualChunkPositions",
    "RopeConfig",
    "UnknownFamilyWarning",
]

Array = TypeVar("Array")


class DualChunkPositions(NamedTuple, Generic[Array]):
    """The positions of a query in dual chunk attention, which depend on how many chunks the key lies before it.

    intra: in the same chunk (keys always use it); succ: one chunk; inter: two or more. succ_critical and inter_critical
    are for the same distances, with another position for every query of a chunk; they select keys for sparse attention.
    """

    intra: Array
    succ: Array
    inter: Array
    succ_critical: Array
    inter_critical: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One rotary embedding: R = rotary_dim of D = head_dim channels rotate, in pairs with R/2 frequencies.

    checks.py explains the values of style, pairs_out, where and layout. Raises ValueError when the fields contradict
    each other. Example: `RopeConfig.from_hf(json.load(open("config.json"))).frequencies()`.
    """

    head_dim: int
    rotary_dim: int
    max_position: int
    base: float = DEFAULT_BASE
    rope_type: str = "default"
    original_max_position: int | None = None
    style: str = "half"
    pairs_out: str = "pairs"
    where: str = "leading"
    # 1, or -1 for a model that rotates by the negative angle (nanochat): its frequencies are negative.
    direction: int = 1
    sections: tuple[int, ...] | None = None
    layout: str | None = None
    # Multiplies cos and sin. longrope may use another factor past the original length: see `attention_factor_at`.
    attention_factor: float = 1.0
    factor: float = 1.0
    alpha: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    long_attention_factor: float | None = None
    # rope_type "ntk": how fast the slowing grows with the pair's index, which it is raised to.
    mixed_b: float = 1.0
    # rope_type "proportional": the share of head_dim whose frequency is not zero.
    proportion: float = 1.0
    chunk_size: int | None = None
    local_size: int | None = None

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def from_keywords(
        cls,
        *,
        head_dim: int,
        max_position: int,
        base: float = DEFAULT_BASE,
        rotary_dim: int | None = None,
        style: str = "half",
        pairs_out: str = "pairs",
        where: str = "leading",
        direction: int = 1,
        layout: str | None = None,
        chunk_size: int | None = None,
        local_size: int | None = None,
        **scaling: Any,
    ) -> "RopeConfig":
        """Build a configuration from plain arguments.

        scaling: the keys of a Hugging Face `rope_parameters` dict, such as rope_type, factor, mrope_section. Raises
        ValueError for unknown, missing or contradictory ones. Example:
        `RopeConfig.from_keywords(head_dim=128, max_position=40960, rope_theta=1e6)`.
        """
        unknown = sorted(set(scaling) - SCALING_KEYS)
        if unknown:
            raise ValueError(f"RopeConfig: unknown keywords {unknown}; known scaling keys are {sorted(SCALING_KEYS)}")
        check_types(scaling)
        rope_type = rope_type_of(scaling)
        require(rope_type, scaling)
        check_positive("head_dim", head_dim)
        check_positive("max_position", max_position)
        sections = sections_of(scaling)
        if sections is not None and layout is None:
            interleaved = "spread" if rope_type == "openpangu" else "interleaved"
            layout = interleaved if scaling.get("mrope_interleaved") else "chunked"
        return cls(
            head_dim=head_dim,
            rotary_dim=rotary_size(head_dim, rotary_dim, scaling.get("partial_rotary_factor"), rope_type),
            max_position=max_position,
            base=float(first(scaling.get("rope_theta"), base)),
            rope_type=rope_type,
            style=style,
            pairs_out=pairs_out,
            where=where,
            direction=direction,
            sections=sections,
            layout=layout,
            chunk_size=chunk_size,
            local_size=local_size,
            **scaling_fields(rope_type, scaling, max_position),
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | object, *, layer_type: str | None = None) -> "RopeConfig":
        """Read a Hugging Face configuration: a mapping (config.json) or an object, in the old or new spelling.

        layer_type selects one of several rotary embeddings: "full_attention" or "sliding_attention" (Gemma-3), "main"
        or "compress" (DeepSeek-V4), "indexer" (DeepSeek-V3.2, GLM-MoE-DSA). An unknown model_type is read as Llama's,
        with an `UnknownFamilyWarning` that names it. Raises ValueError for a configuration that is not valid.
        """
        return cls.from_keywords(**keywords(config, layer_type))

    @property
    def is_mrope(self) -> bool:
        """Whether positions have several axes. The sections decide: rope_type of an MRoPE model stays "default"."""
        return self.sections is not None

    @property
    def is_dual_chunk(self) -> bool:
        return self.chunk_size is not None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the sequence length (dynamic by factor, longrope)."""
        return self.rope_type == "longrope" or (self.rope_type == "dynamic" and self.alpha is None)

    @property
    def table_rows(self) -> int:
        """How many rows a cos/sin table needs for every position that the model supports.

        YaRN reaches factor x original length, whatever max_position is; dual chunk folds positions into two chunks; a
        Llama 4 vision tower has a row for each patch and one for the class token.
        """
        if self.chunk_size is not None and self.local_size is not None:
            return 2 * self.chunk_size - self.local_size
        if self.rope_type == "mllama4":
            return self.max_position + 1  # the class token's row follows those of the patches
        if self.rope_type in YARN_TYPES and self.original_max_position is not None:
            return max(self.max_position, math.ceil(self.factor * self.original_max_position))
        return self.max_position

    @property
    def softmax_scale_correction(self) -> float:
        """What multiplies the softmax scale 1/sqrt(D): mscale squared for DeepSeek YaRN, 1.0 for every other type."""
        if self.rope_type != "deepseek_yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2

    def is_long(self, seq_len: int | None) -> bool:
        """Return whether `seq_len` tokens are more than the short frequencies are for (longrope, dynamic)."""
        limit = self.original_max_position if self.rope_type == "longrope" else self.max_position
        return self.depends_on_length and seq_len is not None and limit is not None and seq_len > limit

    def attention_factor_at(self, seq_len: int | None = None) -> float:
        """Return the factor that multiplies cos and sin for a sequence of `seq_len` tokens."""
        if self.long_attention_factor is not None and self.is_long(seq_len):
            return self.long_attention_factor
        return self.attention_factor

    def frequencies(self, seq_len: int | None = None) -> NDArray[np.float32]:
        """Return the frequencies [R/2] in float32, computed in float64; longrope and dynamic depend on seq_len."""
        return self.direction * FREQUENCIES[self.rope_type](self, seq_len).astype(np.float32)

    @property
    def spread(self) -> tuple[int, ...] | None:
        """Return the axis of each rotary pair in layout "spread", which no operator merges; None for other layouts.

        The axes are spread evenly: pair by pair the axis is taken of which the smallest share has been used, the first
        of equals, and never the same one twice in a row while another is left. With three sections the last pair
        follows axis 0 and counts as one of it.
        """
        if self.layout != "spread" or not self.sections:
            return None
        counts, last = list(self.sections), (0,) if len(self.sections) == 3 else ()
        counts[0] -= len(last)
        used, axes = [0] * len(counts), list[int]()
        for _ in range(sum(counts)):
            left = [axis for axis, count in enumerate(counts) if used[axis] < count]
            others = [axis for axis in left if axes[-1:] != [axis]]
            axes.append(min(others or left, key=lambda a: (used[a] / counts[a], a)))
            used[axes[-1]] += 1
        return (*axes, *last)

    def patch_places(self, positions: Array) -> tuple[Array, Array]:
        """Return column and row, from 1, of the patches of a Llama 4 vision tower (mllama4), for their indices.

        max_position is the number of patches, a square; the index after the last is the class token's, at 0 and 0.
        """
        side = math.isqrt(self.max_position)
        index: Any = positions
        is_patch = index < self.max_position
        return (index % side + 1) * is_patch, (index // side + 1) * is_patch

    def dual_chunk_positions(self, positions: Array) -> DualChunkPositions[Array]:
        """Return the five positions of dual chunk attention for an integer numpy array or torch tensor."""
        if self.chunk_size is None or self.local_size is None:
            raise ValueError("RopeConfig: chunk_size or local_size is None, so there are no dual chunk positions")
        chunk, stride = self.chunk_size, self.chunk_size - self.local_size
        intra: Any = positions % stride  # type: ignore[operator]
        return DualChunkPositions(
            intra=intra,
            succ=(intra + stride).clip(max=chunk),
            inter=intra * 0 + min(2 * stride - 1, chunk),
            succ_critical=intra + stride,
            inter_critical=intra + chunk,
        )
