"""The options of `whorl bench decode`. This module needs no torch."""

from dataclasses import dataclass

from whorl.engine.drafting import DraftOptions
from whorl.engine.settings import EngineSettings
from whorl.fields import option

# Fields of EngineSettings that are not options because the benchmark sets them, with the text to print.
_SIZE = "the benchmark sizes the engine for --batch, --tokens and --prompt-tokens"
_ONE_RANK = "decoding is timed on one rank; whorl bench sp and whorl bench collectives use several"
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
MODES = ("classify", "sweep", "draft_lengths", "verify", "profile", "first")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """What `whorl bench decode` measures."""

    random_config: str | None = option(
        None,
        "Random weights of this shape: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-8B, DeepSeek-V3.2-4L, a config.json, ...; "
        "a suffix gives the quantisation, as in Qwen3-30B-A3B:w4a16 (or fp8, w8a8).",
        metavar="NAME|PATH",
    )
    batch: str | None = option(
        None, "Numbers of sequences (1,8,64), or of tokens that --verify checks (1..8).", metavar="N,N|N..N"
    )
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
    sweep: str | None = option(
        None, "Tabulate prompt lookup over draft lengths and n-gram lengths.", metavar="k=..,ngram=.."
    )
    draft_lengths: str | None = option(
        None,
        "Time a step by tokens drafted (1,2,3,4,8), and give the acceptance from which drafting pays.",
        metavar="N,N",
    )
    verify: bool = option(False, "Time a step by the number of tokens it verifies.")
    profile: bool = option(False, "Profile a decode step by part of a layer.")
    first: bool = option(False, "Time the phases of a start, and the first steps of a mixed load after it.")

    @property
    def mode(self) -> str | None:
        """The selected benchmark other than plain decoding, or None; raises ValueError when there are two."""
        modes = [mode for mode in MODES if getattr(self, mode)]
        if len(modes) > 1:
            first, second = (mode.replace("_", "-") for mode in modes[:2])
            raise ValueError(f"bench decode: give only one of --{first} and --{second}")
        return modes[0] if modes else None

    def check(self, engine: EngineSettings, drafting: DraftOptions) -> None:
        """Raise ValueError for options that conflict."""
        mode = self.mode
        if (draft_options := drafting.option_names()) and mode not in ("classify", "sweep"):
            raise ValueError(f"{draft_options[0]} is an option of drafting; add --classify or --sweep")
        if self.random_config is not None and mode in ("classify", "sweep"):
            raise ValueError(f"--{mode} needs a trained MODEL; random weights generate no text to classify")
        if engine.warmup is not None and mode != "first":
            raise ValueError(f"--warmup {engine.warmup} needs --first; other benchmarks time only steps that are warm")
        if self.context is not None and mode in ("classify", "sweep", "verify"):
            raise ValueError(f"--context {self.context} does not apply to --{mode}; give only one of them")
        for name in ("batch", "context", "draft_lengths"):
            if (text := getattr(self, name)) is not None:
                parse_counts(text, f"--{name.replace('_', '-')}")


def parse_batches(text: str) -> tuple[int, ...]:
    """Return the numbers of --batch."""
    return parse_counts(text, "--batch")


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Return the numbers of a list such as 1,8,64 or a range such as 1..8; raises ValueError for anything else."""
    try:
        first, dots, last = text.partition("..")
        counts = range(int(first), int(last) + 1) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"{option} is {text}, expected numbers such as 1,8,64 or a range such as 1..8")
    return tuple(counts)
