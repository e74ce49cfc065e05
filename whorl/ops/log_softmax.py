"""Log-probabilities: of every token of the vocabulary for samplers, or of one per row for trainers, with equal bits."""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from . import _torch_npu
from ._draw import Draw
from ._gradient import Arguments
from ._op import Values, narrow, operator, widen


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-probabilities of logits in `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point or _wide(dtype) != y.dtype:
        raise ValueError(f"log_softmax_backward: dtype is {dtype}, which has no log-probabilities in {y.dtype}")


@operator(sharding="rows")
def log_softmax(logits: Annotated[Tensor, "[..., V>0] float"]) -> Annotated[Tensor, "[..., V] fp32"]:
    """y = logits - log(sum(exp(logits))), over the last dim.

    Returns y contiguous. It is computed in fp32 as (logits - top) - log(sum), where top is the row's highest logit and
    sum is that of exp(logits - top). The bits of a row depend on that row alone, not on the number of rows nor on their
    strides. A logit of minus infinity is an absent token: y is minus infinity, its gradient is 0, and the gradient that
    reaches it is ignored. In a row with plus infinity or NaN the other entries are NaN. Differentiable; it saves y.

        logprobs = ops.log_softmax(logits)
    """
    # torch.log_softmax sums each row in one thread, in an order that V alone decides; torch.sum would share a single
    # row among threads.
    return _with_absent(logits, torch.log_softmax)


def _with_absent(logits: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply a log_softmax: torch.where stops the gradient at absent tokens, and a row of them gives no NaN."""
    wide = widen(logits).contiguous()
    return torch.where(wide == -torch.inf, wide.detach(), function(wide, -1))


@operator(check=_check_backward, sharding="rows")
def log_softmax_backward(
    dy: Annotated[Tensor, "[..., V] y"], y: Annotated[Tensor, "[..., V>0] fp32 or fp64"], *, dtype: torch.dtype
) -> Annotated[Tensor, "[..., V] dtype"]:
    """Gradient of `log_softmax` with respect to logits, from its result y: dy - exp(y) * sum(dy), in fp32.

    dtype: that of the logits, to which the gradient is rounded once.
    """
    is_absent = y == -torch.inf
    present = dy.masked_fill(is_absent, 0)
    dx = (present - torch.exp(y) * present.sum(-1, keepdim=True)).masked_fill(is_absent, 0)
    return narrow(dx, y.dtype if y.dtype == torch.float64 else dtype).contiguous()


@log_softmax.gradient(save_outputs=(0,))
def _(grads: tuple[Tensor, ...], args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dtype = args.dtypes["logits"]
    return {"logits": log_softmax_backward(grads[0], outputs[0], dtype=dtype, backend=args["backend"])}


@operator(sharding="rows")
def token_logprobs(
    logits: Annotated[Tensor, "[..., V>0] float"], ids: Annotated[Tensor, "[...] int, from 0 to V - 1"]
) -> Annotated[Tensor, "[...] fp32"]:
    """The entry of `log_softmax` at one token of each row: y[i] = log_softmax(logits)[i, ids[i]]; the bits are equal.

    Differentiable in logits. It saves logits and ids only, and the kernels allocate no [..., V] tensor except the
    gradient, in the dtype of logits. An id outside [0, V) raises ValueError on the CPU; elsewhere its row is NaN.

        loss = -ops.token_logprobs(logits, targets).mean()
    """
    return _pick(log_softmax.reference(logits), ids)


def _pick(logprobs: Tensor, ids: Tensor) -> Tensor:
    return logprobs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


@operator(sharding="rows")
def token_logprobs_backward(
    dy: Annotated[Tensor, "[...] fp32"],
    logits: Annotated[Tensor, "[..., V>0] float"],
    ids: Annotated[Tensor, "[...] int, from 0 to V - 1"],
) -> Annotated[Tensor, "[..., V] logits"]:
    """Gradient of `token_logprobs` with respect to logits: (1 at the id - softmax) * dy, in fp32, rounded once.

    Returns dx contiguous. The bits are equal to those of `log_softmax_backward` of a dy that is 0 except at the id. The
    row's sum is recomputed from logits, which are read anyway.
    """
    return _spread(dy, log_softmax.reference(logits), logits, ids)


def _spread(dy: Tensor, y: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    spread = torch.zeros_like(y).scatter(-1, ids.long().unsqueeze(-1), dy.unsqueeze(-1))
    return log_softmax_backward.reference(spread, y, dtype=logits.dtype)  # type: ignore[no-any-return]


@token_logprobs.gradient(save=("logits", "ids"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    return {"logits": token_logprobs_backward(grads[0], args["logits"], args["ids"], backend=args["backend"])}


log_softmax.impl("triton", "log_softmax_triton:forward")
log_softmax_backward.impl("triton", "log_softmax_triton:backward")
token_logprobs.impl("triton", "log_softmax_triton:token_forward")
token_logprobs_backward.impl("triton", "log_softmax_triton:token_backward")


log_softmax.impl("cpp", "whorl.ops.cpu.log_softmax:log_softmax")
token_logprobs.impl("cpp", "whorl.ops.cpu.log_softmax:token_logprobs")


# torch_npu has no operator of its own for this; it implements torch's log_softmax on an NPU. AscendC has one.
@log_softmax.impl("torch_npu")
def _npu(logits: Tensor) -> Tensor:
    return _with_absent(logits, _torch_npu.batch_invariant("npu_log_softmax") or torch.log_softmax)


@token_logprobs.impl("torch_npu")
def _(logits: Tensor, ids: Tensor) -> Tensor:
    return _pick(_npu(logits), ids)


for _op in (log_softmax_backward, token_logprobs_backward):
    _op.impl("torch_npu")(_op.reference)
log_softmax_backward.impl("cpp", takes_fp64=False)(log_softmax_backward.reference)


@token_logprobs_backward.impl("cpp", takes_fp64=False)
def _(dy: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    from .cpu.log_softmax import log_softmax as forward

    return _spread(dy, forward(logits), logits, ids)


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (7, 129), "scale": 0.01},
    {"shape": (2, 3, 70)},
    {"shape": (2, 9001), "scale": 3.0},
    {"shape": (0, 64)},
    {"shape": (2, 3, 40), "sliced": 3},
    {"shape": (3, 1)},
    {"shape": (3, 200), "scale": 8.0, "masked": True},
]
_BENCH: list[Values] = [{"shape": shape} for shape in ((4096, 151936), (64, 151936), (1, 151936))]


def _make(draw: Draw, shape: tuple[int, ...], masked: bool = False) -> Values:
    """masked: every third logit is minus infinity."""
    logits = draw.scaled(*shape)
    if masked:
        logits[..., 1::3] = -torch.inf
    return {"logits": logits}


def _make_backward(draw: Draw, shape: tuple[int, ...], masked: bool = False) -> Values:
    y = log_softmax.reference(_make(draw, shape, masked)["logits"])
    return {"y": torch.cat((y, y[..., : draw.gap]), -1)[..., : shape[-1]], "dtype": draw.dtype}


log_softmax.inputs(cases=_CASES, bench=_BENCH)(_make)
log_softmax_backward.inputs(cases=_CASES, bench=_BENCH[:1])(_make_backward)
token_logprobs.inputs(cases=_CASES, bench=_BENCH)(_make)
token_logprobs_backward.inputs(cases=_CASES, bench=_BENCH[:1])(_make)
