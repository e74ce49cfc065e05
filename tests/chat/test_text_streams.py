"""Bytes that are not UTF-8, wherever the command line takes text: one line says so, and a chat goes on."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from default_model import Scripted
from refusals import check_refused
from typer.testing import CliRunner

from whorl.chat import command
from whorl.chat.text_streams import as_argument, as_text
from whorl.cli import app

LATIN = "caf\u00e9".encode("latin-1")
ESCAPED = LATIN.decode("utf-8", "surrogateescape")  # as Python hands on an argument


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted("one", "two", "three")
    monkeypatch.setattr(command, "load", lambda options: scripted)
    return scripted


def invoke(*arguments: str, text: bytes | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=text)


@pytest.mark.parametrize(
    ("arguments", "text", "what"),
    [
        (["generate"], LATIN, "standard input is not UTF-8 text: byte 0xe9 after 3 characters"),
        (["generate", "-f", "-"], LATIN, "standard input is not UTF-8 text: byte 0xe9"),
        (["generate", "-f", "FILE"], None, "FILE: is not UTF-8 text"),
        (["generate", "-p", ESCAPED], None, "--prompt is not UTF-8 text: byte 0xe9 after 3 characters"),
        (["generate", "-p", "x", "--chat", "--system", ESCAPED], None, "--system is not UTF-8 text: byte 0xe9"),
        (["chat", "--system", ESCAPED], b"hi\n", "--system is not UTF-8 text: byte 0xe9"),
    ],
)
def test_refused_with_a_line(llm: Scripted, tmp_path: Path, arguments: Any, text: Any, what: str) -> None:
    (tmp_path / "FILE").write_bytes(LATIN)
    done = invoke(*(str(tmp_path / "FILE") if part == "FILE" else part for part in arguments), text=text)
    check_refused(done, what)
    assert not llm.added


def test_a_chat_goes_on_and_remembers(llm: Scripted) -> None:
    block = b'"""\n' + LATIN + b'\nplain\n"""\n'
    done = invoke("chat", text=b"I am Bob.\n" + LATIN + b"\n/system " + LATIN + b"\n" + block + b"Who am I?\n")
    refusal = "whorl: not sent: it is not UTF-8 text: byte 0xe9 after {} characters\n"
    assert done.exit_code == 0
    assert done.stdout == "one\n" + refusal.format(3) + refusal.format(11) + refusal.format(3) + "two\n"
    (_, second) = (llm.tokenizer.decode(s.token_ids[: s.prompt_len], skip_special=False) for s in llm.added)
    assert "I am Bob." in second
    assert "Who am I?" in second


def test_what_the_output_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
sys.path.insert(0, "tests/helpers")
from default_model import Scripted
from whorl.cli import app
from whorl.chat import command
llm = Scripted("caf\\u00e9 \\u2603", "two")
command.load = lambda options: llm
app()
"""
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    arguments = [sys.executable, "-c", code, "chat", "--system", "caf\u00e9".encode()]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        arguments, input="gr\u00fcn\nx\n".encode(), capture_output=True, env=environment, cwd=root, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"caf? ?\ntwo\n"), done.stderr.decode()


def test_as_text() -> None:
    assert as_text("caf\u00e9 \U0001f600", "it") == "caf\u00e9 \U0001f600"
    with pytest.raises(ValueError, match=r"it is not UTF-8 text: half a surrogate pair \(U\+D800\) after 1 characters"):
        as_text("a\ud800", "it")
    assert as_argument(None, "it") is None
    assert as_argument("caf\u00e9", "it") == "caf\u00e9"
