"""Detect whether a model's weights have changed since the KV cache was computed."""

import torch
from torch import Tensor


class WeightVersions:
    """The version counters of a model's weights. torch counts in-place changes, except those through `.data`."""

    def __init__(self, model: object) -> None:
        self._weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
        self._known = self._versions()
        self._addresses = self._find_addresses()

    def have_changed(self) -> bool:
        """Return whether weights have changed since the last call. RuntimeError if a weight is another tensor now:
        recorded graphs read the old memory."""
        if self._find_addresses() != self._addresses:
            raise RuntimeError(
                "LLM: a weight was replaced by another tensor, and recorded graphs read the old one; copy new values "
                "into the weights (parameter.copy_ under torch.no_grad), or create a new LLM"
            )
        previous, self._known = self._known, self._versions()
        return self._known != previous

    def _versions(self) -> list[int]:
        return [_version(weight) for weight in self._weights]

    def _find_addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version
