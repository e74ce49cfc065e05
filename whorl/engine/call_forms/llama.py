"""Tool calls of Llama 3.1 to 3.3: a reply that is a JSON object with name and parameters, or several separated by `;`.

`<|python_tag|>` may precede it; in most vocabularies it is a special token and has no text.
"""

import re

from .json_calls import HEAD_SIZE, STRING, JsonCalls
from .reader import CallWriter, ReadStatus, Schemas

_TAG = "<|python_tag|>"
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
    between, arguments = "; ", "parameters"
    tags = (_TAG,)
    marks = (_TAG, '"parameters": dictionary of argument name')
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
