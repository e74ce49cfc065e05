"""The terminal chat: its commands, its memory and what that saves, thinking, Ctrl-C; then all of it in a terminal."""

import io
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from chat_session import Session
from default_model import Scripted, mock_llm
from default_model import tokenizer as smollm2
from scripted_chat import GREEDY, Terminal, prompts, talk, turn
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

from whorl.chat import command
from whorl.chat import terminal as chat_module
from whorl.chat.conversation import Conversation
from whorl.chat.loop import Chat
from whorl.chat.terminal import Screen, describe
from whorl.cli import app
from whorl.engine.sequence import SamplingParams
from whorl.engine.tokenizer import Tokenizer

OPEN = "<|im_start|>assistant\n"
SMOL = turn("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")


# ---- a conversation


def test_it_remembers() -> None:
    llm = Scripted("Hello Bob.", "Bob.")
    assert talk(llm, "I am Bob.", "", "   ", "Who am I?") == "Hello Bob.\nBob.\n"
    first = SMOL + turn("user", "I am Bob.") + OPEN
    assert prompts(llm) == [first, f"{first}Hello Bob.<|im_end|>\n" + turn("user", "Who am I?") + OPEN]


def test_reset_forgets() -> None:
    llm = Scripted("Hello Bob.", "No idea.")
    assert "(conversation forgotten)" in talk(llm, "I am Bob.", "/reset", "Who am I?")
    assert prompts(llm)[1] == SMOL + turn("user", "Who am I?") + OPEN


def test_without_memory_each_message_is_the_first() -> None:
    llm = Scripted("Hello Bob.", "No idea.")
    talk(llm, "I am Bob.", "Who am I?", has_memory=False)
    assert prompts(llm)[1] == SMOL + turn("user", "Who am I?") + OPEN


def test_without_a_template_each_line_is_a_prompt() -> None:
    llm = Scripted(" there", " you")
    assert talk(llm, "Hello", "/system x", "How are", is_chat=False).startswith(" there\nwhorl: /system needs a chat")
    assert prompts(llm) == ["Hello", "How are"]


def test_system() -> None:
    llm = Scripted("a", "b", "c")
    talk(llm, "Hi", "/system Be brief.", "Hi", "/system", "Hi", system="Be kind.")
    hi = turn("user", "Hi") + OPEN
    assert prompts(llm) == [turn("system", "Be kind.") + hi, turn("system", "Be brief.") + hi, SMOL + hi]


def test_several_lines() -> None:
    llm = Scripted("ok")
    talk(llm, '"""', "def f():", "    /reset", '"""')
    assert prompts(llm) == [SMOL + turn("user", "def f():\n    /reset") + OPEN]


def test_save(tmp_path: Path) -> None:
    commands = ["/save", *(f"/save {tmp_path}/{name}" for name in ("a.json", "a.txt", "a.txt", "none/a.txt"))]
    shown = talk(Scripted("Caf\u00e9."), "Where?", *commands, system="Be kind.")
    messages = [("system", "Be kind."), ("user", "Where?"), ("assistant", "Caf\u00e9.")]
    saved = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert [(m["role"], m["content"]) for m in saved] == messages
    assert (tmp_path / "a.txt").read_text(encoding="utf-8").startswith("system:\nBe kind.\n\nuser:\nWhere?\n\nassist")
    assert "whorl: /save: expected a file name" in shown
    assert "a.txt: the file exists already; choose another name" in shown, "a file is never written over"
    assert "none/a.txt: No such file or directory" in shown


def test_stats() -> None:
    shown = talk(Scripted("Hello world"), "/stats", "Hi", "/stats")
    assert shown.startswith("no answer yet\nHello world\n3 tokens at ")
    assert "first after 0.0" in shown


def test_stats_tell_the_share_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.engine import roofline
    from whorl.engine.weights import random_model
    from whorl.models.llama import Llama

    llm = Scripted("Hello world")
    llm.model = random_model(Llama.tiny(), device="cpu", dtype=torch.float32)  # type: ignore[assignment]
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: 1e9)
    (line,) = (line for line in talk(llm, "Hi", "/stats").splitlines() if "roofline" in line)
    share, read, speed = (float(number) for number in re.findall(r"[\d.]+", line))
    assert read == pytest.approx(roofline.step_bytes(llm.model, context=30) / 1e6, rel=0.2)
    assert speed == pytest.approx(1e3 / read, rel=0.01)
    assert share > 0


