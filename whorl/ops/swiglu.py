"""SwiGLU: the gated activation of every model here."""

import torch
from torch import Tensor

from ._op import Values, operator, widen


def _check(x: Tensor, interleaved: bool) -> None:
    if not x.is_floating_point():
        raise ValueError(f"swiglu: x is {x.dtype}, expected a floating point dtype")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"swiglu: x is {list(x.shape)}, expected an even last dim (gate and up)")


def _check_backward(dy: Tensor, x: Tensor, interleaved: bool) -> None:
    _check(x, interleaved)
    if dy.shape != (*x.shape[:-1], x.shape[-1] // 2):
        raise ValueError(f"swiglu_backward: dy is {list(dy.shape)}, expected half the last dim of x {list(x.shape)}")


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, -1)
    return gate, up


def _row_wise(values: Values) -> list[object]:
    from torch.distributed.tensor import Replicate, Shard

    tensors = [n for n in ("dy", "x") if n in values]
    places = [Replicate(), *(Shard(i) for i in range(len(values["x"].shape) - 1))]
    return [([p], dict.fromkeys(tensors, p)) for p in places]


@operator(check=_check, sharding=_row_wise)
def swiglu(x: Tensor, *, interleaved: bool = False) -> Tensor:
    """y = silu(gate) * up.

    x: [..., 2F] bf16, fp16 or fp32: gate is the first half and up the second, or, `interleaved`, gate the even and up
    the odd channels (gpt-oss). y: [..., F], x's dtype, contiguous. fp32 inside, one rounding. Differentiable.
    """
    gate, up = _split(widen(x), interleaved)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype).contiguous()


@operator(check=_check_backward, sharding=_row_wise)
def swiglu_backward(dy: Tensor, x: Tensor, *, interleaved: bool = False) -> Tensor:
    """Gradient of `swiglu` with respect to x, in fp32, rounded once."""
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
