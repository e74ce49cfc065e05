"""Low-rank updates of a model's matrices, of which every token of a call chooses one: LoRA for each request.

A matrix that is updated has slots. An adapter takes one slot, of the same number in all of them; a call says which slot
each of its rows uses. The memory of slots never moves while graphs read it.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whorl import ops

from .weight import Matrix, Part, Routing

UNIT = 16  # ranks that the memory of a slot grows by


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A low-rank update of one projection of the checkpoint, W + scale * B A, or of each matrix of a stack.

    a: [r, K], or [E, r, K]. b: [N, r], or [E, N, r]. bias: [N], added before the scale.
    """

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(frozen=True, slots=True)
class Target:
    """A projection that updates can have: a part of a matrix, or several parts that a checkpoint stores as one.

    key: its name in the model, by which a config knows it. rows: of the update, those of each part's projection.
    """

    key: str
    matrix: Matrix
    parts: tuple[Part, ...]
    rows: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the projection, on all ranks together."""
        return self.rows[-1].stop, self.parts[0].shape[1]

    @property
    def entry(self) -> int | None:
        """The matrix of a stack that it is in; None: it is a whole stack, or there is none."""
        return self.parts[0].entry if len({part.entry for part in self.parts}) == 1 else None

    @property
    def is_stack(self) -> bool:
        return len(self.matrix.shape) == 3 and self.entry is None


def targets(model: object) -> dict[str, Target]:
    """Return what can be updated, by its name in checkpoints: projections, and stacks of experts as a whole."""
    result: dict[str, Target] = {}
    for name, matrix in model.named_modules() if isinstance(model, nn.Module) else ():
        if not isinstance(matrix, Matrix) or not matrix.takes_adapters:
            continue
        if getattr(matrix, "is_embedding", False) and not matrix.is_head:  # it looks rows up
            continue
        key = "lm_head" if getattr(matrix, "is_head", False) else name
        by_source: dict[str, list[Part]] = {}
        for part in matrix.parts:
            by_source.setdefault(part.source(key), []).append(part)
        for source, parts in by_source.items():  # several, where a projection's rows are in another order here
            whole = slice(0, parts[0].shape[0])
            result[source] = Target(source, matrix, tuple(parts), (whole,) * len(parts))
        if len(matrix.shape) == 3:
            ends = [sum(part.shape[0] for part in matrix.entry_parts[: i + 1]) for i in range(len(matrix.entry_parts))]
            rows = [slice(end - part.shape[0], end) for end, part in zip(ends, matrix.entry_parts, strict=True)]
            result[key] = Target(key, matrix, tuple(matrix.parts), tuple(rows))
    return result


class Slots:
    """The slots of one matrix: an `Adapter` that adds to each row the update in the slot that the row chooses.

    matrix: [N, K] or a stack [E, N, K]. num_slots: S. chosen: what the rows of a call choose.
    """

    def __init__(self, matrix: Matrix, num_slots: int, chosen: "Chosen") -> None:
        self.matrix, self.chosen, self.num_slots = matrix, chosen, num_slots
        *stack, self.rows, self.columns = matrix.shape
        self.num_entries = stack[0] if stack else 1
        self.parts = matrix.entry_parts
        self.sizes = [part.rows.stop - part.rows.start for part in self.parts]
        self.sizes[-1] += self.rows - sum(self.sizes)  # padding of a vocabulary
        self.device = next(matrix.parameters()).device
        groups = num_slots * self.num_entries
        self.ranks = torch.zeros(groups, len(self.sizes), dtype=torch.int32, device=self.device)
        self.scales = torch.zeros(groups, len(self.sizes), device=self.device)
        self.bias: Tensor | None = None  # [S E, N], from the first update that has one
        self.a, self.b = self._empty(0)

    def _empty(self, rank: int) -> tuple[Tensor, Tensor]:
        kind: dict[str, Any] = {"dtype": self.matrix.dtype, "device": self.device}
        groups = self.num_slots * self.num_entries
        a = torch.zeros(groups, len(self.sizes), rank, self.columns, **kind)
        return a, torch.zeros(groups, self.rows, rank, **kind)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.a, self.b, self.ranks, self.scales, self.bias) if x is not None)

    def reserve(self, rank: int, *, has_bias: bool = False) -> bool:
        """Make room for updates of this rank, and for their bias; return whether memory has moved."""
        is_small, lacks_bias = rank > self.a.shape[2], has_bias and self.bias is None
        if is_small:
            (a, b), old = self._empty(-(-rank // UNIT) * UNIT), self.a.shape[2]
            a[:, :, :old], b[:, :, :old] = self.a, self.b
            self.a, self.b = a, b
        if lacks_bias:
            self.bias = self.b.new_zeros(self.b.shape[:2])
        return is_small or lacks_bias

    def clear(self, slot: int) -> None:
        """Empty a slot: rows that choose it are not changed."""
        self.ranks[self._groups(slot)] = 0

    def write(self, slot: int, target: Target, update: Update) -> None:
        """Write this rank's shard of an update to a slot, in which `reserve` has made room."""
        for part, rows in zip(target.parts[: len(target.rows)], target.rows, strict=True):
            index = next(i for i, known in enumerate(self.parts) if known.first == part.first)
            groups: slice | int = self._groups(slot) if target.entry is None else slot * self.num_entries + target.entry
            rank, columns = update.rank, slice(part.first, part.first + part.rows.stop - part.rows.start)
            own = slice(rows.start + part.rows.start, rows.start + part.rows.stop)
            self.a[groups, index, :rank] = update.a[..., part.columns].to(self.a)
            self.b[groups, columns, :rank] = update.b[..., own, :].to(self.b)
            if self.bias is not None:  # of outputs that are summed over ranks, the first rank adds it
                has_bias = update.bias is not None and part.columns.start == 0
                self.bias[groups, columns] = update.bias[..., own].to(self.bias) if has_bias else 0  # type: ignore[index]
            self.scales[groups, index] = update.scale
            self.ranks[groups, index] = rank

    def _groups(self, slot: int) -> slice:
        return slice(slot * self.num_entries, (slot + 1) * self.num_entries)

    def __call__(self, y: Tensor, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Return y [T, N] with the updates added; x: [T, K]."""
        slots = self.chosen.slots
        assert slots is not None, "rows choose their slots before the model runs"
        if isinstance(slots, int):
            slots = torch.full((len(x),), slots, dtype=torch.int32, device=x.device)
        groups = slots if routing is None else _groups_of(slots, routing)
        tensors = (self.a, self.b, groups, self.ranks, self.scales)
        return ops.low_rank(y, x, *tensors, self.sizes, self.bias)  # type: ignore[no-any-return]


def _groups_of(slots: Tensor, routing: Routing) -> Tensor:
    """Return the group, slot * E + matrix, of each row of a stack's matmul; -1 where the token has no slot."""
    places, counts = routing
    count, num_entries = places.numel(), len(counts)
    of_rows = slots.new_empty(count).scatter_(0, places.flatten().long(), slots.repeat_interleave(places.shape[1]))
    row = torch.arange(count, device=slots.device, dtype=torch.int32)
    entry = torch.searchsorted(counts.cumsum(0, dtype=torch.int32), row, right=True, out_int32=True)
    return torch.where(of_rows < 0, -1, of_rows * num_entries + entry)


class Chosen:
    """What the rows of the running call choose. slots: [T] int32, -1 for none; or one slot for all rows."""

    slots: Tensor | int | None = None


class LowRanks:
    """The slots of a model's matrices. Attribute slots: by matrix, those that updates have needed so far."""

    def __init__(self, model: object, num_slots: int) -> None:
        self.num_slots, self.model = num_slots, model
        self.slots: dict[Matrix, Slots] = {}
        self._chosen = Chosen()

    @functools.cached_property
    def targets(self) -> dict[str, Target]:
        """What can be updated, by its name in checkpoints."""
        return targets(self.model)

    @property
    def nbytes(self) -> int:
        """The bytes of all slots."""
        return sum(slots.nbytes for slots in self.slots.values())

    def load(self, slot: int, updates: Mapping[str, Update]) -> bool:
        """Write an adapter to a slot; return whether memory has moved, so that graphs that read it are stale.

        updates: by the name of a target. Where memory runs out, the slot stays empty.
        """
        matrices = dict.fromkeys(self.targets[name].matrix for name in updates)
        new = {matrix: Slots(matrix, self.num_slots, self._chosen) for matrix in matrices if matrix not in self.slots}
        has_moved = bool(new)
        for name, update in updates.items():
            matrix = self.targets[name].matrix
            slots = new.get(matrix) or self.slots[matrix]
            has_moved |= slots.reserve(update.rank, has_bias=update.bias is not None)
        self.slots |= new
        for slots in self.slots.values():
            slots.clear(slot)
        for name, update in updates.items():
            self.slots[self.targets[name].matrix].write(slot, self.targets[name], update)
        return has_moved

    @contextlib.contextmanager
    def chosen(self, slots: Tensor | int) -> Iterator[None]:
        """Let the rows of the products in this context choose their slots, [T] int32, or all of them one slot; outside
        there are no updates."""
        self._chosen.slots = slots
        for matrix, adapter in self.slots.items():
            matrix.__dict__["adapter"] = adapter  # not by setattr, which in a module takes a microsecond
        try:
            yield
        finally:
            for matrix in self.slots:
                matrix.__dict__.pop("adapter", None)
            self._chosen.slots = None
