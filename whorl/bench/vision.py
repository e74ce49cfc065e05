"""`whorl bench vision`: times the vision tower, the first token after images, and decoding, next to text."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from whorl import device as devices
from whorl.bench import vision_engine, vision_report, vision_tower
from whorl.bench.decode_engine import free
from whorl.bench.options import VisionOptions, check_peer, parse_counts
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document, provenance
from whorl.bench.random_config import read_config
from whorl.bench.report import Benchmark, noted, write_document
from whorl.models.qwen3_vl import Qwen3VL
from whorl.models.qwen3_vl_tower_config import TowerConfig
from whorl.models.vision_tower_config import Grid
from whorl.timing import matmul_rate

TINY = "tiny"
_PARTS = 6  # parts of the benchmark for each model, see `_parts`


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSettings:
    """Validated settings of `whorl bench vision`.

    configs: config.json of each model, by name. side: of an image in pixels; frame: width and height of one of the
    video. Sides are multiples of the pixels that one token covers.
    """

    options: VisionOptions
    configs: dict[str, dict[str, Any]]
    device: str
    dtype: torch.dtype
    side: int
    frame: tuple[int, int]
    batches: tuple[int, ...]

    @staticmethod
    def resolve(options: VisionOptions) -> "VisionSettings":
        """Return the settings with defaults for this machine; raises ValueError for values out of range."""
        device = devices.require(options.device or devices.default_device())
        is_small = devices.accelerator(device) is None
        names = (options.random_config or (TINY if is_small else "Qwen3-VL-30B-A3B")).split(",")
        check_peer(options.peer)
        configs = {name: Qwen3VL.tiny() if name == TINY else read_config(name) for name in names}
        for name, values in configs.items():
            if values.get("model_type") not in ("qwen3_vl", "qwen3_vl_moe"):
                kind = values.get("model_type")
                raise ValueError(f"--random-config {name}: model_type {kind!r} is not a vision model")
        settings = VisionSettings(
            options=options,
            configs=configs,
            device=device,
            dtype=getattr(torch, options.dtype or ("float32" if is_small else "bfloat16")),
            side=options.side or (32 if is_small else 1024),
            frame=_size(options.frame or ("32x16" if is_small else "640x480")),
            batches=parse_counts(options.batch, "--batch"),
        )
        for values in configs.values():
            settings.grids(TowerConfig.from_hf(values["vision_config"]))  # raises for sizes that are not whole tokens
        return settings

    def grids(self, config: TowerConfig) -> tuple[Grid, Grid]:
        """Return the grids of an image and of the video; raises ValueError for sizes that are not whole tokens."""
        unit = config.patch_size * config.spatial_merge_size
        for size in (self.side, *self.frame):
            if size % unit:
                raise ValueError(f"--side is {self.side}, --frame is {self.frame}, expected multiples of {unit} pixels")
        width, height = (size // config.patch_size for size in self.frame)
        side = self.side // config.patch_size
        return (1, side, side), (-(-self.options.frames // config.temporal_patch_size), height, width)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ValueError(f"--frame is {text}, expected pixels such as 640x480")
    return int(width), int(height)


def benchmark(options: VisionOptions) -> Benchmark:
    """Return the benchmark, ready to run; raises ValueError for options that cannot be measured."""
    settings = VisionSettings.resolve(options)
    return Benchmark(run=lambda: run(settings), render=vision_report.render, is_good=is_good)


def is_good(document: Document) -> bool:
    """Return whether every part ran and the outputs that were compared are right."""
    parts = [part for model in document["models"] for part in model.values() if isinstance(part, dict)]
    return not any("note" in part or part.get("is_right") is False for part in parts)


def run(settings: VisionSettings) -> Document:
    """Run all parts for all models; returns {"header": ..., "models": [...]}."""
    until = time.monotonic() + settings.options.time_limit
    document: Document = {"header": _header(settings), "models": []}
    with Progress(_PARTS * len(settings.configs)) as progress:
        for name, values in settings.configs.items():
            model: Document = {"model": name}
            document["models"].append(model)
            for part, work in _parts(settings, values, document["header"]["matmul_tflop_s"] * 1e12):
                with progress(f"{name}: {part}"):
                    model[part] = _run_part(work, until)
                if settings.options.out is not None:
                    write_document(document, settings.options.out)
    return document


def _header(settings: VisionSettings) -> Document:
    return {
        **provenance(settings.device),
        "weights": "random",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "matmul_tflop_s": matmul_rate(settings.dtype, settings.device) / 1e12,
        "pictures": settings.options.pictures,
        "side": settings.side,
        "frames": settings.options.frames,
        "frame": list(settings.frame),
    }


def _run_part(work: Callable[[], Document], until: float) -> Document:
    """Run one part; a failure or the time limit becomes its note, and the other parts still run."""
    if time.monotonic() > until:
        return {"note": "skipped: --time-limit is over"}
    started = time.monotonic()
    return noted(lambda: work() | {"took_s": time.monotonic() - started})


def _parts(
    settings: VisionSettings, values: dict[str, Any], matmul: float
) -> Iterator[tuple[str, Callable[[], Document]]]:
    """Yield the parts of the benchmark of one model. The first creates the weights; they are freed before the last."""
    from whorl.engine.weights import random_model

    free(settings.device)
    models: list[Any] = []

    def build() -> Document:
        with torch.inference_mode():
            models.append(random_model(values, device=settings.device, dtype=settings.dtype))
        return {}

    yield "weights", build
    if not models:
        return
    yield "tower", lambda: _tower(settings, models[0], matmul)
    if settings.options.peer is not None:
        yield "peer", lambda: _peer(settings, models[0], values, matmul)
        free(settings.device)
    files = {"count": settings.options.pictures, "side": settings.side, "processes": settings.options.processes}
    yield "preprocessing", lambda: vision_engine.overlapped(models[0].tower, device=settings.device, **files)
    rows: list[Document] = []
    yield "engine", lambda: _engine(settings, models[0], rows)
    models.clear()
    free(settings.device)
    if rows:
        yield "text_model", lambda: _text_model(settings, values, rows)


def _tower(settings: VisionSettings, model: Any, matmul: float) -> Document:
    picture, video = settings.grids(model.tower.config)
    common: dict[str, Any] = {"device": settings.device, "repeats": settings.options.repeats, "matmul": matmul}
    return {
        "head_dim": model.tower.config.head_dim,
        "padding": vision_tower.padded(model.tower.config, settings.dtype, settings.device),
        "pictures": vision_tower.ours(model.tower, [picture] * settings.options.pictures, **common),
        "video": vision_tower.ours(model.tower, [video], **common),
    }


def _peer(settings: VisionSettings, model: Any, values: dict[str, Any], matmul: float) -> Document:
    picture, video = settings.grids(model.tower.config)
    peer = vision_tower.Peer(model, values, settings.device)
    config, repeats = model.tower.config, settings.options.repeats
    return {
        **peer.compare(model.tower),
        "pictures": peer.time(config, [picture] * settings.options.pictures, repeats, matmul),
        "video": peer.time(config, [video], repeats, matmul),
    }


def _engine(settings: VisionSettings, model: Any, rows: list[Document]) -> Document:
    """Time the first token after one image and after all, and decoding after an image and after as much text.

    rows: the list to append the rows of decoding to, for `_text_model`.
    """
    item = vision_engine.picture(model.tower.config, settings.grids(model.tower.config)[0])
    counts = sorted({1, settings.options.pictures})
    longest, length = (
        len(vision_engine.with_pictures(model, item, count)[0]) + settings.options.tokens + 2
        for count in (counts[-1], 1)
    )
    most = max(counts[-1], *settings.batches) * model.tower.config.num_tokens(item.grid)
    llm = vision_engine.engine(model, longest, max(settings.batches), length, settings.device, most)
    first = [vision_engine.first_token(llm, item, count, settings.device, settings.options.repeats) for count in counts]
    for batch in settings.batches:
        seconds, text = (
            vision_engine.decode_row(llm, shown, batch, length - settings.options.tokens - 2, settings)
            for shown in (item, None)
        )
        rows.append({"batch": batch, "keys": length, "ms_per_step": seconds * 1e3, "text_ms_per_step": text * 1e3})
    return {"first_token": first, "decode": rows}


def _text_model(settings: VisionSettings, values: dict[str, Any], rows: list[Document]) -> Document:
    """Time the same decoding with the text model alone, which has no tower and one-dimensional positions."""
    from whorl.engine.weights import random_model

    with torch.inference_mode():
        model = random_model(text_config(values), device=settings.device, dtype=settings.dtype)
    length = rows[0]["keys"]
    llm = vision_engine.engine(model, 1, max(settings.batches), length, settings.device, 1)
    decoded = []
    for row in rows:
        seconds = vision_engine.decode_row(llm, None, row["batch"], length - settings.options.tokens - 2, settings)
        decoded.append(
            {"batch": row["batch"], "ms_per_step": seconds * 1e3, "ratio": row["ms_per_step"] / (seconds * 1e3)}
        )
    return {"decode": decoded}


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the text model alone, which is a Qwen3."""
    text = dict(values["text_config"])
    is_sparse = values["model_type"] == "qwen3_vl_moe"
    rope = {**text.get("rope_parameters", {}), **(text.pop("rope_scaling", None) or {})}
    theta = rope.get("rope_theta", text.get("rope_theta", 10000.0))
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return text | {
        "architectures": ["Qwen3MoeForCausalLM" if is_sparse else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if is_sparse else "qwen3",
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }
