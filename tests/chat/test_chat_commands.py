"""What a chat can be told: answering again, settings, files, what it does when its context is full; pastes, history."""

import io
import json
import stat
from pathlib import Path

import pytest
from chat_session import Session
from default_model import Scripted, mock_llm
from scripted_chat import GREEDY, Terminal, prompts, talk, turn

from whorl.chat import set_command
from whorl.chat.conversation import Conversation
from whorl.chat.keyboard import Keyboard, history_file
from whorl.chat.loop import Chat
from whorl.chat.terminal import Screen
from whorl.engine.sequence import SamplingParams

# ---- /regenerate


def test_regenerate_forgets_the_answer_and_asks_again() -> None:
    llm = Scripted("Hello.", "Bob.", "Hello Bob.", "Alice.")
    shown = talk(llm, "I am Bob.", "Who am I?", "/regenerate", "And I?")
    assert shown.startswith("Hello.\nBob.\n(temperature is 0, so the answer is the same: ")
    assert prompts(llm)[2] == prompts(llm)[1]
    assert "Hello Bob.<|im_end|>" in prompts(llm)[3]
    assert "\nBob.<|im_end|>" not in prompts(llm)[3], "the answer that was taken back is not remembered"


def test_regenerate_draws_another_answer_whatever_the_seed() -> None:
    def answers(seed: int | None) -> list[str]:
        params = SamplingParams(temperature=5, max_tokens=6, seed=seed, ignore_eos=True)
        return talk(mock_llm(), "Once", "/regenerate", "/regenerate", params=params).splitlines()

    lines = [line for line in answers(3) if not line.startswith("[cut off")]
    assert len(set(lines)) == len(lines) == 3
    assert answers(3) == answers(3), "and the same ones each time the same is done"


def test_nothing_to_regenerate() -> None:
    assert talk(Scripted(), "/regenerate") == "whorl: there is no message to answer again\n"


def test_a_refused_regenerate_changes_nothing() -> None:
    conversation = Conversation(Scripted("Hello."))  # type: ignore[arg-type]
    chat = Chat(conversation, GREEDY, screen=Screen(io.StringIO()), read=lambda prompt: "")
    chat.answer("I am Bob.")
    before = list(conversation.messages)
    conversation.llm.max_model_len = 3
    with pytest.raises(ValueError, match="leave no room"):
        chat._regenerate("")
    assert conversation.messages == before


# ---- /set


def test_set() -> None:
    llm = Scripted("a", "b")
    shown = talk(llm, "Hi", "/set temperature 0.5", "/set top-k 7", "/set stop END", "/set seed 4", "Hi", "/set")
    assert shown.count("(set)") == 4
    changed = llm.added[1].params
    assert (changed.temperature, changed.top_k, changed.stop, changed.seed) == (0.5, 7, ("END",), 4)
    assert llm.added[0].params == GREEDY
    table = dict(line.split(None, 1) for line in shown.splitlines()[-len(set_command.NAMES) :])
    assert [table[name] for name in ("temperature", "stop", "max_tokens", "when_full")] == ["0.5", "'END'", "24", "ask"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("speed 3", "/set speed: is not known. Has: max_tokens, "),
        ("temperature warm", "/set temperature warm: expected a number: How random"),
        ("top_p 2", "/set top_p: top_p is 2.0, expected at most 1"),
        ("when_full wait", "/set when_full wait: expected ask, drop, stop"),
    ],
)
def test_set_wrongly(setting: str, said: str) -> None:
    assert said in talk(Scripted(), f"/set {setting}")


def test_what_can_be_set_is_what_is_sampled_with() -> None:
    params = set_command.change(SamplingParams(), "max_tokens none")
    assert params.max_tokens is None
    assert set_command.change(SamplingParams(stop=("x",)), "stop none").stop == ()


# ---- /load


