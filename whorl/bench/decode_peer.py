"""Times the same decoding and prefill in transformers, with the same checkpoint or random weights of the same shape."""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whorl import device as devices
from whorl.bench.decode_engine import DecodeSettings, free, median_time, prompts, speeds, timed
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document
from whorl.bench.report import noted

VARIANTS: dict[str, dict[str, Any]] = {"transformers": {}}
COMPILED: dict[str, dict[str, Any]] = {"transformers, static cache, compiled": {"cache_implementation": "static"}}
LEAST_CHUNK = 256  # tokens of a prompt that transformers computes at once, at least


def run(settings: DecodeSettings, document: Document, progress: Progress, *, compiled: bool = True) -> Document:
    """Time the rows and the prefill of our document in transformers; a failure becomes the note of its row.

    compiled: on an accelerator also its compiled steps, whose compilation takes a minute.
    """
    is_accelerated = devices.accelerator(settings.device) is not None
    variants = VARIANTS | (COMPILED if compiled and is_accelerated else {})
    load = functools.cache(lambda: _load(settings))
    rows: list[Document] = []
    for row in document["decode"]:
        for label, options in variants.items():
            with progress(f"{label}, batch {row['batch']}, {row['context']} keys"):
                result: Document = {"label": label, "batch": row["batch"], "context": row["context"]}
                compare = functools.partial(_compare, load, row, options, settings)
                rows.append(result | noted(compare))
    prefill = None
    if document["prefill"] is not None:
        with progress(f"transformers, prefill of {settings.prompt_tokens}"):
            prefill = {"label": "transformers"} | noted(lambda: _prefill(load, document["prefill"], settings))
    return {"peers": rows, "peer_prefill": prefill}


def _compare(load: Callable[[], Any], ours: Document, options: dict[str, Any], settings: DecodeSettings) -> Document:
    """Return a row with the bytes and the roofline of our row, so that the shares compare times."""
    seconds = _seconds(load(), ours, options, settings)
    return speeds(ours["batch"], ours["bytes_per_step"], seconds, settings.device)


def _seconds(model: Any, row: Document, options: dict[str, Any], settings: DecodeSettings) -> float:
    """Return the median seconds of a decode step: of `num_tokens` more tokens, divided by their number."""
    ids = torch.tensor(prompts(row["batch"], row["context"], model.config.vocab_size), device=settings.device)

    def generate(count: int) -> torch.Tensor:
        lengths = {"min_new_tokens": count, "max_new_tokens": count}
        with torch.inference_mode():
            out: torch.Tensor = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths, **options
            )
        return out

    num = settings.num_tokens
    generate(num + 1)  # warm up; the static cache compiles here
    samples = []
    for _ in range(settings.repeats):
        long, short = (timed(settings.device, lambda count=count: generate(count)) for count in (num + 1, 1))  # type: ignore[misc]
        samples.append((long - short) / num)
    return statistics.median(samples)


def _prefill(load: Callable[[], Any], ours: Document, settings: DecodeSettings) -> Document:
    """Time a prompt of as many tokens, in chunks of half as many until it fits into memory."""
    model, length = load(), ours["prompt_tokens"]
    ids = torch.tensor(prompts(1, length, model.config.vocab_size), device=settings.device)
    chunk = length
    while True:
        try:
            forward = functools.partial(_forward, model, ids, chunk)
            seconds = median_time(settings.device, forward, settings.repeats)
            break
        except torch.OutOfMemoryError:
            if chunk // 2 < LEAST_CHUNK:
                raise
            chunk //= 2
            free(settings.device)
    return {
        "chunk": chunk,
        "attention": getattr(model.config, "_attn_implementation", None),
        "seconds": seconds,
        "tok_s": length / seconds,
        "ratio": seconds / ours["seconds"],
    }


@torch.inference_mode()
def _forward(model: Any, ids: torch.Tensor, chunk: int) -> None:
    past = None
    for part in ids.split(chunk, 1):
        past = model(part, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values


def _load(settings: DecodeSettings) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if settings.config is None:
        from whorl.engine.weights import resolve

        path = resolve(settings.path)
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if where else path
        default = torch.float32 if devices.accelerator(settings.device) is None else torch.bfloat16
        model: Any = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=settings.dtype or default, **where)
        return model.to(settings.device).eval()
    values = {name: value for name, value in settings.config.items() if name not in ("model_type", "architectures")}
    config = AutoConfig.for_model(settings.config["model_type"], **values)
    dtype = settings.dtype or getattr(torch, str(config.dtype or "bfloat16").removeprefix("torch."))
    with torch.device(settings.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
