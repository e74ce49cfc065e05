"""Latent attention over a paged cache on Ascend: npu_sparse_flash_attention with block tables.

No value is read back to the host. Latents and rotary channels are two contiguous caches there. Without indices the
token gets a list of every run of keys up to its own, and the operator's causal mask cuts the last run.
"""

import torch
from torch import Tensor

from whorl.contracts import sparse_flash_attention_limit

from .. import _torch_npu
from .._torch_npu import dtype_name

LONGEST_RUN = 128  # most consecutive keys that one index may select
ALL, CAUSAL = 0, 3  # sparse_mode


def _run(block_size: int) -> int:
    """Return the keys per run: a power of two that divides a block."""
    return min(block_size & -block_size, LONGEST_RUN)


def reason(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    indices: Tensor | None,
    rotary_cache: Tensor | None,
    value_dim: int,
    **_: object,
) -> str | None:
    """Return None, or the reason that npu_sparse_flash_attention cannot take these arguments."""
    if cache.dtype == torch.uint8:
        return "takes no e4m3 codes: npu_kv_quant_sparse_flash_attention reads int8, and rows in another order"
    if rotary_cache is None:
        return "takes latents and rotary channels as two caches, got one; pass rotary_cache"
    if not all(x.numel() for x in (q, cache, block_tables)):
        return "empty tensors are not taken"
    return sparse_flash_attention_limit(
        query_shape=(*q.shape[:2], value_dim),
        rope_shape=(*q.shape[:2], q.shape[2] - value_dim),
        dtype=dtype_name(q),
        attention_mode=2,
        topk=1 if indices is None else indices.shape[1],
        block_size=cache.shape[1],
        sparse_block_size=_run(cache.shape[1]) if indices is None else 1,
        contiguous=cache.is_contiguous() and rotary_cache.is_contiguous(),
    )


def _every_run(positions: Tensor, num_keys: int, size: int) -> Tensor:
    """Return the runs that begin at or before each token's position, [T, runs], followed by -1."""
    runs = torch.arange(-(-num_keys // size), dtype=torch.int32, device=positions.device)
    return torch.where(runs * size <= positions[:, None], runs, -1)


def attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    indices: Tensor | None,
    rotary_cache: Tensor,
    scale: float,
    value_dim: int,
) -> Tensor:
    """Run attention; for tokens without keys, where torch_npu documents no result, fill in zeros."""
    positions = _torch_npu.positions(len(q), query_starts, context_lens)
    size, mode, selection = 1, ALL, indices
    if selection is None:
        size, mode = _run(cache.shape[1]), CAUSAL
        selection = _every_run(positions, block_tables.shape[1] * cache.shape[1], size)
    key = cache.unsqueeze(2)
    out, _, _ = _torch_npu.call(
        "npu_sparse_flash_attention",
        query=q[..., :value_dim].contiguous(),
        key=key,
        value=key,
        sparse_indices=selection.unsqueeze(1).contiguous(),
        scale_value=scale,
        block_table=block_tables.contiguous(),
        actual_seq_lengths_query=query_starts[1:].contiguous(),
        actual_seq_lengths_kv=context_lens.contiguous(),
        query_rope=q[..., value_dim:].contiguous(),
        key_rope=rotary_cache.unsqueeze(2),
        sparse_block_size=size,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=mode,
        attention_mode=2,
        return_softmax_lse=False,
    )
    is_empty = (selection[:, 0] < 0) | (positions < 0)
    return out.masked_fill(is_empty[:, None, None], 0)  # type: ignore[no-any-return]
