"""Rounds weights to fewer bits, to the tensors that a checkpoint stores."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from whorl.nn.weight import Matrix
from whorl.ops.latent.codes import power_above

from .packed import packed

# The scales that are tried map these shares of the largest magnitude to the largest code.
CLIPS = tuple(1 - step / 40 for step in range(17))
GROUPS = (128, 64, 32, 16, 8)
MOST_VALUES = 1 << 18  # values rounded at a time, few enough for a CPU's caches

Ends = dict[str, Tensor]  # tensors to store, by the ends of their names, such as "weight_scale"
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


class Rounder(ABC):
    """Rounds matrices as they are read."""

    takes_patterns: ClassVar[bool] = False  # modules that stay unquantised may be given as patterns, not only by name
    rounds_head: ClassVar[bool] = False
    rounds_embedding: ClassVar[bool] = False  # also where it is not the head; lookups then read what it is rounded to

    @abstractmethod
    def settings(self, left: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json. left: modules that stay unquantised, besides those that
        always do."""

    @abstractmethod
    def shapes(self, rows: int, columns: int) -> Shapes:
        """Return shape and dtype of a projection's tensors, by the ends of their names; None: the weight's dtype."""

    @abstractmethod
    def rows_at_once(self, columns: int) -> int:
        """Return how many rows are rounded at a time."""

    @abstractmethod
    def round(self, weight: Tensor) -> tuple[Ends, Tensor, Tensor]:
        """Return the tensors to store of some rows, and the sums of squares of errors and of weights."""

    def apply(self, weight: Tensor) -> tuple[Ends, float, float]:
        """Round a weight; returns the tensors to store and the sums of squares of errors and of weights."""
        pieces = weight.split(self.rows_at_once(weight.shape[1]))
        if not all(bool(piece.float().isfinite().all()) for piece in pieces):
            raise ValueError("has an infinity or NaN, which no scale can represent")
        parts = [self.round(piece) for piece in pieces]
        ends = {end: torch.cat([part[0][end] for part in parts]) for end in parts[0][0]}
        return ends, sum(float(part[1]) for part in parts), sum(float(part[2]) for part in parts)

    @staticmethod  # noqa: B027 (most are for all devices)
    def check_device(device: str) -> None:
        """Raise ValueError if weights that are rounded while they are read cannot be used on this device."""

    @staticmethod
    def unfit(columns: Mapping[str, int]) -> list[str]:
        """Return the matrices that cannot be rounded; columns: the number of columns of each matrix, by name.

        Raises ValueError if none can be.
        """
        return []

    @staticmethod
    def describe(matrices: Mapping[str, Matrix]) -> str | None:
        """Return a line that says which matrices of a loaded model, by name, are rounded; None: nothing to say."""
        return None


# ---- schemes of compressed-tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A way to round weights. stored: compressed-tensors' name of the layout; largest: the largest code.

    has_groups: columns of a row share a scale in groups, and the codes are packed into words; else a row has one scale.
    """

    stored: str
    largest: float
    weights: Mapping[str, Any]  # `weights` of a config group in config.json
    inputs: Mapping[str, Any] | None  # `input_activations` of it
    codes: Callable[[Tensor], Tensor]  # rounds scaled values to codes, as floats
    kind: torch.dtype  # dtype of the stored codes
    has_groups: bool = False


@dataclass(frozen=True, slots=True)
class Rounding(Rounder):
    """Rounds matrices by a scheme to nearest, with the scale that gives the least error, to the tensors that
    compressed-tensors stores. Smaller scales are tried, too, which clip the largest values.

    group: columns per scale, None: one scale per row. Scales have the weight's dtype.
    """

    scheme: Scheme
    group: int | None
    takes_patterns: ClassVar[bool] = True

    def settings(self, left: list[str]) -> dict[str, Any]:
        weights = {**self.scheme.weights, **({} if self.group is None else {"group_size": self.group})}
        described = {"targets": ["Linear"], "weights": weights, "input_activations": self.scheme.inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": self.scheme.stored,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**described, "output_activations": None}},
            "ignore": left,
            "kv_cache_scheme": None,
        }

    def shapes(self, rows: int, columns: int) -> Shapes:
        if self.group is None:
            return {"weight": ((rows, columns), self.scheme.kind), "weight_scale": ((rows, 1), None)}
        return {
            "weight_packed": ((rows, -(-columns // 8)), self.scheme.kind),
            "weight_scale": ((rows, columns // self.group), None),
            "weight_shape": ((2,), torch.int64),
        }

    def rows_at_once(self, columns: int) -> int:
        return max(MOST_VALUES // columns, 1)

    def apply(self, weight: Tensor) -> tuple[Ends, float, float]:
        ends, error, square_sum = super(Rounding, self).apply(weight)  # by name: slots make a new class
        return ends | ({} if self.group is None else {"weight_shape": torch.tensor(weight.shape)}), error, square_sum

    def round(self, weight: Tensor) -> tuple[Ends, Tensor, Tensor]:
        wide = weight.float().unflatten(-1, (-1, self.group or weight.shape[1]))
        largest, dtype = wide.abs().amax(-1, keepdim=True), weight.dtype
        least_error = torch.full_like(largest, torch.inf)
        codes, scales = torch.zeros_like(wide), torch.ones_like(largest, dtype=dtype)
        for clip in CLIPS:
            scale = _above_zero((largest * clip / self.scheme.largest).to(dtype))
            candidate = self.scheme.codes(wide / scale.float())
            error = (candidate * scale.float() - wide).square().sum(-1, keepdim=True)
            is_better = error < least_error
            least_error = torch.where(is_better, error, least_error)
            codes, scales = torch.where(is_better, candidate, codes), torch.where(is_better, scale, scales)
        stored = codes.flatten(-2)
        if self.group is None:
            ends = {"weight": stored.to(self.scheme.kind)}
        else:
            ends = {"weight_packed": packed(stored.to(torch.int8) + 8, 4)}
        sums = least_error.double().sum(), wide.double().square().sum()
        return {**ends, "weight_scale": scales.squeeze(-1)}, *sums


def _above_zero(scales: Tensor) -> Tensor:
    """Return the scales, with 1 where one is 0: its values are all zeros, or too small for the dtype."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _integers(low: int, high: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.round().clamp(low, high)


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _weights(bits: int, kind: str, strategy: str) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}


