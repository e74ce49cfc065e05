"""TorchTitan's own models and ours, small; and what converters are given."""

from typing import Any

import torch
from torch import Tensor, nn

VOCAB, LENGTH = 64, 16
MODELS = ("llama3", "qwen3", "deepseek_v3", "deepseek_v32")


def job(dtype: str = "float32", **whorl: Any) -> Any:
    from torchtitan.config import JobConfig

    from whorl.titan.config import Whorl

    config: Any = JobConfig()
    config.training.mixed_precision_param = dtype
    config.training.seq_len = LENGTH
    config.activation_checkpoint.mode = "none"
    config.whorl = Whorl(**whorl)
    return config


def experts(**more: Any) -> Any:
    from torchtitan.models.moe import MoEArgs

    return MoEArgs(num_experts=4, top_k=2, use_grouped_mm=False, **more)


def small(name: str) -> tuple[type, Any]:
    """The class and its arguments."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": LENGTH}
    latent: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    latent |= {"v_head_dim": 8, "inter_dim": 48, "moe_inter_dim": 16, "n_dense_layers": 1}
    if name == "llama3":
        from torchtitan.models.llama3 import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        return Transformer, TransformerModelArgs(**sizes, n_kv_heads=2, multiple_of=16)
    if name == "qwen3":
        from torchtitan.models.qwen3 import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model

        moe = experts(num_shared_experts=0, score_func="softmax", route_norm=True, score_before_experts=False)
        more: dict[str, Any] = {"head_dim": 16, "hidden_dim": 64, "moe_enabled": True, "moe_inter_dim": 16}
        return Qwen3Model, Qwen3ModelArgs(**sizes, **more, n_kv_heads=2, moe_args=moe)
    if name == "deepseek_v3":
        from torchtitan.models.deepseek_v3 import DeepSeekV3Model, DeepSeekV3ModelArgs

        args = DeepSeekV3ModelArgs(**sizes, **latent, moe_args=experts(score_before_experts=True))
        args.moe_impl = "standard"  # type: ignore[attr-defined]  # set from a job, otherwise
        return DeepSeekV3Model, args
    from whorl.titan.deepseek_v32.args import DeepSeekV32Args
    from whorl.titan.deepseek_v32.model import DeepSeekV32Model

    index = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 6}
    return DeepSeekV32Model, DeepSeekV32Args(**sizes, **latent, **index, moe_args=experts(score_before_experts=False))


@torch.no_grad()
def initialise(model: Any) -> None:
    """Weights of some size everywhere, so that every path counts."""
    model.init_weights(torch.device("cpu"))
    for name, weight in model.named_parameters():
        if "norm" in name and weight.dim() == 1:
            weight.uniform_(0.5, 1.5) if name.endswith("weight") else weight.normal_(0, 0.1)
        elif "tok_embeddings" not in name:
            weight.normal_(0, 0.15)


def build(name: str) -> nn.Module:
    cls, args = small(name)
    torch.manual_seed(3)
    model = cls(args)
    initialise(model)
    return model


def convert(model: nn.Module, *names: str, config: Any = None) -> nn.Module:
    from whorl.titan.converters.table import CONVERTERS

    for name in names:
        CONVERTERS[name](config or job(), None).convert(model)  # type: ignore[arg-type]
    return model


def run(model: nn.Module, tokens: Tensor, **more: Any) -> dict[str, Tensor]:
    """Logits, and gradients by name."""
    model.zero_grad()
    logits = model(tokens, **more)
    logits.float().log_softmax(-1)[..., 0].sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach()} | grads
