"""The documented limits of each call that the kernels receive."""

from collections.abc import Callable
from typing import Any

import torch
from npu.attention_kernels import Renamed
from npu.bound import Call, dtype_of
from torch import Tensor

from whorl import contracts


def name_of(x: Tensor) -> str:
    return str(x.dtype)[6:]


def _contiguous(*tensors: Tensor | None) -> bool:
    return all(t.is_contiguous() for t in tensors if t is not None)


def _query_and_key(call: Call) -> dict[str, Any]:
    """What the limits of most rotations and attentions ask for."""
    return {"query_shape": call.query.shape, "key_shape": call.key.shape, "dtype": name_of(call.query)}


def _rotary_mul_limit(call: Call) -> str | None:
    return contracts.rotary_mul_limit(
        shape=call.input.shape, cos_shape=call.r1.shape, dtype=name_of(call.input), rotary_mode=call.rotary_mode
    )


def _mrope_limit(call: Call) -> str | None:
    return contracts.mrope_limit(
        **_query_and_key(call),
        positions_shape=call.positions.shape,
        rotary_dim=call.cos_sin_cache.shape[-1],
        head_size=call.head_size,
        table_dtype=name_of(call.cos_sin_cache),
        sections=call.mrope_section,
        rotary_mode=call.rotary_mode,
        cache_mode=call.cache_mode,
    )


def _interleave_rope_limit(call: Call) -> str | None:
    return contracts.interleave_rope_limit(
        shape=call.x.shape,
        cos_shape=call.cos.shape,
        dtype=name_of(call.x),
        table_dtype=name_of(call.cos),
        contiguous=_contiguous(call.x, call.cos, call.sin),
    )


def _apply_rotary_pos_emb_limit(call: Call) -> str | None:
    return contracts.apply_rotary_pos_emb_limit(
        **_query_and_key(call),
        cos_shape=call.cos.shape,
        table_dtype=name_of(call.cos),
        layout=call.layout,
        rotary_mode=call.rotary_mode,
    )


def _rms_norm_limit(call: Call) -> str | None:
    x, gamma = call.input, call.gamma
    return contracts.rms_norm_limit(
        shape=x.shape, gamma_shape=gamma.shape, dtype=name_of(x), gamma_dtype=name_of(gamma)
    )


def _add_rms_norm_limit(call: Call) -> str | None:
    x, gamma = call.x1, call.gamma
    return contracts.add_rms_norm_limit(
        shape=x.shape, x2_shape=call.x2.shape, gamma_shape=gamma.shape, dtype=name_of(x), gamma_dtype=name_of(gamma)
    )


def _swiglu_limit(call: Call) -> str | None:
    x = call.input
    return contracts.swiglu_limit(shape=x.shape, dim=call.dim, dtype=name_of(x), contiguous=x.is_contiguous())


def _geglu_limit(call: Call) -> str | None:
    return contracts.geglu_limit(shape=call.input.shape, dim=call.dim, dtype=name_of(call.input))


def _dynamic_quant_limit(call: Call) -> str | None:
    return contracts.dynamic_quant_limit(shape=call.input.shape, dtype=name_of(call.input))


def _linear_limit(call: Call) -> str | None:
    return contracts.linear_limit(
        shape=call.input.shape,
        weight_shape=call.weight.shape,
        dtype=name_of(call.input),
        bias_dtype=None if call.bias is None else name_of(call.bias),
    )


def _scatter_limit(call: Call) -> str | None:
    return contracts.scatter_pa_kv_cache_limit(
        key_shape=call.key.shape,
        cache_shape=call.key_cache.shape,
        dtype=name_of(call.key),
        cache_dtype=name_of(call.key_cache),
        contiguous=_contiguous(call.key, call.value, call.key_cache, call.value_cache),
    )


def _scatter_nd_limit(call: Call) -> str | None:
    return contracts.scatter_nd_update_limit(
        shape=call.input.shape,
        index_shape=call.indices.shape,
        updates_shape=call.updates.shape,
        dtype=name_of(call.input),
    )


def _batchmatmul_limit(call: Call) -> str | None:
    return contracts.transpose_batchmatmul_limit(
        shape=call.input.shape,
        weight_shape=call.weight.shape,
        dtype=name_of(call.input),
        weight_dtype=name_of(call.weight),
        is_transposed=call.perm_x1 == [1, 0, 2],
    )


