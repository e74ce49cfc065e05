"""DeepSeek sparse attention, sequence by sequence over `whorl.ops`."""

from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import dtype_name

from .calling import call_torch_npu, is_npu, needs_gradient, refuse, refuse_arguments, refuse_gradient
from .sequences import (
    FAR,
    check_absorbed,
    check_layout,
    check_mode,
    check_tokens,
    sequences,
)
from .sparse_autograd import Attention, attention_gradients


def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = FAR,
    next_tokens: int = FAR,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query to the keys in sparse_indices, with key also as value; and the softmax's max and sum.

    query [B, S, N, 512] and its rotary part, key [B, S, 1, 512] and its; or TND. Max and sum are fp32 [B, 1, S, N], in
    TND [1, T, N], or empty without return_softmax_lse. `value` must be key, or None. Differentiable in query, key,
    value and both rotary parts, with return_softmax_lse; the gradient is npu_sparse_flash_attention_grad's.
    """
    name, given = "npu_sparse_flash_attention", dict(locals())
    if is_npu(query):
        return call_torch_npu(name, **given)
    given_tensors = [x for x in (query, key, value, query_rope, key_rope) if x is not None]
    is_training = needs_gradient(*given_tensors)
    limit = contracts.sparse_flash_attention_limit(
        query_shape=query.shape,
        rope_shape=None if query_rope is None else query_rope.shape,
        dtype=dtype_name(query),
        attention_mode=attention_mode,
        topk=sparse_indices.shape[-1],
        backward=is_training,
    )
    refuse(name, limit)
    refuse_arguments(name, block_table=block_table, sinks=sinks)
    if is_training and not return_softmax_lse:
        raise RuntimeError(f"{name}: a gradient is needed, which takes return_softmax_lse=True; or use torch.no_grad()")
    check_layout(name, layout_query, layout_kv)
    check_tokens(name, pre_tokens, next_tokens)
    check_mode(name, sparse_mode)
    check_absorbed(name, key, value, sparse_block_size)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_kv)
    parts = list(sequences(name, layout_query, query, key, *lengths))
    more = (sparse_indices, scale_value, sparse_mode, return_softmax_lse, parts)
    return Attention.apply(query, key, value, query_rope, key_rope, *more)


def npu_sparse_flash_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    d_out: Tensor,
    out: Tensor,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    scale_value: float,
    sparse_block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None,
    layout: str | None = "BSND",
    sparse_mode: int | None = 3,
    pre_tokens: int | None = FAR,
    next_tokens: int | None = FAR,
    attention_mode: int | None = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, query_rope and key_rope; empty where there was none.

    Keys and values are one tensor in absorbed attention: its gradient is the sum of those of key and value.
    """
    name, given = "npu_sparse_flash_attention_grad", dict(locals())
    refuse_gradient(name, query, key, d_out)
    if is_npu(query):
        return call_torch_npu(name, **given)
    limit = contracts.sparse_flash_attention_limit(
        query_shape=query.shape,
        rope_shape=None if query_rope is None else query_rope.shape,
        dtype=dtype_name(query),
        attention_mode=attention_mode or 0,
        topk=sparse_indices.shape[-1],
        backward=True,
    )
    refuse(name, limit)
    layout = layout or "BSND"
    check_layout(name, layout, layout)
    check_mode(name, sparse_mode)
    check_absorbed(name, key, value, sparse_block_size)
    parts = list(sequences(name, layout, query, key, actual_seq_qlen, actual_seq_kvlen))
    inputs = (query, key, value, query_rope, key_rope)
    results = (out, softmax_max, softmax_sum)
    found = attention_gradients(inputs, sparse_indices, d_out, results, scale_value, sparse_mode, parts)
    return tuple(  # type: ignore[return-value]
        query.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(found, inputs, strict=True)
    )
