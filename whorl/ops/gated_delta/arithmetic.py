"""The arithmetic of the gated delta rule: rows of one chunk, computed from the rows before them.

A chunk has CHUNK rows, in blocks of BLOCK. For row i of block b, with the state S at the chunk's start (~ rounds to the
dtype of the operands, e_i is row i of the identity):

    G_i = G_(i-1) + g_i
    L_ij = beta_i (e^(G_i - G_j) k_i.k_j) for j < i,  P_ij = ~(e^(G_i - G_j) q_i.k_j) for j <= i
    y_i = beta_i (v_i - e^(G_i) k_i ~S) - sum over j in earlier blocks of ~L_ij d_j
    t_i = e_i - sum over j < i in block b of L_ij t_j,  j in the order of `tree`
    d_i = ~(sum over j <= i in block b of ~t_ij ~y_j)
    o_i = scale (e^(G_i) q_i ~S + sum over j <= i of P_ij d_j)

and after the last row S becomes e^(G_63) S + sum over j of k_j ~(e^(G_63 - G_j) d_j). Sums and the rest are in fp32.
t is the inverse of I + L within a block: substituting the d_j themselves would be as exact, and a chain of 64 steps.

The reference computes the rows of a block in products of one shape each, whatever rows of the block are new and
whatever is computed before or after. A library chooses a kernel by the shape alone, and rows of a product do not depend
on one another, so a row's bits are those that it has in any other call.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._op import widen
from .layout import BLOCK, CHUNK


class Rows(NamedTuple):
    """New rows of a sequence, in the dtype of accumulation: q, k [n, HK, D], v [n, HV, DV], g and beta [n, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, first: int, end: int) -> "Rows":
        return Rows(*(x[first:end] for x in self))


