"""Adapters over HTTP: models of their own names, loaded and unloaded while requests run, and faults."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_files import write_adapter
from schedules import tiny
from serving import Served, byte_tokenizer, serving

from whorl.engine.llm import LLM
from whorl.models.qwen3 import Qwen3

PROMPT = "The capital of France is"
LINEAR = ("q_proj", "v_proj", "down_proj")


def tiny_llm(**options: Any) -> LLM:
    tokenizer = byte_tokenizer()
    model = tiny(Qwen3, vocab_size=len(tokenizer))
    sizes = {"max_num_seqs": 8, "block_size": 8, "num_blocks": 128}
    return LLM(model=model, tokenizer=tokenizer, device="cpu", **(sizes | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = tiny_llm().model
    place = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(place / name, model, LINEAR, seed=i) for i, name in enumerate(("a", "b", "c"))}


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[Served]:
    llm = tiny_llm(lora={"a": str(folders["a"])}, max_loras=3)
    with serving(llm, runtime_lora=True, strict_model_name=True) as server:
        yield server


def text(served: Served, **options: Any) -> str:
    return str(served.complete(PROMPT, max_tokens=6, ignore_eos=True, **options)["choices"][0]["text"])


def test_an_adapter_is_a_model(served: Served) -> None:
    cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
    base = next(iter(cards))
    assert cards["a"]["parent"] == base
    assert "parent" not in cards[base] or cards[base]["parent"] is None
    assert served.http.get("/v1/models/a").json()["id"] == "a"
    assert text(served, model="a") != text(served)
    assert served.complete(PROMPT, model="a", max_tokens=1)["model"] == "a"
    chats = [
        served.chat("Hello", max_tokens=4, ignore_eos=True, **more)["choices"][0]["message"]
        for more in ({}, {"model": "a"})
    ]
    assert chats[0] != chats[1]
    assert served.http.get("/page/about").json()["adapters"] == ["a"]


def test_adapters_come_and_go(served: Served, folders: dict[str, Path]) -> None:
    before = text(served, model="a")
    reply = served.http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(folders["b"])})
    assert reply.status_code == 200, reply.text
    other = text(served, model="b")
    assert other not in (before, text(served))
    again = served.http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(folders["a"])})
    assert again.status_code == 400
    assert "'b' is loaded; unload it first, or set load_inplace" in again.text
    change = {"lora_name": "b", "lora_path": str(folders["a"]), "load_inplace": True}
    assert served.http.post("/v1/load_lora_adapter", json=change).status_code == 200
    assert text(served, model="b") == before, "a cached block of the old version was used"
    assert served.http.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200
    for reply in (
        served.http.post("/v1/completions", json={"prompt": PROMPT, "model": "b"}),
        served.http.post("/v1/unload_lora_adapter", json={"lora_name": "b"}),
    ):
        assert reply.status_code == 404, reply.text
    assert text(served, model="a") == before


def test_unloaded_under_load(served: Served, folders: dict[str, Path]) -> None:
    """Requests that run keep their adapter, whatever takes its name meanwhile."""
    expected = served.complete(PROMPT, model="a", max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    load = {"lora_name": "d", "lora_path": str(folders["a"])}
    assert served.http.post("/v1/load_lora_adapter", json=load).status_code == 200
    texts: list[str] = []
    began = threading.Event()

    def read() -> None:
        body = {"prompt": PROMPT, "model": "d", "max_tokens": 24, "ignore_eos": True, "temperature": 0, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                began.set()
                texts.append(line)

    thread = threading.Thread(target=read)
    thread.start()
    assert began.wait(30)
    change = {"lora_name": "d", "lora_path": str(folders["b"]), "load_inplace": True}
    assert served.http.post("/v1/load_lora_adapter", json=change).status_code == 200
    assert served.http.post("/v1/unload_lora_adapter", json={"lora_name": "d"}).status_code == 200
    thread.join(60)
    said = "".join(_delta(line) for line in texts)
    assert said == expected


def _delta(line: str) -> str:
    data = line.removeprefix("data: ")
    if not line.startswith("data: ") or data == "[DONE]":
        return ""
    return "".join(choice["text"] for choice in json.loads(data)["choices"])


def test_faults_change_nothing(served: Served, folders: dict[str, Path], tmp_path: Path) -> None:
    before = text(served, model="a")
    cut = write_adapter(tmp_path / "cut", served.llm.model, LINEAR)
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    for path, message in (
        (tmp_path / "none", "no such file or folder, and not a Hugging Face id"),
        (cut, "truncated, which cuts"),
        (tmp_path, "no adapter_config.json"),
    ):
        change = {"lora_name": "a", "lora_path": str(path), "load_inplace": True}
        reply = served.http.post("/v1/load_lora_adapter", json=change)
        assert (reply.status_code, message in reply.text) == (400, True), reply.text
        assert text(served, model="a") == before
    names = [f"more{i}" for i in range(3)]
    replies = [
        served.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folders["c"])})
        for name in names
    ]
    assert [reply.status_code for reply in replies] == [200, 200, 400]
    assert "all 3 slots are taken" in replies[-1].text
    assert all(served.http.post("/v1/unload_lora_adapter", json={"lora_name": n}).status_code == 200 for n in names[:2])


def test_routes_are_off_by_default(folders: dict[str, Path]) -> None:
    with serving(tiny_llm()) as server:
        for route in ("load", "unload"):
            body = {"lora_name": "a"} | ({"lora_path": str(folders["a"])} if route == "load" else {})
            reply = server.http.post(f"/v1/{route}_lora_adapter", json=body)
            assert reply.status_code == 403
            assert "--runtime-lora" in reply.text
