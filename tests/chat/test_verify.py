"""`whorl verify`: answers of `whorl generate --json` and of a server are computed again, and differences are seen."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from whorl.cli import app

Result = Any


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """An answer of the default model."""
    done = CliRunner().invoke(app, ["generate", "-p", "Once upon a time", "-n", "12", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def run(tmp_path: Path, document: Any, *words: str) -> Result:
    path = tmp_path / "answer.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return CliRunner().invoke(app, ["verify", str(path), *words])


def as_completion(document: dict[str, Any]) -> dict[str, Any]:
    choice = {"token_ids": document["token_ids"], "logprobs": {"token_logprobs": document["logprobs"]}}
    return {"choices": [choice | {"prompt_token_ids": document["prompt_token_ids"]}]}


def as_chat(document: dict[str, Any]) -> dict[str, Any]:
    content = [{"token": "?", "logprob": value} for value in document["logprobs"]]
    choice = {"token_ids": document["token_ids"], "logprobs": {"content": content}}
    return {"prompt_token_ids": document["prompt_token_ids"], "choices": [choice]}


def test_an_answer_is_computed_again(document: dict[str, Any], tmp_path: Path) -> None:
    done = run(tmp_path, document)
    assert (done.exit_code, done.stdout) == (0, "equal: 12 log-probabilities, bit for bit\n"), done.output


@pytest.mark.parametrize("form", [as_completion, as_chat])
def test_answers_of_a_server(form: Any, document: dict[str, Any], tmp_path: Path) -> None:
    done = run(tmp_path, form(document), "--json")
    verdict = {"num_tokens": 12, "num_different": 0, "first": None}
    assert (done.exit_code, json.loads(done.stdout)) == (0, [verdict]), done.output


def test_the_last_bit_is_seen(document: dict[str, Any], tmp_path: Path) -> None:
    value = torch.tensor(document["logprobs"][7], dtype=torch.float32)
    next_one = float(torch.nextafter(value, torch.tensor(-math.inf)))
    logprobs = [*document["logprobs"][:7], next_one, *document["logprobs"][8:]]
    done = run(tmp_path, document | {"logprobs": logprobs})
    at = f"token 7 of the answer has {next_one!r} there and {float(value)!r} here"
    assert done.exit_code == 1
    assert done.stdout == f"not equal: 1 of 12 log-probabilities differ; {at}\n"


def test_another_token_is_seen(document: dict[str, Any], tmp_path: Path) -> None:
    done = run(tmp_path, document | {"token_ids": [*document["token_ids"][:3], 500, *document["token_ids"][4:]]})
    assert done.exit_code == 1
    assert "token 3 of the answer" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is a list, expected an object"),
        ('{"choices": []}', "has no choices"),
        ('{"token_ids": [1], "logprobs": [-1.0]}', "prompt_token_ids, token_ids or logprobs are missing"),
        ('{"prompt_token_ids": [1], "token_ids": [1, 2], "logprobs": [-1.0]}', "has 2 tokens, and not as many"),
        (
            '{"prompt_token_ids": [1], "token_ids": [1], "logprobs": {"content": [{}]}}',
            "not as many numbers in logprobs",
        ),
        ('{"prompt_token_ids": [1], "token_ids": [1], "logprobs": {"content": [1]}}', "logprobs are missing"),
        ('{"prompt_token_ids": ["a"], "token_ids": [1], "logprobs": [-1.0]}', "a token id is not an integer"),
    ],
)
def test_what_is_no_answer_is_refused(text: str, message: str, tmp_path: Path) -> None:
    done = run(tmp_path, text)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_token_outside_of_the_vocabulary_is_refused(document: dict[str, Any], tmp_path: Path) -> None:
    done = run(tmp_path, document | {"prompt_token_ids": [10**6]})
    assert done.exit_code == 2
    assert "outside the vocabulary" in done.stderr
