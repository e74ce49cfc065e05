"""Peers of training attention and of the indexer's selection.

They are straightforward torch formulas, torch's own operators, and whorl's plain Triton kernels where whorl's Gluon
kernels are the ones chosen.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.bench.peer import (
    Function,
    Outputs,
    Peer,
    PeersOf,
    Values,
    backward_peers,
    compiled_functions,
    forward_peers,
    pick,
)
from whorl.ops.sparse_attention.bits import unpack

_GATHER = "gather and two products"


def eager_sparse(q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int) -> Tensor:
    """Sparse attention by gathering keys and two batched products in the dtype of q. Every index must be valid."""
    keys = kv[:, 0][indices.long()]
    weights = torch.softmax(q @ keys.transpose(1, 2) * scale, -1, dtype=torch.float32).to(q.dtype)
    return weights @ keys[..., :value_dim]


def _first(gold: list[Tensor]) -> Outputs:
    return gold[:1]


def _is_full(values: Values) -> bool:
    return bool((values["indices"] >= 0).all())


def _plain_triton(values: Values, width: int, name: str, arguments: tuple[str, ...], **more: Any) -> list[Peer]:
    """Return the plain Triton kernels as a peer, unless the operator already runs them. width: of the values."""
    from whorl.ops.sparse_attention import launch

    q = values["q"]
    if launch.hopper_reason(q.shape[1], q.shape[2], width, q.dtype, q.device) is not None:
        return []
    function = getattr(launch, name)

    def run(*tensors: Any) -> Any:
        return function(**dict(zip(arguments, tensors, strict=True)), **more, use_gluon=False)

    return forward_peers({"our kernels in plain Triton": run}, pick(*arguments))


def _sparse(values: Values, compiled: bool) -> list[Peer]:
    value_dim = values["value_dim"] or values["q"].shape[2]
    names = ("q", "kv", "indices", "scale")
    peers = _plain_triton(values, value_dim, "forward", names, value_dim=value_dim, deterministic=False)
    if not _is_full(values):
        return peers
    functions: dict[str, Function] = {f"{_GATHER}, eager": eager_sparse}
    functions |= compiled_functions({_GATHER: eager_sparse}, compiled)
    return peers + forward_peers(functions, lambda v: [*pick(*names)(v), value_dim], select_expected=_first)


def _sparse_backward(values: Values, compiled: bool) -> list[Peer]:
    value_dim = values["dout"].shape[2]
    names = ("dout", "dlse", "q", "kv", "indices", "out", "lse", "scale", "deterministic")
    peers = _plain_triton(values, value_dim, "backward", names)
    if not _is_full(values) or values["dlse"] is not None:
        return peers
    return peers + backward_peers(
        {f"{_GATHER}, eager": eager_sparse},
        pick("q", "kv"),
        pick("dout"),
        constants=lambda v: [v["indices"], v["scale"], value_dim],
    )


# ---- masked and causal attention


def _sdpa_masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _mask(values: Values) -> list[Any]:
    return [values["scale"], unpack(values["bits"], values["k"].shape[0])]


def _sdpa_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return torch's causal attention, which has no packed sequences."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def _heads_first(values: Values) -> list[Tensor]:
    """Return q, k and v in torch's order [1, H, T, D]."""
    return [values[n].transpose(0, 1)[None].contiguous() for n in ("q", "k", "v")]


def _tokens_first(out: Any) -> list[Tensor]:
    return [x[0].transpose(0, 1) for x in (out if isinstance(out, tuple | list) else (out,))]


def _fits_mask(values: Values) -> bool:
    """Return whether torch's attention fits: every query must see a key, or torch gives NaN where whorl gives 0."""
    same_heads = values["q"].shape[1] == values["k"].shape[1]
    return same_heads and bool(values["bits"].any(-1).all()) and values["q"].shape[0] > 0


def _is_one_sequence(values: Values) -> bool:
    one_sequence = [0, values["q"].shape[0]]
    return not values["window"] and one_sequence[1] > 0 and values["starts"].tolist() == one_sequence


def _sdpa(
    kind: str, function: Function, constants: Callable[[Values], list[Any]], fits: Callable[[Values], bool]
) -> dict[str, PeersOf]:
    """Return the peers functions of attention and of its backward: torch's own."""
    functions = {f"scaled_dot_product_attention, {kind}": function}
    forward = forward_peers(
        functions, lambda v: [*_heads_first(v), *constants(v)], outputs=_tokens_first, select_expected=_first
    )
    backward = backward_peers(
        functions,
        _heads_first,
        lambda v: [v["dout"].transpose(0, 1)[None].contiguous()],
        constants=constants,
        outputs=_tokens_first,
    )
    return {
        "": lambda values, compiled: forward if fits(values) else [],
        "_backward": lambda values, compiled: backward if fits(values) and values["dlse"] is None else [],
    }


# ---- selection


def _top_k(values: Values, compiled: bool) -> list[Peer]:
    """Return torch.topk, which has no causal bounds and therefore gets masked scores.

    Among equal scores it may take any, so the scores of the selected keys are compared, not their indices.
    """
    (num_queries, num_keys), topk = values["scores"].shape, values["topk"]
    if values.get("ends") is not None or num_keys - num_queries + 1 < topk:
        return []

    def arguments(values: Values) -> list[Any]:
        seen = torch.ones_like(values["scores"], dtype=torch.bool).tril(num_keys - num_queries)
        return [values["scores"].masked_fill(~seen, -torch.inf), topk]

    def ranked(gold: list[Tensor]) -> Outputs:
        return [gold[1].sort(-1, descending=True).values]

    return forward_peers(
        {"torch.topk": torch.topk}, arguments, outputs=lambda out: [out.values], select_expected=ranked
    )


_MASKED = _sdpa("boolean mask", _sdpa_masked, _mask, _fits_mask)
_CAUSAL = _sdpa("causal", _sdpa_causal, lambda values: [values["scale"]], _is_one_sequence)
ATTENTION_PEERS: dict[str, PeersOf] = {
    "sparse_attention": _sparse,
    "sparse_attention_backward": _sparse_backward,
    **{f"masked_attention{suffix}": peers for suffix, peers in _MASKED.items()},
    **{f"causal_attention{suffix}": peers for suffix, peers in _CAUSAL.items()},
    "top_k": _top_k,
}
