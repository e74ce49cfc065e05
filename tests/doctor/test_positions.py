"""Positions against transformers' `get_rope_index`, Megatron's context-parallel slices and hand-written cases."""

import importlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.positions import (
    MODEL_TYPES,
    PositionRule,
    context_indices,
    context_join,
    context_slice,
    decode_positions,
    multimodal_positions,
    packed_positions,
    token_types,
)

IMAGE_ID, VIDEO_ID, VIDEO_START, VIDEO_END, PAD, WORD = 91, 92, 93, 94, 0, 7
MODEL_CLASSES = {
    "qwen2_vl": "Qwen2VLModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
    "glm46v": "Glm46VModel",
    "glm_ocr": "GlmOcrModel",
}
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def hf_config(model_type: str, merge: int = 2, tokens_per_second: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        model_type=model_type,
        vision_config=SimpleNamespace(spatial_merge_size=merge, tokens_per_second=tokens_per_second),
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
    )


def hf_positions(config: SimpleNamespace, ids, types, images, videos, seconds=None, mask=None):
    """Transformers' own answer: the unbound method on an object that has nothing but a configuration."""
    model_type = config.model_type
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    model_class = getattr(modeling, MODEL_CLASSES[model_type])
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = lambda *args, **kwargs: model_class.get_vision_position_ids(model, *args, **kwargs)
    extra = {"second_per_grid_ts": seconds} if model_type == "qwen2_5_vl" else {}
    return model_class.get_rope_index(
        model, ids, types, image_grid_thw=images, video_grid_thw=videos, attention_mask=mask, **extra
    )


def build(rows, model_type: str, merge: int, pad: str):
    """Token ids, types, grids and mask of rows of parts: ("text", n), ("image", (t, h, w)), ("video", (t, h, w))."""
    glm, split = model_type.startswith("glm"), not model_type.startswith("qwen2")
    sequences, images, videos = [], [], []
    for row in rows:
        tokens: list[tuple[int, int]] = [(WORD, 0)]
        for kind, size in row:
            if kind == "text":
                tokens += [(WORD, 0)] * size
            elif kind == "image":
                time, height, width = size
                images.append((time, height * merge, width * merge))
                tokens += [(IMAGE_ID, 1)] * (time * height * width) + [(WORD, 0)]
            else:
                frames, height, width = size
                videos.append((frames, height * merge, width * merge))
                patch = [(IMAGE_ID if glm else VIDEO_ID, 2)]
                plane = patch * (height * width)
                body = (plane + [(WORD, 0)]) * frames if split else plane * frames
                tokens += [(VIDEO_START, 0), *body, (VIDEO_END, 0)]
        sequences.append(tokens)
    longest = max(map(len, sequences))
    padded = [
        [(PAD, 0)] * (longest - len(s)) + s if pad == "left" else s + [(PAD, 0)] * (longest - len(s)) for s in sequences
    ]
    ids = torch.tensor([[token for token, _ in row] for row in padded])
    types = torch.tensor([[kind for _, kind in row] for row in padded])
    return ids, types, tensor_grid(images), tensor_grid(videos), (ids != PAD).long()


def tensor_grid(grid):
    return torch.tensor(grid) if grid else None


SIZE = st.integers(1, 4)
PART = st.one_of(
    st.tuples(st.just("text"), st.integers(1, 9)),
    st.tuples(st.just("image"), st.tuples(st.integers(1, 2), SIZE, SIZE)),
    st.tuples(st.just("video"), st.tuples(SIZE, SIZE, SIZE)),
)
ROWS = st.lists(st.lists(PART, max_size=5), min_size=1, max_size=4)


def test_every_model_type_has_a_transformers_class():
    assert set(MODEL_CLASSES) == set(MODEL_TYPES)


QUICK = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"}


@pytest.mark.parametrize(
    "model_type", [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in MODEL_TYPES]
)
@PROPERTY
@given(rows=ROWS, merge=st.integers(1, 3), pad=st.sampled_from(["left", "right"]), data=st.data())
def test_equals_transformers(model_type, rows, merge, pad, data):
    config = hf_config(model_type, merge, tokens_per_second=data.draw(st.integers(1, 25)))
    ids, types, images, videos, mask = build(rows, model_type, merge, pad)
    seconds = None
    if model_type == "qwen2_5_vl" and videos is not None:
        seconds = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=len(videos), max_size=len(videos)))
    expected = hf_positions(config, ids, types, images, videos, seconds, mask)
    rule = PositionRule.from_hf(config)
    grids = {"image_grid_thw": images, "video_grid_thw": videos, "seconds_per_grid": seconds}
    for type_ids in (types, None):  # given, and derived from the token ids
        actual = multimodal_positions(ids, rule, mm_token_type_ids=type_ids, attention_mask=mask, **grids)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    # Without a mask padding counts as text, in both.
    expected = hf_positions(config, ids, types, images, videos, seconds)
    torch.testing.assert_close(multimodal_positions(ids, rule, **grids), expected, rtol=0, atol=0)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
