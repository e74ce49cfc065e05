"""Our operators as overrides of TorchTitan 0.3, which has neither `TrainSpec` nor converters.

An override replaces the config of a module, not the module. `--override.imports` names the overrides:

    torchrun ... -m torchtitan.train --module deepseek_v3 --config deepseek_v3_debugmodel --override.imports \\
        whorl.titan.v030.whorl_rms_norm,whorl.titan.v030.whorl_rope,whorl.titan.v030.whorl_gmm

Our own models need TorchTitan 0.2. Parameters keep their names, so that checkpoints fit with and without overrides.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from whorl import ops
from whorl.titan.local import assign_padding, complex_rows, doubled_rows, local, normalise, rotate


class WhorlRMSNorm(RMSNorm):
    """RMSNorm by `whorl.ops.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.weight, self.eps)


@override(target=RMSNorm.Config, exact=True, description="RMSNorm by whorl.ops.rms_norm")
def whorl_rms_norm(config: RMSNorm.Config) -> RMSNorm.Config:
    """Use `ops.rms_norm`; raises ValueError for a norm without a weight."""
    if not config.elementwise_affine:
        raise ValueError(
            "whorl_rms_norm: an RMSNorm has no weight, which the operator needs; select the other norms by fqns"
        )
    return derive(config, WhorlRMSNorm.Config)


class WhorlComplexRoPE(ComplexRoPE):
    """Rotation of neighbouring channels by `whorl.ops.rope`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(query, key, complex_rows(local(rope_cache).squeeze(2)), "pairs")  # type: ignore[return-value]


class WhorlCosSinRoPE(CosSinRoPE):
    """Rotation of the two halves of the channels by `whorl.ops.rope`."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(query, key, doubled_rows(local(rope_cache).squeeze(2)), "half")  # type: ignore[return-value]


@override(target=RoPE.Config, description="rotation by whorl.ops.rope")
def whorl_rope(config: RoPE.Config) -> RoPE.Config:
    """Use `ops.rope`; raises ValueError for an unknown rotation."""
    ours = {ComplexRoPE.Config: WhorlComplexRoPE.Config, CosSinRoPE.Config: WhorlCosSinRoPE.Config}
    if type(config) not in ours:
        known = ", ".join(kind.__qualname__ for kind in ours)
        raise ValueError(
            f"whorl_rope: the config of a rotation is {type(config).__qualname__}, expected one of {known}"
        )
    return derive(config, ours[type(config)])


class WhorlGroupedExperts(GroupedExperts):
    """Experts by `whorl.ops.grouped_matmul`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        counts = assign_padding(torch.diff(offs, prepend=offs.new_zeros(1)), A.shape[0])
        return ops.grouped_matmul(A, B_t.transpose(-2, -1), counts)


@override(target=GroupedExperts.Config, exact=True, description="experts by whorl.ops.grouped_matmul")
def whorl_gmm(config: GroupedExperts.Config) -> GroupedExperts.Config:
    """Use `ops.grouped_matmul` in the experts."""
    return derive(config, WhorlGroupedExperts.Config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What `dispatch` passes to `combine`."""

    places: Tensor  # the row of each choice among the tokens sorted by expert, from `ops.permute`
    scores: Tensor  # the router's score of each choice


class WhorlTokenDispatcher(LocalTokenDispatcher):
    """Dispatch and combine by `whorl.ops.permute` and `unpermute`, with all experts on this rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        rows, places, _ = ops.permute(x_TD, topk_expert_ids_TK, self.num_experts)
        return rows, num_local_tokens_per_expert_E, Places(places=places, scores=topk_scores_TK)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        return ops.unpermute(routed_output_RD, metadata.places, metadata.scores).to(x_TD.dtype)


class WhorlAllToAllDispatcher(AllToAllTokenDispatcher):
    """TorchTitan 0.3's default dispatcher, with our operators where all experts are on this rank.

    With expert parallelism it is unchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(self, *values: Tensor) -> tuple[Tensor, Tensor, Any]:
        return WhorlTokenDispatcher.dispatch(self, *values) if self.ep_mesh is None else super().dispatch(*values)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        is_ours = isinstance(metadata, Places)
        combine = WhorlTokenDispatcher.combine if is_ours else AllToAllTokenDispatcher.combine
        return combine(self, routed_output_RD, metadata, x_TD)


@override(target=LocalTokenDispatcher.Config, description="dispatch by whorl.ops.permute and unpermute")
def whorl_permute(config: LocalTokenDispatcher.Config) -> LocalTokenDispatcher.Config:
    """Use `ops.permute` and `ops.unpermute`; raises ValueError for another dispatcher."""
    ours = {
        LocalTokenDispatcher.Config: WhorlTokenDispatcher.Config,
        AllToAllTokenDispatcher.Config: WhorlAllToAllDispatcher.Config,
    }
    if type(config) not in ours:
        raise ValueError(
            f"whorl_permute: {type(config).__qualname__} is not supported; remove whorl_permute from --override.imports"
        )
    return derive(config, ours[type(config)])
