"""Weights of 4 bits for the product that torch has for Arm CPUs (KleidiAI): `--quantize cpu4`.

Weights are rounded while they are read. The values of a group of GROUP columns are on 16 equal steps from the least to
the largest: value = code * scale + offset, with codes from -8 to 7, which is as exact as GGUF's Q4_1. torch's product
takes no offsets: what they add, the sum over groups of offset * (sum of the token's group), is a small product in fp32.
torch's product rounds each token to 8 bits with a scale and a zero point, sums the integers of a group exactly, and
adds the groups in fp32 in the order of columns. So outputs are not those of the checkpoint's weights.

The head has a second matrix, which holds what the rounding of the first has left: 4 bits alone cost most there. An
embedding is looked up in bf16.
"""

import functools
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from whorl.device import HOST
from whorl.nn.ranks import Unit
from whorl.nn.weight import Destination, Formats, Matrix, Part
from whorl.ops._trial_store import TrialStore
from whorl.ops.linear import multiply as multiply_plain
from whorl.ops.linear import pack
from whorl.ops.moe.routed import activate, run_routed

from .dense import DENSE
from .packed import packed as packed_words
from .quantised import Pick, Quantised, names
from .rounding import MOST_VALUES, Ends, Rounder, Shapes

METHOD = "cpu4"
GROUP = 32  # columns per scale; torch's product takes multiples of it
STEPS = 15  # between the least and the largest value of a group
# Row counts that a trial compares with single rows. torch chooses a kernel by whether 4 divides the count.
TRIALS = (2, 3, 4, 5, 8, 16, 64, 512)
MOST_NAMES = 8  # in a message
LOOP_RATIO = 100  # the time of torch's plain loop by that of its kernel: bench/results/packed_cpu.md
_STORE = TrialStore("cpu4", __file__)


