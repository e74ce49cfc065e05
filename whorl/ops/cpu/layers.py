"""Layers of a decoder in one call: what their operators compute one by one, without the calls between them."""

from collections.abc import Sequence
from ctypes import byref, pointer
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .library import (
    TYPES,
    Attention,
    Layer,
    Mixture,
    Norm,
    Plain,
    Product,
    Rotation,
    Routing,
    address,
    library,
    use_threads,
)
from .moe import stack_of
from .packed import PackedMatrix, PackedStack
from .rotation import cache_of


class NormPart(NamedTuple):
    weight: Tensor
    eps: float
    plus_one: bool = False


class ProductPart(NamedTuple):
    weight: Tensor | PackedMatrix  # [N, K]
    bias: Tensor | None


class MLPParts(NamedTuple):
    gate_up: ProductPart
    down: ProductPart


class MixtureParts(NamedTuple):
    """A router without bias, by softmax, and its experts: tensors [E, N, K] or packed ones."""

    router: ProductPart
    gate_up: Tensor | PackedStack
    down: Tensor | PackedStack
    per_token: int
    renormalize: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """A layer with norms before attention and MLP, SwiGLU or a mixture of it, and keys and values in fp32."""

    attention_norm: NormPart
    qkv: ProductPart
    q_norm: NormPart | None
    k_norm: NormPart | None
    out: ProductPart
    mlp_norm: NormPart
    mlp: MLPParts | MixtureParts
    k_cache: Tensor
    v_cache: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    scale: float


class Sequences(NamedTuple):
    """The sequences of a step, as `ops.paged_attention` and `ops.write_kv` take them."""

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor


class LayerStack:
    """Layers, and the norm after the last. style: of the rotation.

    Raises ValueError for tensors that the call does not take: they must be contiguous, and in fp32 but for weights.
    """

    def __init__(self, layers: Sequence[LayerParts], last_norm: NormPart, style: str) -> None:
        self._kept: list[object] = [layers, last_norm]  # what the structures point to
        self._layers = (Layer * len(layers))(*map(self._layer, layers))
        self._last_norm, self._style = self._norm(last_norm), style

    def __call__(self, x: Tensor, cos_sin: Tensor, sequences: Sequences) -> Tensor:
        """Return the hidden states of embeddings x [T, C], after the last norm. x is overwritten."""
        tables, starts, lengths, slots = (part.contiguous() for part in sequences)
        cos_sin, out = cos_sin.contiguous(), torch.empty_like(x)
        is_pairs = self._style == "pairs"
        rotation = Rotation(cos_sin.data_ptr(), cos_sin.shape[-1], 0, is_pairs, is_pairs, False)
        step = Attention(tables=tables.data_ptr(), starts=starts.data_ptr(), lengths=lengths.data_ptr())
        step.table_stride, step.num_sequences = tables.stride(0), len(starts) - 1
        use_threads()
        library().whorl_cpu_layers(
            *(self._layers, len(self._layers), byref(self._last_norm), byref(step), byref(rotation)),
            *(slots.data_ptr(), x.data_ptr(), *x.shape, out.data_ptr()),
        )
        return out

    def _layer(self, parts: LayerParts) -> Layer:
        products = {name: self._product(getattr(parts, name)) for name in ("qkv", "out")}
        norms = {f"{name}_norm": self._norm(getattr(parts, f"{name}_norm")) for name in ("attention", "q", "k", "mlp")}
        return Layer(
            **norms,
            **products,
            **self._feed_forward(parts.mlp),
            cache=cache_of(
                _checked(parts.k_cache, is_strided=True),
                _checked(parts.v_cache, is_strided=True),
                None,
                None,
                torch.float32,
            ),
            heads=parts.num_heads,
            kv_heads=parts.num_kv_heads,
            dim=parts.head_dim,
            window=parts.window,
            scale=parts.scale,
        )

    def _feed_forward(self, parts: MLPParts | MixtureParts) -> dict[str, Any]:
        """Return the fields of a layer that describe it."""
        if isinstance(parts, MLPParts):
            gate_up, down = map(self._product, parts)
            return {"gate_up": gate_up, "down": down, "inner": parts.down.weight.shape[1]}
        router, stacks = self._product(parts.router), map(stack_of, (parts.gate_up, parts.down))
        routing = Routing(None, parts.router.weight.shape[0], parts.per_token, False, parts.renormalize, 1.0)
        mixture = Mixture(router, *stacks, routing)
        self._kept.append(mixture)
        return {"mixture": pointer(mixture)}

    def _norm(self, part: NormPart | None) -> Norm:
        return Norm() if part is None else Norm(_checked(part.weight).data_ptr(), part.eps, part.plus_one)

    def _product(self, part: ProductPart) -> Product:
        weight, product = part.weight, Product()
        product.bias = address(None if part.bias is None else _checked(part.bias))
        if isinstance(weight, PackedMatrix):
            product.packed = pointer(weight.matrix)
        else:
            if weight.stride(-1) != 1 or weight.dtype not in TYPES:
                raise ValueError(
                    f"a weight has strides {weight.stride()} and dtype {weight.dtype}, expected plain rows"
                )
            plain = Plain(weight.data_ptr(), *weight.shape, weight.stride(0), TYPES[weight.dtype])
            self._kept.append(plain)
            product.plain = pointer(plain)
        return product


def _checked(x: Tensor, *, is_strided: bool = False) -> Tensor:
    if x.dtype != torch.float32 or not (x.stride(-1) == 1 if is_strided else x.is_contiguous()):
        raise ValueError(f"a tensor is {x.dtype} with strides {x.stride()}, expected contiguous fp32")
    return x
