"""Calls that are JSON objects with a name and arguments."""

import json
import re
from typing import Any, ClassVar

from .reader import CallReader, CallWriter, Found, Schemas

STRING = r'"((?:[^"\\]|\\.)*)"'
HEAD_SIZE = 1024  # characters in which a head is looked for: it is looked for again with each token
# Up to the brace that opens the arguments. A call that begins otherwise is read when it is whole.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
    rf'"name"\s*:\s*{STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)',
    re.DOTALL,
)


class Braces:
    """Follows JSON, piece by piece, to the brace that closes its first one, through strings."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._is_string, self._is_escaped = depth, False, False

    def end(self, piece: str) -> int | None:
        """Behind that brace, or at a `<` outside of strings; None: in a later piece."""
        for at, letter in enumerate(piece):
            if self._is_string:
                self._is_string = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
                continue
            self._is_string = letter == '"'
            self._depth += (letter in "{[") - (letter in "}]")
            if letter == "<":
                return at
            if letter in "}]" and self._depth <= 0:
                return at + 1
        return None


class JsonCalls(CallReader):
    """begin, end: around each call. between: two calls. arguments: what that member is called."""

    begin: ClassVar[str] = ""
    end: ClassVar[str] = ""
    between: ClassVar[str] = "\n"
    arguments: ClassVar[str] = "arguments"

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        super().__init__(calls, schemas)
        self._enter("head", Braces())

    def _enter(self, state: str, braces: Braces) -> None:
        self._state, self._braces = state, braces
        self._num_seen = 0  # of text that is held
        self._end: int | None = None

    def read(self, text: str, *, is_last: bool) -> tuple[int, Found]:
        done = 0
        if self._state == "head":
            if (head := _HEAD.match(text[:HEAD_SIZE])) is None:
                return self._whole(text, is_last)
            if not isinstance(name := _load(f'"{head[1]}"'), str):
                return 0, Found.BROKEN
            self.calls.begin(name)
            self._enter("arguments", Braces())
            done = head.end()
        if self._state == "arguments":
            rest = text[done:]
            end = self._braces.end(rest)
            self.calls.add(rest[:end])
            if end is None:
                return len(text), Found.MORE
            self._enter("close", Braces(depth=1))
            done += end
        size, found = self._close(text[done:], is_last)
        return done + size, found

    def _held_end(self, text: str) -> int | None:
        """As `Braces.end`, of a text that is held: it comes again with more behind it, and only that is looked at."""
        if self._end is None and (end := self._braces.end(text[self._num_seen :])) is not None:
            self._end = self._num_seen + end
        self._num_seen = len(text)
        return self._end

    def _whole(self, text: str, is_last: bool) -> tuple[int, Found]:
        if not self.may_be(text[:HEAD_SIZE]):
            return 0, Found.BROKEN
        if (end := self._held_end(text)) is None:
            return 0, Found.MORE
        if (call := self.call(text[:end])) is None:
            return 0, Found.BROKEN
        size, found = self._tag(text[end:], is_last)
        if found is not Found.END:
            return 0, found
        self.calls.begin(call[0])
        self.calls.add(call[1])
        return end + size, Found.END

    def _close(self, text: str, is_last: bool) -> tuple[int, Found]:
        """Behind the arguments: perhaps other members, which mean nothing, a brace and the end tag."""
        if (first := text.lstrip()[:1]) not in ("", ",", "}", "<"):
            return 0, Found.BROKEN
        if (end := self._held_end(text)) is None:
            if not is_last:
                return 0, Found.MORE
            return (0, Found.BROKEN) if first else (len(text), Found.END)
        is_cut = first == "<" and bool(self.end)  # the arguments' own braces are not all there
        if not is_cut and _load('{"":0' + text[:end]) is None:
            return 0, Found.BROKEN
        size, found = self._tag(text[end:], is_last)
        return (0, found) if found is Found.MORE else (end + size, found)

    def _tag(self, text: str, is_last: bool) -> tuple[int, Found]:
        """What follows a call's last brace. A reply that ends there, or in its end tag, needs none."""
        if not self.end:
            return 0, Found.END
        inner = text.lstrip()
        if inner.startswith(self.end):
            return len(text) - len(inner) + len(self.end), Found.END
        if not self.end.startswith(inner):
            return 0, Found.BROKEN
        return (len(text), Found.END) if is_last else (0, Found.MORE)

    def may_be(self, text: str) -> bool:
        """Whether a call may begin so."""
        return text.lstrip()[:1] in ("", "{")

    def call(self, body: str) -> tuple[str, str] | None:
        """The name and the arguments in a whole object; None: it is no call."""
        found = _load(body)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        return found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _load(text: str) -> Any:
    """None: not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
