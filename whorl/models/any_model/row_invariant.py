"""Functions of torch whose bits may depend on the other tokens of a call, and forms of them whose bits do not.

A module of transformers that calls one of them runs in `RowInvariant`, which calls the form instead. The sigmoids and
tanh are replaced on a CPU only: there their bits depend on where an element lies in memory.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from whorl import ops
from whorl.device import HOST
from whorl.ops.attention.tiles import tanh

Function = Callable[..., Tensor]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = ops.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def _matmul(x: Tensor, other: Tensor) -> Tensor:
    return _linear(x, other.t().contiguous()) if other.dim() == 2 else torch.matmul(x, other)


def _addmm(bias: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return _linear(x, other.t().contiguous(), bias)


def _wide(form: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the form computed in fp32 at least, and rounded once."""
    return lambda x: form(x if x.dtype in (torch.float32, torch.float64) else x.float()).to(x.dtype)


_sigmoid = _wide(lambda x: 1 / (1 + torch.exp(-x)))
_tanh = _wide(tanh)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return _wide(lambda x: x / (1 + torch.exp(-x)))(x)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return _wide(lambda x: 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))(x)
    return _wide(lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))))(x)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = _wide(lambda x: torch.where(x * beta > threshold, x, torch.log1p(torch.exp(x * beta)) / beta))
    return scaled(x)


PRODUCTS: dict[Any, Function] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
}
_SIGMOIDS: dict[Any, Function] = dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid), _sigmoid)
_TANHS: dict[Any, Function] = dict.fromkeys((torch.tanh, Tensor.tanh, F.tanh), _tanh)
ELEMENTWISE: dict[Any, Function] = {**_SIGMOIDS, **_TANHS, F.silu: _silu, F.gelu: _gelu, F.softplus: _softplus}
# Sums, whose order a library may choose by the number of rows.
SUMS = {torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.var, Tensor.var, torch.norm, Tensor.norm, F.rms_norm}
SUMS |= {torch.bmm, Tensor.bmm, torch.baddbmm, torch.einsum, torch.logsumexp, Tensor.logsumexp}
# What mixes tokens without asking for attention.
MIXERS = {F.scaled_dot_product_attention, F.conv1d, torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod}
MIXERS |= {torch.conv1d, torch.fft.fft, torch.fft.rfft}


class RowInvariant(TorchFunctionMode):
    """Within it torch's functions are replaced by their row-invariant forms."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        form = PRODUCTS.get(func)
        if form is None and args and isinstance(args[0], Tensor) and args[0].device.type == HOST:
            form = ELEMENTWISE.get(func)
        return (form or func)(*args, **kwargs or {})


class Guarded:
    """Mixed into a module's class: its forward runs in `RowInvariant`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with RowInvariant():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def guard(module: Any) -> None:
    """Let the forward of a module run in `RowInvariant`."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (Guarded, kind), {"__module__": kind.__module__})
