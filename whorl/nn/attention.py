"""The rotary table of a model, and attention over the paged cache."""

from torch import Tensor

from whorl import ops
from whorl.rope_config import RopeConfig
from whorl.rope_table import RopeTable, get_rope

from .cache import KVCache
from .step import Step
from .training import Packed

LONGEST = 1 << 24  # tokens of a sequence: more than any model takes, and a table of so many is 8 GiB


class Rope:
    """The rotary table of a model, long enough for `max_length` tokens.

    config: the rotation of config.json. max_length: tokens of the longest sequence; default: what the model was made
    for. The rope types `dynamic` and `longrope` have other frequencies for long sequences. Here every token uses those
    of a sequence of `max_length` tokens: if the longest sequence in the batch decided, as it does in transformers, a
    token's result would depend on the other sequences.
    Raises ValueError for dual chunk attention, and for a `max_length` that the rotation does not reach.
    """

    def __init__(self, config: RopeConfig, max_length: int | None = None) -> None:
        if config.is_dual_chunk:
            raise ValueError("config.json: dual chunk attention is not supported; remove dual_chunk_attention_config")
        limit = config.table_rows
        if max_length is not None and max_length > limit and not config.depends_on_length:
            raise ValueError(
                f"sequences of {max_length} tokens are too long: the model was made for {limit}; use at most {limit}, "
                f"or give config.json a rope scaling (YaRN) that reaches further"
            )
        if (max_length or limit) > LONGEST:
            raise ValueError(f"config.json: {limit} positions; give a max_length of at most {LONGEST}")
        self.table: RopeTable = get_rope(config, rows=max_length)
        self.max_length = self.table.rows
        self._cos_sin: Tensor | None = None

    def rows(self, step: Step | Packed) -> Tensor:
        """Return cos and sin of the step's positions, [T, R]; computed once per step for all layers.

        Raises ValueError for a position past `max_length`.
        """
        self.check(step.max_position)
        return self.at(step.positions)

    def check(self, length: int) -> None:
        """Raise ValueError for a sequence of more than `max_length` tokens."""
        if length > self.max_length:
            raise ValueError(
                f"position {length - 1} is past the {self.max_length} tokens this model was loaded for; "
                f"load it with a larger max_length"
            )

    def at(self, positions: Tensor) -> Tensor:
        """Return cos and sin of positions [T], or [A, T] where they have several axes: [T, R]."""
        if self._cos_sin is None or self._cos_sin.device != positions.device:
            self._cos_sin = self.table.cos_sin(positions.device, seq_len=self.max_length)
        if positions.dim() == 1:
            return self._cos_sin[positions]
        sections, layout = self.table.config.sections, self.table.config.layout
        if sections is None or layout is None:
            raise ValueError(f"positions have {len(positions)} axes, and config.json names no mrope_section")
        return ops.merge_mrope(self._cos_sin, positions, sections, layout)


def attend(
    q: Tensor,
    step: Step,
    cache: KVCache,
    *,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over the paged cache. The keys and values of the step's tokens must have been written to it before.

    q: [T, HQ, D], rotated; returns [T, HQ, D]. A query sees the keys of its sequence up to its own, the last `window`
    of them; None: all. softcap, sinks: as of `ops.paged_attention`.
    """
    return ops.paged_attention.unchecked(
        q,
        cache.k,
        cache.v,
        step.block_tables,
        step.query_starts,
        step.context_lens,
        cache.k_scale,
        cache.v_scale,
        sinks,
        scale=scale,
        window=window or 0,
        softcap=softcap,
    )
