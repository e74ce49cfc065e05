"""The tower of a vision model, timed on pictures and on a video, next to transformers' on the same weights."""

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl import nn
from whorl.bench.decode import timed
from whorl.bench.provenance import Document
from whorl.engine.features import MOST_PATCHES, runs_several
from whorl.models.qwen3_vl_tower_config import Grid, TowerConfig

_TRIED = (1, 16, 12)  # patches on which answers are compared
_SAME = 1e-6  # of the size of features: as good as equal, where a peer is exact


def flops(config: TowerConfig, grids: Sequence[Grid]) -> int:
    """Of all products: heads count as many channels as they have, whatever a kernel pads them to."""
    width, inner, merged = (
        config.hidden_size,
        config.intermediate_size,
        config.hidden_size * config.spatial_merge_size**2,
    )
    block = 4 * width * width + 2 * width * inner
    patches = sum(math.prod(grid) for grid in grids)
    tokens = sum(config.num_tokens(grid) for grid in grids)
    mergers = (1 + len(config.deepstack_visual_indexes)) * (merged * merged + merged * config.out_hidden_size)
    pairs = sum(grid[0] * (grid[1] * grid[2]) ** 2 for grid in grids)
    products = patches * (config.patch_values * width + config.depth * block) + tokens * mergers
    return 2 * products + 4 * pairs * width * config.depth


def padded(config: TowerConfig, dtype: torch.dtype, device: str) -> str:
    """What attention multiplies for each head, in words."""
    if devices.accelerator(device) is None:
        return "the torch reference pads none"
    from whorl.ops.attention.bidirectional_triton import hopper_reason

    head = torch.empty(1, 1, config.head_dim, dtype=dtype, device=device)
    if hopper_reason(head, head, head) is None:
        return f"the kernel for Hopper multiplies {-(-config.head_dim // 16) * 16}"
    return f"the plain kernel multiplies {max(16, 1 << (config.head_dim - 1).bit_length())}"


def patches(config: TowerConfig, grid: Grid, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(grid[0])
    return torch.randn(math.prod(grid), config.patch_values, generator=generator).to(device)


def row(label: str, seconds: float, count: int, work: int, matmul: float) -> Document:
    return {
        "label": label,
        "seconds": seconds,
        "patches_s": count / seconds,
        "tflop_s": work / seconds / 1e12,
        "share_of_matmul": work / seconds / matmul,
    }


def ours(tower: Any, grids: Sequence[Grid], device: str, repeats: int, matmul: float) -> Document:
    """As the engine runs them: several at a time, where that leaves their bits."""
    given = {grid: patches(tower.config, grid, device) for grid in set(grids)}
    count = max(1, MOST_PATCHES // max(math.prod(grid) for grid in grids)) if runs_several(device) else 1

    def run() -> None:
        for first in range(0, len(grids), count):
            tower.encode_all([(given[grid], grid) for grid in grids[first : first + count]])

    return row("whorl", _median(run, device, repeats), _count(grids), flops(tower.config, grids), matmul)


class Peer:
    """transformers' tower with scaled_dot_product_attention, which holds a copy of our weights."""

    def __init__(self, model: Any, values: dict[str, Any], device: str) -> None:
        from transformers import AutoConfig
        from transformers.models.qwen3_vl import modeling_qwen3_vl as dense
        from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as sparse

        kind = values["model_type"]
        vision = {name: value for name, value in values["vision_config"].items() if name != "model_type"}
        config = AutoConfig.for_model(kind, vision_config=vision).vision_config
        config._attn_implementation = "sdpa"
        made = sparse.Qwen3VLMoeVisionModel if kind == "qwen3_vl_moe" else dense.Qwen3VLVisionModel
        with torch.device(device):
            self.model = made._from_config(config, dtype=model.dtype).eval()
        prefix = "model.visual."
        weights = {n.removeprefix(prefix): slot.into for n, slot in nn.slots(model).items() if n.startswith(prefix)}
        self.model.load_state_dict(weights)
        self.device = device

    def features(self, given: Tensor, grids: Sequence[Grid], model: Any = None) -> Tensor:
        model = model or self.model
        dtype = next(model.parameters()).dtype
        with torch.inference_mode():
            found = model(given.to(dtype), torch.tensor(grids, device=self.device))
        return torch.stack([found.pooler_output, *found.deepstack_features])

    def time(self, config: TowerConfig, grids: Sequence[Grid], repeats: int, matmul: float) -> Document:
        """All pictures in one call, which is how it takes them."""
        given = torch.cat([patches(config, grid, self.device) for grid in grids])
        seconds = _median(lambda: self.features(given, grids), self.device, repeats)
        return row("transformers, sdpa", seconds, _count(grids), flops(config, grids), matmul)

    def compare(self, tower: Any) -> Document:
        """Errors of both against the same weights in fp64; ours may be twice as large."""
        given = patches(tower.config, _TRIED, self.device)
        exact = self.features(given, [_TRIED], copy.deepcopy(self.model).double())
        our, their = (
            float((found.double() - exact).norm() / exact.norm())
            for found in (tower.encode(given, _TRIED), self.features(given, [_TRIED]))
        )
        return {"our_error": our, "their_error": their, "is_right": our <= 2 * their + _SAME}


def _median(run: Callable[[], Any], device: str, repeats: int) -> float:
    return statistics.median([timed(device, run) for _ in range(repeats + 1)][1:])


def _count(grids: Sequence[Grid]) -> int:
    return sum(math.prod(grid) for grid in grids)
