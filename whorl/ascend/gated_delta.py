"""The operators of gated delta layers. Off the NPU both forms of the rule are computed token by token, in fp32."""

import itertools

import torch
from torch import Tensor

from whorl import contracts

from .calling import Misfit, operator


@operator(
    contracts.chunk_gated_delta_rule_limit,
    no_gradient="query key value beta initial_state g",
    state_dtype="initial_state_dtype",
)
def npu_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [T, NV, DV] of the gated delta rule for a prompt, and the states after it, [B, NV, DV, DK].

    query, key: [T, NK, DK], normalised; value: [T, NV, DV]; beta, g: [T, NV]; initial_state: [B, NV, DV, DK];
    actual_seq_lengths: tokens of each sequence, [B]. scale: of the queries, 1 by default.

    Example: out, state = npu_chunk_gated_delta_rule(
        q, k, v, beta=beta, initial_state=state, actual_seq_lengths=lengths, scale=128**-0.5, g=g
    )
    """
    lengths = _lengths(actual_seq_lengths, len(query))
    shape = (len(lengths), value.shape[1], value.shape[2], query.shape[2])
    states = value.new_zeros(shape) if initial_state is None else initial_state.clone()
    if states.shape != shape:
        raise Misfit(f"initial_state is {list(states.shape)}, expected {list(shape)}")
    out = torch.empty_like(value)
    for b, (first, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        state = states[b].float()
        for t in range(first, end):
            out[t], state = _step(query, key, value, beta, 1.0 if scale is None else scale, g, None, t, state)
        states[b] = state.to(states.dtype)
    return out, states


@operator(
    contracts.recurrent_gated_delta_rule_limit,
    no_gradient="query key value state beta g gk",
    num_states=lambda call: len(call["state"]),
    longest=lambda call: max(_lengths(call["actual_seq_lengths"], len(call["query"]))),
)
def npu_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """Return out [T, NV, DV] of the gated delta rule for a few tokens of each sequence; `state` is written.

    The state after token t is stored at state[ssm_state_indices[t]], state being [blocks, NV, DV, DK]. A sequence
    begins with that of its token num_accepted_tokens - 1, by default its first: the last one accepted of the call
    before, which stored them in the same places. gk: a decay of each key channel, [T, NV, DK]. The other arguments are
    those of `npu_chunk_gated_delta_rule`; scale is required.

    Example: out = npu_recurrent_gated_delta_rule(
        q, k, v, state, beta=beta, scale=128**-0.5, actual_seq_lengths=lengths, ssm_state_indices=blocks, g=g
    )
    """
    if scale is None or ssm_state_indices is None:
        raise Misfit(f"{'scale' if scale is None else 'ssm_state_indices'} is None, expected a value: it is required")
    lengths, blocks = _lengths(actual_seq_lengths, len(query)), ssm_state_indices.tolist()
    accepted = [1] * len(lengths) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    out = torch.empty_like(value)
    starts = [0, *itertools.accumulate(lengths)]
    for (first, end), count in zip(itertools.pairwise(starts), accepted, strict=True):
        current = state[blocks[first + count - 1]].float()
        for t in range(first, end):
            out[t], current = _step(query, key, value, beta, scale, g, gk, t, current)
            state[blocks[t]] = current.to(state.dtype)
    return out


@operator(
    contracts.fused_causal_conv1d_limit,
    no_gradient="x weight conv_states",
    npu_only="block_idx_first_scheduled_token block_idx_last_scheduled_token initial_state_idx conv_mode",
)
def npu_fused_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    conv_states: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    initial_state_mode: Tensor | None = None,
    bias: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    activation: str | None = "None",
    pad_slot_id: int | None = -1,
    run_mode: int | None = 0,
    residual_connection: int | None = 0,
    max_query_len: int | None = -1,
    num_computed_tokens: Tensor | None = None,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    block_size: int | None = 128,
    conv_mode: str | None = "default",
) -> Tensor:
    """Return the causal convolution of x over its tokens, each channel by itself; `conv_states` is written.

    x: [T, dim] with query_start_loc [B + 1], or [B, n, dim]; weight: [K, dim]; conv_states: [blocks, C, dim], of
    sequence b at cache_indices[b], by default at b: its last inputs, of which the last K - 1 come before x. With
    num_accepted_tokens they are the K - 1 that begin at num_accepted_tokens[b] - 1. Where num_computed_tokens is 0,
    zeros come before x. residual_connection 1 adds x. Sequences at pad_slot_id are skipped. bias, activation,
    initial_state_mode and run_mode have no effect, as the vendor documents.

    Example: y = npu_fused_causal_conv1d(x, weight, conv_states, query_start_loc=starts, cache_indices=blocks)
    """
    tokens, starts = x.flatten(0, -2), _starts(x, query_start_loc)
    y = torch.zeros_like(tokens)
    for b, (first, end) in enumerate(itertools.pairwise(starts)):
        block = b if cache_indices is None else int(cache_indices[b])
        if block == pad_slot_id or end == first:
            continue
        cache, width = conv_states[block], len(weight)
        offset = len(cache) - (width - 1) if num_accepted_tokens is None else int(num_accepted_tokens[b]) - 1
        before = cache[: offset + width - 1]
        if num_computed_tokens is not None and not num_computed_tokens[b]:
            offset, before = 0, torch.zeros_like(cache[: width - 1])
        inputs = torch.cat((before, tokens[first:end]))
        wide, count = inputs[offset:].float(), end - first
        total = torch.stack([weight[j].float() * wide[j : j + count] for j in range(width)]).sum(0)
        y[first:end] = (total + tokens[first:end].float() if residual_connection else total).to(x.dtype)
        kept = min(len(cache), len(inputs))
        cache[len(cache) - kept :] = inputs[len(inputs) - kept :]
    return y.view(x.shape)


def _lengths(lengths: Tensor | None, num_tokens: int) -> list[int]:
    """Return the tokens of each sequence; without lengths all are of one."""
    counts = [num_tokens] if lengths is None else [int(n) for n in lengths]
    if sum(counts) != num_tokens or min(counts, default=1) < 0:
        raise Misfit(f"actual_seq_lengths are {counts}, expected numbers of tokens that sum to {num_tokens}")
    return counts


def _starts(x: Tensor, query_start_loc: Tensor | None) -> list[int]:
    if query_start_loc is not None:
        return [int(n) for n in query_start_loc]
    if x.dim() == 2:
        raise Misfit("query_start_loc is None, expected where each sequence of x [T, dim] begins")
    return list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1]))


def _step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor | None,
    scale: float,
    g: Tensor | None,
    gk: Tensor | None,
    t: int,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output of token t in value's dtype, and the state after it. state: [NV, DV, DK] fp32."""
    group = value.shape[1] // query.shape[1]
    q, k = (x[t].float().repeat_interleave(group, 0)[:, None] for x in (query, key))
    if g is not None:
        state = state * g[t].float().exp()[:, None, None]
    if gk is not None:
        state = state * gk[t].float().exp()[:, None]
    error = value[t].float() - (state * k).sum(-1)
    if beta is not None:
        error = error * beta[t].float()[:, None]
    state = state + error[:, :, None] * k
    return ((state * q).sum(-1) * scale).to(value.dtype), state
