"""Whether a model's weights are still those that the cache was computed with."""

import torch
from torch import Tensor


class WeightVersions:
    """torch counts the changes of a tensor in place. It does not see one made through `.data`."""

    def __init__(self, model: object) -> None:
        self._weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
        self._known = self._versions()
        self._places = self._find_places()

    def have_changed(self) -> bool:
        """Since this was last asked. Weights that lie elsewhere now are refused: recorded steps read the old place."""
        if self._find_places() != self._places:
            raise RuntimeError(
                "LLM: a weight was replaced by another tensor, and recorded steps read the old one: copy new values "
                "into the weights (parameter.copy_ under torch.no_grad), or make a new LLM"
            )
        before, self._known = self._known, self._versions()
        return self._known != before

    def _versions(self) -> list[int]:
        return [_version(weight) for weight in self._weights]

    def _find_places(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version
