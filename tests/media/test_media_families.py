"""Families of media against transformers' processors: sampled frames and their times, sizes, and text of prompts."""

import json
import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from media_files import COLOURS, encoded, film
from PIL import Image

from whorl.media import MediaError, Placeholder, Processor, expand
from whorl.media.families import FAMILIES
from whorl.media.options import ImageOptions, Options, VideoOptions, read_options
from whorl.media.sizes import Sampled, frame_indices, image_size, patch_seconds, video_size

pytest.importorskip("transformers")

SIZE: dict[str, Any] = {"patch_size": 14, "min_pixels": 3136, "max_pixels": 100352, **COLOURS}


@pytest.fixture(autouse=True)
def _no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the processors import torchvision, which the functions compared with do not use."""
    if find_spec("torchvision") is None:
        name = ""
        for part in ("torchvision", "transforms", "v2", "functional"):
            name = f"{name}.{part}" if name else part
            module: Any = ModuleType(name)
            module.functional = None
            monkeypatch.setitem(sys.modules, name, module)


def options(name: str, **changes: Any) -> VideoOptions:
    """As read from a file that says nothing of sampling."""
    family = FAMILIES[name]
    own = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens", "sampling", "area")
    values = {key: getattr(family, key) for key in own}
    return VideoOptions(frames=ImageOptions(**SIZE, frames=family.picture_frames), **values | changes)


def clips(count: int = 60, *, longest: int = 6000) -> list[tuple[int, float]]:
    """Frames in all and a second, of many videos, round ones and others."""
    draw = random.Random(0)
    drawn = [(draw.randint(1, longest), draw.choice([1, 10, 23.976, 24, 25, 30, 59.94, 3.7])) for _ in range(count)]
    return [*drawn, (2, 30), (3, 30), (4, 25), (30, 10), (600, 1), (6000, 2.5), (9000, 30), (80000, 30)]


def sampled(peer: Any, total: int, fps: float) -> list[int] | None:
    """What a processor of transformers samples; None if it refuses."""
    about = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
    try:
        indices = [int(index) for index in type(peer).sample_frames(peer, about, fps=peer.fps)]
        return [index for index in indices if index < total]  # in fp32 a step may go past the end
    except (ValueError, ZeroDivisionError, RuntimeError):
        return None


def peer_of(name: str) -> Any:
    """transformers' video processor of a family, without the files that it is otherwise made of."""
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
    from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    kinds = {"qwen2_vl": Qwen2VLVideoProcessor, "glm4v": Glm4vVideoProcessor, "glm46v": Glm46VVideoProcessor}
    peer: Any = kinds[name].__new__(kinds[name])
    peer.fps, peer.num_frames, peer.min_frames, peer.max_frames = 2, None, 4, 768
    peer.temporal_patch_size, peer.max_duration, peer.max_video_tokens = 2, 300, 128000
    return peer


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v", "glm46v"])
def test_which_frames_are_taken(name: str) -> None:
    peer, ours = peer_of(name), options(name)
    for total, fps in clips():
        expected = sampled(peer, total, fps)
        if not expected:
            with pytest.raises(MediaError, match="at least 2"):
                frame_indices(total, fps, ours)
            continue
        assert frame_indices(total, fps, ours) == expected, (total, fps)


def test_frames_and_pixels_of_a_whole_video() -> None:
    """Qwen2-VL's limits are for each frame, with a share of what all frames may have."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import smart_resize

    ours = options("qwen2_vl", max_video_tokens=2000)
    total = int(2000 * 28 * 28 * 0.9)
    for frames, height, width in ((2, 300, 500), (16, 300, 500), (400, 300, 500), (768, 1080, 1920), (4, 20, 2000)):
        most = max(min(100352, total * 2 // frames), int(3136 * 1.05))
        expected = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=most)
        assert video_size(frames, height, width, ours) == expected
        plain = replace(ours, cap_pixels_per_frame=False)
        expected = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=100352)
        assert video_size(frames, height, width, plain) == expected


def test_a_picture_of_glm_counts_as_two_frames() -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    sizes = {"factor": 28, "min_pixels": SIZE["min_pixels"], "max_pixels": SIZE["max_pixels"]}
    for height, width in ((10, 10), (20, 900), (333, 250), (3000, 1999), (28, 28), (500, 20)):
        expected = smart_resize(2, height, width, temporal_factor=2, **sizes)
        assert image_size(height, width, options("glm4v").frames) == expected
        expected = smart_resize(16, height, width, temporal_factor=2, **sizes)
        assert video_size(16, height, width, options("glm4v")) == expected


def test_the_time_of_a_patch() -> None:
    """Qwen2.5-VL: seconds per patch, of the frames that were taken; GLM: the time of a patch's first frame."""
    from transformers.video_utils import VideoMetadata

    for total, fps in clips(20)[:20]:
        if total < 4:
            continue
        taken = frame_indices(total, fps, options("qwen2_5_vl"))
        about = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=taken)
        assert Sampled(taken, fps, total).interval(2) == 2 / about.sampled_fps
        taken = frame_indices(total, fps, options("glm46v"))
        about = VideoMetadata(total_num_frames=total, fps=fps, frames_indices=taken)
        assert [*patch_seconds(taken, fps, 2, first=True)] == about.timestamps[::2]


