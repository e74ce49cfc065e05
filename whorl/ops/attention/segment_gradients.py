"""Gradients of attention within packed segments, a segment at a time: what the backends share."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..sparse_attention.bits import causal_bits
from ..sparse_attention.masked import masked_attention, masked_attention_backward
from .packed import Gradients, sequences


def plain_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: list[int], scale: float) -> Gradients:
    """Return dq, dk and dv by torch's products."""
    kernels = masked_attention.reference, masked_attention_backward.reference
    return by_segment(*kernels, dout, q, k, v, starts, scale)


def by_segment(
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Gradients],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    scale: float,
) -> Gradients:
    """Return dq, dk and dv. forward, backward: implementations of `masked_attention` and its backward."""
    grads, end = [], 0
    for part in sequences("packed_attention_backward", starts, len(q)):
        count, end = part.stop - part.start, part.stop
        bits = causal_bits(1, count, q.device).expand(count, -1).contiguous()  # every key
        inputs = {"q": q[part], "k": k[part], "v": v[part], "bits": bits, "scale": scale}
        out, lse = forward(**inputs)
        grads.append(backward(dout=dout[part], out=out, lse=lse, dlse=None, **inputs))
    padding = [torch.zeros_like(x[end:], memory_format=torch.contiguous_format) for x in (q, k, v)]
    dq, dk, dv = (torch.cat(parts) for parts in zip(*grads, padding, strict=True))
    return dq, dk, dv
