"""A chat with memory: which tokens the next turn starts from, and which of them the cache still holds."""

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
    thinking, ids are reused up to the change. Without `is_chat` each text is a prompt by itself.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None = None,
        is_chat: bool = True,
        has_memory: bool = True,
        enable_thinking: bool | None = None,
    ) -> None:
        assert isinstance(llm.tokenizer, Tokenizer)
        self.llm, self.tokenizer, self.is_chat = llm, llm.tokenizer, is_chat
        self.system, self.has_memory, self.enable_thinking = system, has_memory, enable_thinking
        self.messages: list[dict[str, Any]] = []
        self._attached: list[Attachment] = []  # to the messages, in their order
        self.prompt = ""  # the latest, as the template wrote it
        self._seen = _Seen()

    def check(self) -> None:
        """Raise ValueError now if the model's template does not take such a conversation."""
        self._render([{"role": "user", "content": "?"}])

    def ask(self, text: str, params: SamplingParams, *, fit: bool = False, attached: List[Attachment] = ()) -> Sequence:
        """Queue the answer to a message; `record` it when it is finished. Nothing is remembered of one refused.

        fit: shorten `max_tokens` to the room there is, instead of refusing. attached: pictures and videos, which come
        before the text.
        """
        history = self.messages if self.has_memory else []
        media = [*self._attached, *attached] if self.has_memory else list(attached)
        if media and not self.is_chat:
            raise ValueError("pictures and videos are written by the chat template: start with --chat")
        question = {"role": "user", "content": _content(text, attached)}
        prompt = self._render([*history, question]) if self.is_chat else text
        if media:
            prompt = expand(prompt, [each.place for each in media])
        token_ids = self._continue(prompt)
        room = self.llm.max_model_len - len(token_ids)
        if fit and params.max_tokens is not None and params.max_tokens > room > 0:
            params = replace(params, max_tokens=room)
        (seq,) = self.llm.add(token_ids, params, media=[each.item for each in media])
        self.messages, self.prompt, self._attached = [*history, question], prompt, media
        return seq

    def record(self, seq: Sequence) -> None:
        """Remember an answer, whole or stopped."""
        self.messages.append({"role": "assistant", "content": seq.text.value})
        answer = self.tokenizer.decode(seq.output_ids, skip_special=False)
        self._seen = _Seen(self.prompt + answer, tuple(seq.token_ids))

    def forget(self) -> None:
        self.messages, self._attached = [], []

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


def as_text(content: str | list[dict[str, str]]) -> str:
    """For people to read: a picture is its name."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", f"[{part['type']} {part.get('name')}]") for part in content)
