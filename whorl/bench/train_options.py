"""What `whorl bench train` takes. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whorl.fields import option


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    rows: str = option(
        "small,fused,kernels,compile,swap",
        "small, fused, kernels, compile, swap; or switches: dsa+swap.",
        metavar="NAME,..",
    )
    layers: str = option("4,8", "Of the model; the first is dense.", metavar="N,..")
    seq: str = option("4096", "Tokens of the one sequence of a step.", metavar="N,..")
    steps: int | None = option(None, "Timed. Default: 6, and 200 with --curve.", least=1)
    warmup: int = option(3, "Steps before the timed ones.", least=1)
    peer: str | None = option(None, "transformers: time it in the same run.", metavar="NAME")
    profile: str = option("", "Rows whose largest kernels are listed, at the first size.", metavar="NAME,..")
    time_limit: float = option(3600.0, "Seconds after which no further row begins.", least=0)
    curve: bool = option(False, "Train on text instead: loss, gradient norm, KL.")
    read: Path | None = option(None, "With --curve: show what an earlier run wrote.", metavar="FILE")
    plot: Path | None = option(None, "With --curve: write a chart.", metavar="FILE")
    out: Path | None = option(None, "Write the document, after every row.", metavar="FILE")
    tiny: bool | None = option(None, "A model for trying it out. Default: without an accelerator.", "--tiny/--full")
    device: Literal["cpu", "cuda", "npu"] | None = option(None, "Default: the best this machine has.")
