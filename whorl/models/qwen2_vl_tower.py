"""The vision towers of Qwen2-VL and Qwen2.5-VL: a rotation alone says where a patch is.

Most layers of Qwen2.5-VL attend within windows. Its patches are in the order of windows from the first layer to the
last, and its tokens are put back into the image's order.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, ModuleList

from whorl.models.fields import count, number, section
from whorl.models.vision_tower import (
    CACHED_SIZES,
    EPS,
    Attention,
    Block,
    Encoding,
    GatedMLP,
    PatchEmbedding,
    RMSBlock,
    VisionTower,
)
from whorl.models.vision_tower_config import Grid, TowerSizes, check_activation
from whorl.nn import LayerNorm, Linear, RMSNorm

# ---- configurations


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig(TowerSizes):
    """`vision_config` of Qwen2-VL, whose `embed_dim` is the tower's width here, and `hidden_size` the text's."""

    depth: int = 32
    hidden_size: int = 1280
    num_heads: int = 16
    out_hidden_size: int = 3584
    intermediate_size: int = 5120

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "TowerConfig":
        """Read a vision_config; raises ValueError for unsupported values."""
        check_activation(values, "quick_gelu")
        _check_old_names(values)
        width = count(values, "embed_dim", 1280)
        widths = {"hidden_size": width, "out_hidden_size": count(values, "hidden_size", 3584)}
        widths["intermediate_size"] = width * count(values, "mlp_ratio", 4)
        return cls(**cls.counts({**values, **widths}), rope_theta=_theta(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedTowerConfig(TowerSizes):
    """`vision_config` of Qwen2.5-VL. full_layers: those that attend to the whole frame."""

    depth: int = 32
    hidden_size: int = 3584
    num_heads: int = 16
    out_hidden_size: int = 3584
    intermediate_size: int = 3420
    window_size: int = 112  # pixels of a window's side
    tokens_per_second: int = 4
    full_layers: tuple[int, ...]

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "WindowedTowerConfig":
        """Read a vision_config; raises ValueError for unsupported values."""
        check_activation(values, "silu")
        _check_old_names(values)
        sizes = cls.counts(values)
        unit = sizes["patch_size"] * sizes["spatial_merge_size"]
        if sizes["window_size"] < unit:
            raise ValueError(
                f"config.json: vision_config.window_size is {sizes['window_size']}, expected at least the {unit} "
                "pixels of a token"
            )
        full = values.get("fullatt_block_indexes", (7, 15, 23, 31))
        if not isinstance(full, list | tuple) or not all(type(i) is int and i >= 0 for i in full):
            raise ValueError(
                f"config.json: vision_config.fullatt_block_indexes is {full!r}, expected a list of layer numbers"
            )
        return cls(**sizes, full_layers=tuple(full), rope_theta=_theta(values))

    @property
    def window(self) -> int:
        """Tokens along a side of a window."""
        return self.window_size // self.spatial_merge_size // self.patch_size


def _check_old_names(values: Mapping[str, Any]) -> None:
    """Raise ValueError where a name that published files have, and that nothing reads, contradicts the one read."""
    for old, name, default in (("in_chans", "in_channels", 3), ("spatial_patch_size", "patch_size", 14)):
        if values.get(old) is not None and values[old] != count(values, name, default):
            raise ValueError(
                f"config.json: vision_config.{old} is {values[old]!r}, expected {count(values, name, default)}, which "
                f"is {name}"
            )


def _theta(values: Mapping[str, Any]) -> float:
    return number(section(values, "rope_parameters"), "rope_theta", 10000.0)


# ---- layers


class MLP(Module):
    """Feed-forward network with GELU in its cheap form, x sigmoid(1.702 x)."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class WindowedBlock(RMSBlock):
    """A layer of Qwen2.5-VL's tower."""

    def __init__(self, config: WindowedTowerConfig) -> None:
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=True)
        super().__init__(config.hidden_size, EPS, Attention(config), mlp)


class Merger(Module):
    """Merges a block of neighbouring patches to one token. norm: of each patch."""

    def __init__(self, config: TowerSizes, norm: LayerNorm | RMSNorm) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = norm
        first, second = (Linear(self.width, size, bias=True) for size in (self.width, config.out_hidden_size))
        self.mlp = ModuleList([first, nn.GELU(), second])  # a list for the names in checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = (self.ln_q(x) if isinstance(self.ln_q, LayerNorm) else self.ln_q(x, None)[0]).view(-1, self.width)
        for part in self.mlp:
            x = part(x)
        return x


# ---- the towers


class Tower(VisionTower):
    """Qwen2-VL's vision tower."""

    config: TowerConfig

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, bias=False)
        self.blocks = ModuleList(Block(config, MLP(config)) for _ in range(config.depth))
        self.merger = Merger(config, LayerNorm(config.hidden_size, EPS))

    def merge(self, x: Tensor) -> Tensor:
        return self.merger(x)  # type: ignore[no-any-return]


class WindowedTower(VisionTower):
    """Qwen2.5-VL's vision tower."""

    config: WindowedTowerConfig

    def __init__(self, config: WindowedTowerConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, bias=False)
        self.blocks = ModuleList(WindowedBlock(config) for _ in range(config.depth))
        self.merger = Merger(config, RMSNorm(config.hidden_size, EPS))

    def merge(self, x: Tensor) -> Tensor:
        return self.merger(x)  # type: ignore[no-any-return]

    def segments(self, encoding: Encoding, layer: int) -> Tensor:
        assert encoding.windows is not None
        return encoding.starts if layer in self.config.full_layers else encoding.windows

    def arrange(self, encoding: Encoding, grid: Grid) -> Encoding:
        """Put tokens, and with them their patches, into the order of windows: row by row, and so inside each."""
        merge, (frames, rows, columns) = self.config.spatial_merge_size, grid
        index, sizes = windows(rows // merge, columns // merge, self.config.window, encoding.x.device)
        firsts = torch.arange(frames, device=index.device)[:, None] * len(index)
        index = (index + firsts).flatten()
        ends = sizes.repeat(frames).cumsum(0) * merge**2
        x, rotary = (each.unflatten(0, (-1, merge**2))[index].flatten(0, 1) for each in (encoding.x, encoding.rotary))
        starts = nn.functional.pad(ends, (1, 0)).int()
        return replace(encoding, x=x, rotary=rotary, windows=starts, order=index.argsort())


@functools.lru_cache(maxsize=CACHED_SIZES)
@torch.inference_mode(False)  # a later call may save it for backward
def windows(rows: int, columns: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of a frame in the order of windows, [N], and how many each window has, [W].

    rows, columns: of tokens. side: of a window, in tokens; those at the right and at the bottom may be smaller.
    """
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    window = ((row // side) * -(-columns // side) + column // side).flatten()
    return window.argsort(stable=True).to(device), window.bincount().to(device)
