"""Sampling on the device: penalties, then a draw whose noise is a hash of the sequence's seed, its step and the id."""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from whorl.device import HOST

from . import sample_torch_npu
from ._draw import Draw
from ._op import Values, operator
from ._spec import spec_of

_MASK = 0xFFFFFFFF  # the lowest 32 bits


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit numbers by a permutation in which every input bit affects every output bit; x: int64 below 2^32."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _keys(seed: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Hash all 64 bits of seed and step, [B] int64 each, into two 32-bit keys, [B] int64 each."""
    low, high = _mix(seed & _MASK), (seed >> 32) & _MASK
    first = _mix(_mix(low ^ high) ^ (step & _MASK))
    second = _mix(_mix((low + 0x9E3779B9) & _MASK ^ high) ^ ((step >> 32) & _MASK) ^ _mix(first ^ 0x85EBCA6B))
    return first, second


def gumbel(seeds: Tensor, steps: Tensor, size: int) -> Tensor:
    """Return standard Gumbel noise [B, size] fp32: entry [b, id] is a hash of seeds[b], steps[b] and the token id."""
    first, second = (key.unsqueeze(1) for key in _keys(seeds.long(), steps.long()))
    ids = torch.arange(size, device=seeds.device)
    uniform = ((_mix(_mix(ids ^ first) ^ second).float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    # The noise is -log(-log(1 - u)), and the token that wins has a u near 0. There 1 - u loses the digits of u, so
    # -log(1 - u) is computed by its series.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform / 4)))
    exponential = torch.where(uniform < 1 / 64, series, -torch.log(1 - uniform))
    return -torch.log(exponential)


def _near(logits: Tensor, top_n_sigma: Tensor | None) -> Tensor:
    """Return logits [N, V] with minus infinity for those that top-n-sigma excludes."""
    if top_n_sigma is None:
        return logits
    below = logits.amax(-1, keepdim=True) - logits
    limit = top_n_sigma.unsqueeze(1) * _deviations(below, top_n_sigma)
    return logits.masked_fill((top_n_sigma > 0).unsqueeze(1) & (below > limit), -torch.inf)


def _deviations(x: Tensor, is_used: Tensor) -> Tensor:
    """Return the standard deviation [N, 1] of the finite values of each row of x [N, V]; is_used: [N], not 0 for the
    rows that need one."""
    if x.device.type == HOST:
        # Row by row: how torch divides a sum among threads depends on the number of rows, and so would its rounding.
        out = x.new_zeros(x.shape[0], 1)
        for row in is_used.nonzero().flatten().tolist():
            finite = x[row][x[row] < torch.inf]
            out[row] = (finite - finite.mean()).square().mean().sqrt()
        return out
    is_finite = x < torch.inf
    count, x = is_finite.sum(-1, keepdim=True), torch.where(is_finite, x, 0)
    deviations = torch.where(is_finite, x - x.sum(-1, keepdim=True) / count, 0)
    return (deviations.square().sum(-1, keepdim=True) / count).sqrt()


def _cut(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Apply top-k, top-p and min-p to one row; return it with minus infinity for excluded tokens.

    scaled: [V], logits divided by the temperature and shifted so that the highest is 0.
    """
    if 0 < top_k < scaled.shape[0]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)
    descending = scaled[scaled > -torch.inf].sort(descending=True).values if top_p < 1 else scaled[:0]
    if len(descending):  # else there is nothing to cut: no logit is a finite number
        weights = torch.exp(descending)
        above = weights.cumsum(0) - weights  # the sum of the weights before each token in descending order
        reached = above >= top_p * weights.sum()
        reached[0] = False
        last = descending[int(reached.int().argmax()) - 1] if bool(reached.any()) else descending[-1]
        scaled = scaled.masked_fill(scaled < last, -torch.inf)
    if min_p > 0:
        scaled = scaled.masked_fill(torch.exp(scaled) < min_p, -torch.inf)
    return scaled


def probabilities(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_n_sigma: Tensor | None = None,
) -> Tensor:
    """Return the distribution [N, V] fp32 that `ops.sample` samples from. Rows of temperature 0 are treated as 1."""
    logits = _near(logits, top_n_sigma)
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1)[:, None]
    ordered = scaled.sort(descending=True).values
    k = torch.where((top_k > 0) & (top_k < ordered.shape[1]), top_k, ordered.shape[1])
    lowest = ordered.gather(1, k[:, None].long() - 1)
    weights = ordered.masked_fill(ordered < lowest, -torch.inf).exp()
    mass_before = weights.cumsum(1) - weights  # of all likelier tokens
    is_in = mass_before < top_p[:, None] * weights.sum(1, keepdim=True)
    count = torch.where(top_p < 1, is_in.sum(1).clamp_min(1), k)
    lowest = torch.maximum(lowest, ordered.gather(1, count[:, None] - 1))
    is_cut = (scaled < lowest) | ((min_p[:, None] > 0) & (scaled.exp() < min_p[:, None]))
    return scaled.masked_fill(is_cut, -torch.inf).softmax(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype.itemsize > 2 else logits.float()


_FILTER = Annotated[Tensor, "[B] float, from 0"]


@operator(forward_only=True)
def sample(
    logits: Annotated[Tensor, "[B, V>0] float"],
    temperature: _FILTER,
    top_k: Annotated[Tensor, "[B] int, from 0"],
    top_p: _FILTER,
    min_p: _FILTER,
    seeds: Annotated[Tensor, "[B] int"],
    steps: Annotated[Tensor, "[B] int"],
    top_n_sigma: Annotated[Tensor | None, "[B] float, from 0"] = None,
) -> Annotated[Tensor, "[B] int64"]:
    """Sample one token id for each sequence.

    Logits are widened to fp32. Temperature 0 takes the highest logit, on ties the lowest id. Otherwise the softmax of
    logits / temperature is sampled among the tokens that pass four filters, in this order: `top_n_sigma` (0 or None:
    all) keeps those whose logit is at least the highest minus top_n_sigma standard deviations of the row's finite
    logits; `top_k` (0: all) keeps those no lower than the k-th highest; `top_p` (1: all) keeps a token when those
    before it in descending order hold less than top_p of the remaining mass, and tokens equal to the last one kept;
    `min_p` (0: all) keeps those at least min_p times as likely as the most likely one. At least one token always
    passes. The noise is a hash of seed, step and token id, so a sequence's token does not depend on the rest of the
    batch. A logit of minus infinity is never chosen while another is finite. No gradient.

        ids = ops.sample(logits, temperature, top_k, top_p, min_p, seeds, steps)
    """
    logits = _wide(logits)
    chosen = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().flatten()  # the sequences that do not take the argmax
    if len(drawn):
        rows = _near(logits[drawn], None if top_n_sigma is None else top_n_sigma[drawn])
        scaled = (rows - rows.amax(-1, keepdim=True)) / temperature[drawn].unsqueeze(1)
        filters = zip(*(x[drawn].tolist() for x in (top_k, top_p, min_p)), strict=True)
        for b, (k, p, m) in enumerate(filters):
            if 0 < k < rows.shape[1] or p < 1 or m > 0:
                scaled[b] = _cut(scaled[b], k, p, m)
        chosen[drawn] = (scaled + gumbel(seeds[drawn], steps[drawn], rows.shape[1])).argmax(-1)
    return chosen


sample.impl("triton", "sample_triton:forward")


@sample.impl("torch_npu", accepts=sample_torch_npu.reason)
def _(logits, temperature, top_k, top_p, min_p, seeds, steps, top_n_sigma):  # type: ignore[no-untyped-def]
    noise = gumbel(seeds, steps, logits.shape[1])
    return sample_torch_npu.forward(_near(_wide(logits), top_n_sigma), temperature, top_k, top_p, min_p, noise)


_RATE = Annotated[Tensor | None, "[B] logits"]


def penalize(
    logits: Annotated[Tensor, "[B, V] float"],
    tokens: Annotated[Tensor, "[B, M] int64, from -1 to V - 1"],
    counts: Annotated[Tensor, "[B, M] any"],
    *,
    repetition: _RATE = None,
    presence: _RATE = None,
    frequency: _RATE = None,
    bias: Annotated[Tensor | None, "[B, M] logits"] = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Apply the penalties and biases of each sequence to its logits; returns new logits [B, V].

    logits: [B, V] fp32; tokens: [B, M] int64, the token ids of sequence b that a penalty or bias applies to, each once,
    padded with -1; counts: [B, M], how often each was generated (0: it occurs in the prompt only; negative: it only has
    a bias). `repetition` [B] (1: none) divides positive logits and multiplies negative ones, of tokens with
    counts >= 0 (as Hugging Face); `presence` [B] is subtracted once and `frequency` [B] once per occurrence, from
    tokens with counts > 0 (as OpenAI); `bias` [B, M] is added last. Ids from `vocab_size` on get minus infinity: a
    model's embedding may be longer than its tokenizer's vocabulary. A token outside [-1, V) raises ValueError on the
    CPU and is not checked elsewhere. This is a plain function of torch, not an operator with backends.
    """
    _PENALIZE.check(locals())
    out = logits.clone()
    if tokens.shape[1]:
        # Padding becomes a copy of the first entry of its sequence, so that scatter_ writes one value to one place
        # twice; in a sequence of padding alone token 0 keeps its logit.
        is_real = tokens >= 0
        at = torch.where(is_real, tokens, tokens[:, :1]).clamp_min(0)
        counts = torch.where(is_real, counts, torch.where(is_real[:, :1], counts[:, :1], -1))
        values = _penalized(logits.gather(1, at), counts, repetition, presence, frequency)
        if bias is not None:
            bias = torch.where(is_real, bias, torch.where(is_real[:, :1], bias[:, :1], 0))
            values = values + bias
        out.scatter_(1, at, values)
    if vocab_size is not None:
        out[:, vocab_size:] = -torch.inf
    return out


_PENALIZE = spec_of(penalize)


def _penalized(
    values: Tensor, counts: Tensor, repetition: Tensor | None, presence: Tensor | None, frequency: Tensor | None
) -> Tensor:
    """Return the logits `values` [B, M] with the penalties [B] of `penalize` applied."""
    if repetition is not None:
        rate = repetition.unsqueeze(1)
        values = torch.where(counts >= 0, torch.where(values > 0, values / rate, values * rate), values)
    times = counts.clamp_min(0).to(values.dtype)
    if frequency is not None:
        values = values - times * frequency.unsqueeze(1)
    if presence is not None:
        values = values - (times > 0) * presence.unsqueeze(1)
    return values


_SIZES = ({"tokens": (1,), "vocab": 8}, {"tokens": (5,), "vocab": 100}, {"tokens": (3,), "vocab": 1030, "scale": 0.01})
_CASES: list[Values] = [
    *_SIZES,
    {"tokens": (0,), "vocab": 32},
    {"tokens": (4,), "vocab": 50, "temperature": 0.0},
    {"tokens": (3,), "vocab": 600, "temperature": 0.0},
    {"tokens": (8,), "vocab": 70, "min_p": 0.5, "temperature": 1.5},
    {"tokens": (4,), "vocab": 70, "sliced": True, "top_k": 5},
    {"tokens": (5,), "vocab": 600, "narrow": True, "scale": 3.0, "top_p": 0.8},
    {"tokens": (3,), "vocab": 600, "narrow": True, "temperature": 0.0},
    {"tokens": (4,), "vocab": 200, "scale": 3.0, "top_p": 0.8},
    {"tokens": (4,), "vocab": 200, "scale": 3.0, "min_p": 0.2, "top_p": 0.5, "top_k": 20, "temperature": 1.7},
    {"tokens": (5,), "vocab": 600, "scale": 3.0, "top_n_sigma": 1.5},
    {"tokens": (4,), "vocab": 200, "scale": 3.0, "top_n_sigma": 2.0, "min_p": 0.1, "top_p": 0.8, "top_k": 20},
    {"tokens": (2,), "vocab": 600, "scale": 2.0, "top_p": 0.9, "top_k": 50, "temperature": 0.3},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "vocab": 151936, "scale": 3.0, **more}
    for tokens in (1, 64)
    for more in ({"temperature": 0.0}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6})
]


@sample.inputs(cases=_CASES, bench=_BENCH, words={"tokens": "B", "vocab": "V"})
def _(draw: Draw, tokens: tuple[int], vocab: int, top_k: int = 0, narrow: bool = False, **filters: float) -> Values:
    kind, ids = draw.dtype if narrow else draw.wide, torch.arange(*tokens, device=draw.device)
    return {
        "logits": replace(draw, dtype=kind).scaled(*tokens, vocab),
        "top_k": torch.full_like(ids, top_k, dtype=torch.int32),
        "seeds": ids * 7919 + 2**40,
        "steps": ids + 11,
        **{"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | filters,
    }
