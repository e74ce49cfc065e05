"""The features of pictures, on the device: what the tower has made, and what it is at."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.device import is_interpreting, lasting, unavailable
from whorl.nn import Inserted

from .batch import Insert
from .encoder import Job

MOST_PATCHES = 1 << 15  # that run as one: enough to fill a GPU


def runs_several(device: str) -> bool:
    """Whether pictures may run as one: elsewhere the bits of a product's rows depend on how many there are."""
    return unavailable("triton", torch.device(device).type) is None and not is_interpreting()


def as_tensor(patches: NDArray[np.float32]) -> Tensor:
    """Torch takes no array that may not be written to."""
    return torch.from_numpy(np.require(patches, requirements=["C", "W"]))


class Features:
    """By the encoder's numbers. Whoever decides what to keep is `encoder.Encoder`."""

    def __init__(self, tower: Any, device: str) -> None:
        self._tower, self._device = tower, device
        self._on_the_way: dict[int, Any] = {}
        self._done: dict[int, Tensor] = {}  # [1 + deepstack, N, C]
        self._runs_several = runs_several(device)

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._on_the_way.pop(number, None)
            self._done.pop(number, None)

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.item is not None:
                there = lasting(as_tensor(job.item.patches), self._device).to(self._device, non_blocking=True)
                self._on_the_way[job.number] = self._tower.begin(there, job.item.grid)
        for group in self._groups(jobs):
            encodings = [self._on_the_way[job.number] for job in group]
            found = self._tower.advance_all(encodings, group[0].layers)
            for job, features in zip(group, found, strict=True):
                if features is not None:
                    del self._on_the_way[job.number]
                    self._done[job.number] = features

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Jobs that run as one: of the same layers, and of no more patches than memory was left for."""
        group: list[Job] = []
        kind: tuple[int, int] | None = None
        room = 0
        for job in jobs:
            encoding = self._on_the_way[job.number]
            if (encoding.layer, job.layers) != kind or encoding.num_patches > room or not self._runs_several:
                if group:
                    yield group
                group, kind, room = [], (encoding.layer, job.layers), MOST_PATCHES
            group.append(job)
            room -= encoding.num_patches
        if group:
            yield group

    @torch.inference_mode()
    def inserted(self, inserts: Sequence[Insert], num_rows: int) -> Inserted:
        """For a call of so many rows."""
        like = self._done[inserts[0].number]
        mask = torch.zeros(num_rows, 1, dtype=torch.bool, device=self._device)
        # Tensors of their own: as inputs of a captured graph, views of one tensor would be something else.
        features = tuple(like.new_zeros(num_rows, like.shape[2]) for _ in like)
        for row, number, offset, length in inserts:
            mask[row : row + length] = True
            for into, found in zip(features, self._done[number], strict=True):
                into[row : row + length] = found[offset : offset + length]
        return Inserted(mask=mask, features=features)
