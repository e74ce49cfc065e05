"""The features of images on the device: finished ones, and those that the vision tower is computing."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.device import is_interpreting, lasting, unavailable
from whorl.nn import Inserted, LowRanks

from .batch_images import Insert
from .encoder import Job

MOST_PATCHES = 1 << 15  # patches that run in one batch: enough to fill a GPU


def runs_several(device: str) -> bool:
    """Return whether several images may run in one batch: with Triton's kernels that changes no bit, while the bits of
    other libraries' matrix products depend on the number of rows."""
    return unavailable("triton", torch.device(device).type) is None and not is_interpreting()


def as_tensor(patches: NDArray[np.float32]) -> Tensor:
    """Return the patches as a tensor, copied if they are read-only, which torch does not take."""
    return torch.from_numpy(np.require(patches, requirements=["C", "W"]))


class Features:
    """Features by the encoder's numbers. `encoder.Encoder` decides which are kept."""

    def __init__(self, tower: Any, device: str, low_ranks: LowRanks | None = None) -> None:
        self._tower, self._device, self._low_ranks = tower, device, low_ranks
        self._in_progress: dict[int, Any] = {}
        self._done: dict[int, Tensor] = {}  # [1 + deepstack, N, C]
        self._runs_several = runs_several(device)

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._in_progress.pop(number, None)
            self._done.pop(number, None)

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> None:
        """Run the layers of the jobs, and keep the features that are finished."""
        for job in jobs:
            if job.item is not None:
                patches = lasting(as_tensor(job.item.patches), self._device).to(self._device, non_blocking=True)
                with self._adapter(job):
                    self._in_progress[job.number] = self._tower.begin(patches, job.item.grid)
        for group in self._groups(jobs):
            encodings = [self._in_progress[job.number] for job in group]
            with self._adapter(group[0]):
                finished = self._tower.advance_all(encodings, group[0].layers)
            for job, features in zip(group, finished, strict=True):
                if features is not None:
                    del self._in_progress[job.number]
                    self._done[job.number] = features

    def _adapter(self, job: Job) -> AbstractContextManager[None]:
        """Let the tower's products in the context use the adapter of a job."""
        if job.slot < 0 or self._low_ranks is None:
            return nullcontext()
        return self._low_ranks.chosen(job.slot)

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Yield jobs that run in one batch: of equal layers and adapter, and of no more patches than memory allows."""
        group: list[Job] = []
        kind: tuple[int, int, int] | None = None
        room = 0
        for job in jobs:
            encoding = self._in_progress[job.number]
            if (encoding.layer, job.layers, job.slot) != kind or encoding.num_patches > room or not self._runs_several:
                if group:
                    yield group
                group, kind, room = [], (encoding.layer, job.layers, job.slot), MOST_PATCHES
            group.append(job)
            room -= encoding.num_patches
        if group:
            yield group

    @torch.inference_mode()
    def inserted(self, inserts: Sequence[Insert], num_tokens: int) -> Inserted:
        """Return what replaces embeddings in a call: a mask [num_tokens, 1], and 1 + deepstack features, each
        [num_tokens, C] and zero outside of the mask."""
        like = self._done[inserts[0].number]
        mask = torch.zeros(num_tokens, 1, dtype=torch.bool, device=self._device)
        # Separate tensors, because a captured graph treats inputs that are views of one tensor differently.
        features = tuple(like.new_zeros(num_tokens, like.shape[2]) for _ in like)
        for first_token, number, offset, length in inserts:
            mask[first_token : first_token + length] = True
            for target, image in zip(features, self._done[number], strict=True):
                target[first_token : first_token + length] = image[offset : offset + length]
        return Inserted(mask=mask, features=features)