@PROPERTY
@given(rows=ROWS)
def test_packed_is_padded_without_padding(model_type, rows):
    rule = PositionRule.from_hf(hf_config(model_type))
    ids, _, images, videos, mask = build(rows, model_type, 2, "right")
    grids = {"image_grid_thw": images, "video_grid_thw": videos}
    padded, deltas = multimodal_positions(ids, rule, attention_mask=mask, **grids)
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    packed, packed_deltas = multimodal_positions(ids[mask.bool()], rule, cu_seqlens=cu_seqlens, **grids)
    assert torch.equal(packed, padded[:, mask.bool()])
    assert torch.equal(packed_deltas, deltas)


def test_fraction_of_a_second():
    """Transformers 5.17 cuts seconds to integers, 5.22 does not: ours equals either, told which."""
    config = hf_config("qwen2_5_vl", tokens_per_second=2)
    ids, types, _, videos, _ = build([[("video", (5, 1, 2))]], "qwen2_5_vl", 2, "right")
    rule = PositionRule.from_hf(config)
    assert not rule.whole_seconds
    halves, _ = hf_positions(config, ids, types, None, videos, torch.tensor([0.5]))
    cut = halves[0, types == 2].unique().numel() == 1
    for second in (0.5, 1.7, 1 / 3):
        seconds = torch.tensor([second])
        answers = {
            whole: multimodal_positions(
                ids, replace(rule, whole_seconds=whole), video_grid_thw=videos, seconds_per_grid=seconds
            )
            for whole in (False, True)
        }
        expected = hf_positions(config, ids, types, None, videos, seconds)
        torch.testing.assert_close(answers[cut], expected, rtol=0, atol=0)
        frames = (torch.arange(5).view(-1, 1).expand(-1, 2) * (2 * seconds)).long().flatten() + 2
        assert torch.equal(answers[False][0][0, types == 2], frames)


def test_written_out():
    """One image of 2 x 3 tokens between text: block at 2, next text at 2 + max(2, 3)."""
    rule = PositionRule(image_token_id=IMAGE_ID, video_token_id=VIDEO_ID)
    ids = np.array([[WORD, WORD, *[IMAGE_ID] * 6, WORD]])
    positions, deltas = multimodal_positions(ids, rule, image_grid_thw=[[1, 4, 6]])
    assert isinstance(positions, np.ndarray)
    assert positions.dtype == np.int64
    assert positions[:, 0].tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert deltas.tolist() == [[6 - 9]]


def test_images_that_touch_and_empty_sequences():
    rule = PositionRule(image_token_id=IMAGE_ID, video_token_id=VIDEO_ID)
    ids = np.array([IMAGE_ID] * 4)
    positions, deltas = multimodal_positions(ids, rule, image_grid_thw=[[1, 2, 4], [1, 4, 2]], cu_seqlens=[0, 0, 4, 4])
    assert positions.tolist() == [[0, 0, 2, 2], [0, 0, 2, 3], [0, 1, 2, 2]]
    assert deltas.tolist() == [[0], [0], [0]]
    nothing, deltas = multimodal_positions(np.zeros((2, 0), int), rule)
    assert nothing.shape == (3, 2, 0)
    assert deltas.tolist() == [[0], [0]]


