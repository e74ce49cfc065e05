"""npu_mrope in 16 bits with a table that is kept so: what the kernel is given, and its numbers against fp64.

Through `RopeTable.apply` and, with an inference context, through the Megatron adapter.
"""

import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from whorl import ops
from whorl.adapters import megatron
from whorl.rope_config import RopeConfig
from whorl.rope_table import RopeTable, get_rope

Values = dict[str, Any]
TOKENS, ROWS, HEAD = 7, 64, 128
# Sections, layout and rotary_dim of every case the vendor documents; None is plain RoPE.
CASES: list[tuple[tuple[int, ...] | None, str | None, int]] = [
    (None, None, 128),
    (None, None, 64),
    ((16, 24, 24), "chunked", 128),
    ((24, 20, 20), "interleaved", 128),
    ((8, 12, 12), "chunked", 64),
    ((16, 16, 16, 16), "chunked", 128),
]


def rows(calls: list[tuple[str, tuple[Any, ...], Values]], worst: Callable[..., Values]) -> Iterator[Values]:
    """`calls` is where the kernels note the name and the arguments of each call."""
    for dtype in (torch.bfloat16, torch.float16):
        for sections, layout, rotary in CASES:
            row: Values = {"case": f"{sections} {layout} {rotary}", "dtype": str(dtype)[6:], "sections": sections}
            try:
                more = {"sections": sections, "layout": layout}
                config = RopeConfig(head_dim=HEAD, rotary_dim=rotary, max_position=ROWS, **more)
                yield row | _applied(get_rope(config, rows=ROWS), dtype, calls, worst)
            except Exception:
                yield row | {"error": traceback.format_exc()}


def _applied(table: RopeTable, dtype: torch.dtype, calls: list[Any], worst: Callable[..., Values]) -> Values:
    sections = table.config.sections
    shape = (TOKENS,) if sections is None else (len(sections), TOKENS)
    positions = torch.randint(0, ROWS, shape)
    q, k = torch.randn(TOKENS, 4, HEAD).to(dtype), torch.randn(TOKENS, 2, HEAD).to(dtype)
    calls.clear()
    got = table.apply(q, k, positions, seq_len=ROWS)
    again = table.apply(q, k, positions, seq_len=ROWS)
    tables = [_argument(call, 3, "cos_sin_cache") for call in calls]
    reference, gold = (_rotated(table, q.to(d), k.to(d), positions, d) for d in (dtype, torch.float64))
    looked_up = positions if sections is None else torch.arange(TOKENS)
    is_one_table = sections is not None or len({t.data_ptr() for t in tables}) == 1
    return {
        "called": [name for name, _, _ in calls],
        "given": _described(calls[0]),
        "positions": bool(torch.equal(_argument(calls[0], 0, "positions"), looked_up)),
        "kept": is_one_table and torch.equal(got[0], again[0]),
        "found": worst(got, reference, gold),
    }


def _rotated(table: RopeTable, q: Tensor, k: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The reference with the fp32 table, for fp64 as it is."""
    config, cos_sin = table.config, table.cos_sin("cpu")
    cos_sin = cos_sin.double() if dtype == torch.float64 else cos_sin
    if config.sections is not None:
        cos_sin, positions = ops.merge_mrope(cos_sin, positions, config.sections, config.layout), None
    return ops.rope.reference(q, k, cos_sin, positions)  # type: ignore[no-any-return]


def _argument(call: tuple[str, tuple[Any, ...], Values], place: int, name: str) -> Any:
    _, args, kwargs = call
    return kwargs[name] if name in kwargs else args[place]


def _described(call: tuple[str, tuple[Any, ...], Values]) -> Values:
    table = _argument(call, 3, "cos_sin_cache")
    options = {n: v for n, v in call[2].items() if not isinstance(v, Tensor)}
    return {"table": [list(table.shape), str(table.dtype)[6:]], **options}


def through_megatron(calls: list[tuple[str, tuple[Any, ...], Values]]) -> Iterator[Values]:
    """A prompt and a token with an inference context, at the site of an attention layer as the adapter replaces it."""
    for dtype in (torch.bfloat16, torch.float16):
        row: Values = {"dtype": str(dtype)[6:]}
        try:
            yield row | _generated(dtype, calls)
        except Exception:
            yield row | {"error": traceback.format_exc()}


def _generated(dtype: torch.dtype, calls: list[Any]) -> Values:
    sections = [16, 24, 24]
    frequencies = 10000.0 ** -(torch.arange(64) / 64)
    rotary = SimpleNamespace(inv_freq=frequencies, rotary_interleaved=False, seq_len_interpolation_factor=None)
    owner = SimpleNamespace(rotary_pos_emb=rotary, mrope_section=sections)
    embedding = megatron._RotaryEmbedding(megatron.MegatronInstallation(True), owner, True, "mrope", "chunked", ROWS)
    site = object.__new__(megatron._Site)
    site._embedding, site._packed, site._rotated, site._mscale = embedding, None, [], 1.0
    site._attention = SimpleNamespace(pg_collection=SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1)))
    site._adjust = lambda context, q, k, v, carried: (q, k, v, carried, None, None)
    context = _Context()
    positions = torch.randint(0, ROWS, (3, 1, TOKENS + 1))
    calls.clear()
    outputs = []
    for start, count in ((0, TOKENS), (TOKENS, 1)):
        context.sequence_len_offset = start
        carried = embedding.rotary_forward(positions[..., start : start + count])
        q, k = torch.randn(count, 1, 4, HEAD).to(dtype), torch.randn(count, 1, 2, HEAD).to(dtype)
        outputs.append(site.adjust(context, q, k, k, (carried, carried))[3])
    return {
        "called": [name for name, _, _ in calls],
        "given": [_described(call) for call in calls],
        "handed_on": outputs,
        "calls": dict(embedding.installation.calls),
    }


class _Context:
    """What the site asks of Megatron's static inference context."""

    sequence_len_offset = batch_size_offset = 0

    def is_static_batching(self) -> bool:
        return True
