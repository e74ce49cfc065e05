"""Attention for inference, computed by the formula, one sequence at a time: a reference to compare with, not fast."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from whorl import contracts
from whorl.ops._torch_npu import dtype_name

from .calling import Misfit, enforce_limit, operator

_UNLIMITED = 2**31 - 1


@operator(
    no_gradient="query key value",
    npu_only="pse_shift dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale "
    "antiquant_offset key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset "
    "query_padding_size kv_padding_size key_shared_prefix value_shared_prefix actual_shared_prefix_len query_rope "
    "key_rope key_rope_antiquant_scale antiquant_mode key_antiquant_mode value_antiquant_mode",
    choices={"input_layout": ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"), "sparse_mode": range(5)},
)
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: list[int] | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _UNLIMITED,
    next_tokens: int = _UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * query @ key) @ value, computed in fp32 and rounded once, and the scores' log-sum-exp.

    query, key, value: in input_layout BSH, BSND, BNSD, BNSD_BSND or TND; value, and so the result, may have another
    head size. With block_table [B, blocks] the KV cache is paged, and key and value are [blocks, block_size, HK * D] or
    [blocks, HK, block_size, D]. atten_mask: True hides a key. sparse_mode 0: atten_mask, and the window from pre_tokens
    before to next_tokens after, aligned at the first query; 1: atten_mask only; 2, 3: causal, aligned at the first or
    at the last query; 4: the window of mode 0, aligned at the last query. Without atten_mask modes 0 and 1 hide no key.
    With one query only the atten_mask of modes 0 and 1 counts. Lengths are per sequence; in TND they are cumulative,
    except those of a paged KV cache. Returns the result in query's dtype and layout (BNSD_BSND: BSND), with zeros for a
    query that sees no key; and with softmax_lse_flag the log-sum-exp, fp32 [B, N, S, 1] or [T, N, 1] in TND (inf for
    the padding behind a sequence), else an empty tensor. Raises RuntimeError when a gradient is needed (torch_npu drops
    it silently). Off the NPU the arguments not named here are refused with ValueError.

    Example: out, _ = npu_fused_infer_attention_score(q, k, v, num_heads=8, input_layout="BSND", scale=128**-0.5)
    """
    arguments = locals()
    options = _Options(**{name: arguments[name] for name in _Options.__slots__})
    enforce_limit(_limit(query, key, value, options))
    return _compute(query, key, value, options, scale, softmax_lse_flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The arguments that decide which keys a query sees and how the tensors are ordered."""

    input_layout: str
    num_heads: int
    num_key_value_heads: int
    actual_seq_lengths: list[int] | None
    actual_seq_lengths_kv: list[int] | None
    atten_mask: Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    block_table: Tensor | None
    block_size: int

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads


def _limit(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> str | None:
    lengths = _query_lengths(query, options)
    return contracts.fused_infer_attention_limit(
        num_heads=options.num_heads,
        num_kv_heads=options.kv_heads,
        head_size=query.shape[-1] // (options.num_heads if options.input_layout == "BSH" else 1),
        value_size=_head_size(value, options),
        dtype=dtype_name(query),
        input_layout=options.input_layout,
        batch=len(lengths),
        queries=max(lengths, default=0),
        block_size=0 if options.block_table is None else options.block_size,
        sparse_mode=options.sparse_mode,
        mask_shape=None if options.atten_mask is None else options.atten_mask.shape,
        contiguous=all(t.is_contiguous() for t in (query, key, value, options.atten_mask) if t is not None),
    )


def _head_size(x: Tensor, options: _Options) -> int:
    """Return the head size of key or value; heads and channels are one dim in BSH, and in blocks of three dims."""
    is_joined = x.dim() == 3 and (options.input_layout == "BSH" or options.block_table is not None)
    return x.shape[-1] // options.kv_heads if is_joined else x.shape[-1]


def _query_lengths(query: Tensor, options: _Options) -> list[int]:
    """Return the number of queries of each sequence."""
    if options.input_layout == "TND":
        if options.actual_seq_lengths is None:
            raise Misfit("TND needs actual_seq_lengths, the cumulative number of queries")
        return [end - start for start, end in itertools.pairwise([0, *options.actual_seq_lengths])]
    longest = query.shape[2 if options.input_layout.startswith("BNSD") else 1]
    return _lengths_per_sequence(options.actual_seq_lengths if longest > 1 else None, query.shape[0], longest)


def _lengths_per_sequence(lengths: list[int] | None, batch: int, longest: int) -> list[int]:
    """Return one length per sequence: a single length counts for all sequences, None means `longest`."""
    if lengths is None:
        return [longest] * batch
    return lengths * batch if len(lengths) == 1 else lengths[:batch]


def _compute(
    query: Tensor, key: Tensor, value: Tensor, options: _Options, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    if options.num_heads % options.kv_heads:
        raise Misfit(f"num_heads is {options.num_heads}, expected a multiple of {options.kv_heads} key heads")
    q = _tokens_first(query, options.input_layout, options.num_heads)
    if _head_size(key, options) != q.shape[-1]:
        raise Misfit(f"query has heads of {q.shape[-1]}, key of {_head_size(key, options)}; expected the same size")
    out = torch.zeros(*q.shape[:-1], _head_size(value, options), dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:-1], torch.inf, device=q.device)
    is_packed, start = options.input_layout == "TND", 0
    for b, count in enumerate(_query_lengths(query, options)):
        at = (0, slice(start, start + count)) if is_packed else (b, slice(0, count))
        start += count
        k, v = (_sequence_keys(t, options, b) for t in (key, value))
        hidden = _hidden_keys(options, b, count, k.shape[0], is_single=not is_packed and q.shape[1] == 1).to(q.device)
        sequence_out, sequence_lse = _attend(q[at], k, v, hidden, scale)
        out[at], lse[at] = sequence_out.to(q.dtype), sequence_lse.float()
    if is_packed:
        return out[0], lse[0].unsqueeze(-1) if with_lse else lse.new_empty(0)
    if options.input_layout == "BNSD":
        out = out.transpose(1, 2).contiguous()
    out = out.flatten(2) if options.input_layout == "BSH" else out
    return out, lse.transpose(1, 2).unsqueeze(-1).contiguous() if with_lse else lse.new_empty(0)


def _tokens_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """Return x as [B, S, N, D]; TND becomes a batch of one."""
    if layout == "TND":
        return x.unsqueeze(0)
    if layout == "BSH":
        return x.unflatten(-1, (heads, -1))
    return x if layout == "BSND" else x.transpose(1, 2)


def _sequence_keys(x: Tensor, options: _Options, b: int) -> Tensor:
    """Return the keys or values of sequence b, [S, HK, D]."""
    lengths, table = options.actual_seq_lengths_kv, options.block_table
    if table is None:
        if options.input_layout == "TND":
            if lengths is None:
                raise Misfit("TND needs actual_seq_lengths_kv, the cumulative number of keys")
            return x[lengths[b - 1] if b else 0 : lengths[b]]
        tokens = _tokens_first(x, options.input_layout, options.kv_heads)
        return tokens[b, : _lengths_per_sequence(lengths, tokens.shape[0], tokens.shape[1])[b]]
    if lengths is None:
        raise Misfit("block_table needs actual_seq_lengths_kv, the number of keys of each sequence")
    blocks = x.transpose(1, 2) if x.dim() == 4 else x.unflatten(-1, (options.kv_heads, -1))
    if blocks.shape[1] != options.block_size:
        raise Misfit(f"block_size is {options.block_size}, key has blocks of {blocks.shape[1]}")
    length = _lengths_per_sequence(lengths, table.shape[0], 0)[b]
    return blocks[table[b, : -(-length // options.block_size)].long()].flatten(0, 1)[:length]


def _hidden_keys(options: _Options, b: int, count: int, keys: int, *, is_single: bool) -> Tensor:
    """Return which keys each query of sequence b does not see, bool [count, keys].

    is_single: every sequence has one query, so only the mask of mode 0 or 1 counts. The mask is [B, S, keys], with or
    without a head dim of 1, or one [S, keys] for all sequences ([B, keys] if is_single).
    """
    query, key = torch.arange(count)[:, None], torch.arange(keys)
    diagonal = query + keys - count  # the key of the same position, aligned at the last query
    if is_single or options.sparse_mode in (0, 1):
        if options.atten_mask is None or options.sparse_mode > 1:
            return torch.zeros(count, keys, dtype=torch.bool)
        mask = options.atten_mask
        mask = mask.unsqueeze(1 if is_single else 0) if mask.dim() == 2 else mask.flatten(0, -3)
        hidden = mask[b if mask.shape[0] > 1 else 0, :count, :keys].bool().cpu()
        if is_single or options.sparse_mode == 1:
            return hidden
        return hidden | (key < query - options.pre_tokens) | (key > query + options.next_tokens)
    if options.sparse_mode == 4:
        return (key < diagonal - options.pre_tokens) | (key > diagonal + options.next_tokens)
    return key > (query if options.sparse_mode == 2 else diagonal)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend q [n, HQ, D] to k [s, HK, D] and v [s, HK, DV].

    Returns out [n, HQ, DV] and lse [n, HQ], both in the accumulation dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,shd->nhgs", grouped, k.to(wide)) * scale
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0)  # a query whose keys are all hidden gets zeros
    return torch.einsum("nhgs,shd->nhgd", weights, v.to(wide)).flatten(1, 2), torch.logsumexp(scores, -1).flatten(1)
