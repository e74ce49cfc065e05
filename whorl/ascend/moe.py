"""Permute the tokens of mixture-of-experts layers to their experts and back. Indices are int32, as on the device."""

import torch
from torch import Tensor

from whorl import contracts, ops

from .calling import Misfit, operator


@operator(
    contracts.moe_init_routing_limit,
    no_gradient="x",
    npu_only="x_dtype",
    choices={
        "quant_mode": {-1: "none", 0: "static", 1: "dynamic"},
        "drop_pad_mode": (0, 1),
        "expert_tokens_num_type": {0: "cumulative", 1: "counts", 2: "pairs"},
        "row_idx_type": (0, 1),
    },
    ids="expert_idx",
)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] = [],  # noqa: B006  the signature; never written
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copy each token once for each of its experts, sorted by expert.

    x: [T, H]; expert_idx: [T, K] int32. Returns
    - the copies [T * K, H], or the first active_num of them; with drop_pad_mode 1 [expert_num, expert_capacity, H],
      with zeros where an expert has fewer copies, and copies past its capacity dropped; in int8 with quant_mode 0
      (round(x * scale + offset)) and 1 (one scale per copy);
    - the row that copy i * K + j went to, -1 for none (row_idx_type 0), or the copy that each row holds (1; not in
      drop_pad_mode 1);
    - the copies of each expert of active_expert_range before any is dropped: cumulative (expert_tokens_num_type 0),
      counts (1) or (expert, count) pairs (2); drop_pad_mode 1 always returns counts;
    - the scale of each copy: with quant_mode 1 that of the quantisation, otherwise that of `scale` [T].
    Values that the device leaves undefined are 0 or -1; without expert_tokens_num_flag the third result is one 0.
    Raises RuntimeError when a gradient is needed (torch_npu drops it silently), and ValueError for shapes and modes
    that do not fit. Off the NPU x_dtype raises ValueError.

    Example: rows, places, counts, _ = npu_moe_init_routing_v2(
        x, ids, expert_num=64, expert_tokens_num_type=1, expert_tokens_num_flag=True)
    """
    if x.dim() != 2 or expert_idx.dim() != 2 or expert_idx.shape[0] != x.shape[0]:
        raise Misfit(f"x is {list(x.shape)}, expert_idx {list(expert_idx.shape)}, expected [T, H], [T, K]")
    if quant_mode == 0 and (scale is None or offset is None):
        raise Misfit("quant_mode 0 needs scale and offset, one number each")
    first, last = active_expert_range or (0, expert_num)
    if expert_num < 0 or first > last:
        raise Misfit(f"expert_num is {expert_num}, active_expert_range {active_expert_range}; expected some experts")
    flat = expert_idx.flatten().long()
    is_active = (flat >= first) & (flat < last)
    order = torch.where(is_active, flat, last).sort(stable=True).indices[: int(is_active.sum())]
    experts = flat[order] - first
    counts = torch.bincount(experts, minlength=last - first)
    if drop_pad_mode == 1:
        padded_rows = _padded_rows(experts, counts, expert_capacity)
        fits, size = padded_rows >= 0, expert_num * expert_capacity
        order, experts, at = order[fits], experts[fits], padded_rows[fits]
    else:
        size = flat.numel() if active_num <= 0 else min(active_num, flat.numel())
        at = torch.arange(order.numel(), device=x.device)
    places = torch.full((flat.numel(),), -1, dtype=torch.int32, device=x.device)
    if row_idx_type == 0 or drop_pad_mode == 1:
        places[order] = at.int()
    else:
        places[: order.numel()] = order.int()
    rows, scales = _copy_tokens(x, order[:size], experts[:size], expert_idx.shape[1], scale, offset, quant_mode)
    expanded = rows.new_zeros(size, x.shape[1]).index_copy_(0, at[:size], rows)
    all_scales = scales.new_zeros(size).index_copy_(0, at[:size], scales)
    if drop_pad_mode == 1:
        expanded, expert_tokens_num_type = expanded.unflatten(0, (expert_num, expert_capacity)), 1
    expert_counts = counts.new_zeros(())
    if expert_tokens_num_flag:
        expert_counts = _format_counts(counts, expert_tokens_num_type, first, expert_num)
    return expanded, places, expert_counts, all_scales


def _padded_rows(experts: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """Return the row of each copy in the flattened [experts, capacity]; -1 for a copy past its expert's capacity.

    experts: the expert of each copy, ascending; counts: the number of copies of each expert.
    """
    within = torch.arange(experts.numel(), device=experts.device) - (counts.cumsum(0) - counts)[experts]
    return torch.where(within < capacity, experts * capacity + within, -1)


def _copy_tokens(
    x: Tensor, order: Tensor, experts: Tensor, top_k: int, scale: Tensor | None, offset: Tensor | None, quant_mode: int
) -> tuple[Tensor, Tensor]:
    """Return the copies in the order of their experts, quantised by quant_mode, and a scale for each.

    order: the copies i * K + j to make, sorted by expert; experts: the expert of each; top_k: K.
    """
    source = order // top_k
    rows, no_scales = x[source], torch.zeros(order.numel(), device=x.device)
    if quant_mode == -1:
        return rows, no_scales if scale is None else scale[source]
    wide = rows.to(torch.promote_types(x.dtype, torch.float32))
    if quant_mode == 0 and scale is not None and offset is not None:
        return (wide * scale + offset).round().clamp(-128, 127).to(torch.int8), no_scales
    if scale is not None:  # [experts, H] or [1, H]
        wide = wide * (scale if scale.shape[0] == 1 else scale[experts])
    return ops.dynamic_quant(wide)


def _format_counts(counts: Tensor, kind: int, first: int, expert_num: int) -> Tensor:
    """Return counts as they are (kind 1), cumulative (0), or as (expert, count) pairs of experts with any (2).

    The pairs are [expert_num, 2], with zeros after the last.
    """
    if kind != 2:
        return counts if kind else counts.cumsum(0)
    used = counts.nonzero().flatten()
    pairs = torch.stack((used + first, counts[used]), -1)
    return torch.nn.functional.pad(pairs, (0, 0, 0, expert_num - len(used)))


@operator(
    contracts.moe_finalize_routing_limit,
    no_gradient="expanded_permuted_rows skip1 skip2 bias scales",
    choices={"drop_pad_mode": (0, 1, 2, 3)},
    index="expanded_src_to_dst_row",
    has_skips=lambda call: (call["skip1"] is not None, call["skip2"] is not None),
)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Return skip1 + skip2 + sum over j of scales[i, j] * (rows[index(i, j)] + bias[expert(i, j)]) for each token i.

    Computed in fp32 and rounded once. rows (expanded_permuted_rows): [T * K, H], or [E, capacity, H] in drop_pad_mode 1
    and 3; scales and export_for_source_row (the expert of each choice): [T, K]; the index (expanded_src_to_dst_row) is
    stored column by column in modes 0 and 1, row by row in 2 and 3, and -1 counts as a row of zeros. K is
    scales.shape[1], or k without scales. Raises RuntimeError when a gradient is needed (torch_npu drops it silently),
    ValueError for another mode or a bias without export_for_source_row.

    Example: y = npu_moe_finalize_routing(rows, None, None, None, weights, places, None, drop_pad_mode=2)
    """
    rows, index = expanded_permuted_rows, expanded_src_to_dst_row
    top_k = scales.shape[1] if scales is not None else k or 1
    index = index.view(top_k, -1).t() if drop_pad_mode in (0, 1) else index.view(-1, top_k)  # [T, K]
    wide = torch.promote_types(rows.dtype, torch.float32)
    flat = rows.reshape(-1, rows.shape[-1]).to(wide)
    parts = flat[index.long().clamp_min(0)].masked_fill((index < 0).unsqueeze(-1), 0)
    if bias is not None:
        if export_for_source_row is None:
            raise Misfit("bias needs export_for_source_row, the expert of each choice")
        parts = parts + bias.to(wide)[export_for_source_row.long()]
    if scales is not None:
        parts = parts * scales.to(wide).unsqueeze(-1)
    y = torch.zeros(index.shape[0], flat.shape[1], dtype=wide, device=rows.device)
    for summand in (skip1, skip2, *parts.unbind(1)):
        y = y if summand is None else y + summand.to(wide)
    return y.to(rows.dtype)


