"""The chat loop: read a message, stream the answer, remember both. Ctrl-C stops an answer, Ctrl-D ends the chat."""

import sys
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from whorl.engine.sequence import FinishReason, SamplingParams, Sequence

from . import saved, set_command
from .attachments import Attachment, Attachments
from .completion import FILES, Completion
from .conversation import Conversation
from .conversation import as_text as content_text
from .keyboard import Keyboard, history_file
from .preview import picture
from .terminal import Answer, Screen, describe, describe_limit, describe_parting, stream
from .text_streams import as_text

_BLOCK = '"""'
_ROOM = 256  # tokens that should be free for an answer, if the context is large enough
_TOP = 5  # alternatives that /compare asks for
_THINKING, _SHOWN = ("on", "off", "auto"), ("settings", "system", "template", "messages", "thoughts")
WhenFull = Literal["ask", "drop", "stop"]
_WHEN_FULL: tuple[WhenFull, ...] = ("ask", "drop", "stop")


class Chat:
    """The chat loop. Lines that start with / are commands.

    read: a function that shows a prompt and returns the next line; None: reads the keyboard. attachments: reads the
    files of /image and /video. attached: pictures and videos that go with the first message.
    when_full: what to do when the conversation no longer fits into the context: ask, drop the oldest turns, or stop.
    """

    def __init__(
        self,
        conversation: Conversation,
        params: SamplingParams,
        *,
        screen: Screen | None = None,
        read: Callable[[str], str] | None = None,
        is_streaming: bool = True,
        attachments: Attachments | None = None,
        attached: abc.Sequence[Attachment] = (),
        when_full: WhenFull = "ask",
    ) -> None:
        self.conversation, self.params = conversation, params
        self._attachments, self._attached = attachments or Attachments(None), list(attached)
        self._screen, self._is_streaming, self._when_full = screen or Screen(), is_streaming, when_full
        # Without a terminal nobody can answer a question: the next line of the pipe would be taken as the answer.
        self._can_ask = self._screen.is_terminal and (read is not None or sys.stdin.isatty())
        self._folds, self._is_formatted, self._thoughts = True, True, ""
        self._last: Sequence | None = None
        self._last_params = params  # of that answer
        self._num_regenerated = 0  # how often the last message was answered again
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/reset": (self._reset, "forget the conversation"),
            "/regenerate": (self._regenerate, "answer the last message again"),
            "/set": (self._set, "NAME VALUE: change how answers are sampled; without arguments: show it"),
            "/system": (self._system, "TEXT: set the system message, forget the conversation; without TEXT: none"),
            "/think": (self._think, "on, off or auto: whether a reasoning model thinks before it answers"),
            "/image": (lambda file: self._attach("image", file), "FILE: a picture that goes with the next message"),
            "/video": (lambda file: self._attach("video", file), "FILE: a video, or a folder of its frames, likewise"),
            "/save": (self._save, "FILE: write the conversation to a new file: .json, or else text"),
            "/load": (self._load, "FILE: continue a conversation that was saved as .json"),
            "/stats": (self._stats, "tokens and speed of the last answer"),
            "/help": (self._help, "this list"),
            "/show": (self._show, "WHAT: settings, system, template, messages or thoughts"),
            "/compare": (self._compare, "NAME VALUE: answer the last message with another setting, and compare"),
            "/exit": (self._exit, "end the chat, as Ctrl-D does"),
        }
        values: dict[str, abc.Sequence[str] | str] = dict.fromkeys(self._commands, ())
        values |= dict.fromkeys(("/image", "/video", "/save", "/load"), FILES)
        values |= {"/set": set_command.NAMES, "/compare": (*set_command.SAMPLED, "adapter")}
        values |= {"/think": _THINKING, "/show": _SHOWN}
        self._read = read or Keyboard(history_file(), Completion(values).options).read

    def run(self) -> int:
        """Read and answer messages until Ctrl-D or /exit; return the exit code, which is 0."""
        while True:
            try:
                line = as_text(self._read_message(), "not sent: it")
                if line.startswith("/") and "\n" not in line:  # several lines are always a message
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
        """Answer a message and remember both."""
        self._make_room(text)
        self._num_regenerated = 0
        self._answer(text, self._attached, self.params)
        self._attached = []

    def _answer(self, text: str, attached: abc.Sequence[Attachment], params: SamplingParams) -> None:
        """Generate and show the answer to a message, and remember both; say so if the answer is not complete."""
        seq = self.conversation.ask(text, params, fit=True, attached=attached)
        answer = Answer(self._screen, self.conversation, is_formatted=self._is_formatted, folds=self._folds)
        pending: list[str] = []
        stream(self.conversation.llm, seq, answer.add if self._is_streaming else pending.append)
        answer.add("".join(pending))
        answer.finish()
        self.conversation.record(seq)
        self._last, self._last_params, self._thoughts = seq, params, answer.reasoning
        if self._screen.is_terminal:
            self._screen.note(describe(seq))
        if seq.finish_reason is FinishReason.ABORT:
            self._screen.note("[stopped]")
        elif seq.finish_reason is FinishReason.LENGTH:
            is_full = len(seq.token_ids) >= self.conversation.llm.max_model_len
            reason = f": the context of {self.conversation.llm.max_model_len} tokens is full" if is_full else ""
            self._screen.note(f"[cut off after {seq.num_outputs} tokens{reason}]")

    def _make_room(self, text: str) -> None:
        """If the conversation no longer fits into the context, drop the oldest turns, or refuse with ValueError."""
        limit = self.conversation.llm.max_model_len
        room = min(self.params.max_tokens or _ROOM, _ROOM, limit // 8)
        if not (turns := self.conversation.overflow(text, self._attached, room)):
            return
        problem = f"the conversation no longer fits into the context of {limit} tokens"
        oldest = "the oldest turn" if turns == 1 else f"the oldest {turns} turns"
        drops = self._when_full == "drop"
        if self._when_full == "ask" and self._can_ask:
            self._screen.note(f"({problem})")
            drops = self._read(f"Drop {oldest} and go on? [y/N] ").strip().lower() in ("y", "yes")
        if not drops:
            raise ValueError(
                f"not sent: {problem}. /set when_full drop drops {oldest} and goes on, from now on without asking; "
                "/reset forgets the conversation; /save FILE saves it"
            )
        self.conversation.drop(turns)
        self._screen.note(f"({oldest} dropped: {problem})")

    def _regenerate(self, argument: str) -> None:
        """Answer the last message again, with another seed if one is set; on an error the old answer is kept."""
        conversation, params = self.conversation, self.params
        messages = list(conversation.messages)
        text, attached = conversation.remove_last_turn()
        self._num_regenerated += 1
        if params.temperature == 0:
            self._screen.note("(temperature is 0, so the answer is the same: /set temperature 0.7 for a different one)")
        elif params.seed is not None:
            params = replace(params, seed=params.seed + self._num_regenerated)
        try:
            self._answer(text, attached, params)
        except ValueError:
            conversation.put_back(messages, attached)
            raise

    def _set(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        if name in ("thoughts", "format"):
            self._set_display(name, value.strip())
        elif name.replace("-", "_") == "when_full":
            self._when_full = _when_full(value.strip())
            self._screen.note(f"(when_full: {self._when_full})")
        elif argument:
            self.params = set_command.change(self.params, argument)
            self._screen.note("(set)")
        else:
            self._show("settings")

    def _set_display(self, name: str, value: str) -> None:
        expected = ("folded", "shown") if name == "thoughts" else ("on", "off")
        if value not in expected:
            raise ValueError(f"/set {name} {value}: expected {' or '.join(expected)}")
        if name == "thoughts":
            self._folds = value == "folded"
        else:
            self._is_formatted = value == "on"
        self._screen.note(f"({name}: {value})")

    def _show(self, argument: str) -> None:
        conversation = self.conversation
        display = {"when_full": self._when_full, "thoughts": "folded" if self._folds else "shown"}
        display["format"] = "on" if self._is_formatted else "off"
        texts: dict[str, Callable[[], list[str]]] = {
            "settings": lambda: set_command.describe(self.params) + [f"{n:18} {v}" for n, v in display.items()],
            "system": lambda: [conversation.system or "no system message"],
            "template": lambda: [conversation.tokenizer.template.sources.get("default") or "no chat template"],
            "messages": lambda: [f"{m['role']}: {content_text(m['content'])}" for m in conversation.messages],
            "thoughts": lambda: [self._thoughts or "the last answer has none"],
        }
        if argument not in texts:
            raise ValueError(f"/show {argument}: expected {', '.join(texts)}")
        for line in texts[argument]() or ["nothing yet"]:
            self._screen.note(line)

    def _compare(self, argument: str) -> None:
        """Answer the last message with another setting. The conversation keeps the answer that it has."""
        name, _, value = argument.partition(" ")
        if not value:
            raise ValueError("/compare: expected NAME VALUE, as of /set, or adapter NAME")
        if name == "adapter":
            params = replace(self._last_params, lora=None if value == "none" else value.strip())
        else:
            params = set_command.change(self._last_params, argument, command="/compare")
        conversation, first = self.conversation, self._last
        if first is None:
            raise ValueError("/compare: there is no answer yet")
        messages = list(conversation.messages)
        text, attached = conversation.remove_last_turn()
        try:
            seq = conversation.ask(text, replace(params, logprobs=_TOP), fit=True, attached=attached)
        except ValueError:
            conversation.put_back(messages, attached)
            raise
        conversation.messages = messages
        answer = Answer(self._screen, conversation, is_formatted=self._is_formatted, folds=self._folds)
        stream(conversation.llm, seq, answer.add)
        answer.finish()
        self._screen.note(describe_parting(conversation.tokenizer, first, seq))

    def _load(self, argument: str) -> None:
        if not argument:
            raise ValueError("/load: expected a file name")
        if not self.conversation.is_chat:
            raise ValueError("/load needs a chat template: start with --chat")
        count = saved.load(self.conversation, argument)
        self._forget_answer()
        is_open = bool(self.conversation.messages) and self.conversation.messages[-1]["role"] == "user"
        hint = "; the last one has no answer: /regenerate answers it" if is_open else ""
        self._screen.note(f"({count} messages read{hint})")

    def _read_message(self) -> str:
        """Read a line, or the lines between two lines of three quotes."""
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
        self._forget_answer()
        self._screen.note("(conversation forgotten)")

    def _forget_answer(self) -> None:
        """Forget what belonged to another conversation."""
        self._attached, self._last, self._thoughts = [], None, ""

    def _system(self, argument: str) -> None:
        if not self.conversation.is_chat:
            raise ValueError("/system needs a chat template: start with --chat")
        self.conversation.forget()
        self._forget_answer()
        self.conversation.system = argument or None
        self._screen.note("(system message set, conversation forgotten)" if argument else "(no system message)")

    def _think(self, argument: str) -> None:
        choices = dict(zip(_THINKING, (True, False, None), strict=True))
        if argument not in choices:
            raise ValueError(f"/think {argument}: expected on, off or auto")
        self.conversation.enable_thinking = choices[argument]
        self._screen.note(f"(thinking: {argument})")

    def _attach(self, kind: Literal["image", "video"], file: str) -> None:
        if not file:
            raise ValueError(f"/{kind}: expected a file name")
        if not self.conversation.is_chat:
            raise ValueError(f"/{kind} needs a chat template: start with --chat")
        attachment = self._attachments.read(kind, file)
        self._attached.append(attachment)
        if kind == "image" and self._screen.draws and (shown := picture(Path(file).expanduser())) is not None:
            self._screen.control(shown, is_line_open=False)
        self._screen.note(f"({attachment.name}, {attachment.num_tokens} tokens, goes with the next message)")

    def _save(self, argument: str) -> None:
        if not argument:
            raise ValueError("/save: expected a file name")
        path, count = saved.save(self.conversation, argument)
        self._screen.note(f"({count} messages written to {path})")

    def _stats(self, argument: str) -> None:
        if self._last is None:
            self._screen.note("no answer yet")
            return
        self._screen.note(describe(self._last))
        if limit := describe_limit(self.conversation.llm, self._last):
            self._screen.note(limit)

    def _help(self, argument: str) -> None:
        for name, (_, text) in self._commands.items():
            self._screen.note(f"{name:12} {text}")
        self._screen.note(
            f"Several lines: paste them, or put a line of {_BLOCK} before and after. Ctrl-C stops an answer."
        )

    def _exit(self, argument: str) -> None:
        raise EOFError


def _when_full(value: str) -> WhenFull:
    for known in _WHEN_FULL:
        if value == known:
            return known
    raise ValueError(f"/set when_full {value}: expected {', '.join(_WHEN_FULL)}")
