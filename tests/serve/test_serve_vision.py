"""A picture all the way: from OpenAI's client or a terminal through the server to the tokens that transformers has."""

import base64
import functools
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from media_files import png
from PIL import Image
from serving import Served, prepared
from toy import TOY, image, text
from typer.testing import CliRunner
from vision import hf_inputs, save

from whorl.cli import app
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.media import MediaItem, Placeholder, Processor, expand
from whorl.serve.logprobs import TokenTexts

pytest.importorskip("transformers")

COUNT = 10
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
ENGINE = EngineSettings(device="cpu", max_num_seqs=4, block_size=4, num_blocks=256)
CAT, DOG, WIDE = png(48, 48, seed=1), png(48, 48, seed=2), png(120, 40, seed=3)
FRAMES = [png(48, 48, seed) for seed in range(4)]
ASKED = text(" What is it?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and files as publishers ship them."""
    path = tmp_path_factory.mktemp("vl")
    tokenizer = TOY.make_tokenizer()
    values = TOY.config(tokenizer)
    save(path, values)
    (path / "config.json").write_text(json.dumps(values))
    TOY.write_files(path, tokenizer)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with prepared(folder, ENGINE) as running:
        yield running


def video(frames: Sequence[bytes]) -> dict[str, Any]:
    url = f"data:video/jpeg;base64,{','.join(base64.b64encode(each).decode() for each in frames)}"
    return {"type": "video_url", "video_url": {"url": url}}


@functools.cache
def client_of(url: str) -> tuple[openai.OpenAI, str]:
    """A client, and the name that the server gives its model."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return client, client.models.list().data[0].id


def ask(served: Served, *parts: Any, **more: Any) -> Any:
    client, model = client_of(served.url)
    defaults = {"temperature": 0, "max_tokens": COUNT, "logprobs": True, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(model=model, messages=messages, **defaults | more)


def said(answer: Any) -> list[list[int]]:
    """Bytes of each token: these have no text of their own where they are half a character."""
    return [token.bytes for token in answer.choices[0].logprobs.content]


def spelled(served: Served, ids: Sequence[int]) -> list[list[int]]:
    texts = TokenTexts(served.app.state.service.tokenizer)
    return [texts.bytes(i) for i in ids]


class Theirs:
    """transformers' own: model, tokenizer, template and Pillow's processor, of the same folder."""

    def __init__(self, folder: Path) -> None:
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None  # as ignore_eos
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._answers: dict[tuple[Any, ...], tuple[int, list[int]]] = {}

    def prompt(self, *parts: Any) -> str:
        """The template's text. parts: pictures, kinds ("video") or text."""
        kinds = [{"type": "image"} if isinstance(part, bytes) else part for part in parts]
        messages = [{"role": "user", "content": kinds}]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # type: ignore[no-any-return]

    def greedy(self, **inputs: Any) -> list[int]:
        with torch.inference_mode():
            out = self.model.generate(**inputs, do_sample=False, max_new_tokens=COUNT, pad_token_id=0)
        return out[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    def answer(self, *parts: Any) -> tuple[int, list[int]]:
        """Tokens of the prompt, and those said. parts: pictures as bytes, text as parts."""
        name = tuple(part if isinstance(part, bytes) else part["text"] for part in parts)
        if name not in self._answers:
            self._answers[name] = self._answer(*parts)
        return self._answers[name]

    def _answer(self, *parts: Any) -> tuple[int, list[int]]:
        pictures = [Image.open(io.BytesIO(part)) for part in parts if isinstance(part, bytes)]
        prompt, inputs = self.prompt(*parts), {}
        if pictures:
            inputs = dict(self.processor(pictures, return_tensors="pt"))
            for grid in inputs["image_grid_thw"]:
                prompt = prompt.replace("<|image_pad|>", "<|place|>" * (int(grid.prod()) // TOY.MERGE**2), 1)
        ids = self.tokenizer(prompt.replace("<|place|>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]
        kinds = [[int(i == self.model.config.image_token_id) for i in ids]]
        inputs |= {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor(kinds, dtype=torch.int)}
        return len(ids), self.greedy(**inputs, attention_mask=torch.ones(1, len(ids), dtype=torch.long))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Theirs:
    return Theirs(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Iterator[Processor]:
    made = Processor.from_folder(folder, num_processes=1)
    assert made is not None
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    """An engine that nobody else asks, without a cache of prefixes."""
    return LLM(folder, ENGINE, use_prefix_cache=False, warm=False)


def generated(llm: LLM, prompt: str, items: Sequence[MediaItem]) -> list[int]:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(expand(prompt, [Placeholder.for_item(item, TOY.MERGE) for item in items]))
    (out,) = llm.generate([ids], GREEDY, media=[list(items)], progress=False)
    return out.token_ids


SHOWN: dict[str, list[Any]] = {
    "a picture": [CAT, ASKED],
    "another": [DOG, ASKED],
    "one that is resized": [text("See "), WIDE, ASKED],
    "two": [CAT, text(" and "), DOG, ASKED],
    "two, swapped": [DOG, text(" and "), CAT, ASKED],
    "text": [ASKED],
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_server_says_what_the_engine_and_transformers_say(
    served: Served, theirs: Theirs, alone: LLM, processor: Processor, name: str
) -> None:
    parts = SHOWN[name]
    answer = ask(served, *(image(part) if isinstance(part, bytes) else part for part in parts))
    length, expected = theirs.answer(*parts)
    assert said(answer) == spelled(served, expected)
    items = [processor.image(part).item() for part in parts if isinstance(part, bytes)]
    assert generated(alone, theirs.prompt(*parts), items) == expected
    # The tokens of pictures are counted: nine of a square, and of one that is brought to 80 x 32 pixels ten.
    assert answer.usage.prompt_tokens == length
    assert length - (9 * (parts.count(CAT) + parts.count(DOG)) + 10 * parts.count(WIDE)) < 40
    assert answer.usage.completion_tokens == COUNT


def test_the_pictures_decide_what_is_said(theirs: Theirs) -> None:
    """Else the test above would prove nothing about them."""
    answers = {tuple(theirs.answer(*parts)[1]) for parts in SHOWN.values()}
    assert len(answers) == len(SHOWN)


def test_swapped_pictures_swap_answers_with_the_prefix_cache(served: Served, theirs: Theirs) -> None:
    """The ids of both prompts are the same. The second time each finds its own blocks."""
    orders = {(CAT, DOG): SHOWN["two"], (DOG, CAT): SHOWN["two, swapped"]}
    assert served.llm.pool.use_prefix_cache
    for turn in range(2):
        for (first, second), parts in orders.items():
            answer = ask(served, image(first), parts[1], image(second), ASKED)
            assert said(answer) == spelled(served, theirs.answer(*parts)[1])
            if turn:
                assert answer.usage.prompt_tokens_details.cached_tokens > 2 * 9


def test_a_picture_is_encoded_once(served: Served) -> None:
    """Also behind another text, where nothing of the prefix is the same."""
    shown = image(png(48, 48, seed=9))
    before = served.llm.stats()
    ask(served, text("First. "), shown, ASKED)
    middle = served.llm.stats()
    assert middle["num_encoded"] == before["num_encoded"] + 1
    ask(served, text("Something else: "), shown, ASKED)
    after = served.llm.stats()
    assert after["num_encoded"] == middle["num_encoded"]
    assert after["num_encoder_hits"] == middle["num_encoder_hits"] + 1


def test_frames_of_a_video(served: Served, theirs: Theirs, alone: LLM, processor: Processor) -> None:
    answer = ask(served, video(FRAMES), ASKED)
    item = processor.frames(FRAMES).item()
    prompt = theirs.prompt({"type": "video"}, ASKED)
    ids = theirs.tokenizer(expand(prompt, [Placeholder.for_item(item, TOY.MERGE)]), add_special_tokens=False)[
        "input_ids"
    ]
    config = theirs.model.config
    expected = theirs.greedy(**hf_inputs([(ids, [item])], config.image_token_id, config.video_token_id))
    assert said(answer) == spelled(served, expected)
    assert generated(alone, prompt, [item]) == expected
    assert answer.usage.prompt_tokens == len(ids)
    assert item.grid == (2, 6, 6)
    backwards = ask(served, video(FRAMES[::-1]), ASKED)
    assert said(backwards) != said(answer)


def test_the_terminal(folder: Path, theirs: Theirs, tmp_path: Path) -> None:
    file, frames = tmp_path / "cat.png", tmp_path / "frames"
    file.write_bytes(CAT)
    frames.mkdir()
    for index, frame in enumerate(FRAMES):
        (frames / f"{index}.png").write_bytes(frame)
    arguments = ["generate", str(folder), "--chat", "-p", ASKED["text"], "--json", "--device", "cpu", "-n", str(COUNT)]
    done = CliRunner().invoke(app, [*arguments, "--image", str(file)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    length, expected = theirs.answer(CAT, ASKED)
    assert answer["prompt_tokens"] == length
    assert answer["token_ids"] == _until_the_end(expected, theirs.tokenizer.eos_token_id)
    done = CliRunner().invoke(app, [*arguments, "--video", str(frames)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["prompt_tokens"] > length


def _until_the_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def test_a_picture_that_can_never_be_held_is_refused(folder: Path) -> None:
    """By the engine, which the server cannot ask before: still with 400, and it goes on."""
    with prepared(folder, ENGINE.changed(encoder_cache=4)) as running:
        with pytest.raises(openai.BadRequestError, match="9 tokens, expected at most 4"):
            ask(running, image(CAT), ASKED)
        assert len(said(ask(running, ASKED))) == COUNT
        assert running.is_idle()


def test_lookups_are_counted(served: Served) -> None:
    def count(name: str) -> float:
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"whorl:mm_cache_{name}_total"))

    before = count("queries"), count("hits")
    for start in ("A ", "B "):
        ask(served, text(start), image(png(48, 48, seed=10)), ASKED)
    assert (count("queries"), count("hits")) == (before[0] + 2, before[1] + 1)


def render(served: Served, *parts: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    return served.post("/v1/chat/completions/render", messages=messages, **more)


def test_what_is_rendered_is_generated_as_the_conversation(served: Served) -> None:
    """Trainers render a conversation, and send its tokens and features back."""
    parts = [image(CAT), ASKED, image(WIDE), video(FRAMES)]
    chat = served.chat(parts, max_tokens=6, return_token_ids=True)  # type: ignore[arg-type]
    rendered = render(served, *parts, temperature=0.0, max_tokens=6, seed=3)
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert rendered["sampling_params"] == {"temperature": 0.0, "seed": 3, "max_tokens": 6, "n": 1}
    features = rendered["features"]
    assert {kind: len(hashes) for kind, hashes in features["mm_hashes"].items()} == {"image": 2, "video": 1}
    config = served.llm.model.config  # type: ignore[attr-defined]
    pads = {"image": config.image_token_id, "video": config.video_token_id}
    for kind, spans in features["mm_placeholders"].items():
        assert all(rendered["token_ids"][span["offset"]] == pads[kind] for span in spans)
    answer = served.post("/inference/v1/generate", **rendered)
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # the conversation's own prefix
    assert render(served, ASKED)["features"] is None


def test_features_of_pictures_alone_go_with_other_tokens(served: Served) -> None:
    """TRL renders the pictures by themselves, and pairs them with a prompt that it has made."""
    features = render(served, image(DOG), max_tokens=1)["features"]
    whole = render(served, ASKED, image(DOG), temperature=0.0, max_tokens=6)
    answer = served.post("/inference/v1/generate", **whole | {"features": features})
    assert answer["choices"] == served.post("/inference/v1/generate", **whole)["choices"]
    bad = features | {"kwargs_data": {"image": ["bm8gcGljdHVyZQ=="]}}
    for sent, message in (
        (bad, "kwargs_data cannot be read"),
        (features | {"kwargs_data": {"image": []}}, "differ in their numbers"),
        (render(served, image(WIDE))["features"], "placeholder"),
    ):
        refused = served.http.post("/inference/v1/generate", json=whole | {"features": sent})
        assert (refused.status_code, message in refused.text) == (400, True), refused.text
