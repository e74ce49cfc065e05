"""Rotate queries and one key head in plain torch; the converter `whorl_rope` replaces this module."""

from typing import Literal

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Rotates the first R channels of q [B, S, H, D] and of k [B, S, D], and returns both in their dtypes.

    rows: [B, S, R] fp32, the row of the rotary table for each token: R/2 cosines, then R/2 sines. Style `pairs` rotates
    neighbouring channels (the attention), `half` rotates channel i with channel i + R/2 (the indexer).
    """

    def __init__(self, style: Literal["half", "pairs"]) -> None:
        super().__init__()
        self.style: Literal["half", "pairs"] = style

    def forward(self, q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotate(q, rows.unsqueeze(-2)), self._rotate(k, rows)

    def _rotate(self, x: Tensor, rows: Tensor) -> Tensor:
        size = rows.shape[-1]
        cos, sin = rows.chunk(2, -1)
        wide = x[..., :size].to(rows.dtype)
        if self.style == "half":
            a, b = wide.chunk(2, -1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = wide[..., 0::2], wide[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        rotated = rotated.to(x.dtype)
        return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), -1)

    def extra_repr(self) -> str:
        return self.style
