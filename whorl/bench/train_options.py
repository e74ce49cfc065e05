"""The options of `whorl bench train`. This module needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whorl.fields import option


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What `whorl bench train` measures."""

    rows: str = option(
        "small,fused,kernels,compile,swap",
        "Rows, each with more optimisations: small, fused, kernels, compile, swap; or switches joined by +: dsa+swap8.",
        metavar="NAME,..",
    )
    layers: str = option("4,8", "Number of layers; the first is dense.", metavar="N,..")
    seq: str = option("4096", "Tokens of a step, in one sequence.", metavar="N,..")
    steps: int | None = option(None, "Timed steps. Default: 6, or 200 with --curve.", least=1)
    warmup: int = option(3, "Warm-up steps before the timed ones.", least=1)
    peer: str | None = option(None, "Also time this library in the same run: transformers.", metavar="NAME")
    ring: int = option(3, "Buckets of swapped moments on the device at once, 2^25 elements each.", least=2)
    profile: str = option("", "Rows to profile at the first size; their longest kernels are listed.", metavar="NAME,..")
    time_limit: float = option(3600.0, "Start no row after this many seconds.", least=0)
    curve: bool = option(False, "Train on text instead, and record loss, gradient norm and indexer KL.")
    read: Path | None = option(None, "With --curve: show the document of an earlier run.", metavar="FILE")
    plot: Path | None = option(None, "With --curve: write a chart.", metavar="FILE")
    out: Path | None = option(None, "Write the document as JSON after every row.", metavar="FILE")
    tiny: bool | None = option(None, "Use a tiny model. Default: --tiny without an accelerator.", "--tiny/--full")
    device: Literal["cpu", "cuda", "npu"] | None = option(None, "Default: the best device of this machine.")
