"""Rounds weights as DeepSeek publishes its own: e4m3 codes with a scale for every 128 rows by 128 columns."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from whorl.ops.latent.codes import power_above

BLOCK = 128
LARGEST = 448.0
CODES = torch.float8_e4m3fn
MOST_VALUES = 1 << 22  # values rounded at a time


@dataclass(frozen=True, slots=True)
class BlockRounding:
    """Rounds matrices to FP8 with a scale per block.

    has_powers: scales are powers of two ("ue8m0", as in V3.1 and V3.2); otherwise the largest magnitude / 448.
    """

    has_powers: bool
    takes_patterns: ClassVar[bool] = False  # modules that stay unquantised are listed by name, not by pattern

    def settings(self, left: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json.

        left: names of modules that stay unquantised, besides those that always do.
        """
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            **({"scale_fmt": "ue8m0"} if self.has_powers else {}),
            "weight_block_size": [BLOCK, BLOCK],
            **({"modules_to_not_convert": left} if left else {}),
        }

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Return shape and dtype of the tensors of a projection, by the ends of their names.

        The last block of a row or column may be partial.
        """
        grid = -(-rows // BLOCK), -(-columns // BLOCK)
        return {"weight": ((rows, columns), CODES), "weight_scale_inv": (grid, torch.float32)}

    def apply(self, weight: Tensor) -> tuple[dict[str, Tensor], float, float]:
        """Round a weight; returns the tensors to store and the sums of squares of errors and of weights."""
        step = max(MOST_VALUES // (weight.shape[1] * BLOCK), 1) * BLOCK
        parts = [self._round(part) for part in weight.split(step)]
        codes, scales = (torch.cat([part[i] for part in parts]) for i in range(2))
        error, square_sum = (sum(float(part[i]) for part in parts) for i in (2, 3))
        return {"weight": codes, "weight_scale_inv": scales}, error, square_sum

    def _round(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, columns = weight.shape
        wide = weight.float()
        if not bool(wide.isfinite().all()):
            raise ValueError("has an infinity or NaN, which no scale can represent")
        blocks = pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3)) / LARGEST
        scales = torch.where(
            scales > 0, scales, torch.ones_like(scales)
        )  # the block is all zeros, or too small for fp32
        scales = power_above(scales) if self.has_powers else scales
        value_scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        codes = (wide / value_scales).clamp(-LARGEST, LARGEST).to(CODES)
        error = (codes.float() * value_scales - wide).double().square().sum()
        return codes, scales, error, wide.double().square().sum()
