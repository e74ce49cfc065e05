"""The arithmetic of the gated delta rule: rows of one chunk, computed from the rows before them.

For row i of a chunk with the state S at its start (~ rounds to the dtype of the operands):

    G_i = G_(i-1) + g_i
    L_ij = beta_i (e^(G_i - G_j) k_i.k_j),  P_ij = ~(e^(G_i - G_j) q_i.k_j)
    r_i = beta_i (v_i - e^(G_i) k_i ~S)
    y_i = r_i - sum over j of earlier blocks of ~L_ij d_j;  then, j upwards in its own block, y_i -= L_ij d_j
    d_i = ~y_i
    o_i = scale (e^(G_i) q_i ~S + sum over j <= i of P_ij d_j)

and after the last row S becomes e^(G_63) S + sum over j of k_j ~(e^(G_63 - G_j) d_j). Sums and the rest are in fp32.

The reference computes the rows of a block of BLOCK in products of one shape each, whatever rows of the block are new
and whatever is computed before or after. A library chooses a kernel by the shape alone, and rows of a product do not
depend on one another, so a row's bits are those that it has in any other call.
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
    deltas: Tensor  # [HV, CHUNK, DV]
    decays: Tensor  # [HV, CHUNK]
    dtype: torch.dtype
    length: int = 0

    @classmethod
    def begin(cls, state: Tensor, num_key_heads: int, dtype: torch.dtype) -> "OpenChunk":
        """Return a chunk without rows. state: [HV, D, DV] in the dtype of accumulation."""
        heads, key_dim, value_dim = state.shape
        keys, deltas = (state.new_zeros(n, CHUNK, dim) for n, dim in ((num_key_heads, key_dim), (heads, value_dim)))
        return cls(state, rounded(state, dtype), keys, deltas, state.new_zeros(heads, CHUNK), dtype)

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
        first, count, group = self.length, len(rows.q), len(self.state) // len(self.keys)
        block, end = first - first % BLOCK, first + count
        self.keys[:, first:end] = rows.k.transpose(0, 1)
        for i, g in enumerate(rows.g, first):  # one after the other: the tree of a scan depends on the number of rows
            self.decays[:, i] = self.decays[:, i - 1] + g if i else g
        self.length = end
        place = slice(first - block, end - block)
        v, beta = _tile(rows.v, place), _tile(rows.beta[:, :, None], place)
        qk = torch.cat((_tile(rows.k, place), _tile(rows.q, place)), 1)
        products = (qk @ self.keys.transpose(1, 2)).repeat_interleave(group, 0)
        of_state = qk.repeat_interleave(group, 0) @ self.rounded
        decay, growth = self._decays(block, place)
        lower = beta * (decay * products[:, :BLOCK]).tril(block - 1)
        weights = rounded(decay * products[:, BLOCK:], self.dtype)
        y = beta * (v - growth * of_state[:, :BLOCK])
        y = y - rounded(lower, self.dtype).where(_before(block, y), 0) @ self.deltas
        for i in range(end - block):
            if i >= place.start:
                self.deltas[:, block + i] = rounded(y[:, i], self.dtype)
            y[:, i + 1 :] -= lower[:, i + 1 :, block + i, None] * self.deltas[:, block + i, None]
        out = scale * (growth * of_state[:, BLOCK:] + weights @ self.deltas)
        return out[:, place].transpose(0, 1)

    def _decays(self, block: int, place: slice) -> tuple[Tensor, Tensor]:
        """Return e^(G_i - G_j) [HV, BLOCK, CHUNK], zero where j > i or row i is not new, and e^(G_i) [HV, BLOCK, 1]."""
        of_rows = self.decays[:, block : block + BLOCK, None]
        hidden = torch.ones(BLOCK, CHUNK, dtype=torch.bool, device=of_rows.device)
        hidden[place] = torch.ones_like(hidden[place]).triu(block + place.start + 1)
        return (of_rows - self.decays[:, None]).masked_fill(hidden, 0).exp().masked_fill(hidden, 0), of_rows.exp()

    def _flush(self) -> None:
        """Take the rows of a full chunk into the state, and begin the next chunk."""
        last = self.decays[:, -1:]
        deltas = rounded((last - self.decays).exp()[:, :, None] * self.deltas, self.dtype)
        keys = self.keys.repeat_interleave(len(self.state) // len(self.keys), 0)
        self.state = last.exp()[:, :, None] * self.state + keys.transpose(1, 2) @ deltas
        self.rounded, self.length = rounded(self.state, self.dtype), 0
        for rows in (self.keys, self.deltas, self.decays):
            rows.zero_()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x rounded to dtype, in the dtype of accumulation."""
    return x if x.dtype == dtype else widen(x.to(dtype))


def _tile(x: Tensor, place: slice) -> Tensor:
    """Return [H, BLOCK, C] with the rows of x [n, H, C] at `place`, zero elsewhere."""
    tile = x.new_zeros(x.shape[1], BLOCK, x.shape[2])
    tile[:, place] = x.transpose(0, 1)
    return tile


def _before(block: int, like: Tensor) -> Tensor:
    """Return which rows of a chunk lie before a block, [CHUNK]."""
    return torch.arange(CHUNK, device=like.device) < block
