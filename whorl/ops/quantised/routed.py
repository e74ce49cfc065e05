"""Reference code that `packed_experts` and `int8_experts` share: checks, routing and activation."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._check import INTEGERS, check_range


def _plain_rows(codes: Tensor) -> int:
    return codes.shape[-2]


def check_routing(
    name: str,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    num_rows: Callable[[Tensor], int] = _plain_rows,
) -> None:
    """Raise ValueError unless tokens, expert weights and routing fit; the last dim of the weights is not checked.

    num_rows: from codes to the rows of a matrix that they store.
    """
    if x.dim() != 2 or not x.is_floating_point() or not x.shape[1]:
        raise ValueError(f"{name}: x is {list(x.shape)} {x.dtype}, expected [T, C] floating point")
    is_stack = gate_up.dim() == down.dim() == 3 and len(gate_up) == len(down)
    if not is_stack or num_rows(gate_up) % 2 or num_rows(down) != x.shape[1]:
        raise ValueError(
            f"{name}: gate_up is {list(gate_up.shape)}, down {list(down.shape)}, expected codes of [E, 2F, ..] and "
            f"[E, {x.shape[1]}, ..]"
        )
    if gate_up.dtype != down.dtype:
        raise ValueError(f"{name}: gate_up is {gate_up.dtype}, down {down.dtype}, expected one dtype")
    if weights.dim() != 2 or weights.shape != ids.shape or weights.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name}: weights is {list(weights.shape)}, ids {list(ids.shape)}, expected two of [{x.shape[0]}, K]"
        )
    if not weights.is_floating_point() or ids.dtype not in INTEGERS:
        raise ValueError(
            f"{name}: weights is {weights.dtype}, ids {ids.dtype}, expected floating point and int32 or int64"
        )
    check_range(name, "ids", ids, gate_up.shape[0])


def run_routed_experts(x: Tensor, weights: Tensor, ids: Tensor, run_expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return y like x: for each token the weighted sum of its experts' results, added in the order of its choices.

    x: [T, C]; weights, ids: [T, K]; run_expert(e, rows) computes expert e on rows [n, C] of x, in x's dtype.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    outputs = x.new_zeros(*ids.shape, x.shape[1])
    for e in ids.unique().tolist():
        tokens, choices = (ids == e).nonzero(as_tuple=True)
        outputs[tokens, choices] = run_expert(e, x[tokens])
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for choice in range(ids.shape[1]):
        y = y + outputs[:, choice].to(wide) * weights[:, choice, None].to(wide)
    return y.to(x.dtype)


def activate(both: Tensor) -> Tensor:
    """Return silu(gate) * up of both [.., 2F], gate first, as [.., F]; computed in fp32, rounded to both's dtype."""
    gate, up = both.to(torch.promote_types(both.dtype, torch.float32)).chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(both.dtype)
