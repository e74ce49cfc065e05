"""The update of one bucket of AdamW whose moments are in a device buffer, in torch's operators.

It is torch's fused kernel between `decode` and `encode` of the formats; `moments_triton.py` does all of it in one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.device import HOST, REFERENCE, unavailable
from whorl.titan.moments import Format

HALF = (torch.bfloat16, torch.float16)
BACKENDS = (REFERENCE, "triton")


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of a bucket on the device: flat slices of a parameter and its gradient, and the parts of both moments."""

    param: Tensor
    grad: Tensor
    step: Tensor  # the number of updates of the parameter, this one included
    moments: list[list[Tensor]]
    offset: int  # element of the bucket at which the span starts


def check_backend(requested: str | None, moments: str) -> None:
    """Raise ValueError when there is no such backend, or when it does not have this format of moments."""
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"backend is {requested!r}, expected one of {', '.join(BACKENDS)}, or None")
    if requested == "triton" and moments != "int8":
        raise ValueError(f"backend is 'triton', which has only moments='int8', and moments is {moments!r}; use 'torch'")


def choose_backend(requested: str | None, moments: str, dtype: torch.dtype, device: str) -> str:
    """Return the backend that updates parameters of this dtype on this device: "torch" or "triton".

    requested: one of them, or None: the kernel for int8 moments of 16-bit parameters on a device that it runs on.
    float32 parameters take it only when it is requested, because its random numbers differ from those of torch.
    Raises ValueError when the kernel is requested where it does not run.
    """
    if requested is None:
        is_chosen = moments == "int8" and dtype in HALF and unavailable("triton", device) is None
        return "triton" if is_chosen else REFERENCE
    if requested != REFERENCE and (reason := unavailable(requested, device, by_name=True)) is not None:
        raise ValueError(f"backend is {requested!r}, and parameters are on {device}: it {reason}; leave backend out")
    return requested


def update(
    formats: tuple[Format, Format], group: Mapping[str, Any], pieces: list[Piece], generator: torch.Generator | None
) -> None:
    """Update the parameters and the moments of a bucket in place.

    group: the options of the parameter group, as torch.optim.AdamW has them. generator: of the stochastic rounding;
    None for exact moments.
    """
    first, second = (
        [moment_format.decode(piece.moments[i], piece.param.numel()) for piece in pieces]
        for i, moment_format in enumerate(formats)
    )
    params = [piece.param for piece in pieces]
    grads = [piece.grad for piece in pieces]
    if params[0].dtype != first[0].dtype:
        # The update of a 16-bit parameter with compact moments is in float32: in bfloat16 itself, a second moment with
        # a beta2 of 0.999 would never change, because 0.1 % is less than half a step of bfloat16.
        params, grads = [p.float() for p in params], [g.float() for g in grads]
    _fused_adamw(group, params, grads, first, second, [piece.step for piece in pieces])
    for piece, param in zip(pieces, params, strict=True):
        if param is not piece.param:
            piece.param.copy_(param)
    if formats[0].is_exact:
        return
    for i, values in enumerate((first, second)):
        for piece, x in zip(pieces, values, strict=True):
            formats[i].encode(x, piece.moments[i], generator)


def _fused_adamw(
    group: Mapping[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Call torch's fused kernel, which updates the parameters and both moments in place."""
    beta1, beta2 = map(float, group["betas"])
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != HOST:  # the kernel takes a tensor on the host as a number
        lr = lr.to(first[0].device)
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "amsgrad": False}
    options |= {name: group[name] for name in ("weight_decay", "eps", "maximize")}
    torch._fused_adamw_(params, grads, first, second, [], steps, **options)
