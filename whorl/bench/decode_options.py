"""What `whorl bench decode` takes about the measurement. No torch here."""

from dataclasses import dataclass

from whorl.fields import option

# Fields of EngineSettings that the measurement itself sets, and what to say to who asks for them.
_SIZE = "the measurement sizes the engine for --batch, --tokens and --prompt-tokens"
_ONE_RANK = "decoding is measured on one rank; whorl bench sp and whorl bench collectives measure several"
SET_BY_MEASUREMENT = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_prompt_tokens", "max_model_len"), _SIZE),
    **dict.fromkeys(("num_blocks", "memory", "gpu_memory_utilization"), _SIZE),
    "encoder_cache": "pictures are not decoded",
    **dict.fromkeys(("tp", "sp", "sp_quantize", "sp_min_tokens", "sp_fuse", "compilation_config"), _ONE_RANK),
    **dict.fromkeys(
        ("quantize", "unpack"), "weights are measured as the checkpoint has them: whorl quantize makes one"
    ),
    "use_prefix_cache": "every prompt is measured as a new one: the cache of prefixes is off",
}
MODES = ("classify", "sweep", "draft_lengths", "verify", "profile", "first")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    random_config: str | None = option(
        None,
        "Random weights of this shape: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-8B, DeepSeek-V3.2-4L, a config.json, ...; "
        "behind it how they are quantised, as in Qwen3-30B-A3B:w4a16 (or fp8, w8a8).",
        metavar="NAME|PATH",
    )
    batch: str | None = option(None, "Sequences (1,8,64), or tokens that --verify checks (1..8).", metavar="N,N|N..N")
    context: str | None = option(
        None,
        "Keys of each sequence before decoding is timed; the cache is filled with random ones. Default: 16.",
        metavar="N,N",
    )
    tokens: int | None = option(None, "To generate. Default: 128, or 64 without an accelerator.", least=1)
    prompt_tokens: int = option(0, "Time the prefill of a prompt this long, too.", least=0)
    repeats: int = option(5, "Runs to take the median of.", least=1)
    peer: str | None = option(None, "transformers: time it in the same run.", metavar="NAME")
    classify: bool = option(False, "Speculation against plain decoding, with a verdict on every output.")
    sweep: str | None = option(None, "A table of prompt lookup over draft and match lengths.", metavar="k=..,ngram=..")
    draft_lengths: str | None = option(
        None,
        "What a step costs by tokens drafted (1,2,3,4,8), and the acceptance from which that pays.",
        metavar="N,N",
    )
    verify: bool = option(False, "What a step costs by tokens checked in it.")
    profile: bool = option(False, "Where the time of a decode step goes, by part of a layer.")
    first: bool = option(False, "What a start takes, phase by phase, and steps of a mixed load right behind it.")

    @property
    def mode(self) -> str | None:
        """Which of the measurements that are not the plain one; ValueError where there are two."""
        modes = [mode for mode in MODES if getattr(self, mode)]
        if len(modes) > 1:
            first, second = (mode.replace("_", "-") for mode in modes[:2])
            raise ValueError(f"bench decode: --{first} and --{second}: say one of them")
        return modes[0] if modes else None
