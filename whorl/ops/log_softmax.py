"""Log-probabilities: of every token of the vocabulary for samplers, or of one per row for trainers, with equal bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import _torch_npu
from ._check import INTEGERS, check_like, check_range
from ._draw import Draw, Sizes
from ._gradient import Arguments
from ._op import Values, narrow, operator, widen


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-probabilities of logits in `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(logits: Tensor, name: str = "log_softmax") -> None:
    if not logits.is_floating_point() or logits.dtype.itemsize < 2:
        raise ValueError(f"{name}: logits is {logits.dtype}, expected bf16, fp16 or fp32")
    if logits.dim() == 0 or not logits.shape[-1]:
        raise ValueError(f"{name}: logits is {list(logits.shape)}, expected [..., V] with V > 0")


def _check_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> None:
    name = "log_softmax_backward"
    if y.dim() == 0 or not y.shape[-1] or y.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: y is {list(y.shape)} {y.dtype}, expected [..., V] fp32 with V > 0")
    check_like(name, "dy", dy, y.shape, y.dtype)
    if not dtype.is_floating_point or _wide(dtype) != y.dtype:
        raise ValueError(f"{name}: dtype is {dtype}, which has no log-probabilities in {y.dtype}")


def _check_token(logits: Tensor, ids: Tensor, name: str = "token_logprobs") -> None:
    _check(logits, name)
    if ids.shape != logits.shape[:-1] or ids.dtype not in INTEGERS:
        raise ValueError(
            f"{name}: ids is {list(ids.shape)} {ids.dtype}, expected {list(logits.shape[:-1])} int32 or int64: one for "
            "each row of logits"
        )
    check_range(name, "ids", ids, logits.shape[-1])


def _check_token_backward(dy: Tensor, logits: Tensor, ids: Tensor) -> None:
    _check_token(logits, ids, "token_logprobs_backward")
    check_like("token_logprobs_backward", "dy", dy, ids.shape, _wide(logits.dtype))


def _row_wise(values: Values) -> list[object]:
    from torch.distributed.tensor import Replicate, Shard

    tensors = [n for n in ("dy", "y", "logits", "ids") if n in values]
    rows = len(values["logits" if "logits" in values else "y"].shape) - 1
    return [([p], dict.fromkeys(tensors, p)) for p in (Replicate(), *(Shard(i) for i in range(rows)))]


@operator(check=_check, sharding=_row_wise)
def log_softmax(logits: Tensor) -> Tensor:
    """y = logits - log(sum(exp(logits))), over the last dim.

    logits: [..., V] bf16, fp16 or fp32; returns y: [..., V] fp32, contiguous. It is computed in fp32 as
    (logits - top) - log(sum), where top is the row's highest logit and sum is that of exp(logits - top). The bits of a
    row depend on that row alone, not on the number of rows nor on their strides. A logit of minus infinity is an absent
    token: y is minus infinity, its gradient is 0, and the gradient that reaches it is ignored. In a row with plus
    infinity or NaN the other entries are NaN. Differentiable; it saves y. Raises ValueError when V is 0 or logits are
    not floating point.

        logprobs = ops.log_softmax(logits)
    """
    # torch.log_softmax sums each row in one thread, in an order that V alone decides; torch.sum would share a single
    # row among threads.
    return _with_absent(logits, torch.log_softmax)


def _with_absent(logits: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply a log_softmax: torch.where stops the gradient at absent tokens, and a row of them gives no NaN."""
    wide = widen(logits).contiguous()
    return torch.where(wide == -torch.inf, wide.detach(), function(wide, -1))


