"""Pictures and a video through the server to a tiny Qwen2.5-VL: the tokens that transformers has."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Served, prepared
from test_serve_vision import CAT, DOG, ENGINE, FRAMES, SHOWN, Theirs, ask, said, spelled, video
from toy import TOY, image, text
from vision import hf_inputs, save

from whorl.media import Placeholder, Processor, expand
from whorl.models.qwen2_vl import Qwen2VL

pytest.importorskip("transformers")

ASKED = text(" What is it?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and files as publishers ship them."""
    path = tmp_path_factory.mktemp("vl")
    tokenizer = TOY.make_tokenizer()
    like = TOY.config(tokenizer)
    tower = {"patch_size": 8, "window_size": 32}
    values = Qwen2VL.tiny(tower, model_type="qwen2_5_vl", vocab_size=like["text_config"]["vocab_size"])
    values |= {name: value for name, value in like.items() if name.endswith("_token_id")}
    save(path, values)
    (path / "config.json").write_text(json.dumps(values))
    TOY.write_files(path, tokenizer)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with prepared(folder, ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.mark.parametrize("name", ["a picture", "one that is resized", "two", "text"])
def test_the_server_says_what_transformers_says(served: Served, theirs: Theirs, name: str) -> None:
    parts: list[Any] = SHOWN[name]
    answer = ask(served, *(image(part) if isinstance(part, bytes) else part for part in parts))
    length, expected = theirs.answer(*parts)
    assert said(answer) == spelled(served, expected)
    assert answer.usage.prompt_tokens == length


def test_pictures_are_told_apart(served: Served) -> None:
    assert said(ask(served, image(CAT), ASKED)) != said(ask(served, image(DOG), ASKED))


def test_a_video_is_one_run_of_tokens_with_its_time(served: Served, theirs: Theirs, folder: Path) -> None:
    answer = ask(served, video(FRAMES), ASKED)
    processor = Processor.from_folder(folder, num_processes=1)
    assert processor is not None
    item = processor.frames(FRAMES).item()
    processor.close()
    assert (item.family, item.grid[0], item.interval) == ("qwen2_5_vl", 2, 1.0)
    prompt = expand(theirs.prompt({"type": "video"}, ASKED), [Placeholder.for_item(item, TOY.MERGE)], processor.family)
    ids = theirs.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert answer.usage.prompt_tokens == len(ids)
    config = theirs.model.config
    tokens = (config.image_token_id, config.video_token_id)
    inputs = hf_inputs([(ids, [item])], *tokens, has_time=True)
    assert said(answer) == spelled(served, theirs.greedy(**inputs))
    assert said(ask(served, video(FRAMES[::-1]), ASKED)) != said(answer)
