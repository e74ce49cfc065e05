"""A small Megatron-core model on one CPU rank, its inputs, and what its attention rotates."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from megatron_rank import one_cpu_rank
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine, which need a GPU
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core==0.16.1")
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as megatron_rotation
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

SEQ, BATCH, HEADS, GROUPS, HEAD_DIM = 8, 2, 4, 2, 16
CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # fp32, sums in another order; 1e-6 observed

# Megatron's model classes read these from the configuration, which has no fields for them.
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
MARKS = [
    pytest.mark.filterwarnings("ignore:full scope is deprecated"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]
__all__ = ["megatron_rotation"]  # the function that the adapter replaces


def one_rank():
    """A context in which Megatron believes to be the only rank, on the CPU."""
    return one_cpu_rank(parallel_state, dot_product_attention)


def make_model(kind: str = "mrope", *, sections=(2, 3, 3), head_dim=HEAD_DIM, percent=1.0, **settings) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * head_dim,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=head_dim,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        mrope_section=list(sections) if kind == "mrope" else None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        qk_layernorm=True,
        normalization="RMSNorm",
        **settings,
    )
    if kind == "yarn":
        for name, value in YARN.items():
            setattr(config, name, value)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    return GPTModel(config, spec, 64, 64, position_embedding_type=kind, rotary_percent=percent)


def inputs(kind: str, batch: int = BATCH):
    ids = torch.randint(0, 64, (batch, SEQ))
    positions = torch.randint(0, 40, (3, batch, SEQ)) if kind == "mrope" else torch.arange(SEQ).expand(batch, -1)
    mask = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)[None, None]
    return ids, positions, mask


def logits_and_gradients(model, arguments):
    model.zero_grad()
    logits = model(*arguments)
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equals(actual, expected):
    """Compare what `logits_and_gradients` returned, gradients relative to the largest of their parameter.

    Gradients of embeddings are sums of up to 50 here, whose neighbours in fp32 are 4e-6 apart. The CPU kernels differ
    from Megatron's rotation by up to 8e-6 there, with the same error against fp64: rms 9e-7, at most 1e-5, both.
    """
    torch.testing.assert_close(actual[0], expected[0], **CLOSE)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        roundings = 2 * torch.finfo(gradient.dtype).eps * float(gradient.abs().max())
        bounds = {"rtol": CLOSE["rtol"], "atol": max(CLOSE["atol"], roundings)}
        torch.testing.assert_close(actual[1][name], gradient, **bounds, msg=lambda m, name=name: f"{name}: {m}")


class Recorder(nn.Module):
    """In place of core attention: keeps the rotated q and k, and passes their gradient on."""

    def forward(self, query, key, value, *_, **__):
        self.query, self.key = query, key
        groups = query.shape[-2] // key.shape[-2]
        out = query + key.repeat_interleave(groups, -2) + value.repeat_interleave(groups, -2)
        return out.flatten(-2)


def rotated(model, hidden, rotary_pos_emb, packed=None):
    """q, k and the gradient of hidden at the first attention of the model."""
    attention = model.decoder.layers[0].self_attention
    core, attention.core_attention = attention.core_attention, Recorder()
    try:
        hidden = hidden.clone().requires_grad_()
        out, _ = attention(hidden, None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed)
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        return attention.core_attention.query.detach(), attention.core_attention.key.detach(), hidden.grad
    finally:
        attention.core_attention = core


def set_context_parallel(model, rank: int, size: int) -> None:
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    for layer in model.decoder.layers:
        layer.self_attention.pg_collection = SimpleNamespace(cp=group)


def packing(lengths, max_length=None) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    longest = max_length or max(lengths)
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


OPERATORS = [{}, {"operator": "mrope", "max_position": 40}]
