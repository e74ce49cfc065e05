"""What the references of fused experts share: the activation, and the order in which choices are added."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._op import narrow, widen


def activate(both: Tensor) -> Tensor:
    """Return silu(gate) * up of both [.., 2F], gate first, as [.., F]; computed in fp32, rounded to both's dtype.

    It uses exp instead of torch.sigmoid for the reason that `route.py` gives.
    """
    gate, up = widen(both).chunk(2, -1)
    return narrow(gate / (1 + torch.exp(-gate)) * up, both.dtype)


def run_routed(x: Tensor, weights: Tensor, ids: Tensor, run_expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return y like x: for each token the weighted sum of its experts' results, added in the order of its choices.

    x: [T, C]; weights, ids: [T, K]; run_expert(e, rows) computes expert e on rows [n, C] of x, in x's dtype.
    """
    flat, y = ids.flatten(), widen(x.new_zeros(x.shape))
    if ids.shape[1]:
        order = torch.sort(flat, stable=True).indices
        pairs_by_expert = enumerate(order.split(torch.bincount(flat).tolist() or [0]))
        # Without tokens the first expert runs with none, so that gradients have a graph.
        chosen = [(e, pairs) for e, pairs in pairs_by_expert if len(pairs) or not len(flat)]
        outputs = torch.cat([run_expert(e, x[pairs // ids.shape[1]]) for e, pairs in chosen])
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        parts = widen(outputs[inverse].view(*ids.shape, x.shape[1]))
        for choice in range(ids.shape[1]):
            y = y + parts[:, choice] * weights[:, choice, None].to(y.dtype)
    return narrow(y, x.dtype)
