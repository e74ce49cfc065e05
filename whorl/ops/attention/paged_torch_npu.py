"""Paged attention on Ascend by npu_fused_infer_attention_score, and writing of the paged cache.

The operator takes lengths as integers, so each call reads them back once. There are three kinds of mask: none for one
query per sequence; an explicit mask for a few queries, as verified drafts have; and for prompts the compressed causal
triangle, of which a window takes a band. torch_npu does not promise that a query's bits are independent of the other
sequences. AscendC's batch-invariant operator does: where it is installed, a call holds only sequences that would have
the same kind of mask and the same padding by themselves.

Quantised caches: the operator takes int8 codes with one query per sequence, that is decode. Prompts over codes run in
the reference, and `choose` gives the reason. fp8 has no operator.
"""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from whorl.contracts import (
    MASK_SIZE,
    antiquant_limit,
    dynamic_quant_limit,
    fused_infer_attention_limit,
    scatter_pa_kv_cache_limit,
)

from .. import _torch_npu
from .._check import check_lengths
from .._torch_npu import dtype_name

OPERATOR = "npu_fused_infer_attention_score"
WITH_SINKS = "npu_fused_infer_attention_score_v2"
_NAMES_WITH_SINKS = {
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
}
FEW_QUERIES = 16  # queries of a sequence up to which an explicit mask is small
PAGED_SCALES = 5  # antiquant mode: one scale for each token and head, in blocks as the codes are


