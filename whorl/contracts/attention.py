"""Limits of attention in training and inference, of writing the KV cache, and of sampling.

The document that a docstring names by its date is the vendor's page of the operator.
"""

from .contract import Shape
from .shared import FLOATS, HALF, dims_limit, dtype_limit, empty_limit

PAGE_SIZES = (128, 256, 384, 512)  # block sizes of the KV cache where a sequence has more than one query
MASK_SIZE = 2048  # rows and columns of the atten_mask of sparse_mode 2, 3 and 4


def scatter_pa_kv_cache_limit(
    *, key_shape: Shape, cache_shape: Shape, dtype: str, cache_dtype: str, contiguous: bool = True
) -> str | None:
    """Return the limit of npu_scatter_pa_kv_cache with cache_mode 'Norm' that a call breaks, or None.

    The operator writes key [T, N, D] into a cache [blocks, block size, N, D]. Document of 2026-08-05.
    """
    if (reason := dtype_limit("key", dtype, (*FLOATS, "int8"))) is not None:
        return reason
    if cache_dtype != dtype:
        return f"key and cache must have the same dtype, got {dtype} and {cache_dtype}"
    if len(key_shape) != 3 or len(cache_shape) != 4 or tuple(cache_shape[2:]) != tuple(key_shape[1:]):
        return (
            f"key must be [T, N, D] and cache [blocks, block size, N, D], got {tuple(key_shape)} and "
            f"{tuple(cache_shape)}"
        )
    return empty_limit(key_shape) or (None if contiguous else "key, value and the caches must be contiguous")


def scatter_nd_update_limit(*, shape: Shape, index_shape: Shape, updates_shape: Shape, dtype: str) -> str | None:
    """Return the limit of npu_scatter_nd_update_ on rows that a call breaks, or None.

    The operator writes row i of updates [T, D] to row indices[i] of input [S, D]; indices are [T, 1]. Document of
    2026-07-01.
    """
    if (reason := dtype_limit("input", dtype, (*FLOATS, "bool", "int64", "int8"))) is not None:
        return reason
    if len(shape) != 2 or tuple(index_shape[1:]) != (1,) or tuple(updates_shape) != (index_shape[0], shape[1]):
        shapes = f"{tuple(shape)}, {tuple(index_shape)} and {tuple(updates_shape)}"
        return f"input, indices and updates do not fit: must be [S, D], [T, 1] and [T, D], got {shapes}"
    return empty_limit(shape, updates_shape)


def fused_infer_attention_limit(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    value_size: int | None = None,
    dtype: str,
    input_layout: str,
    batch: int,
    queries: int,
    block_size: int = 0,
    sparse_mode: int = 0,
    mask_shape: Shape | None = None,
    contiguous: bool = True,
) -> str | None:
    """Return the limit of npu_fused_infer_attention_score that a call breaks, or None.

    queries: those of the longest sequence; block_size: 0 without a paged KV cache; value_size: the head size of value,
    which may differ in TND only. Document of 2026-08-10.
    """
    value_size = head_size if value_size is None else value_size
    if (reason := dtype_limit("query", dtype, HALF)) is not None:
        return reason
    if not contiguous:
        return "query, key, value and atten_mask must be contiguous"
    if head_size > 512 or head_size % 16:
        return f"head size must be a multiple of 16 up to 512, got {head_size}"
    if num_heads > 256 or num_heads > 64 * num_kv_heads:
        return f"heads must be at most 256, and 64 for each key head, got {num_heads} and {num_kv_heads}"
    if block_size and num_kv_heads * head_size > 65535:
        return f"a paged KV cache needs key heads * head size below 65536, got {num_kv_heads} * {head_size}"
    if input_layout == "TND":
        sizes = _tnd_limit(batch, head_size, value_size, block_size, sparse_mode, mask_shape)
        return _mask_limit(queries, sparse_mode, mask_shape) or sizes
    if value_size != head_size:
        return f"{input_layout} needs values of the keys' head size {head_size}, got {value_size}"
    return _page_limit(queries, block_size) or _mask_limit(queries, sparse_mode, mask_shape)


