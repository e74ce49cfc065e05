"""The options of `whorl bench`: a dataclass for each command. This module needs no torch."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.extras import how_to_install
from whorl.fields import check, option
from whorl.startup import starting

Device = Literal["cpu", "cuda", "npu"]
Dtype = Literal["bfloat16", "float16", "float32"]
PEER = "transformers"


def check_peer(peer: str | None) -> None:
    """Raise ValueError when the library to time next to whorl is not the one that can be, or is not installed."""
    if peer not in (None, PEER):
        raise ValueError(f"--peer is {peer}, expected {PEER}")
    if peer is not None and importlib.util.find_spec(peer) is None:
        raise ValueError(f"--peer {peer}: the package is not installed: pip install {peer}")


def prepare_torchtitan(device: str | None) -> None:
    """Make TorchTitan ready for the device before anything imports it; raises ValueError when it is not installed."""
    if importlib.util.find_spec("torchtitan") is None:
        raise ValueError(f"bench train needs torchtitan: {how_to_install('train')}")
    with starting():
        from whorl.device import default_device
    if (device or default_device()) == "cpu":
        from whorl.titan import cpu

        cpu.install()


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsOptions:
    """What `whorl bench ops` measures, and next to what."""

    device: Device | None = option(None, "Default: the best device of this machine.")
    dtype: Dtype = option("bfloat16", "dtype of the inputs.")
    quick: bool | None = option(
        None, "Use at most 64 tokens. Default: --quick without an accelerator.", "--quick/--full"
    )
    compiled: bool | None = option(
        None, "Time torch.compile too. Default: yes, unless --quick.", "--compile/--no-compile"
    )
    plot: Path | None = option(None, "Write a bar chart (.png, .svg, .pdf).", metavar="FILE")


# Fields of EngineSettings that are not options because the benchmark sets them, with the text to print.
_SIZE = "the benchmark sizes the engine for --batch, --tokens and --prompt-tokens"
_ONE_RANK = "decoding is timed on one rank; python -m bench.sp and bench.collectives use several"
SET_BY_MEASUREMENT = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_prompt_tokens", "max_model_len"), _SIZE),
    **dict.fromkeys(("num_blocks", "memory", "gpu_memory_utilization"), _SIZE),
    "encoder_cache": "there are no images in this benchmark",
    **dict.fromkeys(("tp", "sp", "sp_quantize", "sp_min_tokens", "sp_fuse", "compilation_config"), _ONE_RANK),
    **dict.fromkeys(
        ("quantize", "unpack"), "weights are timed as the checkpoint has them; whorl quantize writes a quantised one"
    ),
    **dict.fromkeys(
        ("use_prefix_cache", "num_snapshots", "snapshot_tokens"),
        "the prefix cache is off, so that every prompt is computed",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """What `whorl bench decode` measures."""

    random_config: str | None = option(
        None,
        "Random weights of this shape: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-8B, DeepSeek-V3.2-4L, a config.json, ...; "
        "a suffix gives the quantisation, as in Qwen3-30B-A3B:w4a16 (or fp8, w8a8).",
        metavar="NAME|PATH",
    )
    batch: str = option("1,8,64", "Numbers of sequences, or a range such as 1..8.", metavar="N,N|N..N")
    context: str | None = option(
        None,
        "Keys of each sequence before decoding is timed; the cache is filled with random values. Default: 16.",
        metavar="N,N",
    )
    tokens: int | None = option(None, "Tokens to generate. Default: 128, or 64 without an accelerator.", least=1)
    prompt_tokens: int = option(0, "Also time the prefill of a prompt of this many tokens.", least=0)
    repeats: int = option(5, "Number of runs; the median is reported.", least=1)
    peer: str | None = option(None, "Also time this library in the same run: transformers.", metavar="NAME")
    classify: bool = option(False, "Compare speculation with plain decoding and classify every output.")
    profile: bool = option(False, "Profile a decode step by part of a layer.")

    def check(self, engine: EngineSettings, drafting: DraftOptions) -> None:
        """Raise ValueError for options that conflict."""
        if self.classify and self.profile:
            raise ValueError("bench decode: give only one of --classify and --profile")
        if (draft_options := drafting.option_names()) and not self.classify:
            raise ValueError(f"{draft_options[0]} is an option of drafting; add --classify")
        if self.random_config is not None and self.classify:
            raise ValueError("--classify needs a trained MODEL; random weights generate no text to classify")
        if engine.warmup is not None:
            raise ValueError(f"--warmup {engine.warmup}: only steps that are warm are timed; leave it out")
        if self.context is not None and self.classify:
            raise ValueError(f"--context {self.context} does not apply to --classify; give only one of them")
        parse_counts(self.batch, "--batch")
        if self.context is not None:
            parse_counts(self.context, "--context")
        check_peer(self.peer)


def not_of(*names: str) -> dict[str, str]:
    """Return fields of `DecodeOptions` that a script which measures something else does not have, with the reason."""
    return dict.fromkeys(names, "an option of whorl bench decode")


def parse_counts(text: str, option: str, *, least: int = 1) -> tuple[int, ...]:
    """Return the numbers of a list such as 1,8,64 or a range such as 1..8; raises ValueError for anything else."""
    try:
        first, dots, last = text.partition("..")
        counts = range(int(first), int(last) + 1) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < least:
        example = "numbers such as 1,8,64 or a range such as 1..8"
        raise ValueError(f"{option} is {text}, expected {example}{f', from {least} up' if least > 1 else ''}")
    return tuple(counts)


ARRIVALS, LENGTHS, REQUESTS, RESULTS = "Arrivals", "Lengths", "Requests", "Results"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The load. Raises ValueError for values out of range; `serve.benchmark` checks for conflicts."""

    url: str | None = option(
        None,
        "A running server with the OpenAI API; MODEL is then the name it serves. Default: an engine in this process.",
        metavar="URL",
    )
    api_key: str | None = option(None, "With --url: sent as a bearer token.", metavar="KEY", env="WHORL_API_KEY")
    random_config: str | None = option(
        None, "Random weights of this shape: Qwen3-30B-A3B, Qwen3-0.6B, a config.json.", metavar="NAME|PATH"
    )
    rate: float | None = option(
        None,
        "Requests per second at random times (Poisson), however many are in flight; inf: all at once.",
        above=0,
        panel=ARRIVALS,
    )
    concurrency: int | None = option(
        None, "Requests in flight at once: each that ends is followed by the next. Default: 8.", least=1, panel=ARRIVALS
    )
    sweep: str | None = option(
        None, "Measure each of several loads: concurrency=1,2,4,8 or rate=0.5,1,2.", metavar="NAME=N,N", panel=ARRIVALS
    )
    requests: int | None = option(
        None, "Number of requests per load. Default: 64, or as many as fit --seconds.", least=1, panel=ARRIVALS
    )
    seconds: float | None = option(None, "Start no request after this many seconds.", above=0, panel=ARRIVALS)
    input: str | None = option(
        None,
        "Tokens of a prompt: 512, 512:1536 (uniform), lognormal:MEDIAN,SIGMA[,MOST]. Default: 256.",
        metavar="LENGTHS",
        panel=LENGTHS,
    )
    output: str | None = option(
        None, "Tokens of an output, in the same form. Default: 64.", metavar="LENGTHS", panel=LENGTHS
    )
    trace: Path | None = option(
        None,
        "Read lengths from JSON lines: input_length, output_length, timestamp in ms, hash_ids of shared blocks.",
        metavar="FILE",
        panel=LENGTHS,
    )
    shared_prefix: int = option(0, "Tokens of a prefix that prompts share, before each prompt.", least=0, panel=LENGTHS)
    prefixes: int = option(1, "Number of different shared prefixes.", least=1, panel=LENGTHS)
    seed: int = option(
        0, "Seed of the workload; the same seed gives the same requests at the same times.", least=0, panel=LENGTHS
    )
    chat: bool = option(False, "With --url: use /v1/chat/completions instead of /v1/completions.", panel=REQUESTS)
    body: str | None = option(
        None, 'With --url: fields to add to every request: {"cache_salt": "2"}.', metavar="JSON", panel=REQUESTS
    )
    ignore_eos: bool = option(
        True,
        "Generate all requested tokens, even after the model ends its output.",
        "--ignore-eos/--no-ignore-eos",
        panel=REQUESTS,
    )
    warmup_requests: int = option(4, "Requests before each load that are not counted.", least=0, panel=ARRIVALS)
    timeout: float = option(
        120.0, "With --url: seconds without data after which a request has failed.", above=0, panel=REQUESTS
    )
    slo: str | None = option(
        None,
        "Latency bounds of a good request, in ms: ttft=500,itl=50; also tpot, e2e.",
        metavar="NAME=MS,..",
        panel=RESULTS,
    )
    records: Path | None = option(
        None, "Write the measurements of each request as JSON lines.", metavar="FILE", panel=RESULTS
    )
    plot: Path | None = option(
        None, "Write a chart of latency and throughput against the load.", metavar="FILE", panel=RESULTS
    )

    def __post_init__(self) -> None:
        check(self)


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
    steps: int = option(6, "Timed steps.", least=1)
    warmup: int = option(3, "Warm-up steps before the timed ones.", least=1)
    peer: str | None = option(None, "Also time this library in the same run: transformers.", metavar="NAME")
    ring: int = option(3, "Buckets of swapped moments on the device at once, 2^25 elements each.", least=2)
    profile: str = option("", "Rows to profile at the first size; their longest kernels are listed.", metavar="NAME,..")
    time_limit: float = option(3600.0, "Start no row after this many seconds.", least=0)
    out: Path | None = option(None, "Write the document as JSON after every row.", metavar="FILE")
    tiny: bool | None = option(None, "Use a tiny model. Default: --tiny without an accelerator.", "--tiny/--full")
    device: Device | None = option(None, "Default: the best device of this machine.")


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
    device: Device | None = option(None, "Default: the best device of this machine.")
    dtype: Dtype | None = option(None, "Default: bfloat16, or float32 on a CPU.")