def write_kv_reason(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, **_: object
) -> str | None:
    """Return None, or the reason that torch_npu cannot write this cache."""
    if k_scale is not None and k_cache.dtype != torch.int8:
        return f"npu_dynamic_quant writes int8 codes, got a cache of {dtype_name(k_cache)}"
    quant = None if k_scale is None else dynamic_quant_limit(shape=k.shape, dtype=dtype_name(k), format="int8")
    limit = quant or scatter_pa_kv_cache_limit(
        key_shape=k.shape,
        cache_shape=k_cache.shape,
        dtype=dtype_name(k if k_scale is None else k_cache),
        cache_dtype=dtype_name(k_cache),
        contiguous=k_cache.is_contiguous() and v_cache.is_contiguous(),
    )
    return limit or _torch_npu.missing("npu_scatter_pa_kv_cache", cache_mode="Norm")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **scale: Tensor | None) -> None:
    source, at, is_any = _torch_npu.replace_skipped(slots)
    rows = []
    for new, cache, scales in ((k, k_cache, scale["k_scale"]), (v, v_cache, scale["v_scale"])):
        if scales is not None:
            new, new_scales = _torch_npu.call("npu_dynamic_quant", input=new.contiguous(), dst_type=torch.int8)
            size = scales.shape[2]
            scales[at // size, :, at % size] = torch.where(is_any, new_scales[source], scales[:1, :, 0])
        rows.append(torch.where(is_any, new[source], cache.flatten(0, 1)[:1]).contiguous())
    _torch_npu.call(
        "npu_scatter_pa_kv_cache",
        key=rows[0],
        value=rows[1],
        key_cache=k_cache,
        value_cache=v_cache,
        slot_mapping=at,
        cache_mode="Norm",
    )


def _codes_reason(q: Tensor, k_cache: Tensor, block_tables: Tensor) -> str | None:
    return antiquant_limit(
        dtype=dtype_name(q),
        cache_dtype=dtype_name(k_cache),
        head_size=q.shape[2],
        block_size=k_cache.shape[1],
        batch=block_tables.shape[0],
        queries=q.shape[0],
    )


def reason(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, **arguments: Any) -> str | None:
    """Return None, or the reason that the operator cannot take these. Lengths are on the device and are not read."""
    if not q.numel():
        return "empty tensors are not taken"
    if arguments["softcap"]:
        return f"{OPERATOR} has no softcap"
    if (reason := _sinks_reason(q, arguments["sinks"], arguments["k_scale"])) is not None:
        return reason
    if arguments["k_scale"] is not None and (limit := _codes_reason(q, k_cache, block_tables)) is not None:
        return limit
    return fused_infer_attention_limit(
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_size=q.shape[2],
        dtype=dtype_name(q),
        input_layout="BSND",
        batch=block_tables.shape[0],
        queries=q.shape[0],
        block_size=k_cache.shape[1],
        contiguous=k_cache.is_contiguous() and v_cache.is_contiguous(),
    )


def _sinks_reason(q: Tensor, sinks: Tensor | None, k_scale: Tensor | None) -> str | None:
    """Return None, or the reason that the operator with sinks cannot take these."""
    if sinks is None:
        return None
    if k_scale is not None:
        return f"{WITH_SINKS} over quantised keys is not used here"
    if q.dtype != torch.bfloat16:
        return f"{WITH_SINKS} takes sinks with bfloat16 only, got {dtype_name(q)}"
    return _torch_npu.missing(WITH_SINKS, learnable_sink=sinks)


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, **arguments: Any) -> Tensor:
    query_starts, context_lens = arguments["query_starts"], arguments["context_lens"]
    scale, window = arguments["scale"], arguments["window"]
    lengths = _torch_npu.on_host(torch.cat((query_starts, context_lens)))
    starts, contexts = lengths[: len(query_starts)], lengths[len(query_starts) :]
    check_lengths("paged_attention", starts, contexts, len(q), block_tables.shape[1] * k_cache.shape[1])
    counts = [end - start for start, end in itertools.pairwise(starts)]
    most = max(counts, default=0)
    if not most:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    if arguments["k_scale"] is not None and most > 1:
        raise ValueError(
            f"paged_attention: a sequence has {most} queries over quantised keys, expected one per sequence on an NPU"
        )
    if arguments["k_scale"] is None and arguments["sinks"] is None and _torch_npu.batch_invariant(OPERATOR):
        kinds = [_kind(*lengths, window, _takes_packed(q, 1)) for lengths in zip(counts, contexts, strict=True)]
        if len(set(kinds)) > 1:
            return _apart(q, (k_cache, v_cache), block_tables, arguments, counts, kinds)
    half = len(counts) // 2
    if half and sum(-(-length // k_cache.shape[1]) for length in contexts) > k_cache.shape[0]:
        # Sequences share prefixes, but the operator requires a cache of at least as many blocks as all sequences have
        # together: the batch is halved until it fits.
        middle = starts[half]
        first = arguments | {"query_starts": query_starts[: half + 1], "context_lens": context_lens[:half]}
        second = arguments | {"query_starts": query_starts[half:] - middle, "context_lens": context_lens[half:]}
        caches = (k_cache, v_cache)
        parts = ((q[:middle], block_tables[:half], first), (q[middle:], block_tables[half:], second))
        return torch.cat([attention(part, *caches, tables, **more) for part, tables, more in parts])
    keys = {"block_table": block_tables, "block_size": k_cache.shape[1], "actual_seq_lengths_kv": contexts}
    keys |= {"key": k_cache.flatten(2), "value": v_cache.flatten(2), "num_key_value_heads": k_cache.shape[2]}
    if arguments["k_scale"] is not None:
        keys |= {"key_antiquant_scale": arguments["k_scale"], "value_antiquant_scale": arguments["v_scale"]}
        keys |= {"key_antiquant_mode": PAGED_SCALES, "value_antiquant_mode": PAGED_SCALES}
    if most == 1 and not 0 < window < max(contexts):
        mask: dict[str, Any] = {"atten_mask": None, "sparse_mode": 0}
    elif most <= FEW_QUERIES:
        width = block_tables.shape[1] * k_cache.shape[1]
        mask = {"atten_mask": _explicit_mask(query_starts, context_lens, most, width, window), "sparse_mode": 0}
    else:
        mask = {"atten_mask": compressed_mask(q.device), "sparse_mode": 4 if window else 3}
        if window:
            mask |= {"pre_tokens": window - 1, "next_tokens": 0}
    keys["sinks"] = arguments["sinks"]
    if mask["sparse_mode"] and _takes_packed(q, len(counts)):
        out = _call(q[: starts[-1]].contiguous(), "TND", scale, actual_seq_lengths=starts[1:], **keys, **mask)
    else:
        padded, back = _pad(q, counts, most, query_starts)
        out = _call(padded, "BSND", scale, actual_seq_lengths=counts, **keys, **mask).flatten(0, 1)
        out = out if back is None else out[back]
    padding = q.shape[0] - starts[-1]
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out.contiguous()


def _kind(count: int, context: int, window: int, is_packed: bool) -> int:
    """Return a number that is equal for sequences whose mask and padding are the same: 0 for no queries.

    count: queries of the sequence; context: its keys; is_packed: whether prompts are packed, not padded.
    """
    if count == 1 and 0 < window < context:
        return -1  # decode with a mask
    return FEW_QUERIES + 1 if count > FEW_QUERIES and is_packed else count


def _apart(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    arguments: dict[str, Any],
    counts: list[int],
    kinds: list[int],
) -> Tensor:
    """Call `attention` for the sequences of each kind; return the results in the order of q."""
    queries = torch.diff(arguments["query_starts"])
    results = list(q[: sum(counts)].split(counts))
    for kind in sorted(set(kinds) - {0}):
        members = [i for i, other in enumerate(kinds) if other == kind]
        at = torch.tensor(members, device=q.device)
        starts = torch.nn.functional.pad(queries[at].cumsum(0), (1, 0)).to(queries.dtype)
        of_kind = arguments | {"query_starts": starts, "context_lens": arguments["context_lens"][at]}
        out = attention(torch.cat([results[i] for i in members]), *caches, block_tables[at], **of_kind)
        for i, part in zip(members, out.split([counts[i] for i in members]), strict=True):
            results[i] = part
    return torch.nn.functional.pad(torch.cat(results), (0, 0, 0, 0, 0, len(q) - sum(counts)))


def _call(query: Tensor, layout: str, scale: float, *, sinks: Any, **options: Any) -> Tensor:
    heads = query.shape[-2]
    unlimited = {"pre_tokens": 2**31 - 1, "next_tokens": 2**31 - 1}
    if sinks is not None:  # another operator, whose arguments have other names
        options = unlimited | {_NAMES_WITH_SINKS.get(name, name): value for name, value in options.items()}
        options |= {"learnable_sink": sinks.to(query.dtype), "num_query_heads": heads, "softmax_scale": scale}
        out, _ = _torch_npu.call(WITH_SINKS, query=query, input_layout=layout, return_softmax_lse=False, **options)
        return out
    options = unlimited | options | {"num_heads": heads, "scale": scale, "input_layout": layout, "inner_precise": 0}
    is_invariant = "key_antiquant_mode" not in options and _torch_npu.batch_invariant(OPERATOR)
    name = f"{OPERATOR}_batch_invariant" if is_invariant else OPERATOR
    out, _ = _torch_npu.call(name, query=query, softmax_lse_flag=False, **options)
    return out


def _takes_packed(q: Tensor, batch: int) -> bool:
    """Return whether the operator takes packed queries (layout TND); over a paged cache it needs a head size of 128."""
    return q.shape[2] == 128 and batch <= 4096


def _pad(q: Tensor, counts: list[int], most: int, query_starts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return queries padded to [B, most, HQ, D], and the row of each query in [B * most, HQ, D].

    The second is None where nothing was padded. counts: queries of each sequence; most: the largest of them.
    """
    if len(set(counts)) == 1 and q.shape[0] == most * len(counts):
        return q.unflatten(0, (len(counts), most)).contiguous(), None
    inside = torch.arange(most, device=q.device)
    rows = (query_starts[:-1, None] + inside).clamp_max(q.shape[0] - 1)
    places = torch.cat([b * most + inside[:count] for b, count in enumerate(counts)])
    return q[rows].contiguous(), places


def _explicit_mask(query_starts: Tensor, context_lens: Tensor, most: int, width: int, window: int) -> Tensor:
    """Return the mask [B, 1, most, width] bool: True where query i of sequence b does not attend to the key."""
    first = context_lens - (query_starts[1:] - query_starts[:-1])
    position = (first[:, None] + torch.arange(most, device=first.device))[:, None, :, None]
    key = torch.arange(width, device=first.device)
    hidden = key > position
    return hidden | (key <= position - window) if window else hidden


@functools.cache
def compressed_mask(device: torch.device) -> Tensor:
    """Return the upper triangle that torch_npu takes for a causal mask of any length, [MASK_SIZE, MASK_SIZE] bool."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