def antiquant_limit(
    *, dtype: str, cache_dtype: str, head_size: int, block_size: int, batch: int, queries: int
) -> str | None:
    """Return the limit of npu_fused_infer_attention_score over a quantised paged KV cache that a call breaks, or None.

    The cache has one scale per token and head, which is paged too (key_antiquant_mode and value_antiquant_mode 5). The
    limits of fused_infer_attention_limit hold as well. queries: those of all sequences. Document of 2026-08-10: with
    more than one query per sequence the operator supports only a scale per channel or token, without paging.
    """
    if cache_dtype != "int8":
        return f"a KV cache with a scale per token and head must be int8, got {cache_dtype}"
    if (reason := dtype_limit("query", dtype, ("bfloat16",))) is not None:
        return reason
    if queries != batch:
        return f"a scale per token and head needs one query per sequence, got {queries} queries of {batch} sequences"
    if head_size % 32 or block_size % 32:
        return f"head size and block size must be multiples of 32 for int8, got {head_size} and {block_size}"
    return None


def fusion_attention_limit(*, query_shape: Shape, key_shape: Shape, value_dim: int, dtype: str) -> str | None:
    """Return the limit of npu_fusion_attention and its gradient that a call breaks, or None.

    Shapes end in [S, N, D]. Document of 2026-07-31.
    """
    if (reason := dtype_limit("query", dtype)) is not None:
        return reason
    heads, dim = query_shape[-2:]
    if heads > 256 or heads % key_shape[-2]:
        return f"heads must be at most 256 and a multiple of the key heads, got {heads} and {key_shape[-2]}"
    if dim > 768 or value_dim > dim:
        return f"head size must be at most 768, and that of values no larger, got {dim} and {value_dim}"
    if max(query_shape[-3], key_shape[-3]) > 2**20:
        return f"a sequence must have at most {2**20} tokens, got {query_shape[-3]} and {key_shape[-3]}"
    return None


def _page_limit(queries: int, block_size: int) -> str | None:
    """Return the limit of a paged KV cache, in all layouts but TND, that a call breaks, or None."""
    if queries > 1 and block_size and block_size not in PAGE_SIZES:
        return f"block size must be one of {PAGE_SIZES} with more than one query, got {block_size}"
    if block_size > 512 or block_size % 16:
        return f"block size must be a multiple of 16 up to 512, got {block_size}"
    return None


def _mask_limit(queries: int, sparse_mode: int, mask_shape: Shape | None) -> str | None:
    if sparse_mode not in range(5):
        return f"sparse_mode must be 0 to 4, got {sparse_mode}"
    if queries > 1 and sparse_mode and mask_shape is None:
        return f"sparse_mode {sparse_mode} needs an atten_mask"
    if queries > 1 and sparse_mode > 1 and mask_shape is not None and tuple(mask_shape[-2:]) != (MASK_SIZE,) * 2:
        return f"sparse_mode {sparse_mode} needs a {MASK_SIZE} x {MASK_SIZE} atten_mask, got {tuple(mask_shape)}"
    return None


def _tnd_limit(
    batch: int, head_size: int, value_size: int, block_size: int, sparse_mode: int, mask_shape: Shape | None
) -> str | None:
    if (head_size, value_size) not in ((128, 128), (192, 192), (192, 128)):
        return f"TND supports heads of 128, or of 192 with values of 128 or 192, got {head_size} and {value_size}"
    if block_size > 1024 or block_size % 16:
        return f"block size must be a multiple of 16 up to 1024 in TND, got {block_size}"
    if batch > 4096:
        return f"TND supports at most 4096 sequences, got {batch}"
    if (sparse_mode, mask_shape is None) not in ((0, True), (3, False), (4, False)):
        return f"TND supports sparse_mode 0 without a mask, or 3 or 4 with one, got {sparse_mode}"
    return None


def top_k_top_p_limit(*, shape: Shape, dtype: str, top_k: int | None = None) -> str | None:
    """Return the limit of npu_top_k_top_p that a call breaks, or None; top_k: the largest k. Document of 2026-07-09."""
    if (reason := dtype_limit("logits", dtype) or dims_limit("logits", (2,), shape)) is not None:
        return reason
    if top_k is not None and not 1 <= top_k <= min(1024, shape[1]):
        return f"k must be 1 to {min(1024, shape[1])}, got {top_k}"
    return empty_limit(shape)
