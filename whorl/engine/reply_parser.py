"""Split a reply into reasoning between <think> tags, tool calls in the model's form, and content.

The forms are in `call_forms`. The reply is parsed while it is generated, by these rules; only white space is lost:

- Text that may be the beginning of a tag is held back until it is certain.
- Markup in which no call's name can be read is content, all of it, as the model wrote it.
- Once its name is read, a call is a call, and its arguments are output as they are written. Markup that breaks later
  leaves the call as it is, with incomplete arguments, and the text after it is content.
- White space next to a tag is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .call_forms import CallPart, CallReader, CallWriter, ReadStatus, Schemas, num_held

THINK, END_THINK = "<think>", "</think>"
# Names of the one form of reasoning: ours, and those of vLLM for its models.
REASONING = ("think", "qwen3", "glm45", "deepseek_r1", "deepseek_v3", "deepseek_v32")


@dataclass(slots=True)
class Call:
    """A tool call."""

    name: str
    arguments: str  # JSON, if the model writes valid JSON
    id: str


@dataclass(slots=True)
class Parts:
    """The new parts of a reply, or, after `join`, all parts."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def join(self, more: "Parts") -> None:
        """Append later parts."""
        self.reasoning += more.reasoning
        self.content += more.content
        self.calls += more.calls

    def whole_calls(self) -> list[Call]:
        """Return the calls, each joined from its parts."""
        calls: dict[int, Call] = {}
        for part in self.calls:
            if part.name is not None and part.id is not None:
                calls[part.index] = Call(part.name, "", part.id)
            calls[part.index].arguments += part.arguments
        return list(calls.values())


class ReplyParser:
    """Parses a reply as it grows; the joined parts are the same however the text is split.

    may_think: parse think tags. is_thinking: the prompt has opened one. form: of tool calls; None: do not parse them.
    schemas: of the tools. is_parallel: False drops all calls but the first.
    """

    def __init__(
        self,
        *,
        may_think: bool,
        is_thinking: bool,
        form: type[CallReader] | None = None,
        schemas: Schemas | None = None,
        is_parallel: bool = True,
    ) -> None:
        self._form, self._schemas = form, schemas or {}
        self._tags = () if form is None else form.tags
        self._is_bare = form is not None and form.is_bare  # while there is no content yet, a brace may open a call
        self._calls = CallWriter(is_parallel=is_parallel)
        self._reader: CallReader | None = None
        # text: what is not parsed yet. pending: the opening tag before it, which is content if no call follows.
        self._text = self._pending = ""
        self._is_after_tag = False
        self._step: Callable[[Parts, bool], bool] = self._content
        if may_think:
            self._step = self._thinking if is_thinking else self._start
            self._is_after_tag = is_thinking

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def add(self, text: str, *, is_last: bool = False) -> Parts:
        """Add text and return the new parts. is_last: there is no more text."""
        self._text += text
        parts = Parts()
        while self._step(parts, is_last):
            pass
        parts.calls = self._calls.take()
        return parts

    # Each of the following steps returns whether the present text may allow another step.

    def _start(self, parts: Parts, is_last: bool) -> bool:
        """Decide whether the reply begins with a think tag; until then all text is held back."""
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text = text[len(THINK) :]
            return self._enter(self._thinking)
        if THINK.startswith(text) and not is_last:
            return False
        self._step = self._content
        return True

    def _thinking(self, parts: Parts, is_last: bool) -> bool:
        text, tag = self._until((END_THINK,), is_last)
        parts.reasoning += text
        self._pending = ""
        return self._enter(self._content) if tag else False

    def _content(self, parts: Parts, is_last: bool) -> bool:
        if self._is_bare and (opens := self._opens_bare(is_last)) is not False:
            return bool(opens)
        text, tag = self._until(self._tags, is_last)
        parts.content += text
        return self._open() if tag else False

    def _opens_bare(self, is_last: bool) -> bool | None:
        """Return whether the reply begins with a brace, which then opens a call; None if that is not certain yet."""
        text = self._text.lstrip()
        if not text and not is_last:
            return None
        self._is_bare = False
        if not text.startswith("{"):
            return False
        self._pending, self._text = self._text[: len(self._text) - len(text)], text
        return self._open()

    def _open(self) -> bool:
        assert self._form is not None
        self._reader, self._step = self._form(self._calls, self._schemas), self._call
        return True

    def _call(self, parts: Parts, is_last: bool) -> bool:
        """Let the form's reader take text; markup that turns out not to be a call becomes content, tag included."""
        assert self._reader is not None
        size, status = self._reader.read(self._text, is_last=is_last)
        if size:
            self._text, self._pending = self._text[size:], ""
        if status is ReadStatus.END:
            return self._enter(self._content)
        if status is ReadStatus.MORE and not is_last:
            return False
        parts.content += self._pending
        self._pending, self._step = "", self._content
        return True

    def _enter(self, step: Callable[[Parts, bool], bool]) -> bool:
        self._step, self._is_after_tag = step, True
        return True

    def _until(self, tags: tuple[str, ...], is_last: bool) -> tuple[str, bool]:
        """Take the text up to the first of the tags, or as much of it as is certain to be before one; return it and
        whether a tag followed, which is then in `_pending` with the white space before it."""
        if self._is_after_tag:
            self._text = self._text.lstrip()
            self._is_after_tag = not self._text
        matches = [(start, tag) for tag in tags if (start := self._text.find(tag)) >= 0]
        if matches:
            start, tag = min(matches)
            text, after = self._text[:start].rstrip(), self._text[start + len(tag) :]
            self._pending, self._text = self._text[len(text) : start + len(tag)], after
            return text, True
        if is_last or not tags:
            end = len(self._text)
        else:
            end = len(self._text[: len(self._text) - num_held(self._text, tags)].rstrip())
        text, self._text = self._text[:end], self._text[end:]
        return text, False
