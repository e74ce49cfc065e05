"""A conversation with memory, whose turns reuse the token ids, and so the cached KV blocks, of the turns before."""

import weakref
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from whorl.engine.sequence import SamplingParams, Sequence
from whorl.engine.tokenizer import Tokenizer
from whorl.media import expand
from whorl.serve.api_error import ApiError
from whorl.serve.worker import JOB_MEMORY, JOB_SECONDS
from whorl.serve.worker_pool import Worker

from .attachments import Attachment

if TYPE_CHECKING:
    from whorl.engine.llm import LLM

_MOST_TOKENS = 1 << 40  # the engine compares prompts with its context, and the conversation may drop turns before


class Prompts(Protocol):
    """Writes and tokenizes prompts, as a `Tokenizer` does."""

    def apply_chat_template(self, messages: abc.Sequence[Any], *, enable_thinking: bool | None = None) -> str: ...
    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


class BoundedPrompts:
    """Writes and tokenizes prompts in a worker of the server, with its limits on a job's CPU time and memory: a model's
    chat template and tokenizer are not trusted.

    Raises ValueError when the template or the tokenizer refuses a prompt or exceeds a limit.
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float = JOB_SECONDS, memory: int = JOB_MEMORY) -> None:
        state = {"tokenizer": tokenizer.state(), "vocab_size": len(tokenizer)}
        self._worker = Worker(state | {"seconds": seconds, "memory": memory})
        self.close = weakref.finalize(self, self._worker.end)  # ends the process

    def apply_chat_template(self, messages: abc.Sequence[Any], *, enable_thinking: bool | None = None) -> str:
        variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        options = {"tools": None, "add_generation_prompt": True, "variables": variables}
        return str(self._ask("the model's chat template", "write_prompt", messages=list(messages), **options))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        text.encode()  # raises for half a surrogate pair, which JSON would pass on
        limits = {"max_bytes": None, "max_tokens": _MOST_TOKENS}
        ids = self._ask("the model's tokenizer", "encode", texts=[text], add_special=add_special, **limits)
        return list(ids[0])

    def _ask(self, subject: str, job: str, **arguments: Any) -> Any:
        try:
            return self._worker.ask(job, **arguments)
        except ApiError as error:
            raise ValueError(f"{subject}: {error.message}") from error
        except BaseException:  # Ctrl-C: the answer to this job must not be taken for that to the next one
            self._worker.end()
            raise


@dataclass(frozen=True, slots=True)
class _Seen:
    """The text and the token ids of the last turn's sequence, prompt and answer together, special tokens included."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


