"""Convert between latents and heads: split `wkv_b` by head, expand keys and values, absorb queries."""

import torch
from torch import Tensor


def split_heads(weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Return wkv_b as key weights [H, Dn, Dc] and value weights [H, Dv, Dc]."""
    both = weight.unflatten(0, (heads, -1))
    return both[:, :nope], both[:, nope:]


def expand_heads(kv: Tensor, k_pe: Tensor, weight: Tensor, nope: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return k [N, H, Dn + Dr] and v [N, H, Dv] of latents [N, Dc], both contiguous."""
    key_weight, value_weight = (part.flatten(0, 1) for part in split_heads(weight, heads, nope))
    k = kv.new_empty(kv.shape[0], heads, nope + k_pe.shape[1])
    k[..., :nope] = (kv @ key_weight.T).unflatten(1, (heads, nope))
    k[..., nope:] = k_pe[:, None]
    return k, (kv @ value_weight.T).unflatten(1, (heads, -1))


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the batched product of a and b into `out`, which may have any strides."""
    if torch.compiler.is_compiling():  # it supports only contiguous results, and fuses the copy
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


def absorb_queries(q_nope: Tensor, q_pe: Tensor, key_weight: Tensor) -> Tensor:
    """Return queries multiplied by the key weights, so that they can attend to latents: [N, H, Dc + Dr]."""
    rank = key_weight.shape[2]
    q = q_nope.new_empty(*q_nope.shape[:2], rank + q_pe.shape[2])
    bmm_into(q[..., :rank].transpose(0, 1), q_nope.transpose(0, 1), key_weight)
    q[..., rank:] = q_pe
    return q
