"""The vendor's formulas of the mixture-of-experts operators in plain torch, row by row. See kernels.py."""

import torch
from npu.bound import Call, by_schema, dtype_of
from npu.kernels import antiquant_weight
from torch import Tensor


def gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.float().reshape(-1, x.shape[-1])
    exp = torch.exp(rows - rows.max(-1, keepdim=True).values)
    scores = exp / exp.sum(-1, keepdim=True)
    ids = torch.argsort(-scores, dim=-1, stable=True)[:, :k]
    y = torch.take_along_dim(scores, ids, -1)
    if finished is not None:
        ids = ids.masked_fill(finished.reshape(-1, 1), x.shape[-1])
    row_idx = torch.arange(rows.shape[0] * k).reshape(k, rows.shape[0]).t()
    shape = (*x.shape[:-1], k)
    return y.to(x.dtype).reshape(shape), ids.int().reshape(shape), row_idx.int().reshape(shape)


@by_schema("npu_moe_gating_top_k")
def gating_top_k(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x, k, bias, eps = call.x, call.k, call.bias, call.eps
    assert call.renorm == 0
    scores = torch.sigmoid(x.float()) if call.norm_type else torch.softmax(x.float(), -1)
    y, chosen = torch.empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int32)
    for i, row in enumerate(scores):
        choice = row if bias is None else row + bias.float()
        groups = choice.view(call.group_count, -1)
        best = groups.sort(-1, descending=True).values[:, : 2 if call.group_select_mode else 1].sum(-1)
        kept = torch.argsort(-best, stable=True)[: call.k_group]
        allowed = torch.full_like(groups, -torch.inf)
        allowed[kept] = groups[kept]
        ids = torch.argsort(-allowed.flatten(), stable=True)[:k]
        weights = row[ids]
        if call.norm_type:
            weights = weights / (weights.sum() + eps)
        y[i], chosen[i] = weights * call.routed_scaling_factor, ids.int()
    return y.to(x.dtype), chosen, scores if call.out_flag else torch.full_like(scores, torch.nan)


