"""For each name of whorl.ascend a call inside the documented limits, on FakeTensor npu:0."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NPU = "npu:0"
Values = dict[str, Any]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=NPU)


def positions(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.int64)


# Arguments inside the documented limits, and which of them may want a gradient.
SAMPLES: dict[str, tuple[Callable[[], list[Any]], Values, tuple[int, ...]]] = {
    "npu_rotary_mul": (lambda: [tensor(2, 8, 4, 128), tensor(1, 8, 1, 128), tensor(1, 8, 1, 128)], {}, (0, 1, 2)),
    "npu_mrope": (
        lambda: [positions(3, 8), tensor(8, 512), tensor(8, 128), tensor(64, 128), 128],
        {"mrope_section": [24, 20, 20], "cache_mode": "interleave"},
        (1, 2),
    ),
    "npu_interleave_rope": (lambda: [tensor(2, 4, 8, 64), tensor(2, 1, 8, 64), tensor(2, 1, 8, 64)], {}, (0,)),
    "npu_apply_rotary_pos_emb": (
        lambda: [tensor(2, 8, 4, 128), tensor(2, 8, 1, 128), tensor(2, 8, 1, 128), tensor(2, 8, 1, 128)],
        {},
        (0, 1),
    ),
    "_npu_rotary_embedding": (
        lambda: [positions(8), tensor(8, 512), tensor(8, 128), 128, tensor(64, 128), True],
        {},
        (1, 2),
    ),
    "npu_rms_norm": (lambda: [tensor(8, 128), tensor(128)], {"epsilon": 1e-5}, (0, 1)),
    "npu_add_rms_norm": (lambda: [tensor(8, 128), tensor(8, 128), tensor(128)], {}, (0, 1, 2)),
    "npu_swiglu": (lambda: [tensor(8, 128)], {"dim": 0}, (0,)),
    "npu_chunk_gated_delta_rule": (
        lambda: [tensor(7, 2, 64), tensor(7, 2, 64), tensor(7, 4, 32)],
        {
            "beta": lambda: tensor(7, 4),
            "initial_state": lambda: tensor(2, 4, 32, 64),
            "actual_seq_lengths": lambda: tensor(2, dtype=torch.int32),
            "scale": 0.125,
            "g": lambda: tensor(7, 4, dtype=torch.float32),
        },
        (0, 1, 2),
    ),
    "npu_recurrent_gated_delta_rule": (
        lambda: [tensor(3, 2, 64), tensor(3, 2, 64), tensor(3, 4, 32), tensor(5, 4, 32, 64)],
        {
            "beta": lambda: tensor(3, 4),
            "scale": 0.125,
            "actual_seq_lengths": lambda: tensor(2, dtype=torch.int32),
            "ssm_state_indices": lambda: tensor(3, dtype=torch.int32),
            "g": lambda: tensor(3, 4, dtype=torch.float32),
        },
        (0, 1, 2),
    ),
    "npu_fused_causal_conv1d": (
        lambda: [tensor(7, 64), tensor(3, 64), tensor(5, 2, 64)],
        {"query_start_loc": lambda: tensor(3, dtype=torch.int32), "max_query_len": 9},
        (0, 1),
    ),
    "npu_fused_infer_attention_score": (
        lambda: [tensor(2, 3, 4, 64), tensor(9, 128, 128), tensor(9, 128, 128)],
        {
            "num_heads": 4,
            "num_key_value_heads": 2,
            "scale": 0.125,
            "input_layout": "BSND",
            "actual_seq_lengths": [3, 2],
            "actual_seq_lengths_kv": [300, 20],
            "sparse_mode": 3,
            "block_size": 128,
            "softmax_lse_flag": True,
            "block_table": lambda: tensor(2, 3, dtype=torch.int32),
            "atten_mask": lambda: tensor(2048, 2048, dtype=torch.bool),
        },
        (0, 1, 2),
    ),
    "npu_lightning_indexer": (
        lambda: [tensor(2, 3, 8, 128), tensor(2, 9, 1, 128), tensor(2, 3, 8)],
        {"sparse_count": 4, "return_value": True},
        (0, 1, 2),
    ),
    "npu_sparse_flash_attention": (
        lambda: [tensor(2, 3, 8, 512), *[tensor(2, 9, 1, 512)] * 2, tensor(2, 3, 1, 4, dtype=torch.int32), 0.1],
        {
            "query_rope": lambda: tensor(2, 3, 8, 64),
            "key_rope": lambda: tensor(2, 9, 1, 64),
            "attention_mode": 2,
            "return_softmax_lse": True,
        },
        (0, 1),
    ),
    "npu_sparse_flash_attention_grad": (
        lambda: [
            *[tensor(2, 3, 8, 512), *[tensor(2, 9, 1, 512)] * 2, tensor(2, 3, 1, 1024, dtype=torch.int32)],
            *[tensor(2, 3, 8, 512)] * 2,
            *[tensor(2, 1, 3, 8, dtype=torch.float32)] * 2,
            *(0.1, 1),
        ],
        {
            "query_rope": lambda: tensor(2, 3, 8, 64),
            "key_rope": lambda: tensor(2, 9, 1, 64),
            "attention_mode": 2,
        },
        (0, 1),
    ),
    "npu_sparse_lightning_indexer_grad_kl_loss": (
        lambda: [
            *[tensor(2, 3, 32, 512), tensor(2, 9, 1, 512), tensor(2, 3, 8, 128), tensor(2, 9, 1, 128)],
            *[tensor(2, 3, 8), tensor(2, 3, 1, 4, dtype=torch.int32)],
            *[tensor(2, 1, 3, 32, dtype=torch.float32)] * 2,
            0.1,
        ],
        {"query_rope": lambda: tensor(2, 3, 32, 64), "key_rope": lambda: tensor(2, 9, 1, 64)},
        (2, 3, 4),
    ),
    "npu_dense_lightning_indexer_softmax_lse": (
        lambda: [tensor(2, 3, 8, 128), tensor(2, 9, 1, 128), tensor(2, 3, 8)],
        {},
        (0, 1, 2),
    ),
    "npu_dense_lightning_indexer_grad_kl_loss": (
        lambda: [
            *[tensor(2, 3, 32, 128), tensor(2, 9, 32, 128), tensor(2, 3, 8, 128), tensor(2, 9, 1, 128)],
            tensor(2, 3, 8),
            *[tensor(2, 32, 3, 1, dtype=torch.float32)] * 2,
            *[tensor(2, 1, 3, dtype=torch.float32)] * 2,
            0.1,
        ],
        {"query_rope": lambda: tensor(2, 3, 32, 64), "key_rope": lambda: tensor(2, 9, 32, 64)},
        (2, 3, 4),
    ),
    "npu_moe_gating_top_k_softmax": (lambda: [tensor(8, 16)], {"k": 2}, (0,)),
    "npu_moe_gating_top_k": (
        lambda: [tensor(8, 64), 4],
        {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "bias": lambda: tensor(64)},
        (0,),
    ),
    "npu_moe_init_routing_v2": (
        lambda: [tensor(8, 32), tensor(8, 2, dtype=torch.int32)],
        {"expert_num": 16, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True},
        (0,),
    ),
    "npu_moe_finalize_routing": (
        lambda: [tensor(16, 32), None, None, None, tensor(8, 2), tensor(16, dtype=torch.int32), None],
        {"drop_pad_mode": 2},
        (0, 4),
    ),
    "npu_grouped_matmul": (
        lambda: [[tensor(16, 32)], [tensor(4, 32, 24)]],
        {"group_type": 0, "split_item": 2, "group_list_type": 1, "group_list": lambda: positions(4)},
        (0, 1),
    ),
    "npu_moe_token_permute": (lambda: [tensor(8, 32), positions(8, 2)], {}, (0,)),
    "npu_moe_token_unpermute": (
        lambda: [tensor(16, 32), tensor(16, dtype=torch.int32), tensor(8, 2)],
        {},
        (0, 2),
    ),
    "npu_dynamic_quant": (lambda: [tensor(8, 32)], {}, (0,)),
}
