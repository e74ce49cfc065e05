"""Qwen2-VL and Qwen2.5-VL against transformers on random tiny checkpoints: the tower, logits and greedy answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import close
from vision import expand, hf_greedy, hf_inputs, item
from vision_engine import GREEDY, Prompt, pair, serve

from whorl import nn
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import load_model, random_model
from whorl.models.qwen2_vl import Qwen2VL
from whorl.models.qwen2_vl_tower import windows
from whorl.positions import multimodal_positions

pytest.importorskip("transformers")

WINDOWED = {"model_type": "qwen2_5_vl"}
CONFIGS = {
    "qwen2-vl": Qwen2VL.tiny(),
    "qwen2.5-vl": Qwen2VL.tiny(**WINDOWED),
    "qwen2.5-vl tied": Qwen2VL.tiny(**WINDOWED) | {"tie_word_embeddings": True},
    "qwen2-vl odd": Qwen2VL.tiny({"depth": 2, "num_heads": 4, "patch_size": 8, "in_channels": 1, "mlp_ratio": 3}),
    "qwen2.5-vl odd": Qwen2VL.tiny({"window_size": 40, "fullatt_block_indexes": [0], "num_heads": 4}, **WINDOWED),
}
FIRST = ("qwen2-vl", "qwen2.5-vl")
TEXT = [5, 81, 2, 44, 13, 7, 60, 9]
# Kind, grid and seconds of a temporal patch, by a letter; the sizes are whole windows, parts of one and several.
ITEMS: dict[str, tuple[Any, ...]] = {
    "wide": ("image", (1, 4, 16), 1.0),
    "tall": ("image", (1, 14, 6), 1.0),
    "small": ("image", (1, 2, 2), 1.0),
    "clip": ("video", (2, 8, 4), 1.0),
    "slow": ("video", (3, 12, 4), 1.2),  # times 0, 2 and 4 of six rows: see `test_text_goes_on_after_the_time`
}
PROMPTS: dict[str, list[Any]] = {
    "text": TEXT,
    "one picture": [*TEXT, "wide", 3, 4],
    "several": [1, "tall", 2, "small", "wide", *TEXT],
    "video": [9, "clip", *TEXT],
    "slow video": [9, "slow", *TEXT],
    "mixed": [*TEXT, "wide", 3, "slow", 5, "tall", 7, "clip", 1],
}


def shown(model: Any, name: str) -> Prompt:
    """A prompt with patches as large as the model's."""
    values = model.config.vision.patch_values
    parts: list[Any] = []
    for part in PROMPTS[name]:
        if isinstance(part, int):
            parts.append(part)
            continue
        kind, grid, interval = ITEMS[part]
        drawn = item(list(ITEMS).index(part), grid, kind, values=values)
        parts.append(replace(drawn, interval=interval))
    return expand(parts, is_whole=True)


@pytest.fixture(scope="module", params=[n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' model and ours, of one checkpoint."""
    return pair(CONFIGS[request.param], tmp_path_factory.mktemp("vl"))


def has_time(model: Any) -> bool:
    return model.config.position_rule.tokens_per_second is not None


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 6, 16), (1, 14, 10), (3, 4, 6), (1, 12, 24)])
def test_features_are_transformers(both: tuple[Any, Any], grid: tuple[int, int, int]) -> None:
    theirs, ours = both
    patches = torch.from_numpy(item(5, grid, "video", values=ours.config.vision.patch_values).patches)
    with torch.inference_mode():
        expected = theirs.model.visual(patches, torch.tensor([grid]))
    (features,) = ours.tower.encode(patches, grid)
    close(features, expected.pooler_output)