def test_stats_tell_cache_and_drafts() -> None:
    llm = Scripted("Hello world")
    seq = Conversation(llm).ask("Hi", GREEDY)  # type: ignore[arg-type]
    assert describe(seq).startswith("0 tokens; no token; prompt of ")
    seq.num_cached, seq.num_drafted, seq.num_accepted = 16, 8, 6
    assert describe(seq).endswith(", 16 from the cache; 6 of 8 drafted tokens accepted (75%)")


def test_help_and_unknown_commands() -> None:
    shown = talk(Scripted(), "/help", "/wrong x", "/think maybe", "/think on", "/exit", "never read")
    for name in ("/reset", "/system", "/save", "/stats", "/help", "/exit", "/think"):
        assert f"{name} " in shown
    assert "whorl: /wrong is not a command. Has: /reset, " in shown
    assert "whorl: /think maybe: expected on, off or auto\n(thinking: on)\n" in shown


def test_a_space_sends_what_looks_like_a_command() -> None:
    llm = Scripted("a path")
    talk(llm, " /etc/fstab?")
    assert prompts(llm)[0].endswith(turn("user", " /etc/fstab?") + OPEN)


def test_no_stream_shows_the_same() -> None:
    assert talk(Scripted("Hello world"), "Hi", is_streaming=False) == talk(Scripted("Hello world"), "Hi")


def test_a_full_context_is_an_error_of_one_message() -> None:
    llm = Scripted("unheard", "Yes.")
    shown = talk(llm, "word " * 500, "/reset", "Hi")
    assert shown.startswith("whorl: prompt: ")
    assert shown.endswith("\nunheard\n")
    assert len(llm.added) == 1


def test_a_long_answer_is_fitted_and_cut() -> None:
    llm = Scripted("one two three four five", "word " * 500)
    shown = talk(llm, "Count", params=SamplingParams(temperature=0, max_tokens=2))
    assert shown == "one two\n[cut off after 2 tokens]\n"
    talk(llm, "Go", params=SamplingParams(temperature=0, max_tokens=10_000))
    assert len(llm.added[1].token_ids) == llm.max_model_len


# ---- memory reuses the cache


def test_the_next_turn_goes_on_from_the_tokens_generated() -> None:
    """Also where the text would be cut into other tokens: a model may spell a word in an unusual way."""
    llm = Scripted("unused")
    conversation = Conversation(llm)  # type: ignore[arg-type]
    seq = conversation.ask("Hi", GREEDY)
    odd = [llm.tokenizer.token_id(letter) for letter in "Hello"]
    for token_id in [*odd, 2]:
        seq.append(token_id)
    conversation.record(seq)
    assert llm.tokenizer.encode("Hello") != odd
    llm.answers.append("x")
    after = conversation.ask("And?", GREEDY)
    assert after.token_ids[: len(seq.token_ids)] == seq.token_ids
    assert prompts(llm)[1] == prompts(llm)[0] + "Hello<|im_end|>\n" + turn("user", "And?") + OPEN


def test_tokens_are_kept_to_where_history_was_rewritten() -> None:
    llm = Scripted("one two three", "x", "y")
    conversation = Conversation(llm)  # type: ignore[arg-type]
    seq = conversation.ask("Count", GREEDY)
    chat_module.stream(llm, seq, lambda text: None)  # type: ignore[arg-type]
    conversation.record(seq)
    conversation.messages[-1]["content"] = "one two four"
    after = conversation.ask("And?", GREEDY)
    kept = seq.prompt_len + 2
    assert after.token_ids[:kept] == seq.token_ids[:kept]
    assert after.token_ids[kept] != seq.token_ids[kept]