@dataclass(frozen=True, slots=True)
class CpuRounding(Rounder):
    """Rounds matrices as they are read; nothing is written in this form. passes: matrices of codes, see `Cpu4`."""

    passes: int = 1
    rounds_head: ClassVar[bool] = True

    def settings(self, left: list[str]) -> dict[str, Any]:
        return {"quant_method": METHOD, "ignore": left}

    def shapes(self, rows: int, columns: int) -> Shapes:
        tensors: Shapes = {}
        for number in range(self.passes):
            tensors[f"words{number}"] = (rows, columns // 8), torch.int32
            tensors[f"scales{number}"] = (rows, columns // GROUP), torch.bfloat16
        return {**tensors, "offsets": ((rows, columns // GROUP), torch.float32)}

    def rows_at_once(self, columns: int) -> int:
        return max(MOST_VALUES // columns, 1)

    def round(self, weight: Tensor) -> tuple[Ends, Tensor, Tensor]:
        weight = weight.float()
        left, ends = weight.unflatten(-1, (-1, GROUP)), {"offsets": torch.zeros(())}
        for number in range(self.passes):
            low, high = left.aminmax(dim=-1, keepdim=True)
            scale = ((high - low) / STEPS).bfloat16().float()
            offset = (low + high + scale) / 2  # codes -8 and 7 are as far from the ends of the group
            step = torch.where(scale > 0, scale, torch.ones_like(scale))
            codes = ((left - offset) / step).round().clamp(-8, 7)
            left = left - (codes * scale + offset)
            ends[f"words{number}"] = packed_words((codes + 8).to(torch.uint8).flatten(-2), 4)
            ends[f"scales{number}"] = scale.squeeze(-1).bfloat16()
            ends["offsets"] = ends["offsets"] + offset.squeeze(-1)
        return ends, left.double().square().sum(), weight.double().square().sum()

    @staticmethod
    def check_device(device: str) -> None:
        check_device(device)

    @staticmethod
    def unfit(columns: Mapping[str, int]) -> list[str]:
        """See `Rounder.unfit`. Experts of a layer are rounded together or not at all."""
        plain = {name for name, count in columns.items() if count % GROUP or count <= GROUP}
        layers = tuple(f"{name.partition('.experts.')[0]}.experts." for name in plain if ".experts." in name)
        left = [name for name in columns if name in plain or name.startswith(layers)]
        if len(left) == len(columns):
            raise ValueError(
                f"quantize is 'cpu4', whose product takes columns in multiples of {GROUP} and more than that, and no "
                f"matrix has such; leave it out. Found are {', '.join(map(str, sorted(set(columns.values()))))}"
            )
        return left

    @staticmethod
    def describe(matrices: Mapping[str, Matrix]) -> str | None:
        left = [name for name, matrix in matrices.items() if not isinstance(matrix.format, Cpu4)]
        more = f" and {len(left) - MOST_NAMES} more" if len(left) > MOST_NAMES else ""
        others = f"; as they were: {', '.join(left[:MOST_NAMES])}{more}" if left else ""
        return (
            f"cpu4: {len(matrices) - len(left)} matrices are rounded to 4 bits in groups of {GROUP}, and what they "
            "multiply to 8 bits, so outputs differ from those without it; the head has 4 more bits, the embedding is "
            f"bfloat16{others}"
        )


@dataclass(frozen=True, slots=True)
class Cpu4(Quantised):
    """Codes of 4 bits in torch's order: a product is the sum over matrices of codes, two for a head, else one.

    The parameters, after loading: packed0 (and packed1), uint8 [E or 1, bytes], which only torch's product reads, and
    offsets, fp32 [.., N, K / GROUP]. An embedding has the buffer `rows`, bf16 [N, K], beside them or instead of them.
    """

    is_weight_only = False  # tokens are rounded, too
    unit = Unit(columns=GROUP)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        tensors = {"rows": torch.empty(matrix.shape, dtype=torch.bfloat16)} if _is_embedding(matrix) else {}
        if not _passes(matrix):
            return tensors
        if matrix.shape[-1] <= GROUP:
            raise ValueError(
                f"cpu4: this rank has {matrix.shape[-1]} columns of {matrix.name}, and torch's product needs more than "
                f"{GROUP}: take fewer ranks"
            )
        shapes = CpuRounding(_passes(matrix)).shapes(*matrix.shape[-2:])
        lead = matrix.lead
        return tensors | {end: torch.empty(*lead, *shape, dtype=dtype) for end, (shape, dtype) in shapes.items()}

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        if _is_embedding(matrix):
            yield "weight", self.destination(matrix.rows, part, self.rows_of(matrix, part), self.columns_of(part))
        shapes = CpuRounding(_passes(matrix)).shapes(*part.shape) if _passes(matrix) else {}
        for end, (shape, dtype) in shapes.items():
            columns = self.columns_of(part, part.shape[1] // shape[1])
            yield end, self.destination(getattr(matrix, end), part, self.rows_of(matrix, part), columns, dtype=dtype)

    def finish(self, matrix: Any) -> None:
        parameters = {}
        for number in range(_passes(matrix)):
            check_device(matrix.offsets.device.type)
            words, scales = (getattr(matrix, f"{end}{number}").data for end in ("words", "scales"))
            entries = zip(*(x.view(-1, *x.shape[-2:]) for x in (words, scales)), strict=True)
            parameters[f"packed{number}"] = torch.stack([_pack(*entry) for entry in entries])
            parameters["offsets"] = matrix.offsets.data
        rows = matrix.rows.data if _is_embedding(matrix) else None
        matrix.replace(**parameters)
        if parameters:
            matrix.entries = _entries(matrix)
        if rows is not None:  # no parameter: a step reads few of them
            matrix.register_buffer("rows", rows, persistent=False)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        spread = matrix.shape[-1] ** -0.5
        if _is_embedding(matrix):
            matrix.rows.normal_(std=spread, generator=generator)
        for number in range(_passes(matrix)):
            getattr(matrix, f"words{number}").random_(-(2**31), 2**31, generator=generator)
            getattr(matrix, f"scales{number}").fill_(spread / 4.6 / 16**number)  # 4.6: the deviation of the codes
            matrix.offsets.zero_()
        self.finish(matrix)

    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        raise ValueError(f"cpu4: {matrix.name} is in torch's order, which only its product reads")

    def linear(self, matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = multiply(x, *matrix.entries[0])
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def experts(self, gate_up: Any, down: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the output of the experts, rounded where `ops.experts` rounds."""

        def run_expert(e: int, rows: Tensor) -> Tensor:
            hidden = activate(multiply(rows, *gate_up.entries[e]).to(x.dtype))
            return multiply(hidden, *down.entries[e]).to(x.dtype)

        return run_routed(x, weights, ids, run_expert)

    def lookup(self, matrix: Any, row_ids: Tensor) -> Tensor:
        return nn.functional.embedding(row_ids, matrix.rows).to(matrix.dtype)


def _is_embedding(matrix: Any) -> bool:
    return getattr(matrix, "is_embedding", False)


def _passes(matrix: Any) -> int:
    """Return how many matrices of codes a matrix has: none if it is only an embedding."""
    if not hasattr(matrix, "is_head"):
        return 1
    return 2 if matrix.is_head else 0


def _entries(matrix: Any) -> list[tuple[list[Tensor], Tensor]]:
    """Return the matrices of codes and the offsets of a matrix, or of each of a stack: views of its parameters."""
    codes = [getattr(matrix, f"packed{number}").data for number in range(_passes(matrix))]
    offsets = matrix.offsets.data.view(-1, *matrix.offsets.shape[-2:]).unbind()
    for each in offsets:
        pack(each)
    return [([part[e] for part in codes], each) for e, each in enumerate(offsets)]


# ---- torch's product


def _pack(words: Tensor, scales: Tensor) -> Tensor:
    """Return a weight in the order of torch's product; words: int32 [N, K / 8], scales: [N, K / GROUP]."""
    codes = words.contiguous().view(torch.uint8)  # two a byte, the even column in the lower bits
    size = 2 * codes.shape[1], codes.shape[0]
    scales = scales.to(torch.bfloat16).contiguous()
    return torch.ops.aten._dyn_quant_pack_4bit_weight(codes, scales, None, GROUP, *size)  # type: ignore[no-any-return]


def multiply(x: Tensor, codes: list[Tensor], offsets: Tensor) -> Tensor:
    """Return x @ weight.T in fp32, [T, N]; x: [T, K]; codes: of `_pack`, to be summed; offsets: [N, K / GROUP].

    The bits of a row are those that it has alone.
    """
    x, shape = x.float().contiguous(), (offsets.shape[0], offsets.shape[1] * GROUP)
    y = multiply_plain(x.unflatten(-1, (-1, GROUP)).sum(-1), offsets)
    is_split = len(x) > 1 and not _is_free_of_other_rows(*shape, torch.get_num_threads())
    for packed in codes:
        parts = [_product(part, packed, shape) for part in (x.split(1) if is_split else (x,))]
        y = y + (torch.cat(parts) if is_split else parts[0])
    return y


def _product(x: Tensor, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, columns = shape
    return torch.ops.aten._dyn_quant_matmul_4bit(x, packed, GROUP, columns, rows)  # type: ignore[no-any-return]


@functools.cache
def _is_free_of_other_rows(rows: int, columns: int, num_threads: int) -> bool:
    """Return whether a row has the same bits in products of any number of rows, by a trial with this shape."""

    def trial() -> bool:
        generator, shape = torch.Generator().manual_seed(0), (rows, columns)
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32, generator=generator)
        packed = _pack(words, torch.rand(rows, columns // GROUP, generator=generator))
        x = torch.randn(TRIALS[-1], columns, generator=generator)
        alone = torch.cat([_product(row, packed, shape) for row in x.split(1)])
        return all(torch.equal(_product(x[:n], packed, shape), alone[:n]) for n in TRIALS)

    return _STORE.outcome(f"[{rows}, {columns}] {num_threads} threads", HOST, trial)


def check_device(device: str) -> None:
    """Raise ValueError unless torch has a kernel for such products on this device and machine."""
    if device != HOST:
        raise ValueError(f"cpu4 is for CPUs, and the device is {device}; use w4a16, w8a8 or fp8 there")
    if not _has_kernel():
        raise ValueError(
            f"cpu4 needs an Arm CPU with dot products (asimddp): torch {torch.__version__} has no kernel for this "
            f"{platform.machine()}, and its plain loop takes about {LOOP_RATIO} times as long, longer than fp32; leave "
            "it out"
        )


@functools.cache
def _has_kernel() -> bool:
    """Return whether torch packs codes for a kernel; without one it stores a float for every byte of codes."""
    return _pack(torch.zeros(8, GROUP // 4, dtype=torch.int32), torch.ones(8, 2)).dtype == torch.uint8


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats; settings: of `CpuRounding`, no config.json has them."""
    ignored, rounded = frozenset(names(settings, "ignore")), Cpu4()
    return Formats(of=lambda name: DENSE if name in ignored else rounded, unit=rounded.unit)