def _tokens(kind: str) -> dict[str, Any]:
    return {**_weights(8, kind, "token"), "dynamic": True}


SCHEMES = {
    "w4a16": Scheme(
        stored="pack-quantized",
        largest=7,
        weights=_weights(4, "int", "group"),
        inputs=None,
        codes=_integers(-8, 7),
        kind=torch.int32,
        has_groups=True,
    ),
    "w8a8": Scheme(
        stored="int-quantized",
        largest=127,
        weights=_weights(8, "int", "channel"),
        inputs=_tokens("int"),
        codes=_integers(-127, 127),
        kind=torch.int8,
    ),
    "fp8": Scheme(
        stored="float-quantized",
        largest=448,
        weights=_weights(8, "float", "channel"),
        inputs=_tokens("float"),
        codes=_fp8,
        kind=torch.float8_e4m3fn,
    ),
}


def group_size(columns: Mapping[str, int]) -> int:
    """Return the largest group size that divides the columns of every matrix; columns: by name."""
    for group in GROUPS:
        if not any(count % group for count in columns.values()):
            return group
    name, count = next((n, c) for n, c in columns.items() if c % GROUPS[-1])
    raise ValueError(
        f"{name} has {count} columns, expected a multiple of {GROUPS[-1]}; leave it unquantised with --ignore"
    )


# ---- FP8 as DeepSeek publishes its own weights


BLOCK = 128  # rows and columns that share a scale
LARGEST = 448.0
MOST_IN_BLOCKS = 1 << 22  # values rounded at a time


@dataclass(frozen=True, slots=True)
class BlockRounding(Rounder):
    """Rounds matrices to e4m3 codes with a scale for every block of 128 rows by 128 columns.

    has_powers: scales are powers of two ("ue8m0", as in V3.1 and V3.2); otherwise the largest magnitude / 448.
    """

    has_powers: bool

    def settings(self, left: list[str]) -> dict[str, Any]:
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            **({"scale_fmt": "ue8m0"} if self.has_powers else {}),
            "weight_block_size": [BLOCK, BLOCK],
            **({"modules_to_not_convert": left} if left else {}),
        }

    def shapes(self, rows: int, columns: int) -> Shapes:
        grid = -(-rows // BLOCK), -(-columns // BLOCK)  # the last block of a row or column may be partial
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale_inv": (grid, torch.float32)}

    def rows_at_once(self, columns: int) -> int:
        return max(MOST_IN_BLOCKS // (columns * BLOCK), 1) * BLOCK

    def round(self, weight: Tensor) -> tuple[Ends, Tensor, Tensor]:
        (rows, columns), wide = weight.shape, weight.float()
        blocks = pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = _above_zero(blocks.abs().amax((1, 3)) / LARGEST)
        scales = power_above(scales) if self.has_powers else scales
        value_scales = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        codes = (wide / value_scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        error = (codes.float() * value_scales - wide).double().square().sum()
        return {"weight": codes, "weight_scale_inv": scales}, error, wide.double().square().sum()
