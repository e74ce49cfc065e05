"""DeepSeek-V3.2 as its files describe it: sizes, rotation and tensor names, without torch.

Training (`whorl.titan.deepseek_v32`) and the planner read it. The keys of config.json are those of transformers'
`deepseek_v32`. A dense `deepseek_v3` is read too and gets the published model's indexer sizes, since training can add
one.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from whorl.models.fields import count, number, section, value_like
from whorl.rope_config import RopeConfig

MODEL_TYPES = ("deepseek_v32", "deepseek_v3")
TRAINED = "trained_seq_len"  # a name of our own: servers take max_seq_len or seq_length as the longest sequence
# The values that this model implements, by key of config.json; None counts as absent.
FIXED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "indexer_rope_interleave": (False,),
}
FIXED_ROPE: dict[str, tuple[object, ...]] = {
    "rope_type": ("default", "yarn"),
    "type": ("default", "yarn"),
    "attention_factor": (),
    "truncate": (True,),
    "partial_rotary_factor": (1,),
}
YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Sizes that a file must have, with their least values.
SIZES = {
    "vocab_size": 1,
    "hidden_size": 1,
    "intermediate_size": 1,
    "moe_intermediate_size": 1,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 1,
    "n_shared_experts": 0,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "q_lora_rank": 1,
    "kv_lora_rank": 1,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 1,
    "v_head_dim": 1,
}
# Those that have defaults.
OPTIONAL = (
    *("index_n_heads", "index_head_dim", "index_topk", "n_group", "topk_group", "norm_topk_prob"),
    *("routed_scaling_factor", "rms_norm_eps", "max_position_embeddings"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekV32Config:
    """The config by Hugging Face's names.

    Defaults are those of the 671 B model, without YaRN and multi-token prediction.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_nextn_predict_layers: int = 0  # multi-token prediction layers, after the others
    first_k_dense_replace: int = 3  # layers without experts
    num_attention_heads: int = 128
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    n_group: int = 8  # groups of experts, of which a token uses `topk_group`
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 163840
    trained_seq_len: int | None = None  # set if training used shorter sequences than `max_position_embeddings`

    rope_theta: float = 10000.0
    rope_factor: float = 1.0  # above 1: YaRN, at every length, as in the checkpoint's training
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0  # 0: YaRN without a correction of the softmax scale

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "DeepSeekV32Config":
        """Read a config.json; `rope_scaling`, the older spelling, is read too.

        Raises ValueError for a missing size or a value that is not implemented.
        """
        if values.get("model_type") not in MODEL_TYPES:
            raise ValueError(f"model_type is {values.get('model_type')!r}, expected {' or '.join(MODEL_TYPES)}")
        rope = dict(section(values, "rope_scaling") or section(values, "rope_parameters"))
        _check_fixed(values, rope)
        default = asdict(cls()) | {"n_group": 1, "topk_group": 1}
        sizes: dict[str, Any] = {name: count(values, name, least=least) for name, least in SIZES.items()}
        return cls(
            **sizes,
            **{name: value_like(values, name, default[name]) for name in OPTIONAL},
            num_nextn_predict_layers=count(values, "num_nextn_predict_layers", 0, least=0),
            trained_seq_len=count(values, TRAINED) if values.get(TRAINED) else None,
            **_rotation(values, rope, default),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return a config.json of these sizes."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_factor > 1:
            rope |= {"rope_type": "yarn", "factor": self.rope_factor}
            rope |= {name: getattr(self, name) for name in YARN}
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "dtype": dtype,
            **{name: getattr(self, name) for name in (*SIZES, "num_nextn_predict_layers", *OPTIONAL)},
            "first_k_dense_replace": min(self.first_k_dense_replace, self.num_hidden_layers),
            "num_key_value_heads": self.num_attention_heads,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_parameters": rope,
            **({TRAINED: self.trained_seq_len} if self.trained_seq_len else {}),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
        }

    # ---- rotation

    @property
    def rope(self) -> RopeConfig:
        """The rotation of attention: the last channels of a head, in neighbouring pairs."""
        return RopeConfig.from_hf(self.to_hf())

    @property
    def index_rope(self) -> RopeConfig:
        """The rotation of the indexer: the first channels of its heads, channel i with i + R/2, by the same angles."""
        return RopeConfig.from_hf(self.to_hf(), layer_type="indexer")

    @property
    def softmax_scale(self) -> float:
        """The factor of q . k, 192^-0.5 in the 671 B model, absorbed or not; YaRN multiplies by its factor squared."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_scale_correction

    @property
    def yarn_reach(self) -> int:
        """The length in tokens that YaRN extends the original length to; 0 without it."""
        return int(self.original_max_position_embeddings * self.rope_factor) if self.rope_factor > 1 else 0

    # ---- sizes

    def indexer_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an indexer's tensors, by their names in `INDEXER`."""
        dim = self.index_head_dim
        return {
            "wq_b.weight": (self.index_n_heads * dim, self.q_lora_rank),
            "wk.weight": (dim, self.hidden_size),
            "k_norm.weight": (dim,),
            "k_norm.bias": (dim,),
            "weights_proj.weight": (self.index_n_heads, self.hidden_size),
        }