def _attention_limit(call: Any) -> str | None:
    lengths, mask = call.actual_seq_lengths, call.atten_mask
    starts = [0, *lengths[:-1]] if call.input_layout == "TND" else [0] * len(lengths)
    if call.key_antiquant_scale is not None:
        codes = contracts.antiquant_limit(
            dtype=name_of(call.query),
            cache_dtype=name_of(call.key),
            head_size=call.query.shape[-1],
            block_size=call.block_size,
            batch=len(lengths),
            queries=sum(lengths),
        )
        if codes is not None:
            return codes
    return contracts.fused_infer_attention_limit(
        num_heads=call.num_heads,
        num_kv_heads=call.num_key_value_heads,
        head_size=call.query.shape[-1],
        dtype=name_of(call.query),
        input_layout=call.input_layout,
        batch=len(lengths),
        queries=max(end - start for start, end in zip(starts, lengths, strict=True)),
        block_size=call.block_size,
        sparse_mode=call.sparse_mode,
        mask_shape=None if mask is None else mask.shape,
        contiguous=_contiguous(call.query, call.key, call.value, mask),
    )


def _lightning_indexer_limit(call: Call) -> str | None:
    return contracts.lightning_indexer_limit(
        **_query_and_key(call),
        sparse_count=call.sparse_count,
        sparse_mode=call.sparse_mode,
        block_size=call.key.shape[1] if call.layout_key == "PA_BSND" else 0,
        contiguous=_contiguous(call.query, call.key, call.weights),
    )


def _sparse_attention_limit(call: Call, *, backward: bool = False) -> str | None:
    return contracts.sparse_flash_attention_limit(
        query_shape=call.query.shape,
        rope_shape=call.query_rope.shape,
        dtype=name_of(call.query),
        attention_mode=call.attention_mode,
        topk=call.sparse_indices.shape[-1],
        backward=backward,
        block_size=call.key.shape[1] if not backward and call.layout_kv == "PA_BSND" else 0,
        sparse_block_size=call.sparse_block_size,
        contiguous=_contiguous(call.query, call.key, call.value, call.query_rope, call.key_rope, call.sparse_indices),
    )


def _indexer_loss_limit(call: Call, *, topk: int | None = None) -> str | None:
    return contracts.indexer_kl_loss_limit(
        **_query_and_key(call),
        index_shape=call.query_index.shape,
        layout=call.layout,
        dense=topk is None,
        topk=topk,
    )


def _top_k_top_p_limit(call: Call) -> str | None:
    top_k = None if call.k is None else int(call.k.max())
    return contracts.top_k_top_p_limit(shape=call.logits.shape, dtype=name_of(call.logits), top_k=top_k)


def _gating_softmax_limit(call: Call) -> str | None:
    return contracts.moe_gating_top_k_softmax_limit(shape=call.x.shape, k=call.k, dtype=name_of(call.x))


def _gating_limit(call: Call) -> str | None:
    bias_dtype = None if call.bias is None else name_of(call.bias)
    return contracts.moe_gating_top_k_limit(
        shape=call.x.shape, dtype=name_of(call.x), bias_dtype=bias_dtype, group_count=call.group_count
    )


def _init_routing_limit(call: Call) -> str | None:
    return contracts.moe_init_routing_limit(
        shape=call.x.shape,
        dtype=name_of(call.x),
        ids_dtype=name_of(call.expert_idx),
        expert_num=call.expert_num,
        expert_tokens_num_type=call.expert_tokens_num_type,
        quant_mode=call.quant_mode,
    )


def _finalize_limit(call: Call) -> str | None:
    rows, scales = call.expanded_permuted_rows, call.scales
    return contracts.moe_finalize_routing_limit(
        shape=rows.shape,
        dtype=name_of(rows),
        scales_dtype=None if scales is None else name_of(scales),
        index_dtype=name_of(call.expanded_src_to_dst_row),
        drop_pad_mode=call.drop_pad_mode,
    )


def _quant_matmul_limit(call: Call) -> str | None:
    output = str(dtype_of(call.output_dtype)).removeprefix("torch.")
    return contracts.quant_matmul_limit(
        shape=call.x1.shape, weight_shape=call.x2.shape, dtype=name_of(call.x1), output_dtype=output
    )


def _packed_weight(weight: Tensor) -> dict[str, Any]:
    """The weight that an int32 tensor stands for; one that is not contiguous would stand for a transposed weight."""
    if name_of(weight) != "int32":
        return {"weight_shape": weight.shape, "weight_dtype": name_of(weight)}
    assert weight.is_contiguous()
    return {"weight_shape": (*weight.shape[:-1], 8 * weight.shape[-1]), "weight_dtype": "int4"}


