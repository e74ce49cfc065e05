"""Weights of 4 bits for the product that torch has for Arm CPUs (KleidiAI): `--quantize cpu4`.

Weights are rounded while they are read: symmetric, with a bf16 scale for each GROUP columns. A product rounds each
token to 8 bits with a scale and a zero point, sums the integers of a group exactly, and adds the groups in fp32 in the
order of columns. So outputs are not those of the checkpoint's weights. The head is rounded, too, and the embedding is
kept in bf16.
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
from whorl.ops.quantised.routed import activate, run_routed_experts

from .compressed_packed import CompressedPacked
from .dense import DENSE
from .quantised import Pick, is_in_vision_tower, names
from .rounding import SCHEMES, Rounding

METHOD = "cpu4"
GROUP = 32  # columns per scale; torch's product takes multiples of it
SCHEME = SCHEMES["w4a16"].with_scales(torch.bfloat16)
# Row counts that a trial compares with single rows. torch chooses a kernel by whether 4 divides the count.
TRIALS = (2, 3, 4, 5, 8, 16, 64, 512)
_STORE = TrialStore("cpu4", __file__)


class CpuRounding(Rounding):
    """Rounds matrices as they are read; nothing is written in this form."""

    takes_patterns: ClassVar[bool] = False

    def settings(self, ignore: list[str]) -> dict[str, Any]:
        return {"quant_method": METHOD, "ignore": ignore}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu4(CompressedPacked):
    """Codes of 4 bits in torch's order.

    It is loaded as pack-quantized weights are; then `packed`, uint8 [E or 1, bytes], replaces their parameters. Only
    torch's product reads it. An embedding has the buffer `rows`, bf16 [N, K], beside `packed` or instead of it.
    """

    bits: int = 4
    group: int | None = GROUP
    has_zeros: bool = False
    is_weight_only: ClassVar[bool] = False  # tokens are rounded, too

    @property
    def unit(self) -> Unit:  # type: ignore[override]
        return Unit(columns=GROUP)

    def tensors(self, matrix: Matrix) -> dict[str, Tensor]:
        rows = {"rows": torch.empty(matrix.shape, dtype=torch.bfloat16)} if _is_embedding(matrix) else {}
        if not _is_multiplied(matrix):
            return rows
        if matrix.shape[-1] <= GROUP:
            raise ValueError(
                f"cpu4: this rank has {matrix.shape[-1]} columns of {matrix.name}, and torch's product needs more than "
                f"{GROUP}: take fewer ranks"
            )
        return {**CompressedPacked.tensors(self, matrix), **rows}

    def destinations(self, matrix: Any, part: Part) -> Iterator[tuple[str, Destination]]:
        if _is_multiplied(matrix):
            yield from CompressedPacked.destinations(self, matrix, part)
        if _is_embedding(matrix):
            index = part.rows, part.columns
            yield "weight", Destination(into=matrix.rows[part.place], shape=part.shape, index=index)

    def lay_out(
        self, matrix: Any, words: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None
    ) -> None:
        check_device(words.device.type)
        stacked = words.view(-1, *words.shape[-2:]), scales.view(-1, *scales.shape[-2:])
        packed = [_pack(*entry) for entry in zip(*stacked, strict=True)]
        self._replace(matrix, packed=torch.stack(packed))

    def _replace(self, matrix: Any, **parameters: Tensor) -> None:
        rows = matrix.rows.data if _is_embedding(matrix) else None
        matrix.replace(**parameters)
        if rows is not None:  # no parameter: a step reads few of them
            matrix.register_buffer("rows", rows, persistent=False)

    def finish(self, matrix: Any) -> None:
        if _is_multiplied(matrix):
            CompressedPacked.finish(self, matrix)
        else:
            self._replace(matrix)

    def randomize(self, matrix: Any, generator: torch.Generator) -> None:
        if _is_embedding(matrix):
            matrix.rows.normal_(std=matrix.shape[-1] ** -0.5, generator=generator)
        if _is_multiplied(matrix):
            CompressedPacked.randomize(self, matrix, generator)
        else:
            self._replace(matrix)

    def values_of(self, matrix: Matrix, pick: Pick) -> Tensor:
        raise ValueError(f"cpu4: {matrix.name} is in torch's order, which only its product reads")

    def linear(self, matrix: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = multiply(x, matrix.packed[0], matrix.shape)
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def experts(self, gate_up: Any, down: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the output of the experts, rounded where `ops.experts` rounds."""

        def run_expert(e: int, rows: Tensor) -> Tensor:
            hidden = activate(multiply(rows, gate_up.packed[e], gate_up.shape[1:]).to(x.dtype))
            return multiply(hidden, down.packed[e], down.shape[1:]).to(x.dtype)

        return run_routed_experts(x, weights, ids, run_expert)

    def lookup(self, matrix: Any, row_ids: Tensor) -> Tensor:
        return nn.functional.embedding(row_ids, matrix.rows).to(matrix.dtype)


def _is_embedding(matrix: Any) -> bool:
    return getattr(matrix, "is_embedding", False)


def _is_multiplied(matrix: Any) -> bool:
    return not _is_embedding(matrix) or matrix.is_head


# ---- torch's product


def _pack(words: Tensor, scales: Tensor) -> Tensor:
    """Return a weight in the order of torch's product; words: int32 [N, K / 8], scales: [N, K / GROUP]."""
    codes = words.contiguous().view(torch.uint8)  # two a byte, the even column in the lower bits
    size = 2 * codes.shape[1], codes.shape[0]
    scales = scales.to(torch.bfloat16).contiguous()
    return torch.ops.aten._dyn_quant_pack_4bit_weight(codes, scales, None, GROUP, *size)  # type: ignore[no-any-return]


def multiply(x: Tensor, packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return x @ weight.T in fp32, [T, N]; x: [T, K]; packed: of a weight with this shape, [N, K].

    The bits of a row are those that it has alone.
    """
    x = x.float().contiguous()
    if len(x) > 1 and not _is_free_of_other_rows(*shape, torch.get_num_threads()):
        return torch.cat([_product(row, packed, shape) for row in x.split(1)])
    return _product(x, packed, shape)


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
            f"{platform.machine()}, and its plain loop is about {LOOP_RATIO} times as slow as fp32; leave it out"
        )


LOOP_RATIO = 10  # bench/results/packed_cpu.md


@functools.cache
def _has_kernel() -> bool:
    """Return whether torch packs codes for a kernel; without one it stores a float for every byte of codes."""
    return _pack(torch.zeros(8, GROUP // 4, dtype=torch.int32), torch.ones(8, 2)).dtype == torch.uint8


# ---- which matrices


def unfit(columns: Mapping[str, int]) -> list[str]:
    """Return the matrices that torch's product cannot take. Experts of a layer are rounded together or not at all.

    columns: the number of columns of each matrix, by name.
    """
    plain = {name for name, count in columns.items() if count % GROUP or count <= GROUP}
    layers = tuple(f"{name.partition('.experts.')[0]}.experts." for name in plain if ".experts." in name)
    return [name for name in columns if name in plain or name.startswith(layers)]


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats; settings: of `CpuRounding`, no config.json has them."""
    ignored, rounded = frozenset(names(settings, "ignore")), Cpu4()
    return Formats(of=lambda name: DENSE if name in ignored else rounded, unit=rounded.unit)
