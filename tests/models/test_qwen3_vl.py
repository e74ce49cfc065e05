"""Qwen3-VL against transformers on random tiny checkpoints: the tower, logits and greedy answers."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from one_sequence import close
from vision import IMAGE, VIDEO, expand, hf_greedy, hf_inputs, item
from vision_engine import GREEDY, pair, serve

from whorl import nn, ops
from whorl.engine.weights import load_model
from whorl.models.qwen3_vl import Qwen3VL

pytest.importorskip("transformers")

CONFIGS = {
    "dense": Qwen3VL.tiny(),
    "tied": Qwen3VL.tiny() | {"tie_word_embeddings": True},
    "experts": Qwen3VL.tiny(num_experts=4),
    "one deepstack": Qwen3VL.tiny({"deepstack_visual_indexes": [3], "num_position_embeddings": 9}),
    "odd": Qwen3VL.tiny({"depth": 3, "spatial_merge_size": 2, "in_channels": 1, "num_heads": 4, "patch_size": 8}),
}
TEXT = [5, 81, 2, 44, 13, 7, 60, 9]
WIDE, TALL, SMALL = item(0, (1, 4, 8)), item(1, (1, 10, 2)), item(2, (1, 2, 2))
CLIP = item(3, (3, 4, 2), "video")
PROMPTS: dict[str, list[Any]] = {
    "text": TEXT,
    "one picture": [*TEXT, WIDE, 3, 4],
    "a picture first": [SMALL, 8],
    "several": [1, TALL, 2, SMALL, WIDE, *TEXT],
    "the same twice": [WIDE, 7, WIDE, 6],
    "video": [9, CLIP, *TEXT],
    "mixed": [*TEXT, WIDE, 3, CLIP, 5, TALL, 7, item(4, (2, 2, 4), "video"), 1],
}


FIRST = ("dense", "experts")


@pytest.fixture(scope="module", params=[n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' model and ours, of one checkpoint."""
    return pair(CONFIGS[request.param], tmp_path_factory.mktemp("vl"))


def patches(model: Any, seed: int, grid: tuple[int, int, int], kind: str = "image") -> Any:
    return item(seed, grid, kind, values=model.config.vision.patch_values)


def shown(model: Any, parts: Sequence[Any]) -> list[Any]:
    """The same items with patches as large as the model's."""
    made = {WIDE: 0, TALL: 1, SMALL: 2, CLIP: 3}
    return [
        part if isinstance(part, int) else patches(model, made.get(part, 4), part.grid, part.kind) for part in parts
    ]


GRIDS = [(1, 2, 2), (1, 4, 8), (1, 14, 2), (3, 4, 6), (1, 20, 18)]


@pytest.mark.parametrize("grid", GRIDS)
def test_the_towers_hidden_states_are_transformers(both: tuple[Any, Any], grid: tuple[int, int, int]) -> None:
    theirs, ours = both
    made = torch.from_numpy(patches(ours, 5, grid, "video").patches)
    with torch.inference_mode():
        expected = theirs.model.visual(made, torch.tensor([grid]), output_hidden_states=True)
    encoding = ours.tower.begin(made, grid)
    states = [encoding.x]
    features = None
    while features is None:
        features = ours.tower.advance(encoding, 1)
        states.append(encoding.x)
    assert len(expected.hidden_states) >= len(ours.tower.blocks)
    for mine, their in zip(states, expected.hidden_states, strict=False):
        close(mine, their)
    close(states[-1], expected.last_hidden_state)
    assert len(features) == 1 + len(expected.deepstack_features)
    close(features[0], expected.pooler_output)
    for mine, their in zip(features[1:], expected.deepstack_features, strict=True):
        close(mine, their)


def test_several_pictures_at_once_are_each_by_itself(both: tuple[Any, Any]) -> None:
    """transformers packs them; here each runs alone, and in pieces or whole it has the same bits."""
    theirs, ours = both
    items = [patches(ours, i, grid) for i, grid in enumerate([(1, 4, 6), (1, 2, 2), (1, 8, 4)])]
    with torch.inference_mode():
        packed = torch.cat([torch.from_numpy(each.patches) for each in items])
        expected = theirs.model.visual(packed, torch.tensor([each.grid for each in items])).pooler_output
    encodings = [ours.tower.encode(torch.from_numpy(each.patches), each.grid) for each in items]
    close(torch.cat([each[0] for each in encodings]), expected)
    for each, features in zip(items, encodings, strict=True):
        encoding = ours.tower.begin(torch.from_numpy(each.patches), each.grid)
        assert ours.tower.advance(encoding, 2) is None
        again = ours.tower.advance(encoding, 9)
        assert torch.equal(again, features)
    joined = [ours.tower.begin(torch.from_numpy(each.patches), each.grid) for each in items]
    assert ours.tower.advance_all(joined, 2) == [None] * 3
    for mine, features in zip(ours.tower.advance_all(joined, 9), encodings, strict=True):
        close(mine, features)


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_answers_are_transformers(both: tuple[Any, Any], name: str) -> None:
    theirs, ours = both
    prompt = expand(shown(ours, PROMPTS[name]))
    _, (seq,), logits = serve(ours, [prompt])
    expected = hf_greedy(theirs, [prompt], GREEDY.max_tokens or 0)
    assert seq.output_ids == expected[0]
    with torch.inference_mode():
        first = theirs(**hf_inputs([prompt])).logits[0, -1]
    close(logits[seq.id][0], first, 2e-5)


