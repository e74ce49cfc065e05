"""SwiGLU, the gated activation of Llama, Qwen, DeepSeek and most other models."""

import torch
from torch import Tensor

from whorl.contracts import swiglu_limit

from . import _torch_npu
from ._check import check_like
from ._draw import Draw, Sizes
from ._op import Values, narrow, operator, widen
from ._torch_npu import dtype_name


def _check(x: Tensor, interleaved: bool, name: str = "swiglu") -> None:
    if not x.is_floating_point():
        raise ValueError(f"{name}: x is {x.dtype}, expected a floating point dtype")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{name}: x is {list(x.shape)}, expected an even last dim (gate and up)")


def _check_backward(dy: Tensor, x: Tensor, interleaved: bool) -> None:
    _check(x, interleaved, "swiglu_backward")
    check_like("swiglu_backward", "dy", dy, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of gate and up in x [..., 2F], each [..., F]."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, -1)
    return gate, up


def row_wise(values: Values) -> list[object]:
    """Return the DTensor rule of `swiglu`, `geglu` and their backwards: any dim but the last may be sharded."""
    from torch.distributed.tensor import Replicate, Shard

    tensors = [n for n in ("dy", "x") if n in values]
    places = [Replicate(), *(Shard(i) for i in range(len(values["x"].shape) - 1))]
    return [([p], dict.fromkeys(tensors, p)) for p in places]


@operator(check=_check, sharding=row_wise)
def swiglu(x: Tensor, *, interleaved: bool = False) -> Tensor:
    """y = silu(gate) * up.

    x: [..., 2F] bf16, fp16 or fp32, gate in the first half and up in the second or, with `interleaved`, gate in the
    even and up in the odd channels (gpt-oss); returns y: [..., F] in x's dtype, contiguous. Computed in fp32, rounded
    once. Differentiable. Raises ValueError when the last dim is odd.

        y = ops.swiglu(ops.linear(x, gate_up))
    """
    gate, up = _split(widen(x), interleaved)
    # Not torch.sigmoid: on a CPU its bits depend on where an element lies in memory, and a row's bits must not.
    return narrow(gate / (1 + torch.exp(-gate)) * up, x.dtype).contiguous()


@operator(check=_check_backward, sharding=row_wise)
def swiglu_backward(dy: Tensor, x: Tensor, *, interleaved: bool = False) -> Tensor:
    """Gradient of `swiglu` with respect to x, computed in fp32 and rounded once. dy: [..., F]; returns dx like x."""
    gate, up = _split(widen(x), interleaved)
    wide, sigmoid = widen(dy), torch.sigmoid(gate)
    dgate = wide * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = wide * gate * sigmoid
    dx = torch.stack((dgate, dup), -1).flatten(-2) if interleaved else torch.cat((dgate, dup), -1)
    return dx.to(x.dtype)


@swiglu.gradient(save=("x",))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dx = swiglu_backward(grads[0], args["x"], interleaved=args["interleaved"], backend=args["backend"])
    return {"x": dx}


def _triton_reason(x: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if x.dtype == torch.float64 else None


swiglu.impl("triton", "swiglu_triton:forward", accepts=_triton_reason)
swiglu_backward.impl("triton", "swiglu_triton:backward", accepts=_triton_reason)


def _npu_reason(x: Tensor, interleaved: bool, **_: object) -> str | None:
    if interleaved:
        return "npu_swiglu takes gate and up as halves, not interleaved"
    return swiglu_limit(shape=x.shape, dtype=dtype_name(x))


@swiglu.impl("torch_npu", accepts=_npu_reason)
def _(x, interleaved):  # type: ignore[no-untyped-def]
    return _torch_npu.call("npu_swiglu", input=x.contiguous(), dim=-1)


@swiglu_backward.impl("torch_npu", accepts=_npu_reason)
def _(dy, x, interleaved):  # type: ignore[no-untyped-def]
    return torch.ops.npu.npu_swiglu_backward(dy.contiguous(), x.contiguous(), -1)


_CASES: list[Values] = [
    {"shape": (1, 2)},
    {"shape": (17, 128), "scale": 0.01},
    {"shape": (3, 5, 194), "interleaved": True},
    {"shape": (5, 4098)},
    {"shape": (2, 4100), "interleaved": True},
    {"shape": (0, 64)},
    {"shape": (6, 7, 64), "sliced": True},
    {"shape": (6, 70), "sliced": True, "interleaved": True},
]
_BENCH: list[Values] = [{"shape": (16384, 2 * 8192)}, {"shape": (4096, 2 * 18432)}, {"shape": (1, 2 * 12288)}]


def _make(draw: Draw, shape: Sizes, interleaved: bool = False) -> Values:
    return {"x": draw.scaled(*shape, gap=6), "interleaved": interleaved}


def _make_backward(draw: Draw, shape: Sizes, interleaved: bool = False) -> Values:
    args = _make(draw, shape, interleaved)
    return {"dy": torch.randn(*shape[:-1], shape[-1] // 2, **draw.kind), **args}


swiglu.inputs(cases=_CASES, bench=_BENCH)(_make)
swiglu_backward.inputs(cases=_CASES, bench=_BENCH[:2])(_make_backward)
