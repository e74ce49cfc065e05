"""Pictures and videos for tests of vision models, and transformers' models to compare with."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whorl.media import MediaItem

IMAGE, VIDEO, START, END = 101, 102, 103, 104  # of `Qwen3VL.tiny`
MERGE = 2


def item(seed: int, grid: tuple[int, int, int], kind: Any = "image", values: int = 96) -> MediaItem:
    """Random patches; a digest of all that decides them."""
    patches = np.random.default_rng(seed).standard_normal((math.prod(grid), values)).astype(np.float32)
    digest = hashlib.sha256(repr(grid).encode() + patches.tobytes()).digest()
    seconds = tuple(0.5 * i for i in range(grid[0])) if kind == "video" else ()
    return MediaItem(kind=kind, patches=patches, grid=grid, digest=digest, seconds=seconds)


def expand(parts: Sequence[Any], *, is_whole: bool = False) -> tuple[list[int], list[MediaItem]]:
    """A prompt of tokens and items: placeholders of an image, or of each frame of a video behind a token of text.

    is_whole: a video is one run of placeholders.
    """
    ids: list[int] = []
    for part in parts:
        if not isinstance(part, MediaItem):
            ids.append(part)
            continue
        count = part.grid[1] * part.grid[2] // MERGE**2
        if part.kind == "image":
            ids += [START, *[IMAGE] * count, END]
        elif is_whole:
            ids += [START, *[VIDEO] * count * part.grid[0], END]
        for frame in range(part.grid[0] if part.kind == "video" and not is_whole else 0):
            ids += [60 + frame, START, *[VIDEO] * count, END]
    return ids, [part for part in parts if isinstance(part, MediaItem)]


def save(folder: Path, config: Mapping[str, Any]) -> Any:
    """A random checkpoint of transformers, with weights large enough for tokens to differ."""
    import transformers

    torch.manual_seed(1)
    values = {key: value for key, value in config.items() if key != "architectures"}
    hf_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForImageTextToText.from_config(hf_config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.15)
        model.tie_weights()
    model.save_pretrained(folder)
    return model


def hf_inputs(
    prompts: Sequence[tuple[list[int], list[MediaItem]]],
    image_id: int = IMAGE,
    video_id: int = VIDEO,
    *,
    has_time: bool = False,
) -> dict[str, Tensor]:
    """What transformers takes of prompts, padded on the left. has_time: positions follow the time of a video."""
    longest = max(len(ids) for ids, _ in prompts)
    rows = [[0] * (longest - len(ids)) + ids for ids, _ in prompts]
    ids = torch.tensor(rows)
    mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i, _ in prompts])
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs["mm_token_type_ids"] = ((ids == image_id) + 2 * (ids == video_id)).int()
    for kind, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        chosen = [each for _, items in prompts for each in items if each.kind == kind]
        if chosen:
            inputs[pixels] = torch.cat([torch.from_numpy(each.patches) for each in chosen])
            inputs[grids] = torch.tensor([each.grid for each in chosen])
        if chosen and has_time and kind == "video":
            inputs["second_per_grid_ts"] = torch.tensor([each.interval for each in chosen])
    return inputs


def hf_greedy(
    model: Any, prompts: Sequence[tuple[list[int], list[MediaItem]]], count: int, **options_of_inputs: Any
) -> list[list[int]]:
    inputs = hf_inputs(prompts, **options_of_inputs)
    options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(**inputs, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]
