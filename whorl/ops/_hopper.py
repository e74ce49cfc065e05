"""Where kernels written in Gluon for Hopper run."""

import torch

from whorl.device import compute_capability, is_installed, is_interpreting

HOPPER = (9, 0)


def gluon_reason(device: torch.device) -> str | None:
    """None where they do, else why the plain ones run."""
    if compute_capability(device) != HOPPER:
        return f"written for Hopper, got {device}"
    if is_interpreting():
        return "Triton's interpreter knows no Gluon"
    return None if is_installed("triton.experimental.gluon") else "this Triton has no Gluon"
