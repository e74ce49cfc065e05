"""Chat in a terminal: read a line, stream the answer, remember both. Ctrl-C stops an answer, Ctrl-D ends the chat."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from whorl.engine import roofline
from whorl.engine.llm import LLM
from whorl.engine.reply_parser import END_THINK, THINK, Parts, ReplyParser
from whorl.engine.sequence import FinishReason, SamplingParams, Sequence

from .attachments import Attachment, Attachments
from .conversation import Conversation
from .conversation import as_text as content_text
from .prompt_progress import PromptProgress
from .text_streams import as_text

# A model may write what steers a terminal; only line breaks and tabs get through.
_HARMLESS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_BLOCK = '"""'


class Screen:
    """Writes pieces of text at once; thinking is dim where the output is a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.is_terminal = self.out.isatty()
        self._use_color = self.is_terminal and "NO_COLOR" not in os.environ
        self.is_line_open = False

    def write(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        self.is_line_open = not text.endswith("\n")
        shown = text.translate(_HARMLESS) if self.is_terminal else text
        self.out.write(f"\x1b[2m{shown}\x1b[0m" if dim and self._use_color else shown)
        self.out.flush()

    def note(self, text: str) -> None:
        """A remark of the program, on a line of its own."""
        self.end_line()
        self.write(f"{text}\n", dim=True)

    def end_line(self) -> None:
        if self.is_line_open:
            self.write("\n")


class Answer:
    """Shows an answer on the screen as it comes; what was thought is set off from what is said."""

    def __init__(self, screen: Screen, conversation: Conversation) -> None:
        may_think = conversation.tokenizer.token_id(END_THINK) is not None
        is_thinking = may_think and conversation.prompt.rstrip().endswith(THINK)  # some templates open it themselves
        self._parser = ReplyParser(may_think=may_think, is_thinking=is_thinking)
        self._screen, self._has_thought = screen, False

    def add(self, text: str) -> None:
        self._show(self._parser.add(text))

    def finish(self) -> None:
        self._show(self._parser.add("", is_last=True))
        self._screen.end_line()

    def _show(self, parts: Parts) -> None:
        self._screen.write(parts.reasoning, dim=True)
        self._has_thought |= bool(parts.reasoning)
        if parts.content and self._has_thought:
            self._has_thought = False
            self._screen.end_line()
            self._screen.write("\n")
        self._screen.write(parts.content)


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Set by Ctrl-C, to be looked at between steps: an exception inside one would leave the engine half done.

    A second Ctrl-C interrupts at once.
    """
    asked = threading.Event()

    def ask(signum: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def stream(llm: LLM, seq: Sequence, show: Callable[[str], None]) -> None:
    """Run a sequence to its end, or to Ctrl-C, and show its text piece by piece."""
    progress = PromptProgress(seq)
    try:
        with stop_request() as asked:
            while not seq.is_finished:
                deltas = llm.step()
                progress.update()
                for delta in deltas:
                    if delta.sequence is seq:
                        show(delta.text)
                if asked.is_set():
                    llm.abort(seq)
    finally:
        progress.close()
        llm.abort(seq)
    show(seq.text.take(is_finished=True))


def describe(seq: Sequence) -> str:
    """What an answer took, in a line."""
    timings = seq.timings
    first, speed = timings.time_to_first_token, timings.tokens_per_second
    parts = [
        f"{seq.num_outputs} tokens" + (f" at {speed:.1f} tok/s" if speed else ""),
        f"first after {first:.2f} s" if first is not None else "no token",
        f"prompt of {seq.prompt_len}" + (f", {seq.num_cached} from the cache" if seq.num_cached else ""),
    ]
    if seq.num_drafted:
        share = 100 * seq.num_accepted / seq.num_drafted
        parts.append(f"{seq.num_accepted} of {seq.num_drafted} drafted tokens accepted ({share:.0f}%)")
    return "; ".join(parts)


def describe_limit(llm: LLM, seq: Sequence) -> str | None:
    """How an answer's speed compares with what reading the weights and the cache once a token would allow."""
    model, speed = llm.model, seq.timings.tokens_per_second
    cache: dict[str, Any] = {"context": len(seq.token_ids), "kv_cache_dtype": llm.settings.kv_cache_dtype}
    if not speed or (share := roofline.share(model, speed, **cache)) is None:
        return None
    read = roofline.step_bytes(model, **cache) / 1e6
    return f"{share:.0%} of the roofline: {read:.3g} MB a token at a copy's speed would be {speed / share:.1f} tok/s"


def read_line(prompt: str) -> str:
    """A line from the keyboard, with history, or from a pipe, without a prompt."""
    if not sys.stdin.isatty():
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.rstrip("\n")
    import readline  # noqa: F401 (gives input() its history)

    return input(prompt)


class Chat:
    """The loop. Lines that start with / are commands."""

    def __init__(
        self,
        conversation: Conversation,
        params: SamplingParams,
        *,
        screen: Screen | None = None,
        read: Callable[[str], str] = read_line,
        is_streaming: bool = True,
        attachments: Attachments | None = None,
        attached: List[Attachment] = (),
    ) -> None:
        self.conversation, self.params = conversation, params
        self._attachments, self._attached = attachments or Attachments(None), list(attached)
        self._screen, self._read, self._is_streaming = screen or Screen(), read, is_streaming
        self._last: Sequence | None = None
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/reset": (self._reset, "forget the conversation"),
            "/system": (self._system, "TEXT: set the system message, and forget the conversation; without TEXT: none"),
            "/think": (self._think, "on, off or auto: whether the model thinks first, if it can"),
            "/image": (lambda file: self._attach("image", file), "FILE: a picture that goes with the next message"),
            "/video": (lambda file: self._attach("video", file), "FILE: a video, or a folder of its frames, likewise"),
            "/save": (self._save, "FILE: write the conversation to a new file: .json, or text"),
            "/stats": (self._stats, "what the last answer took"),
            "/help": (self._help, "this list"),
            "/exit": (self._exit, "end the chat, as Ctrl-D does"),
        }

    def run(self) -> int:
        while True:
            try:
                line = as_text(self._read_message(), "not sent: it")
                if line.startswith("/"):
                    self._command(line)
                elif line.strip():
                    self.answer(line)
            except KeyboardInterrupt:
                self._screen.note("(Ctrl-D ends the chat)")
            except EOFError:
                self._screen.end_line()
                return 0
            except (ValueError, OSError) as error:
                self._screen.note(f"whorl: {error}")

    def answer(self, text: str) -> None:
        seq = self.conversation.ask(text, self.params, fit=True, attached=self._attached)
        self._attached = []
        shown = Answer(self._screen, self.conversation)
        late: list[str] = []
        stream(self.conversation.llm, seq, shown.add if self._is_streaming else late.append)
        shown.add("".join(late))
        shown.finish()
        self.conversation.record(seq)
        self._last = seq
        if seq.finish_reason is FinishReason.ABORT:
            self._screen.note("[stopped]")
        elif seq.finish_reason is FinishReason.LENGTH:
            self._screen.note(f"[cut off after {seq.num_outputs} tokens]")

    def _read_message(self) -> str:
        """A line, or the lines between two lines of three quotes."""
        line = self._read("> ")
        if line.strip() != _BLOCK:
            return line
        lines: list[str] = []
        while (line := self._read("... ")).strip() != _BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            raise ValueError(f"{name} is not a command. Has: {', '.join(self._commands)}. A space in front sends it")
        self._commands[name][0](argument.strip())

    def _reset(self, argument: str) -> None:
        self.conversation.forget()
        self._attached = []
        self._screen.note("(conversation forgotten)")

    def _system(self, argument: str) -> None:
        if not self.conversation.is_chat:
            raise ValueError("/system needs a chat template: start with --chat")
        self.conversation.forget()
        self.conversation.system = argument or None
        self._screen.note("(system message set, conversation forgotten)" if argument else "(no system message)")

    def _think(self, argument: str) -> None:
        choices = {"on": True, "off": False, "auto": None}
        if argument not in choices:
            raise ValueError(f"/think {argument}: expected on, off or auto")
        self.conversation.enable_thinking = choices[argument]
        self._screen.note(f"(thinking: {argument})")

    def _attach(self, kind: Literal["image", "video"], file: str) -> None:
        if not file:
            raise ValueError(f"/{kind}: expected a file name")
        if not self.conversation.is_chat:
            raise ValueError(f"/{kind} needs a chat template: start with --chat")
        found = self._attachments.read(kind, file)
        self._attached.append(found)
        self._screen.note(f"({found.name}, {found.num_tokens} tokens, goes with the next message)")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ValueError("/save: expected a file name")
        conversation = self.conversation
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        messages = [*system, *conversation.messages]
        as_text = "\n\n".join(f"{message['role']}:\n{content_text(message['content'])}" for message in messages)
        as_json = json.dumps(messages, indent=2, ensure_ascii=False)
        path = Path(argument).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{as_json if path.suffix == '.json' else as_text}\n")
        except FileExistsError:
            raise ValueError(f"/save {path}: is there already; choose another name") from None
        except OSError as error:
            raise ValueError(f"/save {path}: {error.strerror}") from error
        self._screen.note(f"({len(messages)} messages written to {path})")

    def _stats(self, argument: str) -> None:
        if self._last is None:
            self._screen.note("no answer yet")
            return
        self._screen.note(describe(self._last))
        if limit := describe_limit(self.conversation.llm, self._last):
            self._screen.note(limit)

    def _help(self, argument: str) -> None:
        for name, (_, text) in self._commands.items():
            self._screen.note(f"{name:8} {text}")
        self._screen.note(f"Several lines: put a line of {_BLOCK} before and behind. Ctrl-C stops an answer.")

    def _exit(self, argument: str) -> None:
        raise EOFError
