"""A model of transformers that computes the engine's bits: Llama, Qwen3 and Qwen3-MoE.

Methods are set on the model's modules, as `whorl.adapters.transformers` sets them, and every module is accounted for:
one that nobody has compared with the engine's is an error.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.adapters.transformers import (
    Kept,
    KnownModule,
    KnownModules,
    TransformersInstallation,
    mlp_forward,
    norm_forward,
)
from whorl.models import find
from whorl.nn import Ranks, Rope, check_training, expert_segments, tree_sum

from .forwards import Heads, as_codes, attend, linear, segmented
from .packing import packing

NAME = "whorl.exact"
ROW_PARALLEL = ("o_proj", "down_proj")  # linear layers whose K ranks share
# By the class of the causal language model.
FAMILIES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
_PREFIXES = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
# Classes of a family that only call the others, or whose numbers are the engine's already, and why.
_ADDS = "adds residuals in the model's dtype, as the engine does"
_CALLS = "calls its parts"
_KEPT = {"ForCausalLM": _CALLS, "DecoderLayer": _ADDS, "SparseMoeBlock": _CALLS}
_KEPT_TORCH = {nn.ModuleList: _CALLS, nn.Embedding: "copies rows", nn.SiLU: "not called"}
_RECURSED = "CheckpointWrapper"  # torch's activation checkpointing: calls the module in it


def install(model: nn.Module, *, max_length: int | None = None, tp_segments: int = 0) -> TransformersInstallation:
    """Make a model of transformers compute the engine's bits; `whorl.exact.install` says more."""
    kind = next((name for name in map(_name, type(model).__mro__) if name in FAMILIES), None)
    if kind is None:
        raise ValueError(f"{NAME}: {type(model).__name__} is not known, expected one of {', '.join(FAMILIES)}")
    hf: Any = model
    values = hf.config.to_dict() | {"architectures": [kind]}
    config = find(values).config_class.from_hf(values)  # raises for what the engine does not compute
    _check_dropout(hf.config)
    modules = KnownModules.find(model)
    rope, ranks = Rope(config.rope, max_length), Ranks(segments=tp_segments)
    installation = TransformersInstallation(NAME)
    with installation.building():
        for path, module in model.named_modules():
            _install(installation, path, module, FAMILIES[kind], ranks)
            if _role(module, FAMILIES[kind]) == "Model":
                why = "sequences packed without padding, each from position 0"
                installation.set_method(KnownModule(path, module, None), "forward", _model(rope), why)  # type: ignore[arg-type]
        for entry in modules.require("RotaryEmbedding", "exact"):
            installation.set_method(entry, "forward", _rotary(rope), "the engine's table, in fp32")
        for entry in modules.require("Attention", "exact"):
            why = "rotation and attention with the engine's cuts of keys"
            installation.set_method(entry, "forward", _attention(_heads(config, entry.module.layer_idx)), why)
        _install_others(installation, modules, ranks)
    return installation


def _heads(config: Any, layer: int) -> Heads:
    """Return the numbers of a layer's attention in the engine."""
    return Heads(
        config.num_attention_heads,
        config.num_key_value_heads,
        scale=config.head_dim**-0.5 * config.rope.softmax_scale_correction,
        window=config.windows[layer] or 0,
        style=config.rope.style,
        where=config.rope.where,
    )


def _install_others(installation: TransformersInstallation, modules: KnownModules, ranks: Ranks) -> None:
    """Replace the forwards of norms, feed-forward networks and experts."""
    for entry in modules.require("RMSNorm", "exact"):
        if entry.path.endswith(("q_norm", "k_norm")):
            installation.kept.append(Kept(entry.path, "not called: attention reads its weight"))
        else:
            installation.set_method(entry, "forward", norm_forward, "squares in the engine's tree")
    for entry in modules.known.get("MLP", ()):
        installation.set_method(entry, "forward", mlp_forward, "silu(gate) * up, rounded once")
    for entry in modules.known.get("Experts", ()):
        if ranks.segments:
            inner = entry.module.down_proj.shape[-1]
            ranks.own_segments(entry.path, inner, slice(0, inner))
        why = "each choice rounded, added in order in fp32"
        installation.set_method(entry, "forward", _experts(ranks.segments), why)


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""


