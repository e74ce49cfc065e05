"""The documented limits of each call that the kernels receive."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl import contracts


def name_of(x: Tensor) -> str:
    return str(x.dtype)[6:]


def _rotary_mul_limit(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> str | None:
    return contracts.rotary_mul_limit(
        shape=input.shape, cos_shape=r1.shape, dtype=name_of(input), rotary_mode=rotary_mode
    )


def _mrope_limit(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, **keywords: Any
) -> str | None:
    return contracts.mrope_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        positions_shape=positions.shape,
        rotary_dim=cos_sin_cache.shape[-1],
        head_size=head_size,
        dtype=name_of(query),
        table_dtype=name_of(cos_sin_cache),
        sections=keywords.pop("mrope_section", None),
        **keywords,
    )


def _interleave_rope_limit(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    return contracts.interleave_rope_limit(
        shape=x.shape,
        cos_shape=cos.shape,
        dtype=name_of(x),
        table_dtype=name_of(cos),
        contiguous=all(t.is_contiguous() for t in (x, cos, sin)),
    )


def _apply_rotary_pos_emb_limit(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> str | None:
    return contracts.apply_rotary_pos_emb_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        cos_shape=cos.shape,
        dtype=name_of(query),
        table_dtype=name_of(cos),
        layout=layout,
        rotary_mode=rotary_mode,
    )


def _rms_norm_limit(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> str | None:
    return contracts.rms_norm_limit(
        shape=input.shape, gamma_shape=gamma.shape, dtype=name_of(input), gamma_dtype=name_of(gamma)
    )


def _add_rms_norm_limit(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> str | None:
    return contracts.add_rms_norm_limit(
        shape=x1.shape, x2_shape=x2.shape, gamma_shape=gamma.shape, dtype=name_of(x1), gamma_dtype=name_of(gamma)
    )


def _swiglu_limit(input: Tensor, dim: int = -1) -> str | None:
    return contracts.swiglu_limit(shape=input.shape, dim=dim, dtype=name_of(input), contiguous=input.is_contiguous())


def _dynamic_quant_limit(input: Tensor, **_: Any) -> str | None:
    return contracts.dynamic_quant_limit(shape=input.shape, dtype=name_of(input))


def _linear_limit(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    return contracts.linear_limit(
        shape=input.shape,
        weight_shape=weight.shape,
        dtype=name_of(input),
        bias_dtype=None if bias is None else name_of(bias),
    )


def _scatter_limit(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *_: Any, **__: Any
) -> str | None:
    return contracts.scatter_pa_kv_cache_limit(
        key_shape=key.shape,
        cache_shape=key_cache.shape,
        dtype=name_of(key),
        cache_dtype=name_of(key_cache),
        contiguous=all(t.is_contiguous() for t in (key, value, key_cache, value_cache)),
    )


def _attention_limit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_heads: int,
    num_key_value_heads: int,
    input_layout: str = "BSH",
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int],
    block_size: int = 0,
    sparse_mode: int = 0,
    **_: Any,
) -> str | None:
    starts = [0, *actual_seq_lengths[:-1]] if input_layout == "TND" else [0] * len(actual_seq_lengths)
    return contracts.fused_infer_attention_limit(
        num_heads=num_heads,
        num_kv_heads=num_key_value_heads,
        head_size=query.shape[-1],
        dtype=name_of(query),
        input_layout=input_layout,
        batch=len(actual_seq_lengths),
        queries=max(end - start for start, end in zip(starts, actual_seq_lengths, strict=True)),
        block_size=block_size,
        sparse_mode=sparse_mode,
        mask_shape=None if atten_mask is None else atten_mask.shape,
        contiguous=all(t.is_contiguous() for t in (query, key, value, atten_mask) if t is not None),
    )


def _lightning_indexer_limit(
    query: Tensor, key: Tensor, weights: Tensor, *, sparse_count: int = 2048, sparse_mode: int = 3, **_: Any
) -> str | None:
    return contracts.lightning_indexer_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        dtype=name_of(query),
        sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )


def _sparse_attention_limit(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, *_: Any, **given: Any
) -> str | None:
    return contracts.sparse_flash_attention_limit(
        query_shape=query.shape,
        rope_shape=given["query_rope"].shape,
        dtype=name_of(query),
        attention_mode=given["attention_mode"],
        topk=sparse_indices.shape[-1],
    )


def _sparse_attention_grad_limit(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, *more: Any
) -> str | None:
    """None of its parameters is keyword-only, so all come by place: query_rope is the 11th, attention_mode the last."""
    return contracts.sparse_flash_attention_limit(
        query_shape=query.shape,
        rope_shape=more[6].shape,
        dtype=name_of(query),
        attention_mode=more[-1],
        topk=sparse_indices.shape[-1],
        backward=True,
    )


def _indexer_loss_limit(query: Tensor, key: Tensor, query_index: Tensor, *more: Any, **given: Any) -> str | None:
    is_dense = key.shape[2] > 1
    return contracts.indexer_kl_loss_limit(
        query_shape=query.shape,
        key_shape=key.shape,
        index_shape=query_index.shape,
        dtype=name_of(query),
        layout=given.get("layout", "BSND"),
        dense=is_dense,
        topk=None if is_dense else more[2].shape[-1],  # after the indexer's keys and weights
    )


def _top_k_top_p_limit(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> str | None:
    top_k = None if k is None else int(k.max())
    return contracts.top_k_top_p_limit(shape=logits.shape, dtype=name_of(logits), top_k=top_k)


def _gating_softmax_limit(x: Tensor, finished: Tensor | None = None, k: int = 1) -> str | None:
    return contracts.moe_gating_top_k_softmax_limit(shape=x.shape, k=k, dtype=name_of(x))


def _gating_limit(x: Tensor, k: int, *, bias: Tensor | None = None, group_count: int = 1, **_: Any) -> str | None:
    bias_dtype = None if bias is None else name_of(bias)
    return contracts.moe_gating_top_k_limit(
        shape=x.shape, dtype=name_of(x), bias_dtype=bias_dtype, group_count=group_count
    )


def _init_routing_limit(
    x: Tensor,
    expert_idx: Tensor,
    *,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    quant_mode: int = -1,
    **_: Any,
) -> str | None:
    return contracts.moe_init_routing_limit(
        shape=x.shape,
        dtype=name_of(x),
        ids_dtype=name_of(expert_idx),
        expert_num=expert_num,
        expert_tokens_num_type=expert_tokens_num_type,
        quant_mode=quant_mode,
    )


def _finalize_limit(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    index: Tensor,
    *more: Any,
) -> str | None:
    return contracts.moe_finalize_routing_limit(
        shape=rows.shape,
        dtype=name_of(rows),
        scales_dtype=None if scales is None else name_of(scales),
        index_dtype=name_of(index),
        drop_pad_mode=more[1] if len(more) > 1 else 0,
    )


def _grouped_matmul_limit(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    **_: Any,
) -> str | None:
    return contracts.grouped_matmul_limit(
        shapes=[t.shape for t in x],
        weight_shapes=[t.shape for t in weight],
        dtype=name_of(x[0]),
        weight_dtype=name_of(weight[0]),
        groups=None if group_list is None else len(group_list),
        split_item=split_item,
        group_type=group_type,
        group_list_type=group_list_type,
        act_type=act_type,
    )


def _fusion_attention_limit(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> str | None:
    return contracts.fusion_attention_limit(
        query_shape=query.shape, key_shape=key.shape, value_dim=value.shape[-1], dtype=name_of(query)
    )


LIMITS: dict[str, Callable[..., str | None]] = {
    "npu_rotary_mul": _rotary_mul_limit,
    "npu_mrope": _mrope_limit,
    "npu_interleave_rope": _interleave_rope_limit,
    "npu_apply_rotary_pos_emb": _apply_rotary_pos_emb_limit,
    "npu_rms_norm": _rms_norm_limit,
    "npu_add_rms_norm": _add_rms_norm_limit,
    "npu_swiglu": _swiglu_limit,
    "npu_dynamic_quant": _dynamic_quant_limit,
    "npu_linear": _linear_limit,
    "npu_scatter_pa_kv_cache": _scatter_limit,
    "npu_fused_infer_attention_score": _attention_limit,
    "npu_sparse_lightning_indexer_grad_kl_loss": _indexer_loss_limit,
    "npu_dense_lightning_indexer_grad_kl_loss": _indexer_loss_limit,
    "npu_fusion_attention": _fusion_attention_limit,
    "npu_fusion_attention_grad": _fusion_attention_limit,
    "npu_top_k_top_p": _top_k_top_p_limit,
    "npu_lightning_indexer": _lightning_indexer_limit,
    "npu_sparse_flash_attention": _sparse_attention_limit,
    "npu_sparse_flash_attention_grad": _sparse_attention_grad_limit,
    "npu_moe_gating_top_k_softmax": _gating_softmax_limit,
    "npu_moe_gating_top_k": _gating_limit,
    "npu_moe_init_routing_v2": _init_routing_limit,
    "npu_moe_finalize_routing": _finalize_limit,
    "npu_grouped_matmul": _grouped_matmul_limit,
}


def refusing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which refuses what the vendor documents that the device refuses."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(a.dtype == torch.float64 for a in args if isinstance(a, Tensor)):
            raise AssertionError(f"{name} was given float64")
        if name in LIMITS and (limit := LIMITS[name](*args, **kwargs)) is not None:
            raise AssertionError(f"{name} was called beyond its documented limits: {limit}")
        return kernel(*args, **kwargs)

    return run
