"""Compare a training step on several ranks with the same step on one rank."""

import torch

from .layouts import Degrees, Result

# The largest error of a gradient's element, as a share of its largest element, in fp32 on a CPU; observed: 8e-7.
TOLERANCE = 5e-6


def compare(actual: Result, expected: Result, degrees: Degrees, tolerance: float = TOLERANCE) -> None:
    """Assert that loss, gradients, gradient norm, routing counts, expert biases and indexer loss are as expected.

    actual: of the step with `degrees`. expected: of `layouts.one_rank`. tolerance: see TOLERANCE; the tolerances of the
    other values grow with it.
    """
    factor = tolerance / TOLERANCE
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-6 * factor, atol=0)
    torch.testing.assert_close(actual["norm"], expected["norm"], rtol=1e-6 * factor, atol=0)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        if gradient is None:
            assert actual["gradients"][name] is None, name
            continue
        error = float((actual["gradients"][name] - gradient).abs().max() / gradient.abs().max())
        assert error < tolerance, f"{name}: off by {error:.1e} of its largest element"
    # With activation checkpointing TorchTitan counts tokens in both forwards, and halves the counts later.
    forwards = 2 if degrees.checkpointing != "none" else 1
    for layer, counts in expected["counts"].items():
        assert actual["counts"][layer].tolist() == (counts * forwards).tolist(), layer
        # Biases start at 0 and move by the load-balancing coefficient, 1e-3; in warm-up they are frozen.
        step = 1e-3 * torch.sign(counts.mean() - counts) * (degrees.stage == "sparse")
        torch.testing.assert_close(actual["biases"][layer], step - step.mean())
    for layer, kl in expected["kl"].items():
        torch.testing.assert_close(actual["kl"][layer], kl, rtol=1e-5 * factor, atol=0)
