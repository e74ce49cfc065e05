"""Hugging Face's `deepseek_v32` and ours: names, configuration, files. transformers reads what is written here."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.moe import MoEArgs

from .args import DeepSeekV32Args

_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
# Of a multi-token prediction layer: ours inside `mtp.N`, theirs inside `model.layers.N`.
_MTP = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
# Tied to the model's own; checkpoints hold copies of them.
_MTP_TIED = {"embed_tokens.weight": "tok_embeddings.weight", "shared_head.head.weight": "output.weight"}
SHARD = 4 * 2**30  # bytes of a file


class DeepSeekV32StateDictAdapter(DeepSeekV3StateDictAdapter):
    """TorchTitan's for DeepSeek-V3, with the indexer and the multi-token prediction layers."""

    model_args: DeepSeekV32Args

    def __init__(self, model_args: DeepSeekV32Args, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)  # type: ignore[arg-type]
        self.from_hf_map |= {
            f"model.layers.{{}}.self_attn.indexer.{name}": f"layers.{{}}.attention.indexer.{name}" for name in _INDEXER
        }
        for ours, theirs in _MTP.items():
            self.from_hf_map[f"model.layers.{{}}.{theirs}"] = f"layers.{{}}.mtp.{ours}"

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        first = self.model_args.n_layers
        found = super().to_hf({_flat(name, first): value for name, value in state_dict.items()})
        for layer in _layers_from(found, first):
            tied = {f"model.layers.{layer}.{theirs}": ours for theirs, ours in _MTP_TIED.items()}
            found |= {theirs: state_dict[ours] for theirs, ours in tied.items() if ours in state_dict}
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        first = self.model_args.n_layers
        last = first + self.model_args.n_mtp_layers
        known = {}
        for name, value in hf_state_dict.items():
            layer = _layer(name)
            is_tied = layer is not None and layer >= first and name.split(".", 3)[3] in _MTP_TIED
            if not is_tied and (layer is None or layer < last):
                known[name] = value
        known |= self._missing_indexers(known)
        return {_nested(name, first): value for name, value in super().from_hf(known).items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return _reader_with_bootstrap(super().get_hf_storage_reader(path, from_quantized), self.model_args)

    def _missing_indexers(self, hf_state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """Initial values for the indexers that a dense checkpoint lacks, if they are asked for."""
        found: dict[str, Tensor] = {}
        for query in (name for name in hf_state_dict if name.endswith(".self_attn.q_a_proj.weight")):
            prefix = query.removesuffix("q_a_proj.weight") + "indexer."
            missing = [name for name in _INDEXER if prefix + name not in hf_state_dict]
            if missing and not self.model_args.bootstrap_indexer:
                raise ValueError(_no_indexer([prefix + name for name in missing]))
            generator = torch.Generator().manual_seed(_layer(query) or 0)  # every rank the same
            for name in missing:
                size = _indexer_sizes(self.model_args)[name]
                like = hf_state_dict[query]
                value = torch.zeros(size) if name == "k_norm.bias" else torch.ones(size)
                if len(size) == 2:
                    value = torch.nn.init.trunc_normal_(value, std=0.02, generator=generator)
                found[prefix + name] = value.to(like.device, like.dtype)
        return found


def _layer(name: str) -> int | None:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def _layers_from(hf_state_dict: Mapping[str, Any], first: int) -> list[int]:
    return sorted({layer for name in hf_state_dict if (layer := _layer(name)) is not None and layer >= first})


def _flat(name: str, first: int) -> str:
    """mtp.0.block.X -> layers.61.X, mtp.0.norm.weight -> layers.61.mtp.norm.weight"""
    found = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    if not found:
        return name
    return f"layers.{first + int(found[1])}.{'' if found[2] else 'mtp.'}{found[3]}"


def _nested(name: str, first: int) -> str:
    found = re.match(r"layers\.(\d+)\.(mtp\.)?(.*)", name)
    if not found or int(found[1]) < first:
        return name
    return f"mtp.{int(found[1]) - first}.{'' if found[2] else 'block.'}{found[3]}"


def _indexer_sizes(args: DeepSeekV32Args) -> dict[str, tuple[int, ...]]:
    dim = args.index_head_dim
    return {
        "wq_b.weight": (args.index_n_heads * dim, args.q_lora_rank),
        "wk.weight": (dim, args.dim),
        "k_norm.weight": (dim,),
        "k_norm.bias": (dim,),
        "weights_proj.weight": (args.index_n_heads, args.dim),
    }


def _no_indexer(missing: list[str]) -> str:
    return (
        f"the checkpoint has no {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}: it is a dense "
        "DeepSeek-V3. To start its indexers from initial values set whorl.bootstrap_indexer (and stage 'warmup')"
    )


def _reader_with_bootstrap(reader: HuggingFaceStorageReader, args: DeepSeekV32Args) -> HuggingFaceStorageReader:
    """The reader, to which indexers that are not in the files look as if they were; they keep the values they have."""
    known = reader.read_metadata().state_dict_metadata
    layers = {layer for name in known if (layer := _layer(name)) is not None and layer < args.n_layers}
    absent = {
        name: torch.Size(size)
        for layer in sorted(layers)
        for tail, size in _indexer_sizes(args).items()
        if (name := f"model.layers.{layer}.self_attn.indexer.{tail}") not in known
    }
    if absent and not args.bootstrap_indexer:
        raise ValueError(_no_indexer(list(absent)))

    class Reader(type(reader)):  # type: ignore[misc]
        def read_metadata(self) -> Metadata:
            metadata = super().read_metadata()
            for name, size in absent.items():
                whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
                metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(), size, [whole])
            return metadata

        def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
            items = [item for item in plan.items if item.storage_index.fqn not in absent]
            return super().read_data(dataclasses.replace(plan, items=items), planner)

    if absent:
        reader.__class__ = Reader
    return reader


# ---- configuration


TRAINED = "trained_seq_len"  # not max_seq_len or seq_length: servers take the least of those they know
# What transformers does for these, and this model too; by key of a config.json, where None is as good as absent.
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
}
FIXED_ROPE: dict[str, tuple[object, ...]] = {
    "rope_type": ("default", "yarn"),
    "type": ("default", "yarn"),
    "attention_factor": (),
    "truncate": (True,),
    "partial_rotary_factor": (1,),
}


