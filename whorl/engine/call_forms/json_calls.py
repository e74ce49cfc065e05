"""Tool calls that are JSON objects with a name and arguments."""

import json
import re
from typing import Any, ClassVar

from .reader import CallReader, CallWriter, ReadStatus, Schemas

STRING = r'"((?:[^"\\]|\\.)*)"'
HEAD_SIZE = 1024  # characters that are searched for a head, because the search is repeated with each token
# The head: everything up to the brace that opens the arguments. A call without such a head is read when complete.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'"name"\s*:\s*{STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)',
    re.DOTALL,
)


class Braces:
    """Finds, in JSON that comes in pieces, the brace that closes the first one; braces in strings do not count."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._is_string, self._is_escaped = depth, False, False

    def end(self, piece: str) -> int | None:
        """Return the index after that brace, or of a `<` outside of strings; None if it is in a later piece."""
        for i, letter in enumerate(piece):
            if self._is_string:
                self._is_string = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
                continue
            self._is_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if letter == "<":
                return i
            if letter in "}]" and self._depth <= 0:
                return i + 1
        return None


class JsonCalls(CallReader):
    """Reads JSON calls. begin, end: the tags around a call; between: the separator of two calls; arguments: the name of
    the member that holds the arguments."""

    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""
    between: ClassVar[str] = "\n"
    arguments: ClassVar[str] = "arguments"

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        super().__init__(calls, schemas)
        self._enter("head", Braces())

    def _enter(self, state: str, braces: Braces) -> None:
        self._state, self._braces = state, braces
        self._num_seen = 0  # characters of the pending text that have been searched
        self._end: int | None = None

    def read(self, text: str, *, is_last: bool) -> tuple[int, ReadStatus]:
        done = 0
        if self._state == "head":
            if (head := _HEAD.match(text[:HEAD_SIZE])) is None:
                return self._complete(text, is_last)
            if not isinstance(name := _load(f'"{head[1]}"'), str):
                return 0, ReadStatus.BROKEN
            self.calls.begin(name)
            self._enter("arguments", Braces())
            done = head.end()
        if self._state == "arguments":
            unread = text[done:]
            end = self._braces.end(unread)
            self.calls.add(unread[:end])
            if end is None:
                return len(text), ReadStatus.MORE
            self._enter("close", Braces(depth=1))
            done += end
        size, status = self._close(text[done:], is_last)
        return done + size, status

    def _pending_end(self, text: str) -> int | None:
        """Like `Braces.end`, for pending text, which is passed again with more text after it: only that is searched."""
        if self._end is None and (end := self._braces.end(text[self._num_seen :])) is not None:
            self._end = self._num_seen + end
        self._num_seen = len(text)
        return self._end

    def _complete(self, text: str, is_last: bool) -> tuple[int, ReadStatus]:
        """Read a call whose text does not match `_HEAD`; nothing is consumed before all of it has arrived."""
        if not self.may_be(text[:HEAD_SIZE]):
            return 0, ReadStatus.BROKEN
        if (end := self._pending_end(text)) is None:
            return 0, ReadStatus.MORE
        if (call := self.call(text[:end])) is None:
            return 0, ReadStatus.BROKEN
        size, status = self._tag(text[end:], is_last)
        if status is not ReadStatus.END:
            return 0, status
        self.calls.begin(call[0])
        self.calls.add(call[1])
        return end + size, ReadStatus.END

    def _close(self, text: str, is_last: bool) -> tuple[int, ReadStatus]:
        """Read what follows the arguments: perhaps other members, which are ignored, a brace and the end tag."""
        if (first := text.lstrip()[:1]) not in ("", ",", "}", "<"):
            return 0, ReadStatus.BROKEN
        if (end := self._pending_end(text)) is None:
            if not is_last:
                return 0, ReadStatus.MORE
            return (0, ReadStatus.BROKEN) if first else (len(text), ReadStatus.END)
        is_cut = first == "<" and bool(self.end)  # the closing braces of the arguments are missing
        if not is_cut and _load('{"":0' + text[:end]) is None:
            return 0, ReadStatus.BROKEN
        size, status = self._tag(text[end:], is_last)
        return (0, status) if status is ReadStatus.MORE else (end + size, status)

    def _tag(self, text: str, is_last: bool) -> tuple[int, ReadStatus]:
        """Read the end tag after a call's last brace. A reply that ends there, or inside of the tag, needs none."""
        if not self.end:
            return 0, ReadStatus.END
        inner = text.lstrip()
        if inner.startswith(self.end):
            return len(text) - len(inner) + len(self.end), ReadStatus.END
        if not self.end.startswith(inner):
            return 0, ReadStatus.BROKEN
        return (len(text), ReadStatus.END) if is_last else (0, ReadStatus.MORE)

    def may_be(self, text: str) -> bool:
        """Return whether a call may begin with this text."""
        return text.lstrip()[:1] in ("", "{")

    def call(self, body: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a complete object; None if it is no call."""
        call = _load(body)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _load(text: str) -> Any:
    """Return the parsed value; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class HermesCalls(JsonCalls):
    """Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

    begin, end = "<tool_call>\n", "</tool_call>"
    tags = ("<tool_call>",)
    marks = ("<tool_call>",)


# ---- Llama 3

_PYTHON_TAG = "<|python_tag|>"
_NAMES = ("type", "name", "arguments", "parameters")
_FIRST = re.compile(rf"\s*\{{\s*{STRING}", re.DOTALL)
_SECOND = re.compile(rf"\s*\{{\s*{STRING}\s*:\s*{STRING}\s*,\s*{STRING}", re.DOTALL)


class _OneCall(JsonCalls):
    tags = marks = ()

    def may_be(self, text: str) -> bool:
        """Return whether the text may be a call: the first names of an answer in JSON are usually others."""
        matches = [pattern.match(text[:HEAD_SIZE]) for pattern in (_FIRST, _SECOND)]
        names = [match.groups()[-1] for match in matches if match is not None]
        return super().may_be(text) and all(name in _NAMES for name in names)

    def call(self, body: str) -> tuple[str, str] | None:
        """Return the call; None for an object without parameters, which may be anything."""
        return super().call(body) if '"parameters"' in body or '"arguments"' in body else None


class LlamaCalls(JsonCalls):
    """Tool calls of Llama 3.1 to 3.3: a reply that is a JSON object with name and parameters, or several separated by
    `;`. `<|python_tag|>` may precede it; in most vocabularies it is a special token and has no text."""

    between, arguments = "; ", "parameters"
    tags = (_PYTHON_TAG,)
    marks = (_PYTHON_TAG, '"parameters": dictionary of argument name')
    is_bare = True

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        super().__init__(calls, schemas)
        self._one, self._is_between = _OneCall(calls, schemas), False

    def read(self, text: str, *, is_last: bool) -> tuple[int, ReadStatus]:
        done = 0
        while True:
            # The separator is consumed only once the text after it is certain to be a call.
            skipped = self._skip(text[done:], is_last) if self._is_between else 0
            if not isinstance(skipped, int):
                return done, skipped
            size, status = self._one.read(text[done + skipped :], is_last=is_last)
            if size:
                done, self._is_between = done + skipped + size, False
            if status is not ReadStatus.END:
                return done, status
            self._one, self._is_between = _OneCall(self.calls, self.schemas), True

    def _skip(self, text: str, is_last: bool) -> int | ReadStatus:
        """Return the length of the separator before the next call; END if none follows, MORE if that is uncertain."""
        separator = text.lstrip()
        if separator.startswith(";") and separator[1:].lstrip().startswith("{"):
            return text.index("{")
        may_come = not separator or (separator.startswith(";") and not separator[1:].strip())
        return ReadStatus.MORE if may_come and not is_last else ReadStatus.END
