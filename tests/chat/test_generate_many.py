"""`whorl generate` with many answers: prompts of a file, several answers to each, stop texts, and JSON of a schema."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from default_model import Scripted, mock_llm
from serving import told
from typer.testing import CliRunner

import whorl.engine.llm
from whorl.chat import command
from whorl.chat.options import AT_ONCE
from whorl.cli import app
from whorl.engine.settings import EngineSettings

FRUIT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], **options)


def rows(done: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def with_llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an engine in the place of the one the command would load."""
    return lambda llm: monkeypatch.setattr(command, "load", lambda options: llm)


# ---- prompts of a file


def test_lines_of_a_file(with_llm: Any, tmp_path: Path) -> None:
    """Each is a prompt by itself, answers come in the order of the prompts, however they end."""
    with_llm(told({"hi": "Hello there!", "bye": "So soon?"}, max_num_seqs=4))
    (tmp_path / "prompts.txt").write_text("hi\n\n  \nbye\r\nhi", encoding="utf-8")
    done = run("--chat", "--prompts", str(tmp_path / "prompts.txt"))
    assert done.exit_code == 0, done.stderr
    answers = [(row["index"], row["prompt"], row["text"]) for row in rows(done)]
    assert answers == [(0, "hi", "Hello there!"), (1, "bye", "So soon?"), (2, "hi", "Hello there!")]
    assert {row["finish_reason"] for row in rows(done)} == {"stop"}
    assert rows(done)[0]["completion_tokens"] == 13


def test_json_lines_keep_what_they_say(with_llm: Any, tmp_path: Path) -> None:
    with_llm(told())
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": 7, "prompt": "a", "text": "old"}\n"x\\ny"\n')
    first, second = rows(run("--prompts", str(file), "-n", "3"))
    assert (first["id"], first["prompt"], first["text"], first["finish_reason"]) == (7, "a", "bcd", "length")
    assert (second["prompt"], second["text"]) == ("x\ny", "zab")


def test_prompts_from_a_pipe(with_llm: Any) -> None:
    with_llm(told())
    assert [row["text"] for row in rows(run("--prompts", "-", "-n", "1", input="a\nb\n"))] == ["b", "c"]


def test_a_prompt_that_is_refused_is_a_row(with_llm: Any, tmp_path: Path) -> None:
    with_llm(mock_llm(max_model_len=16))
    (tmp_path / "prompts").write_text("a\n" + "a b c " * 9 + "\nb\n")
    done = run("--prompts", str(tmp_path / "prompts"))
    assert done.exit_code == 1
    assert [("text" in row, "leave no room" in row.get("error", "")) for row in rows(done)] == [
        (True, False),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "{", "line 1: is not JSON"),
        ("a.jsonl", '"x"\n{"text": "y"}', "line 2: expected a JSON string, or an object with a string prompt"),
        ("a.jsonl", '"\\ud800"', "line 1 is not UTF-8 text"),
        ("a.txt", " \n", "has no prompts"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    done = run("--prompts", str(tmp_path / name))
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "x", "-p", "y"], "give only one of --prompt and --prompts"),
        (["--samples", "2", "--interactive"], "are not for --interactive"),
        (["--prompts", "x", "--chat", "--image", "y"], "go with one prompt"),
        (["--prompts", "none/such"], "none/such: cannot be read: No such file"),
        (["--schema", "none/such", "-p", "x"], "--schema none/such: cannot be read: No such file"),
        (["--schema", "{", "-p", "x"], "--schema: is not JSON"),
        (["--samples", "0", "-p", "x"], "--samples"),
    ],
)
def test_asking_wrongly(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_many_run_together_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[EngineSettings] = []

    def fake(path: str | None, settings: EngineSettings, **options: Any) -> Scripted:
        requested.append(settings)
        return Scripted("Yes.")

    monkeypatch.setattr(whorl.engine.llm, "LLM", fake)
    for arguments in (["--prompts", "-"], ["--prompts", "-", "--max-num-seqs", "1"], []):
        assert run(*arguments, input="x").exit_code == 0
    assert [settings.max_num_seqs for settings in requested] == [AT_ONCE, 1, 1]


def test_ctrl_c_keeps_what_is_finished(with_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = told({"hi": "Hello there!"}, max_num_seqs=1)
    step, before = llm.step, len("Hello there!") + 4

    def stopping() -> Any:
        if llm.num_steps == before:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm, "step", stopping)
    with_llm(llm)
    done = run("--chat", "--prompts", "-", input="hi\nhi\n")
    assert done.exit_code == 130
    assert [row["text"] for row in rows(done)] == ["Hello there!"]
    assert llm.pool.num_used == 0


# ---- several answers, stop texts, schemas


def test_samples(with_llm: Any) -> None:
    with_llm(mock_llm(max_num_seqs=4))
    answers = rows(run("-p", "Once", "--samples", "3", "--temperature", "5", "-n", "6", "-s", "3"))
    assert [row["sample"] for row in answers] == [0, 1, 2]
    assert len({row["text"] for row in answers}) == 3
    assert {(row["index"], row["prompt"]) for row in answers} == {(0, "Once")}


def test_stop(with_llm: Any) -> None:
    with_llm(told())
    assert run("-p", "a", "--stop", "hij", "--stop", "fg").stdout == "bcde\n"


@pytest.mark.parametrize("in_file", [True, False])
def test_schema(with_llm: Any, tmp_path: Path, in_file: bool) -> None:
    """The model would say the alphabet: only the grammar makes it JSON, and the told answer where it may be said."""
    pytest.importorskip("llguidance")
    with_llm(told({"fruit": '{"name": "fig", "count": 3}'}))
    (tmp_path / "fruit.json").write_text(json.dumps(FRUIT))
    schema = str(tmp_path / "fruit.json") if in_file else json.dumps(FRUIT)
    assert run("--chat", "-p", "fruit", "--schema", schema).stdout == '{"name": "fig", "count": 3}\n'
    short = json.dumps({"enum": ["b", "zz"]})
    assert run("-p", "x", "--schema", short).stdout in ('"b"\n', '"zz"\n')


def test_a_schema_that_cannot_be_followed(with_llm: Any) -> None:
    pytest.importorskip("llguidance")
    with_llm(told())
    done = run("-p", "x", "--schema", '{"type": "string", "minLength": 3, "maxLength": 1}')
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the JSON schema cannot be followed" in done.stderr
