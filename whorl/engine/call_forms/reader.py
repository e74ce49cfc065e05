"""The base of all forms of tool calls: calls that are output piece by piece, and a reader of their markup."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters of each tool, by tool name


@dataclass(slots=True)
class CallPart:
    """New text of a call; its first part has the name and the id. arguments: a piece of JSON; the pieces are joined."""

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


class CallWriter:
    """Collects the calls of one reply as they are read. is_parallel: False drops all calls but the first."""

    def __init__(self, *, is_parallel: bool = True) -> None:
        self._is_parallel, self._is_dropped = is_parallel, False
        self._parts: list[CallPart] = []
        self.num_calls = 0

    def begin(self, name: str) -> None:
        """Begin a call."""
        self._is_dropped = bool(self.num_calls) and not self._is_parallel
        if not self._is_dropped:
            self._parts.append(CallPart(self.num_calls, name=name, id=f"call_{uuid.uuid4().hex[:24]}"))
            self.num_calls += 1

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call begun last."""
        if self._is_dropped or not arguments:
            return
        if not self._parts:
            self._parts.append(CallPart(self.num_calls - 1))
        self._parts[-1].arguments += arguments

    def take(self) -> list[CallPart]:
        """Return the parts since the last call of this method."""
        parts, self._parts = self._parts, []
        return parts


class ReadStatus(Enum):
    """State after reading a text: MORE text is needed; the markup has reached its END; it is BROKEN, so it is text."""

    MORE = "more"
    END = "end"
    BROKEN = "broken"


class CallReader(ABC):
    """Reads one section of markup, from after its opening tag to its end.

    tags: the tags that open a section in a reply. is_bare: a `{` at the start of a reply opens one as well. marks:
    strings in a chat template that show that the model was trained on this form.
    """

    tags: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]
    is_bare: ClassVar[bool] = False

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        self.calls, self.schemas = calls, schemas

    @abstractmethod
    def read(self, text: str, *, is_last: bool) -> tuple[int, ReadStatus]:
        """Return how many characters of the text are consumed, and the status of the others.

        The others are passed again, with more text after them; is_last: there is no more text. Nothing may be consumed
        before a call's name is certain: until then the markup may turn out to be plain text. The calls must not depend
        on where the text is split.
        """


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """Return the length of the end of the text that may be the beginning of one of the tags."""
    longest = max(map(len, tags), default=0)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags)), 0)
