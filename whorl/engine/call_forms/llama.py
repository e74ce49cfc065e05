"""Calls of Llama 3.1 to 3.3: a reply that is a JSON object with name and parameters, or several with `;` between.

`<|python_tag|>` may stand before it; in most vocabularies it is a special token and has no text.
"""

import re

from .json_calls import HEAD_SIZE, STRING, JsonCalls
from .reader import CallWriter, Found, Schemas

_TAG = "<|python_tag|>"
_NAMES = ("type", "name", "arguments", "parameters")
_FIRST = re.compile(rf"\s*\{{\s*{STRING}", re.DOTALL)
_SECOND = re.compile(rf"\s*\{{\s*{STRING}\s*:\s*{STRING}\s*,\s*{STRING}", re.DOTALL)


class _OneCall(JsonCalls):
    tags = marks = ()

    def may_be(self, text: str) -> bool:
        """An answer in JSON is soon told from a call: by its first names."""
        found = [pattern.match(text[:HEAD_SIZE]) for pattern in (_FIRST, _SECOND)]
        names = [match.groups()[-1] for match in found if match is not None]
        return super().may_be(text) and all(name in _NAMES for name in names)

    def call(self, body: str) -> tuple[str, str] | None:
        """An object without parameters may be anything."""
        return super().call(body) if '"parameters"' in body or '"arguments"' in body else None


class LlamaCalls(JsonCalls):
    between, arguments = "; ", "parameters"
    tags = (_TAG,)
    marks = (_TAG, '"parameters": dictionary of argument name')
    is_bare = True

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        super().__init__(calls, schemas)
        self._one, self._is_between = _OneCall(calls, schemas), False

    def read(self, text: str, *, is_last: bool) -> tuple[int, Found]:
        done = 0
        while True:
            # The separator is not done with before the call behind it is one.
            skipped = self._skip(text[done:], is_last) if self._is_between else 0
            if not isinstance(skipped, int):
                return done, skipped
            size, found = self._one.read(text[done + skipped :], is_last=is_last)
            if size:
                done, self._is_between = done + skipped + size, False
            if found is not Found.END:
                return done, found
            self._one, self._is_between = _OneCall(self.calls, self.schemas), True

    def _skip(self, text: str, is_last: bool) -> int | Found:
        """Length of what lies between a call and the next; or that there is none, or that none can be seen yet."""
        rest = text.lstrip()
        if rest.startswith(";") and rest[1:].lstrip().startswith("{"):
            return text.index("{")
        may_come = not rest or (rest.startswith(";") and not rest[1:].strip())
        return Found.MORE if may_come and not is_last else Found.END