def _weight_quant_limit(call: Call) -> str | None:
    return contracts.weight_quant_matmul_limit(
        shape=call.x.shape,
        **_packed_weight(call.weight),
        dtype=name_of(call.x),
        scale_dtype=name_of(call.antiquant_scale),
        group=call.antiquant_group_size,
    )


def _quantised_groups_limit(call: Call) -> str | None:
    """Of grouped products with int8 on both sides, or with int8 or int4 on one."""
    x, weight = call.x[0], call.weight[0]
    if name_of(x) == "int8":
        return contracts.quant_grouped_matmul_limit(
            weight_shape=weight.shape,
            dtype=name_of(weight),
            scale_dtype=name_of(call.scale[0]),
            output_dtype=str(dtype_of(call.output_dtype)).removeprefix("torch."),
        )
    scale, offset = call.antiquant_scale[0], call.antiquant_offset[0]
    return contracts.antiquant_grouped_matmul_limit(
        **_packed_weight(weight),
        dtype=name_of(x),
        scale_dtype=name_of(scale),
        group=weight.shape[1] // scale.shape[1] if scale.dim() == 3 else 0,
        symmetric=not offset.any(),
    )


def _grouped_matmul_limit(call: Call) -> str | None:
    if name_of(call.weight[0]) in ("int8", "int32"):
        return _quantised_groups_limit(call)
    return contracts.grouped_matmul_limit(
        shapes=[t.shape for t in call.x],
        weight_shapes=[t.shape for t in call.weight],
        dtype=name_of(call.x[0]),
        weight_dtype=name_of(call.weight[0]),
        groups=None if call.group_list is None else len(call.group_list),
        split_item=call.split_item,
        group_type=call.group_type,
        group_list_type=call.group_list_type,
        act_type=call.act_type,
    )


def _fusion_attention_limit(call: Call) -> str | None:
    return contracts.fusion_attention_limit(
        **_query_and_key(call),
        value_dim=call.value.shape[-1],
    )


LIMITS: dict[str, Callable[[Call], str | None]] = {
    "npu_rotary_mul": _rotary_mul_limit,
    "npu_mrope": _mrope_limit,
    "npu_interleave_rope": _interleave_rope_limit,
    "npu_apply_rotary_pos_emb": _apply_rotary_pos_emb_limit,
    "npu_rms_norm": _rms_norm_limit,
    "npu_add_rms_norm": _add_rms_norm_limit,
    "npu_swiglu": _swiglu_limit,
    "npu_geglu": _geglu_limit,
    "npu_dynamic_quant": _dynamic_quant_limit,
    "npu_linear": _linear_limit,
    "npu_scatter_pa_kv_cache": _scatter_limit,
    "npu_scatter_nd_update_": _scatter_nd_limit,
    "npu_transpose_batchmatmul": _batchmatmul_limit,
    "npu_fused_infer_attention_score": _attention_limit,
    "npu_fused_infer_attention_score_v2": lambda call: _attention_limit(Renamed(call)),
    "npu_sparse_lightning_indexer_grad_kl_loss": lambda call: _indexer_loss_limit(
        call, topk=call.sparse_indices.shape[-1]
    ),
    "npu_dense_lightning_indexer_grad_kl_loss": _indexer_loss_limit,
    "npu_fusion_attention": _fusion_attention_limit,
    "npu_fusion_attention_grad": _fusion_attention_limit,
    "npu_top_k_top_p": _top_k_top_p_limit,
    "npu_lightning_indexer": _lightning_indexer_limit,
    "npu_sparse_flash_attention": _sparse_attention_limit,
    "npu_sparse_flash_attention_grad": lambda call: _sparse_attention_limit(call, backward=True),
    "npu_moe_gating_top_k_softmax": _gating_softmax_limit,
    "npu_moe_gating_top_k": _gating_limit,
    "npu_moe_init_routing_v2": _init_routing_limit,
    "npu_moe_finalize_routing": _finalize_limit,
    "npu_grouped_matmul": _grouped_matmul_limit,
    "npu_quant_matmul": _quant_matmul_limit,
    "npu_weight_quant_batchmatmul": _weight_quant_limit,
}


def refusing(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which refuses what the vendor documents that the device refuses."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(a.dtype == torch.float64 for a in args if isinstance(a, Tensor)):
            raise AssertionError(f"{name} was given float64")
        if name in LIMITS and (limit := LIMITS[name](Call(name, *args, **kwargs))) is not None:
            raise AssertionError(f"{name} was called beyond its documented limits: {limit}")
        return kernel(*args, **kwargs)

    return run
