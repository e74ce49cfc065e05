"""The arguments of a DeepSeek-V3.2: its sizes, its flavours, and what a job sets."""

import os
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import nn
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability

from whorl.models.deepseek_v32 import DeepSeekV32Config

Stage = Literal["sparse", "warmup"]  # see `stages.py`
AttentionPath = Literal["auto", "masked", "absorbed"]  # of the attention, see `fused.py`
FULL = DeepSeekV32Config()  # the published model of 671 B parameters
# Sizes and rotary options whose names here, which are TorchTitan's where it has them, are not those in a config.json.
NAMES = {
    "dim": "hidden_size",
    "inter_dim": "intermediate_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_dense_layers": "first_k_dense_replace",
    "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "original_seq_len": "original_max_position_embeddings",
}
# The same for the fields of TorchTitan's MoEArgs, which are in `moe_args`.
EXPERT_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "top_k": "num_experts_per_tok",
    "route_norm": "norm_topk_prob",
    "route_scale": "routed_scaling_factor",
}


def experts(**changes: Any) -> MoEArgs:
    """Return the arguments of the experts that all flavours share, such as normalised sigmoid scores, with changes."""
    same = {name: getattr(FULL, EXPERT_NAMES[name]) for name in ("num_shared_experts", "route_norm", "route_scale")}
    return MoEArgs(score_func="sigmoid", score_before_experts=False, **same | changes)


def _experts_from_config(config: DeepSeekV32Config) -> MoEArgs:
    groups = (config.n_group, config.topk_group) if config.n_group > 1 else (None, None)
    named = {ours: getattr(config, theirs) for ours, theirs in EXPERT_NAMES.items()}
    return experts(**named, num_expert_groups=groups[0], num_limited_groups=groups[1])


@dataclass
class DeepSeekV32Args(BaseModelArgs):
    """The arguments of the model. The defaults are the 671 B model; names are TorchTitan's where it has them."""

    vocab_size: int = FULL.vocab_size
    max_seq_len: int = 32768
    dim: int = FULL.hidden_size
    inter_dim: int = FULL.intermediate_size
    moe_inter_dim: int = FULL.moe_intermediate_size
    n_layers: int = FULL.num_hidden_layers
    n_dense_layers: int = FULL.first_k_dense_replace
    n_heads: int = FULL.num_attention_heads
    norm_eps: float = FULL.rms_norm_eps
    moe_args: MoEArgs = field(default_factory=lambda: _experts_from_config(FULL))
    moe_impl: str = "standard"

    q_lora_rank: int = FULL.q_lora_rank
    kv_lora_rank: int = FULL.kv_lora_rank
    qk_nope_head_dim: int = FULL.qk_nope_head_dim
    qk_rope_head_dim: int = FULL.qk_rope_head_dim
    v_head_dim: int = FULL.v_head_dim

    index_n_heads: int = FULL.index_n_heads
    index_head_dim: int = FULL.index_head_dim
    index_topk: int = FULL.index_topk

    rope_theta: float = FULL.rope_theta
    rope_factor: float = FULL.rope_factor  # above 1: YaRN at every sequence length, as the checkpoint was trained
    original_seq_len: int = FULL.original_max_position_embeddings
    beta_fast: float = FULL.beta_fast
    beta_slow: float = FULL.beta_slow
    mscale: float = FULL.mscale
    mscale_all_dim: float = FULL.mscale_all_dim

    n_mtp_layers: int = FULL.num_nextn_predict_layers

    stage: Stage = "sparse"
    attention: AttentionPath = "auto"
    indexer_loss_coeff: float = 1.0
    mtp_loss_coeff: float = 0.3
    # Number of tokens that indexer and multi-token prediction losses are averaged over; 0: the tokens of a call.
    global_tokens: int = 0
    bootstrap_indexer: bool = False

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Set the arguments that a job determines, such as max_seq_len and stage; TorchTitan calls this.

        Raises ValueError when the job's degrees of parallelism exclude multi-token prediction layers.
        """
        training, parallelism = job_config.training, job_config.parallelism
        self.max_seq_len = training.seq_len
        if self.moe_args.use_grouped_mm and not has_cuda_capability(9, 0):
            logger.warning("torch._grouped_mm needs compute capability 9.0; experts run one after another")
            self.moe_args.use_grouped_mm = False
        self.moe_args._debug_force_load_balance = job_config.debug.moe_force_load_balance
        self.moe_impl = parallelism.expert_parallel_comm_backend
        self.global_tokens = _global_batch(job_config) * training.seq_len
        options = getattr(job_config, "whorl", None)
        for name in ("stage", "attention", "indexer_loss_coeff", "mtp_loss_coeff", "bootstrap_indexer"):
            setattr(self, name, getattr(options, name, getattr(self, name)))
        for name in ("pipeline_parallel_degree", "context_parallel_degree", "tensor_parallel_degree"):
            if self.n_mtp_layers and getattr(parallelism, name) > 1:
                raise ValueError(
                    f"{self.n_mtp_layers} multi-token prediction layers need full sequences of tokens beside the last "
                    f"layer: {name} is {getattr(parallelism, name)}, expected 1; or set n_mtp_layers to 0"
                )

    @staticmethod
    def from_config(config: DeepSeekV32Config) -> "DeepSeekV32Args":
        """Return the arguments that a model config describes; what a job determines has its default."""
        named = {ours: getattr(config, theirs) for ours, theirs in NAMES.items()}
        length = config.trained_seq_len or config.max_position_embeddings
        return DeepSeekV32Args(**named, max_seq_len=length, moe_args=_experts_from_config(config))

    @property
    def config(self) -> DeepSeekV32Config:
        """Return the config of the model, without what a job determines, such as stage and loss coefficients."""
        moe = self.moe_args
        config = DeepSeekV32Config(
            **{theirs: getattr(self, ours) for ours, theirs in NAMES.items()},
            **{theirs: getattr(moe, ours) for ours, theirs in EXPERT_NAMES.items()},
            n_group=moe.num_expert_groups or 1,
            topk_group=moe.num_limited_groups or 1,
        )
        # A run may train on shorter sequences than YaRN reaches; the exported model is not limited to them.
        longest = max(self.max_seq_len, config.yarn_reach)
        trained = self.max_seq_len if self.max_seq_len < longest else None
        return replace(config, max_position_embeddings=longest, trained_seq_len=trained)

    def hf_config(self, dtype: str) -> dict[str, Any]:
        """Return the values of config.json. dtype: its field `dtype`, such as "bfloat16".

        Raises ValueError if transformers' model cannot compute the same.
        """
        moe = self.moe_args
        requirements = {
            "moe_args.score_func": (moe.score_func, "sigmoid"),
            "moe_args.score_before_experts": (moe.score_before_experts, False),
            "moe_args.gate_bias": (moe.gate_bias, False),
        }
        if self.rope_factor > 1 and not self.mscale_all_dim:
            requirements["mscale"] = (self.mscale, 1.0)
        for name, (actual, expected) in requirements.items():
            if actual != expected:
                raise ValueError(f"{name} is {actual!r}, Hugging Face's deepseek_v32 supports only {expected!r}")
        return self.config.to_hf(dtype)

    @property
    def softmax_scale(self) -> float:
        return self.config.softmax_scale

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the FLOPs per token of forward and backward, for TorchTitan's MFU.

        Of experts and keys only the selected ones count; recomputation does not count.
        """
        total = sum(p.numel() for p in model.parameters())
        experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
        embeddings = sum(p.numel() for name, p in model.named_parameters() if name.startswith("tok_embeddings"))
        active = total - embeddings - experts * (1 - self.moe_args.top_k / self.moe_args.num_experts)
        if self.n_mtp_layers:
            active += self.n_mtp_layers * self.vocab_size * self.dim  # the head runs again for each
        top = min(self.index_topk, seq_len)
        keys = (top * (top + 1) / 2 + (seq_len - top) * top) / seq_len  # average number of selected keys
        head = self.qk_nope_head_dim + self.qk_rope_head_dim
        attention = 6 * self.n_heads * keys * (head + self.v_head_dim)
        index = 2 * self.index_n_heads * self.index_head_dim
        scores = index * (seq_len + 1) / 2 + 2 * index * keys  # scores of all previous keys; gradients of selected ones
        # The input of the indexer is detached, so that its projections compute only weight gradients in backward.
        detached = sum(p.numel() for name, p in model.named_parameters() if ".indexer." in name)
        layers = self.n_layers + self.n_mtp_layers
        return total, int(6 * active - 2 * detached + layers * (attention + scores))


