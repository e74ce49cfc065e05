"""`qk_norm_rope_write` and `paged_attention` in one operator, for steps in which every sequence has one new token."""

from typing import Any

import torch
from torch import Tensor

from .._draw import Draw, Sizes
from .._op import Values, operator
from .._tracing import is_readable
from ..rope.tables import Style
from . import paged_cases
from .paged import check_attention, paged_attention
from .qk_norm_rope import make_case
from .qk_norm_rope_write import check_write, qk_norm_rope_write


def _check(qkv: Tensor, out: Tensor, scale: float, window: int, **options: Any) -> None:
    name = "qk_norm_rope_decode"
    tables = {n: options.pop(n) for n in ("block_tables", "query_starts", "context_lens")}
    caches = {n: options[n] for n in ("k_cache", "v_cache", "k_scale", "v_scale")}
    check_write(qkv, out, name=name, **options)
    check_attention(out, window=window, scale=scale, name=name, **caches, **tables)
    starts = tables["query_starts"]
    if is_readable(starts) and len(starts) > 1 and int(starts.diff().max()) > 1:
        raise ValueError(f"{name}: a sequence has {int(starts.diff().max())} new tokens, expected at most one")


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of the projection and the result, and of the keys and values that block_tables has room for."""
    qkv, out, cache = values["qkv"], values["out"], values["k_cache"]
    keys = values["block_tables"].numel() * cache.shape[1]
    head = cache.shape[3] * cache.element_size() + (0 if values.get("k_scale") is None else 4)
    return (qkv.numel() + out.numel()) * qkv.element_size() + 2 * keys * cache.shape[2] * head


NO_NPU = (
    "torch_npu has no operator that rotates and attends: the engine calls qk_norm_rope_write and paged_attention there"
)


@operator(
    check=_check,
    mutates=("out", "k_cache", "v_cache", "k_scale", "v_scale"),
    bytes=_bytes,
    without={"torch_npu": NO_NPU},
)
def qk_norm_rope_decode(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    eps: float = 1e-6,
    plus_one: bool = False,
    style: Style = "half",
) -> None:
    """Normalise, rotate and cache one new token of each sequence, and let it attend over its sequence's keys.

    qkv: [T, (HQ + 2 HK) D], q_weight, k_weight, cos_sin, slots and the caches as in `qk_norm_rope_write`; block_tables,
    query_starts, context_lens, scale and window as in `paged_attention`, for sequences of at most one new token each;
    slots must be the places of these tokens in block_tables; out: [T, HQ, D] in qkv's dtype, written. The bits are
    those of the two operators, one after the other. Returns nothing. Raises ValueError when shapes or dtypes do not
    fit, and when a sequence has more than one new token, where that can be seen without waiting for a device.

        ops.qk_norm_rope_decode(
            qkv, q_norm, k_norm, rows, out, k_cache, v_cache, slots, block_tables, query_starts, context_lens,
            num_heads=32, num_kv_heads=4, scale=128**-0.5,
        )
    """
    q = torch.empty_like(out)
    options: Values = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "eps": eps, "plus_one": plus_one}
    tensors = qkv, q_weight, k_weight, cos_sin, q, k_cache, v_cache, slots, k_scale, v_scale
    qk_norm_rope_write.reference(*tensors, style=style, **options)
    tables = block_tables, query_starts, context_lens, k_scale, v_scale
    out.copy_(paged_attention.reference(q, k_cache, v_cache, *tables, scale=scale, window=window))


def _triton_reason(qkv: Tensor, out: Tensor, num_heads: int, num_kv_heads: int, **arguments: Any) -> str | None:
    write = qk_norm_rope_write.impls["triton"].accepts(
        qkv=qkv,
        q=out,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        **{n: arguments[n] for n in ("cos_sin", "k_cache", "v_cache")},
    )
    return write or paged_attention.impls["triton"].accepts(q=out, scale=arguments["scale"])


qk_norm_rope_decode.impl("triton", "qk_norm_rope_decode_triton:forward", accepts=_triton_reason)


_CASES: list[Values] = [
    {"contexts": (1,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"contexts": (300, 0, 129), "heads": 4, "kv_heads": 2, "dim": 32},
    {"contexts": (140,), "heads": 8, "kv_heads": 1, "dim": 64, "scale": 0.01},
    {"contexts": (300, 40), "heads": 4, "kv_heads": 2, "dim": 32, "window": 150, "sliced": True, "style": "pairs"},
    {"contexts": (), "heads": 2, "kv_heads": 1, "dim": 16},
    {"contexts": (260,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48, "plus_one": True},  # by two kernels
    {"contexts": (140, 7), "heads": 4, "kv_heads": 2, "dim": 32, "format": "fp8"},  # likewise
]
_QWEN = {"heads": 32, "kv_heads": 4, "dim": 128, "block": 16}
_BENCH: list[Values] = [{"contexts": (keys,), **_QWEN} for keys in (256, 4096)]


def _with_tokens(case: Values) -> Values:
    return {"tokens": (len(case["contexts"]),), **case}


def _make(
    draw: Draw,
    contexts: Sizes,
    kv_heads: int,
    dim: int,
    tokens: Sizes,
    block: int = 8,
    window: int = 0,
    format: str = "",
    **case: Any,
) -> Values:
    """Make the arguments. contexts: keys of each sequence, the new one included; 0: the sequence has no new token."""
    values = make_case(draw, looked_up=True, kv_heads=kv_heads, dim=dim, tokens=tokens, **case)
    counts = tuple(min(count, 1) for count in contexts)
    paged = paged_cases.make(draw, counts, contexts, kv_heads, kv_heads, dim, block, window, format)
    integers: Values = {"dtype": torch.int64, "device": draw.device}
    last = torch.tensor([max(count - 1, 0) for count in contexts], **integers)
    blocks = paged["block_tables"].gather(1, last[:, None] // block)[:, 0]
    slots = torch.where(torch.tensor(counts, **integers) > 0, blocks * block + last % block, -1)
    # Tokens of the sequences that have one come first; the others are padding.
    order = sorted(range(len(counts)), key=lambda b: not counts[b])
    slots = slots[torch.tensor(order, **integers)]
    values = {n: v for n, v in values.items() if n not in ("positions", "sections", "layout", "with_v")}
    paged = {n: v for n, v in paged.items() if n != "q"}
    out = torch.zeros(len(contexts), values["num_heads"], dim, **draw.kind)
    return values | paged | {"out": out, "slots": slots}


qk_norm_rope_decode.inputs(cases=[_with_tokens(c) for c in _CASES], bench=[_with_tokens(c) for c in _BENCH])(_make)
