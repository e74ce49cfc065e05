"""`qk_norm_rope` and `write_kv` in one operator: keys and values are written directly into the paged cache."""

from typing import Any

import torch
from torch import Tensor

from .._check import check_cache, check_slots
from .._draw import Draw
from .._formats import FORMATS
from .._op import Values, operator
from ..rope.tables import Style
from .qk_norm_rope import check_qkv, make_case, qk_norm_rope, split_heads, triton_reason
from .write_kv import draw_caches, write_kv


def _check(qkv: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **options: Any) -> None:
    name, num_heads, num_kv_heads = "qk_norm_rope_write", options["num_heads"], options["num_kv_heads"]
    options.pop("style")
    scales = options.pop("k_scale"), options.pop("v_scale")
    check_qkv(name, qkv, positions=None, sections=None, layout="chunked", **options)
    check_cache(name, k_cache, v_cache, *scales)
    dim = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    if qkv.dim() != 2 or q.shape != (qkv.shape[0], num_heads, dim) or q.dtype != qkv.dtype:
        raise ValueError(
            f"{name}: qkv is {list(qkv.shape)}, q {list(q.shape)} {q.dtype}, expected [T, (HQ + 2 HK) D] and "
            f"[T, {num_heads}, {dim}] in {qkv.dtype}"
        )
    if k_cache.shape[2:] != (num_kv_heads, dim) or (scales[0] is None and k_cache.dtype != qkv.dtype):
        raise ValueError(
            f"{name}: k_cache is {list(k_cache.shape)} {k_cache.dtype}, expected [blocks, block size, {num_kv_heads}, "
            f"{dim}] in {qkv.dtype}"
        )
    check_slots(name, slots, qkv.shape[0], k_cache)


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    qkv, table = values["qkv"], values["cos_sin"]
    return 2 * qkv.numel() * qkv.element_size() + table.numel() * table.element_size()


@operator(check=_check, mutates=("q", "k_cache", "v_cache", "k_scale", "v_scale"), bytes=_bytes)
def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    plus_one: bool = False,
    style: Style = "half",
) -> None:
    """Normalise and rotate the query and key heads of new tokens; store q, and write k and v into the cache.

    qkv: [T, (HQ + 2 HK) D], q_weight, k_weight: [D], cos_sin: [T, R] with one row per token, all as in `qk_norm_rope`;
    q: [T, HQ, D], written; k_cache, v_cache: [blocks, block size, HK, D], written; slots: [T] and, where the cache
    holds codes, k_scale and v_scale, written, all as in `write_kv`. Values are rounded to qkv's dtype before they are
    quantised. Returns nothing. Raises ValueError when shapes or dtypes do not fit.

        ops.qk_norm_rope_write(qkv, q_norm, k_norm, rows, q, k_cache, v_cache, slots, num_heads=32, num_kv_heads=4)
    """
    options: Values = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "eps": eps, "plus_one": plus_one}
    reference = qk_norm_rope.reference
    rotated, k, v = reference(qkv, q_weight, k_weight, cos_sin, style=style, with_v=True, **options)
    q.copy_(rotated)
    write_kv.reference(k, v, k_cache, v_cache, slots, k_scale, v_scale)


# ---- backends


def _triton_reason(
    qkv: Tensor,
    cos_sin: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    **_: object,
) -> str | None:
    if k_cache.stride() != v_cache.stride() or not k_cache.stride(-1) == q.stride(-1) == 1:
        return "writes contiguous channels into two caches of equal strides"
    return triton_reason(qkv, cos_sin, num_heads, num_kv_heads)


qk_norm_rope_write.impl("triton", "qk_norm_rope_triton:write", accepts=_triton_reason)


def _npu_reason(
    qkv: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    **arguments: Any,
) -> str | None:
    k, v = split_heads(qkv, num_heads, num_kv_heads)[1:]
    cache = {name: arguments[name] for name in ("k_cache", "v_cache", "slots", "k_scale", "v_scale")}
    write = write_kv.impls["torch_npu"].accepts(k=k, v=v, **cache)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return write or qk_norm_rope.impls["torch_npu"].accepts(qkv=qkv, cos_sin=cos_sin, **heads)


@qk_norm_rope_write.impl("torch_npu", accepts=_npu_reason)
def _(q: Tensor, **arguments: Any) -> None:
    cache = {name: arguments.pop(name) for name in ("k_cache", "v_cache", "slots", "k_scale", "v_scale")}
    norm_rope = qk_norm_rope.impls["torch_npu"].function
    rotated, k, v = norm_rope(**arguments, positions=None, sections=None, layout="chunked", with_v=True)
    q.copy_(rotated)
    write_kv.impls["torch_npu"].function(k=k, v=v, **cache)


# ---- cases


_CASES: list[Values] = [
    {"tokens": (1,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"tokens": (17,), "heads": 4, "kv_heads": 2, "dim": 128, "scale": 0.01},
    {"tokens": (6,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48, "plus_one": True, "skipped": True},
    {"tokens": (5,), "heads": 4, "kv_heads": 1, "dim": 64, "style": "pairs"},
    {"tokens": (0,), "heads": 2, "kv_heads": 1, "dim": 64},
    {"tokens": (9,), "heads": 2, "kv_heads": 1, "dim": 64, "sliced": True, "eps": 1e-3},
    {"tokens": (3,), "heads": 8, "kv_heads": 8, "dim": 128, "block": 128},
    {"tokens": (4,), "heads": 2, "kv_heads": 1, "dim": 64, "short": True, "skipped": True},  # slots in int32
    {"tokens": (5,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48, "format": "int8", "skipped": True},
    {"tokens": (4,), "heads": 4, "kv_heads": 2, "dim": 64, "style": "pairs", "format": "fp8", "sliced": True},
    {"tokens": (3,), "heads": 2, "kv_heads": 2, "dim": 128, "format": "fp8", "scale": 0.01},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "heads": 32, "kv_heads": 4, "dim": 128, "block": 16} for tokens in (1, 64, 8192)
]
_BENCH += [_BENCH[1] | {"format": name} for name in FORMATS]


def _make(
    draw: Draw, block: int = 4, skipped: bool = False, short: bool = False, format: str = "", **case: Any
) -> Values:
    """Make the arguments, with random slots; skipped: every third token has none; short: slots are int32.

    In a sliced case the cache has gaps between its blocks.
    """
    values = make_case(draw, looked_up=True, **case)
    (count,), kv_heads, dim, device = case["tokens"], case["kv_heads"], case["dim"], draw.device
    blocks = -(-count // block) + 1
    shape = (blocks, block + 2 * draw.sliced, kv_heads, dim)
    caches = draw_caches(draw, shape, format)
    caches |= {name: caches[name][:, :block] for name in ("k_cache", "v_cache")}
    if format:
        caches |= {name: caches[name][..., :block].contiguous() for name in ("k_scale", "v_scale")}
    slots = torch.randperm(blocks * block, device=device)[:count]
    if skipped:
        slots = torch.where(torch.arange(count, device=device) % 3 == 1, -1, slots)
    slots = slots.int() if short else slots
    q = torch.zeros(count, values["num_heads"], dim, **draw.kind)
    values = {n: v for n, v in values.items() if n not in ("positions", "sections", "layout", "with_v")}
    return values | {"q": q, **caches, "slots": slots}


qk_norm_rope_write.inputs(cases=_CASES, bench=_BENCH)(_make)
