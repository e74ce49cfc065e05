"""The lightning indexer over a paged cache on Ascend: npu_lightning_indexer with block tables.

No value is read back to the host.
"""

import torch
from torch import Tensor

from whorl.contracts import lightning_indexer_limit

from .. import _torch_npu
from .._torch_npu import dtype_name

CAUSAL = 3  # sparse_mode: the last query is at the last key


def reason(q: Tensor, cache: Tensor, block_tables: Tensor, topk: int, **_: object) -> str | None:
    """Return None, or the reason that npu_lightning_indexer cannot take these arguments."""
    if cache.dtype == torch.uint8:
        return "takes no e4m3 codes: npu_quant_lightning_indexer reads int8"
    if not all(x.numel() for x in (q, cache, block_tables)):
        return "empty tensors are not taken"
    return lightning_indexer_limit(
        query_shape=q.shape,
        key_shape=(*cache.shape[:2], 1, cache.shape[2]),
        dtype=dtype_name(q),
        sparse_count=topk,
        sparse_mode=CAUSAL,
        block_size=cache.shape[1],
        contiguous=cache.is_contiguous(),
    )


def indexer(q: Tensor, weights: Tensor, cache: Tensor, block_tables: Tensor, topk: int, **lengths: Tensor) -> Tensor:
    """Run torch_npu's indexer with weights rounded to q's dtype, as every device takes them, and sort the result.

    torch_npu documents neither the order of the indices nor its rule for ties.
    """
    unsorted, _ = _torch_npu.call(
        "npu_lightning_indexer",
        query=q.contiguous(),
        key=cache.unsqueeze(2),
        weights=weights.to(q.dtype).contiguous(),
        actual_seq_lengths_query=lengths["query_starts"][1:].contiguous(),
        actual_seq_lengths_key=lengths["context_lens"].contiguous(),
        block_table=block_tables.contiguous(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=topk,
        sparse_mode=CAUSAL,
        return_value=False,
    )
    chosen, last = unsorted[:, 0], block_tables.shape[1] * cache.shape[1]
    is_none = (chosen < 0) | (_torch_npu.positions(len(q), **lengths) < 0)[:, None]
    chosen = torch.where(is_none, last, chosen).sort(-1).values
    return torch.where(chosen < last, chosen, -1).int()
