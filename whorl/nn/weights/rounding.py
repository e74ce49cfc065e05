"""Rounds weights to fewer bits: to nearest, with the scale that gives the least error.

Smaller scales are tried, too, which clip the largest values. The result is the tensors that compressed-tensors stores,
by the ends of their names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .packed import packed

# The scales that are tried map these shares of the largest magnitude to the largest code.
CLIPS = tuple(1 - step / 40 for step in range(17))
GROUPS = (128, 64, 32, 16, 8)
MOST_VALUES = 1 << 18  # values rounded at a time, few enough for a CPU's caches

Ends = dict[str, Tensor]  # tensors to store, by the ends of their names, such as "weight_scale"


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
class Rounding:
    """Rounds matrices by a scheme; group: columns per scale, None: one scale per row."""

    scheme: Scheme
    group: int | None
    takes_patterns: ClassVar[bool] = True  # modules that stay unquantised may be given as patterns

    def settings(self, ignore: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""
        weights = {**self.scheme.weights, **({} if self.group is None else {"group_size": self.group})}
        described = {"targets": ["Linear"], "weights": weights, "input_activations": self.scheme.inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": self.scheme.stored,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**described, "output_activations": None}},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Return shape and dtype of a projection's tensors, by the ends of their names; None: the weight's dtype."""
        if self.group is None:
            return {"weight": ((rows, columns), self.scheme.kind), "weight_scale": ((rows, 1), None)}
        return {
            "weight_packed": ((rows, -(-columns // 8)), self.scheme.kind),
            "weight_scale": ((rows, columns // self.group), None),
            "weight_shape": ((2,), torch.int64),
        }

    def apply(self, weight: Tensor) -> tuple[Ends, float, float]:
        """Round a weight; returns the tensors to store and the sums of squares of errors and of weights.

        Scales have the weight's dtype.
        """
        rows, columns = weight.shape
        step = max(MOST_VALUES // columns, 1)
        parts = [self._round(part, self.group or columns) for part in weight.split(step)]
        codes, scales = (torch.cat([part[i] for part in parts]) for i in range(2))
        error, square_sum = (sum(float(part[i]) for part in parts) for i in (2, 3))
        if self.group is None:
            return {"weight": codes, "weight_scale": scales}, error, square_sum
        shape = torch.tensor([rows, columns])
        return {"weight_packed": codes, "weight_scale": scales, "weight_shape": shape}, error, square_sum

    def _round(self, weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the codes of some rows as they are stored, their scales, and the two sums of squares."""
        wide = weight.float().unflatten(-1, (-1, group))
        if not bool(wide.isfinite().all()):
            raise ValueError("has an infinity or NaN, which no scale can represent")
        largest, dtype = wide.abs().amax(-1, keepdim=True), weight.dtype
        least_error = torch.full_like(largest, torch.inf)
        codes, scales = torch.zeros_like(wide), torch.ones_like(largest, dtype=dtype)
        for clip in CLIPS:
            scale = (largest * clip / self.scheme.largest).to(dtype)
            scale = torch.where(
                scale > 0, scale, torch.ones_like(scale)
            )  # the group is all zeros, or too small for the dtype
            candidate = self.scheme.codes(wide / scale.float())
            error = (candidate * scale.float() - wide).square().sum(-1, keepdim=True)
            is_better = error < least_error
            least_error = torch.where(is_better, error, least_error)
            codes, scales = torch.where(is_better, candidate, codes), torch.where(is_better, scale, scales)
        stored = codes.flatten(-2)
        stored = stored.to(self.scheme.kind) if self.group is None else packed(stored.to(torch.int8) + 8, 4)
        return stored, scales.squeeze(-1), least_error.double().sum(), wide.double().square().sum()


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
