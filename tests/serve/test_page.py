"""The page without a browser: the file that is served, its policy, and the numbers that it draws."""

import base64
import hashlib
import itertools
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from mock_model import MockModel
from seeing import seeing
from serving import ALPHABET, Served, byte_tokenizer, serving, told, wait_until

from whorl.engine import roofline
from whorl.engine.blocks import BlockPool
from whorl.engine.drafting import DraftOptions
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence import Sequence as Seq
from whorl.engine.speculate import Draft, Proposer, num_agreed
from whorl.engine.weights import random_model
from whorl.models.llama import Llama
from whorl.serve import page as page_module

KEY = "sk-page"
ANSWERS = {
    "again": "to be or not to be or not to be or not to be or not to be",
    "letters": "gr\u00fc\u00dfe \U0001f642 end",
    "open why": "because</think>so",
}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    llm = told(ANSWERS, speculate=DraftOptions(pld=True).lookup(), draft_length="fixed")
    with serving(llm, api_key=KEY) as running:
        yield running


def body(question: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, **options}


def details(served: Served, question: str, **asked_for: Any) -> tuple[str, dict[str, Any]]:
    (choice,) = served.post(CHAT, **body(question, token_details=asked_for))["choices"]
    return choice["message"]["content"], choice["token_details"]


# ---- the file