def _check_fixed(values: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    for part, fixed in ((values, FIXED), (rope, FIXED_ROPE)):
        for key, allowed in fixed.items():
            value = part.get(key)
            if value is not None and value not in allowed:
                expected = " or ".join(map(repr, allowed)) or "nothing"
                raise ValueError(f"{key} is {value!r}; DeepSeek-V3.2 is known here with {expected}")
    kinds, dense = values.get("mlp_layer_types"), count(values, "first_k_dense_replace", least=0)
    pattern = None if not isinstance(kinds, list) else ["dense" if i < dense else "sparse" for i in range(len(kinds))]
    if kinds != pattern:
        raise ValueError(
            f"mlp_layer_types is {kinds}, expected {dense} dense layers (first_k_dense_replace), then sparse ones"
        )


def _rotation(values: Mapping[str, Any], rope: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    yarn = rope.get("rope_type", rope.get("type")) == "yarn"
    theta = rope if rope.get("rope_theta") else values
    mscale, of_all = _mscales(rope) if yarn else (default["mscale"], default["mscale_all_dim"])
    if yarn and not rope.get("factor"):
        raise ValueError(f"rope_parameters: rope_type is yarn without a factor; found {sorted(rope)}")
    return {
        "rope_theta": number(theta, "rope_theta", default["rope_theta"]),
        "rope_factor": number(rope, "factor", 1.0) if yarn else 1.0,
        **{name: value_like(rope, name, default[name]) for name in YARN[:3]},
        "mscale": mscale,
        "mscale_all_dim": of_all,
    }


def _mscales(rope: Mapping[str, Any]) -> tuple[float, float]:
    """Return mscale and mscale_all_dim; if one is missing or 0, (1, 0): transformers' scale of 0.1 ln(factor) + 1."""
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if of_all and not mscale:
        raise ValueError(f"mscale_all_dim is {of_all} without mscale; give both, or neither")
    return (float(mscale), float(of_all)) if mscale and of_all else (1.0, 0.0)


# ---- names of tensors

# Hugging Face's names, and those of training, which are TorchTitan's where it has the tensor; {} stands for a layer,
# then an expert. All experts are one tensor in training and one tensor each in files.
INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
_ATTENTION = {
    "q_a_proj": "wq_a",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_a_proj_with_mqa": "wkv_a",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
}
_PRODUCTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# Extra tensors of a multi-token prediction layer: Hugging Face's names inside `model.layers.N`, and ours.
PREDICTION = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
}
# Tied to the model's; checkpoints store copies of them.
PREDICTION_TIED = {"embed_tokens.weight": "tok_embeddings.weight", "shared_head.head.weight": "output.weight"}


def _layer_names() -> dict[str, str]:
    names = {f"self_attn.{theirs}.weight": f"attention.{ours}.weight" for theirs, ours in _ATTENTION.items()}
    names |= {f"self_attn.indexer.{name}": f"attention.indexer.{name}" for name in INDEXER}
    for theirs, ours in _PRODUCTS.items():
        names[f"mlp.{theirs}.weight"] = f"feed_forward.{ours}.weight"
        names[f"mlp.shared_experts.{theirs}.weight"] = f"moe.shared_experts.{ours}.weight"
        names[f"mlp.experts.{{}}.{theirs}.weight"] = f"moe.experts.{ours}"
    names |= {
        "mlp.gate.weight": "moe.router.gate.weight",
        "mlp.gate.e_score_correction_bias": "moe.expert_bias",
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
    }
    return names | {theirs: f"mtp.{ours}" for theirs, ours in PREDICTION.items()}


NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    **{f"model.layers.{{}}.{theirs}": f"layers.{{}}.{ours}" for theirs, ours in _layer_names().items()},
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}


def flat(name: str, first: int) -> str:
    """Return the name in `NAMES` of a training tensor.

    In training, multi-token prediction layers are a separate list; in `NAMES` they are the last layers, from number
    `first`. mtp.0.block.X -> layers.61.X, mtp.0.norm.weight -> layers.61.mtp.norm.weight
    """
    match = re.match(r"mtp\.(\d+)\.(block\.)?(.*)", name)
    if not match:
        return name
    return f"layers.{first + int(match[1])}.{'' if match[2] else 'mtp.'}{match[3]}"


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor of a Hugging Face file belongs to, or None."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None
