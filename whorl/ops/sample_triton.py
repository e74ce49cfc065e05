# mypy: allow-untyped-defs
"""Sampling kernels: all multiprocessors find the row maxima, then one program per row draws."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whorl.device import is_interpreting

from ._launch_triton import launched
from ._rows import ceil_div, power_of_2, unit_stride

CHUNK = 4096


@launched
@triton.jit
def _top_kernel(logits_ptr, top_ptr, id_ptr, stride, V, CHUNK: tl.constexpr):
    """Store the maximum of one chunk of a row, and the lowest id that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(top_ptr + at, top)
    tl.store(id_ptr + at, tl.min(tl.where((logits == top) & (ids < V), ids, 2147483647), 0))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _keys(seed, step):
    """The two keys of `_keys` in sample.py."""
    low, high = _mix(seed.to(tl.uint32)), (seed >> 32).to(tl.uint32)
    first = _mix(_mix(low ^ high) ^ step.to(tl.uint32))
    second = _mix(_mix((low + 0x9E3779B9) ^ high) ^ (step >> 32).to(tl.uint32) ^ _mix(first ^ 0x85EBCA6B))
    return first, second


@triton.jit
def _gumbel(ids, first, second):
    """The noise of `gumbel` in sample.py."""
    hashed = _mix(_mix(ids.to(tl.uint32) ^ first) ^ second)
    uniform = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = uniform * (1 + uniform * (0.5 + uniform * (0.3333333333333333 + uniform * 0.25)))
    return -tl.log(tl.where(uniform < 0.015625, series, -tl.log(1 - uniform)))


@triton.jit
def _below(logits_ptr, V, top, temperature, ids):
    """Return (highest logit - logit) / temperature of these ids; infinity past the end of the row."""
    logits = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
    return (top - logits.to(tl.float32)) / temperature


@triton.jit
def _within(logits_ptr, V, top, temperature, limit, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tokens have a `_below` of at most `limit` (COUNT), or the sum of their exp(-below)."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        below = _below(logits_ptr, V, top, temperature, ids)
        part = 1.0 if COUNT else tl.exp(-below)
        total += tl.where((below <= limit) & (ids < V), part, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _deviation(logits_ptr, V, top, temperature, BLOCK: tl.constexpr):
    """Return the standard deviation of `_below` over the tokens where it is finite."""
    count, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        below = _below(logits_ptr, V, top, temperature, start + tl.arange(0, BLOCK))
        count += tl.where(below < float("inf"), 1.0, 0.0)
        total += tl.where(below < float("inf"), below, 0.0)
    mean = tl.sum(total, 0) / tl.sum(count, 0)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        below = _below(logits_ptr, V, top, temperature, start + tl.arange(0, BLOCK))
        off = tl.where(below < float("inf"), below - mean, 0.0)
        squares += off * off
    return tl.sqrt(tl.sum(squares, 0) / tl.sum(count, 0))


@triton.jit
def _nearest(logits_ptr, V, top, temperature, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest limit at which `_within` reaches `target`.

    It is found by bisection on the bits, which as integers are in the order of the floats from 0 on.
    """
    low, high = 0, 0x7F800000
    while low < high:
        middle = low + (high - low) // 2
        limit = middle.to(tl.float32, bitcast=True)  # type: ignore[attr-defined]
        is_enough = _within(logits_ptr, V, top, temperature, limit, COUNT, BLOCK) >= target
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return low.to(tl.float32, bitcast=True)  # type: ignore[attr-defined]


@launched
@triton.jit
def _draw_kernel(
    logits_ptr,
    top_ptr,
    id_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    sigma_ptr,
    seeds_ptr,
    steps_ptr,
    chosen_ptr,
    stride,
    V,
    chunks,
    HAS_SIGMA: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(top_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    firsts = tl.load(id_ptr + row * chunks + chunk, mask=chunk < chunks, other=2147483647)
    top = tl.max(tops, 0)
    chosen = tl.min(tl.where(tops == top, firsts, 2147483647), 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        logits_ptr += row * stride
        limit = float("inf")
        if HAS_SIGMA:
            sigmas = tl.load(sigma_ptr + row)
            if sigmas > 0:
                limit = sigmas * _deviation(logits_ptr, V, top, temperature, BLOCK)
        k, p, least = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if (k > 0) & (k < V):
            limit = tl.minimum(limit, _nearest(logits_ptr, V, top, temperature, k.to(tl.float32), True, BLOCK))
        if p < 1:
            mass = p * _within(logits_ptr, V, top, temperature, limit, False, BLOCK)
            limit = tl.minimum(limit, _nearest(logits_ptr, V, top, temperature, mass, False, BLOCK))
        first, second = _keys(tl.load(seeds_ptr + row), tl.load(steps_ptr + row))
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        best_id = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            below = _below(logits_ptr, V, top, temperature, ids)
            is_kept = (ids < V) & (below <= limit) & (tl.exp(-below) >= least)
            score = tl.where(is_kept, _gumbel(ids, first, second) - below, float("-inf"))
            best_id = tl.where(score > best, ids, best_id)
            best = tl.maximum(score, best)
        highest = tl.max(best, 0)
        chosen = tl.min(tl.where(best == highest, best_id, 2147483647), 0)
    tl.store(chosen_ptr + row, chosen.to(tl.int64))


def forward(logits: Tensor, seeds: Tensor, steps: Tensor, top_n_sigma: Tensor | None, **filters: Tensor) -> Tensor:
    logits = unit_stride(logits)
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return chosen
    chunk = 256 if is_interpreting() else CHUNK
    chunks = ceil_div(vocab, chunk)
    top = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _top_kernel[(rows, chunks)](logits, top, ids, logits.stride(0), vocab, CHUNK=chunk, num_warps=4)
    _draw_kernel[(rows,)](
        logits,
        top,
        ids,
        *(filters[name].contiguous() for name in ("temperature", "top_k", "top_p", "min_p")),
        filters["min_p"] if top_n_sigma is None else top_n_sigma.contiguous(),
        seeds.long().contiguous(),
        steps.long().contiguous(),
        chosen,
        logits.stride(0),
        vocab,
        chunks,
        HAS_SIGMA=top_n_sigma is not None,
        CHUNKS=power_of_2(chunks),
        BLOCK=chunk,
        num_warps=8,
    )
    return chosen
