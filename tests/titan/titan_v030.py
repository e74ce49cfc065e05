"""Run by test_titan_plugin.py with TorchTitan 0.3 on the path: its modules before and after our overrides."""

import copy
import json
from typing import Any

import torch
import torchtitan
from torch import Tensor
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.deepseek_v3 import model_registry

from whorl.titan import v030

NAMES = ("whorl_rms_norm", "whorl_rope", "whorl_gmm", "whorl_permute")


def difference(run: Any, theirs: Any, ours: Any) -> float:
    """Over outputs and gradients, of the largest value."""
    worst = 0.0
    for a, b in zip(run(theirs), run(ours), strict=True):
        worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    return worst


def with_gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    total = sum((out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(total, leaves)]


def norm() -> float:
    theirs = RMSNorm.Config(normalized_shape=48).build()
    torch.nn.init.normal_(theirs.weight, 1, 0.1)
    ours = v030.whorl_rms_norm(RMSNorm.Config(normalized_shape=48)).build()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(7, 48, requires_grad=True)
    return difference(lambda m: with_gradients((m(x),), [x, m.weight]), theirs, ours)


def rotation(kind: Any) -> float:
    config = kind.Config(dim=16, max_seq_len=12)
    q, k = (torch.randn(2, 12, heads, 16, requires_grad=True) for heads in (4, 2))
    positions = torch.randint(12, (2, 12))
    worst = 0.0
    for where in (None, positions):
        run = lambda m: with_gradients(m(q, k, where), [q, k])  # noqa: B023, E731
        worst = max(worst, difference(run, config.build(), v030.whorl_rope(config).build()))
    return worst


def experts() -> float:
    config = GroupedExperts.Config(dim=32, hidden_dim=24, num_experts=3)
    theirs = config.build()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, 0, 0.2)
    ours = v030.whorl_gmm(config).build()
    ours.load_state_dict(theirs.state_dict())
    x, counts = torch.randn(24, 32, requires_grad=True), torch.tensor([8, 0, 16])
    return difference(lambda m: with_gradients((m(x, counts),), [x, *m.parameters()]), theirs, ours)


def dispatch(kind: Any) -> float:
    config = kind.Config(num_experts=5, top_k=2)
    x, scores = torch.randn(9, 16, requires_grad=True), torch.rand(9, 2, requires_grad=True)
    ids = torch.rand(9, 5).argsort(-1)[:, :2].contiguous()
    counts = torch.bincount(ids.flatten(), minlength=5)

    def run(dispatcher: Any) -> list[Tensor]:
        rows, rows_per_expert, metadata = dispatcher.dispatch(x, scores, ids, counts)
        factors = torch.arange(1, 6).repeat_interleave(rows_per_expert)
        return with_gradients((dispatcher.combine(rows * factors[:, None], metadata, x),), [x, scores])

    return difference(run, config.build(), v030.whorl_permute(config).build())


def main() -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(model_registry("debugmodel").model)
    lines = apply_overrides(OverrideConfig(imports=[f"{v030.__name__}.{name}" for name in NAMES]), config)
    errors = {
        "norm": norm(),
        "pairs": rotation(ComplexRoPE),
        "half": rotation(CosSinRoPE),
        "experts": experts(),
        "dispatch": dispatch(LocalTokenDispatcher),
        "all to all": dispatch(AllToAllTokenDispatcher),
    }
    matched = {name: sum(f".{name}:" in line for line in lines) for name in NAMES}
    print(json.dumps({"version": torchtitan.__version__, "matched": matched, "errors": errors}))


if __name__ == "__main__":
    main()
