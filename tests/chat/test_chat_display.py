"""What a terminal shows of an answer, on a small terminal of its own; what Tab offers; pictures; commands on models."""

import base64
import io
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from default_model import Scripted
from media_files import png
from scripted_chat import Terminal, talk
from serving import byte_tokenizer
from typer.testing import CliRunner

from whorl.chat.blocks import BlockWriter, drawn, first_block
from whorl.chat.completion import FILES, Completion
from whorl.chat.preview import picture
from whorl.chat.terminal import Screen
from whorl.cli import app
from whorl.engine.weights import hub

MARKDOWN = """# Title

Some **bold** text that is long enough to be broken, between words and never inside one of them.

1. one
   - nested

2. two

| a | b |
|---|--:|
| left | 12 |

```python
def f():

    return 1
```
after `code` and \u6f22\u5b57
"""


def shown(output: str, columns: int) -> list[str]:
    """The rows of a terminal after this output: text, line feeds, carriage returns, and what `BlockWriter` writes."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\x1b\][^\a]*\a|.|\n", output, re.DOTALL):
        if part == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif part == "\r":
            column = 0
        elif match := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(match[1])
        elif part == "\x1b[J":
            rows[row:] = [rows[row][:column]]
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif not part.startswith("\x1b"):
            wide = 2 if part > "\u2fff" else 1
            if column + wide > columns:
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            rows[row] = (
                rows[row][:column].ljust(column) + part + ("\0" if wide == 2 else "") + rows[row][column + wide :]
            )
            column += wide
    return [line.replace("\0", "").rstrip() for line in rows]


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).split("\n")]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("columns", [30, 80])
def test_blocks_are_drawn_however_they_come(step: int, columns: int) -> None:
    out = Terminal()
    writer = BlockWriter(Screen(out), (columns, 50))
    for at in range(0, len(MARKDOWN), step):
        writer.add(MARKDOWN[at : at + step])
    writer.finish()
    rows = shown(out.getvalue(), columns)
    blocks = MARKDOWN.split("\n\n")
    expected = plain("".join(drawn(block, columns) for block in _blocks(MARKDOWN)))
    assert rows == expected
    assert len(blocks) > 5
    assert not any("**" in line or "```" in line for line in rows)
    assert "def f():" in "\n".join(rows)
    assert all(len(line) <= columns for line in rows)


def _blocks(text: str) -> list[str]:
    blocks = []
    while (end := first_block(text)) is not None:
        blocks.append(text[:end])
        text = text[end:]
    return [*blocks, text]


@pytest.mark.parametrize("columns", [31, 80])
def test_wide_characters_leave_no_row_behind(columns: int) -> None:
    """Where a row has an odd number of columns, its last one stays empty."""
    out = Terminal()
    writer = BlockWriter(Screen(out), (columns, 500))
    writer.add(text := "\u6f22" * 700 + "\n")
    writer.finish()
    assert shown(out.getvalue(), columns) == plain(drawn(text, columns))


def test_a_block_ends_where_nothing_can_continue_it() -> None:
    assert first_block("a\n") is None
    assert first_block("a\n\n") is None  # what comes next decides
    assert first_block("a\n\nb\n") == 3
    assert first_block("- a\n\n- b\n") is None
    assert first_block("- a\n\n  b\nc\n") is None
    assert first_block("- a\n\nb\n") == 5
    assert first_block("```\na\n\nb\n") is None
    assert first_block("```\na\n\nb\n```\n") == len("```\na\n\nb\n```\n")


def test_a_block_that_is_higher_than_the_terminal_stays() -> None:
    out = Terminal()
    writer = BlockWriter(Screen(out), (20, 4))
    for line in ("```", *"abcdefgh", "```"):
        writer.add(f"{line}\n")
    writer.finish()
    assert "\x1b[" not in out.getvalue()
    assert shown(out.getvalue(), 20)[:3] == ["```", "a", "b"]


def test_control_characters_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = talk(Scripted("a **b** \x1b]0;owned\x07 c"), "hi", out=Terminal())
    assert "]0;owned" in text
    assert "\x1b]" not in text
    assert "\x07" not in text


def test_what_tab_offers(tmp_path: Path) -> None:
    for name in ("a file.png", "another.png"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder").mkdir()
    completion = Completion({"/set": ("temperature", "top_k"), "/save": FILES, "/stats": (), "/system": ()})
    assert completion.options("/s") == ["/set ", "/save ", "/stats ", "/system "]
    assert completion.options("hello /s") == []
    assert completion.options("/set t") == ["temperature ", "top_k "]
    assert completion.options("/set temperature 0") == []
    assert completion.options(f"/save {tmp_path}/f") == [f"{tmp_path}/folder/"]
    assert completion.options(f"/save {tmp_path}/an") == [f"{tmp_path}/another.png"]
    assert completion.options(f"/save {tmp_path}/a f") == ["file.png"]  # readline replaces the last word


def test_show_and_compare() -> None:
    llm = Scripted("Paris is it.", "Paris was it.")
    text = talk(
        llm,
        "Where?",
        "/compare temperature 0.5",
        "/show messages",
        "/show system",
        "/show x",
        "/compare",
        out=Terminal(),
    )
    assert "they part at token" in text
    assert "user: Where?\nassistant: Paris is it.\n" in text.replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert "no system message" in text
    assert "/show x: expected settings, system, template, messages, thoughts" in text
    assert "/compare: expected NAME VALUE" in text


def test_compare_with_an_answer_of_this_conversation_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    told = ("Where?", f"/save {file}", "/reset", "/stats", "Why?", f"/load {file}", "/compare temperature 0.5")
    text = talk(Scripted("Paris is it.", "Rome is it.", "Paris was it."), *told, "/compare format off")
    assert "no answer yet" in text
    assert "they part" not in text
    assert "/compare: there is no answer yet" in text
    assert "whorl: /compare format: is not known. Has: max_tokens" in text
    assert "format off" not in text
    assert "when_full" not in text


def test_the_speed_is_told_at_the_end() -> None:
    assert "tokens at" in talk(Scripted("Paris is it, I think."), "Where?", out=Terminal())
    assert "tokens at" not in talk(Scripted("Paris is it, I think."), "Where?", out=io.StringIO())


def test_pictures_where_the_terminal_can(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(90, 90, seed=1))
    assert picture(file, {}) is None
    shown_there = picture(file, {"TERM_PROGRAM": "iTerm.app"})
    assert shown_there is not None
    assert base64.b64decode(shown_there.split(":")[1].rstrip("\a\n")) == file.read_bytes()
    kitty = picture(file, {"KITTY_WINDOW_ID": "1"})
    assert kitty is not None
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", kitty)
    assert base64.b64decode("".join(data for _, data in parts)) == file.read_bytes()
    assert [head[-1] for head, _ in parts] == ["1"] * (len(parts) - 1) + ["0"]


# ---- models of this machine


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with one model, as its library lays it out."""
    import huggingface_hub.constants
    import huggingface_hub.utils._cache_manager as manager

    folder = tmp_path / "hub"
    repo = folder / "models--org--tiny"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    (repo / "blobs" / "b1").write_text("x" * 2000)
    (repo / "snapshots" / "abc" / "config.json").symlink_to("../../blobs/b1")
    for module in (huggingface_hub.constants, manager):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(folder), raising=False)
    return repo


