"""The converter whorl_dsa: replace the core of DeepSeek-V3.2's attention by `FusedDSA`, which uses our operators."""

import dataclasses
from collections.abc import Hashable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torchtitan.tools import utils

from whorl import ops
from whorl.titan.converters.conversion import Converter, Probe

from .attention import Attention
from .core import Core, SmallOps
from .fused import FusedDSA

TOKENS, HEADS, TOP = 64, 16, 32  # upper limits for the sample: tokens, heads, selected keys


class DSAConverter(Converter[Attention]):
    """Replaces the core of our attention modules by FusedDSA."""

    name = "whorl_dsa"
    operators = ("sparse_attention", "masked_attention", "lightning_indexer", "indexer_kl_gradients")

    def is_candidate(self, module: nn.Module) -> TypeGuard[Attention]:
        return isinstance(module, Attention)

    def refusal(self, module: Attention) -> str | None:
        core = type(module.core)
        return None if core is SmallOps else f"its core is {core.__name__}, expected SmallOps"

    def kind(self, module: Attention) -> Hashable:
        return module.core.settings, module.rope, module.rank

    def replace(self, module: nn.Module) -> None:
        assert isinstance(module, Attention | CoreHolder)
        with torch.device(module.core.kl.device):
            module.core = FusedDSA(module.core.settings)

    def sample(self, module: Attention, generator: torch.Generator) -> Probe:
        settings, indexer = module.core.settings, module.indexer
        path = settings.path
        if path == "auto":  # compare the path that the job will use, on short sequences
            choice = ops.choose_attention(self.job_config.training.seq_len, settings.topk, utils.device_type)
            path = "masked" if choice == "masked" else "absorbed"
        small = dataclasses.replace(settings, topk=min(settings.topk, TOP), global_tokens=0, path=path)
        heads = min(HEADS, module.wq_b.out_features // (module.nope + module.rope))

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return scale * torch.randn(shape, generator=generator)

        inputs = (
            draw(1, TOKENS, heads, module.nope),
            draw(1, TOKENS, heads, module.rope),
            draw(1, TOKENS, module.rank),
            draw(1, TOKENS, module.rope),
            draw(heads * (module.nope + settings.value), module.rank, scale=module.rank**-0.5),
            draw(1, TOKENS, indexer.num_heads, indexer.head_dim),
            draw(1, TOKENS, indexer.head_dim),
            draw(1, TOKENS, indexer.num_heads, scale=(indexer.num_heads * indexer.head_dim) ** -0.5),
        )
        return Probe(module=CoreHolder(SmallOps(small)), inputs=inputs)


class CoreHolder(nn.Module):
    """A module with a core as its attribute, like an attention module, so that `replace` works on it."""

    def __init__(self, core: SmallOps) -> None:
        super().__init__()
        self.core: Core = core

    def forward(self, *values: Tensor) -> Any:
        return self.core(*values)