def _install(installation: TransformersInstallation, path: str, module: nn.Module, folder: str, ranks: Ranks) -> None:
    """Replace what is no known role of the adapter, note what is kept, and raise ValueError for anything else."""
    place = KnownModule(path, module, None)  # type: ignore[arg-type]
    forward = type(module).forward
    if forward is nn.Linear.forward:
        if ranks.segments and path.endswith(ROW_PARALLEL):
            count = cast(nn.Linear, module).in_features
            ranks.own_segments(path, count, slice(0, count))
            why = f"{ranks.segments} segments of K, added in a tree"
            installation.set_method(place, "forward", segmented(ranks.segments), why)
        else:
            installation.set_method(place, "forward", linear, "K upwards, in one chain")
        return
    if forward is nn.Embedding.forward and module.max_norm is not None:
        raise ValueError(f"{NAME}: {path} has max_norm, which the engine does not compute")
    for kind, why in _KEPT_TORCH.items():
        if forward is cast(Any, kind).forward:  # a subclass of FSDP's has it
            installation.kept.append(Kept(path, why))
            return
    role = _role(module, folder)
    if role == "TopKRouter":
        installation.set_method(place, "forward", _router, "weights in fp32, ties to the lowest expert")
    elif role in _KEPT:
        installation.kept.append(Kept(path or "(model)", _KEPT[role]))
    elif role not in ("Model", "Attention", "Experts", "MLP", "RMSNorm", "RotaryEmbedding", "activation", _RECURSED):
        raise ValueError(
            f"{NAME}: {path} is a {type(module).__name__}, which is not known to compute the engine's bits. Install "
            f"on the model as transformers builds it: before torch.compile, without adapters, quantization or "
            f"other kernels"
        )


def _role(module: nn.Module, folder: str) -> str:
    """Return what a class of transformers is in its family; "" for one whose forward is not that class's own."""
    for base in type(module).__mro__:
        if base.__name__ == _RECURSED and base.__module__.startswith("torch."):
            return _RECURSED
        if base.__name__ in ("SiLUActivation", "SiLU"):
            return "activation"
        if base.__module__ == f"transformers.models.{folder}.modeling_{folder}":
            is_own = type(module).forward is base.forward  # type: ignore[attr-defined]
            return base.__name__.removeprefix(_PREFIXES[folder]) if is_own else ""
    return ""


def _check_dropout(config: Any) -> None:
    if getattr(config, "attention_dropout", 0):
        raise ValueError(f"{NAME}: attention_dropout is {config.attention_dropout}, expected 0: the engine has none")


# ---- forwards


def _router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = ops.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    weights, ids = ops.route(logits, self.top_k, renormalize=self.norm_topk_prob)
    return logits, weights, ids


def _experts(segments: int) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        inputs = hidden_states, self.gate_up_proj, self.down_proj, top_k_weights, top_k_index
        if not segments:
            return ops.experts(*inputs)  # type: ignore[no-any-return]
        return tree_sum(expert_segments(*inputs, segments)).to(hidden_states.dtype)

    return forward


def _rotary(rope: Rope) -> Callable[..., tuple[Tensor, None]]:
    @torch.no_grad()
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, None]:
        return as_codes(rope.at(position_ids[0])), None

    return forward


def _attention(heads: Heads) -> Callable[..., tuple[Tensor, None]]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, None],
        attention_mask: Tensor,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        qkv = torch.cat((self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)), -1)[0]
        norms = (self.q_norm, self.k_norm, self.q_norm.variance_epsilon) if hasattr(self, "q_norm") else None
        y = attend(qkv, position_embeddings[0], attention_mask.flatten(), heads, norms)
        return self.o_proj(y[None]), None

    return forward


def _model(rope: Rope) -> Callable[..., Any]:
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run transformers' own forward on the tokens of the batch as one row, without padding."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None
        check_training(tokens.device.type)
        _check_call(past_key_values, kwargs)
        shape, starts = tokens.shape[:2], kwargs.pop("cu_seq_lens_q", None)
        for name in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(name, None)
        if attention_mask is not None and kwargs.get("output_router_logits"):
            raise ValueError(f"{NAME}: output_router_logits needs a batch without padding; pass no attention_mask")
        where = packing(shape, tokens.device, mask=attention_mask, positions=position_ids, starts=starts)
        rope.check(where.longest)
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        outputs = type(self).forward(
            self,
            **{name: where.pack(tokens)},
            attention_mask=where.starts.view(1, 1, 1, -1),  # of four dims: transformers hands it to attention as it is
            position_ids=where.positions[None],
            use_cache=False,
            **kwargs,
        )
        outputs.last_hidden_state = where.unpack(outputs.last_hidden_state, shape)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(where.unpack(each, shape) for each in outputs.hidden_states)
        return outputs

    return forward


def _check_call(past_key_values: Any, kwargs: dict[str, Any]) -> None:
    if past_key_values is not None:
        raise ValueError(
            f"{NAME}: the model got a cache; while installed it scores whole sequences. Sample with whorl's engine, or "
            f"uninstall() to generate with transformers"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(f"{NAME}: output_attentions is not possible: attention does not store its weights")
