"""Storage formats of quantised values: the dtype of the codes, and the largest code."""

from typing import Any

import torch
from torch import Tensor

FORMATS: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def code_constants(cache: Tensor) -> dict[str, Any]:
    """Return the constexpr arguments, by name, of a kernel that writes codes of the cache's dtype."""
    largest = next(largest for kind, largest in FORMATS.values() if kind == cache.dtype)
    return {"LARGEST": largest, "IS_INTEGER": cache.dtype == torch.int8}
