"""DeepSeek sparse attention, computed one sequence at a time by `whorl.ops`."""

from torch import Tensor

from whorl import contracts

from .calling import needs_gradient, operator
from .sequences import FAR, LAYOUTS, MODES, check_absorbed, check_layout, split_sequences
from .sparse_autograd import Attention, attention_gradients


@operator(
    contracts.sparse_flash_attention_limit,
    npu_only="block_table sinks pre_tokens next_tokens",
    choices={"sparse_mode": MODES},
    rope="query_rope",
    topk=lambda call: call["sparse_indices"].shape[-1],
    backward=lambda call: needs_gradient(*(call[x] for x in ("query", "key", "value", "query_rope", "key_rope"))),
)
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
    """Attend each query to the keys that sparse_indices lists; key is also the value (absorbed attention).

    query: [B, S, N, 512], query_rope: [B, S, N, 64], key: [B, S, 1, 512], key_rope: [B, S, 1, 64], or the same in TND;
    value: key itself or None; sparse_indices: int32 [..., 1, K], -1 after the last. Returns the result like query, and
    the softmax's max and sum in fp32 [B, 1, S, N] ([1, T, N] in TND), empty without return_softmax_lse. Differentiable
    in query, key, value and both rotary parts, by npu_sparse_flash_attention_grad. Raises RuntimeError when a gradient
    is needed without return_softmax_lse. Off the NPU block_table, sinks, other layouts and other modes are refused.

    Example: out, top, total = npu_sparse_flash_attention(
        q, k, k, indices, scale, query_rope=q_rope, key_rope=k_rope, attention_mode=2)
    """
    if not return_softmax_lse and needs_gradient(query, key, value, query_rope, key_rope):
        raise RuntimeError(
            "npu_sparse_flash_attention: a gradient needs return_softmax_lse=True; set it, or use torch.no_grad()"
        )
    check_layout(layout_query, layout_kv)
    check_absorbed(key, value, sparse_block_size)
    lengths = (actual_seq_lengths_query, actual_seq_lengths_kv)
    sequence_indices = list(split_sequences(layout_query, query, key, *lengths))
    options = (sparse_indices, scale_value, sparse_mode, return_softmax_lse, sequence_indices)
    return Attention.apply(query, key, value, query_rope, key_rope, *options)


@operator(
    contracts.sparse_flash_attention_limit,
    no_gradient="query key d_out",
    choices={"layout": LAYOUTS, "sparse_mode": MODES},
    rope="query_rope",
    topk=lambda call: call["sparse_indices"].shape[-1],
    backward=lambda call: True,
)
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
    """Return the gradients of query, key, value, query_rope and key_rope; an empty tensor for an input that is None.

    d_out: the gradient of `out`; out, softmax_max and softmax_sum: the forward's results. In absorbed attention keys
    and values are one tensor, whose gradient is the sum of the gradients of key and value. Raises RuntimeError when a
    gradient of this call is needed. Off the NPU other layouts and modes raise ValueError.
    """
    check_absorbed(key, value, sparse_block_size)
    sequence_indices = list(split_sequences(layout, query, key, actual_seq_qlen, actual_seq_kvlen))
    inputs = (query, key, value, query_rope, key_rope)
    results = (out, softmax_max, softmax_sum)
    gradients = attention_gradients(inputs, sparse_indices, d_out, results, scale_value, sparse_mode, sequence_indices)
    return tuple(  # type: ignore[return-value]
        query.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)
    )