def test_list_and_rm(cache: Path) -> None:
    listed = run("list")
    assert (listed.exit_code, "org/tiny" in listed.stdout) == (0, True), listed.output
    assert "2 kB" in listed.stdout
    assert str(cache) in listed.stdout
    assert "SmolLM2-135M-Instruct (the default)" in listed.stdout
    refused = {"org/other": "is not in the Hugging Face cache", str(cache.parent): "expected config.json"}
    refused["org/tiny:Q4_K_M"] = "deletes all files of a model: expected org/tiny"
    for name, why in refused.items():
        gone = run("rm", name)
        assert (gone.exit_code, why in gone.output) == (2, True), gone.output
    assert "org/tiny: deleted, 2 kB freed" in run("rm", "org/tiny").stdout
    assert not cache.exists()


def test_show_reads_the_files() -> None:
    about = json.loads(run("show", "--json").stdout)
    assert (about["architecture"], about["layers"], about["context"]) == ("llama", 30, 8192)
    assert about["parameters"] == "134.5 million"
    assert about["quantization"].startswith("Q4")
    assert "llama" in run("show").stdout


def test_show_of_a_file_that_somebody_else_wrote(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_json())
    config: Any = {"architectures": ["Llama\x1b]0;owned\x07"], "quantization_config": None, "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("show", str(tmp_path))
    assert (done.exit_code, "Llama]0;owned\n" in done.stdout, "\x1b" in done.stdout) == (0, True, False), done.output
    (tmp_path / "config.json").write_text("[1]")
    done = run("show", str(tmp_path))
    assert (done.exit_code, "is a list, expected an object" in done.output) == (2, True), done.output


@pytest.mark.parametrize("reply", [None, b"SSH-2.0-x\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n[]"])
def test_ps_without_a_server(reply: bytes | None) -> None:
    """Nothing listens there, or something else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(reply or b"")

        if reply is None:
            listener.close()
        else:
            threading.Thread(target=answer, daemon=True).start()
        done = run("ps", "--url", url)
    assert (done.exit_code, f"no server of whorl at {url}" in done.output) == (2, True), done.output


def test_pull_says_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(2998))
    monkeypatch.setattr("whorl.engine.weights.resolve", lambda name: tmp_path)
    assert run("pull", "org/tiny").stdout == f"org/tiny: 3 kB in {tmp_path}\n"
    done = run("pull", str(tmp_path))
    assert (done.exit_code, "is on this machine already" in done.output) == (2, True), done.output


def test_the_first_time_it_says_what_is_downloaded_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_fetched", lambda name, revision, file: tmp_path / "there")
    assert hub.resolve("org/tiny") == tmp_path / "there"
    assert capsys.readouterr().err == (
        "whorl: downloading org/tiny from huggingface.co, once\n"
        f"whorl: org/tiny lies in {tmp_path}/there; whorl rm org/tiny deletes it\n"
    )
    (tmp_path / "models--org--tiny").mkdir()
    hub.resolve("org/tiny")
    assert capsys.readouterr().err == ""


def test_run_is_chat_as_people_write_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_text("")
    sessions: list[Any] = []
    monkeypatch.setattr("whorl.chat.command.build_session", lambda options: sessions.append(options) or (lambda: 0))
    assert run("run", str(file), "a prompt").exit_code == 0
    assert (sessions[0].model, sessions[0].prompt, sessions[0].chat.interactive) == (str(file), "a prompt", False)
    assert run("run", str(file)).exit_code == 0
    assert sessions[1].chat.interactive
