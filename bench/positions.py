"""`python -m bench.positions`: multimodal position ids on one CPU core, next to transformers' `get_rope_index`.

Both run in the same process. A case where the two disagree gets no speed.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import import_module, metadata
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer

from whorl.bench.provenance import Document
from whorl.bench.report import Benchmark, finish, table
from whorl.options import Json
from whorl.positions import PositionRule, multimodal_positions

app = typer.Typer(add_completion=False)
NUM_TOKENS = 32768
NUM_BLOCKS = 200
MODELS = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "glm4v": "Glm4vModel",
}
IMAGE_ID, VIDEO_ID, VIDEO_START, VIDEO_END, WORD = 91, 92, 93, 94, 7


def make_case(num_tokens: int = NUM_TOKENS, num_images: int = NUM_BLOCKS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [1, S] and grids [N, 3] of one sequence: images of 8 to 12 tokens per side between text."""
    sides = np.random.default_rng(0).integers(8, 13, size=(num_images, 2))
    sizes = sides.prod(axis=1)
    gap = (num_tokens - int(sizes.sum())) // num_images
    if gap < 1:
        raise ValueError(f"make_case: {num_images} images of {sizes.sum()} tokens do not fit into {num_tokens} tokens.")
    ids = np.full(num_tokens, WORD)
    starts = np.cumsum(sizes + gap) - sizes
    for start, size in zip(starts, sizes, strict=True):
        ids[start : start + size] = IMAGE_ID
    grids = np.concatenate((np.ones((num_images, 1), int), sides * 2), axis=1)
    return torch.from_numpy(ids)[None], torch.from_numpy(grids)


def run(repeats: int = 20) -> dict[str, Any]:
    """Return the median milliseconds for each model type, of whorl and of transformers, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ids, grids = make_case()
        rows = [_measure(model_type, ids, grids, repeats) for model_type in MODELS]
    finally:
        torch.set_num_threads(threads)
    environment = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    return {"tokens": NUM_TOKENS, "images": NUM_BLOCKS, "environment": environment, "rows": rows}


def _measure(model_type: str, ids: torch.Tensor, grids: torch.Tensor, repeats: int) -> dict[str, Any]:
    config = SimpleNamespace(
        model_type=model_type,
        vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
    )
    rule = PositionRule.from_hf(config)
    types = (ids == IMAGE_ID).int()
    peer = _peer(config)

    def ours() -> Any:
        return multimodal_positions(ids, rule, image_grid_thw=grids)

    def theirs() -> Any:
        return peer(ids, types, image_grid_thw=grids)

    equal = all(torch.equal(a, b) for a, b in zip(ours(), theirs(), strict=True))
    row: dict[str, Any] = {"model_type": model_type, "equal": equal}
    if equal:
        row |= {"whorl_ms": _median_ms(ours, repeats), "transformers_ms": _median_ms(theirs, max(3, repeats // 4))}
    return row


def _peer(config: SimpleNamespace) -> Callable[..., Any]:
    name = config.model_type
    model_class = getattr(import_module(f"transformers.models.{name}.modeling_{name}"), MODELS[name])
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = lambda *args, **kwargs: model_class.get_vision_position_ids(model, *args, **kwargs)
    return lambda *args, **kwargs: model_class.get_rope_index(model, *args, **kwargs)


def _median_ms(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def render(document: Document) -> str:
    """Return the document as text."""
    cells = [["model type", "whorl", "transformers", "ratio"]]
    for row in document["rows"]:
        speed = ["outputs differ: no speed"]
        if row["equal"]:
            ours, theirs = row["whorl_ms"], row["transformers_ms"]
            speed = [f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}x"]
        cells.append([row["model_type"], *speed])
    return "\n".join(
        [
            " ".join(f"{name} {value}" for name, value in document["environment"].items()),
            f"{document['tokens']} tokens, {document['images']} images, one core, median milliseconds",
            *table(cells),
        ]
    )


def is_good(document: Document) -> bool:
    """Return whether both agree on every model."""
    return all(row["equal"] for row in document["rows"])


@app.command()
def main(
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs; the median is reported.")] = 20,
    as_json: Json = False,
) -> None:
    """Time multimodal position ids next to transformers' get_rope_index (needs transformers)."""
    finish(Benchmark(run=lambda: run(repeats), render=render, is_good=is_good), as_json)


if __name__ == "__main__":
    app()
