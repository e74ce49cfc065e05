"""Pictures and videos to patches, against transformers' processors; what a model's folder says; names of contents."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from media_files import IMAGE, OPTIONS, VIDEO, drawn, encoded, film, png, write_model_files
from PIL import Image, ImageOps

from whorl.media import MediaError, Placeholder, Processor, expand
from whorl.media.options import ImageOptions, VideoOptions, read_options
from whorl.media.pixels import Pixels
from whorl.media.sizes import frame_indices, image_size, patch_seconds, video_size


@pytest.fixture(scope="module")
def processor() -> Iterator[Processor]:
    made = Processor(OPTIONS, num_processes=1)
    yield made
    made.close()


def theirs(options: ImageOptions = IMAGE) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    colours = {"image_mean": list(options.mean), "image_std": list(options.std)}
    sizes = {"patch_size": options.patch_size, "merge_size": 2, "temporal_patch_size": 2}
    return Qwen2VLImageProcessorPil(size=size, **colours, **sizes)


# What each format can hold. 16-bit grey is a case of its own.
KINDS = [(mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")]
KINDS += [(mode, "JPEG") for mode in ("L", "RGB", "CMYK")] + [(mode, "WEBP") for mode in ("RGB", "RGBA")]
side = st.integers(1, 300)


@given(width=side, height=side, kind=st.sampled_from(KINDS), turn=st.integers(0, 8), seed=st.integers(0, 99))
@example(width=1, height=1, kind=("P", "PNG"), turn=0, seed=1)
@example(width=1, height=200, kind=("RGB", "PNG"), turn=6, seed=1)
@example(width=1400, height=7, kind=("LA", "PNG"), turn=5, seed=1)
@example(width=900, height=700, kind=("RGBA", "WEBP"), turn=8, seed=1)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_picture_equals_transformers(
    processor: Processor, width: int, height: int, kind: tuple[str, str], turn: int, seed: int
) -> None:
    """Bit for bit, on what transformers' own loading makes of the file: turned as EXIF says."""
    if max(width, height) > 200 * min(width, height):
        return
    exif = Image.Exif()
    if turn:
        exif[0x0112] = turn
    data = encoded(drawn(width, height, kind[0], seed), kind[1], exif=exif)
    ours = processor.image(data).item()
    expected = theirs()(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), return_tensors="np")
    assert [*ours.grid] == expected["image_grid_thw"][0].tolist()
    assert ours.patches.dtype == expected["pixel_values"].dtype == np.float32
    assert np.array_equal(ours.patches, expected["pixel_values"])


@pytest.mark.parametrize("colours", [((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))])
def test_any_colours_round_as_transformers_does(colours: Any) -> None:
    options = replace(IMAGE, mean=colours[0], std=colours[1])
    levels = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    ours = Pixels(kind="image", values=levels[None], options=options, digest=b"").item()
    expected = theirs(options)(Image.fromarray(levels), return_tensors="np")
    assert np.array_equal(ours.patches, expected["pixel_values"])


@pytest.mark.parametrize("transparency", [None, 0, 2])
def test_a_palette_with_a_clear_colour(processor: Processor, transparency: int | None) -> None:
    options = {} if transparency is None else {"transparency": transparency}
    data = encoded(drawn(50, 40, "P"), **options)
    expected = theirs()(Image.open(io.BytesIO(data)), return_tensors="np")
    assert np.array_equal(processor.image(data).item().patches, expected["pixel_values"])


def test_16_bit_grey_keeps_its_levels(processor: Processor) -> None:
    """transformers gets white for every level over 255, as Pillow cuts them; ours are the high bytes."""
    image = drawn(64, 64, "I;16")
    data = encoded(image)
    values = processor.image(data).values
    grey = Image.fromarray((np.array(image) >> 8).astype(np.uint8)).convert("RGB")
    assert np.array_equal(values[0], np.array(grey))
    assert 100 < values.mean() < 150
    assert np.array(Image.open(io.BytesIO(data)).convert("RGB")).mean() > 250