def test_cached_turns_say_what_uncached_ones_do() -> None:
    """The cache gives the very numbers that computing again would."""
    said: dict[bool, list[list[int]]] = {}
    for use_cache in (True, False):
        llm = mock_llm(use_prefix_cache=use_cache)
        conversation = Conversation(llm)
        said[use_cache] = []
        for text in ("Hi", "And then?", "Why?"):
            seq = conversation.ask(text, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
            chat_module.stream(llm, seq, lambda text: None)
            before = len(conversation._seen.token_ids)
            assert seq.num_cached == max(before - 1, 0) // 4 * 4 * use_cache
            conversation.record(seq)
            said[use_cache].append(seq.output_ids)
    assert said[True] == said[False]


# ---- thinking


def thinks(end: str = "") -> Tokenizer:
    """SmolLM2's words with Qwen3's think tokens, and a template that strips earlier thinking and can switch it off.

    end: what the template adds.
    """
    backend = Backend.from_str(smollm2().to_json())
    backend.add_tokens(["<think>", "</think>"])
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}A: "
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
        f"{end}"
    )
    return Tokenizer(backend, eos_ids=[2], roles={}, templates={"default": source})


THOUGHT = "<think>\nHm.\n\nYes.\n</think>\n\nParis."


def test_thinking_is_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    told = ("/set thoughts shown", "/set format off", "Where?")
    shown = talk(Scripted(THOUGHT, words=thinks()), *told, out=Terminal())
    shown = shown.split("(format: off)\n\x1b[0m")[1].rpartition("\x1b[2m")[0]  # without the last line, on speed
    dim, said = shown.rsplit("\x1b[0m", 1)
    assert dim.replace("\x1b[2m", "").replace("\x1b[0m", "") == "Hm.\n\nYes."
    assert dim.count("\x1b[2m") > 1
    assert said == "\n\nParis.\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert talk(Scripted(THOUGHT, words=thinks()), "Where?", out=Terminal()).startswith("Hm.\n\nYes.\n\nParis.\n")
    assert talk(Scripted(THOUGHT, words=thinks()), "Where?") == "Hm.\n\nYes.\n\nParis.\n"


def test_thoughts_are_folded_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = talk(Scripted(THOUGHT, words=thinks()), "Where?", "/show thoughts", out=Terminal())
    folded, _, after = shown.partition("[thought: 2 words; /show thoughts]")
    assert "thinking: Hm. Yes." in folded
    assert "\n" not in folded  # one line, which is written again and again
    assert "Paris." in after
    assert "Hm.\n\nYes." in after  # when they are asked for


def test_thinking_is_kept_apart_in_memory() -> None:
    llm = Scripted(THOUGHT, "ok", "ok", words=thinks())
    talk(llm, "Where?", "/think off", "Sure?", "/think auto", "Now?")
    assert prompts(llm)[1:] == [
        "user: Where?<|im_end|>assistant: \n\nParis.<|im_end|>user: Sure?<|im_end|>A: <think>\n\n</think>\n\n",
        "user: Where?<|im_end|>assistant: \n\nParis.<|im_end|>user: Sure?<|im_end|>assistant: ok<|im_end|>"
        "user: Now?<|im_end|>A: ",
    ]


def test_a_template_may_open_the_thinking() -> None:
    said = "hm </think>\n\nParis, <think> of course."
    assert talk(Scripted(said, words=thinks("<think>\n")), "Where?") == "hm\n\nParis, <think> of course.\n"


def test_who_cannot_think_may_write_the_marks() -> None:
    assert talk(Scripted("<think>hm</think>ok"), "Where?") == "<think>hm</think>ok\n"


def test_what_steers_a_terminal_does_not_reach_it() -> None:
    text = "a\x1b[2Jb\x07\tc\x9b1m\n"
    screens = Terminal(), io.StringIO()
    for screen in screens:
        Screen(screen).write(text)
    assert screens[0].getvalue() == "a[2Jb\tc1m\n"
    assert screens[1].getvalue() == text


# ---- Ctrl-C


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    llm = Scripted("one two three four", "Fine.")
    steps = iter([None, None, signal.SIGINT])
    llm.on_step = lambda: (number := next(steps, None)) and os.kill(os.getpid(), number)
    handler = signal.getsignal(signal.SIGINT)
    assert talk(llm, "Count", "And you?") == "one two three\n[stopped]\nFine.\n"
    assert signal.getsignal(signal.SIGINT) is handler
    assert "one two three<|im_end|>" in prompts(llm)[1], "what was said is remembered"


