"""The model, the engine and the prompts of a benchmark of decoding, and steps in which none starts or ends."""

import contextlib
import gc
import statistics
import time
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whorl import device as devices
from whorl import models
from whorl.bench.filled_cache import fill
from whorl.bench.options import DecodeOptions, check_peer, parse_counts
from whorl.bench.provenance import Document, provenance
from whorl.bench.random_config import read_config
from whorl.engine.llm import LLM
from whorl.engine.load import use_one_stream
from whorl.engine.memory import block_size
from whorl.engine.roofline import copy_bandwidth, num_values, step_bytes
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.settings import EngineSettings
from whorl.nn import Experts, weighted

# Tokens of a sequence beside those of the timed steps: one from its prompt, one that may be in flight, and one more, so
# that it does not end. The end of a long sequence frees thousands of blocks, which is not decoding.
SPARE_TOKENS = 3
_COUNTED = 16  # steps whose experts are counted
CONTEXT = 16  # default number of prompt tokens before decoding is timed

Distinct = dict[Experts, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """Validated settings of `whorl bench decode`.

    config: the model's config for random weights; None: the model `name` is loaded. contexts: numbers of keys that the
    cache of each sequence is filled with before decoding is timed; (): a prompt of CONTEXT tokens. prompt_tokens: those
    of a prompt whose prefill is timed; 0: none. engine: its device is never None; each row replaces its sizes.
    """

    name: str
    engine: EngineSettings
    config: dict[str, Any] | None = None
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = ()
    num_tokens: int = 128
    prompt_tokens: int = 0
    repeats: int = 5
    peer: str | None = None

    @staticmethod
    def resolve(model: str | None, options: DecodeOptions, engine: EngineSettings) -> "DecodeSettings":
        """Return the settings with defaults for this machine; raises ValueError for values that conflict."""
        random_config = options.random_config
        if model is not None and random_config is not None:
            raise ValueError(f"bench decode: give only one of MODEL ({model}) and --random-config ({random_config})")
        check_peer(options.peer)
        if random_config is None:
            from whorl.engine.weights import resolve

            resolve(model)  # so that a missing model is an error before anything is measured
        device = devices.require(engine.device or devices.default_device())
        config = None if random_config is None else read_config(random_config)
        contexts = () if options.context is None else parse_counts(options.context, "--context")
        num_tokens = options.tokens or (64 if devices.accelerator(device) is None else 128)
        most = (config or {}).get("max_position_embeddings")
        if most is not None and contexts and max(contexts) + num_tokens + SPARE_TOKENS > most:
            sizes = f"--context {options.context} plus --tokens {num_tokens}"
            raise ValueError(f"{sizes} exceeds the model's {most} positions")
        return DecodeSettings(
            name=random_config or model or "SmolLM2-135M-Instruct",
            engine=engine.changed(device=device),
            config=config,
            batches=parse_counts(options.batch, "--batch"),
            contexts=contexts,
            num_tokens=num_tokens,
            prompt_tokens=options.prompt_tokens,
            repeats=options.repeats,
            peer=options.peer,
        )

    @property
    def device(self) -> str:
        assert self.engine.device is not None
        return self.engine.device

    @property
    def dtype(self) -> torch.dtype | None:
        return getattr(torch, self.engine.dtype) if self.engine.dtype else None

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Return the number of keys and of sequences for each row of the table."""
        return [(context, batch) for context in self.contexts or (CONTEXT,) for batch in self.batches]

    def num_blocks(self, model: Any, length: int) -> int:
        """Return the number of cache blocks for a sequence of `length` tokens."""
        return -(-length // block_size(model.cache_specs(), self.device, self.engine.block_size))

    @property
    def path(self) -> str | None:
        """The model to load; None is the default model."""
        return None if self.name == "SmolLM2-135M-Instruct" else self.name


def load(settings: DecodeSettings) -> tuple[Any, Any]:
    """Return the model and its tokenizer, None for random weights, which need neither safetensors nor tokenizers."""
    from whorl.engine.weights import DTYPES, load_model, random_model, resolve

    use_one_stream(settings.engine)
    if settings.config is not None:
        named = settings.config.get("dtype") or settings.config.get("torch_dtype") or "bfloat16"
        dtype = settings.dtype or DTYPES[named]
        config = {**settings.config, models.BACKEND: settings.engine.backend}
        with torch.inference_mode():
            return random_model(config, device=settings.device, dtype=dtype), None
    from whorl.engine.tokenizer import Tokenizer

    folder = resolve(settings.path)
    model = load_model(folder, device=settings.device, dtype=settings.dtype, backend=settings.engine.backend)
    return model, Tokenizer.from_path(folder)


def header(settings: DecodeSettings, model: Any) -> Document:
    """Return the header of the document: provenance, and the model's size in parameters and bytes."""
    return {
        **provenance(settings.device),
        "model": settings.name,
        "weights": "random" if settings.config is not None else "loaded",
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_parameters": num_values(model),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "kv_cache_dtype": settings.engine.kv_cache_dtype,
        "bytes_per_token": step_bytes(model, batch=1, kv_cache_dtype=settings.engine.kv_cache_dtype),
        "copy_tb_s": copy_bandwidth(settings.device) / 1e12,
    }


def engine(model: Any, batch: int, context: int, settings: DecodeSettings, **changes: Any) -> LLM:
    """Return an engine with room for `batch` sequences of `context` keys and the tokens to generate."""
    length = context + settings.num_tokens + SPARE_TOKENS
    sizes: dict[str, Any] = {
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(2048, batch),
        "max_prompt_tokens": max(2048, batch),
        "max_model_len": length,
        # One more block for each sequence: the scheduler admits none that could stop those running.
        "num_blocks": batch * (1 + settings.num_blocks(model, length)),
        "use_prefix_cache": False,
    }
    llm = LLM(model=model, settings=settings.engine, **sizes, **changes)
    if settings.contexts:
        fill(llm)
    return llm


def start(llm: LLM, vocab_size: int, batch: int, context: int, num_tokens: int) -> list[Sequence]:
    """Add sequences and run their prompts; returns them when each has one token and room for `num_tokens` more."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens + SPARE_TOKENS, ignore_eos=True)
    sequences = [llm.add(prompt, params)[0] for prompt in prompts(batch, context, vocab_size, placeholders(llm.model))]
    while not all(seq.num_outputs for seq in sequences):
        llm.step()
    return sequences


def prompts(count: int, length: int, vocab_size: int, avoided: abc.Sequence[int] = ()) -> list[list[int]]:
    """Return `count` different prompts of random tokens, the same in every run; 0 in place of a token of `avoided`."""
    generator = torch.Generator().manual_seed(count)
    token_ids = torch.randint(vocab_size, (count, length), generator=generator)
    return token_ids.masked_fill(torch.isin(token_ids, torch.tensor(avoided, dtype=torch.int64)), 0).tolist()


def placeholders(model: Any) -> list[int]:
    """Return the tokens that stand for images and videos, which no prompt of text has."""
    ids = (getattr(model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in ids if token is not None]


def timed(device: str, function: Callable[[], Any]) -> float:
    """Return the seconds that `function` takes, with the device synchronized before and after."""
    devices.synchronize(device)
    started = time.perf_counter()
    function()
    devices.synchronize(device)
    return time.perf_counter() - started


def median_time(device: str, function: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `repeats` calls, after one that warms up."""
    return statistics.median([timed(device, function) for _ in range(repeats + 1)][1:])


def speeds(batch: int, needed: float, seconds: float, device: str) -> Document:
    """Return the speed of a step of `batch` tokens that takes `seconds` and must read `needed` bytes, beside the
    roofline: the speed if only reading them took time."""
    limit = needed / copy_bandwidth(device)
    return {
        "tok_s": batch / seconds,
        "ms_per_step": seconds * 1e3,
        "bytes_per_step": needed,
        "tb_s": needed / seconds / 1e12,
        "limit_tok_s": batch / limit,
        "share_of_roofline": limit / seconds,
    }


def free(device: str) -> None:
    """Free memory that is no longer in use."""
    gc.collect()
    devices.empty_cache(device)


# ---- steps in which all sequences decode


def time_steps(llm: LLM, sequences: list[Sequence], num_steps: int) -> float:
    """Return the mean seconds of `num_steps` steps of sequences that have `SPARE_TOKENS` of room; then abort them."""
    before, device = sum(seq.num_outputs for seq in sequences), llm.runner.device
    devices.synchronize(device)
    started = time.perf_counter()
    for _ in range(num_steps):
        llm.step()
    devices.synchronize(device)
    seconds = time.perf_counter() - started
    num_tokens = sum(seq.num_outputs for seq in sequences) - before
    assert num_tokens == num_steps * len(sequences), f"{num_steps} steps of {len(sequences)} gave {num_tokens} tokens"
    end(llm, sequences)
    return seconds / num_steps


def end(llm: LLM, sequences: list[Sequence]) -> None:
    """Abort sequences, and read the step that was launched ahead.

    The last goes first, so that the next run's sequences get the same lanes, and the same blocks but for those added
    while decoding.
    """
    for seq in reversed(sequences):
        llm.abort(seq)
    llm.step()


def count_experts(llm: LLM, start: Callable[[], list[Sequence]], num_steps: int) -> Distinct:
    """Return how many different experts of each layer a step reads, in the mean; {} for a model without experts.

    start: returns sequences as `time_steps` takes them. Of their `num_steps` steps some are counted: these run without
    graphs, which call no hooks of modules.
    """
    counts: dict[Experts, list[int]] = {layer: [] for layer in expert_layers(llm.model)}
    if not counts:
        return {}
    sequences, stride = start(), max(1, num_steps // _COUNTED)
    for step in range(num_steps):
        with _counting(counts, llm) if step % stride == 0 else contextlib.nullcontext():
            llm.step()
    end(llm, sequences)
    return {layer: sum(numbers) / len(numbers) for layer, numbers in counts.items()}


@contextlib.contextmanager
def _counting(counts: Mapping[Experts, list[int]], llm: LLM) -> Iterator[None]:
    """Append the number of experts that each layer reads to `counts`, in steps that are launched in this context."""

    def count(layer: Experts, inputs: tuple[Any, ...]) -> None:
        counts[layer].append(len(inputs[2].cpu().unique()))  # the ids of `Experts.forward`

    handles = [layer.register_forward_pre_hook(count) for layer in counts]
    try:
        with llm.runner.graphs.off():
            yield
    finally:
        for handle in handles:
            handle.remove()


def expert_layers(model: Any) -> list[Experts]:
    """Return the layers of experts of a model."""
    return [layer for _, layer in weighted(model) if isinstance(layer, Experts)]


def expert_figures(model: Any, batch: int, distinct: Mapping[Experts, float]) -> Document:
    """Return the fields of a result about experts, in the mean over layers; None for a model without experts.

    distinct_experts: different experts of a layer that a step read. independent_experts: as many as it would read if
    `batch` tokens chose uniformly and independently of each other.
    """
    layers = expert_layers(model)
    if not layers:
        return {"distinct_experts": None, "independent_experts": None}
    return {
        "distinct_experts": sum(distinct[layer] for layer in layers) / len(layers),
        "independent_experts": sum(layer.independent(batch) for layer in layers) / len(layers),
    }