_SAME_NAMES = {f.name for f in fields(DeepSeekV32Config)} & {f.name for f in fields(DeepSeekV32Args)}
NAMES |= {name: name for name in sorted(_SAME_NAMES)}


def _global_batch(job_config: Any) -> int:
    """Return the number of sequences of an optimizer step, over all ranks and micro-batches."""
    training, parallelism = job_config.training, job_config.parallelism
    if training.global_batch_size > 0:
        return int(training.global_batch_size)
    is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
    world = torch.distributed.get_world_size() if is_running else int(os.environ.get("WORLD_SIZE", "1"))
    replicas = world // (
        parallelism.tensor_parallel_degree * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree
    )
    return int(training.local_batch_size * max(1, replicas))


def _few_layers(layers: int, top_k: int) -> DeepSeekV32Args:
    """Return the published sizes with few layers, of which the first has no experts, and 8 experts in the others."""
    return DeepSeekV32Args(n_layers=layers, n_dense_layers=1, moe_args=experts(num_experts=8, top_k=top_k))


# The small flavors, each argument once: its value in `tiny`, for tests, and in `debug`.
SMALL: dict[str, tuple[Any, Any]] = {
    "vocab_size": (512, 2048),
    "max_seq_len": (64, 2048),
    "dim": (64, 256),
    "inter_dim": (128, 1024),
    "moe_inter_dim": (64, 256),
    "n_layers": (3, 6),
    "n_dense_layers": (1, 1),
    "n_heads": (4, 16),
    "moe_args": (experts(num_experts=4, top_k=2), experts(num_experts=8, top_k=3)),
    "q_lora_rank": (32, 128),
    "kv_lora_rank": (32, 128),
    "qk_nope_head_dim": (16, 64),
    "qk_rope_head_dim": (8, 32),
    "v_head_dim": (16, 64),
    "index_n_heads": (4, 8),
    "index_head_dim": (16, 64),
    "index_topk": (16, 256),
}
FLAVOURS: dict[str, DeepSeekV32Args] = {
    "tiny": DeepSeekV32Args(**{name: tiny for name, (tiny, _) in SMALL.items()}),
    "debug": DeepSeekV32Args(**{name: debug for name, (_, debug) in SMALL.items()}),
    "4l": _few_layers(4, 2),
    "8l": _few_layers(8, 2),
    "4l_top8": _few_layers(4, 8),
    "8l_top8": _few_layers(8, 8),
    "671b": DeepSeekV32Args(rope_factor=40.0),
}
