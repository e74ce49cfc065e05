"""Give the memory of a sleeping engine back to the device, and take it again.

The tensors stay the same objects; only their memory is freed and allocated anew, at another address. So recorded graphs
are dropped, and recorded again when they are needed. Nothing else may hold a view of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from whorl.device import HOST, accelerator
from whorl.nn.weight import note_change

TAGS = ("weights", "kv_cache")
Freed = list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]  # tensors, and their shapes and strides


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested containers, such as the caches of a runner."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from tensors_in(entry)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(list(vars(value).values()))


class Sleeper:
    """The memory of a model and of its caches. device: where they are."""

    def __init__(self, model: torch.nn.Module, caches: Any, device: str) -> None:
        self._model, self._caches, self._device = model, caches, device
        self._freed: dict[str, Freed] = {}
        self._saved: list[tuple[Tensor, Tensor]] = []

    def free_cache(self) -> None:
        self._free("kv_cache", tensors_in(self._caches))

    def free_weights(self, *, is_saved: bool) -> None:
        """Free the weights. is_saved: keep them in the host's memory; on a CPU they then stay where they are."""
        parameters = list(self._model.parameters())
        if is_saved and self._device == HOST:
            self._freed["weights"] = []
            return
        self._saved = [(weight, weight.detach().to(HOST, copy=True)) for weight in parameters] if is_saved else []
        for weight in parameters:
            vars(weight).pop("packed", None)
        self._free("weights", parameters)

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, tag: str) -> None:
        """Allocate what was freed: weights that were saved as they were, else empty; caches with zeros."""
        note_change()
        for tensor, shape, stride in self._freed.pop(tag):
            tensor.data = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
            if tag == "kv_cache":
                tensor.zero_()
        if tag == "weights":
            for tensor, saved in self._saved:
                tensor.data.copy_(saved)
            self._saved = []

    @torch.inference_mode(False)
    def _free(self, tag: str, tensors: Iterable[Tensor]) -> None:
        self._freed[tag] = [(tensor, tensor.shape, tensor.stride()) for tensor in tensors]
        for tensor, _, _ in self._freed[tag]:
            tensor.data = tensor.new_empty(0)
        if (module := accelerator(self._device)) is not None:
            module.synchronize()
            module.empty_cache()