@by_schema("npu_moe_init_routing_v2")
def init_routing_v2(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert call.x_dtype is None
    x, scale, offset, quant_mode = call.x, call.scale, call.offset, call.quant_mode
    expert_num, expert_capacity, active_num = call.expert_num, call.expert_capacity, call.active_num
    row_idx_type, expert_tokens_num_type = call.row_idx_type, call.expert_tokens_num_type
    first, last = call.active_expert_range or [0, expert_num]
    flat, slots = call.expert_idx.flatten().tolist(), call.expert_idx.shape[1]
    copies = sorted((n for n, e in enumerate(flat) if first <= e < last), key=lambda n: flat[n])
    counts = [sum(flat[n] == e for n in copies) for e in range(first, last)]
    if call.drop_pad_mode == 1:
        assert (first, last) == (0, expert_num)
        row_idx_type, expert_tokens_num_type = 0, 1
        places, size, filled = [], expert_num * expert_capacity, [0] * expert_num
        for n in copies:
            kept = filled[flat[n]] < expert_capacity
            places.append(flat[n] * expert_capacity + filled[flat[n]] if kept else -1)
            filled[flat[n]] += kept
    else:
        places, size = list(range(len(copies))), len(flat) if active_num <= 0 else min(active_num, len(flat))
    expanded = torch.zeros(size, x.shape[1], dtype=x.dtype if quant_mode == -1 else torch.int8)
    scales, where = torch.zeros(size), torch.full((len(flat),), -1, dtype=torch.int32)
    for number, (n, place) in enumerate(zip(copies, places, strict=True)):
        where[n if row_idx_type == 0 else number] = place if row_idx_type == 0 else n
        if not 0 <= place < size:
            continue
        row = x[n // slots]
        if quant_mode == 1:
            smooth = 1.0 if scale is None else scale[0 if scale.shape[0] == 1 else flat[n] - first]
            wide = row.float() * smooth
            scales[place] = wide.abs().max() / 127
            expanded[place] = (wide / scales[place]).round().to(torch.int8)
        elif quant_mode == 0:
            assert scale is not None
            assert offset is not None
            expanded[place] = (row.float() * scale + offset).round().clamp(-128, 127).to(torch.int8)
        else:
            expanded[place] = row
            scales[place] = 0 if scale is None else scale[n // slots]
    expanded = expanded.view(expert_num, expert_capacity, -1) if call.drop_pad_mode == 1 else expanded
    expert_tokens = torch.tensor(counts)
    if expert_tokens_num_type == 2:
        pairs = [(e, c) for e, c in zip(range(first, last), counts, strict=True) if c]
        expert_tokens = torch.tensor(pairs + [(0, 0)] * (expert_num - len(pairs)))
    elif expert_tokens_num_type == 0:
        expert_tokens = expert_tokens.cumsum(0)
    return expanded, where, expert_tokens if call.expert_tokens_num_flag else torch.zeros((), dtype=torch.int64), scales


@by_schema("npu_moe_finalize_routing")
def finalize_routing(call: Call) -> Tensor:
    permuted, bias, scales, index = call.expanded_permuted_rows, call.bias, call.scales, call.expanded_src_to_dst_row
    rows, experts = permuted.float().reshape(-1, permuted.shape[-1]), call.export_for_source_row
    slots = scales.shape[1] if scales is not None else call.k or 1
    count = index.numel() // slots
    out = torch.zeros(count, rows.shape[1])
    for i in range(count):
        for skip in (call.skip1, call.skip2):
            out[i] += 0 if skip is None else skip[i].float()
        for j in range(slots):
            at = int(index[i + j * count if call.drop_pad_mode in (0, 1) else i * slots + j])
            row = rows[at] if at >= 0 else torch.zeros(rows.shape[1])
            if bias is not None:
                row = row + bias[experts[i, j].long()].float()
            out[i] += row * (1.0 if scales is None else float(scales[i, j]))
    return out.to(permuted.dtype)


@by_schema("npu_grouped_matmul")
def grouped_matmul(call: Call) -> list[Tensor]:
    x, weight, bias, group_list = call.x, call.weight, call.bias, call.group_list
    is_split = call.split_item in (0, 1)
    assert call.act_type == 0
    dtype = x[0].dtype if call.output_dtype is None else dtype_of(call.output_dtype)
    ends: list[int] = []
    if group_list is not None:
        ends = (group_list.cumsum(0) if call.group_list_type == 1 else group_list).tolist()
    starts = [0, *ends[:-1]]
    if call.group_type == 2:  # x: [M, rows], weight: [rows, N]
        parts = [x[0][:, a:b].double() @ weight[0][a:b].double() for a, b in zip(starts, ends, strict=True)]
        return [torch.stack(parts).to(dtype)]
    weights = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    if len(x) > 1 or call.group_type == -1:
        rows = x
    else:
        assert ends[-1] == x[0].shape[0], (ends, x[0].shape)
        rows = [x[0][a:b] for a, b in zip(starts, ends, strict=True)]
    results, first = [], 0
    if call.antiquant_scale is not None:
        weights = [antiquant_weight(w).double() for w in weights]

        def wide(x: Tensor) -> list[Tensor]:
            """Of [E, N] or [E, groups, N]: for each expert [K, N]."""
            groups = x if x.dim() == 3 else x.unsqueeze(1)
            return list(groups.double().repeat_interleave(weights[0].shape[0] // groups.shape[1], 1))

        shifted = [w + o for w, o in zip(weights, wide(call.antiquant_offset[0]), strict=True)]
        weights = [w * s for w, s in zip(shifted, wide(call.antiquant_scale[0]), strict=True)]
    for e, (left, right) in enumerate(zip(rows, weights, strict=True)):
        y = left.double() @ right.double()  # in which order it adds is not what is compared
        if call.scale is not None:
            tokens = call.per_token_scale[0][first : first + len(left)]
            y, first = y * call.scale[0][e].double() * tokens.double()[:, None], first + len(left)
        if bias is not None:
            y = y + (bias[e] if len(bias) == len(weights) else bias[0][e]).double()
        results.append(y.to(dtype))
    return results if is_split else [torch.cat(results)]


def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    flat = indices.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda n: flat[n])
    where = torch.empty(len(flat), dtype=torch.int32)
    for place, n in enumerate(order):
        where[n] = place
    slots = len(flat) // max(1, tokens.shape[0])
    limit = num_out_tokens or 0
    rows = min(limit, len(flat)) if limit > 0 else limit + len(flat)
    return torch.stack([tokens[n // slots] for n in order[:rows]]), where


@by_schema("npu_moe_token_unpermute")
def token_unpermute(call: Call) -> Tensor:
    rows, places, probs = call.permuted_tokens, call.sorted_indices, call.probs
    slots = 1 if probs is None else probs.shape[1]
    out = torch.zeros(places.numel() // slots, rows.shape[1])
    for n, place in enumerate(places.tolist()):
        if place < rows.shape[0]:
            weight = 1.0 if probs is None else float(probs.flatten()[n])
            out[n // slots] += rows[place].float() * weight
    return out.to(rows.dtype)


def token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    slots = sorted_indices.numel() // tokens.shape[0]
    total = torch.zeros(tokens.shape)
    for n, place in enumerate(sorted_indices.tolist()):
        total[n // slots] += grad_permuted_tokens[place].float()
    return total.to(tokens.dtype)


def token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    assert probs is not None
    grad_tokens, grad_probs = torch.zeros(permuted_tokens.shape), torch.zeros(probs.numel())
    for n, place in enumerate(sorted_indices.tolist()):
        grad = grad_unpermuted_tokens[n // probs.shape[1]].float()
        grad_tokens[place] = grad * float(probs.flatten()[n])
        grad_probs[n] = (grad * permuted_tokens[place].float()).sum()  # not a library's dot product, which may be worse
    return grad_tokens.to(permuted_tokens.dtype), grad_probs.to(probs.dtype).view(probs.shape)


KERNELS = {
    "npu_moe_gating_top_k_softmax": gating_top_k_softmax,
    "npu_moe_gating_top_k": gating_top_k,
    "npu_moe_init_routing_v2": init_routing_v2,
    "npu_moe_finalize_routing": finalize_routing,
    "npu_grouped_matmul": grouped_matmul,
    "npu_moe_token_permute": token_permute,
    "npu_moe_token_unpermute": token_unpermute,
    "npu_moe_token_permute_grad": token_permute_grad,
    "npu_moe_token_unpermute_grad": token_unpermute_grad,
}