def test_several_pictures_at_once_are_each_by_itself(both: tuple[Any, Any]) -> None:
    """transformers packs them; here each runs alone, and in pieces or whole it has the same bits."""
    theirs, ours = both
    items = [item(i, grid, values=ours.config.vision.patch_values) for i, grid in enumerate([(1, 4, 16), (1, 8, 10)])]
    pictures = [(torch.from_numpy(each.patches), each.grid) for each in items]
    with torch.inference_mode():
        packed = torch.cat([patches for patches, _ in pictures])
        expected = theirs.model.visual(packed, torch.tensor([each.grid for each in items])).pooler_output
    alone = [ours.tower.encode(*picture) for picture in pictures]
    close(torch.cat([features[0] for features in alone]), expected)
    encoding = ours.tower.begin(*pictures[0])
    assert ours.tower.advance(encoding, 1) is None
    assert torch.equal(ours.tower.advance(encoding, 9), alone[0])
    joined = [ours.tower.begin(*picture) for picture in pictures]
    assert ours.tower.advance_all(joined, 1) == [None] * 2
    for mine, features in zip(ours.tower.advance_all(joined, 9), alone, strict=True):
        close(mine, features)


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_answers_are_transformers(both: tuple[Any, Any], name: str) -> None:
    theirs, ours = both
    prompt = shown(ours, name)
    _, (seq,), logits = serve(ours, [prompt])
    assert seq.output_ids == hf_greedy(theirs, [prompt], GREEDY.max_tokens or 0, has_time=has_time(ours))[0]
    with torch.inference_mode():
        first = theirs(**hf_inputs([prompt], has_time=has_time(ours))).logits[0, -1]
    close(logits[seq.id][0], first, 2e-5)


def test_bits_do_not_depend_on_the_way(both: tuple[Any, Any]) -> None:
    """Alone, together, in chunks, with drafts, and with a prefix that is cached."""
    _, ours = both
    prompts = [shown(ours, name) for name in PROMPTS]
    alone = [serve(ours, [prompt], use_prefix_cache=False) for prompt in prompts]
    lookup = PromptLookup(k=4, min_hist=1, guard=False)
    ways: list[dict[str, Any]] = [
        {},
        {"max_prompt_tokens": 7},
        {"max_prompt_tokens": 5, "num_blocks": 40, "max_model_len": 150},
        {"speculate": lookup, "draft_length": "fixed"},
    ]
    for way in ways:
        _, sequences, logits = serve(ours, [*prompts, *prompts], **way)
        for i, seq in enumerate(sequences):
            _, (expected,), bits = alone[i % len(prompts)]
            assert seq.output_ids == expected.output_ids
            assert all(torch.equal(logits[seq.id][place], row) for place, row in bits[expected.id].items())


