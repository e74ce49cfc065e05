"""Forwards that compute the engine's bits, for the modules of trainers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whorl import ops
from whorl.nn import check_compiled, segmented_linear


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of attention. style: which channels are a pair in q and k; they are attended to in half order, as the
    engine's are. window: keys that a query sees; 0: all."""

    num_heads: int
    num_kv_heads: int
    scale: float
    window: int = 0
    style: Literal["half", "pairs"] = "half"
    where: Literal["leading", "trailing"] = "leading"


def as_codes(rows: Tensor) -> Tensor:
    """Return fp32 rows as integers with the same bits: FSDP2 rounds what is fp32 among the inputs of a layer."""
    return rows.view(torch.int32)


def linear(self: Any, input: Tensor) -> Tensor:
    """The forward of a linear layer."""
    check_compiled()  # here, too: layers may be compiled one by one
    y = ops.linear(input.flatten(0, -2), self.weight, self.bias)
    return y.view(*input.shape[:-1], -1)  # type: ignore[no-any-return]


def segmented(count: int) -> Callable[..., Tensor]:
    """Return the forward of a linear layer whose K is cut into `count` segments."""

    def forward(self: Any, input: Tensor) -> Tensor:
        check_compiled()
        y = segmented_linear(input.flatten(0, -2), self.weight, self.bias, count)
        return y.view(*input.shape[:-1], -1)

    return forward


def attend(qkv: Tensor, codes: Tensor, starts: Tensor, heads: Heads, norms: tuple[Any, Any, float] | None) -> Tensor:
    """Return the output of attention [T, HQ D] of qkv [T, (HQ + 2 HK) D].

    codes: `as_codes` of the tokens' rows of the rotary table; starts: cu_seqlens. norms: the norms of q and k heads,
    and their epsilon.
    """
    rotary = codes.view(torch.float32)
    if norms is not None:
        q_norm, k_norm, eps = norms
        counts: dict[str, Any] = {"num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads}
        weights = q_norm.weight, k_norm.weight
        q, k, v = ops.qk_norm_rope(qkv, *weights, rotary, **counts, eps=eps, style=heads.style)
    else:
        split = qkv.view(len(qkv), heads.num_heads + 2 * heads.num_kv_heads, -1)
        styles: dict[str, Any] = {"style": heads.style, "out_style": "half", "where": heads.where}
        qk, _ = ops.rope(split[:, : -heads.num_kv_heads], None, rotary, **styles)
        q, k, v = qk[:, : heads.num_heads], qk[:, heads.num_heads :], split[:, -heads.num_kv_heads :]
    return ops.causal_attention(q, k, v, starts, scale=heads.scale, window=heads.window)[0].flatten(1)  # type: ignore[no-any-return]
