"""The part of a decoder layer that mixes tokens: attention, or a recurrence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .cache import CacheSpec, StateSpec
from .norm import RMSNorm
from .ranks import all_tokens


class Normed(Module):
    """A mixer or a feed-forward network, called together with the norm before it.

    Subclasses override `after_norm` where the norm can be fused into their first matrix product.
    """

    def after_norm(self, norm: RMSNorm, x: Tensor, residual: Tensor | None, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return the module's output for norm(x + residual), and x + residual; arguments: its other inputs.

        Where ranks share tokens, x, residual and both results are of this rank's tokens.
        """
        x, residual = norm(x, residual)
        return self(all_tokens(x), *arguments), residual


class Mixer(Normed):
    """The part of a layer that mixes tokens, by attention or a recurrence, and declares what it stores for that.

    It projects its input, gives the projections [T, ...] to the `Mix` that it is called with, and projects the result.
    layer: its number, which is also that of its cache. mixed_size: channels of the result on this rank.
    """

    layer: int
    mixed_size: int

    def cache_spec(self, dtype: torch.dtype) -> CacheSpec | StateSpec:
        """Return what the layer stores for each token, or for each sequence. dtype: of hidden states."""
        raise NotImplementedError

    def flops(self, num_tokens: int) -> float:
        """Return the FLOPs of mixing the tokens of a prompt."""
        raise NotImplementedError

    def mix(self, *arguments: Any) -> Tensor:
        """Return the mixed tokens, [T, mixed_size], and write to the cache; `step` has prompts or decoding sequences.

        arguments: projected, rotary, step, cache. projected: the tensors [T, ...] that the mixer gave to the `Mix`, of
        the step's tokens. rotary: what the model's `tables` return for them.
        """
        raise NotImplementedError

    def mix_packed(self, *arguments: Any) -> Tensor:
        """Return the mixed tokens of packed sequences, without a cache and with a gradient.

        arguments: projected, rotary, packed.
        """
        raise ValueError(f"{type(self).__name__}: this layer has no training forward, so the model has no `logprobs`")


# The mixing of tokens: a function from a layer's mixer and its projections, one or several tensors [T, ...], to the
# output [T, mixed_size]. It is passed to a layer, because it differs: over the cache when serving, over packed
# sequences in training.
Mix = Callable[..., Tensor]
