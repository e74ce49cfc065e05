"""Cross entropy that needs no copy of all logits: with a vocabulary of 129280, 4096 tokens are 2 GiB in fp32."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss, cross_entropy_loss

from whorl.titan.config import settings


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over tokens. The gradient overwrites the logits, which are not needed any more."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        ctx.chunk = chunk
        ctx.save_for_backward(logits, labels)
        total = logits.new_zeros((), dtype=torch.float32)
        for part in _chunks(labels, chunk):
            target, mask = _targets(labels[part])
            # For bf16 (not float16) torch makes an fp32 copy before the softmax: two fp32 chunks, not two full copies.
            log_probs = torch.log_softmax(logits[part], -1, dtype=torch.float32).gather(1, target)
            total -= (log_probs * mask).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = logits.detach()
        for part in _chunks(labels, ctx.chunk):
            target, mask = _targets(labels[part])
            probs = torch.softmax(gradient[part], -1, dtype=torch.float32)
            probs.scatter_add_(1, target, probs.new_full((), -1.0).expand(target.shape))
            torch.mul(probs, grad * mask, out=gradient[part])  # rounded once
        return gradient, None, None


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the target tokens [T, 1], 0 where the label is ignored, and a mask [T, 1] of 1 or 0."""
    mask = (labels != IGNORE_INDEX)[:, None]
    return labels[:, None].where(mask, 0), mask.float()


def _chunks(labels: Tensor, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, labels.shape[0], chunk))


def chunked_cross_entropy(logits: Tensor, labels: Tensor, *, chunk: int) -> Tensor:
    """Return TorchTitan's sum of the token losses, computed for `chunk` tokens at a time in fp32.

    logits: [B, S, V], overwritten by their gradient in backward; autograd reports an error if they are used later.
    labels: [B, S]. Logits sharded over ranks (loss parallel) are passed to TorchTitan's loss.
    """
    if isinstance(logits, DTensor):
        return cross_entropy_loss(logits, labels)
    return _ChunkedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(0, 1), chunk)


def build_loss(job_config: Any, **kwargs: Any) -> Callable[..., Tensor]:
    """Return the loss for a `TrainSpec`, chunked if `whorl.loss_chunk` is set; raises ValueError if it is negative."""
    chunk = settings(job_config).loss_chunk
    if chunk < 0:
        raise ValueError(f"whorl.loss_chunk is {chunk}, expected a number of tokens, or 0 for all at once")
    if not chunk:
        return build_cross_entropy_loss(job_config, **kwargs)
    return functools.partial(chunked_cross_entropy, chunk=chunk)
