"""whorl_gmm: compute the experts by `ops.grouped_matmul`, without padding and without a device synchronisation."""

from collections.abc import Hashable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import GroupedExperts

from whorl import ops
from whorl.titan.local import assign_padding, local

from .conversion import Converter, Probe, replace_forward


def compute_dtype(module: GroupedExperts, x: Tensor) -> torch.dtype:
    """Return the dtype in which TorchTitan's own experts would multiply.

    That is the dtype of autocast if it is on; bf16 where TorchTitan would call torch._grouped_mm; else that of x.
    """
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return torch.bfloat16 if module.use_grouped_mm else x.dtype


def _forward(self: GroupedExperts, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """Compute what GroupedExperts.forward does, by our operator: x [rows, C], sorted by expert -> [rows, C]."""
    dtype = compute_dtype(self, x)
    w1, w2, w3 = (local(w).to(dtype) for w in (self.w1, self.w2, self.w3))
    counts = num_tokens_per_expert
    if _is_expert_parallel(self.w1):
        counts = assign_padding(counts, x.shape[0])
    rows = x.to(dtype)
    hidden = F.silu(ops.grouped_matmul(rows, w1, counts)) * ops.grouped_matmul(rows, w3, counts)
    out = ops.grouped_matmul(hidden, w2, counts)
    return out if torch.is_autocast_enabled(x.device.type) else out.to(x.dtype)


def _is_expert_parallel(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and "ep" in (weight.device_mesh.mesh_dim_names or ())


class GroupedMatmulConverter(Converter[GroupedExperts]):
    """Converts TorchTitan's GroupedExperts."""

    name = "whorl_gmm"
    operators = ("grouped_matmul", "grouped_matmul_backward")

    def is_candidate(self, module: nn.Module) -> TypeGuard[GroupedExperts]:
        return type(module) is GroupedExperts

    def kind(self, module: GroupedExperts) -> Hashable:
        return tuple(module.w1.shape), module.use_grouped_mm

    def replace(self, module: nn.Module) -> None:
        replace_forward(module, _forward)

    def sample(self, module: GroupedExperts, generator: torch.Generator) -> Probe:
        count, hidden, dim = (min(size, limit) for size, limit in zip(module.w1.shape, (8, 48, 64), strict=True))
        small = GroupedExperts(
            dim=dim, hidden_dim=hidden, num_experts=count, use_grouped_mm=bool(module.use_grouped_mm)
        )
        for weight in small.parameters():
            nn.init.normal_(weight, 0.0, weight.shape[-1] ** -0.5, generator=generator)
        counts = torch.arange(count) * 3  # the first expert has no tokens
        rows = torch.randn(int(counts.sum()), dim, generator=generator)
        return Probe(module=small, inputs=(rows,), constants=(counts,), exact=_expert_by_expert)


def _expert_by_expert(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute the experts one after another in the dtype of the rows, for the comparison with float64."""
    parts = rows.split(counts.tolist())
    weights = zip(module.w1, module.w2, module.w3, strict=True)
    return torch.cat([(F.silu(x @ a.T) * (x @ c.T)) @ b.T for x, (a, b, c) in zip(parts, weights, strict=True)])
