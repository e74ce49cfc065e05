"""FP8 (e4m3) values with a scale for each block of rows and columns, for each row, or for each projection.

Activations stay in the model's dtype: a product multiplies by the dequantised weight.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Format, Formats, Matrix, Part

from .dense import DENSE
from .laid_out import lay_out_bytes, packing_of, values_of, warn_unpacked
from .quantised import ONE_EACH, SINGLE, Pick, Quantised, is_listed, names, never_quantised, one_of, setting

CODES = torch.float8_e4m3fn
SPREAD = 8.0  # standard deviation of random codes: far below the largest, 448, and far above the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8(Quantised):
    """FP8 weights [N, K] and their scales.

    kind: what shares a scale: a "block" of rows and columns, a "row", or a projection ("matrix"). Scales in memory: for
    blocks [rows of blocks, columns of blocks], where each projection begins a new row of blocks; else [N]. value =
    weight * scale in fp32, rounded to the model's dtype. end: how the names of scales end in the checkpoint.
    """

    end: str
    kind: Literal["block", "row", "matrix"]
    block: tuple[int, int] = (1, 1)

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return Unit(*self.block) if self.kind == "block" else Unit()

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        lead, (rows, columns) = matrix.lead, matrix.shape[-2:]
        count = self.part_starts(matrix, self._rows_per_scale)[1]
        shape = (count, -(-columns // self.block[1])) if self.kind == "block" else (rows,)
        shape = (count,) if self.kind == "matrix" else shape
        return {
            "weight": torch.empty(matrix.shape, dtype=CODES),
            "scales": torch.empty(*lead, *shape, dtype=torch.float32),
            "input_scales": torch.empty(*lead, self.part_starts(matrix, ONE_EACH)[1], dtype=torch.float32),
        }

    @property
    def _rows_per_scale(self) -> int:
        return {"block": self.block[0], "row": 1, "matrix": ONE_EACH}[self.kind]

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        dims = self.rows_of(matrix, part), self.columns_of(part)
        yield "weight", self.destination(matrix.weight, part, *dims, dtype=CODES)
        rows = self.rows_of(matrix, part, self._rows_per_scale)
        if self.kind == "block":
            columns, also = self.columns_of(part, self.block[1]), (torch.float8_e8m0fnu,)
            yield self.end, self.destination(matrix.scales, part, rows, columns, also=also)
        elif self.kind == "row":
            yield self.end, self.destination(matrix.scales.unsqueeze(-1), part, rows, SINGLE)
        else:
            yield self.end, self.destination(matrix.scales, part, rows)
        # The scale of static activation quantisation is read and not used: activations are not quantised.
        number = self.rows_of(matrix, part, ONE_EACH)
        yield "input_scale", self.destination(matrix.input_scales, part, number, default=1)

    def finish(self, matrix: Any) -> None:
        parameters = {"weight": matrix.weight.data, "scales": matrix.scales.data}
        first, parts = self.part_starts(matrix, self._rows_per_scale)[0], matrix.entry_parts
        if self.kind == "matrix":
            parameters["scales"] = self.scales_by_row(matrix, matrix.scales)
        # A projection that does not begin at a multiple of the block's rows needs an index of its rows of scales.
        if self.kind == "block" and any(part.first != first[part.first] * self.block[0] for part in parts):
            parameters["scale_rows"] = self._scale_rows(matrix)
        if (reason := self._lay_out_for_kernels(matrix, **parameters)) is not None:
            warn_unpacked(matrix.weight.device, "FP8 weights", reason)
            matrix.replace(**parameters)

    def _lay_out_for_kernels(
        self, matrix: Any, weight: Tensor, scales: Tensor, scale_rows: Tensor | None = None
    ) -> str | None:
        """Rearrange the weight for the device's kernels; returns None, or the reason that they cannot read it."""
        if self.kind != "block":
            return lay_out_bytes(matrix, weight, scales.unsqueeze(-1))
        if scale_rows is None:
            return lay_out_bytes(matrix, weight, scales, rows=self.block[0], columns=self.block[1])
        return lay_out_bytes(matrix, weight, scales.index_select(-2, scale_rows), columns=self.block[1])

    def _scale_rows(self, matrix: Any) -> Tensor:
        """Return for each row of the matrix its row of scales, [N]; needed where a projection ends within a block."""
        first, scale_rows = self.part_starts(matrix, self.block[0])[0], torch.zeros(matrix.shape[-2], dtype=torch.int32)
        for part in matrix.entry_parts:
            rows = self.rows_of(matrix, part).place
            places = torch.arange(rows.stop - rows.start, dtype=torch.int32) // self.block[0]
            scale_rows[rows] = places + first[part.first]
        return scale_rows.to(matrix.weight.device)

    def values_of(self, matrix: Any, pick: Pick) -> Tensor:
        if packing_of(matrix) is not None:
            return values_of(matrix, pick)
        # As bytes, because not every device can index fp8.
        codes = matrix.weight.view(torch.uint8)[pick].view(CODES).float()
        if self.kind != "block":
            return (codes * matrix.scales[pick].unsqueeze(-1)).to(matrix.dtype)
        rows = getattr(matrix, "scale_rows", None)
        if rows is None:
            rows = torch.arange(matrix.shape[-2], device=codes.device) // self.block[0]
        scales = matrix.scales[rows[pick]] if len(matrix.shape) == 2 else matrix.scales[pick][:, rows.long()]
        column_scales = scales.repeat_interleave(self.block[1], -1)[..., : matrix.shape[-1]]
        return (codes * column_scales).to(matrix.dtype)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        codes = torch.empty(matrix.shape, dtype=torch.bfloat16, device=generator.device)
        matrix.weight.copy_(codes.normal_(std=SPREAD, generator=generator))
        matrix.scales.fill_(matrix.shape[-1] ** -0.5 / SPREAD)
        self.finish(matrix)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of an FP8 checkpoint of its `quantization_config`."""
    one_of(settings, "fmt", ("e4m3",), "e4m3")
    one_of(settings, "activation_scheme", ("dynamic", "static"), "dynamic")
    one_of(settings, "scale_fmt", ("ue8m0", "float"), "float")
    for name in ("expert_dtype", "store_dtype"):
        if settings.get(name) not in (None, "fp8"):
            raise ValueError(f"quantization_config: {name} is {settings[name]!r}; only FP8 is supported")
    block = setting(settings, list, None, "weight_block_size")
    quantised = Fp8(end="weight_scale", kind="matrix") if block is None else blocks(block, "weight_scale_inv")
    unconverted = names(settings, "modules_to_not_convert", "ignored_layers")

    def of(name: str) -> Format:
        return DENSE if never_quantised(name) or name == "lm_head" or is_listed(name, unconverted) else quantised

    return Formats(of=of, unit=quantised.unit)


def blocks(size: Any, end: str) -> Fp8:
    """Return the format with a scale per block; size: rows and columns of a block, as in config.json."""
    is_size = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if not is_size:
        raise ValueError(f"quantization_config: blocks of {size!r}, expected rows and columns such as [128, 128]")
    return Fp8(end=end, kind="block", block=(size[0], size[1]))
