"""The settings of an engine: one frozen object, which `LLM` and every command take. This module imports no torch.

A field is declared once, with its default, its bounds and its help text. Commands derive their options from it.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from whorl.engine.graph_sizes import PROMPTS
from whorl.fields import check, option

# The sections of --help.
MODEL, RANKS, STEPS, CACHE, SWITCHES = "Model", "Ranks", "Steps", "Cache", "Switches of the engine"
# A field of each.
of_model, of_ranks, of_steps, of_cache, switch = (
    partial(option, panel=panel) for panel in (MODEL, RANKS, STEPS, CACHE, SWITCHES)
)
STEP_TOKENS = 2048
OFFLOAD_BYTES = 1 << 30  # of host memory, where there is a folder of blocks
SLOTS = 8  # of adapters, by default
DTYPES = {"half": "float16", "float": "float32", "auto": None}  # vLLM's names for dtypes


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `load_model`, on every rank. None means: the best value for this machine and model; each field's text
    says which.

    Raises ValueError for a value that is out of range.
    """

    device: Literal["cpu", "cuda", "npu"] | None = of_model(
        None, "Device to run on. Default: the best one of this machine."
    )
    dtype: Literal["bfloat16", "float16", "float32", "half", "float", "auto"] | None = of_model(
        None, "Dtype of the weights in memory. Default: the model's; float32 on a CPU.", vllm=("--dtype",)
    )
    quantize: Literal["w4a16", "w8a8", "fp8", "cpu4"] | None = of_model(
        None,
        "Quantize the weights while they are loaded, as whorl quantize does; cpu4: 4 bits for CPUs.",
    )
    unpack: bool | None = of_model(
        None,
        "Unpack quantized weights to plain ones. Default: on a CPU if they fit, except GGUF; elsewhere GGUF alone.",
        "--unpack/--no-unpack",
    )
    backend: Literal["auto", "native", "transformers"] = of_model(
        "auto",
        "Code of the model: whorl's own file, or that of transformers, which auto takes for models that have none.",
        vllm=("--model-impl",),
    )
    max_model_len: int | None = of_model(
        None,
        "Longest sequence, prompt and answer together, in tokens. Default: what fits.",
        "--max-seq",
        vllm=("--max-model-len",),
        least=2,
    )

    def __post_init__(self) -> None:
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")  # a torch.dtype is accepted
        object.__setattr__(self, "dtype", DTYPES.get(dtype, dtype) if dtype else None)
        check(self)


