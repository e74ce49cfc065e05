"""Weights rounded as DeepSeek publishes its own: e4m3 codes, and a scale for every 128 rows and columns of them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from whorl.ops.latent.codes import power_above

BLOCK = 128
LARGEST = 448.0
CODES = torch.float8_e4m3fn
MOST_VALUES = 1 << 22  # rounded at a time


@dataclass(frozen=True, slots=True)
class BlockRounding:
    """has_powers: scales are powers of two ("ue8m0", of V3.1 and V3.2), or the largest magnitude / 448 as it is."""

    has_powers: bool
    takes_patterns: ClassVar[bool] = False  # where settings say what is left as it is: names

    def settings(self, left: list[str]) -> dict[str, Any]:
        """`quantization_config`. left: names of modules that stay as they are, beside those that always do."""
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            **({"scale_fmt": "ue8m0"} if self.has_powers else {}),
            "weight_block_size": [BLOCK, BLOCK],
            **({"modules_to_not_convert": left} if left else {}),
        }

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """What a projection becomes, by the ends of names. The last block of a row or column may be partial."""
        grid = -(-rows // BLOCK), -(-columns // BLOCK)
        return {"weight": ((rows, columns), CODES), "weight_scale_inv": (grid, torch.float32)}

    def apply(self, weight: Tensor) -> tuple[dict[str, Tensor], float, float]:
        """What is stored, and the sums of squares of errors and of weights."""
        step = max(MOST_VALUES // (weight.shape[1] * BLOCK), 1) * BLOCK
        parts = [self._rounded(part) for part in weight.split(step)]
        codes, scales = (torch.cat([part[i] for part in parts]) for i in range(2))
        off, size = (sum(float(part[i]) for part in parts) for i in (2, 3))
        return {"weight": codes, "weight_scale_inv": scales}, off, size

    def _rounded(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, columns = weight.shape
        wide = weight.float()
        if not bool(wide.isfinite().all()):
            raise ValueError("has an infinity or NaN, which no scale can hold")
        blocks = pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3)) / LARGEST
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # of nothing but zeros, or too small to count
        scales = power_above(scales) if self.has_powers else scales
        each = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        codes = (wide / each).clamp(-LARGEST, LARGEST).to(CODES)
        off = (codes.float() * each - wide).double().square().sum()
        return codes, scales, off, wide.double().square().sum()