@operator(
    contracts.moe_token_permute_limit,
    npu_only="padded_mode",
    top_k=lambda call: 1 if call["indices"].dim() == 1 else call["indices"].shape[1],
)
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy each token once for each of its experts, sorted by expert: permuted[sorted[i * K + j]] = tokens[i].

    tokens: [T, H]; indices: [T, K] or [T], the experts. num_out_tokens: how many rows to return (None or 0: all; below
    0: all but that many). Returns permuted [rows, H], differentiable, and sorted [T * K] int32. Raises ValueError for
    shapes that do not fit. Off the NPU padded_mode raises ValueError.

    Example: permuted, places = npu_moe_token_permute(tokens, ids)
    """
    top_k = 1 if indices.dim() == 1 else indices.shape[1]
    if tokens.dim() != 2 or indices.dim() not in (1, 2) or indices.shape[0] != tokens.shape[0]:
        raise Misfit(f"tokens is {list(tokens.shape)}, indices {list(indices.shape)}, expected [T, H] and [T, K]")
    order = indices.flatten().sort(stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    limit = num_out_tokens or 0
    rows = min(limit, order.numel()) if limit > 0 else order.numel() + limit
    return tokens[order[:rows] // top_k], places.int()


@operator(
    contracts.moe_token_permute_limit,
    npu_only="padded_mode restore_shape",
    top_k=lambda call: 1 if call["probs"] is None else call["probs"].shape[1],
)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """Return y[i] = sum over j of probs[i, j] * permuted_tokens[sorted_indices[i * K + j]], in fp32, rounded once.

    permuted_tokens: [rows, H]; sorted_indices: [T * K]; probs: [T, K]; without probs K is 1 and nothing is summed. An
    index past the rows belongs to a dropped token and counts as zeros. Returns [T, H] in permuted_tokens' dtype,
    differentiable in permuted_tokens and probs. Off the NPU padded_mode and restore_shape raise ValueError.

    Example: y = npu_moe_token_unpermute(permuted, places, probs=weights)
    """
    wide = permuted_tokens.to(torch.promote_types(permuted_tokens.dtype, torch.float32))
    index = sorted_indices.long().view(-1, 1 if probs is None else probs.shape[1])
    is_dropped = index >= wide.shape[0]
    parts = wide[index.masked_fill(is_dropped, 0)].masked_fill(is_dropped.unsqueeze(-1), 0)
    if probs is not None:
        parts = parts * probs.to(wide.dtype).unsqueeze(-1)
    return parts.sum(1).to(permuted_tokens.dtype)
