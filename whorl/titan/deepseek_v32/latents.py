"""Between latents and heads: `wkv_b` by head, keys and values of heads, and queries that meet latents themselves."""

import torch
from torch import Tensor


def by_head(weight: Tensor, heads: int, nope: int) -> tuple[Tensor, Tensor]:
    """wkv_b as [H, Dn, Dc] of keys and [H, Dv, Dc] of values."""
    both = weight.unflatten(0, (heads, -1))
    return both[:, :nope], both[:, nope:]


def heads_of(kv: Tensor, k_pe: Tensor, weight: Tensor, nope: int, heads: int) -> tuple[Tensor, Tensor]:
    """k [N, H, Dn + Dr] and v [N, H, Dv], contiguous, of latents [N, Dc]."""
    key_weight, value_weight = (part.flatten(0, 1) for part in by_head(weight, heads, nope))
    k = kv.new_empty(kv.shape[0], heads, nope + k_pe.shape[1])
    k[..., :nope] = (kv @ key_weight.T).unflatten(1, (heads, nope))
    k[..., nope:] = k_pe[:, None]
    return k, (kv @ value_weight.T).unflatten(1, (heads, -1))


def bmm_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """A product written where it belongs, whatever the strides."""
    if torch.compiler.is_compiling():  # which knows contiguous results only, and fuses the copy
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


def absorbed(q_nope: Tensor, q_pe: Tensor, key_weight: Tensor) -> Tensor:
    """Queries that meet the latents themselves, [N, H, Dc + Dr]; written where they belong at once."""
    rank = key_weight.shape[2]
    q = q_nope.new_empty(*q_nope.shape[:2], rank + q_pe.shape[2])
    bmm_into(q[..., :rank].transpose(0, 1), q_nope.transpose(0, 1), key_weight)
    q[..., rank:] = q_pe
    return q