def processor_of(name: str) -> Any:
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    kinds = {"qwen2_5_vl": Qwen2_5_VLProcessor, "glm4v": Glm4vProcessor, "glm46v": Glm46VProcessor}
    peer = kinds[name].__new__(kinds[name])
    peer.image_token, peer.video_token = FAMILIES[name].image, FAMILIES[name].video
    peer.image_processor = peer.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    return peer


@pytest.mark.parametrize("name", ["qwen2_5_vl", "glm4v", "glm46v"])
def test_places_are_transformers(name: str) -> None:
    """A picture and a video among text, through transformers' own replacements."""
    from transformers.video_utils import VideoMetadata

    peer, family = processor_of(name), FAMILIES[name]
    indices = [0, 6, 12, 17, 24, 30]
    about = VideoMetadata(total_num_frames=31, fps=7.0, frames_indices=indices)
    picture = peer.replace_image_token({"image_grid_thw": torch.tensor([[1, 4, 6]])}, image_idx=0)
    video = {"video_grid_thw": torch.tensor([[3, 4, 4]]), "video_metadata": [about]}
    clip = peer.replace_video_token(video, video_idx=0)
    seconds = patch_seconds(indices, 7.0, 2, first=family.time == "first")
    places = [Placeholder("video", 4, seconds, name), Placeholder("image", 6, (), name)]
    text = f"a {family.video} b {family.image} c"
    assert expand(text, places, name) == f"a {clip} b {picture} c"
    again = [Placeholder.from_json(json.loads(json.dumps(place.to_json()))) for place in places]
    assert again == places
    with pytest.raises(MediaError, match="places for pictures"):
        expand(text, places[:1], name)


def test_a_video_through_the_decoder() -> None:
    """30 frames at 10 a second: Qwen2-VL takes six, in steps of five, GLM-4.6V seventeen and one twice."""
    colours = {"image": ImageOptions(**SIZE), "family": "qwen2_5_vl"}
    processor = Processor(Options(video=options("qwen2_5_vl"), **colours), num_processes=1)  # type: ignore[arg-type]
    try:
        pixels = processor.video(film())
        assert np.allclose(pixels.values.mean((1, 2, 3)), [0, 25, 50, 75, 100, 125], atol=2)
        assert (pixels.interval, pixels.family, pixels.grid[0]) == (1.0, "qwen2_5_vl", 3)
        parts = [encoded(Image.new("RGB", (64, 64), (5 * i,) * 3)) for i in range(6)]
        frames = processor.frames(parts, fps=3).item()
        assert (frames.interval, frames.family, frames.grid[0]) == (2 / 3 / (4 / 6), "qwen2_5_vl", 2)
    finally:
        processor.close()
    glm = Options(image=ImageOptions(**SIZE, frames=2), video=options("glm46v"), family="glm46v")
    processor = Processor(glm, num_processes=1)
    try:
        pixels = processor.video(film())
        taken = frame_indices(30, 10.0, options("glm46v"))
        assert np.allclose(pixels.values.mean((1, 2, 3)), [5 * index for index in taken], atol=2)
        assert pixels.seconds == patch_seconds(taken, 10.0, 2, first=True)
    finally:
        processor.close()


def test_the_files_of_qwen2_vl(tmp_path: Path) -> None:
    """They say nothing of videos: as transformers does, frames are sized as pictures are."""
    file = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    file |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        tower = {"spatial_patch_size": 14, "spatial_merge_size": 2}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": tower}))
        read = read_options(tmp_path)
        assert read is not None
        assert read.family == kind
        assert (read.video is None) == (kind == "qwen3_vl")
        if read.video is not None:
            assert (read.video.sampling, read.video.area, read.video.cap_pixels_per_frame) == ("steps", "frame", True)
            assert (read.video.frames.max_pixels, read.video.max_video_tokens) == (12845056, 128000)
