"""4-bit floating point numbers (e2m1) with a scale for each block of columns: MXFP4 and NVFP4.

codes: uint8 [.., N, K / 2], as mx.py of the operators describes them. MXFP4 has a power of two (e8m0, uint8) for 32
columns, NVFP4 a number (e4m3) for 16 columns and one fp32 factor for each projection. Every value of MXFP4 is exact in
bf16. NVFP4's are number * scale * factor in fp32, rounded to the model's dtype; without the factor they are exact.

Only the experts of gpt-oss have kernels that read MXFP4 packed (`whorl.nn.ClippedExperts`). Elsewhere a CPU unpacks a
tile at a time, and another device unpacks a matrix when it is loaded, with a warning.
"""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.device import HOST
from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Format, Formats, Index, Matrix, Part
from whorl.ops.quantised import mx

from .dense import DENSE
from .laid_out import is_tiled_on, warn_unpacked
from .quantised import ONE_EACH, Pick, Quantised, is_listed, names, never_quantised, one_of

E4M3 = torch.float8_e4m3fn
_REASON = "no kernel reads this format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4(Quantised):
    """Numbers of 4 bits with a scale for each block of `block` columns.

    codes_end, scales_end: how the names of codes and scales end in the checkpoint. factor_end: of the factor of a
    projection; "": there is none. divides: the factor divides instead of multiplying. ignored_ends: tensors that are
    read and not used, such as the scale of activations.
    """

    block: int
    codes_end: str = "weight_packed"
    scales_end: str = "weight_scale"
    factor_end: str = ""
    divides: bool = False
    input_end: str = ""

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return Unit(columns=self.block)

    @property
    def scales_dtype(self) -> torch.dtype:
        return torch.uint8 if self.block == mx.BLOCK else E4M3

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        lead, (rows, columns) = matrix.lead, matrix.shape[-2:]
        for part in matrix.entry_parts:
            if part.shape[1] % self.block:
                raise ValueError(
                    f"{part.source(matrix.name)}: {part.shape[1]} columns, expected a multiple of {self.block}, the "
                    "columns of a scale"
                )
        tensors = {
            "codes": torch.empty(*lead, rows, columns // 2, dtype=torch.uint8),
            "scales": torch.empty(*lead, rows, columns // self.block, dtype=self.scales_dtype),
        }
        if self.factor_end:
            tensors["factors"] = torch.empty(*lead, self.part_starts(matrix, ONE_EACH)[1], dtype=torch.float32)
        if self.input_end:
            tensors["inputs"] = torch.empty(*lead, self.part_starts(matrix, ONE_EACH)[1], dtype=torch.float32)
        return tensors

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        rows, pairs, blocks = self.rows_of(matrix, part), self.columns_of(part, 2), self.columns_of(part, self.block)
        yield self.codes_end, self.destination(matrix.codes, part, rows, pairs, dtype=torch.uint8)
        yield self.scales_end, self.destination(matrix.scales, part, rows, blocks, dtype=self.scales_dtype)
        number = self.rows_of(matrix, part, ONE_EACH)
        if self.factor_end:
            yield self.factor_end, self.destination(matrix.factors, part, number)
        if self.input_end:
            yield self.input_end, self.destination(matrix.inputs, part, number, default=1)

    def finish(self, matrix: Any) -> None:
        if self.factor_end:
            factors = self.scales_by_row(matrix, matrix.factors)
            matrix.replace(codes=matrix.codes.data, scales=matrix.scales.data, factors=factors)
        if matrix.codes.device.type not in (HOST, "meta"):
            warn_unpacked(matrix.codes.device, "4-bit floating point weights", _REASON)
            matrix.unpack(DENSE)

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        codes, scales = matrix.codes[pick], matrix.scales.view(torch.uint8)[pick]
        if self.block == mx.BLOCK:
            return mx.values(codes, scales, matrix.dtype, matrix.shape[-1])
        numbers = mx.e2m1(codes).unflatten(-1, (-1, self.block)) * scales.view(E4M3).float().unsqueeze(-1)
        factors = matrix.factors[pick].unsqueeze(-1)
        numbers = numbers.flatten(-2)
        return (numbers / factors if self.divides else numbers * factors).to(matrix.dtype)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        """Draw random codes, whose values have a variance of 1 / columns."""
        matrix.codes.random_(0, 256, generator=generator)
        target = matrix.shape[-1] ** -0.5 / 2.95  # the standard deviation of a random number of e2m1
        if self.block == mx.BLOCK:
            matrix.scales.fill_(round(float(torch.log2(torch.tensor(target)))) + 127)
        else:
            matrix.scales.view(torch.uint8).fill_(0x38)  # 1
            matrix.factors.fill_(1 / target if self.divides else target)
        if self.input_end:
            matrix.inputs.fill_(1)
        self.finish(matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedMxfp4(Fp4):
    """MXFP4 of gpt-oss: the codes of all experts in one tensor, [E, N, K / 32, 16], the scales in another."""

    def stack_destinations(
        self, matrix: Any, shape: tuple[int, ...], index: Index
    ) -> Iterator[tuple[str, Destination]]:
        """Yield codes and scales of a stack. shape: [E, N, K] of the full stack; index: this rank's part."""
        count, rows, columns = shape
        blocks = slice(index[2].start // mx.BLOCK, -(-index[2].stop // mx.BLOCK))
        at = (*index[:2], blocks)
        codes = matrix.codes.unflatten(-1, (-1, mx.BLOCK // 2))
        yield (
            "blocks",
            Destination(
                into=codes,
                shape=(count, rows, columns // mx.BLOCK, mx.BLOCK // 2),
                index=(*at, slice(0, mx.BLOCK // 2)),
                dtype=torch.uint8,
            ),
        )
        stored = (count, rows, columns // mx.BLOCK)
        yield "scales", Destination(into=matrix.scales, shape=stored, index=at, dtype=torch.uint8)

    def finish(self, matrix: Any) -> None:
        """Lay codes out for Triton's kernels; keep them on a CPU, and unpack them elsewhere."""
        codes, scales = matrix.codes.data, matrix.scales.data
        device, reason = codes.device, None
        if is_tiled_on(device) is None or codes.dtype != torch.uint8:
            return
        if not is_tiled_on(device):
            reason = "npu_grouped_matmul does not multiply by MXFP4"
        elif int(scales.max()) > mx.LARGEST:
            reason = f"scales are at most {2.0 ** (mx.LARGEST - 127):g} in its kernels"
        if reason is None:
            tiles = [mx.tiled(*entry) for entry in zip(codes, scales, strict=True)]
            matrix.replace(codes=torch.stack([each for each, _ in tiles]), scales=torch.stack([s for _, s in tiles]))
        else:
            warn_unpacked(device, "MXFP4 weights", reason)
            matrix.unpack(DENSE)


def stacked_mxfp4(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a gpt-oss checkpoint of its `quantization_config`: its experts are MXFP4."""
    unconverted = names(settings, "modules_to_not_convert")
    patterns = [re.compile(fnmatch.translate(name)) for name in unconverted]
    quantised = StackedMxfp4(block=mx.BLOCK)

    def of(name: str) -> Format:
        is_listed_too = any(pattern.match(name) for pattern in patterns)
        return quantised if ".mlp.experts." in name and not is_listed_too else DENSE

    return Formats(of=of, unit=quantised.unit)


# ---- compressed-tensors

MXFP4, NVFP4 = "mxfp4-pack-quantized", "nvfp4-pack-quantized"
COMPRESSED = {
    MXFP4: Fp4(block=mx.BLOCK),
    NVFP4: Fp4(block=16, factor_end="weight_global_scale", divides=True, input_end="input_global_scale"),
}


# ---- NVIDIA's ModelOpt

MODELOPT = "NVFP4", "W4A16_NVFP4"


def modelopt(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a ModelOpt checkpoint of its `quantization_config` or hf_quant_config.json."""
    inner = settings.get("quantization")
    settings = inner if isinstance(inner, Mapping) else settings
    one_of(settings, "quant_algo", MODELOPT, None)
    one_of(settings, "group_size", (16,), 16)
    ignored = names(settings, "exclude_modules", "ignore")
    quantised = Fp4(
        block=16, codes_end="weight", scales_end="weight_scale", factor_end="weight_scale_2", input_end="input_scale"
    )
    return Formats(of=_unless(ignored, quantised), unit=quantised.unit, ignored=(".k_scale", ".v_scale"))


def _unless(ignored: tuple[str, ...], quantised: Format) -> Callable[[str], Format]:
    patterns = [re.compile(fnmatch.translate(name)) for name in ignored]

    def of(name: str) -> Format:
        is_dense = never_quantised(name) or name == "lm_head" or is_listed(name, ignored)
        return DENSE if is_dense or any(pattern.match(name) for pattern in patterns) else quantised

    return of
