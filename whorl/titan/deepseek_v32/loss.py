"""Cross entropy without a second copy of the logits: 129280 words times 4096 tokens are 2 GiB in fp32."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss, cross_entropy_loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over tokens. The gradient takes the memory of the logits, which nobody needs any more."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        ctx.chunk = chunk
        ctx.save_for_backward(logits, labels)
        total = logits.new_zeros((), dtype=torch.float32)
        for part in _chunks(labels, chunk):
            target, real = _targets(labels[part])
            # bf16 is copied wide first (float16 is not): twice a chunk in fp32, not twice all tokens.
            found = torch.log_softmax(logits[part], -1, dtype=torch.float32).gather(1, target)
            total -= (found * real).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = logits.detach()
        for part in _chunks(labels, ctx.chunk):
            target, real = _targets(labels[part])
            wide = torch.softmax(gradient[part], -1, dtype=torch.float32)
            wide.scatter_add_(1, target, wide.new_full((), -1.0).expand(target.shape))
            torch.mul(wide, grad * real, out=gradient[part])  # rounded once
        return gradient, None, None


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 1] words, any where there is none, and 1 or 0 for whether there is one."""
    real = (labels != IGNORE_INDEX)[:, None]
    return labels[:, None].where(real, 0), real.float()


def _chunks(labels: Tensor, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, labels.shape[0], chunk))


def chunked_cross_entropy(logits: Tensor, labels: Tensor, *, chunk: int) -> Tensor:
    """TorchTitan's sum of the tokens' losses, `chunk` tokens wide in fp32 at a time.

    logits [B, S, V] are overwritten by their own gradient in backward; to use them afterwards is an error that autograd
    finds. Logits that are shared among ranks (loss parallel) go TorchTitan's way.
    """
    if isinstance(logits, DTensor):
        return cross_entropy_loss(logits, labels)
    return _ChunkedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(0, 1), chunk)


def build_loss(job_config: Any, **kwargs: Any) -> Callable[..., Tensor]:
    chunk = getattr(getattr(job_config, "whorl", None), "loss_chunk", 0)
    if chunk < 0:
        raise ValueError(f"whorl.loss_chunk is {chunk}, expected a number of tokens, or 0 for all at once")
    if not chunk:
        return build_cross_entropy_loss(job_config, **kwargs)
    return functools.partial(chunked_cross_entropy, chunk=chunk)
