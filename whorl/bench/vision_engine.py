"""Prompts with images in a whole engine: preprocessing next to the tower, the first token, and decoding."""

import dataclasses
import io
import itertools
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from whorl import device as devices
from whorl.bench.decode_engine import median_time, placeholders, prompts, timed
from whorl.bench.provenance import Document
from whorl.engine.llm import LLM
from whorl.engine.memory import block_size
from whorl.engine.sequence import SamplingParams
from whorl.media import MediaItem, Processor
from whorl.media.options import ImageOptions, Options
from whorl.models.qwen3_vl_tower_config import TowerConfig
from whorl.models.vision_tower_config import Grid

TEXT_TOKENS = 16  # tokens of text before and after the images of a prompt
_STEP = 8192  # most tokens of a step
_digests = itertools.count()

Request = tuple[list[int], list[MediaItem]]  # token ids, and the images of their placeholders


# ---- preprocessing


def overlapped(tower: Any, count: int, side: int, processes: int, device: str) -> Document:
    """Time JPEG files to features: preprocessing alone, the tower alone, and the tower on each image as it is ready."""
    from whorl.engine.features import as_tensor

    files = _jpeg_files(count, side)
    processor = Processor(_options(tower.config, side), num_processes=processes)
    try:
        with ThreadPoolExecutor(processes) as pool:

            def preprocess() -> Any:
                return pool.map(lambda data: processor.image(data).item(), files)

            def encode(items: Any) -> None:
                for item in items:
                    patches = devices.lasting(as_tensor(item.patches), device).to(device, non_blocking=True)
                    tower.encode(patches, item.grid)

            ready = list(preprocess())  # this also starts the processes
            encode(ready)
            seconds = {
                "preprocessing_s": timed(device, lambda: list(preprocess())),
                "tower_s": timed(device, lambda: encode(ready)),
                "both_s": timed(device, lambda: encode(preprocess())),
            }
    finally:
        processor.close()
    return {"pictures": count, "side": side, "processes": processes, **seconds}


def _jpeg_files(count: int, side: int) -> list[bytes]:
    """Return JPEG files of smooth colours, all different."""
    from PIL import Image

    down, across = np.meshgrid(*[np.linspace(0, 255, side)] * 2, indexing="ij")
    files = []
    for i in range(count):
        levels = np.stack([down, across, (down + 9 * i) % 256], -1)
        file = io.BytesIO()
        Image.fromarray(levels.astype(np.uint8)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def _options(config: TowerConfig, side: int) -> Options:
    half = (0.5, 0.5, 0.5)
    image = ImageOptions(
        patch_size=config.patch_size,
        min_pixels=1,
        max_pixels=max(side, config.patch_size * config.spatial_merge_size) ** 2,
        mean=half,
        std=half,
        merge_size=config.spatial_merge_size,
        temporal_patch_size=config.temporal_patch_size,
    )
    return Options(image=image)


# ---- prompts


def picture(config: TowerConfig, grid: Grid) -> MediaItem:
    """Return an image of random patches."""
    values = np.random.default_rng(0).standard_normal((math.prod(grid), config.patch_values), dtype=np.float32)
    return MediaItem(kind="image", patches=values, grid=grid, digest=b"")


def with_pictures(model: Any, item: MediaItem, count: int, salt: int = 0) -> Request:
    """Return a prompt of text, images and text; each image has a new digest, so that none is in the encoder cache.

    salt: prompts with different salts have different texts.
    """
    tokens = model.config.vision.num_tokens(item.grid)
    text = _text(model, 2 * TEXT_TOKENS, salt)
    ids = [*text[:TEXT_TOKENS], *([model.config.image_token_id] * tokens + text[:1]) * count, *text[TEXT_TOKENS:]]
    return ids, [dataclasses.replace(item, digest=next(_digests).to_bytes(32, "big")) for _ in range(count)]


def _text(model: Any, length: int, salt: int = 0) -> list[int]:
    """Return random text tokens, none of them a placeholder of images; different salts give different texts."""
    (token_ids,) = prompts(1, length + salt, min(model.vocab_size, 100_000), placeholders(model))
    return token_ids[salt:]


def engine(model: Any, longest: int, batch: int, length: int, device: str, pictures: int) -> LLM:
    """Return an engine with room for one prompt of `longest` tokens, or for `batch` sequences of `length`.

    pictures: the size of the encoder cache, in tokens of images.
    """
    size = block_size(model.cache_specs(), device, None)
    return LLM(
        model=model,
        device=device,
        max_num_seqs=batch,
        max_num_batched_tokens=_STEP,
        max_prompt_tokens=_STEP,
        max_model_len=max(longest, length),
        num_blocks=max(-(-longest // size) + 1, batch * (1 + -(-length // size))),
        encoder_cache=pictures,
        use_prefix_cache=False,
    )


def first_token(llm: LLM, item: MediaItem, count: int, device: str, repeats: int) -> Document:
    """Time the first token of a prompt with `count` images, whose patches are in host memory, and of as much text."""
    model: Any = llm.model
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    length = len(with_pictures(model, item, count)[0])

    def pictures() -> None:
        ids, items = with_pictures(model, item, count)
        llm.generate([ids], params, media=[items], progress=False)

    def text() -> None:
        llm.generate([_text(model, length)], params, progress=False)

    image_seconds, text_seconds = (median_time(device, run, repeats) for run in (pictures, text))
    return {"pictures": count, "prompt_tokens": length, "seconds": image_seconds, "text_seconds": text_seconds}


def decode(llm: LLM, requests: Sequence[Request], num_tokens: int, device: str) -> float:
    """Return the seconds of a step in which all requests decode."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens + 1, ignore_eos=True)
    sequences = [llm.add(ids, params, media=items)[0] for ids, items in requests]
    while not all(seq.num_outputs for seq in sequences):
        llm.step()
    before = sum(seq.num_outputs for seq in sequences)

    def run() -> None:
        while llm.has_work:
            llm.step()

    seconds = timed(device, run)
    return seconds * len(sequences) / (sum(seq.num_outputs for seq in sequences) - before)


def decode_row(llm: LLM, item: MediaItem | None, batch: int, length: int, settings: Any) -> float:
    """Return the median seconds of a decode step after an image; item None: after text of `length` tokens."""
    model: Any = llm.model
    seconds = []
    for _ in range(settings.options.repeats + 1):
        requests: list[Request] = [
            (_text(model, length, salt), []) if item is None else with_pictures(model, item, 1, salt)
            for salt in range(batch)
        ]
        seconds.append(decode(llm, requests, settings.options.tokens, settings.device))
    return statistics.median(seconds[1:])