def to_hf_config(args: DeepSeekV32Args, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """config.json of these sizes. What a job sets, as the stage or the coefficients of losses, is not in it."""
    _check_export(args)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_factor > 1:
        rope |= {
            "rope_type": "yarn",
            "factor": args.rope_factor,
            "original_max_position_embeddings": args.original_seq_len,
            "beta_fast": args.beta_fast,
            "beta_slow": args.beta_slow,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale_all_dim,
        }
    moe = args.moe_args
    # A run may train on shorter sequences than YaRN reaches: what is exported is not cut to them.
    reach = int(args.original_seq_len * args.rope_factor) if args.rope_factor > 1 else 0
    longest = max(args.max_seq_len, reach)
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.inter_dim,
        "moe_intermediate_size": args.moe_inter_dim,
        "num_hidden_layers": args.n_layers,
        "num_nextn_predict_layers": args.n_mtp_layers,
        "first_k_dense_replace": min(args.n_dense_layers, args.n_layers),
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "n_shared_experts": moe.num_shared_experts,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.num_expert_groups or 1,
        "topk_group": moe.num_limited_groups or 1,
        "norm_topk_prob": moe.route_norm,
        "routed_scaling_factor": moe.route_scale,
        "scoring_func": moe.score_func,
        "topk_method": "noaux_tc",
        "q_lora_rank": args.q_lora_rank,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "index_n_heads": args.index_n_heads,
        "index_head_dim": args.index_head_dim,
        "index_topk": args.index_topk,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": rope,
        "max_position_embeddings": longest,
        **({TRAINED: args.max_seq_len} if args.max_seq_len < longest else {}),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _check_export(args: DeepSeekV32Args) -> None:
    """That transformers' model can compute what this one does."""
    moe = args.moe_args
    wrong = {
        "moe_args.score_func": (moe.score_func, "sigmoid"),
        "moe_args.score_before_experts": (moe.score_before_experts, False),
        "moe_args.gate_bias": (moe.gate_bias, False),
    }
    if args.rope_factor > 1 and not args.mscale_all_dim:
        wrong["mscale"] = (args.mscale, 1.0)
    for name, (found, expected) in wrong.items():
        if found != expected:
            raise ValueError(f"{name} is {found!r}, and Hugging Face's deepseek_v32 has {expected!r} alone")


def from_hf_config(config: Mapping[str, Any]) -> DeepSeekV32Args:
    """The sizes that a config.json names; `rope_scaling`, the older spelling, is read too."""
    if config.get("model_type") not in ("deepseek_v32", "deepseek_v3"):
        raise ValueError(f"model_type is {config.get('model_type')!r}, expected deepseek_v32 or deepseek_v3")
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    _check_fixed(config, rope)
    groups = config.get("n_group") or 1
    given = DeepSeekV32Args()
    yarn = rope.get("rope_type", rope.get("type")) == "yarn"
    mscale, mscale_all_dim = _mscales(rope) if yarn else (given.mscale, given.mscale_all_dim)
    return DeepSeekV32Args(
        vocab_size=config["vocab_size"],
        max_seq_len=config.get(TRAINED) or config.get("max_position_embeddings") or given.max_seq_len,
        dim=config["hidden_size"],
        inter_dim=config["intermediate_size"],
        moe_inter_dim=config["moe_intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_mtp_layers=config.get("num_nextn_predict_layers") or 0,
        n_dense_layers=config["first_k_dense_replace"],
        n_heads=config["num_attention_heads"],
        norm_eps=config["rms_norm_eps"],
        moe_args=MoEArgs(
            num_experts=config["n_routed_experts"],
            num_shared_experts=config["n_shared_experts"],
            score_func="sigmoid",
            route_norm=config["norm_topk_prob"],
            route_scale=config["routed_scaling_factor"],
            score_before_experts=False,
            top_k=config["num_experts_per_tok"],
            num_expert_groups=groups if groups > 1 else None,
            num_limited_groups=config["topk_group"] if groups > 1 else None,
        ),
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        index_n_heads=config.get("index_n_heads", given.index_n_heads),
        index_head_dim=config.get("index_head_dim", given.index_head_dim),
        index_topk=config.get("index_topk", given.index_topk),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or given.rope_theta,
        rope_factor=rope["factor"] if yarn else 1.0,
        original_seq_len=rope.get("original_max_position_embeddings") or given.original_seq_len,
        beta_fast=rope.get("beta_fast") or given.beta_fast,
        beta_slow=rope.get("beta_slow") or given.beta_slow,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


def _check_fixed(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    for where, known in ((config, FIXED), (rope, FIXED_ROPE)):
        for key, values in known.items():
            found = where.get(key)
            if found is not None and found not in values:
                expected = " or ".join(map(repr, values)) or "nothing"
                raise ValueError(f"{key} is {found!r}; DeepSeek-V3.2 is known here with {expected}")
    kinds, dense = config.get("mlp_layer_types"), config["first_k_dense_replace"]
    if kinds is not None and list(kinds) != ["dense" if i < dense else "sparse" for i in range(len(kinds))]:
        raise ValueError(
            f"mlp_layer_types is {kinds}; known are {dense} dense layers (first_k_dense_replace), then experts"
        )


def _mscales(rope: Mapping[str, Any]) -> tuple[float, float]:
    """mscale and mscale_all_dim; where one is missing or 0, transformers turns by 0.1 ln(factor) + 1."""
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if of_all and not mscale:
        raise ValueError(f"mscale_all_dim is {of_all} without mscale: say both, or neither")
    return (float(mscale), float(of_all)) if mscale and of_all else (1.0, 0.0)


# ---- files


def save_pretrained(state_dict: dict[str, Any], args: DeepSeekV32Args, folder: str | Path) -> None:
    """A folder that transformers' `from_pretrained` takes, from a whole state dict of the model."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = DeepSeekV32StateDictAdapter(args, None).to_hf(state_dict)
    files: list[dict[str, Tensor]] = [{}]
    room = SHARD
    for name, value in tensors.items():
        size = value.numel() * value.element_size()
        if files[-1] and size > room:
            files.append({})
            room = SHARD
        files[-1][name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        room -= size
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, shard in zip(names, files, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    where = {tensor: name for name, shard in zip(names, files, strict=True) for tensor in shard}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    dtype = next(value.dtype for name, value in tensors.items() if name.endswith("q_a_proj.weight"))
    (folder / "config.json").write_text(json.dumps(to_hf_config(args, dtype), indent=1), encoding="utf-8")


def export_checkpoint(checkpoint: str | Path, args: DeepSeekV32Args, folder: str | Path, dtype: torch.dtype) -> None:
    """`save_pretrained` of a checkpoint that TorchTitan wrote (a `step-N` folder), of any number of ranks; no GPU."""
    from torch.distributed.checkpoint import load

    from .model import DeepSeekV32Model

    if not (Path(checkpoint) / ".metadata").is_file():
        raise ValueError(f"{checkpoint}: no .metadata there; expected a step-N folder of a TorchTitan checkpoint")
    with torch.device("meta"):
        empty = DeepSeekV32Model(args).state_dict()
    state = {name: torch.empty_like(value, device="cpu") for name, value in empty.items()}
    load(state, checkpoint_id=str(checkpoint), no_dist=True)
    kept = ("expert_bias",)  # chooses experts: stays as exact as it was
    save_pretrained({n: v if n.endswith(kept) else v.to(dtype) for n, v in state.items()}, args, folder)


def load_pretrained(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder, by its own name: for models that fit the host's memory."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no .safetensors files there")
    return {name: value for file in files for name, value in load_file(file).items()}