@dataclass(frozen=True, kw_only=True)
class EngineSettings(LoadOptions):
    """Settings of `LLM`; the first are `LoadOptions`. None means: the best value for this machine and model; each
    field's text says which.

    Raises ValueError for a value that is out of range or contradicts another one. Example:
    `LLM(path, EngineSettings(tp=2, max_model_len=32768))`
    """

    lora: tuple[str, ...] = of_model(
        (),
        "Adapter of PEFT (LoRA) that requests may choose by its name; may be repeated. generate and chat use the last.",
        "--lora",
        vllm=("--lora-modules",),
        metavar="NAME=PATH",
    )
    max_loras: int | None = of_model(
        None,
        "Most adapters at once, including unloaded ones that requests still use. Default: 8, or one more than --lora.",
        vllm=("--max-loras",),
        least=1,
    )
    tp: int | None = of_ranks(
        None,
        "Tensor parallel degree: ranks that share the model, one device each. Default: 1, or the ranks of torchrun.",
        *("--tp", "--tp-size"),
        vllm=("--tensor-parallel-size", "-tp"),
        least=1,
        env="TP_SIZE",
    )
    ep: int | None = of_ranks(
        None,
        "Expert parallel degree: ranks that divide the experts, each with whole ones. --tp is the same number, or 1: "
        "then the other layers are on every rank, and all bits are those of one.",
        "--ep",
        least=2,
    )
    expert_parallel: bool = of_ranks(
        False,
        "--ep with as many ranks as --tp.",
        "--expert-parallel",
        vllm=("--enable-expert-parallel",),
    )
    tp_segments: int | None = of_ranks(
        None,
        "Sum row-parallel matmuls in this many segments and in one tree: --tp 1, 2, 4 ... up to it have equal bits.",
        least=2,
    )
    sp: Literal["auto", "on", "off"] = of_ranks(
        "off", "Sequence parallelism of prompts over the ranks of --tp; auto: if it pays."
    )
    sp_quantize: Literal["int8"] | None = of_ranks(
        None, "With --sp: ranks exchange activations in 8 bits, which rounds."
    )
    sp_min_tokens: int | None = of_ranks(
        None, "With --sp on: only for steps with at least this many prompt tokens. Default: all steps.", least=1
    )
    sp_fuse: bool = of_ranks(
        False, "With --sp: a matmul and the collective next to it run as one operator, overlapped."
    )
    compilation_config: str | None = of_ranks(
        None,
        'The config of vLLM, for sequence parallelism: {"pass_config": {"enable_sp": true, "sp_min_token_num": 1000}}.',
        vllm=("--compilation-config",),
        metavar="JSON",
    )
    max_num_seqs: int = of_steps(64, "Most sequences that run at once.", vllm=("--max-num-seqs",), least=1)
    max_num_batched_tokens: int | None = of_steps(
        None,
        "Most tokens of one step. Default: 2048, or more if --max-num-seqs or --max-step-tokens need it.",
        vllm=("--max-num-batched-tokens",),
        least=1,
    )
    max_prompt_tokens: int | None = of_steps(
        None,
        "Most prompt tokens of one step; decoding waits for its end. Default: 2048; on a CPU, half a second's worth.",
        "--max-step-tokens",
        least=1,
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = of_cache(
        "auto",
        "Dtype of the KV cache: the model's (auto), or 8 bits with a scale for each token and head, which round.",
        vllm=("--kv-cache-dtype",),
    )
    block_size: int | None = of_cache(
        None,
        "Tokens of a block of the KV cache. Default: what attention on the device needs.",
        vllm=("--block-size",),
        least=1,
    )
    num_blocks: int | None = of_cache(
        None,
        "Blocks of the KV cache, whatever memory they need. Default: what fits into its memory.",
        vllm=("--num-gpu-blocks-override",),
        least=1,
    )
    memory: int | None = of_cache(
        None,
        "Bytes of the KV cache on each device. Default: most of an accelerator's free memory; on a CPU at most 1 GiB.",
        "--cache-memory",
        vllm=("--kv-cache-memory-bytes",),
        least=1,
    )
    gpu_memory_utilization: float | None = of_cache(
        None,
        "Share of an accelerator's memory that may be in use. The KV cache gets what is left, unless its size is set.",
        vllm=("--gpu-memory-utilization",),
        above=0,
        most=1,
    )
    kv_offload_memory: int | None = of_cache(
        None,
        "Bytes of host memory, for each rank, for cached blocks that leave the device. Default: none; with "
        "--kv-offload-dir 1 GiB.",
        least=1,
    )
    kv_offload_dir: str | None = of_cache(
        None,
        "Folder of files with cached blocks, which later runs of the same model use as well.",
        metavar="FOLDER",
    )
    kv_offload_disk: int = of_cache(
        16 << 30, "Most bytes of the files in --kv-offload-dir; those used longest ago are removed.", least=1
    )
    num_snapshots: int | None = of_cache(
        None,
        "Snapshots of per-sequence states to keep for prefix hits. Default: --max-num-seqs; 0 without --prefix-cache.",
        least=0,
    )
    snapshot_tokens: int = of_cache(
        4096, "Prompt tokens after which the state of a long prompt gets another snapshot.", least=1
    )
    encoder_cache: int = of_cache(
        16384,
        "Tokens of images and videos whose features are kept; a single one with more is refused.",
        least=1,
    )
    use_prefix_cache: bool = switch(
        True,
        "Reuse the cached blocks of earlier prompts with the same prefix.",
        "--prefix-cache/--no-prefix-cache",
        vllm=("--enable-prefix-caching/--no-enable-prefix-caching",),
    )
    use_graphs: bool | None = switch(
        None,
        "Record decode steps as graphs and replay them. Default: if the device can.",
        "--graphs/--no-graphs",
        vllm=("--no-enforce-eager/--enforce-eager",),
    )
    prompt_graphs: int = switch(
        PROMPTS[-1],
        "Also record steps with up to this many prompt tokens as graphs, if decode steps are recorded. 0: none.",
        least=0,
        most=PROMPTS[-1],
    )
    run_ahead: bool | None = switch(
        None,
        "Launch a step before the tokens of the last one are read. Default: on accelerators.",
        "--run-ahead/--no-run-ahead",
        vllm=("--async-scheduling/--no-async-scheduling",),
    )
    warmup: Literal["full", "short", "off"] | None = switch(
        None,
        "Warm up all sizes, common ones or none. Default: full for whorl serve on an accelerator, else off.",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = of_steps(
        "raw_logprobs",
        "Log-probabilities of answers: the model's, or those of the distribution that was sampled from, after "
        "penalties, temperature and filters.",
        vllm=("--logprobs-mode",),
    )
    routed_experts: bool = of_steps(
        False,
        "Record to which experts every token was sent, and report it with answers, for trainers that replay it.",
        "--routed-experts",
        vllm=("--enable-return-routed-experts",),
    )
    seed: int | None = of_steps(None, "Seed of requests without one. Default: a new one each time.", vllm=("--seed",))

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        lora: Any = self.lora
        pairs = [f"{name}={path}" for name, path in lora.items()] if isinstance(lora, Mapping) else lora
        object.__setattr__(self, "lora", tuple(pairs))
        if len(self.adapters) != len(self.lora):
            raise ValueError(f"lora is {list(self.lora)}, expected NAME=PATH, each with another name")
        if self.max_loras is not None and self.max_loras < len(self.lora):
            raise ValueError(f"max_loras is {self.max_loras}, and lora names {len(self.lora)} adapters; raise it")
        if self.offload_bytes and self.routed_experts:
            raise ValueError("routed_experts: blocks from the host have no record of experts; leave kv_offload out")
        if self.offload_bytes and not self.use_prefix_cache:
            raise ValueError("kv_offload needs the prefix cache, and use_prefix_cache is False; leave one of them out")
        if self.ep is not None and self.tp not in (None, 1, self.ep):
            raise ValueError(f"ep is {self.ep} and tp is {self.tp}; expected a tp of 1 or {self.ep}")
        if self.divides_experts and self.tp_segments:
            raise ValueError("ep divides whole experts, and tp_segments cuts them; leave one of them out")
        if self.divides_experts and self.use_graphs:
            raise ValueError(
                "ep: the host counts the rows that ranks exchange, so nothing is recorded; omit use_graphs"
            )
        self._check_ranks()

    @property
    def num_ranks(self) -> int | None:
        """How many ranks run the model; None: as many as torchrun has started, or 1."""
        return self.tp if self.ep is None else self.ep

    @property
    def divides_experts(self) -> bool:
        """Whether ranks have whole experts instead of shards."""
        return self.ep is not None or self.expert_parallel

    def num_shards(self, num_ranks: int) -> int:
        """Return how many ranks share the layers other than experts."""
        return 1 if self.ep is not None and self.tp in (None, 1) else num_ranks

    @property
    def offload_bytes(self) -> int:
        """The bytes of host memory for blocks beyond the device; 0: there are none."""
        default = OFFLOAD_BYTES if self.kv_offload_dir is not None else 0
        return default if self.kv_offload_memory is None else self.kv_offload_memory

    @property
    def adapters(self) -> dict[str, str]:
        """The folders or ids of the adapters of `lora`, by name."""
        pairs = (pair.partition("=") for pair in self.lora)
        return {name: path for name, _, path in pairs if name and path}

    @property
    def most_loras(self) -> int:
        """How many adapters have a slot at once."""
        return self.max_loras or max(SLOTS, len(self.lora) + 1)

    def _check_ranks(self) -> None:
        """Raise ValueError if options of parallelism contradict each other."""
        if self.routed_experts and self.sp != "off":
            raise ValueError(f"routed_experts: sp is {self.sp}, and ranks that share tokens record none; set sp to off")
        if self.tp_segments is not None and (self.sp != "off" or self.compilation_config is not None or self.lora):
            raise ValueError("tp_segments: neither sequence parallelism nor LoRA is possible with it; leave one out")
        sp = {"sp_quantize": self.sp_quantize, "sp_min_tokens": self.sp_min_tokens, "sp_fuse": self.sp_fuse or None}
        options = {name: value for name, value in sp.items() if value is not None}
        if options and self.sp == "off":
            name, value = next(iter(options.items()))
            raise ValueError(f"sequence parallelism: {name} is {value!r}, and sp is off; set sp to on or auto")
        if self.sp == "auto" and self.sp_min_tokens is not None:
            raise ValueError(
                f"sequence parallelism: sp is auto, which chooses the number of tokens, and sp_min_tokens is "
                f"{self.sp_min_tokens}; set sp to on, or leave sp_min_tokens out"
            )
        if (self.sp_min_tokens or 0) > self.step_tokens:
            raise ValueError(
                f"sequence parallelism: sp_min_tokens is {self.sp_min_tokens}, and no step has more than "
                f"{self.step_tokens} tokens; lower it, or raise max_num_batched_tokens"
            )
        if self.compilation_config is not None:
            self._check_compilation(self.compilation_config)

    def _check_compilation(self, text: str) -> None:
        """Raise ValueError if vLLM's compilation config is not a JSON object, or sp is set as well."""
        if self.sp != "off":
            raise ValueError(
                f"sequence parallelism: sp is {self.sp}, and compilation_config is set; give only one of them"
            )
        try:
            config = json.loads(text)
        except ValueError as error:
            raise ValueError(f"compilation config: not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"compilation config: expected an object with names and values, got {config!r}")

    @property
    def memory_share(self) -> float | None:
        """gpu_memory_utilization, unless num_blocks or memory sets the size of the cache."""
        return self.gpu_memory_utilization if self.num_blocks is None and self.memory is None else None

    @property
    def step_tokens(self) -> int:
        """The most tokens of one step: it has room for a token of every sequence and for max_prompt_tokens."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(STEP_TOKENS, self.max_num_seqs, self.max_prompt_tokens or 0)

    def changed(self, **changes: Any) -> "EngineSettings":
        """Return these settings with other values; TypeError for an unknown name, with the nearest known one."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"LLM: no such setting: {name!r}. The nearest is {near!r}; all are {', '.join(known)}")
        return replace(self, **changes)