def test_load_goes_on_where_save_ended(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    talk(Scripted("Hello Bob."), "I am Bob.", f"/save {file}", system="Be kind.")
    llm = Scripted("x", "Bob.")
    shown = talk(llm, "other", f"/load {file}", "Who am I?")
    assert "(2 messages read)" in shown
    said = turn("system", "Be kind.") + turn("user", "I am Bob.") + turn("assistant", "Hello Bob.")
    assert prompts(llm)[1] == said + turn("user", "Who am I?") + "<|im_start|>assistant\n"


def test_a_message_without_an_answer_gets_one(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    llm = Scripted("Hello.")
    assert "/regenerate answers it" in talk(llm, f"/load {file}", "/regenerate")
    assert prompts(llm)[0].endswith(turn("user", "Hi") + "<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("user:\nHi", "is not the JSON that /save FILE.json writes"),
        ("{}", "expected a list of messages, found dict"),
        ('["Hi"]', "message 1 has no role and content"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "has pictures or videos"),
        ('[{"role": "tool", "content": "x"}]', "has the role 'tool'"),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "chat.json").write_text(text)
    llm = Scripted("Hello.", "Bob.")
    shown = talk(llm, "I am Bob.", f"/load {tmp_path / 'chat.json'}", "/load", f"/load {tmp_path}/none", "Who am I?")
    assert said in shown
    assert "/load: expected a file name" in shown
    assert "none: No such file or directory" in shown
    assert "Hello." in prompts(llm)[1], "the conversation is as it was"


# ---- a full context

LONG = "word " * 60


def test_the_oldest_turns_are_dropped() -> None:
    """Scripted's context has 400 tokens, an eighth of which is for the answer."""
    llm = Scripted(*(f"answer {n}" for n in range(6)))
    shown = talk(llm, *(f"question {n} {LONG}" for n in range(6)), when_full="drop", system="Be kind.")
    assert "(the oldest 2 turns dropped: the conversation no longer fits into the context of 400 tokens)" in shown
    last = prompts(llm)[-1]
    assert last.startswith(turn("system", "Be kind.")), "the system message stays"
    assert "question 0" not in last
    assert "answer 4" in last
    assert all(seq.prompt_len + 24 <= llm.max_model_len for seq in llm.added)
    assert len(llm.added) == 6


def test_a_full_context_stops_where_nobody_can_be_asked() -> None:
    llm = Scripted(*"abcdefg")
    shown = talk(llm, *[LONG] * 6, "/set when_full drop", LONG)
    assert shown.count("not sent: the conversation no longer fits") == 2
    assert len(llm.added) == 5
    assert "/set when_full drop drops the oldest" in shown
    assert "dropped: " in shown


@pytest.mark.parametrize(("reply", "goes_on"), [("y", True), ("", False), ("no", False)])
def test_a_full_context_is_asked_about(monkeypatch: pytest.MonkeyPatch, reply: str, goes_on: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    llm = Scripted(*"abcdefg")
    shown = talk(llm, LONG, LONG, LONG, LONG, LONG, reply, out=Terminal())
    assert "(the conversation no longer fits into the context of 400 tokens)" in shown
    assert ("dropped: " in shown) is goes_on
    assert ("not sent: " in shown) is not goes_on
    assert len(llm.added) == (5 if goes_on else 4)


def test_an_answer_that_fills_the_context_says_so() -> None:
    shown = talk(Scripted("word " * 500), "Go", params=SamplingParams(temperature=0))
    assert ": the context of 400 tokens is full]" in shown


# ---- pastes and history


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert history_file() is None, "the tests keep none"
    monkeypatch.delenv("WHORL_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert history_file() == Path("/x/whorl/chat_history")
    monkeypatch.setenv("WHORL_STATE_DIR", "/y")
    assert history_file() == Path("/y/chat_history")


def test_a_long_history_is_shortened_and_a_damaged_line_left_out(tmp_path: Path) -> None:
    file = tmp_path / "chat_history"
    file.write_text("".join(f'"line {n}"\n' for n in range(2500)) + '"cut o')
    keyboard = Keyboard()
    keyboard._file = file
    assert keyboard._earlier() == [f"line {n}" for n in range(1501, 2500)]
    assert len(file.read_text().splitlines()) == 1000


SCRIPTED = """
import sys
sys.path.insert(0, "tests/helpers")
from default_model import Scripted
from whorl.cli import app
from whorl.chat import command
command.load = lambda options: Scripted("First.", "Second.", "Third.")
app()
"""


def run_and_save(state: Path, typed: str, to: Path) -> str:
    """Type this into a chat that has its history there, and save it. The first message that was saved."""
    session = Session("-c", SCRIPTED, state=state)
    try:
        session.until("> ")
        session.send(f"{typed}\r")
        session.until("First.")
        session.until("> ")
        session.send(f"/save {to}\r")
        session.until("2 messages written")
        session.until("> ")  # before it the terminal would take the end for itself
        session.send("\x04")
        assert session.process.wait(timeout=30) == 0
    finally:
        session.close()
    content: str = json.loads(to.read_text())[0]["content"]
    return content


@pytest.mark.slow
def test_a_paste_is_one_message_and_stays_in_the_history(tmp_path: Path) -> None:
    pasted = "def f():\n    return 1\n/not a command"
    state = tmp_path / "state"
    assert run_and_save(state, f"\x1b[200~{pasted}\x1b[201~", tmp_path / "one.json") == pasted
    file = state / "chat_history"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [pasted, f"/save {tmp_path}/one.json"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    two_up = "\x1b[A\x1b[A"  # the paste, of the run before
    assert run_and_save(state, two_up, tmp_path / "two.json") == pasted
