"""The functions that transformers' models call by whorl's name: for attention, for masks and for experts.

What they do is decided by who runs the forward: a trial on the meta device, which notes what the model asks for, or the
engine, which attends over the paged cache. Both are a `Caller`, set for the time of one forward.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn

from whorl import ops

NAME = "whorl"
QKV = tuple[Tensor, Tensor, Tensor]
# Keyword arguments of the attention call that say nothing about its arithmetic, where there is no dropout.
WITHOUT_MEANING = {"dropout", "is_causal", "position_ids", "position_embeddings", "cache_position", "past_key_values"}
WITHOUT_MEANING |= {"use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"}
WITHOUT_MEANING |= {"logits_to_keep"}


class Caller(Protocol):
    """Who runs a forward."""

    def attend(self, module: nn.Module, qkv: QKV, mask: Any, options: dict[str, Any]) -> Tensor:
        """Return the output of attention, [1, T, HQ, D]. qkv: queries [1, HQ, T, D], keys and values [1, HK, T, D].

        mask: what `mask` returned. options: the other keyword arguments that are not None.
        """

    def mask(self, function: Any) -> Any:
        """Return what stands for a mask in the calls of `attend`; function: of (batch, head, query, key) indices."""

    def experts(self, module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the output of experts that are not whorl's own layer, [T, C]."""


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@contextlib.contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Let the forward that runs in this context ask `caller`."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)


def register() -> None:
    """Register the functions with transformers, under whorl's own name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for table, function in (
        (ALL_ATTENTION_FUNCTIONS, _attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, _mask),
        (ALL_EXPERTS_FUNCTIONS, _experts),
    ):
        table.register(NAME, function)


def _caller() -> Caller:
    caller = _CALLER.get()
    if caller is None:
        raise RuntimeError(
            f"attn_implementation {NAME!r}: this model was built for whorl's engine and has no cache of its own; load "
            f"it with transformers' from_pretrained to call it directly"
        )
    return caller


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    options = {name: each for name, each in options.items() if each is not None and name not in WITHOUT_MEANING}
    return _caller().attend(module, (query, key, value), attention_mask, options), None


def _mask(*, mask_function: Any = None, **_: Any) -> Any:
    return _caller().mask(mask_function)


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _caller().experts(module, hidden_states, top_k_index, top_k_weights)


def experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the output of experts with a gate of their own, as `ops.experts` does for SwiGLU."""
    rows, places, counts = ops.permute(x, ids, module.gate_up_proj.shape[0])
    hidden = module._apply_gate(ops.grouped_matmul(rows, module.gate_up_proj, counts))
    return ops.unpermute(ops.grouped_matmul(hidden, module.down_proj, counts), places, weights)  # type: ignore[no-any-return]
