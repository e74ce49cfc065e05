"""The linear layer of models: the bits of a token's result do not depend on the other tokens of the batch.

CPU libraries choose a kernel by the shape of a product, and kernels may sum in different orders. The reference
therefore defines the bits of a row as those that it has in a product of TILE rows. It uses larger products, and weights
in a library's own order, only where a trial has shown that their bits are equal.
"""

import functools
import logging
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from whorl.device import HOST
from whorl.host_memory import free_memory

from . import linear_torch_npu
from ._gradient import Arguments
from ._op import Values, narrow, operator, widen
from ._trial_store import TrialStore

_STORE = TrialStore("linear", __file__)
log = logging.getLogger(__name__)
TILE = 16  # rows of the product that defines a row's bits; the last product is padded to it
RESERVE = 1 << 31  # bytes of memory that packed copies of weights leave free
LARGER = (512, 128, 32)  # rows of larger products, used where a trial shows that their bits are equal


# x [T, K] @ weight [N, K].T in the dtype of accumulation, with the bits that a backend's `linear` has.
Product = Callable[[Tensor, Tensor], Tensor]


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, in which every row has the bits that it has in a product of TILE rows.

    x: [T, K] and weight: [N, K], both in the dtype of accumulation (fp32 or fp64), which the result has too.
    """
    count, parts = x.shape[0], []
    if not count:
        return x @ weight.t()
    packed: Packed | None = getattr(weight, "packed", None)
    if packed is not None and packed.source == (weight.data_ptr(), weight._version):
        return packed.library.multiply(x, packed.weight, weight)
    left = torch.nn.functional.pad(x, (0, 0, 0, -count % TILE)) if count % TILE else x
    for size in _sizes(weight.shape, weight.dtype, weight.device.type, torch.get_num_threads()):
        end = len(left) // size * size
        parts += [part @ weight.t() for part in left[:end].split(size)] if end else []
        left = left[end:]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def pack(weight: Tensor) -> None:
    """Attach to a CPU weight [N, K] a copy in the order that a library reads fastest, for products with few rows.

    Such a product then takes no longer than reading the weight. The copy is the attribute `weight.packed`, takes as
    much memory as the weight, and is used until the weight changes. Nothing happens unless the weight is fp32, a trial
    shows that the bits of one of LIBRARIES are equal, and RESERVE remains free beside the copy.
    """
    if weight.device.type != HOST or weight.dtype != torch.float32 or weight.is_inference():
        return
    free = free_memory()
    if free is not None and free < weight.nbytes + RESERVE:
        _warn_of_memory()
        return
    for library in LIBRARIES:
        if library.is_available() and library.has_equal_bits(weight):
            ordered, source = library.order(weight.detach()), (weight.data_ptr(), weight._version)
            weight.packed = Packed(ordered, source, library)  # type: ignore[attr-defined]
            return


@functools.cache
def _warn_of_memory() -> None:
    log.warning(
        "less than %d GiB of memory would be left: weights are not stored in the CPU library's order as well, so that "
        "decoding is slower, with the same results",
        RESERVE >> 30,
    )


class Library(NamedTuple):
    """A library that stores a weight in an order of its own. multiply: of x, the ordered weight and the plain one."""

    name: str
    is_available: Callable[[], bool]
    order: Callable[[Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]

    def has_equal_bits(self, weight: Tensor) -> bool:
        """Return whether a product of any number of rows has the bits of `multiply` with the plain weight."""
        key = self.name, weight.shape, torch.get_num_threads()
        if key not in _OUTCOMES:
            name = f"{self.name} {list(weight.shape)} {torch.get_num_threads()} threads"
            _OUTCOMES[key] = _STORE.outcome(name, HOST, lambda: self._trial(weight.detach()))
        return _OUTCOMES[key]

    def _trial(self, weight: Tensor) -> bool:
        x = torch.randn(LARGER[0], weight.shape[1], generator=torch.Generator().manual_seed(0))
        expected, ordered = multiply(x, weight), self.order(weight)
        counts = (1, 2, TILE - 1, TILE, TILE + 1, *LARGER)
        return all(torch.equal(self.multiply(x[:n], ordered, weight), expected[:n]) for n in counts)


class Packed(NamedTuple):
    """A weight in a library's order, and the address and version of the plain weight that it was made from."""

    weight: Tensor
    source: tuple[int, int]
    library: Library


