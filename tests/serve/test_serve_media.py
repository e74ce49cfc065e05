"""Pictures and videos over HTTP: what reaches the engine, what is counted, what is refused and how."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from media_files import OPTIONS, data_uri, drawn, encoded, film, lying_png, png
from seeing import Looking, looking, seeing, seeing_tokenizer
from serving import TEMPLATE, Served, serving, told

from whorl.media import Limits, Processor
from whorl.serve.settings import ServerSettings

CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "\nwhat is it"}
ANSWERS = {
    "what is it": "a cat",
    "as JSON": '{"animal": "cat"}',
    "call": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
}
IMAGE_PAD, VIDEO_PAD = (seeing_tokenizer().token_id(f"<|{kind}_pad|>") for kind in ("image", "video"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(png())
    limits = Limits(max_bytes=200_000, max_pixels=1 << 20, max_items=3, max_frames=40)
    with seeing(ANSWERS, limits=limits, max_body=40_000, media_folder=str(folder)) as running:
        running.folder = folder  # type: ignore[attr-defined]
        yield running


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def ask(served: Served, *parts: Any, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(parts)}]
    return served.http.post(CHAT, json={"messages": messages, "temperature": 0, **more})


def refused(served: Served, response: httpx.Response, status: int, says: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in error["message"]
    assert ask(served, TEXT).json()["choices"][0]["message"]["content"] == "a cat", "and the server goes on"
    assert served.is_idle()
    return error


def last(served: Served) -> Any:
    assert isinstance(served.llm, Looking)
    return served.llm.seen[-1]


# ---- what reaches the engine


def test_a_picture(served: Served) -> None:
    """It stands where its part stood, with as many tokens as it has features, all of which are counted."""
    response = ask(served, {"type": "text", "text": "see "}, image(data_uri(png(200, 100))), TEXT)
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "a cat"
    ids, (item,) = last(served)
    assert (item.kind, item.grid) == ("image", (1, 6, 12))
    assert ids.count(IMAGE_PAD) == 18 == len(item.patches) // 4
    assert body["usage"]["prompt_tokens"] == len(ids)
    text = served.llm.tokenizer.decode(ids, skip_special=False)  # type: ignore[union-attr]
    assert f"see <|vision_start|>{'<|image_pad|>' * 18}<|vision_end|>\nwhat is it" in text
    made = Processor(OPTIONS, num_processes=1)
    try:
        alone = made.image(png(200, 100)).item()
    finally:
        made.close()
    assert np.array_equal(item.patches, alone.patches)
    assert item.digest == alone.digest


def test_a_picture_by_the_other_interfaces(served: Served) -> None:
    """The same prompt and the same patches reach the engine, whichever way they came."""
    uri = data_uri(png(200, 100))
    ask(served, image(uri), TEXT)
    ids, (item,) = last(served)
    parts = [{"type": "input_image", "image_url": uri, "detail": "auto"}, {"type": "input_text", "text": TEXT["text"]}]
    request = {"input": [{"role": "user", "content": parts}], "temperature": 0}
    assert served.post("/v1/responses", **request)["output"][0]["content"][0]["text"] == "a cat"
    actual, (other,) = last(served)
    assert actual == ids
    assert np.array_equal(item.patches, other.patches)
    source = {"type": "base64", "media_type": "image/png", "data": uri.partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}]
    body = {"model": "told", "max_tokens": 20, "temperature": 0, "messages": messages, "thinking": {"type": "adaptive"}}
    assert served.post("/v1/messages", **body)["content"] == [{"type": "text", "text": "a cat"}]
    actual, (other,) = last(served)
    assert actual == ids
    assert np.array_equal(item.patches, other.patches)
    shown = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    body["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [shown, TEXT]}]
    assert served.http.post("/v1/messages", json=body).status_code == 200
    assert len(last(served)[1]) == 2


def test_the_order_of_several(served: Served) -> None:
    first, second = encoded(drawn(64, 64, seed=1)), encoded(drawn(96, 64, seed=2), "JPEG")
    frames = ",".join(base64.b64encode(png(64, 64, seed)).decode() for seed in range(4))
    video = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{frames}"}}
    ask(served, image(data_uri(first)), video, image(data_uri(second, "image/jpeg")), TEXT)
    ids, items = last(served)
    assert [item.kind for item in items] == ["image", "video", "image"]
    assert [item.grid for item in items] == [(1, 4, 4), (2, 4, 4), (1, 4, 6)]
    order = [i for i in ids if i in (IMAGE_PAD, VIDEO_PAD)]
    assert order == [IMAGE_PAD] * 4 + [VIDEO_PAD] * 8 + [IMAGE_PAD] * 6
    text = served.llm.tokenizer.decode(ids, skip_special=False)  # type: ignore[union-attr]
    assert "<0.2 seconds><|vision_start|>" in text
    assert "<1.2 seconds><|vision_start|>" in text


def test_a_video_file(served: Served) -> None:
    uri = data_uri(film(), "video/webm")
    assert ask(served, {"type": "video_url", "video_url": uri}, TEXT).status_code == 200
    ids, (item,) = last(served)
    assert (item.kind, item.grid[0], len(item.seconds)) == ("video", 3, 3)
    assert ids.count(VIDEO_PAD) == len(item.patches) // 4


def test_forms_of_a_picture(served: Served) -> None:
    uri = data_uri(encoded(drawn(700, 700).resize((90, 90)).resize((700, 700)), "JPEG"), "image/jpeg")
    for part in ({"type": "image_url", "image_url": uri}, image(uri, detail="auto"), image(uri, detail="high")):
        assert ask(served, part, TEXT).status_code == 200
        assert last(served)[1][0].grid == (1, 16, 16)
    assert ask(served, image(uri, detail="low"), TEXT).status_code == 200
    url = f"file://{served.folder}/a.png"  # type: ignore[attr-defined]
    assert ask(served, image(url), TEXT).status_code == 200


def test_pictures_in_earlier_turns(served: Served) -> None:
    one, two = data_uri(png(seed=1)), data_uri(png(seed=2))
    messages = [
        {"role": "user", "content": [image(one), {"type": "text", "text": "first"}]},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": [image(two), TEXT]},
    ]
    served.post(CHAT, messages=messages, temperature=0)
    _, items = last(served)
    assert len(items) == 2
    assert items[0].digest != items[1].digest


def test_streams_and_copies(served: Served) -> None:
    messages = [{"role": "user", "content": [image(data_uri(png())), TEXT]}]
    options = {"include_usage": True}
    events = served.events(CHAT, messages=messages, temperature=0, n=2, stream_options=options)
    usage = next(event["usage"] for event in reversed(events[:-1]) if event.get("usage"))
    assert usage["prompt_tokens"] == len(last(served)[0])


def test_a_schema_and_a_tool_with_a_picture(served: Served) -> None:
    schema = {"type": "object", "properties": {"animal": {"type": "string"}}, "required": ["animal"]}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    picture = image(data_uri(png()))
    response = ask(served, picture, {"type": "text", "text": "\nas JSON"}, response_format=shape)
    assert json.loads(response.json()["choices"][0]["message"]["content"]) == {"animal": "cat"}
    assert len(last(served)[1]) == 1
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    response = ask(served, picture, {"type": "text", "text": "\ncall"}, tools=[tool], tool_choice="required")
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert len(last(served)[1]) == 1


def test_tokens_of_a_conversation_with_a_picture(served: Served) -> None:
    messages = [{"role": "user", "content": [image(data_uri(png(200, 100))), TEXT]}]
    tokenized = served.post("/tokenize", messages=messages)
    assert tokenized["tokens"].count(IMAGE_PAD) == 18


# ---- what is refused


@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        (data_uri(lying_png(60000, 60000)), 413, "messages.0.content.0: it declares 60000 x 60000 pixels"),
        (data_uri(b"\0" * 300_000), 413, "more than 200000 bytes"),
        (data_uri(b"not a picture"), 400, "it is not a PNG, JPEG, WebP or GIF picture"),
        (data_uri(png(1, 300)), 400, "one side is more than 200 times"),
        (data_uri(encoded(drawn(9, 9), "BMP"), "image/bmp"), 400, "image/bmp; PNG, JPEG, WebP and GIF are allowed"),
        ("http://169.254.169.254/latest", 400, "fetches nothing: send the file itself as a data: URI"),
        ("file:///etc/passwd", 400, "it is not in the folder"),
        ("nonsense", 400, "its URL is not allowed"),
    ],
)
def test_what_is_refused(served: Served, url: str, status: int, says: str) -> None:
    error = refused(served, ask(served, image(url), TEXT), status, says)
    assert error["param"] == "messages.0.content.0"
    assert "0x" not in error["message"].replace("60000", "")


def test_too_many(served: Served) -> None:
    uri = data_uri(png())
    refused(served, ask(served, *[image(uri)] * 4, TEXT), 400, "4 pictures and videos in one request; up to 3")


def test_more_tokens_than_the_model_has(served: Served) -> None:
    """The limit is looked at before patches are made."""
    pictures = [image(data_uri(encoded(drawn(256, 256, "L", seed=seed), "JPEG"), "image/jpeg")) for seed in range(3)]
    small = looking(ANSWERS)
    small.max_model_len = 150
    with seeing(llm=small, max_queue=4) as running:
        response = ask(running, *pictures, TEXT)
        assert response.status_code == 400
        assert (
            "tokens or more; this model's maximum context length is 150 tokens" in response.json()["error"]["message"]
        )
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}, "uuid": "mine"}, "content.0.uuid: is not a parameter"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "content.0.image_url.detail: Input"),
        ({"type": "image_url"}, "content.0.image_url: Field required"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "content.0: a part's type is"),
        ({"type": "input_audio", "input_audio": {}}, "content.0: a part's type is"),
    ],
)
def test_parts_that_are_not_known(served: Served, part: Any, says: str) -> None:
    """Nobody names contents but the server; nobody sends tensors."""
    refused(served, ask(served, part, TEXT), 400, says)


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|video_pad|>"])
def test_a_text_that_writes_a_place_out(served: Served, mark: str) -> None:
    text = {"type": "text", "text": f"{mark}\nwhat is it"}
    refused(served, ask(served, image(data_uri(png())), text), 400, "places for")
    refused(served, ask(served, text), 400, "places for")
    for prompt in (mark, [IMAGE_PAD]):
        response = served.http.post("/v1/completions", json={"prompt": prompt})
        refused(served, response, 400, "stands for a picture or video, and there is none")


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("prompt_embeds", "is not a parameter that this server knows"),
        ("mm_processor_kwargs", "is refused: pictures and videos are read in one way"),
        ("media_io_kwargs", "is refused: pictures and videos are read in one way"),
    ],
)
def test_what_is_not_taken_beside_pictures(served: Served, field: str, says: str) -> None:
    response = ask(served, image(data_uri(png())), TEXT, **{field: {"fps": 1}})
    refused(served, response, 400, f"{field}: {says}")


def test_pictures_may_be_larger_than_the_text_beside_them(served: Served) -> None:
    settings = served.app.state.service.settings
    assert settings.max_body < 200_000 < settings.max_media_body
    url = data_uri(b"x" * 150_000)
    refused(served, ask(served, image(url), TEXT), 400, "messages.0.content.0")  # read, and no picture
    refused(served, ask(served, {"type": "text", "text": "\u00e9" * 50_000}), 413, "more than 40000 bytes beside")


def test_patches_are_not_kept_for_the_whole_answer(served: Served) -> None:
    """They take hundreds of megabytes, and an answer minutes."""
    engine = served.app.state.service.engine
    jobs: list[Any] = []
    submit = engine.submit

    async def watched(*arguments: Any) -> Any:
        jobs.append(await submit(*arguments))
        return jobs[-1]

    engine.submit = watched
    try:
        assert ask(served, image(data_uri(png())), TEXT).status_code == 200
    finally:
        engine.submit = submit
    assert len(last(served)[1]) == 1
    assert jobs[0].media == ()


def test_a_template_that_knows_no_pictures() -> None:
    with seeing(llm=looking(tokenizer=seeing_tokenizer(TEMPLATE))) as running:
        response = ask(running, image(data_uri(png())), TEXT)
        assert response.status_code == 400
        assert "the prompt has 0 places for pictures" in response.json()["error"]["message"]


def test_a_model_of_text_alone() -> None:
    with serving(told({"hi": "there"})) as running:
        response = ask(running, {"type": "text", "text": "hi"}, image(data_uri(png())))
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["message"], error["code"]) == ("messages.0.content.1: this model takes text only", "text_only")
        body = json.dumps({"messages": [{"role": "user", "content": "<|image_pad|>"}]})
        assert running.http.post(CHAT, content=body, headers={"Content-Type": "application/json"}).status_code == 200
        large = {"messages": [{"role": "user", "content": [image("x" * (5 << 20))]}]}
        assert running.http.post(CHAT, json=large).status_code == 413, "nobody sends it pictures"


def test_bodies_are_larger_where_pictures_come(served: Served) -> None:
    """The server's limit is 20,000 bytes."""
    uri = data_uri(encoded(drawn(100, 100)))
    assert len(uri) > 30_000
    assert ask(served, image(uri), TEXT).status_code == 200
    for path in ("/v1/completions", "/detokenize"):
        assert served.http.post(path, json={"prompt": uri}).status_code == 413
    with seeing(max_body=20_000, max_media_body=25_000) as running:
        assert ask(running, image(uri), TEXT).status_code == 413


