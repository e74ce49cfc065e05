"""The format of a GGUF file's weights: its blocks as they are stored, or interleaved for the CPU kernels."""

from collections.abc import Mapping
from typing import Any

from whorl.nn.weight import Format, Formats

from .gguf import KINDS, GgufBlocks, Tiles
from .quantised import names, one_of, setting


def formats(settings: Mapping[str, Any]) -> Formats:
    """Make the formats of a GGUF file; settings: made of the file's header, no config.json has them."""
    kinds = setting(settings, dict, {}, "kinds")
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ValueError(f"{name} is of type {kind}, which cannot stay packed; expected one of {', '.join(KINDS)}")
    if not kinds:
        raise ValueError("quantization_config: gguf without the kinds of its tensors: name the .gguf file itself")
    tiled = frozenset(names(settings, "tiled"))
    tiles = Tiles(tiled, *setting(settings, list, [], "tile")) if tiled else Tiles()
    if (token_bits := one_of(settings, "token_bits", (None, 8, 16), None)) is not None:
        from .panels import GgufPanels  # which loads the CPU kernels

        blocks: Format = GgufPanels(kinds, tiles, token_bits)
    else:
        blocks = GgufBlocks(kinds, tiles)
    return Formats(of=lambda name: blocks, unit=blocks.unit)
