"""On an NPU the vendor decides: what whorl.ascend passes on, and what it gives elsewhere for what is documented."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch_npu
from samples import Values, positions, tensor
from torch import Tensor

from whorl import ascend

Call = tuple[list[Any], Values]
# Calls of each name that the documents, as whorl.contracts has them, do not allow: on an NPU they reach torch_npu.
BEYOND: dict[str, Callable[[], Call]] = {
    "npu_rotary_mul": lambda: ([tensor(8, 4, 128), tensor(1, 1, 64), tensor(1, 1, 64)], {"rotary_mode": "quarter"}),
    "npu_mrope": lambda: ([positions(3, 8), tensor(8, 512), tensor(8, 128), tensor(64, 100), 100], {"cache_mode": "x"}),
    "npu_interleave_rope": lambda: ([tensor(2, 4, 8, 96), tensor(1, 1, 8, 64), tensor(1, 1, 8, 64)], {}),
    "npu_apply_rotary_pos_emb": lambda: ([tensor(2, 8, 4, 96)] * 2 + [tensor(2, 8, 1, 32)] * 2, {"layout": "BSH"}),
    "_npu_rotary_embedding": lambda: ([positions(8), *[tensor(8, 512)] * 2, 100, tensor(64, 64), True], {}),
    "npu_rms_norm": lambda: ([tensor(8, 128), tensor(64)], {}),
    "npu_add_rms_norm": lambda: ([tensor(0, 128), tensor(0, 128), tensor(64)], {}),
    "npu_swiglu": lambda: ([tensor(8, 127).t()], {"dim": 5}),
    "npu_fused_infer_attention_score": lambda: (
        [tensor(3, 5, 40), tensor(3, 5, 40), tensor(3, 5, 24)],
        {"input_layout": "NTD_TND", "sparse_mode": 9, "num_heads": 3, "num_key_value_heads": 2},
    ),
    "npu_lightning_indexer": lambda: (
        [tensor(2, 3, 8, 64), tensor(9, 16, 1, 64), tensor(2, 3, 8)],
        {"layout_key": "PA_BSND", "sparse_count": 9999, "next_tokens": 3, "sparse_mode": 1},
    ),
    "npu_sparse_flash_attention": lambda: (
        [tensor(2, 3, 7, 64), tensor(9, 16, 1, 64), None, tensor(2, 3, 1, 4, dtype=torch.int32), 0.1],
        {"layout_kv": "PA_BSND", "sparse_block_size": 2, "sparse_mode": 4},
    ),
    "npu_sparse_flash_attention_grad": lambda: (
        [
            *[tensor(2, 3, 7, 64), tensor(2, 9, 2, 64), tensor(2, 9, 2, 64), tensor(2, 3, 1, 4, dtype=torch.int32)],
            *[tensor(2, 3, 7, 64)] * 2,
            *[tensor(2, 1, 3, 7, dtype=torch.float32)] * 2,
            *(0.1, 4),
        ],
        {"layout": "SBH"},
    ),
    "npu_sparse_lightning_indexer_grad_kl_loss": lambda: (
        [
            *[tensor(2, 3, 7, 64), tensor(2, 9, 2, 64), tensor(2, 3, 5, 64), tensor(2, 9, 1, 64)],
            *[tensor(2, 3, 5), tensor(2, 3, 1, 4, dtype=torch.int32)],
            *[tensor(2, 2, 3, 7, dtype=torch.float32)] * 2,
            0.1,
        ],
        {"layout": "SBH", "sparse_mode": 4},
    ),
    "npu_dense_lightning_indexer_softmax_lse": lambda: (
        [tensor(2, 3, 5, 64), tensor(2, 9, 1, 64), tensor(2, 3, 5)],
        {"layout": "SBH", "sparse_mode": 4},
    ),
    "npu_dense_lightning_indexer_grad_kl_loss": lambda: (
        [
            *[tensor(2, 3, 7, 64), tensor(2, 9, 7, 64), tensor(2, 3, 5, 64), tensor(2, 9, 1, 64), tensor(2, 3, 5)],
            *[tensor(2, 7, 3, 1, dtype=torch.float32)] * 2,
            *[tensor(2, 1, 3, dtype=torch.float32)] * 2,
            0.1,
        ],
        {"layout": "SBH", "sparse_mode": 4},
    ),
    "npu_moe_gating_top_k_softmax": lambda: ([tensor(2, 2, 2, 16)], {"k": 4096}),
    "npu_moe_gating_top_k": lambda: ([tensor(8, 4096), 5000], {"renorm": 1, "norm_type": 2, "group_count": 3}),
    "npu_moe_init_routing_v2": lambda: ([tensor(8, 32), positions(7, 2)], {"quant_mode": 13, "drop_pad_mode": 2}),
    "npu_moe_finalize_routing": lambda: (
        [tensor(16, 32), None, tensor(8, 32), None, tensor(8, 2, dtype=torch.float32), positions(16), None],
        {"drop_pad_mode": 7},
    ),
    "npu_grouped_matmul": lambda: ([[tensor(16, 32)], [tensor(4, 32, 24)]], {"group_type": 1, "act_type": 5}),
    "npu_moe_token_permute": lambda: ([tensor(8, 32), positions(7, 600)], {"padded_mode": True}),
    "npu_moe_token_unpermute": lambda: ([tensor(16, 32), positions(15)], {"restore_shape": [3, 3]}),
    "npu_chunk_gated_delta_rule": lambda: (
        [tensor(7, 2, 256), tensor(7, 2, 256), tensor(7, 128, 32, dtype=torch.float16)],
        {"initial_state": tensor(1, 128, 32, 256, dtype=torch.float32)},
    ),
    "npu_recurrent_gated_delta_rule": lambda: (
        [tensor(30, 2, 64), tensor(30, 2, 64), tensor(30, 4, 32), tensor(5, 4, 32, 64, dtype=torch.float32)],
        {"gk": tensor(30, 4, 64, dtype=torch.float32)},
    ),
    "npu_fused_causal_conv1d": lambda: (
        [tensor(7, 40), tensor(4, 40), tensor(5, 3, 40)],
        {"activation": "silu", "conv_mode": "pangu", "bias": tensor(40)},
    ),
    "npu_dynamic_quant": lambda: ([tensor(32)], {"dst_type": 290, "quant_mode": "pertensor"}),
}

# What the documents of 2026 allow, call by call: the same shapes and dtypes off the NPU as torch_npu's own.
_PACKED: Values = {
    "input_layout": "TND",
    "actual_seq_lengths": [5, 8],
    "actual_seq_lengths_kv": [9, 20],
    "num_heads": 4,
}
DOCUMENTED: dict[str, tuple[str, Callable[[], Call]]] = {
    "int4": ("npu_dynamic_quant", lambda: ([tensor(3, 5, 64)], {"dst_type": torch.quint4x2})),
    "rotary TND": ("npu_rotary_mul", lambda: ([tensor(8, 4, 128), *[tensor(8, 1, 128)] * 2], {})),
    "rotary TND, pairs": ("npu_rotary_mul", lambda: ([tensor(8, 4, 128), *[tensor(8, 1, 128)] * 2, "interleave"], {})),
    "routing, defaults": ("npu_moe_init_routing_v2", lambda: _routing()),
    "routing, cumulative": ("npu_moe_init_routing_v2", lambda: _routing(expert_tokens_num_flag=True)),
    "routing, pairs": (
        "npu_moe_init_routing_v2",
        lambda: _routing(expert_tokens_num_flag=True, expert_tokens_num_type=2),
    ),
    "routing, capacity": ("npu_moe_init_routing_v2", lambda: _routing(drop_pad_mode=1, expert_capacity=3)),
    "routing, int8": ("npu_moe_init_routing_v2", lambda: _routing(quant_mode=1)),
    "heads of 192, values of 128": (
        "npu_fused_infer_attention_score",
        lambda: ([tensor(8, 4, 192), tensor(20, 4, 192), tensor(20, 4, 128)], {**_PACKED, "softmax_lse_flag": True}),
    ),
}


def _routing(**more: Any) -> Call:
    return [tensor(8, 32), tensor(8, 2, dtype=torch.int32)], {"expert_num": 16, **more}


def beyond(fake: Callable[[], AbstractContextManager[None]]) -> Iterator[Values]:
    """Which calls reached torch_npu, and whether with every argument as it was given."""
    for name, make in BEYOND.items():
        calls: list[Any] = []
        original = getattr(torch_npu, name)
        row: Values = {"name": name}
        try:
            with fake():
                args, keywords = make()
                setattr(torch_npu, name, lambda *a, seen=calls, **k: seen.append((a, k)))
                getattr(ascend, name)(*args, **keywords)
                ((by_place, by_name),) = calls
                passed = [*by_place, *by_name.values()]
                if not all(any(_same(a, p) for p in passed) for a in [*args, *keywords.values()]):
                    row["error"] = f"was given {args}, {keywords}, passed {passed}"
        except Exception:
            row["error"] = traceback.format_exc()
        finally:
            setattr(torch_npu, name, original)
        yield row


def _same(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor | list) and type(a) is type(b) and a == b)


def documented(fake: Callable[[], AbstractContextManager[None]]) -> Iterator[Values]:
    """Shapes and dtypes of torch_npu's meta kernels, of whorl.ascend on a fake NPU, and of whorl.ascend on the CPU."""
    for case, (name, make) in DOCUMENTED.items():
        row: Values = {"case": case}
        try:
            with fake():
                args, keywords = make()
                theirs = _described(getattr(torch_npu, name)(*args, **keywords))
                ours = _described(getattr(ascend, name)(*args, **keywords))
                shapes = [(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args]
            here = [torch.zeros(a[0], dtype=a[1]) if isinstance(a, tuple) else a for a in shapes]
            elsewhere = _described(getattr(ascend, name)(*here, **keywords))
            if not theirs == ours == elsewhere:
                row["error"] = f"torch_npu gives {theirs}, ours {ours}, and on the CPU {elsewhere}"
        except Exception:
            row["error"] = traceback.format_exc()
        yield row


def _described(out: Any) -> list[Any]:
    return [(tuple(t.shape), t.dtype) for t in (out if isinstance(out, tuple | list) else [out])]
