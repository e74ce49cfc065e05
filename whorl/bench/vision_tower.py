"""Times the tower of a vision model on images and on a video, next to that of transformers on the same weights."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whorl import device as devices
from whorl import nn
from whorl.bench.decode_engine import median_time
from whorl.bench.provenance import Document
from whorl.engine.features import MOST_PATCHES, runs_several
from whorl.models.qwen3_vl_tower_config import TowerConfig
from whorl.models.vision_tower_config import Grid

_TRIED = (1, 16, 12)  # grid of patches on which outputs are compared
_SAME = 1e-6  # relative error that our tower may have even where that of transformers is exact


def flops(config: TowerConfig, grids: Sequence[Grid]) -> int:
    """Return the FLOPs of all matrix products; heads count with their channels, whatever a kernel pads them to."""
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
    """Return as text how many channels of a head the attention kernel multiplies after padding."""
    if devices.accelerator(device) is None:
        return "the torch reference pads none"
    from whorl.ops.attention.bidirectional_triton import hopper_reason

    head = torch.empty(1, 1, config.head_dim, dtype=dtype, device=device)
    if hopper_reason(head, head, head) is None:
        return f"the kernel for Hopper multiplies {-(-config.head_dim // 16) * 16}"
    return f"the plain kernel multiplies {max(16, 1 << (config.head_dim - 1).bit_length())}"


def patches(config: TowerConfig, grid: Grid, device: str) -> Tensor:
    """Return random patches of a grid, the same in every run."""
    generator = torch.Generator().manual_seed(grid[0])
    return torch.randn(math.prod(grid), config.patch_values, generator=generator).to(device)


def row(label: str, seconds: float, count: int, work: int, matmul: float) -> Document:
    """Return a row: count patches and `work` FLOPs in `seconds`, next to the rate of a matmul."""
    return {
        "label": label,
        "seconds": seconds,
        "patches_s": count / seconds,
        "tflop_s": work / seconds / 1e12,
        "share_of_matmul": work / seconds / matmul,
    }


def ours(tower: Any, grids: Sequence[Grid], device: str, repeats: int, matmul: float) -> Document:
    """Time our tower as the engine runs it: several images at once, where that does not change their bits."""
    inputs = {grid: patches(tower.config, grid, device) for grid in set(grids)}
    count = max(1, MOST_PATCHES // max(math.prod(grid) for grid in grids)) if runs_several(device) else 1

    def run() -> None:
        for first in range(0, len(grids), count):
            tower.encode_all([(inputs[grid], grid) for grid in grids[first : first + count]])

    return row("whorl", median_time(device, run, repeats), _count(grids), flops(tower.config, grids), matmul)


class Peer:
    """transformers' tower with scaled_dot_product_attention and a copy of our weights."""

    def __init__(self, model: Any, values: dict[str, Any], device: str) -> None:
        from transformers import AutoConfig
        from transformers.models.qwen3_vl import modeling_qwen3_vl as dense
        from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as sparse

        kind = values["model_type"]
        vision = {name: value for name, value in values["vision_config"].items() if name != "model_type"}
        config = AutoConfig.for_model(kind, vision_config=vision).vision_config
        config._attn_implementation = "sdpa"
        tower_class = sparse.Qwen3VLMoeVisionModel if kind == "qwen3_vl_moe" else dense.Qwen3VLVisionModel
        with torch.device(device):
            self.model = tower_class._from_config(config, dtype=model.dtype).eval()
        prefix = "model.visual."
        weights = {
            n.removeprefix(prefix): slot.into for n, slot in nn.destinations(model).items() if n.startswith(prefix)
        }
        self.model.load_state_dict(weights)
        self.device = device

    def features(self, inputs: Tensor, grids: Sequence[Grid], model: Any = None) -> Tensor:
        model = model or self.model
        dtype = next(model.parameters()).dtype
        with torch.inference_mode():
            outputs = model(inputs.to(dtype), torch.tensor(grids, device=self.device))
        return torch.stack([outputs.pooler_output, *outputs.deepstack_features])

    def time(self, config: TowerConfig, grids: Sequence[Grid], repeats: int, matmul: float) -> Document:
        """Time the tower on all images in one call, as transformers runs it."""
        inputs = torch.cat([patches(config, grid, self.device) for grid in grids])
        seconds = median_time(self.device, lambda: self.features(inputs, grids), repeats)
        return row("transformers, sdpa", seconds, _count(grids), flops(config, grids), matmul)

    def compare(self, tower: Any) -> Document:
        """Return the errors of both towers against fp64 with the same weights; ours may be twice as large."""
        inputs = patches(tower.config, _TRIED, self.device)
        exact = self.features(inputs, [_TRIED], copy.deepcopy(self.model).double())
        our, their = (
            float((features.double() - exact).norm() / exact.norm())
            for features in (tower.encode(inputs, _TRIED), self.features(inputs, [_TRIED]))
        )
        return {"our_error": our, "their_error": their, "is_right": our <= 2 * their + _SAME}


def _count(grids: Sequence[Grid]) -> int:
    return sum(math.prod(grid) for grid in grids)