@pytest.mark.parametrize("pad", ["left", "right"])
def test_decode_equals_transformers(pad):
    """Positions of generated tokens equal those transformers gives them once its cache is filled."""
    rows = [[("image", (1, 3, 2)), ("text", 4)], [("video", (2, 2, 2))], [("text", 3)]]
    config = hf_config("qwen2_5_vl", tokens_per_second=3)
    rule = PositionRule.from_hf(config)
    ids, _, images, videos, mask = build(rows, "qwen2_5_vl", 2, pad)
    _, deltas = multimodal_positions(ids, rule, image_grid_thw=images, video_grid_thw=videos, attention_mask=mask)
    actual = decode_positions(mask.sum(1), deltas, 3)
    assert actual.shape == (3, 3, 3)
    model = importlib.import_module("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl").Qwen2_5_VLModel
    state = SimpleNamespace(rope_deltas=deltas, config=config)
    cache = SimpleNamespace(get_seq_length=lambda: ids.shape[1])
    longer = torch.cat((mask, torch.ones(3, 3, dtype=mask.dtype)), 1)
    expected = model.compute_3d_position_ids(
        state,
        input_ids=None,
        inputs_embeds=torch.zeros(3, longer.shape[1], 1),
        image_grid_thw=None,
        video_grid_thw=None,
        attention_mask=longer,
        past_key_values=cache,
    )
    assert torch.equal(actual, expected[..., -3:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_thw": None}, "4 image placeholder tokens"),
        ({"image_grid_thw": [[1, 4, 4], [1, 2, 2]]}, r"\(2 blocks\) has 5"),
        ({"image_grid_thw": [[1, 4, 2]]}, "has 2; is the prompt"),
        ({"image_grid_thw": [[1, 4, 5]]}, "multiples of 2"),
        ({"image_grid_thw": [[0, 4, 4]]}, "multiples of 2"),
        ({"image_grid_thw": [1, 4, 4]}, r"expected \[N, 3\]"),
        ({"image_grid_thw": [[1.0, 4.0, 4.0]]}, "expected integers"),
        ({"video_grid_thw": [[1, 2, 2]]}, "0 video placeholder tokens"),
        ({"mm_token_type_ids": [[0, 1, 1, 0, 1, 1, 0]]}, "not one run"),
        ({"mm_token_type_ids": [[0, 3, 3, 3, 3, 0, 0]]}, "expected 0, 1 and 2 only"),
        ({"mm_token_type_ids": [[0, 1]]}, "mm_token_type_ids is"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask is"),
        ({"attention_mask": [[1, 1, 1, 1, 0, 1, 1]]}, "3 image placeholder tokens"),
        ({"cu_seqlens": [0, 7]}, "with cu_seqlens expected"),
        ({"seconds_per_grid": [1.0]}, "no tokens_per_second"),
    ],
)
def test_bad_input_is_refused(change, message):
    rule = PositionRule(image_token_id=IMAGE_ID, video_token_id=VIDEO_ID)
    ids = np.array([[WORD, *[IMAGE_ID] * 4, WORD, WORD]])
    arguments = {"image_grid_thw": [[1, 4, 4]], **change}
    with pytest.raises(ValueError, match=message):
        multimodal_positions(ids, rule, **arguments)


def test_a_block_may_not_cross_sequences():
    rule = PositionRule(image_token_id=IMAGE_ID, video_token_id=VIDEO_ID)
    with pytest.raises(ValueError, match="not one run"):
        multimodal_positions(np.array([IMAGE_ID] * 4), rule, image_grid_thw=[[1, 4, 4]], cu_seqlens=[0, 2, 4])


def test_bad_rules_are_refused():
    with pytest.raises(ValueError, match=r"model_type is 'llama', expected one of qwen2_vl"):
        PositionRule.from_hf({"model_type": "llama"})
    with pytest.raises(ValueError, match=r"no vision_config\.tokens_per_second"):
        PositionRule.from_hf({"model_type": "qwen2_5_vl", "vision_config": {"spatial_merge_size": 2}})
    with pytest.raises(ValueError, match=r"no vision_config\.spatial_merge_size"):
        PositionRule.from_hf({"model_type": "qwen3_vl"})
    with pytest.raises(ValueError, match="at least 1"):
        PositionRule(spatial_merge_size=0)
    with pytest.raises(ValueError, match="no image and video token ids"):
        token_types(np.array([1, 2]), PositionRule())
    marked = PositionRule(image_token_id=IMAGE_ID, video_start_id=VIDEO_START, video_end_id=VIDEO_END)
    with pytest.raises(ValueError, match="does not close"):
        token_types(np.array([VIDEO_START, IMAGE_ID]), marked)


LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@PROPERTY
@given(lengths=LENGTHS, size=st.integers(1, 5))
def test_context_slices_follow_the_definition_and_invert(lengths, size):
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))) * 2 * size
    for rank in range(size):
        expected = []
        for begin, end in itertools.pairwise(cu_seqlens.tolist()):
            chunks = np.split(np.arange(begin, end), 2 * size)
            expected += [*chunks[rank], *chunks[2 * size - 1 - rank]]
        assert context_indices(cu_seqlens, rank, size).tolist() == expected
    x = torch.randn(3, int(cu_seqlens[-1]), 2, requires_grad=True)
    parts = [context_slice(x, rank, size, dim=1, cu_seqlens=cu_seqlens) for rank in range(size)]
    assert torch.equal(context_join(parts, dim=1, cu_seqlens=cu_seqlens), x)
    sum(part.sum() for part in parts).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_context_slice_of_one_sequence():
    x = np.arange(8)
    assert [context_slice(x, rank, 2, dim=0).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert context_indices(np.array([0, 3, 8]), 0, 1).tolist() == x.tolist()  # any length where nothing is cut
    assert context_join([context_slice(x, rank, 4, dim=0) for rank in range(4)], dim=0).tolist() == x.tolist()


def test_packed_positions():
    actual = packed_positions(torch.tensor([0, 3, 3, 5], dtype=torch.int32))
    assert actual.tolist() == [0, 1, 2, 0, 1]
    for bad in ([1, 2], [0, 3, 2], [[0, 1]], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            packed_positions(np.array(bad, dtype=int))


def test_bad_context_requests_are_refused():
    with pytest.raises(ValueError, match=r"sequence 1 has 6 tokens.*pad each sequence to a multiple of 4"):
        context_indices(np.array([0, 8, 14]), 0, 2)
    with pytest.raises(ValueError, match="rank is 2 of 2 ranks"):
        context_indices(np.array([0, 8]), 2, 2)
    with pytest.raises(ValueError, match="ends at 8, expected 12"):
        context_slice(np.zeros(12), 0, 2, dim=0, cu_seqlens=[0, 8])
    with pytest.raises(ValueError, match="count is 0"):
        decode_positions(np.array([3]), [[0]], 0)
    with pytest.raises(ValueError, match=r"expected \[B\] and \[B, 1\]"):
        decode_positions(np.array([3, 4]), [[0]])
