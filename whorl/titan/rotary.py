"""The rotation of queries and one key head in plain torch, as a module: what `whorl_rope` replaces."""

from typing import Literal

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns the first channels of queries and of the one key head by the rows of their tokens.

    rows: [B, S, R] fp32, R/2 cosines then as many sines. `pairs` turns neighbours (the attention), `half` channel i
    with i + R/2 (the indexer).
    """

    def __init__(self, style: Literal["half", "pairs"]) -> None:
        super().__init__()
        self.style: Literal["half", "pairs"] = style

    def forward(self, q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._turn(q, rows.unsqueeze(-2)), self._turn(k, rows)

    def _turn(self, x: Tensor, rows: Tensor) -> Tensor:
        size = rows.shape[-1]
        cos, sin = rows.chunk(2, -1)
        wide = x[..., :size].to(rows.dtype)
        if self.style == "half":
            a, b = wide.chunk(2, -1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        turned = turned.to(x.dtype)
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)

    def extra_repr(self) -> str:
        return self.style
