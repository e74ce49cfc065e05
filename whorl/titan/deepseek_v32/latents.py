"""Convert between latents and heads: split `wkv_b` by head, expand keys and values, absorb queries.

A latent [Dc] is what all heads share of a token's keys and values; `wkv_b` turns it into Dn key channels and Dv value
channels for each of H heads. Dr rotated key channels, `k_pe`, are shared by all heads. N is the number of tokens.
"""

import torch
from torch import Tensor


def split_heads(weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """Return views of wkv_b [H (Dn + Dv), Dc]: key weights [H, Dn, Dc] and value weights [H, Dv, Dc]. nope: Dn."""
    both = weight.unflatten(0, (heads, -1))
    return both[:, :nope], both[:, nope:]


def expand_heads(kv: Tensor, k_pe: Tensor, weight: Tensor, nope: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return k [N, H, Dn + Dr] and v [N, H, Dv] of latents kv [N, Dc] and k_pe [N, Dr], both contiguous."""
    key_weight, value_weight = (part.flatten(0, 1) for part in split_heads(weight, heads, nope))
    k = kv.new_empty(kv.shape[0], heads, nope + k_pe.shape[1])
    k[..., :nope] = (kv @ key_weight.T).unflatten(1, (heads, nope))
    k[..., nope:] = k_pe[:, None]
    return k, (kv @ value_weight.T).unflatten(1, (heads, -1))


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write the batched product of a and b into `out`, which may have any strides."""
    if torch.compiler.is_compiling():  # torch.compile supports only contiguous results of bmm, and fuses the copy
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


def absorb_queries(q_nope: Tensor, q_pe: Tensor, key_weight: Tensor) -> Tensor:
    """Return queries [N, H, Dc + Dr] that attend directly to latents: q_nope is multiplied by the key weights.

    q_nope: [N, H, Dn]; q_pe: [N, H, Dr], copied behind it; key_weight: [H, Dn, Dc].
    """
    rank = key_weight.shape[2]
    q = q_nope.new_empty(*q_nope.shape[:2], rank + q_pe.shape[2])
    bmm_into(q[..., :rank].transpose(0, 1), q_nope.transpose(0, 1), key_weight)
    q[..., rank:] = q_pe
    return q
