"""Contracts and limits of DeepSeek sparse attention: the indexer, the attention, and the indexer's loss.

The document that a docstring names by its date is the vendor's page of the operator.
"""

from typing import Final

from .contract import Contract, Shape
from .shared import HALF, dtype_limit

SPARSE: Final[tuple[Contract, ...]] = (
    Contract(
        "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', str "
        "layout_key='BSND', int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, int "
        "next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)",
        gradient="yes",
        note="Indices count the keys of each sequence; their order and the rule for ties are not documented. The "
        "gradient is that of the values, which return_value=True returns.",
    ),
    Contract(
        "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float "
        "scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? "
        "actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str "
        "layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, int pre_tokens=9223372036854775807, int "
        "next_tokens=9223372036854775807, int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> "
        "(Tensor, Tensor, Tensor)",
        added={"2.13": "sinks"},
        gradient="yes",
        note="Training needs return_softmax_lse=True, which a paged KV cache (PA_BSND) does not support. Indices "
        "count the keys of each sequence, -1 after the last; with sparse_block_size above 1 they count groups of that "
        "many keys.",
    ),
    Contract(
        "npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, Tensor "
        "d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size, Tensor? "
        "query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, str? "
        "layout='BSND', int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? "
        "next_tokens=9223372036854775807, int? attention_mode=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        note="Deterministic only under torch.use_deterministic_algorithms.",
    ),
    Contract(
        "npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, Tensor key_index, "
        "Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, float scale_value, *, Tensor? "
        "query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? "
        "layout='BSND', int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? "
        "next_tokens=9223372036854775807, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)",
        added={"2.13": "sinks"},
        note="Returns the loss and its gradients in one call. The loss is the sum over queries of KL(p || softmax of "
        "the index scores), where p is the attention, summed over heads and normalised. sparse_mode 3 only.",
    ),
    Contract(
        "npu_dense_lightning_indexer_softmax_lse(Tensor query_index, Tensor key_index, Tensor weights, *, SymInt[]? "
        "actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout='BSND', int? sparse_mode=3, int? "
        "pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor)",
        since="2.10",
    ),
    Contract(
        "npu_dense_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, Tensor key_index, "
        "Tensor weights, Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, Tensor softmax_sum_index, "
        "float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, "
        "SymInt[]? actual_seq_klen=None, str? layout='BSND', int? sparse_mode=3, int? pre_tokens=9223372036854775807, "
        "int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor, Tensor)",
        since="2.10",
        note="As npu_sparse_lightning_indexer_grad_kl_loss, over every visible key.",
    ),
)


def _page_limit(block_size: int, contiguous: bool) -> str | None:
    """Return the limit of a paged KV cache (PA_BSND) that a call breaks, or None; block_size 0 means no paging.

    Only newer devices support blocks that are not contiguous.
    """
    if block_size > 1024 or block_size % 16:
        return f"block size must be a multiple of 16 up to 1024, got {block_size}"
    return None if contiguous else "the blocks of the KV cache must be contiguous"


def lightning_indexer_limit(
    *,
    query_shape: Shape,
    key_shape: Shape,
    dtype: str,
    sparse_count: int,
    sparse_mode: int,
    block_size: int = 0,
    contiguous: bool = True,
) -> str | None:
    """Return the limit of npu_lightning_indexer that a call breaks, or None.

    Shapes end in [N, D]; block_size: 0 without a paged KV cache. Document of 2026-08-10.
    """
    if (reason := _page_limit(block_size, contiguous) or dtype_limit("query", dtype, HALF)) is not None:
        return reason
    heads, dim = query_shape[-2:]
    if heads > 64 or dim != 128 or tuple(key_shape[-2:]) != (1, 128):
        return (
            f"query must have at most 64 heads of 128 and key one head, got {tuple(query_shape)} and {tuple(key_shape)}"
        )
    if not (1 <= sparse_count <= 2048 or sparse_count in range(3072, 8193, 1024)):
        return f"sparse_count must be 1 to 2048, or a multiple of 1024 up to 8192, got {sparse_count}"
    return None if sparse_mode in (0, 3) else f"sparse_mode must be 0 or 3, got {sparse_mode}"


def sparse_flash_attention_limit(
    *,
    query_shape: Shape,
    rope_shape: Shape | None,
    dtype: str,
    attention_mode: int,
    topk: int,
    backward: bool = False,
    block_size: int = 0,
    sparse_block_size: int = 1,
    contiguous: bool = True,
) -> str | None:
    """Return the limit of npu_sparse_flash_attention, or of its gradient, that a call breaks, or None.

    Shapes end in [N, D]; block_size: 0 without a paged KV cache. Document of 2026-08-06, which does not cover the
    gradient: the limit of its topk is that of aclnnSparseFlashAttentionGrad (2026).
    """
    if (reason := _page_limit(block_size, contiguous) or dtype_limit("query", dtype, HALF)) is not None:
        return reason
    if sparse_block_size not in (1, 2, 4, 8, 16, 32, 64, 128) or block_size % sparse_block_size:
        return f"sparse_block_size must be a power of two up to 128 that divides {block_size}, got {sparse_block_size}"
    if not topk:
        return "sparse_indices must have at least a column"
    heads, dim = query_shape[-2:]
    if heads not in (1, 2, 4, 8, 16, 32, 64, 128):
        return f"the number of heads must be a power of two up to 128, got {heads}"
    if dim != 512 or rope_shape is None or rope_shape[-1] != 64:
        return f"query must have heads of 512 and a rotary part of 64, got {dim} and {rope_shape and rope_shape[-1]}"
    if attention_mode != 2:
        return f"attention_mode must be 2 (absorbed), got {attention_mode}"
    return f"topk must be a multiple of 1024, got {topk}" if backward and topk % 1024 else None


def indexer_kl_loss_limit(
    *,
    query_shape: Shape,
    key_shape: Shape,
    index_shape: Shape,
    dtype: str,
    layout: str,
    dense: bool = False,
    topk: int | None = None,
) -> str | None:
    """Return the limit of the indexer's losses, sparse or dense, that a call breaks, or None.

    Shapes end in [S, N, D], in TND in [T, N, D]. topk: the columns of sparse_indices where the caller chooses them.
    Documents of 2026-08-20 (sparse) and 2026-07-30 (dense, of up to 131072 queries).
    """
    if (reason := dtype_limit("query", dtype, HALF)) is not None:
        return reason
    if query_shape[-2] not in (32, 64, 128):
        return f"query must have 32, 64 or 128 heads, got {query_shape[-2]}"
    if index_shape[-2] not in (8, 16, 32, 64) or index_shape[-1] != 128:
        return f"query_index must have 8, 16, 32 or 64 heads of 128, got {tuple(index_shape)}"
    longest = 131072 if dense else 8192
    if layout == "BSND" and (query_shape[-3] > longest or key_shape[-3] > 131072):
        return (
            f"a sequence must have at most {longest} queries and 131072 keys, got {query_shape[-3]} and {key_shape[-3]}"
        )
    if dense and (query_shape[-1] != 128 or key_shape[-2] != query_shape[-2]):
        return (
            f"query and key must have the same number of heads of 128, got {tuple(query_shape)} and {tuple(key_shape)}"
        )
    if topk is not None and topk not in range(1024, 8193, 1024):
        return f"topk must be a multiple of 1024 up to 8192, got {topk}"
    return None