def test_the_time_of_a_video_is_part_of_a_block(both: tuple[Any, Any]) -> None:
    """Two videos of the same pixels at other speeds have other positions: neither may take the other's blocks."""
    _, ours = both
    ids, (clip,) = shown(ours, "slow video")
    faster = (ids, [replace(clip, interval=0.6)])
    prompts = [(ids, [clip]), faster]
    apart = [serve(ours, [prompt], use_prefix_cache=False)[2] for prompt in prompts]
    llm, sequences, logits = serve(ours, [prompts[0]])
    seq, *_ = llm.add(*faster[:1], GREEDY, media=faster[1])
    while llm.has_work:
        llm.step()
    (expected,) = apart[1].values()
    assert torch.equal(logits[seq.id][0], expected[0])
    (first,) = apart[0].values()
    assert torch.equal(first[0], expected[0]) != has_time(ours)
    assert sequences


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_text_goes_on_after_the_time(kind: str) -> None:
    """As in transformers 4 and vLLM, whose loop is this: each part begins past the largest position before it."""
    config: Any = Qwen2VL.config_class.from_hf(Qwen2VL.tiny(model_type=kind))
    grids, seconds = [[9, 4, 4], [2, 4, 12]], [1.1, 0.4]
    ids: list[int] = [5, 6]
    parts = [torch.arange(2).expand(3, -1)]
    for (frames, rows, columns), each in zip(grids, seconds, strict=True):
        rate = 2 * each if kind == "qwen2_5_vl" else 1
        times = (torch.arange(frames).float() * rate).long()
        axes = torch.meshgrid(times, torch.arange(rows // 2), torch.arange(columns // 2), indexing="ij")
        parts.append(torch.stack(axes).flatten(1) + parts[-1].max() + 1)
        parts.append(torch.arange(3).expand(3, -1) + parts[-1].max() + 1)
        ids += [102] * parts[-2].shape[1] + [7, 8, 9]
    expected = torch.cat(parts, 1)
    actual, deltas = multimodal_positions(
        torch.tensor(ids),
        config.position_rule,
        video_grid_thw=grids,
        seconds_per_grid=seconds if kind == "qwen2_5_vl" else None,
        cu_seqlens=[0, len(ids)],
    )
    assert torch.equal(actual, expected)
    assert deltas.item() == expected.max() + 1 - len(ids)


def test_windows_are_transformers() -> None:
    from transformers.vision_utils import get_vision_window_index

    for rows, columns in ((1, 1), (4, 4), (5, 9), (8, 3), (12, 16)):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        index, starts = get_vision_window_index(grid, spatial_merge_size=2, window_size=112, patch_size=14)
        order, sizes = windows(rows, columns, 4, torch.device("cpu"))
        assert torch.equal(order, index)
        assert torch.equal(4 * sizes.cumsum(0), starts[1:].long())


# ---- files


@pytest.mark.parametrize("is_new", [False, True])
def test_both_spellings_of_names_are_read(tmp_path: Path, is_new: bool) -> None:
    from safetensors.torch import load_file, save_file

    theirs, ours = pair(CONFIGS["qwen2.5-vl"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("visual.") for name in tensors)
    if is_new:
        new = {("model." + n if n.startswith("visual") else n.replace("model.", "model.language_model.")): t
               for n, t in tensors.items()}  # fmt: skip
        save_file(new, tmp_path / "model.safetensors")
    model: Any = load_model(tmp_path, device="cpu", progress=False)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert torch.equal(model.visual.blocks[0].attn.qkv.weight, theirs.model.visual.blocks[0].attn.qkv.weight)


def published(kind: str) -> dict[str, Any]:
    """As Qwen's own files: the text's fields outside, the tower's nearly all left out."""
    config = Qwen2VL.tiny(model_type=kind)
    text = config.pop("text_config") | {"model_type": kind, "rope_theta": 10000.0}
    del text["rope_parameters"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text |= {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
    config["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4}
    return config | text | {"model_type": kind}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_published_form_of_config_is_read(kind: str) -> None:
    assert Qwen2VL.config_class.from_hf(published(kind)) == Qwen2VL.config_class.from_hf(Qwen2VL.tiny(model_type=kind))


def test_the_class_s_defaults_count() -> None:
    """Files of Qwen2.5-VL-72B name neither the tower's depth nor its windows."""
    vision = {"hidden_size": 1280, "out_hidden_size": 32, "intermediate_size": 3456, "patch_size": None}
    config: Any = Qwen2VL.config_class.from_hf({**published("qwen2_5_vl"), "vision_config": vision})
    tower = config.vision
    assert (tower.depth, tower.num_heads, tower.patch_size, tower.window) == (32, 16, 14, 4)
    assert (tower.full_layers, tower.tokens_per_second, tower.intermediate_size) == ((7, 15, 23, 31), 4, 3456)
    old: Any = Qwen2VL.config_class.from_hf({**published("qwen2_vl"), "vision_config": {"hidden_size": 32}})
    assert (old.vision.hidden_size, old.vision.out_hidden_size, old.vision.intermediate_size) == (1280, 32, 5120)


WRONG = {
    "out_hidden_size is 48, expected the text's hidden_size, 32": {"out_hidden_size": 48},
    "hidden_act is 'relu', expected silu": {"hidden_act": "relu"},
    "fullatt_block_indexes is 'all'": {"fullatt_block_indexes": "all"},
    "window_size is 4, expected at least the 8 pixels": {"window_size": 4},
    "3 heads of 32 channels": {"num_heads": 3},
    "in_chans is 1, expected 3": {"in_chans": 1},
    "tokens_per_second is 0": {"tokens_per_second": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_model_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen2VL.config_class.from_hf(Qwen2VL.tiny(WRONG[message], **WINDOWED))


def test_ranks_have_their_shares_and_all_of_the_tower() -> None:
    whole: Any = random_model(CONFIGS["qwen2.5-vl"], device="cpu", dtype=torch.float32)
    from whorl.engine.weights import build

    half: Any = build(CONFIGS["qwen2.5-vl"], device="meta", dtype=torch.float32, tp=nn.Ranks(rank=1, size=2))
    assert half.decoder.layers[0].mlp.down_proj.weight.shape[1] * 2 == 48
    assert {n: p.shape for n, p in half.visual.named_parameters()} == {
        n: p.shape for n, p in whole.visual.named_parameters()
    }
