"""The options of `whorl bench vision`. This module needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whorl.fields import option


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionOptions:
    """What `whorl bench vision` measures."""

    random_config: str | None = option(
        None,
        "Random weights of these shapes: Qwen3-VL-30B-A3B, Qwen3-VL-8B, a config.json. Default: the first, or a tiny "
        "model without an accelerator.",
        metavar="NAME|PATH,..",
    )
    pictures: int = option(16, "Number of images for the tower and for the longest prompt.", least=1)
    side: int | None = option(None, "Side of an image in pixels. Default: 1024, or 32 without an accelerator.", least=1)
    frames: int = option(64, "Frames of the video.", least=2)
    frame: str | None = option(
        None, "Size of a frame in pixels. Default: 640x480, or 32x16 without an accelerator.", metavar="WxH"
    )
    batch: str = option("1,16", "Numbers of sequences that decode, each after an image.", metavar="N,N")
    tokens: int = option(64, "Tokens that each sequence generates.", least=1)
    repeats: int = option(3, "Number of runs; the median is reported.", least=1)
    peer: str | None = option(
        None, "Also time this library's tower, on the same weights: transformers.", metavar="NAME"
    )
    processes: int = option(8, "Processes that decode images.", least=1)
    time_limit: float = option(3600.0, "Start no part after this many seconds.", least=0)
    out: Path | None = option(None, "Write the document as JSON after every part.", metavar="FILE")
    device: Literal["cpu", "cuda", "npu"] | None = option(None, "Default: the best device of this machine.")
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(None, "Default: bfloat16, or float32 on a CPU.")