def test_a_clear_level_of_16_bit_grey_is_white(processor: Processor) -> None:
    levels = np.full((64, 64), 1000, np.uint16)
    levels[:32] = 1001
    values = processor.image(encoded(Image.fromarray(levels), transparency=1001)).values[0]
    assert (values[:32] == 255).all()
    assert (values[32:] == 1000 >> 8).all()


def test_only_the_first_frame_of_an_animation(processor: Processor) -> None:
    first, second = drawn(64, 64, seed=1), drawn(64, 64, seed=2)
    for kind in ("PNG", "WEBP"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        both = encoded(first, kind, save_all=True, append_images=[second], **lossless)
        assert Image.open(io.BytesIO(both)).n_frames == 2
        assert np.array_equal(processor.image(both).values[0], np.array(first))


# ---- sizes and times


@given(height=st.integers(1, 5000), width=st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_sizes_of_pictures(height: int, width: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    sizes = {"factor": 32, "min_pixels": IMAGE.min_pixels, "max_pixels": IMAGE.max_pixels}
    try:
        expected = smart_resize(height, width, **sizes)
    except ValueError:
        with pytest.raises(MediaError, match="more than 200 times"):
            image_size(height, width, IMAGE)
        return
    assert image_size(height, width, IMAGE) == expected


@given(
    frames=st.integers(1, 800),
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    cap=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_sizes_of_videos(frames: int, height: int, width: int, cap: bool) -> None:
    """Against the number of patches that transformers counts, with its limit of a frame and without."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    size = {"shortest_edge": VIDEO.frames.min_pixels, "longest_edge": VIDEO.frames.max_pixels}
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    peer: Any = SimpleNamespace(size=size, cap_pixels_per_frame=cap, max_video_tokens=10, **settings)
    options = replace(VIDEO, cap_pixels_per_frame=cap, max_video_tokens=10)
    try:
        expected = Qwen3VLVideoProcessor.get_num_of_video_patches(peer, frames, height, width)
    except ValueError:
        with pytest.raises(MediaError, match=r"more than 200 times|at least 2 are needed"):
            video_size(frames, height, width, options)
        return
    rows, columns = video_size(frames, height, width, options)
    assert -(-frames // 2) * (rows // 16) * (columns // 16) == expected


@given(total=st.integers(1, 5000), fps=st.floats(0.5, 240), rate=st.sampled_from([1, 2, 2.5]))
@settings(max_examples=200, deadline=None)
def test_which_frames_are_taken_and_when(total: int, fps: float, rate: float) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    peer: Any = SimpleNamespace(fps=rate, min_frames=4, max_frames=768)
    about: Any = SimpleNamespace(total_num_frames=total, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(peer, about).tolist()
    indices = frame_indices(total, fps, replace(VIDEO, fps=rate))
    assert indices == expected
    nobody: Any = None
    assert [*patch_seconds(indices, fps, 2)] == Qwen3VLProcessor._calculate_timestamps(nobody, expected, fps, 2)


@pytest.mark.parametrize("frames", [2, 5, 6])
def test_patches_of_a_video_are_in_transformers_order(frames: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    values = np.random.default_rng(0).integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8)
    item = Pixels(kind="video", values=values, options=VIDEO.frames, digest=b"").item()
    floats = torch.from_numpy(values).permute(0, 3, 1, 2)[None].float() / 255
    nobody: Any = None
    expected, *grid = Qwen3VLVideoProcessor.patchify(nobody, (floats - 0.5) / 0.5, 16, 2, 2)
    assert [*item.grid] == grid
    torch.testing.assert_close(torch.from_numpy(item.patches), expected[0], rtol=0, atol=1e-6)


# ---- videos


def test_a_video_file(processor: Processor) -> None:
    """30 frames at 10 a second: six are taken, at 0, 0.6, 1.2, 1.7, 2.3 and 2.9 seconds."""
    pixels = processor.video(film())
    taken = [0, 6, 12, 17, 23, 29]
    assert pixels.values.shape == (6, *video_size(6, 64, 96, VIDEO), 3)
    assert np.allclose(pixels.values.mean((1, 2, 3)), [5 * index for index in taken], atol=2)
    assert pixels.seconds == patch_seconds(taken, 10.0, 2)
    assert pixels.item().grid == (3, pixels.values.shape[1] // 16, pixels.values.shape[2] // 16)


@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "matroska")])
def test_codecs_and_containers(processor: Processor, codec: str, container: str) -> None:
    pixels = processor.video(film(codec=codec, container=container))
    assert np.allclose(pixels.values.mean((1, 2, 3)), [0, 30, 60, 85, 115, 145], atol=2)


def test_frames_that_come_as_pictures(processor: Processor) -> None:
    """Without a rate they are what the model would have taken: all of them, two a second; with one they are sampled."""
    parts = [encoded(Image.new("RGB", (64, 64), (5 * i,) * 3)) for i in range(30)]
    chosen = processor.frames(parts[:6])
    assert chosen.values.mean((1, 2, 3)).tolist() == [0, 5, 10, 15, 20, 25]
    assert chosen.seconds == (0.25, 1.25, 2.25)
    sampled = processor.frames(parts, fps=10)
    assert sampled.values.mean((1, 2, 3)).tolist() == [0, 30, 60, 85, 115, 145]
    assert sampled.seconds == patch_seconds([0, 6, 12, 17, 23, 29], 10.0, 2)


def test_frames_that_are_no_video(processor: Processor) -> None:
    with pytest.raises(MediaError, match="has 1 frame; at least 2"):
        processor.frames([png()])
    with pytest.raises(MediaError, match="differ in size"):
        processor.frames([png(), png(64, 64)])
    with pytest.raises(MediaError, match="fps is 0"):
        processor.frames([png(), png()], fps=0)


# ---- places in the prompt


def special_tokenizer() -> Any:
    """transformers', of bytes, with the tokens of vision."""
    from serving import byte_tokenizer
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    backend = Backend.from_str(byte_tokenizer().to_json())
    backend.add_special_tokens([*names])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_places_equal_transformers() -> None:
    """Two pictures and a video among text, through transformers' own expansion."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    tokenizer = special_tokenizer()
    peer = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    peer.image_token, peer.video_token = "<|image_pad|>", "<|video_pad|>"
    peer.vision_start_token, peer.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    peer.image_processor = SimpleNamespace(merge_size=2)
    peer.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    images = {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}
    indices = np.array([0, 6, 12, 17, 24])
    videos = {"video_grid_thw": torch.tensor([[3, 4, 4]])}
    videos["video_metadata"] = [SimpleNamespace(fps=10.0, frames_indices=indices)]  # type: ignore[assignment]
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"a {picture}b<|vision_start|><|video_pad|><|vision_end|> 3{picture}"
    replaced = [peer.replace_image_token(images, image_idx=i) for i in range(2)]
    (expected,), _ = peer.get_text_with_replacements([text], replaced, [peer.replace_video_token(videos, video_idx=0)])
    seconds = patch_seconds(indices.tolist(), 10.0, 2)
    ours = expand(text, [Placeholder("image", 6), Placeholder("video", 4, seconds), Placeholder("image", 1)])
    assert ours == expected
    assert "<0.3 seconds><|vision_start|><|video_pad|>" in ours
    ids = tokenizer.encode(ours, add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 7
    assert ids.count(tokenizer.convert_tokens_to_ids("<|video_pad|>")) == 12


def test_a_mark_too_many_or_too_few() -> None:
    for text, places in (
        ("<|image_pad|> and <|image_pad|>", [Placeholder("image", 4)]),
        ("none", [Placeholder("image", 4)]),
        ("<|video_pad|>", []),
        ("<|video_pad|>", [Placeholder("image", 4)]),
    ):
        with pytest.raises(MediaError, match=r"places for (pictures|videos)"):
            expand(text, places)
    assert expand("plain", []) == "plain"


def test_a_place_has_a_token_for_each_merged_patch(processor: Processor) -> None:
    item = processor.image(png(200, 100)).item()
    assert Placeholder.for_item(item, 2).num_tokens == len(item.patches) // 4 == item.grid[1] * item.grid[2] // 4
    assert Placeholder.from_json(json.loads(json.dumps(Placeholder("video", 4, (0.5,)).to_json()))) == Placeholder(
        "video", 4, (0.5,)
    )


# ---- names of contents


def test_a_name_is_of_the_bytes_and_of_what_changes_pixels(processor: Processor) -> None:
    data = png(64, 64)
    first = processor.image(data)
    assert len(first.digest) == 32
    assert processor.image(data).digest == first.digest
    others = Processor(replace(OPTIONS, image=replace(IMAGE, max_pixels=32768)), num_processes=1)
    low = Processor(replace(OPTIONS, image=replace(IMAGE, max_pixels=1 << 24)), num_processes=1)
    try:
        names = {
            first.digest,
            others.image(data).digest,
            low.image(data).digest,
            low.image(data, is_low=True).digest,
            processor.image(png(64, 64, seed=1)).digest,
            processor.frames([data, data]).digest,
            processor.frames([data, data], fps=1).digest,
        }
    finally:
        others.close()
        low.close()
    assert len(names) == 7


def test_equal_pixels_of_other_sizes_have_other_names(processor: Processor) -> None:
    """Raw pixels alone would be the same bytes: 64 x 128 and 128 x 64 of one colour."""
    tall, wide = (processor.image(encoded(Image.new("RGB", size))) for size in ((64, 128), (128, 64)))
    assert tall.values.tobytes() == wide.values.tobytes()
    assert tall.digest != wide.digest


def test_lists_of_frames_do_not_run_together(processor: Processor) -> None:
    from whorl.media.pixels import digest

    assert digest("frames", [b"ab", b"c"], VIDEO) != digest("frames", [b"a", b"bc"], VIDEO)


def test_low_detail_is_smaller(processor: Processor) -> None:
    large = Processor(replace(OPTIONS, image=replace(IMAGE, max_pixels=1 << 24)), num_processes=1)
    try:
        whole, low = (large.image(png(1200, 900), is_low=is_low) for is_low in (False, True))
    finally:
        large.close()
    assert whole.values.shape[1:3] == (896, 1216)
    assert low.values.shape[1] * low.values.shape[2] <= 512 * 512


# ---- what a folder says


def test_the_three_files(tmp_path: Path) -> None:
    write_model_files(tmp_path)
    assert read_options(tmp_path) == OPTIONS
    files = ("preprocessor_config.json", "video_preprocessor_config.json")
    image, video = (json.loads((tmp_path / name).read_text()) for name in files)
    image["size"]["longest_edge"] = 131072
    both = {"image_processor": image, "video_processor": video}
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    options = read_options(tmp_path)
    assert options is not None
    assert options.image.max_pixels == 131072, "as in transformers, it goes first"
    for name in files:
        (tmp_path / name).unlink()
    assert read_options(tmp_path) == options
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": image}))
    assert read_options(tmp_path) == replace(options, video=None)


def test_a_model_of_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_options(tmp_path) is None
    assert Processor.from_folder(tmp_path) is None
    assert Processor.from_folder(tmp_path / "model.gguf") is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "neither preprocessor_config.json nor image_processor"),
        ({"patch_size": None}, "patch_size is missing"),
        ({"size": {}}, "min_pixels, max_pixels is missing"),
        ({"patch_size": 14}, "expected 16, which is patch_size in vision_config"),
        ({"do_resize": False}, "do_resize is false"),
        ({"image_mean": [0.5]}, "expected three numbers"),
        ({"patch_size": "16"}, "expected a whole number"),
        ({"size": {"shortest_edge": 10, "longest_edge": 5}}, "over longest_edge"),
        ({"resample": 9}, "Pillow's filters"),
    ],
)
def test_a_file_that_cannot_be_followed(tmp_path: Path, change: dict[str, Any] | None, says: str) -> None:
    write_model_files(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    content = json.loads(file.read_text())
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=says):
        read_options(tmp_path)


def test_published_files_are_read(tmp_path: Path) -> None:
    """The fields of Qwen3-VL's own files: sizes are areas."""
    write_model_files(tmp_path)
    image = {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2}
    image |= {"merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    image |= {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    options = read_options(tmp_path)
    assert options is not None
    assert (options.image.min_pixels, options.image.max_pixels, options.image.resample) == (65536, 16777216, 3)
    assert isinstance(options.video, VideoOptions)
