"""New weights of several ranks: rank 0 receives them and sends every tensor on, and each rank keeps its shard.

A rank that fails says so when the update ends, so that all ranks learn of it: the weights are then a mixture on some
rank, and the engine refuses to compute with them until another update has succeeded.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from .launch import Rank, RankGroup
from .rank_messages import exchange, send
from .weights.update import Places, Update, UpdateError

if TYPE_CHECKING:
    from whorl.nn import Model

_LOG = logging.getLogger(__name__)
_AT_ONCE = 1 << 28  # bytes of one broadcast


class LeadUpdate(Update):
    """Rank 0's update. It sends tensors to the other ranks before it copies its own shard of them."""

    def __init__(self, places: Places, group: RankGroup, device: str, *, is_partial: bool = False) -> None:
        super().__init__(places, is_partial=is_partial)
        self._group, self._device = group, device
        with group.together():
            send(group, "begin_update", is_partial)

    def copy(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        named = {name: tensor for name, tensor in tensors if not self.places.is_ignored(name)}
        self.check({name: (tensor.shape, tensor.dtype) for name, tensor in named.items()})
        for batch in _batches(named.items()):
            self.has_copied = True  # on the other ranks, whatever happens here
            self._send(batch)
            super().copy(batch)

    def _send(self, batch: list[tuple[str, Tensor]]) -> None:
        """Broadcast tensors of one dtype, one behind the other."""
        values = torch.cat([tensor.detach().to(self._device).reshape(-1) for _, tensor in batch])
        shapes = [(name, list(tensor.shape)) for name, tensor in batch]
        with self._group.together():
            send(self._group, "update", _name(values.dtype), shapes)
            distributed.broadcast(values.view(torch.uint8), 0)

    def finish(self) -> None:
        with self._group.together():  # no other message may come between
            send(self._group, "finish_update")
            error = _error_of(super().finish)
            errors = exchange(self._group, "" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text:
                raise UpdateError(f"update_weights: rank {rank} failed: {text}")


class FollowUpdates:
    """The updates of a rank other than 0. A failure is kept until rank 0 asks, at the end of the update."""

    def __init__(self, model: "Model", rank: Rank) -> None:
        self._model, self._rank = model, rank
        self._places: Places | None = None
        self._update: Update | None = None
        self._error: Exception | None = None

    def begin(self, is_partial: bool) -> None:
        self._update = None
        self._error = _error_of(lambda: self._begin(is_partial))

    def _begin(self, is_partial: bool) -> None:
        self._places = self._places or Places(self._model)
        self._update = Update(self._places, is_partial=is_partial)

    def receive(self, dtype: str, shapes: list[tuple[str, list[int]]]) -> None:
        """Receive tensors and copy this rank's shard of them."""
        sizes = [torch.Size(shape) for _, shape in shapes]
        count = sum(size.numel() for size in sizes)
        values = torch.empty(count, dtype=getattr(torch, dtype), device=self._rank.device)
        distributed.broadcast(values.view(torch.uint8), 0)
        update = self._update
        if self._error is not None:
            return
        assert update is not None, "rank 0 has begun an update before it sends tensors"
        parts = values.split([size.numel() for size in sizes])
        batch = [(name, part.view(size)) for (name, _), size, part in zip(shapes, sizes, parts, strict=True)]
        self._error = _error_of(lambda: update.copy(batch))

    def finish(self) -> None:
        if self._error is None:
            assert self._update is not None, "rank 0 has begun an update before it ends it"
            self._error = _error_of(self._update.finish)
        exchange(self._rank, "" if self._error is None else str(self._error) or type(self._error).__name__)
        self._update = None

    def forget_places(self) -> None:
        """Give up views of the weights, whose memory will be freed."""
        self._places = None


def _error_of(work: Callable[[], None]) -> Exception | None:
    """Return the error that a function raises, and log it."""
    try:
        work()
    except Exception as error:
        _LOG.warning("%s", error)
        return error
    return None


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of each broadcast: of one dtype, and as many as are sent at once, or one that is larger."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if batch and (size + tensor.nbytes > _AT_ONCE or tensor.dtype != batch[0][1].dtype):
            yield batch
            batch, size = [], 0
        batch.append((name, tensor))
        size += tensor.nbytes
    if batch:
        yield batch


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
