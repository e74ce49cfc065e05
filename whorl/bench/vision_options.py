"""What `whorl bench vision` takes. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whorl.fields import option


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionOptions:
    random_config: str | None = option(
        None,
        "Random weights of these shapes: Qwen3-VL-30B-A3B, Qwen3-VL-8B, a config.json. Default: the first; a tiny one "
        "without an accelerator.",
        metavar="NAME|PATH,..",
    )
    pictures: int = option(16, "That the tower encodes, and that stand in the longest prompt.", least=1)
    side: int | None = option(None, "Pixels of a picture's side. Default: 1024; few without an accelerator.", least=1)
    frames: int = option(64, "Of the video.", least=2)
    frame: str | None = option(None, "Pixels of a frame. Default: 640x480; few without one.", metavar="WxH")
    batch: str = option("1,16", "Sequences that decode, each behind a picture.", metavar="N,N")
    tokens: int = option(64, "That each of them makes.", least=1)
    repeats: int = option(3, "Runs to take the median of.", least=1)
    peer: str | None = option(None, "transformers: its tower with sdpa, on the same weights.", metavar="NAME")
    processes: int = option(8, "That decode pictures.", least=1)
    time_limit: float = option(3600.0, "Seconds after which no further part begins.", least=0)
    out: Path | None = option(None, "Write the document, after every part.", metavar="FILE")
    device: Literal["cpu", "cuda", "npu"] | None = option(None, "Default: the best this machine has.")
    dtype: Literal["bfloat16", "float16", "float32"] | None = option(None, "Default: bfloat16; float32 on a CPU.")
