"""Puts whorl's layers into a model of transformers, in place of modules that mean the same."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from whorl.nn import ONE, Ranks

from . import meaning
from .layers import (
    OwnEmbedding,
    OwnExperts,
    OwnHead,
    OwnLayerNorm,
    OwnLinear,
    OwnRMSNorm,
    TiedHead,
    TransposedLinear,
    hold,
    shares,
)
from .skeleton import RefusedError
from .trial import Attention, Trial

# Styles of transformers' tensor-parallel plans for linear layers, and those of weights that every rank has.
_SHARED = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
_WHOLE = (None, "replicated_with_grad_allreduce")


def replace_layers(hf: Any, requests: Trial, dtype: torch.dtype, ranks: Ranks) -> set[nn.Module]:
    """Replace what whorl has layers for, hold the rest, and return the modules that were replaced."""
    styles = _Plan(hf, ranks)
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    is_tied = bool(hf.config.tie_word_embeddings) and head is not None
    done: dict[nn.Module, nn.Module] = {}
    for module, name in _named(hf).items():
        if module is head or isinstance(module, nn.Embedding):
            continue
        new = _own(name, module, requests, styles)
        if new is not None:
            done[module] = new
    own = _own_embedding(embedding, is_head=is_tied, ranks=ranks)
    if own is not None:
        done[embedding] = own
    if head is not None:
        done[head] = _own_head(head, own, is_tied=is_tied, ranks=ranks)
    for module, name in _named(hf).items():
        if module in done:
            hf.set_submodule(name, done[module])
    _hold_rest(hf, dtype, styles)
    return set(done)


def _named(hf: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in hf.named_modules() if name}


class _Plan:
    """The style of each module in transformers' tensor-parallel plan, where the model runs on several ranks."""

    def __init__(self, hf: Any, ranks: Ranks) -> None:
        self.ranks, self.plan = ranks, {}
        if ranks.size == 1:
            return
        self.plan = dict(hf._tp_plan or {})
        if not any(".*." in name for name in self.plan):  # one of the head alone shares no layer
            kind = type(hf).__name__
            raise RefusedError(f"transformers has no tensor-parallel plan for the layers of {kind}: take one rank")

    def style(self, name: str, *known: str) -> str | None:
        """Return the style of a module or of a parameter; None: every rank has all of it. known: those it may have."""
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        style = self.plan.get(name) or self.plan.get(pattern)
        if style in _WHOLE:
            return None
        if style not in known:
            raise RefusedError(f"the tensor-parallel plan of {pattern} is {style}, which is not known: take one rank")
        return style

    def of_experts(self, name: str) -> Ranks:
        """Return the ranks that share the matrices of experts."""
        styles = [self.style(f"{name}.{each}", "packed_colwise", "rowwise") for each in ("gate_up_proj", "down_proj")]
        if styles not in ([None, None], ["packed_colwise", "rowwise"]):
            raise RefusedError(f"the tensor-parallel plan of {name} is {styles}, which is not known: take one rank")
        return self.ranks if styles[0] else ONE


def _own(name: str, module: nn.Module, requests: Trial, plan: _Plan) -> nn.Module | None:
    """Return whorl's layer that means the same as a module, or None."""
    if (form := meaning.linear(module)) is not None:
        weight: Any = module.weight
        rows, columns = weight.shape if form == "plain" else weight.shape[::-1]
        kind = OwnLinear if form == "plain" else TransposedLinear
        return kind(columns, rows, bias=module.bias is not None, **shares(plan.ranks, plan.style(name, *_SHARED)))
    if (numbers := meaning.norm(module)) is not None:
        shapes = {key: tuple(each.shape) for key, each in module._parameters.items() if each is not None}
        eps, plus_one, is_centered = numbers
        if is_centered:
            return OwnLayerNorm(eps, plus_one=plus_one, **shapes)
        return OwnRMSNorm(shapes["weight"][0], eps, plus_one=plus_one)
    if module in requests.per_token and meaning.is_swiglu(module):
        stack: Any = module.gate_up_proj
        num, double, width = stack.shape
        return OwnExperts(num, width, double // 2, per_token=requests.per_token[module], ranks=plan.of_experts(name))
    return None


def _own_embedding(embedding: nn.Module, *, is_head: bool, ranks: Ranks) -> OwnEmbedding | None:
    if not isinstance(embedding, nn.Embedding) or (factor := meaning.embedding_factor(embedding)) is None:
        return None
    own = OwnEmbedding(*embedding.weight.shape, is_embedding=True, is_head=is_head, ranks=ranks)
    own.factor = factor
    return own


def _own_head(head: nn.Module, embedding: OwnEmbedding | None, *, is_tied: bool, ranks: Ranks) -> nn.Module:
    if meaning.linear(head) != "plain":
        raise RefusedError(f"its head is a {type(head).__name__}, expected a linear layer")
    if is_tied:
        if embedding is None or head.bias is not None:
            raise RefusedError("its head shares the weight of an embedding that is not a plain one")
        return TiedHead(embedding)
    rows, columns = head.weight.shape  # type: ignore[union-attr,misc]
    if head.bias is None:
        return OwnHead(int(rows), int(columns), is_head=True, ranks=ranks)
    return OwnLinear(columns, rows, bias=True)


def _hold_rest(hf: Any, dtype: torch.dtype, plan: _Plan) -> None:
    """Make layers of the modules that keep their own code and have tensors in the checkpoint."""
    in_fp32 = list(getattr(hf, "_keep_in_fp32_modules_strict", None) or [])
    in_fp32 += list(getattr(hf, "_keep_in_fp32_modules", None) or []) if dtype == torch.float16 else []
    for module, name in _named(hf).items():
        if isinstance(module, OwnLinear | OwnRMSNorm | OwnLayerNorm | OwnEmbedding | OwnHead | OwnExperts):
            continue
        if any(isinstance(each, OwnExperts) and name.startswith(f"{at}.") for each, at in _named(hf).items()):
            continue  # a matrix of experts
        kept: dict[str, torch.dtype | None] = {}
        for key, tensor in module._parameters.items():
            if tensor is not None:
                is_fp32 = any(re.search(rf"(^|\.){part}(\.|$)", f"{name}.{key}") for part in in_fp32)
                kept[key] = torch.float32 if is_fp32 else None
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                kept[key] = buffer.dtype
        if kept:
            for key in kept:
                plan.style(f"{name}.{key}")  # raises for one that ranks share
            hold(module, kept)
    if any(each is not None for each in (*hf._parameters.values(), *hf._buffers.values())):
        raise RefusedError(f"{type(hf).__name__} has weights beside its parts")


def shared_heads(hf: Any, requests: Trial, ranks: Ranks) -> list[Attention]:
    """Return the calls of attention as a rank makes them, with its share of the heads."""
    if ranks.size == 1:
        return list(requests.attentions.values())
    names, calls = {module: name for name, module in hf.named_modules()}, []
    for module, call in requests.attentions.items():
        heads = [call.num_heads, call.num_kv_heads]
        if any(isinstance(each, OwnLinear) and each.is_cut for each in module.children()):
            if any(count % ranks.size for count in heads):
                raise RefusedError(
                    f"{names[module]}: {heads[0]} query and {heads[1]} key heads cannot be shared by {ranks.size} ranks"
                )
            heads = [count // ranks.size for count in heads]
        calls.append(replace(call, num_heads=heads[0], num_kv_heads=heads[1]))
    return calls