LIBRARIES = (
    Library(
        "mkl",
        is_available=torch.backends.mkl.is_available,
        order=lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, TILE),
        multiply=lambda x, ordered, weight: torch.ops.mkl._mkl_linear(x, ordered, weight, None, x.shape[0]),
    ),
    Library(
        "onednn",
        is_available=torch.backends.mkldnn.is_available,
        order=lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, TILE),
        multiply=lambda x, ordered, weight: torch.ops.mkldnn._linear_pointwise(x, ordered, None, "none", [], ""),
    ),
)
_OUTCOMES: dict[tuple[str, torch.Size, int], bool] = {}  # by library, shape and number of threads


@functools.cache
def _sizes(shape: torch.Size, dtype: torch.dtype, device: str, num_threads: int) -> tuple[int, ...]:
    """Return the row counts of products in which a row has the bits that it has in TILE rows, largest first.

    shape: that of the weight, [N, K]. Trials decide. A CPU library chooses a kernel by size alone, and a kernel sums
    along K in one order, so a trial with one random weight is enough.
    """
    if device != HOST:
        return (TILE,)

    @functools.cache  # called only where an outcome is not stored yet
    def trial_tensors() -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, shape[1], generator=generator).to(dtype) for n in (LARGER[0], shape[0]))
        return x, weight, torch.cat([part @ weight.t() for part in x.split(TILE)])

    def is_equal(size: int) -> bool:
        x, weight, expected = trial_tensors()
        return torch.equal(x[:size] @ weight.t(), expected[:size])

    name = f"{list(shape)} {dtype} {num_threads} threads"
    trials = {size: functools.partial(is_equal, size) for size in LARGER}
    return (*(n for n, trial in trials.items() if _STORE.outcome(f"{n} rows {name}", device, trial)), TILE)


@operator(flops="2*T*N*K")
def linear(
    x: Annotated[Tensor, "[T, K] float"],
    weight: Annotated[Tensor, "[N, K] x"],
    bias: Annotated[Tensor | None, "[N] x or fp32"] = None,
) -> Annotated[Tensor, "[T, N] x"]:
    """y = x @ weight.T + bias.

    Returns y contiguous. Sums and bias are in fp32, rounded once. The bits of a token's result depend on the token and
    the weight alone, not on how many tokens there are nor on its place among them; docs/arithmetic.md says how, and
    where this does not hold. Differentiable; gradients are torch's own matrix products, with their bits.

        y = ops.linear(x, layer.weight, layer.bias)
    """
    y = multiply(widen(x).contiguous(), widen(weight))
    if bias is not None:
        y = y + bias.to(y.dtype)
    return narrow(y, x.dtype)


@linear.gradient(save=("x", "weight", "bias"))
def _(grads: tuple[Tensor, ...], args: Arguments, outputs: dict[int, Tensor]) -> dict[str, Tensor]:
    dy, input_grads = grads[0], {}
    if "x" in args.needs_grad:
        input_grads["x"] = dy @ args["weight"]
    if "weight" in args.needs_grad:
        input_grads["weight"] = dy.t() @ args["x"]
    if "bias" in args.needs_grad:
        input_grads["bias"] = widen(dy).sum(0).to(args["bias"].dtype)
    return input_grads


linear.impl("cpp", "whorl.ops.cpu.linear:linear")
linear.impl("triton", "linear_triton:forward")
linear.impl("torch_npu", "linear_torch_npu:forward", accepts=linear_torch_npu.reason)


_CASES: list[Values] = [
    {"tokens": (1,), "size": (5, 8)},
    {"tokens": (3,), "size": (48, 40), "bias": True},
    {"tokens": (3,), "size": (33, 64), "scale": 0.01},
    {"tokens": (2,), "size": (200, 576), "bias": True},
    {"tokens": (0,), "size": (16, 32)},
    {"tokens": (35,), "size": (70, 100), "sliced": True, "bias": True},
    {"tokens": (17,), "size": (9, 136), "sliced": True},
    {"tokens": (17,), "size": (40, 136), "sliced": True, "bias": True},
    {"tokens": (5,), "size": (64, 64), "bias": torch.float32},
]
_BENCH: list[Values] = [
    {"tokens": (tokens,), "size": size}
    for tokens in (1, 8, 64, 8192)
    for size in ((5120, 2048), (2048, 4096), (151936, 2048))
    if tokens <= 64 or size[0] < 100000
]


linear.inputs(cases=_CASES, bench=_BENCH, words={"size": "N, K"})
