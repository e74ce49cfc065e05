"""`qk_norm_rope` and `write_kv` in one operator: keys and values are written directly into the paged cache."""

from typing import Annotated, Any

from torch import Tensor

from .._check import check_scales
from .._draw import Draw
from .._formats import FORMATS
from .._op import Values, operator
from ..rope.contract import check_rotation, make_tables
from ..rope.tables import Style
from .qk_norm_rope import WORDS, qk_norm_rope, split_heads, triton_reason
from .write_kv import draw_caches, write_kv

_SCALE = Annotated[Tensor | None, "[blocks, num_kv_heads, size] fp32, contiguous"]


def _check(cos_sin: Tensor, q: Tensor, k_cache: Tensor, **scales: Any) -> None:
    check_rotation("qk_norm_rope_write", q, cos_sin, None)
    check_scales("qk_norm_rope_write", k_cache, scales["k_scale"], scales["v_scale"])


def _bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    qkv, table = values["qkv"], values["cos_sin"]
    return 2 * qkv.numel() * qkv.element_size() + table.numel() * table.element_size()


@operator(check=_check, mutates=("q", "k_cache", "v_cache", "k_scale", "v_scale"), bytes=_bytes)
def qk_norm_rope_write(
    qkv: Annotated[Tensor, "[T, (num_heads + 2*num_kv_heads)*D] float"],
    q_weight: Annotated[Tensor, "[D] qkv or fp32"],
    k_weight: Annotated[Tensor, "[D] qkv or fp32"],
    cos_sin: Annotated[Tensor, "[T, 2*H>0] fp32 or qkv, constant"],
    q: Annotated[Tensor, "[T, num_heads, D] qkv"],
    k_cache: Annotated[Tensor, "[blocks, size, num_kv_heads, D] qkv or int8 or fp8"],
    v_cache: Annotated[Tensor, "[blocks, size, num_kv_heads, D] k_cache"],
    slots: Annotated[Tensor, "[T] int, up to blocks*size - 1"],
    k_scale: _SCALE = None,
    v_scale: _SCALE = None,
    *,
    num_heads: Annotated[int, "> 0"],
    num_kv_heads: Annotated[int, "> 0"],
    eps: Annotated[float, "> 0"] = 1e-6,
    plus_one: bool = False,
    style: Style = "half",
) -> None:
    """Normalise and rotate the query and key heads of new tokens; store q, and write k and v into the cache.

    qkv, the weights and cos_sin, one row per token, are as in `qk_norm_rope`. q is written; k_cache and v_cache are
    written at slots and, where the cache holds codes, k_scale and v_scale, all as in `write_kv`. Values are rounded to
    qkv's dtype before they are quantised. Returns nothing.

        ops.qk_norm_rope_write(qkv, q_norm, k_norm, rows, q, k_cache, v_cache, slots, num_heads=32, num_kv_heads=4)
    """
    options: Values = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "eps": eps, "plus_one": plus_one}
    reference = qk_norm_rope.reference
    rotated, k, v = reference(qkv, q_weight, k_weight, cos_sin, style=style, with_v=True, **options)
    q.copy_(rotated)
    write_kv.reference(k, v, k_cache, v_cache, slots, k_scale, v_scale)


# ---- backends


def _triton_reason(q: Tensor, k_cache: Tensor, v_cache: Tensor, **arguments: Any) -> str | None:
    if k_cache.stride() != v_cache.stride() or not k_cache.stride(-1) == q.stride(-1) == 1:
        return "writes contiguous channels into two caches of equal strides"
    return triton_reason(**arguments)


qk_norm_rope_write.impl("cpp", "whorl.ops.cpu.rotation:qk_norm_rope_write")
qk_norm_rope_write.impl("triton", "qk_norm_rope_triton:write", accepts=_triton_reason)


def _npu_reason(qkv: Tensor, cos_sin: Tensor, num_heads: int, num_kv_heads: int, **arguments: Any) -> str | None:
    k, v = split_heads(qkv, num_heads, num_kv_heads)[1:]
    cache = {name: arguments[name] for name in ("k_cache", "v_cache", "slots", "k_scale", "v_scale")}
    write = write_kv.impls["torch_npu"].accepts(k=k, v=v, **cache)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    return write or qk_norm_rope.impls["torch_npu"].accepts(qkv=qkv, cos_sin=cos_sin, **heads)


@qk_norm_rope_write.impl("torch_npu", accepts=_npu_reason)
def _(q: Tensor, **arguments: Any) -> None:
    cache = {name: arguments.pop(name) for name in ("k_cache", "v_cache", "slots", "k_scale", "v_scale")}
    norm_rope = qk_norm_rope.impls["torch_npu"].function
    rotated, k, v = norm_rope(**arguments, positions=None, with_v=True)
    q.copy_(rotated)
    write_kv.impls["torch_npu"].function(k=k, v=v, **cache)


# ---- cases


_CASES: list[Values] = [
    {"tokens": (1,), "heads": 1, "kv_heads": 1, "dim": 16},
    {"tokens": (17,), "heads": 4, "kv_heads": 2, "dim": 128, "scale": 0.01},
    {"tokens": (6,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48, "plus_one": True, "skipped": True},
    {"tokens": (5,), "heads": 4, "kv_heads": 1, "dim": 64, "style": "pairs"},
    {"tokens": (0,), "heads": 2, "kv_heads": 1, "dim": 64},
    {"tokens": (9,), "heads": 2, "kv_heads": 1, "dim": 64, "sliced": 7, "eps": 1e-3},
    {"tokens": (3,), "heads": 8, "kv_heads": 8, "dim": 128, "block": 128},
    {"tokens": (4,), "heads": 2, "kv_heads": 1, "dim": 64, "short": True, "skipped": True},  # slots in int32
    {"tokens": (5,), "heads": 3, "kv_heads": 1, "dim": 96, "rotary": 48, "format": "int8", "skipped": True},
    {"tokens": (4,), "heads": 4, "kv_heads": 2, "dim": 64, "style": "pairs", "format": "fp8", "sliced": 7},
    {"tokens": (3,), "heads": 2, "kv_heads": 2, "dim": 128, "format": "fp8", "scale": 0.01},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "heads": 32, "kv_heads": 4, "dim": 128, "block": 16} for tokens in (1, 64, 8192)
]
_BENCH += [_BENCH[1] | {"format": name} for name in FORMATS]


@qk_norm_rope_write.inputs(cases=_CASES, bench=_BENCH, words=WORDS)
def _(
    draw: Draw,
    tokens: tuple[int],
    kv_heads: int,
    dim: int,
    block: int = 4,
    skipped: bool = False,
    short: bool = False,
    format: str = "",
    rotary: int = 0,
) -> Values:
    """Return random slots and caches; skipped: every third token has no slot; short: slots are int32.

    In a sliced case the cache has gaps between its blocks.
    """
    blocks = -(-tokens[0] // block) + 1
    caches = draw_caches(draw, (blocks, block + 2 * bool(draw.sliced), kv_heads, dim), format)
    caches |= {name: caches[name][:, :block] for name in ("k_cache", "v_cache")}
    if format:
        caches |= {name: caches[name][..., :block].contiguous() for name in ("k_scale", "v_scale")}
    slots = draw.slots(*tokens, blocks * block, skipped=skipped)
    table = make_tables(draw, tokens, dim, rotary, looked_up=True)["cos_sin"]
    return {"cos_sin": table, **caches, "slots": slots.int() if short else slots}
