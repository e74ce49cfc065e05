"""A model of TorchTitan 0.2 that computes the engine's bits: Llama 3 and dense Qwen3.

TorchTitan's Llama has its pairs of rotated channels side by side. The scores of attention are sums over channels, so
queries and keys are brought into the engine's order when they are rotated; weights stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from whorl import ops
from whorl.adapters.transformers import Kept, KnownModule, TransformersInstallation
from whorl.models import find
from whorl.nn import Ranks, Rope, check_training

from .forwards import Heads, as_codes, attend, linear, segmented
from .packing import packing

NAME = "whorl.exact"
_LLAMA, _QWEN3 = "torchtitan.models.llama3.model.model", "torchtitan.models.qwen3.model.model"
# By the module and the class of the model: the engine's architecture, and which channels are a pair.
MODELS = {(_LLAMA, "Transformer"): ("LlamaForCausalLM", "pairs"), (_QWEN3, "Qwen3Model"): ("Qwen3ForCausalLM", "half")}
_KEPT = {"TransformerBlock": "adds residuals in the model's dtype, as the engine does"}
_UNUSED = ("ScaledDotProductAttentionWrapper", "VarlenAttentionWrapper", "FlexAttentionWrapper")
_ROW_PARALLEL = ("attention.wo", "feed_forward.w2")  # linear layers whose K ranks share


def is_titan(model: nn.Module) -> bool:
    """Return whether TorchTitan has this model."""
    return type(model).__module__.startswith("torchtitan.") or _kind(model) is not None


def _kind(model: nn.Module) -> tuple[str, str] | None:
    return next(
        (MODELS[key] for each in type(model).__mro__ if (key := (each.__module__, each.__name__)) in MODELS), None
    )


def install(model: nn.Module, *, max_length: int | None = None, tp_segments: int = 0) -> TransformersInstallation:
    """Make a model of TorchTitan compute the engine's bits; `whorl.exact.install` says more."""
    kind = _kind(model)
    if kind is None:
        names = ", ".join(f"{module}.{name}" for module, name in MODELS)
        raise ValueError(f"{NAME}: {type(model).__module__}.{type(model).__name__} is not known, expected {names}")
    architecture, style = kind
    values = hf_config(model, architecture)
    config: Any = find(values).config_class.from_hf(values)
    rope, ranks = Rope(config.rope, max_length), Ranks(segments=tp_segments)
    scale = config.head_dim**-0.5 * config.rope.softmax_scale_correction
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, scale=scale, style=style)  # type: ignore[arg-type]
    installation = TransformersInstallation(NAME)
    with installation.building():
        for path, module in model.named_modules():
            _install(installation, path, module, ranks, heads)
        why = "sequences packed, each from position 0, with the engine's table"
        installation.set_method(_place("", model), "forward", _model(rope), why)
    return installation


