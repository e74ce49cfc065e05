"""Count the parameters and the FLOPs per token of a model from its configuration.

Parameters are counted by how they are sharded. Nothing here imports torch, so that a plan is made on any machine.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.models.deepseek_v32 import DeepSeekV32Config

FORWARDS = 2  # forward passes of a layer with full activation checkpointing, which recomputes it in backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Numbers of parameters, by how they can be sharded."""

    split: int = 0  # sharded by tensor parallelism
    replicated: int = 0  # on every tensor-parallel rank
    experts: int = 0  # sharded by expert parallelism

    @property
    def total(self) -> int:
        return self.split + self.replicated + self.experts

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(
            split=self.split + other.split,
            replicated=self.replicated + other.replicated,
            experts=self.experts + other.experts,
        )

    def times(self, count: int) -> "Weights":
        return Weights(split=self.split * count, replicated=self.replicated * count, experts=self.experts * count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The FLOPs of one token in a layer, forward and backward together."""

    split: float  # divided by tensor parallelism
    replicated: float  # repeated on every tensor-parallel rank
    experts: float  # of the experts that the router selects for the token

    @property
    def total(self) -> float:
        return self.split + self.replicated + self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a transformer that its parameters, memory and FLOPs follow from."""

    name: str
    hidden: int  # channels of the residual stream
    layers: int
    vocab: int
    heads: int
    ffn: int  # hidden channels of a feed-forward layer without experts
    tied: bool = False  # the head has the weights of the embedding
    kv_heads: int = 0  # key heads of grouped-query attention; 0: multi-head latent attention
    head_dim: int = 0  # channels of a head of grouped-query attention
    qk_norm: bool = False
    qkv_bias: bool = False
    q_rank: int = 0  # channels of a low-rank query of latent attention; 0: queries are projected directly
    kv_rank: int = 0  # channels of a latent
    nope: int = 0  # channels of a head that are not rotated
    rope: int = 0  # channels of a head that are rotated
    value: int = 0  # channels of a head's value
    index_heads: int = 0  # 0: no lightning indexer
    index_dim: int = 0  # channels of an index head
    index_topk: int = 0  # keys that the indexer selects
    experts: int = 0  # routed experts of a layer
    chosen: int = 0  # experts per token
    expert_ffn: int = 0  # hidden channels of an expert
    shared_experts: int = 0
    dense: frozenset[int] = frozenset()  # layers without experts, in a model that has experts

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense

    def kinds(self, layers: range) -> dict[int, int]:
        """Map one layer of each kind (with and without experts) to the number of layers like it."""
        with_experts = [i for i in layers if self.has_experts(i)]
        without = [i for i in layers if not self.has_experts(i)]
        return {indices[0]: len(indices) for indices in (without, with_experts) if indices}

    @property
    def latent(self) -> bool:
        """Return whether the attention is multi-head latent attention."""
        return self.kv_heads == 0

    # ---- parameters

    @property
    def indexer(self) -> int:
        """Return the number of parameters of a layer's lightning indexer."""
        if not self.index_heads:
            return 0
        queries = self.q_rank * self.index_heads * self.index_dim
        return queries + self.hidden * (self.index_dim + self.index_heads) + 2 * self.index_dim

    def attention(self) -> Weights:
        """Return the parameters of a layer's attention, its indexer included."""
        if not self.latent:
            out = self.heads * self.head_dim
            keys = 2 * self.kv_heads * self.head_dim
            bias = out + keys if self.qkv_bias else 0
            norms = 2 * self.head_dim if self.qk_norm else 0
            return Weights(split=self.hidden * (2 * out + keys) + bias, replicated=norms)
        per_head = self.kv_rank * (self.nope + self.value) + self.value * self.hidden
        query = self.nope + self.rope
        down = self.hidden * (self.kv_rank + self.rope) + self.kv_rank + self.indexer
        if not self.q_rank:
            return Weights(split=self.heads * (per_head + self.hidden * query), replicated=down)
        per_head += self.q_rank * query
        return Weights(split=self.heads * per_head, replicated=down + self.hidden * self.q_rank + self.q_rank)

    def layer(self, index: int) -> Weights:
        return self.attention() + self.feed_forward(index)

    def feed_forward(self, index: int) -> Weights:
        """Return the parameters of a layer's feed-forward part and of both norms of the layer."""
        norms = Weights(replicated=2 * self.hidden)
        if not self.has_experts(index):
            return norms + Weights(split=3 * self.hidden * self.ffn)
        expert = 3 * self.hidden * self.expert_ffn
        return norms + Weights(
            split=self.shared_experts * expert, replicated=self.hidden * self.experts, experts=self.experts * expert
        )

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the model, without multi-token prediction layers."""
        ends = self.embedding * (1 if self.tied else 2) + self.hidden
        return ends + sum(self.layer(i).total * count for i, count in self.kinds(range(self.layers)).items())

    # ---- work

    def keys(self, seq: int) -> float:
        """Return the average number of keys that a token attends to."""
        top = self.index_topk
        if not top or seq <= top:
            return (seq + 1) / 2
        return (top * (top + 1) / 2 + (seq - top) * top) / seq

    def attention_work(self, seq: int, forwards: int = FORWARDS) -> Work:
        """Return the FLOPs of a token in products of queries, keys and values; products with weights are not counted.

        forwards: how often the layer runs forward in a step, 2 with full activation checkpointing.
        """
        keys = self.keys(seq)
        if self.index_heads:
            key, value = self.kv_rank + self.rope, self.kv_rank  # absorbed queries attend to latents
            pairs = 2 * self.heads * keys
            forward, backward = pairs * (key + value), pairs * (3 * key + 2 * value)
            target = pairs * key  # the attention scores that the indexer is trained on, computed once more
            index = 2 * self.index_heads * self.index_dim
            scores, gradient = index * (seq + 1) / 2, 3 * index * keys
            return Work(
                split=forwards * forward + backward + target, replicated=forwards * scores + gradient, experts=0
            )
        key = self.nope + self.rope if self.latent else self.head_dim
        value = self.value if self.latent else self.head_dim
        forward = 2 * self.heads * keys * (key + value)
        return Work(split=(forwards + 2.5) * forward, replicated=0, experts=0)  # backward is 2.5 times forward

    def layer_work(self, index: int, seq: int, forwards: int = FORWARDS) -> Work:
        """Return the FLOPs of a token in a layer: 6 per parameter, 8 with full checkpointing, plus its attention."""
        weights, attention = self.layer(index), self.attention_work(seq, forwards)
        flops_per_parameter = 2 * forwards + 4
        active_experts = self.chosen / self.experts * weights.experts if self.experts else 0
        return Work(
            split=flops_per_parameter * weights.split + attention.split,
            replicated=flops_per_parameter * weights.replicated + attention.replicated,
            experts=flops_per_parameter * active_experts,
        )

    def head_work(self) -> float:
        """Return the FLOPs of one token in the head, forward and backward."""
        return 6 * self.embedding

    def token_work(self, seq: int) -> float:
        """Return the FLOPs of one token in the model, with full activation checkpointing."""
        kinds = self.kinds(range(self.layers)).items()
        return self.head_work() + sum(self.layer_work(i, seq).total * count for i, count in kinds)


MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "llama", "qwen2", "qwen3", "qwen3_moe")


def from_hugging_face(config: dict[str, Any], name: str) -> ModelShape:
    """Return the shape that the values of a config.json describe.

    Raises ValueError when the model type is unknown, a size is missing, or the config has biases that are not counted.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{name}: model_type is {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")

    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{name}: {key} is set, expected false: a plan does not count these biases")

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key, default)
        if value is None:
            raise ValueError(f"{name}: {key} is missing")
        return int(value)

    common: dict[str, Any] = {
        "name": name,
        "hidden": number("hidden_size"),
        "layers": number("num_hidden_layers"),
        "vocab": number("vocab_size"),
        "heads": number("num_attention_heads"),
        "ffn": number("intermediate_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }
    if model_type.startswith("deepseek"):
        return ModelShape(**common, **_deepseek(config, number, indexed=model_type == "deepseek_v32"))
    common |= {
        "kv_heads": number("num_key_value_heads", common["heads"]),
        "head_dim": config.get("head_dim") or common["hidden"] // common["heads"],
        "qk_norm": model_type.startswith("qwen3"),
        "qkv_bias": model_type == "qwen2",
    }
    if model_type == "qwen3_moe":
        stride, dense_layers = number("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        common |= {
            "experts": number("num_experts", config.get("num_local_experts")),  # transformers 5 writes the latter
            "chosen": number("num_experts_per_tok"),
            "expert_ffn": number("moe_intermediate_size"),
            "dense": frozenset(i for i in range(common["layers"]) if i in dense_layers or (i + 1) % stride),
        }
    return ModelShape(**common)


def _deepseek(config: dict[str, Any], number: Any, *, indexed: bool) -> dict[str, Any]:
    kinds = config.get("mlp_layer_types") or ["dense"] * number("first_k_dense_replace")
    sizes = {
        "q_rank": int(config.get("q_lora_rank") or 0),
        "kv_rank": number("kv_lora_rank"),
        "nope": number("qk_nope_head_dim"),
        "rope": number("qk_rope_head_dim"),
        "value": number("v_head_dim"),
        "experts": number("n_routed_experts"),
        "chosen": number("num_experts_per_tok"),
        "expert_ffn": number("moe_intermediate_size"),
        "shared_experts": number("n_shared_experts"),
        "dense": frozenset(i for i, kind in enumerate(kinds) if kind == "dense"),
    }
    if indexed:
        index = {"index_heads": "index_n_heads", "index_dim": "index_head_dim", "index_topk": "index_topk"}
        sizes |= {ours: number(theirs) for ours, theirs in index.items()}
    return sizes


DEEPSEEK_V32 = from_hugging_face(DeepSeekV32Config().to_hf(), "deepseek-v3.2")
BUILT_IN = {DEEPSEEK_V32.name: DEEPSEEK_V32}


def read_model(model: str) -> ModelShape:
    """Return the shape of a model, named by a built-in name, a config.json or a folder with one.

    Raises ValueError when there is no such model or its config cannot be read.
    """
    if model in BUILT_IN:
        return BUILT_IN[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"plan: no model {model}; give {', '.join(BUILT_IN)}, a config.json or its folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return from_hugging_face(config, model)