@dataclass(slots=True)
class OpenChunk:
    """The state of a sequence at the start of its open chunk, and the chunk's finished rows; zeros after them.

    Tensors are in the dtype of accumulation. dtype: that operands are rounded to.
    """

    state: Tensor  # [HV, D, DV]
    rounded: Tensor
    keys: Tensor  # [HK, CHUNK, D]
    deltas: Tensor  # d, [HV, CHUNK, DV]
    decays: Tensor  # G, [HV, CHUNK]
    errors: Tensor  # y, [HV, CHUNK, DV]
    inverses: Tensor  # t, [HV, CHUNK, BLOCK]
    dtype: torch.dtype
    length: int = 0

    @classmethod
    def begin(cls, state: Tensor, num_key_heads: int, dtype: torch.dtype) -> "OpenChunk":
        """Return a chunk without rows. state: [HV, D, DV] in the dtype of accumulation."""
        heads, key_dim, value_dim = state.shape
        return cls(
            state=state,
            rounded=rounded(state, dtype),
            keys=state.new_zeros(num_key_heads, CHUNK, key_dim),
            deltas=state.new_zeros(heads, CHUNK, value_dim),
            decays=state.new_zeros(heads, CHUNK),
            errors=state.new_zeros(heads, CHUNK, value_dim),
            inverses=state.new_zeros(heads, CHUNK, BLOCK),
            dtype=dtype,
        )

    def append(self, rows: Rows, scale: float) -> Tensor:
        """Compute new rows, which may fill this chunk and more, and return their outputs [n, HV, DV], not rounded."""
        outs, at = [], 0
        while at < len(rows.q):
            end = min(len(rows.q), at + BLOCK - self.length % BLOCK)
            outs.append(self._append_to_block(rows.part(at, end), scale))
            at = end
            if self.length == CHUNK:
                self._flush()
        return torch.cat(outs) if outs else torch.zeros_like(rows.v)

    def _append_to_block(self, rows: Rows, scale: float) -> Tensor:
        first, end, group = self.length, self.length + len(rows.q), len(self.state) // len(self.keys)
        block = first - first % BLOCK
        own, place = slice(block, block + BLOCK), slice(first - block, end - block)
        self.keys = _put(self.keys, rows.k.transpose(0, 1), first)
        sums = [self.decays[:, first - 1] if first else torch.zeros_like(self.decays[:, 0])]
        for g in rows.g:  # one after the other: the tree of a scan depends on the number of rows
            sums.append(sums[-1] + g)
        self.decays = _put(self.decays, torch.stack(sums[1:], 1), first)
        v, beta = _tile(rows.v, place), _tile(rows.beta[:, :, None], place)
        kq = torch.cat((_tile(rows.k, place), _tile(rows.q, place)), 1)
        products = (kq @ self.keys.transpose(1, 2)).repeat_interleave(group, 0)
        of_state = kq.repeat_interleave(group, 0) @ self.rounded
        decay, growth = self._decays(block, place)
        lower = beta * (decay * products[:, :BLOCK]).tril(block - 1)
        earlier = torch.arange(CHUNK, device=lower.device) < block
        y = beta * (v - growth * of_state[:, :BLOCK])
        y = y - rounded(lower, self.dtype).where(earlier, 0) @ self.deltas
        self.errors = _put(self.errors, rounded(y[:, place], self.dtype), first)
        inverse = self._invert(lower[:, :, own], own, place)
        deltas = rounded(inverse, self.dtype) @ self.errors[:, own]
        self.deltas = _put(self.deltas, rounded(deltas[:, place], self.dtype), first)
        weights = rounded(decay * products[:, BLOCK:], self.dtype)
        out = scale * (growth * of_state[:, BLOCK:] + weights @ self.deltas)
        self.length = end
        return out[:, place].transpose(0, 1)

    def _decays(self, block: int, place: slice) -> tuple[Tensor, Tensor]:
        """Return e^(G_i - G_j) [HV, BLOCK, CHUNK], zero where j > i or row i is not new, and e^(G_i) [HV, BLOCK, 1]."""
        of_rows = self.decays[:, block : block + BLOCK, None]
        hidden = torch.ones(BLOCK, CHUNK, dtype=torch.bool, device=of_rows.device)
        hidden[place] = torch.ones_like(hidden[place]).triu(block + place.start + 1)
        return (of_rows - self.decays[:, None]).masked_fill(hidden, 0).exp().masked_fill(hidden, 0), of_rows.exp()

    def _invert(self, lower: Tensor, own: slice, place: slice) -> Tensor:
        """Compute the new rows of t, and return those of the block, [HV, BLOCK, BLOCK].

        lower: L of the block, zero in rows that are not new.
        """
        inverse, unit = self.inverses[:, own], torch.eye(BLOCK, dtype=lower.dtype, device=lower.device)
        for i in range(place.start, place.stop):
            row = unit[i] - tree(lower[:, i, :, None] * inverse)
            inverse = _put(inverse, row[:, None], i)
        self.inverses = _put(self.inverses, inverse, own.start)
        return inverse

    def _flush(self) -> None:
        """Take the rows of a full chunk into the state, and begin the next chunk."""
        last = self.decays[:, -1:]
        deltas = rounded((last - self.decays).exp()[:, :, None] * self.deltas, self.dtype)
        keys = self.keys.repeat_interleave(len(self.state) // len(self.keys), 0)
        self.state = last.exp()[:, :, None] * self.state + keys.transpose(1, 2) @ deltas
        self.rounded, self.length = rounded(self.state, self.dtype), 0
        for name in ("keys", "deltas", "decays", "errors", "inverses"):
            setattr(self, name, torch.zeros_like(getattr(self, name)))


def _put(x: Tensor, rows: Tensor, first: int) -> Tensor:
    """Return x [H, R, ...] with some of its rows replaced, from row `first` on."""
    return torch.cat((x[:, :first], rows, x[:, first + rows.shape[1] :]), 1)


def tree(x: Tensor) -> Tensor:
    """Return the sum over the rows of x [H, BLOCK, C]: the second half is added to the first until one row is left."""
    while x.shape[1] > 1:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return x[:, 0]


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to dtype, in the dtype of accumulation."""
    return x if x.dtype == dtype else widen(x.to(dtype))


def _tile(x: Tensor, place: slice) -> Tensor:
    """Return [H, BLOCK, C] with the rows of x [n, H, C] at `place`, zero elsewhere."""
    tile = x.new_zeros(x.shape[1], BLOCK, x.shape[2])
    tile[:, place] = x.transpose(0, 1)
    return tile
