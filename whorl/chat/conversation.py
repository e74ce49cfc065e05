"""A chat with memory: which tokens the next turn starts from, and which of them the cache still holds."""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.tokenizer import Tokenizer
from whorl.media import expand

from .attachments import Attachment


@dataclass(frozen=True, slots=True)
class _Seen:
    """The sequence of the last turn: its text, its ids and which of them were generated."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class Conversation:
    """Messages, and one sequence that grows with them.

    The next turn goes on from the ids of the last one where its text does, so answers keep the tokens they were
    generated with and their cached blocks. Where the template rewrites history, as Qwen3's drops earlier
    thinking, ids are reused up to the change. Without `is_chat` each text is a prompt by itself. allow: given a
    prompt's text, `SamplingParams.allow` of its answers.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        is_chat: bool = True,
        has_memory: bool = True,
        enable_thinking: bool | None = None,
        allow: Callable[[str], Any] | None = None,
    ) -> None:
        assert isinstance(llm.tokenizer, Tokenizer)
        self.llm, self.tokenizer, self.is_chat = llm, llm.tokenizer, is_chat
        self.system, self.has_memory, self.enable_thinking = system, has_memory, enable_thinking
        self.allow = allow
        self.messages: list[dict[str, Any]] = []
        self._attached: list[Attachment] = []  # to the messages, in their order
        self.prompt = ""  # the latest, as the template wrote it
        self._seen = _Seen()

    def check(self) -> None:
        """Raise ValueError now if the model's template does not take such a conversation."""
        self._render([{"role": "user", "content": "?"}])

    def ask(self, text: str, params: SamplingParams, *, fit: bool = False, attached: List[Attachment] = ()) -> Sequence:
        """`queue` of one answer, which is `record`ed when it is finished."""
        (seq,) = self.queue(text, params, fit=fit, attached=attached)
        return seq

    def queue(
        self, text: str, params: SamplingParams, *, fit: bool = False, attached: List[Attachment] = ()
    ) -> list[Sequence]:
        """Queue the answers to a message. Nothing is remembered of one refused.

        fit: shorten `max_tokens` to the room there is, instead of refusing. attached: pictures and videos, which come
        before the text.
        """
        history = self.messages if self.has_memory else []
        media = [*self._attached, *attached] if self.has_memory else list(attached)
        question = {"role": "user", "content": _content(text, attached)}
        prompt = self._prompt([*history, question], media)
        token_ids = self._continue(prompt)
        room = self.llm.max_model_len - len(token_ids)
        if fit and params.max_tokens is not None and params.max_tokens > room > 0:
            params = replace(params, max_tokens=room)
        if self.allow is not None:
            params = replace(params, allow=self.allow(prompt))
        made = self.llm.add(token_ids, params, media=[each.item for each in media])
        self.messages, self.prompt, self._attached = [*history, question], prompt, media
        return made

    def take_back(self) -> tuple[str, list[Attachment]]:
        """Forget the last message and its answer; its text and what went with it, to be asked again."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ValueError("there is no message to answer again")
        content = self.messages.pop()["content"]
        count = num_attached(content)
        attached = self._attached[len(self._attached) - count :]
        del self._attached[len(self._attached) - count :]
        return _words(content), attached

    def give_back(self, messages: list[dict[str, Any]], attached: List[Attachment]) -> None:
        """Undo `take_back`."""
        self.messages, self._attached = messages, [*self._attached, *attached]

    def restore(self, messages: list[dict[str, Any]], system: str | None) -> None:
        """Go on from other messages, of text alone. ValueError: the model's template does not take them."""
        before = self.messages, self._attached, self.system
        self.messages, self._attached, self.system = list(messages), [], system
        try:
            self._render(messages)
        except ValueError:
            self.messages, self._attached, self.system = before
            raise

    # ---- a full context

    def overflow(self, text: str, attached: List[Attachment], room: int) -> int:
        """How many of the oldest turns are dropped so that the message leaves `room` tokens for its answer; 0: none.

        Where some are, so many go that a quarter of the context is free: each time costs the whole prompt again.
        """
        if not (self.is_chat and self.has_memory and self.messages):
            return 0
        limit = self.llm.max_model_len
        if self._length(0, text, attached) + room <= limit:
            return 0
        turns = sum(message["role"] == "user" for message in self.messages)
        enough = limit - max(room, limit // 4)
        return next((count for count in range(1, turns) if self._length(count, text, attached) <= enough), turns)

    def drop(self, turns: int) -> None:
        """Forget the oldest; a turn is a message and what was answered to it."""
        start = self._start(turns)
        gone = sum(num_attached(message["content"]) for message in self.messages[:start])
        self.messages, self._attached = self.messages[start:], self._attached[gone:]

    def _start(self, turns: int) -> int:
        """Where the messages behind so many turns begin."""
        asked = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        return asked[turns] if turns < len(asked) else len(self.messages)

    def _length(self, turns: int, text: str, attached: List[Attachment]) -> int:
        """Tokens of the prompt that a message would make without the oldest turns."""
        start = self._start(turns)
        gone = sum(num_attached(message["content"]) for message in self.messages[:start])
        question = {"role": "user", "content": _content(text, attached)}
        prompt = self._prompt([*self.messages[start:], question], [*self._attached[gone:], *attached])
        return len(self._continue(prompt))

    def record(self, seq: Sequence) -> None:
        """Remember an answer, whole or stopped."""
        self.messages.append({"role": "assistant", "content": seq.text.value})
        answer = self.tokenizer.decode(seq.output_ids, skip_special=False)
        self._seen = _Seen(self.prompt + answer, tuple(seq.token_ids))

    def forget(self) -> None:
        self.messages, self._attached = [], []

    def _prompt(self, messages: list[dict[str, Any]], media: List[Attachment]) -> str:
        if media and not self.is_chat:
            raise ValueError("pictures and videos are written by the chat template: start with --chat")
        prompt = self._render(messages) if self.is_chat else _words(messages[-1]["content"])
        return expand(prompt, [each.place for each in media]) if media else prompt

    def _render(self, messages: list[dict[str, Any]]) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.tokenizer.apply_chat_template([*system, *messages], enable_thinking=self.enable_thinking)

    def _continue(self, prompt: str) -> list[int]:
        """The ids of a prompt; of an earlier turn those that it was generated with."""
        seen = self._seen
        if seen.text and self.is_chat and prompt.startswith(seen.text):
            rest = self.tokenizer.encode(prompt[len(seen.text) :], add_special=False)
            return [*seen.token_ids, *rest]
        return self.tokenizer.encode(prompt, add_special=not self.is_chat)


def _content(text: str, attached: List[Attachment]) -> str | list[dict[str, str]]:
    """As templates take it: text, or parts."""
    if not attached:
        return text
    return [*({"type": each.item.kind, "name": each.name} for each in attached), {"type": "text", "text": text}]


def num_attached(content: str | list[dict[str, str]]) -> int:
    return 0 if isinstance(content, str) else sum(part["type"] != "text" for part in content)


def _words(content: str | list[dict[str, str]]) -> str:
    """What the user wrote."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def as_text(content: str | list[dict[str, str]]) -> str:
    """For people to read: a picture is its name."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", f"[{part['type']} {part.get('name')}]") for part in content)
