"""`whorl bench vision`: the tower, the first token behind pictures and decoding, next to text and to transformers."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whorl import device as devices
from whorl.bench import vision_engine, vision_report, vision_tower
from whorl.bench.decode import free, parse_batches
from whorl.bench.progress import Progress
from whorl.bench.provenance import Document, provenance
from whorl.bench.random_config import read_config
from whorl.bench.vision_options import VisionOptions
from whorl.models.qwen3_vl import Qwen3VL
from whorl.models.qwen3_vl_tower_config import Grid, TowerConfig
from whorl.timing import matmul_rate

TINY = "tiny"
_PARTS = 6  # of a model, see `_parts`


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSettings:
    """configs: by name. side, frame: in pixels, multiples of what becomes a token."""

    configs: dict[str, dict[str, Any]]
    device: str
    dtype: torch.dtype
    pictures: int
    side: int
    frames: int
    frame: tuple[int, int]
    batches: tuple[int, ...]
    num_tokens: int
    repeats: int
    peer: str | None
    processes: int
    time_limit: float
    out: Path | None

    @staticmethod
    def resolve(asked: VisionOptions) -> "VisionSettings":
        device = devices.require(asked.device or devices.default_device())
        is_small = devices.accelerator(device) is None
        names = (asked.random_config or (TINY if is_small else "Qwen3-VL-30B-A3B")).split(",")
        if asked.peer not in (None, "transformers"):
            raise ValueError(f"--peer {asked.peer}: expected transformers")
        if asked.peer is not None and not devices.is_installed(asked.peer):
            raise ValueError(f"--peer {asked.peer}: pip install {asked.peer}")
        configs = {name: Qwen3VL.tiny() if name == TINY else read_config(name) for name in names}
        for name, values in configs.items():
            if values.get("model_type") not in ("qwen3_vl", "qwen3_vl_moe"):
                raise ValueError(f"--random-config {name}: model_type is {values.get('model_type')!r}: no vision model")
        settings = VisionSettings(
            configs=configs,
            device=device,
            dtype=getattr(torch, asked.dtype or ("float32" if is_small else "bfloat16")),
            pictures=asked.pictures,
            side=asked.side or (32 if is_small else 1024),
            frames=asked.frames,
            frame=_size(asked.frame or ("32x16" if is_small else "640x480")),
            batches=parse_batches(asked.batch),
            num_tokens=asked.tokens,
            repeats=asked.repeats,
            peer=asked.peer,
            processes=asked.processes,
            time_limit=asked.time_limit,
            out=asked.out,
        )
        for values in configs.values():
            settings.grids(TowerConfig.from_hf(values["vision_config"]))  # refuses sizes that make no tokens
        return settings

    def grids(self, config: TowerConfig) -> tuple[Grid, Grid]:
        """Of a picture and of the video."""
        unit = config.patch_size * config.spatial_merge_size
        for size in (self.side, *self.frame):
            if size % unit:
                raise ValueError(f"--side {self.side}, --frame {self.frame}: expected multiples of {unit} pixels")
        width, height = (size // config.patch_size for size in self.frame)
        side = self.side // config.patch_size
        return (1, side, side), (-(-self.frames // config.temporal_patch_size), height, width)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise ValueError(f"--frame {text}: expected pixels such as 640x480")
    return int(width), int(height)


def prepare(asked: VisionOptions) -> Callable[[], tuple[Document, str, bool]]:
    """Refuse with ValueError what cannot be measured; the rest is the work."""
    settings = VisionSettings.resolve(asked)

    def work() -> tuple[Document, str, bool]:
        document = run(settings)
        return document, vision_report.render(document), is_good(document)

    return work


def is_good(document: Document) -> bool:
    """Whether every part ran, and answers that were compared are right."""
    parts = [part for model in document["models"] for part in model.values() if isinstance(part, dict)]
    return not any("note" in part or part.get("is_right") is False for part in parts)


def run(settings: VisionSettings) -> Document:
    until = time.monotonic() + settings.time_limit
    document: Document = {"header": _header(settings), "models": []}
    with Progress(_PARTS * len(settings.configs)) as progress:
        for name, values in settings.configs.items():
            found: Document = {"model": name}
            document["models"].append(found)
            for part, work in _parts(settings, values, document["header"]["matmul_tflop_s"] * 1e12):
                with progress(f"{name}: {part}"):
                    found[part] = _guarded(work, until)
                if settings.out is not None:
                    settings.out.write_text(json.dumps(document, indent=2), encoding="utf-8")
    return document


def _header(settings: VisionSettings) -> Document:
    return {
        **provenance(settings.device),
        "weights": "random",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "matmul_tflop_s": matmul_rate(settings.dtype, settings.device) / 1e12,
        "pictures": settings.pictures,
        "side": settings.side,
        "frames": settings.frames,
        "frame": list(settings.frame),
    }


def _guarded(work: Callable[[], Document], until: float) -> Document:
    """A part that fails or comes too late says so, and does not end the run."""
    if time.monotonic() > until:
        return {"note": "not begun: --time-limit is over"}
    started = time.monotonic()
    try:
        return work() | {"took_s": time.monotonic() - started}
    except Exception as error:  # memory, a peer's own errors, a library that is not there
        text = str(error).splitlines()
        return {"note": f"did not run: {type(error).__name__}: {text[0] if text else ''}"}


def _parts(
    settings: VisionSettings, values: dict[str, Any], matmul: float
) -> Iterator[tuple[str, Callable[[], Document]]]:
    """What is measured of a model, in turn; weights are made before the first and dropped before the last."""
    from whorl.engine.weights import random_model

    free(settings.device)
    held: list[Any] = []

    def build() -> Document:
        with torch.inference_mode():
            held.append(random_model(values, device=settings.device, dtype=settings.dtype))
        return {}

    yield "weights", build
    if not held:
        return
    yield "tower", lambda: _tower(settings, held[0], matmul)
    if settings.peer is not None:
        yield "peer", lambda: _peer(settings, held[0], values, matmul)
        free(settings.device)
    files = {"count": settings.pictures, "side": settings.side, "processes": settings.processes}
    yield "preprocessing", lambda: vision_engine.overlapped(held[0].tower, device=settings.device, **files)
    rows: list[Document] = []
    yield "engine", lambda: _engine(settings, held[0], rows)
    held.clear()
    free(settings.device)
    if rows:
        yield "text_model", lambda: _text_model(settings, values, rows)


def _tower(settings: VisionSettings, model: Any, matmul: float) -> Document:
    picture, video = settings.grids(model.tower.config)
    common: dict[str, Any] = {"device": settings.device, "repeats": settings.repeats, "matmul": matmul}
    return {
        "head_dim": model.tower.config.head_dim,
        "padding": vision_tower.padded(model.tower.config, settings.dtype, settings.device),
        "pictures": vision_tower.ours(model.tower, [picture] * settings.pictures, **common),
        "video": vision_tower.ours(model.tower, [video], **common),
    }


def _peer(settings: VisionSettings, model: Any, values: dict[str, Any], matmul: float) -> Document:
    picture, video = settings.grids(model.tower.config)
    peer = vision_tower.Peer(model, values, settings.device)
    config, repeats = model.tower.config, settings.repeats
    return {
        **peer.compare(model.tower),
        "pictures": peer.time(config, [picture] * settings.pictures, repeats, matmul),
        "video": peer.time(config, [video], repeats, matmul),
    }


def _engine(settings: VisionSettings, model: Any, rows: list[Document]) -> Document:
    """The first token behind one picture and behind all; decoding behind a picture and behind as much text."""
    item = vision_engine.picture(model.tower.config, settings.grids(model.tower.config)[0])
    counts = sorted({1, settings.pictures})
    longest, length = (
        len(vision_engine.with_pictures(model, item, count)[0]) + settings.num_tokens + 2 for count in (counts[-1], 1)
    )
    most = max(counts[-1], *settings.batches) * model.tower.config.num_tokens(item.grid)
    llm = vision_engine.engine(model, longest, max(settings.batches), length, settings.device, most)
    first = [vision_engine.first_token(llm, item, count, settings.device, settings.repeats) for count in counts]
    for batch in settings.batches:
        seconds, text = (
            vision_engine.decode_row(llm, shown, batch, length - settings.num_tokens - 2, settings)
            for shown in (item, None)
        )
        rows.append({"batch": batch, "keys": length, "ms_per_step": seconds * 1e3, "text_ms_per_step": text * 1e3})
    return {"first_token": first, "decode": rows}


def _text_model(settings: VisionSettings, values: dict[str, Any], rows: list[Document]) -> Document:
    """The same decoding by the model of text alone, which has no tower and positions of one axis."""
    from whorl.engine.weights import random_model

    with torch.inference_mode():
        model = random_model(text_config(values), device=settings.device, dtype=settings.dtype)
    length = rows[0]["keys"]
    llm = vision_engine.engine(model, 1, max(settings.batches), length, settings.device, 1)
    found = []
    for row in rows:
        seconds = vision_engine.decode_row(llm, None, row["batch"], length - settings.num_tokens - 2, settings)
        found.append(
            {"batch": row["batch"], "ms_per_step": seconds * 1e3, "ratio": row["ms_per_step"] / (seconds * 1e3)}
        )
    return {"decode": found}


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Of the text part by itself: Qwen3."""
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
