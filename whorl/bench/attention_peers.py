"""Peers of training attention and of the indexer's selection.

They are straightforward torch formulas, torch's own operators, and whorl's plain Triton kernels where whorl's Gluon
kernels are the ones chosen.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.bench.peer import Bound, Outputs, Peer, Values, backward_alone, compile_static
from whorl.ops.sparse_attention.bits import unpack


def eager_sparse(q: Tensor, kv: Tensor, indices: Tensor, scale: float, value_dim: int) -> Tensor:
    """Sparse attention by gathering keys and two batched products in the dtype of q. Every index must be valid."""
    keys = kv[:, 0][indices.long()]
    weights = torch.softmax(q @ keys.transpose(1, 2) * scale, -1, dtype=torch.float32).to(q.dtype)
    return weights @ keys[..., :value_dim]


def _first(gold: list[Tensor]) -> Outputs:
    return gold[:1]


def _is_full(values: Values) -> bool:
    return bool((values["indices"] >= 0).all())


def _plain_triton_peers(bind: Callable[[Values], Bound], values: Values, value_dim: int) -> list[Peer]:
    from whorl.ops.sparse_attention.launch import hopper_reason

    q = values["q"]
    if hopper_reason(q.shape[1], q.shape[2], value_dim, q.dtype, q.device) is not None:
        return []  # the operator already runs the plain Triton kernels
    return [Peer(label="our kernels in plain Triton", bind=bind)]


def _sparse(values: Values, compiled: bool) -> list[Peer]:
    value_dim = values["value_dim"] or values["q"].shape[2]

    def bind_eager(function: Callable[..., Tensor]) -> Callable[[Values], Bound]:
        def bind(values: Values) -> Bound:
            arguments = [values[n] for n in ("q", "kv", "indices", "scale")]
            return Bound(run=lambda: function(*arguments, value_dim), outputs=lambda out: [out])

        return bind

    def bind_plain(values: Values) -> Bound:
        from whorl.ops.sparse_attention.launch import forward

        arguments = {n: values[n] for n in ("q", "kv", "indices", "scale")}
        return Bound(
            run=lambda: forward(**arguments, value_dim=value_dim, deterministic=False, use_gluon=False), outputs=list
        )

    peers = _plain_triton_peers(bind_plain, values, value_dim)
    if _is_full(values):
        peers.append(
            Peer(label="gather and two products, eager", bind=bind_eager(eager_sparse), select_expected=_first)
        )
        if compiled:
            label = "gather and two products, torch.compile"
            peers.append(Peer(label=label, bind=bind_eager(compile_static(eager_sparse)), select_expected=_first))
    return peers


def _sparse_backward(values: Values, compiled: bool) -> list[Peer]:
    value_dim = values["dout"].shape[2]

    def bind_eager(values: Values) -> Bound:
        def forward(q: Tensor, kv: Tensor) -> Tensor:
            return eager_sparse(q, kv, values["indices"], values["scale"], value_dim)

        run = backward_alone(forward, [values["q"], values["kv"]], [values["dout"]])
        return Bound(run=run, outputs=list)

    def bind_plain(values: Values) -> Bound:
        from whorl.ops.sparse_attention.launch import backward

        names = ("dout", "dlse", "q", "kv", "indices", "out", "lse", "scale", "deterministic")
        arguments = {n: values[n] for n in names}
        return Bound(run=lambda: backward(**arguments, use_gluon=False), outputs=list)

    peers = _plain_triton_peers(bind_plain, values, value_dim)
    if _is_full(values) and values["dlse"] is None:
        label = "gather and two products, eager, backward alone"
        peers.append(Peer(label=label, bind=bind_eager, through_autograd=True))
    return peers


# ---- masked and causal attention

Attend = Callable[[Values], Callable[[Tensor, Tensor, Tensor], Tensor]]


def _masked(values: Values) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mask = unpack(values["bits"], values["k"].shape[0])
    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask, scale=values["scale"])


def _causal(values: Values) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's causal attention, which has no packed sequences."""
    return functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=values["scale"], enable_gqa=True)


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


def _sdpa(kind: str, attend: Attend, fits: Callable[[Values], bool]) -> Callable[[Values, bool], list[Peer]]:
    """Return the peers function of attention: torch's own."""

    def bind(values: Values) -> Bound:
        function, arguments = attend(values), _heads_first(values)
        return Bound(run=lambda: function(*arguments), outputs=_tokens_first)

    peer = Peer(label=f"scaled_dot_product_attention, {kind}", bind=bind, select_expected=_first)
    return lambda values, compiled: [peer] if fits(values) else []


def _sdpa_backward(kind: str, attend: Attend, fits: Callable[[Values], bool]) -> Callable[[Values, bool], list[Peer]]:
    """Return the peers function of the backward of attention."""

    def bind(values: Values) -> Bound:
        grads = [values["dout"].transpose(0, 1)[None].contiguous()]
        return Bound(run=backward_alone(attend(values), _heads_first(values), grads), outputs=_tokens_first)

    label = f"scaled_dot_product_attention, {kind}, backward alone"
    peer = Peer(label=label, bind=bind, through_autograd=True)
    return lambda values, compiled: [peer] if fits(values) and values["dlse"] is None else []


# ---- selection


def _top_k(values: Values, compiled: bool) -> list[Peer]:
    """Return torch.topk, which has no causal bounds and therefore gets masked scores.

    Among equal scores it may take any, so the scores of the selected keys are compared, not their indices.
    """
    (num_queries, num_keys), topk = values["scores"].shape, values["topk"]
    if values.get("ends") is not None or num_keys - num_queries + 1 < topk:
        return []

    def bind(values: Values) -> Bound:
        seen = torch.ones_like(values["scores"], dtype=torch.bool).tril(num_keys - num_queries)
        scores = values["scores"].masked_fill(~seen, -torch.inf)
        return Bound(run=lambda: torch.topk(scores, topk), outputs=lambda out: [out.values])

    def ranked(gold: list[Tensor]) -> Outputs:
        return [gold[1].sort(-1, descending=True).values]

    return [Peer(label="torch.topk", bind=bind, select_expected=ranked)]


ATTENTION_PEERS: dict[str, Callable[[Values, bool], list[Peer]]] = {
    "sparse_attention": _sparse,
    "sparse_attention_backward": _sparse_backward,
    "masked_attention": _sdpa("boolean mask", _masked, _fits_mask),
    "masked_attention_backward": _sdpa_backward("boolean mask", _masked, _fits_mask),
    "causal_attention": _sdpa("causal", _causal, _is_one_sequence),
    "causal_attention_backward": _sdpa_backward("causal", _causal, _is_one_sequence),
    "top_k": _top_k,
}
