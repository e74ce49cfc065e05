"""Times the same decoding in transformers, with the same checkpoint or random weights of the same shape."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from whorl import device as devices
from whorl.bench.decode import DecodeSettings, prompts, timed
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document


def run(settings: DecodeSettings, ours: Sequence[Document], progress: Progress) -> list[Document]:
    """Time each of our rows in each variant of transformers; a failure becomes the note of its row."""
    variants: dict[str, dict[str, Any]] = {"transformers": {}}
    if devices.accelerator(settings.device) is not None:
        variants["transformers, static cache, compiled"] = {"cache_implementation": "static"}
    rows: list[Document] = []
    model: Any = None
    for row in ours:
        for label, options in variants.items():
            with progress(f"{label}, batch {row['batch']}, {row['context']} keys"):
                result: Document = {"label": label, "batch": row["batch"], "context": row["context"]}
                try:
                    model = _load(settings) if model is None else model
                    result |= _compare(row, _seconds(model, row, options, settings))
                except Exception as error:  # an exception of another library must not end the benchmark
                    text = str(error).splitlines()
                    result["note"] = f"did not run: {type(error).__name__}: {text[0] if text else ''}"
                rows.append(result)
    return rows


def _compare(ours: Document, seconds: float) -> Document:
    """Return a row with the bytes and the roofline of our row, so that the shares compare times."""
    batch = ours["batch"]
    return {
        "tok_s": batch / seconds,
        "ms_per_step": seconds * 1e3,
        "bytes_per_step": ours["bytes_per_step"],
        "tb_s": ours["bytes_per_step"] / seconds / 1e12,
        "share_of_roofline": batch / seconds / ours["limit_tok_s"],
    }


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