class _Elements(HTMLParser):
    """Every element with its attributes, and what is inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._in: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.inside:
            self._in = tag
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in is not None:
            self.inside[self._in][-1] += data


@pytest.fixture(scope="module")
def got(served: Served) -> httpx.Response:
    return httpx.get(f"{served.url}/")  # without the key: it is entered there


def test_the_page_is_served_to_anybody_and_its_numbers_are_not(served: Served, got: httpx.Response) -> None:
    assert got.status_code == 200
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert httpx.head(f"{served.url}/").status_code == 200
    assert httpx.post(f"{served.url}/", json={}).status_code == 405
    for address in ("/page/about", "/page/stats"):
        assert httpx.get(f"{served.url}{address}").json()["error"]["code"] == "invalid_api_key"
        assert served.http.get(address).status_code == 200


def test_the_policy_lets_this_script_and_this_style_run_and_nothing_else(got: httpx.Response) -> None:
    policy = dict(part.split(" ", 1) for part in got.headers["content-security-policy"].split("; "))
    inside = _Elements(got.text).inside
    assert [len(texts) for texts in inside.values()] == [4, 1]
    for kind, texts in inside.items():
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data: blob:"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "'none'"
    assert "unsafe" not in got.headers["content-security-policy"]
    assert got.headers["x-content-type-options"] == "nosniff"


# What makes markup or code of text.
SINKS = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "createContextualFragment"),
    *("eval(", "Function(", "setHTML", "srcdoc", "javascript:", "import("),
)


def test_no_text_becomes_markup_and_nothing_comes_from_elsewhere(got: httpx.Response) -> None:
    """In what is written here. The libraries have such code, which nothing calls, and which the policy refuses."""
    page = _Elements(got.text)
    *libraries, script = page.inside["script"]
    ours = got.text
    for library in libraries:
        ours = ours.replace(library, "")
    assert script in ours
    assert not [sink for sink in SINKS if sink in ours]
    assert not re.findall(r"\b(?:https?|wss?|ftp):|[\"'(]//", ours)
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    # Timers and listeners take functions, not text that would be compiled.
    assert not re.findall(r"set(?:Timeout|Interval)\(\s*[\"'`]", ours)
    assert not re.findall(r"setAttribute\(\s*[\"'`]on", ours)


# The libraries as npm has them, but for the last line of the first, which names a file that is not here.
VENDORED = {
    "markdown-it": "b06c85174d2b1bb6339dfa1f0bc938cea57f62663f132a77abbf651562542443",
    "highlight": "8ab71eb09c51f501e5e25157d9cff100e46cc29bcbfc744d0b746d451fca7f53",
    "temml": "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95",
}


def test_libraries_are_pinned_and_licensed() -> None:
    folder = Path(page_module.__file__).with_name("vendor")
    scripts = {
        path.name.partition(".")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.js")
    }
    assert scripts == VENDORED
    licenses = (folder / "LICENSES.txt").read_text(encoding="utf-8")
    assert re.findall(r"^(\S+) ([\d.]+), (\S+), from npm's package \1$", licenses, re.MULTILINE) == [
        ("markdown-it", "15.0.3", "MIT"),
        ("highlight.js", "11.12.0", "BSD-3-Clause"),
        ("temml", "0.13.5", "MIT"),
    ]


def test_the_page_is_sent_once(served: Served, got: httpx.Response) -> None:
    """Compressed, and not again while it is the same."""
    assert got.headers["content-encoding"] == "gzip"
    assert int(got.headers["content-length"]) < 200_000
    plain = httpx.get(f"{served.url}/", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == got.text
    again = httpx.get(f"{served.url}/", headers={"If-None-Match": got.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_fields_and_buttons_of_the_file_have_names(got: httpx.Response) -> None:
    """Those that the script makes are looked at in a browser."""
    labelled = set(re.findall(r'<label for="([^"]+)"', got.text))
    inside_labels = "".join(re.findall(r"<label\b[^>]*>.*?</label>", got.text, re.DOTALL))
    for tag, attributes in _Elements(got.text).elements:
        if tag in ("input", "textarea", "select") and "hidden" not in attributes:
            name = attributes.get("id") or attributes["data-setting"]
            assert attributes.get("id") in labelled or f'"{name}"' in inside_labels, attributes
    assert got.text.startswith('<!doctype html>\n<html lang="en">')


def test_an_installed_package_has_the_file() -> None:
    root = Path(page_module.__file__).parents[3]
    globs = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    folder = Path(page_module.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(files) > 15
    assert [path for path in files if not any(fnmatch(path.name, each) for each in globs)] == []


# ---- where tokens come from


def test_tokens_say_where_they_came_from(served: Served) -> None:
    """The text is what it is without drafts; drafted tokens are as many as the usage counts."""
    with serving(told(ANSWERS)) as plain:
        said, alone = details(plain, "again")
    whole = served.post(CHAT, **body("again", token_details={}))
    tokens = whole["choices"][0]["token_details"]["tokens"]
    assert whole["choices"][0]["message"]["content"] == said == ANSWERS["again"]
    assert [one["id"] for one in tokens] == [one["id"] for one in alone["tokens"]]
    assert {one["source"] for one in alone["tokens"]} == {"model"}
    accepted = whole["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted > 10
    assert [one["source"] for one in tokens].count("lookup") == accepted
    assert not any("logprob" in one for one in tokens)


def test_a_stream_carries_the_details_of_the_whole(served: Served) -> None:
    _, whole = details(served, "again", top=2)
    *events, done = served.events(CHAT, **body("again", token_details={"top": 2}))
    assert done == "[DONE]"
    streamed = [one for event in events for one in event["choices"][0].get("token_details", {"tokens": []})["tokens"]]
    assert streamed == whole["tokens"]


def test_the_texts_of_tokens_add_up(served: Served) -> None:
    """Of characters in several tokens the last one has the text; marks are told apart."""
    said, detail = details(served, "letters")
    marks = [one["text"] for one in detail["tokens"] if one.get("special")]
    assert "".join(one["text"] for one in detail["tokens"] if not one.get("special")) == said == ANSWERS["letters"]
    assert marks == ["<|im_end|>"]
    assert [one["text"] for one in detail["tokens"]].count("") == 1 + 1 + 3


def test_probabilities_are_those_of_logprobs(served: Served) -> None:
    _, detail = details(served, "again", top=3)
    choice = served.post(CHAT, **body("again", logprobs=True, top_logprobs=3))["choices"][0]
    known = choice["logprobs"]["content"]
    assert [one["logprob"] for one in detail["tokens"]] == [one["logprob"] for one in known]
    tops = [[(top["text"], top["logprob"]) for top in one["top"]] for one in detail["tokens"]]
    assert tops == [[(top["token"], top["logprob"]) for top in one["top_logprobs"]] for one in known]
    assert {len(each) for each in tops} == {3}


def test_the_prompt_says_what_the_cache_held(served: Served) -> None:
    question = "of whom " * 4
    _, first = details(served, question, prompt=True)
    reply = served.post(CHAT, **body(question, token_details={"prompt": True}))
    prompt = reply["choices"][0]["token_details"]["prompt"]
    assert first["prompt"]["num_cached"] < prompt["num_cached"] < prompt["num_tokens"] == len(prompt["texts"])
    assert prompt["num_cached"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert question in "".join(prompt["texts"])
    assert "prompt" not in details(served, question)[1]


def test_of_a_long_prompt_the_end_is_told(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr("whorl.serve.logprobs._MOST_PROMPT", 8)
    _, detail = details(served, "a question", prompt=True)
    prompt = detail["prompt"]
    assert prompt["first"] == prompt["num_tokens"] - 8
    assert "".join(prompt["texts"]) == "sistant\n"


def test_each_choice_has_its_own_details(served: Served) -> None:
    reply = served.post(CHAT, **body("letters", n=2, token_details={"top": 0}))
    first, second = (choice["token_details"]["tokens"] for choice in reply["choices"])
    assert first == second
    assert len(first) == len(byte_tokenizer().encode(ANSWERS["letters"])) + 1


def test_details_and_logprobs_exclude_each_other(served: Served) -> None:
    for options, told_what in (
        ({"token_details": {}, "logprobs": True}, "exclude each other"),
        ({"token_details": {"top": 21}}, "less than or equal to 20"),
        ({"token_details": {"odds": 1}}, "is not a parameter that this server knows"),
    ):
        answer = served.http.post(CHAT, json=body("again", **options))
        assert answer.status_code == 400
        assert told_what in answer.json()["error"]["message"]


class Guess(Proposer):
    """Drafts what comes next in the alphabet, with a fault in every third draft."""

    k = 3

    def __init__(self) -> None:
        self._count = itertools.count()

    def propose(self, sequences: Sequence[Seq], k: int) -> list[Draft]:
        last = sequences[0].token_ids[-1]
        draft = [last + 1 + at for at in range(k)]
        if next(self._count) % 3 == 2:
            draft[1:] = [0] * (k - 1)
        return [Draft(draft)] * len(sequences)


def test_tokens_of_another_proposer_are_drafts() -> None:
    with serving(told(speculate=Guess(), draft_length="fixed")) as served:
        said, detail = details(served, "anything")
    sources = [one["source"] for one in detail["tokens"]]
    assert said == ALPHABET
    # One by the prompt; then by turns three drafted and one, twice, and one drafted of a draft with a fault behind it.
    turn = [*["draft"] * 3, "model"] * 2 + ["draft", "model"]
    assert sources[:21] == ["model", *turn, *turn]


def test_as_many_tokens_are_drafted_as_agree() -> None:
    assert num_agreed([1, 2, 3], [1, 2]) == 2
    assert num_agreed([1, 5], [1, 2, 3]) == 1
    assert num_agreed([4], [1, 2]) == num_agreed([4], []) == num_agreed([], [1]) == 0
    assert num_agreed([1, 2], [1, 2, 3]) == 2


# ---- numbers


def test_numbers_while_an_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_FRESH", 0.0)
    with serving(told({"long": "abcd " * 150}, delay=0.02)) as served:
        before = served.http.get("/page/stats").json()
        with served.http.stream("POST", CHAT, json=body("long", stream=True)) as response:
            lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
            next(line for line in lines if '"content":"b"' in line)
            during = served.http.get("/page/stats").json()
        wait_until(served.is_idle)
        wait_until(lambda: served.http.get("/page/stats").json()["running"] == [])
        after = served.http.get("/page/stats").json()
    (mine,) = during["running"]
    assert mine["outputs"] >= 2
    assert mine["computed"] >= mine["prompt"] > 20
    assert during["num_generated"] > before["num_generated"] == 0
    held, shared, kept = (sum(column) for column in zip(*during["blocks"]["held_shared_kept"], strict=True))
    assert held == during["engine"]["num_blocks_used"] > 0 == shared
    assert kept == 0
    held, shared, kept = (sum(column) for column in zip(*after["blocks"]["held_shared_kept"], strict=True))
    assert held == 0 < kept
    assert after["queue"] == {"num_waiting": 0, "most": 1024}


def test_about(served: Served) -> None:
    about = served.http.get("/page/about").json()
    assert (about["model"], about["max_model_len"], about["drafted_by"]) == ("told", 1024, "lookup")
    assert about["thinks"]
    assert not about["sees"]


def test_about_says_who_sees() -> None:
    with seeing() as served:
        about = served.http.get("/page/about").json()
    assert about["sees"]
    assert about["max_body"] == 64 << 20


def test_a_roofline_is_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []

    def decode_limit(model: Any, *, batch: int = 1, context: int = 0) -> float:
        limits.append((batch, context))
        return 100.0 * batch

    monkeypatch.setattr(page_module, "decode_limit", decode_limit)
    monkeypatch.setattr(page_module, "_FRESH", 0.0)
    with serving(told()) as served:
        wait_until(lambda: served.http.get("/page/stats").json()["roofline"] is not None)
        roofline = served.http.get("/page/stats").json()["roofline"]
    assert roofline == {"sequences": 1, "context": 0, "one": 100.0, "all": 100.0}
    assert limits[0] == (1, 0)


def test_no_roofline_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_FRESH", 0.0)
    with serving(told()) as served:
        wait_until(lambda: served.http.get("/page/stats").json()["roofline"] is not None)
        assert "does not say" in served.http.get("/page/stats").json()["roofline"]["problem"]

        def no_memory(model: Any, **options: Any) -> float:
            raise torch.OutOfMemoryError("out of memory\nat great length")

    monkeypatch.setattr(page_module, "decode_limit", no_memory)
    with serving(told()) as served:
        wait_until(lambda: served.http.get("/page/stats").json()["roofline"] is not None)
        problem = served.http.get("/page/stats").json()["roofline"]["problem"]
        assert problem == "the speed of memory could not be measured: out of memory"
        assert served.chat("letters")["choices"][0]["message"]["content"] == ALPHABET  # the engine goes on


def test_the_limit_is_the_speed_that_has_the_whole_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(Llama.tiny(), device="cpu", dtype=torch.float32)
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: 1e9)
    limit = roofline.decode_limit(model, context=7)
    assert limit is not None
    assert roofline.share(model, limit, context=7) == pytest.approx(1.0)
    together = roofline.decode_limit(model, batch=4, context=7)
    assert together is not None
    assert limit < together < 4 * limit  # weights are read once for all, keys for each
    assert roofline.decode_limit(MockModel()) is None


def test_the_census_counts_every_block_once() -> None:
    """Against a count by the sequences' own tables, through admissions and ends at random."""
    pool, rng, live = BlockPool(37, 4), random.Random(1), []
    for _ in range(200):
        if live and rng.random() < 0.45:
            pool.release(live.pop(rng.randrange(len(live))))
        else:
            seq = Seq([1] * rng.randrange(1, 20), SamplingParams(), max_len=64)
            if pool.admit(seq):
                seq.num_computed = len(seq.token_ids)
                pool.publish(seq)
                live.append(seq)
        tables = [block for seq in live for block in seq.block_table]
        runs = pool.census(10)
        assert len(runs) == 10  # of four blocks, the last of one
        for at, (held, shared, kept) in enumerate(runs):
            run = range(4 * at, min(4 * at + 4, 37))
            assert held == len(set(tables) & set(run))
            assert shared == sum(tables.count(block) > 1 for block in run)
            assert 0 <= kept <= len(run) - held
        assert sum(held for held, _, _ in runs) == pool.num_used
