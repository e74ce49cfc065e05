"""The reference's attention: tiles of rows, a row being one query of one head, over blocks of KEYS keys.

Every product has one of few shapes. As in `linear`, the bits of a row are those that it has in a tile of ROWS rows of
one sequence. Other tiles, and those of several sequences side by side, are used where a trial shows equal bits.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.device import HOST

from .._trial_store import TrialStore

_STORE = TrialStore("paged_attention", __file__)
ROWS = 32  # rows of the tile that defines a row's bits
MORE_ROWS, FEW_ROWS = 256, 8  # rows of other tiles, used where a trial shows that their bits are equal
KEYS = 256  # keys of a block; blocks begin at positions that are multiples of this
STEP = 64  # keys that the last block of decoded tokens is cut to a multiple of, where a trial shows equal bits
TOGETHER = (16, 8, 4, 2, 1)  # sequences side by side, used where a trial shows that their bits are equal
SIDE_ROWS = (2, 4, 8, 16, 32)  # rows of their tiles; not 1: libraries have another kernel for products with one row


class QueryTile(NamedTuple):
    """Where a tile of rows lies in its sequence. Rows past the last query are padding and have the last position."""

    length: int  # tokens of the sequence
    queries: int  # of them, the last, that are queries
    group: int  # rows of one query: its heads that share a key head
    at: int  # first row of the tile
    size: int  # rows of the tile

    def position(self, row: int) -> int:
        """Return the position of a row's query in its sequence."""
        return min(self.length - self.queries + row // self.group, self.length - 1)

    def blocks(self, window: int) -> range:
        """Return the first key of every block of KEYS keys from the first to the last that a row attends to."""
        lowest, highest = self.position(self.at), self.position(self.at + self.size - 1)
        return range(max(0, lowest - window + 1) // KEYS * KEYS if window else 0, highest + 1, KEYS)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Compute causal attention of one sequence, whose queries have the last n positions.

    q: [n, HK, G, D], G query heads for each key head; k, v: [HK, length, D]; sinks: [HK, G]; all in the dtype of
    accumulation. Returns out in the shape of q, and for each tile of rows the highest scores and sums that
    `log_sum_exp` takes.
    """
    length, (count, heads, group, dim) = k.shape[1], q.shape
    k, v = _padded(k), _padded(v)
    rows = (q * scale).transpose(0, 1).reshape(heads, count * group, dim)
    sizes = _sizes((heads, dim), q.dtype, q.device.type, torch.get_num_threads())
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -count * group % sizes[-1]))
    tops = _row_sinks(sinks, count, rows.shape[1])
    parts, sums, at = [], [], 0
    for size in sizes:
        while rows.shape[1] - at >= size:
            place = QueryTile(length, count, group, at, size)
            top = None if tops is None else tops[:, at : at + size]
            out, *tile_sums = _tile(rows[:, at : at + size], k, v, (place,), window, softcap, top)
            parts.append(out)
            sums.append(tile_sums)
            at += size
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return out[:, : count * group].view(heads, count, group, dim).transpose(0, 1), sums


def log_sum_exp(sums: list[list[Tensor]], like: Tensor) -> Tensor:
    """Return the log-sum-exp of every row's scores, [n, HK, G]. sums, like: the two results of `attend`, out last."""
    count, heads, group, _ = like.shape
    lse = torch.cat([top + total.log() for top, total in sums], 1)[:, : count * group, 0]
    return lse.view(heads, count, group).transpose(0, 1)


def attend_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    size: int,
    window: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend` for B sequences with n queries each, side by side, each in one tile of `size` rows.

    q: [B, n, HK, G, D]; k, v: [B, HK, multiple of STEP, D], v zero past a sequence's length; B must be one of TOGETHER
    and size, at least n G, of `rows_together`. Returns out in the shape of q.
    """
    count, queries, heads, group, dim = q.shape
    num_rows = queries * group
    rows = (q * scale).transpose(1, 2).reshape(count, heads, num_rows, dim)
    if size > num_rows:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, size - num_rows))
    places = tuple(QueryTile(length, queries, group, 0, size) for length in lengths)
    out = _tile(rows, k, v, places, window, softcap, _row_sinks(sinks, queries, size))[0][:, :, :num_rows]
    return out.unflatten(2, (queries, group)).transpose(1, 2)


def _row_sinks(sinks: Tensor | None, queries: int, rows: int) -> Tensor | None:
    """Return the sink of each row of a tile, [HK, rows, 1], from sinks [HK, G]; a row without a query has 0."""
    if sinks is None:
        return None
    tops = sinks.repeat(1, queries)
    return torch.nn.functional.pad(tops, (0, rows - tops.shape[1]))[..., None]


@functools.lru_cache(maxsize=256)  # every layer of a model needs the same masks
def _hidden(places: tuple[QueryTile, ...], block: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return the mask of the `keys` keys from key `block` on: True where a row does not attend.

    [rows, keys] for one tile; [tiles, 1, rows, keys] for several, which differ in their lengths alone.
    """
    first = places[0]
    with torch.inference_mode(False):  # a later call may save the mask for backward
        tokens = torch.arange(first.at, first.at + first.size, device=device) // first.group
        lengths = torch.tensor([place.length for place in places], device=device)[:, None]
        position = (lengths - first.queries + tokens).minimum(lengths - 1)[:, None, :, None]
        key = block + torch.arange(keys, device=device)
        hidden = key > position
        hidden = hidden | (key <= position - window) if window else hidden
        return hidden[0, 0] if len(places) == 1 else hidden


def _tile(
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    places: tuple[QueryTile, ...],
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of one tile, or of one of each sequence. places: where each lies; sinks: [HK, R, 1].

    rows: R scaled queries [HK, R, D]; k, v: [HK, multiple of KEYS or STEP, D]; with a dim of sequences before them for
    several tiles. Returns out like rows and, [..., HK, R, 1] each, the highest score of a row and the sum of the
    exponentials relative to it. The softmax is computed online over blocks of KEYS keys. For a row without visible keys
    in a block, the block multiplies by one and adds zero: a row's bits do not depend on other rows and sequences.
    """
    blocks = [place.blocks(window) for place in places]
    first, *later = range(min(each.start for each in blocks), max(each.stop for each in blocks), KEYS)
    top, shift, weights = _weigh(rows, k, places, first, window, softcap, sinks)
    total, out = _sum(weights), weights @ v[..., first : first + KEYS, :]
    if sinks is not None:  # as a key that comes before all others, without a value
        total = torch.exp(sinks - shift) + total
    for block in later:
        new_top, shift, weights = _weigh(rows, k, places, block, window, softcap, top)
        keep = torch.exp(top - shift)
        total = total * keep + _sum(weights)
        out = out * keep + weights @ v[..., block : block + KEYS, :]
        top = new_top
    return out / total, top, total


def _weigh(
    rows: Tensor,
    k: Tensor,
    places: tuple[QueryTile, ...],
    block: int,
    window: int,
    softcap: float,
    top: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one block of the online softmax. top: the highest score of each row before it; None for the first block.

    Returns the highest score including this block, that score with -inf replaced by 0, both [..., HK, R, 1], and the
    exponentials of the scores relative to it, [..., HK, R, keys of the block].
    """
    keys = k[..., block : block + KEYS, :]
    hidden = _hidden(places, block, keys.shape[-2], window, rows.device)
    scores = rows @ keys.transpose(-1, -2)
    scores = (softcap * tanh(scores / softcap) if softcap else scores).masked_fill_(hidden, -torch.inf)
    block_top = scores.amax(-1, keepdim=True)
    top = block_top if top is None else torch.maximum(top, block_top)
    shift = top.masked_fill(top == -torch.inf, 0) if window else top  # without a window a row sees the first block
    return top, shift, torch.exp(scores - shift)


# The odd polynomial of Cephes for tanh(x) / x - 1 in x^2, below SMALL; its relative error there is below 2e-7.
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
SMALL = 0.625


def tanh(x: Tensor) -> Tensor:
    """Return tanh(x) with few roundings for small x as well, whose bits do not depend on where an element lies.

    Those of torch.tanh do on a CPU, so it is for fp64 only, which is compared with.
    """
    if x.dtype == torch.float64:
        return torch.tanh(x)
    square = x * x
    factor = torch.full_like(x, TANH[0])
    for coefficient in TANH[1:]:
        factor = factor * square + coefficient
    large = (1 - 2 / (1 + torch.exp(2 * x.abs()))).copysign(x)
    return torch.where(x.abs() < SMALL, x + x * square * factor, large)


def _sum(weights: Tensor) -> Tensor:
    """Return the sum over the keys, always of KEYS numbers: another count would be summed in another order."""
    missing = KEYS - weights.shape[-1]
    return (torch.nn.functional.pad(weights, (0, missing)) if missing else weights).sum(-1, keepdim=True)


# ---- trials


@functools.cache
def _sizes(shape: tuple[int, int], dtype: torch.dtype, device: str, num_threads: int) -> tuple[int, ...]:
    """Return the row counts of tiles in which a row has the bits that it has in ROWS rows, by trial as in `linear`.

    shape: key heads and head size.
    """
    if device != HOST:
        return (ROWS,)

    def is_equal(size: int) -> bool:
        name = f"{size} rows {list(shape)} {dtype} {num_threads} threads"
        return _STORE.outcome(name, device, lambda: _is_equal(shape, dtype, size))

    return tuple(size for size in (MORE_ROWS, ROWS, FEW_ROWS) if size == ROWS or is_equal(size))


@functools.cache
def rows_together(
    shape: tuple[int, int], dtype: torch.dtype, device: str, num_threads: int
) -> tuple[int, ...]:  # fmt: skip
    """Return of SIDE_ROWS the row counts of tiles in which a row of several sequences has its bits, by trial.

    shape: key heads and head size. All are tried at the first call, so that none is tried while requests wait.
    """
    if device != HOST:
        return ()

    def is_equal(rows: int) -> bool:
        name = f"side by side, {rows} rows {list(shape)} {dtype} {num_threads} threads"
        return _STORE.outcome(name, device, lambda: _is_equal_together(shape, rows, dtype))

    return tuple(rows for rows in SIDE_ROWS if is_equal(rows))


def _is_equal(shape: tuple[int, int], dtype: torch.dtype, size: int) -> bool:
    """Return whether tiles of `size` rows of random numbers have the bits of tiles of ROWS rows."""
    q, k, v = _random(shape, dtype, 2, MORE_ROWS)
    k, v = (x.flatten(0, 1).transpose(0, 1) for x in (k, v))
    place = QueryTile(KEYS + MORE_ROWS, MORE_ROWS, 1, 0, MORE_ROWS)
    results = [
        torch.cat(
            [
                _tile(part, k, v, (place._replace(at=i * rows, size=rows),), 0)[0]
                for i, part in enumerate(q[0].split(rows, 1))
            ],
            1,
        )
        for rows in (size, ROWS)
    ]
    return torch.equal(*results)


def _is_equal_together(shape: tuple[int, int], rows: int, dtype: torch.dtype) -> bool:
    """Return whether tiles of `rows` rows of sequences side by side have the bits of each in a tile of ROWS rows.

    One block of keys is tried, for one sequence of each number of keys. The first and the last sequence are compared.
    """
    q, k, v = _random(shape, dtype, TOGETHER[0], ROWS)
    for keys in range(STEP, KEYS + 1, STEP):
        counts = TOGETHER if keys in (STEP, KEYS) else (1,)
        places = [QueryTile(keys - b, rows, 1, 0, rows) for b in range(counts[0])]
        cut_k, cut_v = (x[:, :keys].transpose(1, 2) for x in (k, v))
        for b, place in enumerate(places):
            cut_v[b, :, place.length :] = 0
        for count in counts:
            actual = _tile(q[:count, :, :rows].contiguous(), cut_k[:count], cut_v[:count], tuple(places[:count]), 0)[0]
            for b in {0, count - 1}:
                tile = (places[b]._replace(size=ROWS),)
                alone, _, _ = _tile(q[b], _padded(cut_k[b]), _padded(cut_v[b]), tile, 0)
                if not torch.equal(actual[b], alone[:, :rows]):
                    return False
    return True


def _padded(x: Tensor) -> Tensor:
    """Return keys or values [HK, n, D] with zeros up to a multiple of KEYS."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % KEYS))


def _random(shape: tuple[int, int], dtype: torch.dtype, count: int, rows: int) -> list[Tensor]:
    """Return random queries of `count` sequences, [count, HK, rows, D], and KEYS keys and values of each as they are
    read from a cache, [count, KEYS, HK, D]."""
    generator, (heads, dim) = torch.Generator().manual_seed(0), shape
    sizes = (heads, rows), (KEYS, heads), (KEYS, heads)
    return [torch.randn(count, *size, dim, generator=generator).to(dtype) for size in sizes]
