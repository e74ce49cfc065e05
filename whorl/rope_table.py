"""cos/sin tables of a `RopeConfig`: built once per configuration and device, looked up once per step for all layers.

    table = get_rope(config)                     # while building the model
    rows = table.lookup(positions)               # once per step
    q, k = table.apply(q, k, rows)               # in every layer

Tables are plain fp32 tensors, never module buffers: `model.to(bfloat16)` and autocast do not change them. Where the
kernel needs the table in the dtype of q (Ascend), a copy, rounded once, is stored beside it.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from whorl import ops
from whorl.ops.rope import table_dtype
from whorl.rope_config import DualChunkPositions, RopeConfig

_INTEGERS = (torch.int32, torch.int64)
_tables: dict[tuple[RopeConfig, int, bool], "RopeTable"] = {}
_lock = threading.Lock()


def get_rope(
    config: RopeConfig | Mapping[str, Any] | object | None = None,
    *,
    layer_type: str | None = None,
    rows: int | None = None,
    grow: bool = False,
    **keywords: Any,
) -> "RopeTable":
    """Return the rotary table of a configuration. Equal configurations share one table.

    config: a RopeConfig, or a Hugging Face configuration (layer_type as in `RopeConfig.from_hf`); without it, keywords
    of `RopeConfig.from_keywords`. rows: the table's length; by default every position that the model is meant for. A
    position past the table raises ValueError or, with `grow`, extends the table. Growing replaces the tensor, while a
    captured device graph keeps the old one: capture with grow=False. Raises ValueError for both or neither of config
    and keywords, and for a configuration that is not valid.

        table = get_rope(head_dim=128, max_position=40960, rope_theta=1e6)
    """
    if (config is None) == (not keywords):
        number = "both" if keywords else "neither"
        raise ValueError(f"get_rope: expected either a configuration or keywords, got {number}: {sorted(keywords)}")
    if config is None:
        rope = RopeConfig.from_keywords(**keywords)
    elif isinstance(config, RopeConfig):
        rope = config
    else:
        rope = RopeConfig.from_hf(config, layer_type=layer_type)
    if rows is not None and rows <= 0:
        raise ValueError(f"get_rope: rows is {rows}, expected a positive number")
    return _shared(rope, rows or rope.table_rows, grow)


def _shared(config: RopeConfig, rows: int, grow: bool) -> "RopeTable":
    with _lock:
        return _tables.setdefault((config, rows, grow), RopeTable(config, rows=rows, grow=grow))


class RopeTable:
    """The table of one configuration, one tensor [P, R] per device: row = [cos of R/2 angles | sin of R/2 angles].

    `get_rope` makes one; `lookup` and `apply` use it.
    """

    def __init__(self, config: RopeConfig, *, rows: int, grow: bool) -> None:
        self.config = config
        self.rows = rows
        self.grow = grow
        self._on_device: dict[tuple[torch.device, bool], Tensor] = {}
        # The rounded table, and the fp32 table that it was made from.
        self._rounded: dict[tuple[torch.device, bool, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RopeTable({self.config}, rows={self.rows}, grow={self.grow})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled model shares the table, too.
        return _shared, (self.config, self.rows, self.grow)

    def cos_sin(
        self,
        device: torch.device | str = "cpu",
        *,
        seq_len: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return the whole table [P, R], with P >= seq_len and the frequencies of that length (longrope, dynamic).

        With a 16-bit `dtype` it is the fp32 table rounded; the rounded table is stored for later calls. Raises
        ValueError when seq_len is past a table that may not grow.
        """
        device = _with_index(device)
        table = self._wide(device, seq_len)
        if dtype == table.dtype:
            return table
        key = (device, self.config.is_long(seq_len), dtype)
        rounded, source = self._rounded.get(key, (None, None))
        if rounded is None or source is not table:
            with torch.inference_mode(False):
                rounded = table.to(dtype)
            if not isinstance(rounded, FakeTensor):
                self._rounded[key] = (rounded, table)
        return rounded

    def _wide(self, device: torch.device, seq_len: int | None) -> Tensor:
        """Return the fp32 table for sequences of `seq_len` tokens; builds or extends it where necessary."""
        is_long = self.config.is_long(seq_len)
        rows = self._rows_for(seq_len)
        if is_long and self.config.rope_type == "dynamic":
            return self._build(device, rows, seq_len)  # every length has other frequencies, so nothing is stored
        table = self._on_device.get((device, is_long))
        if table is None or table.shape[0] < rows:
            table = self._extend(device, rows, seq_len)
        return table

    def lookup(self, positions: Tensor, *, seq_len: int | None = None) -> Tensor:
        """Return rows [*tokens, R] for positions [*tokens], or [A, *tokens] where the configuration has A sections.

        A 1-D tensor of positions is text, also for an MRoPE configuration: all axes are equal. seq_len: a bound that
        the caller knows, positions < seq_len; without it positions are read, which waits for the device. Inside a
        compiled function nothing is read, and the table must have been built before (`cos_sin(device)`). Raises
        ValueError when positions do not fit the sections or the table.
        """
        table, positions = self._table_for(positions, seq_len)
        rows = self._merged(table, positions)
        return table[positions] if rows is None else rows

    def lookup_dual_chunk(self, positions: Tensor) -> DualChunkPositions[Tensor]:
        """Return rows [*tokens, R] for each of the five positions of dual chunk attention; keys use `intra`."""
        _check_integers(positions)
        table = self.cos_sin(positions.device)
        return DualChunkPositions(*(table[indices] for indices in self.config.dual_chunk_positions(positions)))

    def apply(
        self,
        q: Tensor,
        k: Tensor | None,
        rows_or_positions: Tensor,
        *,
        seq_len: int | None = None,
        inverse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate q [*tokens, HQ, D] and k [*tokens, HK, D] by rows from `lookup`, or by positions.

        With one position per token the kernel looks the rows up; several axes are merged first. Where the kernel needs
        the table in q's dtype, it gets the rounded table. seq_len as in `lookup`; `inverse` rotates back. Returns new q
        and k, as `ops.rope`.
        """
        config = self.config
        options: dict[str, Any] = {
            "style": config.style,
            "out_style": config.pairs_out if config.style == "pairs" else None,
            "where": config.where,
            "inverse": inverse,
        }
        if rows_or_positions.is_floating_point():
            return ops.rope(q, k, rows_or_positions, **options)
        dtype = table_dtype(q.device, q.dtype)
        table, positions = self._table_for(rows_or_positions, seq_len, dtype)
        if (rows := self._merged(table, positions)) is not None:
            return ops.rope(q, k, rows, **options)
        return ops.rope(q, k, table, positions, **options)

    def _merged(self, table: Tensor, positions: Tensor) -> Tensor | None:
        """Return rows for positions on several axes, [A, *tokens]; None where every token has one position."""
        config = self.config
        if positions.dim() > 1 and config.spread is not None:
            return _spread_rows(table, positions, config.spread)
        if positions.dim() > 1 and config.sections and config.layout:
            return ops.merge_mrope(table, positions, config.sections, config.layout)
        return None

    def _table_for(
        self, positions: Tensor, seq_len: int | None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return a table and the indices of these positions in it."""
        _check_integers(positions)
        sections = self.config.sections
        if sections is not None and positions.dim() > 1 and positions.shape[0] != len(sections):
            raise ValueError(
                f"rope lookup: sections {list(sections)} need positions [{len(sections)}, *tokens] or [T], "
                f"found {list(positions.shape)}"
            )
        seq_len = self._bound(positions, seq_len)
        if self.config.rope_type == "dynamic" and self.config.is_long(seq_len):
            # Frequencies are those of this length alone: build a table of just these tokens, not of every position.
            self._rows_for(seq_len)
            return _cos_sin(self.config, positions.reshape(-1), seq_len).to(dtype), _consecutive(positions)
        return self.cos_sin(positions.device, seq_len=seq_len, dtype=dtype), positions

    def _bound(self, positions: Tensor, seq_len: int | None) -> int | None:
        """Return a number above every position: the caller's, checked where reading is free, or one read from them."""
        if torch.compiler.is_compiling() or isinstance(positions, FakeTensor) or not positions.numel():
            return seq_len
        if seq_len is not None and positions.device.type != "cpu":
            return seq_len
        low, high = torch.stack(torch.aminmax(positions)).tolist()
        if low < 0 or (seq_len is not None and high >= seq_len):
            bound = "none" if seq_len is None else seq_len
            raise ValueError(f"rope lookup: positions are {low} to {high}, expected 0 and up, below seq_len ({bound})")
        return high + 1 if seq_len is None else seq_len

    def _rows_for(self, seq_len: int | None) -> int:
        """Return the table length for sequences of `seq_len` tokens; ValueError when the table may not grow to it."""
        config, rows = self.config, self.rows
        if config.rope_type == "longrope" and config.original_max_position and not config.is_long(seq_len):
            # Past this length the long factors apply: the table of short factors must not go on.
            rows = min(rows, config.original_max_position)
        if seq_len is None or seq_len <= rows:
            return rows
        if not self.grow:
            raise ValueError(
                f"rope lookup: position {seq_len - 1} is past the table of {rows} rows; "
                f"build the table with get_rope(..., rows={seq_len}) or grow=True"
            )
        return seq_len

    def _extend(self, device: torch.device, rows: int, seq_len: int | None) -> Tensor:
        """Store and return a table of at least `rows` rows; one that replaces another is at least twice as long."""
        key = (device, self.config.is_long(seq_len))
        with self._lock:
            table = self._on_device.get(key)
            if table is not None and table.shape[0] >= rows:
                return table  # another thread was first
            if table is not None:
                rows = max(rows, 2 * table.shape[0])
            table = self._build(device, rows, seq_len)
            if not isinstance(table, FakeTensor):
                self._on_device[key] = table
            return table

    def _build(self, device: torch.device, rows: int, seq_len: int | None) -> Tensor:
        # A tensor made in inference mode could never be saved for a backward. Tables are built on the CPU, so that
        # their bits are equal on every device.
        with torch.inference_mode(False):
            positions = torch.arange(rows, device="cpu")
            return _cos_sin(self.config, positions, seq_len).to(device)


def _cos_sin(config: RopeConfig, positions: Tensor, seq_len: int | None) -> Tensor:
    """Return rows [T, R] for positions [T], with angles in fp32 whatever the default dtype and autocast are."""
    frequencies = torch.from_numpy(config.frequencies(seq_len)).to(positions.device)
    places = positions[:, None]
    if config.rope_type == "mllama4":
        columns, rows = config.patch_places(places)
        places = torch.cat([axis.expand(-1, config.rotary_dim // 4) for axis in (columns, rows)], dim=-1)
    angles = places.to(torch.float32) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * config.attention_factor_at(seq_len)


def _spread_rows(table: Tensor, positions: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return rows [*tokens, R] whose pair i has the angle of axis axes[i]; positions [A, *tokens]."""
    rows = table[positions].unflatten(-1, (2, -1))  # [A, *tokens, cos and sin, R/2]
    return torch.stack([rows[axis][..., pair] for pair, axis in enumerate(axes)], dim=-1).flatten(-2)


def _with_index(device: torch.device | str) -> torch.device:
    """Return the device with its index: `cuda` and `cuda:0` are one device and must share one table."""
    device = torch.device(device)
    return device if device.index is not None or device.type == "cpu" else torch.empty(0, device=device).device


def _consecutive(positions: Tensor) -> Tensor:
    """Return 0, 1, 2, ... in the shape of positions."""
    return torch.arange(positions.numel(), device=positions.device).view(positions.shape)


def _check_integers(positions: Tensor) -> None:
    if positions.dtype not in _INTEGERS:
        raise ValueError(f"rope lookup: positions is {positions.dtype}, expected int32 or int64")
