"""The layers of a model in one call of the CPU kernels, where all of them have the form that it computes.

The results are those of the layers by themselves, bit for bit; what is saved is a few hundred calls a step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from whorl.device import HOST
from whorl.nn import Experts, KVCache, Linear, RMSNorm, Rope, Step
from whorl.nn.experts import StackedExperts
from whorl.nn.ranks import SHARED
from whorl.nn.weight import Matrix, changes
from whorl.ops.cpu import library
from whorl.ops.cpu.layers import (
    LayerParts,
    LayerStack,
    MixtureParts,
    MLPParts,
    NormPart,
    ProductPart,
    Sequences,
)

if TYPE_CHECKING:
    from .llama import Llama


Part = TypeVar("Part")
_PLAIN_FORM: set[Any] = set()


def plain_form(part: Part) -> Part:
    """Mark a class or method: it computes what the one call computes. A subclass, or a method that overrides it, may
    compute something else and is not marked."""
    _PLAIN_FORM.add(part)
    return part


def has_plain_form(part: Any) -> bool:
    return part in _PLAIN_FORM


class OneCall:
    """Runs a model's layers in one call where that is possible, see `__call__`."""

    def __init__(self, model: "Llama") -> None:
        self._model = model
        self._stack: LayerStack | None = None
        self._made_of: tuple[Any, ...] = ()
        self._matrices: list[Matrix] = []
        self._modules: list[torch.nn.Module] = []

    def __call__(self, step: Step, caches: Sequence[Any]) -> Tensor | None:
        """Return the hidden states of a step, or None where the layers must run one by one."""
        if step.token_ids.device.type != HOST or not torch.is_inference_mode_enabled() or step.inserted is not None:
            return None
        if step.positions.dim() != 1 or SHARED.get() is not None:
            return None
        made_of = (changes(), *(cache.k.data_ptr() for cache in caches if isinstance(cache, KVCache)))
        if made_of != self._made_of:
            self._stack, self._made_of = self._build(caches), made_of
        if self._stack is None or any(matrix.adapter is not None for matrix in self._matrices):
            return None
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._modules):
            return None
        sequences = Sequences(step.block_tables, step.query_starts, step.context_lens, step.slots)
        return self._stack(self._model.embed(step.token_ids), self._model.rope.rows(step), sequences)

    def _build(self, caches: Sequence[Any]) -> LayerStack | None:
        model, layers = self._model, []
        is_plain = has_plain_form(type(model).hidden) and type(model.rope) is Rope
        if library.missing() is not None or model.dtype != torch.float32 or not is_plain:
            return None
        decoder = model.decoder
        if len(decoder.layers) != len(caches):
            return None
        for layer, cache in zip(decoder.layers, caches, strict=True):
            parts = _parts(layer, cache)
            if parts is None:
                return None
            layers.append(parts)
        self._modules = list(decoder.modules())
        self._matrices = [module for module in self._modules if isinstance(module, Matrix)]
        style = model.config.rope
        if style.where != "leading":
            return None
        try:
            return LayerStack(layers, _norm(decoder.norm), style.style)
        except ValueError:  # a tensor that only the operators by themselves convert
            return None


def _parts(layer: Any, cache: Any) -> LayerParts | None:
    """Return what a layer is made of; None if it has another form."""
    mixer, mlp = layer.mixer, layer.mlp
    if not all(map(has_plain_form, (type(layer).forward, type(mixer), type(mlp)))):
        return None
    if not isinstance(cache, KVCache) or cache.k_scale is not None:
        return None
    qkv, out = map(_product, (mixer.qkv_proj, mixer.o_proj))
    feed_forward = _mixture(mlp) if isinstance(getattr(mlp, "experts", None), Experts) else _mlp(mlp)
    norms = layer.input_layernorm, layer.post_attention_layernorm
    if not all(type(norm) is RMSNorm for norm in norms) or qkv is None or out is None or feed_forward is None:
        return None
    is_normed = getattr(mixer, "is_normed", False)
    return LayerParts(
        attention_norm=_norm(norms[0]),
        qkv=qkv,
        q_norm=_norm(mixer.q_norm) if is_normed else None,
        k_norm=_norm(mixer.k_norm) if is_normed else None,
        out=out,
        mlp_norm=_norm(norms[1]),
        mlp=feed_forward,
        k_cache=cache.k,
        v_cache=cache.v,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        window=mixer.window or 0,
        scale=mixer.scale,
    )


def _mlp(mlp: Any) -> MLPParts | None:
    gate_up, down = map(_product, (mlp.gate_up_proj, mlp.down_proj))
    return None if gate_up is None or down is None else MLPParts(gate_up, down)


def _mixture(moe: Any) -> MixtureParts | None:
    """Return a mixture's parts; None where its experts are of a class of their own, or are divided among ranks."""
    experts, router = moe.experts, _product(moe.gate)
    stacks = experts.gate_up_proj, experts.down_proj
    gate_up, down = (stack.format.for_kernels(stack) for stack in stacks)
    ranks = experts.ranks
    is_whole = type(experts) in (Experts, StackedExperts) and ranks.size == 1 and ranks.experts is None
    if not is_whole or experts.segments or router is None or gate_up is None or down is None:
        return None
    return MixtureParts(router, gate_up, down, moe.k, moe.renormalize)


def _norm(norm: RMSNorm) -> NormPart:
    return NormPart(norm.weight, norm.eps, norm.plus_one)


def _product(linear: Linear) -> ProductPart | None:
    """Return a linear layer's product; None where it is more than that, or has no kernel."""
    if linear.is_partial:
        return None
    weight = linear.format.for_kernels(linear)
    return None if weight is None else ProductPart(weight, linear.bias)
