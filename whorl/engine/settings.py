"""What an engine is made with: one frozen object, which `LLM` and every command take. No torch here.

A field is declared once: its default, its bounds and what --help says of it. Commands make their options of it.
"""

import difflib
import json
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from whorl.fields import check, option

# The panels of --help.
MODEL, RANKS, STEPS, CACHE, SWITCHES = "Model", "Ranks", "Steps", "Cache", "Switches of the engine"
STEP_TOKENS = 2048
DTYPES = {"half": "float16", "float": "float32", "auto": None}  # vLLM's words for them


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """None is "what is best here". Values that cannot be, alone or together, are a ValueError."""

    device: Literal["cpu", "cuda", "npu"] | None = option(None, "Default: the best this machine has.", panel=MODEL)
    dtype: Literal["bfloat16", "float16", "float32", "half", "float", "auto"] | None = option(
        None, "Of the weights as they are kept. Default: the model's; float32 on a CPU.", vllm=("--dtype",), panel=MODEL
    )
    quantize: Literal["w4a16", "w8a8", "fp8"] | None = option(
        None, "Round the weights to fewer bits while they are loaded, as whorl quantize does.", panel=MODEL
    )
    unpack: bool | None = option(
        None,
        "Hold quantised weights as plain ones. Default: on a CPU where they fit, and GGUF files elsewhere.",
        "--unpack/--no-unpack",
        panel=MODEL,
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt and answer together, in tokens. Default: what fits.",
        "--max-seq",
        vllm=("--max-model-len",),
        panel=MODEL,
        least=2,
    )
    tp: int | None = option(
        None,
        "Devices to share the model among, one process each. Default: 1, or those that torchrun started.",
        *("--tp", "--tp-size"),
        vllm=("--tensor-parallel-size", "-tp"),
        panel=RANKS,
        least=1,
        env="TP_SIZE",
    )
    sp: Literal["auto", "on", "off"] = option(
        "off", "Prompts by sequence parallelism over the ranks of --tp; auto: where it pays.", panel=RANKS
    )
    sp_quantize: Literal["int8"] | None = option(None, "With --sp: prompts travel in 8 bits. Rounds.", panel=RANKS)
    sp_min_tokens: int | None = option(
        None, "With --sp on: only steps of so many prompt tokens or more. Default: all.", panel=RANKS, least=1
    )
    sp_fuse: bool = option(
        False, "With --sp: a product and the collective beside it run as one operator, piece by piece.", panel=RANKS
    )
    compilation_config: str | None = option(
        None,
        'vLLM\'s, for sequence parallelism: {"pass_config": {"enable_sp": true, "sp_min_token_num": 1000}}.',
        vllm=("--compilation-config",),
        panel=RANKS,
        metavar="JSON",
    )
    max_num_seqs: int = option(64, "Sequences that run at once.", vllm=("--max-num-seqs",), panel=STEPS, least=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Tokens of one step. Default: 2048, or more where others of these need it.",
        vllm=("--max-num-batched-tokens",),
        panel=STEPS,
        least=1,
    )
    max_prompt_tokens: int | None = option(
        None,
        "Prompt tokens of one step; others wait for its end. Default: 2048, on a CPU what takes half a second.",
        "--max-step-tokens",
        panel=STEPS,
        least=1,
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = option(
        "auto",
        "Of keys and values in the cache: fp8 (e4m3) or int8 with a scale for each token and head, which rounds; auto: "
        "the model's.",
        vllm=("--kv-cache-dtype",),
        panel=CACHE,
    )
    block_size: int | None = option(
        None,
        "Tokens of a block of the cache. Default: what attention on the device takes.",
        vllm=("--block-size",),
        panel=CACHE,
        least=1,
    )
    num_blocks: int | None = option(
        None,
        "Blocks of the cache, whatever its memory. Default: as many as that holds.",
        vllm=("--num-gpu-blocks-override",),
        panel=CACHE,
        least=1,
    )
    memory: int | None = option(
        None,
        "Bytes of the cache on each device. Default: most of an accelerator's free memory; 1 GiB on a CPU.",
        "--cache-memory",
        vllm=("--kv-cache-memory-bytes",),
        panel=CACHE,
        least=1,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of an accelerator's whole memory that may be in use; unless more is said, the cache takes the rest.",
        vllm=("--gpu-memory-utilization",),
        panel=CACHE,
        above=0,
        most=1,
    )
    encoder_cache: int = option(
        16384,
        "Tokens of pictures and videos whose features are kept; one that has more is refused.",
        panel=CACHE,
        least=1,
    )
    use_prefix_cache: bool = option(
        True,
        "Find what prompts have in common with earlier ones in the cache.",
        "--prefix-cache/--no-prefix-cache",
        vllm=("--enable-prefix-caching/--no-enable-prefix-caching",),
        panel=SWITCHES,
    )
    use_graphs: bool | None = option(
        None,
        "Record decode steps and replay them. Default: where the device can.",
        "--graphs/--no-graphs",
        vllm=("--no-enforce-eager/--enforce-eager",),
        panel=SWITCHES,
    )
    prompt_graphs: int = option(
        0,
        "Record steps with prompts of up to so many tokens, too: the host's part of short ones is then small. 0: none. "
        "Not measured on a GPU yet.",
        panel=SWITCHES,
        least=0,
    )
    run_ahead: bool | None = option(
        None,
        "Launch a step before the last one's tokens are read. Default: on accelerators.",
        "--run-ahead/--no-run-ahead",
        vllm=("--async-scheduling/--no-async-scheduling",),
        panel=SWITCHES,
    )
    warmup: Literal["full", "short", "off"] | None = option(
        None,
        "What to compile and record before the first request: every size, the common ones, nothing. Default: full "
        "where whorl serve has an accelerator, else off.",
        panel=SWITCHES,
    )
    seed: int | None = option(
        None, "Of requests that have none of their own. Default: another one each time.", vllm=("--seed",), panel=STEPS
    )

    def __post_init__(self) -> None:
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")  # torch.float16 is as good
        object.__setattr__(self, "dtype", DTYPES.get(dtype, dtype) if dtype else None)
        check(self)
        self._check_ranks()

    def _check_ranks(self) -> None:
        sp = {"sp_quantize": self.sp_quantize, "sp_min_tokens": self.sp_min_tokens, "sp_fuse": self.sp_fuse or None}
        given = {name: value for name, value in sp.items() if value is not None}
        if given and self.sp == "off":
            name, value = next(iter(given.items()))
            raise ValueError(f"sequence parallelism: {name} is {value!r}, and sp is off: say on or auto")
        if self.sp == "auto" and self.sp_min_tokens is not None:
            raise ValueError(
                f"sequence parallelism: sp is auto, which finds the number of tokens, and sp_min_tokens is "
                f"{self.sp_min_tokens}: say sp on, or leave sp_min_tokens out"
            )
        if (self.sp_min_tokens or 0) > self.step_tokens:
            raise ValueError(
                f"sequence parallelism: sp_min_tokens is {self.sp_min_tokens}, and no step has more than "
                f"{self.step_tokens} tokens: say fewer, or raise max_num_batched_tokens"
            )
        if self.compilation_config is not None:
            self._check_compilation(self.compilation_config)

    def _check_compilation(self, text: str) -> None:
        if self.sp != "off":
            raise ValueError(
                f"sequence parallelism: sp is {self.sp}, and there is a compilation_config: say one of them"
            )
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"compilation config: not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"compilation config: expected an object with names and values, got {found!r}")

    @property
    def memory_share(self) -> float | None:
        """gpu_memory_utilization, where neither num_blocks nor memory says how large the cache is."""
        return self.gpu_memory_utilization if self.num_blocks is None and self.memory is None else None

    @property
    def step_tokens(self) -> int:
        """Of one step: a token of every sequence, and the prompt tokens that were asked for, must have room."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(STEP_TOKENS, self.max_num_seqs, self.max_prompt_tokens or 0)

    def changed(self, **changes: Any) -> "EngineSettings":
        """These settings with other values; an unknown name is an error that says which is nearest."""
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"LLM: no such setting: {name!r}. The nearest is {near!r}; all are {', '.join(known)}")
        return replace(self, **changes)