def test_ragged_batches_are_transformers(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    prompts = [expand(shown(ours, parts)) for parts in PROMPTS.values()]
    _, sequences, _ = serve(ours, prompts, max_num_batched_tokens=50)
    assert [seq.output_ids for seq in sequences] == hf_greedy(theirs, prompts, GREEDY.max_tokens or 0)


def test_features_matter(tmp_path: Path) -> None:
    """Without deepstack, or with the positions of text, logits would be others: the comparison sees both."""
    _, ours = pair(CONFIGS["dense"], tmp_path)
    prompt = expand(shown(ours, PROMPTS["one picture"]))
    _, (seq,), logits = serve(ours, [prompt])
    encode = ours.tower.advance

    def without_deepstack(encoding: Any, layers: int) -> Any:
        features = encode(encoding, layers)
        return features if features is None else torch.cat((features[:1], torch.zeros_like(features[1:])))

    ours.tower.advance = without_deepstack
    _, (other,), changed = serve(ours, [prompt])
    assert not torch.allclose(changed[other.id][0], logits[seq.id][0], rtol=1e-2)


# ---- files


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacked_experts_are_read_either_way(tmp_path: Path, is_transposed: bool) -> None:
    """Published files hold [E, C, 2 F]; transformers writes what it has made of it."""
    from safetensors.torch import load_file, save_file

    theirs, _ = pair(CONFIGS["experts"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = [name for name in tensors if ".experts." in name]
    assert len(stacked) == 2 * 3
    if is_transposed:
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in stacked}
        save_file(tensors, tmp_path / "model.safetensors")
    model: Any = load_model(tmp_path, device="cpu", progress=False)
    experts = model.decoder.layers[1].mlp.experts
    expected = theirs.model.language_model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj.weight, expected.gate_up_proj)
    assert torch.equal(experts.down_proj.weight, expected.down_proj)
    halves: list[Any] = [
        load_model(tmp_path, device="cpu", progress=False, tp=nn.Ranks(rank=rank, size=2)) for rank in range(2)
    ]
    held = [each.decoder.layers[1].mlp.experts for each in halves]
    assert torch.equal(torch.cat([each.down_proj.weight for each in held], 2), expected.down_proj)
    gates, ups = zip(*(each.gate_up_proj.weight.chunk(2, 1) for each in held), strict=True)
    assert torch.equal(torch.cat([*gates, *ups], 1), expected.gate_up_proj)


WRONG = {
    "vision_config is None": lambda c: c.pop("vision_config"),
    "text_config is 3": lambda c: c.update(text_config=3),
    "out_hidden_size is 48, expected the text's hidden_size, 32": lambda c: c["vision_config"].update(
        out_hidden_size=48
    ),
    "hidden_act is 'relu'": lambda c: c["vision_config"].update(hidden_act="relu"),
    "deepstack_visual_indexes is": lambda c: c["vision_config"].update(deepstack_visual_indexes=[0, 9]),
    "has 4 layers": lambda c: c["vision_config"].update(deepstack_visual_indexes=[0, 1, 2, 3]),
    "3 heads of 32 channels": lambda c: c["vision_config"].update(num_heads=3),
    "expected a square": lambda c: c["vision_config"].update(num_position_embeddings=37),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_model_is_refused(message: str) -> None:
    config = json.loads(json.dumps(Qwen3VL.tiny()))
    WRONG[message](config)
    with pytest.raises(ValueError, match=message):
        Qwen3VL.config_class.from_hf(config)


# ---- attention


def test_a_segments_bits_are_its_own() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(60, 2, 16, generator=draw) for _ in range(3))
    bounds = [0, 7, 30, 31, 60]
    packed = ops.packed_attention(q, k, v, torch.tensor(bounds, dtype=torch.int32), scale=0.25)
    for start, stop in itertools.pairwise(bounds):
        part = slice(start, stop)
        alone = torch.tensor([0, stop - start], dtype=torch.int32)
        actual = ops.packed_attention(q[part], k[part], v[part], alone, scale=0.25)
        assert torch.equal(actual, packed[part])
        heads = [x[part].transpose(0, 1)[None] for x in (q, k, v)]
        close(actual, torch.nn.functional.scaled_dot_product_attention(*heads, scale=0.25)[0].transpose(0, 1))


def test_ids_of_the_tiny_model() -> None:
    config = Qwen3VL.tiny()
    assert (config["image_token_id"], config["video_token_id"]) == (IMAGE, VIDEO)