class Conversation:
    """The messages of a conversation, and the tokens of its last turn.

    If the text of the next prompt begins with the text of the last turn, it reuses the ids of that turn, so that
    answers keep the tokens that they were generated with and their cached blocks. If the template rewrites history, as
    Qwen3's drops earlier reasoning, the prompt is tokenized anew, and the prefix cache has its blocks up to the change.
    is_chat: apply the chat template; False: each text is a prompt by itself. has_memory: False: each message starts a
    new conversation. enable_thinking: None: the template's default. allow: returns the `SamplingParams.allow` for a
    prompt's text. prompts: writes and tokenizes prompts; None: the model's tokenizer, in this process.
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        system: str | None = None,
        is_chat: bool = True,
        has_memory: bool = True,
        enable_thinking: bool | None = None,
        allow: Callable[[str], Any] | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        assert isinstance(llm.tokenizer, Tokenizer)
        self.llm, self.tokenizer, self.is_chat = llm, llm.tokenizer, is_chat
        self.system, self.has_memory, self.enable_thinking = system, has_memory, enable_thinking
        self.allow = allow
        self._prompts: Prompts = prompts or llm.tokenizer
        self.messages: list[dict[str, Any]] = []
        self._attached: list[Attachment] = []  # of all messages, in their order
        self.prompt = ""  # the latest one, as the template rendered it
        self._seen = _Seen()

    def check(self) -> None:
        """Raise ValueError if the model's template does not accept such a conversation."""
        self._render([{"role": "user", "content": "?"}])

    def ask(
        self, text: str, params: SamplingParams, *, fit: bool = False, attached: abc.Sequence[Attachment] = ()
    ) -> Sequence:
        """Queue one answer to a message; call `record` when it is finished. Arguments: as `queue`."""
        (seq,) = self.queue(text, params, fit=fit, attached=attached)
        return seq

    def queue(
        self, text: str, params: SamplingParams, *, fit: bool = False, attached: abc.Sequence[Attachment] = ()
    ) -> list[Sequence]:
        """Queue the answers to a message. A message that is refused with ValueError is not remembered.

        fit: reduce `max_tokens` to the room that is left in the context, instead of refusing. attached: pictures and
        videos, which come before the text.
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
        sequences = self.llm.add(token_ids, params, media=[attachment.item for attachment in media])
        self.messages, self.prompt, self._attached = [*history, question], prompt, media
        return sequences

    def remove_last_turn(self) -> tuple[str, list[Attachment]]:
        """Forget the last message and its answer; return the message's text and attachments."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise ValueError("there is no message to answer again")
        content = self.messages.pop()["content"]
        count = num_attached(content)
        attached = self._attached[len(self._attached) - count :]
        del self._attached[len(self._attached) - count :]
        return _user_text(content), attached

    def put_back(self, messages: list[dict[str, Any]], attached: abc.Sequence[Attachment]) -> None:
        """Undo `remove_last_turn`. messages: as they were before it."""
        self.messages, self._attached = messages, [*self._attached, *attached]

    def restore(self, messages: list[dict[str, Any]], system: str | None) -> None:
        """Replace the conversation by other messages, which have no attachments.

        Raises ValueError, and changes nothing, if the model's template does not accept them.
        """
        previous = self.messages, self._attached, self.system
        self.messages, self._attached, self.system = list(messages), [], system
        try:
            self._render(messages)
        except ValueError:
            self.messages, self._attached, self.system = previous
            raise

    # ---- a full context

    def overflow(self, text: str, attached: abc.Sequence[Attachment], room: int) -> int:
        """Return how many of the oldest turns must go so that the message leaves `room` tokens for its answer.

        0: it fits. Otherwise so many turns that a quarter of the context is free, as each time the whole prompt must be
        prefilled again.
        """
        if not (self.is_chat and self.has_memory and self.messages):
            return 0
        limit = self.llm.max_model_len
        if self._length(0, text, attached) + room <= limit:
            return 0
        turns = sum(message["role"] == "user" for message in self.messages)
        target = limit - max(room, limit // 4)
        return next((count for count in range(1, turns) if self._length(count, text, attached) <= target), turns)

    def drop(self, turns: int) -> None:
        """Forget the oldest turns; a turn is a message and its answer."""
        start = self._start(turns)
        num_dropped = sum(num_attached(message["content"]) for message in self.messages[:start])
        self.messages, self._attached = self.messages[start:], self._attached[num_dropped:]

    def _start(self, turns: int) -> int:
        """Return the index of the first message after so many turns."""
        questions = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        return questions[turns] if turns < len(questions) else len(self.messages)

    def _length(self, turns: int, text: str, attached: abc.Sequence[Attachment]) -> int:
        """Return the number of prompt tokens for a message if the oldest turns were dropped."""
        start = self._start(turns)
        num_dropped = sum(num_attached(message["content"]) for message in self.messages[:start])
        question = {"role": "user", "content": _content(text, attached)}
        prompt = self._prompt([*self.messages[start:], question], [*self._attached[num_dropped:], *attached])
        return len(self._continue(prompt))

    def record(self, seq: Sequence) -> None:
        """Remember an answer, finished or stopped."""
        self.messages.append({"role": "assistant", "content": seq.text.value})
        answer = self.tokenizer.decode(seq.output_ids, skip_special=False)
        self._seen = _Seen(self.prompt + answer, tuple(seq.token_ids))

    def forget(self) -> None:
        self.messages, self._attached = [], []

    def _prompt(self, messages: list[dict[str, Any]], media: abc.Sequence[Attachment]) -> str:
        if media and not self.is_chat:
            raise ValueError("pictures and videos need the chat template: start with --chat")
        prompt = self._render(messages) if self.is_chat else _user_text(messages[-1]["content"])
        places = [attachment.place for attachment in media]
        return expand(prompt, places, places[0].family) if places else prompt

    def _render(self, messages: list[dict[str, Any]]) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._prompts.apply_chat_template([*system, *messages], enable_thinking=self.enable_thinking)

    def _continue(self, prompt: str) -> list[int]:
        """Tokenize a prompt, reusing the ids of the last turn if the prompt begins with its text."""
        seen = self._seen
        if seen.text and self.is_chat and prompt.startswith(seen.text):
            new_ids = self._prompts.encode(prompt[len(seen.text) :], add_special=False)
            return [*seen.token_ids, *new_ids]
        return self._prompts.encode(prompt, add_special=not self.is_chat)


def _content(text: str, attached: abc.Sequence[Attachment]) -> str | list[dict[str, str]]:
    """Return a message's content as templates take it: text, or parts if there are attachments."""
    if not attached:
        return text
    return [*({"type": a.item.kind, "name": a.name} for a in attached), {"type": "text", "text": text}]


def num_attached(content: str | list[dict[str, str]]) -> int:
    """Return the number of attachments of a message."""
    return 0 if isinstance(content, str) else sum(part["type"] != "text" for part in content)


def _user_text(content: str | list[dict[str, str]]) -> str:
    """Return the text of a message without its attachments."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def as_text(content: str | list[dict[str, str]]) -> str:
    """Return a message's content for people to read, with names in place of pictures."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", f"[{part['type']} {part.get('name')}]") for part in content)
