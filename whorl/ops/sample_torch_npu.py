"""Sampling on Ascend: npu_top_k_top_p filters the logits; the noise is the reference's."""

import torch
from torch import Tensor

from whorl.contracts import top_k_top_p_limit

from . import _torch_npu
from ._torch_npu import dtype_name


def reason(logits: Tensor, **_: object) -> str | None:
    """Return None, or the reason that npu_top_k_top_p cannot take these logits."""
    return top_k_top_p_limit(shape=logits.shape, dtype=dtype_name(logits))


def forward(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, noise: Tensor) -> Tensor:
    is_drawn = temperature > 0
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(is_drawn, temperature, 1).unsqueeze(1)
    chosen = (_cut(scaled, top_k, top_p, min_p) + noise).argmax(-1)
    return torch.where(is_drawn, chosen, logits.argmax(-1))


def _cut(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Apply top-k, top-p and min-p; return `scaled` with minus infinity for excluded tokens.

    scaled: [B, V], logits divided by the temperature and shifted so that the highest of each row is 0.
    """
    ks = _torch_npu.on_host(top_k)
    takes_top_k = all(top_k_top_p_limit(shape=scaled.shape, dtype=dtype_name(scaled), top_k=k) is None for k in ks)
    if not takes_top_k and any(ks):  # top-k is off for some sequences, or larger than the operator takes
        scaled = _keep_highest(scaled, top_k)
    k = top_k.int() if takes_top_k else None
    filtered = _torch_npu.call("npu_top_k_top_p", logits=scaled, p=top_p.to(scaled.dtype), k=k)
    # The operator may drop tokens equal to the last one it keeps; the contract keeps them.
    lowest = filtered.masked_fill(filtered == -torch.inf, torch.inf).amin(-1, keepdim=True)
    return scaled.masked_fill((scaled < lowest) | (torch.exp(scaled) < min_p.unsqueeze(1)), -torch.inf)


def _keep_highest(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Set everything below the k-th highest of each row to minus infinity; top_k 0 keeps all."""
    size = scaled.shape[1]
    last = torch.where(top_k > 0, top_k, size).clamp_max(size).long() - 1
    lowest = scaled.sort(-1, descending=True).values.gather(1, last.unsqueeze(1))
    return scaled.masked_fill(scaled < lowest, -torch.inf)
