"""Whether a layout of ranks gives what one rank gives."""

import torch

from .layouts import Degrees, Result

TOLERANCE = 5e-6  # of a gradient's largest element, fp32 on a CPU; observed: 8e-7


def compare(got: Result, want: Result, layout: Degrees, tolerance: float = TOLERANCE) -> None:
    """One rank's loss, gradients, gradient norm, routing, biases and KL."""
    loose = tolerance / TOLERANCE
    torch.testing.assert_close(got["loss"], want["loss"], rtol=1e-6 * loose, atol=0)
    torch.testing.assert_close(got["norm"], want["norm"], rtol=1e-6 * loose, atol=0)
    assert got["gradients"].keys() == want["gradients"].keys()
    for name, gradient in want["gradients"].items():
        if gradient is None:
            assert got["gradients"][name] is None, name
            continue
        worst = float((got["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        assert worst < tolerance, f"{name}: off by {worst:.1e} of its largest element"
    again = 2 if layout.checkpointing != "none" else 1  # TorchTitan counts both times, and halves
    for layer, counts in want["counts"].items():
        assert got["counts"][layer].tolist() == (counts * again).tolist(), layer
        step = 1e-3 * torch.sign(counts.mean() - counts) * (layout.stage == "sparse")
        torch.testing.assert_close(got["biases"][layer], step - step.mean())
    for layer, kl in want["kl"].items():
        torch.testing.assert_close(got["kl"][layer], kl, rtol=1e-5 * loose, atol=0)