def hf_config(model: Any, architecture: str) -> dict[str, Any]:
    """Return the config.json of a model of TorchTitan, as far as the engine reads it."""
    args, layer = model.model_args, next(iter(model.layers.values()))
    if not hasattr(layer, "feed_forward"):
        raise ValueError(f"{NAME}: TorchTitan's experts are not known to compute the engine's bits; take a dense model")
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama" if architecture.startswith("Llama") else "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": layer.attention.head_dim,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args.rope_theta)},
        "tie_word_embeddings": getattr(args, "enable_weight_tying", False),
    }
    if (scaling := getattr(args, "rope_scaling_args", None)) is not None:
        values["rope_parameters"] |= {
            "rope_type": "llama3",
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return values


def _place(path: str, module: nn.Module) -> KnownModule:
    return KnownModule(path or "(model)", module, None)  # type: ignore[arg-type]


def _install(installation: TransformersInstallation, path: str, module: nn.Module, ranks: Ranks, heads: Heads) -> None:
    """Replace a module's forward, or note why it is kept; ValueError for one that is not known."""
    forward, name, place = type(module).forward, _own_class(module), _place(path, module)
    if forward is nn.Linear.forward and ranks.segments and path.endswith(_ROW_PARALLEL):
        inputs: Any = module.in_features
        ranks.own_segments(path, inputs, slice(0, inputs))
        installation.set_method(
            place, "forward", segmented(ranks.segments), f"{ranks.segments} segments of K in a tree"
        )
    elif forward is nn.Linear.forward:
        installation.set_method(place, "forward", linear, "K upwards, in one chain")
    elif forward is nn.RMSNorm.forward and path.endswith(("q_norm", "k_norm")):
        installation.kept.append(Kept(path, "not called: attention reads its weight"))
    elif forward is nn.RMSNorm.forward:
        installation.set_method(place, "forward", _norm, "squares in the engine's tree")
    elif name == "Attention":
        why = "rotation and attention with the engine's cuts of keys"
        installation.set_method(place, "forward", _attention(heads), why)
    elif name == "FeedForward":
        installation.set_method(place, "forward", _feed_forward, "silu(gate) * up, rounded once")
    elif name in _KEPT:
        installation.kept.append(Kept(path, _KEPT[name]))
    elif forward is nn.Embedding.forward and getattr(module, "max_norm", None) is None:
        installation.kept.append(Kept(path, "copies rows"))
    elif forward is not nn.ModuleDict.forward and name not in ("CheckpointWrapper", *_UNUSED) and _kind(module) is None:
        raise ValueError(
            f"{NAME}: {path} is a {type(module).__name__}, which is not known to compute the engine's bits. Install "
            f"on the model as TorchTitan builds it: before torch.compile, without float8 and other converters"
        )


def _own_class(module: nn.Module) -> str:
    """Return the class of TorchTitan, or of torch's checkpointing, whose forward a module has; "" for others."""
    for base in type(module).__mro__:
        if base.__module__ in (_LLAMA, _QWEN3, "torchtitan.models.attention"):
            return base.__name__ if type(module).forward is base.forward else ""  # type: ignore[attr-defined]
        if base.__name__ == "CheckpointWrapper" and base.__module__.startswith("torch."):
            return base.__name__
    return ""


# ---- forwards


def _norm(self: Any, x: Tensor) -> Tensor:
    return ops.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    return self.w2(ops.glu(torch.cat((self.w1(x), self.w3(x)), -1)))  # type: ignore[no-any-return]


def _attention(heads: Heads) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor, table: Tensor, attention_masks: Tensor, positions: Tensor) -> Tensor:
        """`_model` passes starts in place of masks, and rows of the table in place of positions."""
        qkv = torch.cat((self.wq(x), self.wk(x), self.wv(x)), -1).flatten(0, 1)
        q_norm = getattr(self, "q_norm", None)
        norms = None if q_norm is None else (q_norm, self.k_norm, q_norm.eps)
        return self.wo(attend(qkv, positions, attention_masks, heads, norms).view(*x.shape[:-1], -1))  # type: ignore[no-any-return]

    return forward


def _model(rope: Rope) -> Callable[..., Tensor]:
    def forward(self: Any, tokens: Tensor, attention_masks: Any = None, positions: Tensor | None = None) -> Tensor:
        if self.tok_embeddings is None:
            raise ValueError(f"{NAME}: pipeline parallelism is not possible: a stage does not know its sequences")
        check_training(tokens.device.type)
        starts = getattr(attention_masks, "cu_seq_q", None)
        if attention_masks is not None and starts is None:
            raise ValueError(
                f"{NAME}: attention_masks is a {type(attention_masks).__name__}, expected None or VarlenMetadata"
            )
        where = packing(tokens.shape, tokens.device, positions=positions, starts=starts)
        rope.check(where.longest)
        rows = as_codes(rope.at(where.positions))
        return type(self).forward(self, tokens, attention_masks=where.starts, positions=rows)  # type: ignore[no-any-return]

    return forward
