"""Whether the Gluon kernels for Hopper can run on a device."""

import torch

from whorl.device import compute_capability, is_installed, is_interpreting

HOPPER = (9, 0)
MULTIPROCESSORS = 132  # of an H100 or H200 as cards are sold; another number costs speed alone


def gluon_reason(device: torch.device) -> str | None:
    """Return None if the Gluon kernels can run, else the reason that the plain Triton kernels run instead."""
    if compute_capability(device) != HOPPER:
        return f"written for Hopper, got {device}"
    if is_interpreting():
        return "Triton's interpreter cannot run Gluon"
    return None if is_installed("triton.experimental.gluon") else "this Triton has no Gluon"
