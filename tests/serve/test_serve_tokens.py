"""Token ids in, token ids out, with the log-probabilities of both."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, serving, told

GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told()) as running:
        yield running


def ids(served: Served, text: str) -> list[int]:
    return served.post("/tokenize", prompt=text)["tokens"]


def ask(served: Served, text: str, **params: Any) -> Any:
    return served.post(GENERATE, token_ids=ids(served, text), sampling_params={"temperature": 0} | params)


def test_tokens_and_log_probabilities_are_the_completions(served: Served) -> None:
    answer = ask(served, "abc", max_tokens=3, logprobs=2, prompt_logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids(served, "def"), "length")
    theirs = served.complete("abc", max_tokens=3, logprobs=2, echo=True)["choices"][0]["logprobs"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert [entry["logprob"] for entry in entries] == theirs["token_logprobs"][3:]
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}
    first, *scored = answer["prompt_logprobs"]
    assert first is None
    own = [scores[str(i)]["logprob"] for scores, i in zip(scored, ids(served, "bc"), strict=True)]
    assert own == theirs["token_logprobs"][1:3]
    assert answer["usage"]["completion_tokens"] == 3


def test_a_stream_adds_up(served: Served) -> None:
    options = {"max_tokens": 4, "temperature": 0, "logprobs": 0, "n": 2}
    *chunks, done = served.events(GENERATE, token_ids=ids(served, "abc"), sampling_params=options)
    assert done == "[DONE]"
    for index in range(2):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [i for choice in own for i in choice["token_ids"]] == ids(served, "defg")
        assert sum(len(choice["logprobs"]["content"]) for choice in own) == 4
        assert [choice["finish_reason"] for choice in own][-1] == "length"


def test_no_text_is_needed_and_stop_tokens_stop(served: Served) -> None:
    (stop,) = ids(served, "e")
    choice = ask(served, "abc", max_tokens=None, stop_token_ids=[stop])["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (ids(served, "de"), "stop")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"token_ids": []}, "token_ids: Value should have at least 1 item"),
        ({"token_ids": [100000]}, "are outside the vocabulary"),
        ({"token_ids": ["a"]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": [5], "sampling_params": {"stop": ["a"]}}, "sampling_params.stop: is not a parameter"),
        ({"token_ids": [5], "sampling_params": {"top_p": 3}}, "top_p: Input should be less than or equal to 1"),
        ({"token_ids": [5], "sampling_params": {"n": 2, "prompt_logprobs": 1}}, "n is 2, expected 1"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: Any, says: str) -> None:
    response = served.http.post(GENERATE, json=body)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]
