"""What is inside a reply: thinking between <think> tags, tool calls in the model's own form, and the rest.

The forms are in `call_forms`. Nothing that may be markup comes out before it is known what it is, and nothing is lost:

- Text that may be the beginning of a tag is held until it is one or is none.
- Markup in which no call's name can be read is text, all of it, as the model wrote it.
- From its name on a call is a call, and its arguments come as they are written. Markup that breaks further on leaves
  the call as it is, with arguments that are not whole, and the rest is text.
- White space next to a tag is dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .call_forms import CallPart, CallReader, CallWriter, Found, Schemas, num_held

THINK, END_THINK = "<think>", "</think>"
# What the one form of thinking is called: by us, and by vLLM for its models.
REASONING = ("think", "qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v32")


@dataclass(slots=True)
class Call:
    name: str
    arguments: str  # JSON, where the model writes JSON
    id: str


@dataclass(slots=True)
class Parts:
    """What is new, or, of parts that were joined, all there is."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def join(self, more: "Parts") -> None:
        self.reasoning += more.reasoning
        self.content += more.content
        self.calls += more.calls

    def whole_calls(self) -> list[Call]:
        found: dict[int, Call] = {}
        for part in self.calls:
            if part.name is not None and part.id is not None:
                found[part.index] = Call(part.name, "", part.id)
            found[part.index].arguments += part.arguments
        return list(found.values())


class ReplyParser:
    """Takes a reply apart as it grows; what comes out joins to the same, however the text is cut.

    may_think: think tags are told apart. is_thinking: the prompt has opened one. form: of tool calls; None: there are
    none. schemas: of the tools. is_parallel: False keeps the first call alone.
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
        self._is_bare = form is not None and form.is_bare  # a brace may open a call: nothing was said before
        self._calls = CallWriter(is_parallel=is_parallel)
        self._reader: CallReader | None = None
        self._text = self._held = ""  # held: the tag in front of the text and the white space before it
        self._is_after_tag = False
        self._step: Callable[[Parts, bool], bool] = self._content
        if may_think:
            self._step = self._thinking if is_thinking else self._start
            self._is_after_tag = is_thinking

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def add(self, text: str, *, is_last: bool = False) -> Parts:
        self._text += text
        parts = Parts()
        while self._step(parts, is_last):
            pass
        parts.calls = self._calls.take()
        return parts

    # Each step says whether there may be more to do with the text at hand.

    def _start(self, parts: Parts, is_last: bool) -> bool:
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
        self._held = ""
        return self._enter(self._content) if tag else False

    def _content(self, parts: Parts, is_last: bool) -> bool:
        if self._is_bare and (opens := self._opens_bare(is_last)) is not False:
            return bool(opens)
        text, tag = self._until(self._tags, is_last)
        parts.content += text
        return self._open() if tag else False

    def _opens_bare(self, is_last: bool) -> bool | None:
        """Whether the reply begins with a brace, which then opens a call; None: that cannot be seen yet."""
        text = self._text.lstrip()
        if not text and not is_last:
            return None
        self._is_bare = False
        if not text.startswith("{"):
            return False
        self._held, self._text = self._text[: len(self._text) - len(text)], text
        return self._open()

    def _open(self) -> bool:
        assert self._form is not None
        self._reader, self._step = self._form(self._calls, self._schemas), self._call
        return True

    def _call(self, parts: Parts, is_last: bool) -> bool:
        assert self._reader is not None
        size, found = self._reader.read(self._text, is_last=is_last)
        if size:
            self._text, self._held = self._text[size:], ""
        if found is Found.END:
            return self._enter(self._content)
        if found is Found.MORE and not is_last:
            return False
        parts.content += self._held
        self._held, self._step = "", self._content
        return True

    def _enter(self, step: Callable[[Parts, bool], bool]) -> bool:
        self._step, self._is_after_tag = step, True
        return True

    def _until(self, tags: tuple[str, ...], is_last: bool) -> tuple[str, bool]:
        """The text that is certain to come before one of the tags, and whether one was there, which is then held."""
        if self._is_after_tag:
            self._text = self._text.lstrip()
            self._is_after_tag = not self._text
        found = [(at, tag) for tag in tags if (at := self._text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            text, rest = self._text[:at].rstrip(), self._text[at + len(tag) :]
            self._held, self._text = self._text[len(text) : at + len(tag)], rest
            return text, True
        if is_last or not tags:
            end = len(self._text)
        else:
            end = len(self._text[: len(self._text) - num_held(self._text, tags)].rstrip())
        text, self._text = self._text[:end], self._text[end:]
        return text, False