def test_many_at_once(served: Served) -> None:
    """Requests with pictures and without, on several threads, each with its own."""
    uris = {seed: data_uri(png(64 + 32 * (seed % 3), 64, seed)) for seed in range(8)}
    responses: dict[int, Any] = {}

    def one(seed: int) -> None:
        messages = [{"role": "user", "content": [image(uris[seed]), TEXT]}]
        body = {"messages": messages, "temperature": 0}
        responses[seed] = httpx.post(f"{served.url}{CHAT}", json=body, timeout=60).json()

    threads = [threading.Thread(target=one, args=(seed,)) for seed in uris]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {body["choices"][0]["message"]["content"] for body in responses.values()} == {"a cat"}
    assert isinstance(served.llm, Looking)
    names = {items[0].digest for _, items in served.llm.seen[-8:]}
    assert len(names) == 8
    assert all(ids.count(IMAGE_PAD) == len(items[0].patches) // 4 for ids, items in served.llm.seen[-8:])


def test_settings() -> None:
    with pytest.raises(ValueError, match="max_media_body is 0"):
        ServerSettings(max_media_body=0)
    processor = Processor(OPTIONS, num_processes=1)
    with (
        pytest.raises(ValueError, match="is not HOST or HOST:PORT"),
        serving(told(), processor=processor, media_hosts=("http://a",)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="is not a folder"),
        serving(told(), processor=processor, media_folder=str(Path(__file__))),
    ):
        pass


def test_openais_client(served: Served) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    content: Any = [image(data_uri(png())), TEXT]
    answer = client.chat.completions.create(
        model="told", temperature=0, messages=[{"role": "user", "content": content}]
    )
    assert answer.choices[0].message.content == "a cat"
    content = [image(data_uri(b"no")), TEXT]
    with pytest.raises(openai.BadRequestError, match="not a PNG"):
        client.chat.completions.create(model="told", messages=[{"role": "user", "content": content}])


def test_kinds_are_limited() -> None:
    with seeing(limits=Limits(max_of_kind={"image": 1, "video": 0})) as running:
        assert ask(running, image(data_uri(png())), TEXT).status_code == 200
        response = ask(running, *[image(data_uri(png()))] * 2, TEXT)
        assert response.status_code == 400
        assert "2 parts of kind image; up to 1" in response.json()["error"]["message"]
        assert running.is_idle()


def test_a_gif_is_its_first_picture(served: Served) -> None:
    """Once a server refused what its page offers, and the conversation was stuck."""
    first, second = drawn(32, 32, "RGB", seed=1), drawn(32, 32, "RGB", seed=2)
    assert ask(served, image(data_uri(encoded(first, "GIF"), "image/gif")), TEXT).status_code == 200
    assert ask(served, image(data_uri(encoded(first, "GIF", save_all=True, append_images=[second]))), TEXT).is_success
