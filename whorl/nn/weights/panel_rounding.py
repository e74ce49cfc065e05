"""`--quantize cpu4` where whorl has CPU kernels: weights are rounded to GGUF's Q4_1 while they are read, heads to Q8_0.

A group of 32 columns is on 16 equal steps from its least to its greatest value. The head, and the embedding with it,
has 8 bits, because errors cost most there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from whorl.device import HOST
from whorl.nn.weight import Formats, Matrix
from whorl.ops.cpu import library

from .cpu4 import GROUP, MOST_NAMES, CpuRounding
from .dense import DENSE
from .gguf import KINDS
from .panels import GgufPanels
from .quantised import names
from .rounding import MOST_VALUES, Ends, Rounder, Shapes

METHOD = "panels"
HEADS = ("lm_head", "embed_tokens")
MOST_FP16 = 65504.0


@dataclass(frozen=True, slots=True)
class PanelRounding(Rounder):
    """Rounds matrices as they are read; nothing is written in this form. passes: 2 for a head, which has 8 bits."""

    passes: int = 1
    rounds_head: ClassVar[bool] = True
    rounds_embedding: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "Q4_1" if self.passes == 1 else "Q8_0"

    def settings(self, left: list[str]) -> dict[str, Any]:
        return {"quant_method": METHOD, "ignore": left}

    def shapes(self, rows: int, columns: int) -> Shapes:
        return {"weight": ((rows, KINDS[self.kind].row_bytes(columns)), torch.uint8)}

    def rows_at_once(self, columns: int) -> int:
        return max(MOST_VALUES // columns, 1)

    def round(self, weight: Tensor) -> tuple[Ends, Tensor, Tensor]:
        weight = weight.float()
        groups = weight.reshape(-1, GROUP)
        blocks = _q4_1(groups) if self.passes == 1 else _q8_0(groups)
        error = KINDS[self.kind].unpack_blocks(blocks) - groups
        return {"weight": blocks.view(len(weight), -1)}, error.double().square().sum(), weight.double().square().sum()

    @staticmethod
    def check_device(device: str) -> None:
        if device != HOST:
            raise ValueError(f"cpu4 is for CPUs, and the device is {device}; use w4a16, w8a8 or fp8 there")

    @staticmethod
    def unfit(columns: Mapping[str, int]) -> list[str]:
        """See `Rounder.unfit`. Experts of a layer are rounded together or not at all."""
        return CpuRounding.unfit(columns)

    @staticmethod
    def describe(matrices: Mapping[str, Matrix]) -> str | None:
        left = [name for name, matrix in matrices.items() if not isinstance(matrix.format, GgufPanels)]
        more = f" and {len(left) - MOST_NAMES} more" if len(left) > MOST_NAMES else ""
        others = f"; as they were: {', '.join(left[:MOST_NAMES])}{more}" if left else ""
        return (
            f"cpu4: {len(matrices) - len(left)} matrices are rounded to 4 bits in groups of {GROUP} (head and "
            "embedding to 8), and what they multiply to 16 bits, so outputs differ from those without it; "
            f"{library.variant()}{others}"
        )


def _fp16(x: Tensor) -> Tensor:
    """Return x [n, 1] rounded to fp16, whose greatest number is the limit."""
    return x.clamp(-MOST_FP16, MOST_FP16).half()


def _q4_1(groups: Tensor) -> Tensor:
    low, high = groups.aminmax(dim=-1, keepdim=True)
    minimum, scale = _fp16(low), _fp16((high - low) / 15)
    step = torch.where(scale > 0, scale.float(), torch.ones_like(low))
    codes = ((groups - minimum.float()) / step).round().clamp(0, 15).to(torch.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    return torch.cat((scale.view(torch.uint8), minimum.view(torch.uint8), packed), -1)


def _q8_0(groups: Tensor) -> Tensor:
    scale = _fp16(groups.abs().amax(-1, keepdim=True) / 127)
    step = torch.where(scale > 0, scale.float(), torch.ones_like(groups[:, :1]))
    codes = (groups / step).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), -1)


@dataclass(frozen=True)
class _Kinds(Mapping[str, str]):
    """The GGUF type of any module, by its name."""

    kinds: tuple[str, ...] = field(default=("Q4_1", "Q8_0"))

    def __getitem__(self, name: str) -> str:
        return self.kinds[name.endswith(HEADS)]

    def __iter__(self) -> Any:
        return iter(("", *HEADS[:1]))

    def __len__(self) -> int:
        return len(self.kinds)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats; settings: of `PanelRounding`, no config.json has them."""
    ignored, rounded = frozenset(names(settings, "ignore")), GgufPanels(_Kinds())
    return Formats(of=lambda name: DENSE if name in ignored else rounded, unit=rounded.unit)
