"""Qwen3.5 with images and videos against transformers: the tower without deepstack, positions, logits and answers."""

import json
from typing import Any

import pytest
import torch
from one_sequence import close
from test_qwen3_5 import lively
from test_qwen3_vl import CLIP, GREEDY, PROMPTS, TALL, WIDE, patches, serve, shown
from vision import expand, hf_greedy, hf_inputs

from whorl.engine.weights import load_model
from whorl.models.qwen3_5 import Qwen3_5

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "dense": Qwen3_5.tiny(),
    "experts": Qwen3_5.tiny(num_experts=4),
    "tied": Qwen3_5.tiny({"depth": 2, "model_type": "qwen3_5"}) | {"tie_word_embeddings": True},
}
LONG = [(3 * i * i + 7 * i + 2) % 59 for i in range(70)]


@pytest.fixture(scope="module", params=["dense", "experts", pytest.param("tied", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """transformers' model and ours, of one checkpoint, with the config.json that a publisher writes."""
    config, folder = CONFIGS[request.param], tmp_path_factory.mktemp("vision")
    values = json.loads(json.dumps({key: value for key, value in config.items() if key != "architectures"}))
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    theirs = transformers.AutoModelForImageTextToText.from_config(made).eval()
    lively(theirs)
    theirs.tie_weights()
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return theirs, load_model(folder, device="cpu", progress=False)


def test_the_tower_is_transformers(both: tuple[Any, Any]) -> None:
    theirs, ours = both
    for grid in [(1, 2, 2), (3, 4, 6), (1, 14, 2)]:
        made = torch.from_numpy(patches(ours, 5, grid, "video").patches)
        with torch.inference_mode():
            expected = theirs.model.visual(made, torch.tensor([grid])).pooler_output
        features = ours.tower.encode(made, grid)
        assert features.shape[0] == 1, "no deepstack"
        close(features[0], expected)


@pytest.mark.parametrize("name", [*PROMPTS, "past a chunk"])
def test_logits_and_answers_are_transformers(both: tuple[Any, Any], name: str) -> None:
    theirs, ours = both
    parts = PROMPTS.get(name) or [*LONG, WIDE, 7, CLIP, 3, TALL, *LONG]
    prompt = expand(shown(ours, parts))
    _, (seq,), logits = serve(ours, [prompt])
    assert seq.output_ids == hf_greedy(theirs, [prompt], GREEDY.max_tokens or 0)[0]
    with torch.inference_mode():
        first = theirs(**hf_inputs([prompt])).logits[0, -1]
    close(logits[seq.id][0], first, 2e-5)


def test_ragged_batches_are_what_each_is_alone(both: tuple[Any, Any]) -> None:
    """Chunks of prompts end at multiples of 64, wherever images are."""
    _, ours = both
    prompts = [expand(shown(ours, parts)) for parts in (*PROMPTS.values(), [*LONG, WIDE, 7, CLIP, *LONG])]
    _, sequences, logits = serve(ours, prompts, max_num_batched_tokens=80)
    for prompt, seq in zip(prompts, sequences, strict=True):
        _, (plain,), alone = serve(ours, [prompt])
        assert seq.output_ids == plain.output_ids
        assert all(torch.equal(alone[plain.id][i], logits[seq.id][i]) for i in range(plain.num_outputs))