@operator(check=_check_backward, sharding=_row_wise)
def log_softmax_backward(dy: Tensor, y: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Gradient of `log_softmax` with respect to logits, from its result y: dy - exp(y) * sum(dy), in fp32.

    dy, y: [..., V] fp32; returns dx: [..., V] in `dtype`, the dtype of the logits, rounded once.
    """
    is_absent = y == -torch.inf
    present = dy.masked_fill(is_absent, 0)
    dx = (present - torch.exp(y) * present.sum(-1, keepdim=True)).masked_fill(is_absent, 0)
    return narrow(dx, y.dtype if y.dtype == torch.float64 else dtype).contiguous()


@log_softmax.gradient(save_outputs=(0,))
def _(grads: tuple[Tensor, ...], args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dtype = args.dtypes["logits"]
    return {"logits": log_softmax_backward(grads[0], outputs[0], dtype=dtype, backend=args["backend"])}


@operator(check=_check_token, sharding=_row_wise)
def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """The entry of `log_softmax` at one token of each row: y[i] = log_softmax(logits)[i, ids[i]]; the bits are equal.

    logits: [..., V] bf16, fp16 or fp32; ids: [...] int32 or int64; returns y: [...] fp32. Differentiable in logits. It
    saves logits and ids only, and the kernels allocate no [..., V] tensor except the gradient, in the dtype of logits.
    An id outside [0, V) raises ValueError on the CPU; elsewhere its row is NaN.

        loss = -ops.token_logprobs(logits, targets).mean()
    """
    return _pick(log_softmax.reference(logits), ids)


def _pick(logprobs: Tensor, ids: Tensor) -> Tensor:
    return logprobs.gather(-1, ids.long().unsqueeze(-1)).squeeze(-1)


@operator(check=_check_token_backward, sharding=_row_wise)
def token_logprobs_backward(dy: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
    """Gradient of `token_logprobs` with respect to logits: (1 at the id - softmax) * dy, in fp32, rounded once.

    dy: [...] fp32; logits and ids are those of the forward; returns dx like logits, contiguous. The bits are equal to
    those of `log_softmax_backward` of a dy that is 0 except at the id. The row's sum is recomputed from logits, which
    are read anyway.
    """
    y = log_softmax.reference(logits)
    spread = torch.zeros_like(y).scatter(-1, ids.long().unsqueeze(-1), dy.unsqueeze(-1))
    return log_softmax_backward.reference(spread, y, dtype=logits.dtype)


@token_logprobs.gradient(save=("logits", "ids"))
def _(grads: tuple[Tensor, ...], args: Values, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    return {"logits": token_logprobs_backward(grads[0], args["logits"], args["ids"], backend=args["backend"])}


def _triton_reason(logits: Tensor, **_: object) -> str | None:
    return "computes in fp32, got torch.float64" if logits.dtype == torch.float64 else None


log_softmax.impl("triton", "log_softmax_triton:forward", accepts=_triton_reason)
log_softmax_backward.impl("triton", "log_softmax_triton:backward", accepts=lambda y, **_: _triton_reason(y))
token_logprobs.impl("triton", "log_softmax_triton:token_forward", accepts=_triton_reason)
token_logprobs_backward.impl("triton", "log_softmax_triton:token_backward", accepts=_triton_reason)


# torch_npu has no operator of its own for this; it implements torch's log_softmax on an NPU. AscendC has one.
@log_softmax.impl("torch_npu")
def _npu(logits: Tensor) -> Tensor:
    return _with_absent(logits, _torch_npu.batch_invariant("npu_log_softmax") or torch.log_softmax)


@token_logprobs.impl("torch_npu")
def _(logits: Tensor, ids: Tensor) -> Tensor:
    return _pick(_npu(logits), ids)


for _op in (log_softmax_backward, token_logprobs_backward):
    _op.impl("torch_npu")(_op.reference)


_CASES: list[Values] = [
    {"shape": (1, 8)},
    {"shape": (7, 129), "scale": 0.01},
    {"shape": (2, 3, 70)},
    {"shape": (2, 9001), "scale": 3.0},
    {"shape": (0, 64)},
    {"shape": (2, 3, 40), "sliced": True},
    {"shape": (3, 1)},
    {"shape": (3, 200), "scale": 8.0, "masked": True},
]
_BENCH: list[Values] = [{"shape": shape} for shape in ((4096, 151936), (64, 151936), (1, 151936))]


def _make(draw: Draw, shape: Sizes, masked: bool = False) -> Values:
    """masked: every third logit is minus infinity."""
    logits = draw.scaled(*shape, gap=3)
    if masked:
        logits[..., 1::3] = -torch.inf
    return {"logits": logits}


def _make_backward(draw: Draw, shape: Sizes, masked: bool = False) -> Values:
    logits = _make(draw, shape, masked)["logits"]
    y = log_softmax.reference(logits)
    if draw.sliced:
        y = torch.cat((y, y[..., :3]), -1)[..., : shape[-1]]
    return {"dy": torch.randn(shape, dtype=draw.wide, device=draw.device), "y": y, "dtype": draw.dtype}


def _make_token(draw: Draw, shape: Sizes, masked: bool = False) -> Values:
    ids = torch.randint(shape[-1], shape[:-1], device=draw.device)
    return {**_make(draw, shape, masked), "ids": ids}


def _make_token_backward(draw: Draw, shape: Sizes, masked: bool = False) -> Values:
    dy = torch.randn(shape[:-1], dtype=draw.wide, device=draw.device)
    return {"dy": dy, **_make_token(draw, shape, masked)}


log_softmax.inputs(cases=_CASES, bench=_BENCH)(_make)
log_softmax_backward.inputs(cases=_CASES, bench=_BENCH[:1])(_make_backward)
token_logprobs.inputs(cases=_CASES, bench=_BENCH)(_make_token)
token_logprobs_backward.inputs(cases=_CASES, bench=_BENCH[:1])(_make_token_backward)