def test_a_character_cut_by_ctrl_c_is_shown_as_such() -> None:
    llm = Scripted("\U0001f600")
    llm.on_step = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert talk(llm, "Smile") == "\ufffd\n[stopped]\n"


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    llm = Scripted("one two three four", "Fine.")

    def twice() -> None:
        llm.on_step = lambda: None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    llm.on_step = twice
    assert "(Ctrl-D ends the chat)" in talk(llm, "Count", "And you?")
    assert llm.added[0].is_finished, "nothing keeps running"


def test_ctrl_c_at_the_prompt_does_nothing() -> None:
    screen = Screen(io.StringIO())
    events = iter([KeyboardInterrupt, EOFError])

    def read(prompt: str) -> str:
        raise next(events)

    Chat(Conversation(Scripted()), GREEDY, screen=screen, read=read).run()  # type: ignore[arg-type]
    assert screen.out.getvalue() == "(Ctrl-D ends the chat)\n"


# ---- the command


def test_lines_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Scripted("Hello Bob.", "Bob.", "ok")
    monkeypatch.setattr(command, "load", lambda options: llm)
    done = CliRunner().invoke(app, ["chat", "--system", "Be brief."], input="I am Bob.\nWho am I?\n")
    assert (done.exit_code, done.stdout) == (0, "Hello Bob.\nBob.\n")
    assert prompts(llm)[1].startswith(turn("system", "Be brief.") + turn("user", "I am Bob."))
    done = CliRunner().invoke(app, ["generate", "--interactive", "--chat", "--reset", "--no-stream"], input="Hi")
    assert (done.exit_code, done.stdout) == (0, "ok\n")
    assert prompts(llm)[2] == SMOL + turn("user", "Hi") + OPEN


def test_a_base_model_cannot_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(Backend.from_str(smollm2().to_json()), eos_ids=[2], roles={}, templates={})
    monkeypatch.setattr(command, "load", lambda options: Scripted("x", words=words))
    done = CliRunner().invoke(app, ["chat"], input="Hi\n")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is this a base model?" in done.stderr


SCRIPTED = """
import sys, time
sys.path.insert(0, "tests/helpers")
from default_model import Scripted
from whorl.cli import app
from whorl.chat import command
llm = Scripted("The capital of France is Paris.", "I said Paris.", "word " * 200, "I do not know.")
llm.on_step = lambda: time.sleep(0.02)
command.load = lambda options: llm
app()
"""


@pytest.mark.parametrize(
    "python", [("-c", SCRIPTED), pytest.param(("-m", "whorl"), marks=pytest.mark.slow)], ids=["scripted", "real"]
)
def test_in_a_terminal(python: tuple[str, str], tmp_path: Path) -> None:
    """The flow of a chat: a question, another that needs the first, Ctrl-C, the commands, an old line, Ctrl-D."""
    session = Session(*python, state=tmp_path / "state")
    try:
        follow(session, tmp_path / "chat.json")
    finally:
        session.close()
    messages = json.loads((tmp_path / "chat.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3


def follow(session: Session, file: Path) -> None:
    session.until("Ctrl-D ends.")
    session.until("> ")
    session.send("What is the capital of France?\n")
    assert "The capital of France is Paris." in session.until("> ")
    session.send("Repeat that.\n")
    assert "Paris" in session.until("> ")
    session.send("/sta\t\n")  # Tab completes it
    assert " tok/s; first after " in session.until("> ")
    session.send("Write a very long story about the sea.\n")
    session.until("sea.\r\n")  # the echo
    session.until(" ")  # the answer has begun
    session.send("\x03")
    session.until("[stopped]")
    session.until("> ")
    session.send(f"/save {file}\n")
    session.until("6 messages written")
    session.until("> ")
    session.send("/reset\n")
    session.until("(conversation forgotten)")
    session.until("> ")
    session.send("\x1b[A\x1b[A\x1b[A\n")  # three lines up in the history
    assert "about the sea" in session.until("\n")
    session.until("> ")
    session.send("\x04")
    assert session.process.wait(timeout=30) == 0
