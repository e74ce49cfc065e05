"""whorl_rms_norm: compute every nn.RMSNorm by `ops.rms_norm`."""

from collections.abc import Hashable
from typing import TypeGuard

import torch
from torch import Tensor, nn

from whorl.titan.local import normalise

from .conversion import Converter, Probe, replace_forward


def _forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return normalise(x, self.weight, self.eps)


class RMSNormConverter(Converter[nn.RMSNorm]):
    """Converts nn.RMSNorm."""

    name = "whorl_rms_norm"
    operators = ("rms_norm", "rms_norm_backward")

    def is_candidate(self, module: nn.Module) -> TypeGuard[nn.RMSNorm]:
        return type(module) is nn.RMSNorm

    def refusal(self, module: nn.RMSNorm) -> str | None:
        if not module.elementwise_affine:
            return "it has no weight"
        shape = tuple(module.normalized_shape)
        return None if len(shape) == 1 else f"it normalises {len(shape)} dims, {list(shape)}"

    def kind(self, module: nn.RMSNorm) -> Hashable:
        return tuple(module.normalized_shape), module.eps

    def replace(self, module: nn.Module) -> None:
        replace_forward(module, _forward)

    def sample(self, module: nn.RMSNorm, generator: torch.Generator) -> Probe:
        small = nn.RMSNorm(module.normalized_shape, module.eps)
        nn.init.normal_(small.weight, 1.0, 0.1, generator=generator)
        return Probe(module=small, inputs=(torch.randn(32, *module.normalized_shape, generator=generator),))
