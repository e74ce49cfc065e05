"""What every form of tool calls shares: calls that come out piece by piece, and a reader of the markup around them."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

Schemas = Mapping[str, Mapping[str, Any]]  # of the parameters of each tool, by its name


@dataclass(slots=True)
class CallPart:
    """What is new of a call; its first part has the name and the id. arguments: JSON, to be joined."""

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


class CallWriter:
    """The calls of one reply as they are read. is_parallel: False drops all but the first."""

    def __init__(self, *, is_parallel: bool = True) -> None:
        self._is_parallel, self._is_dropped = is_parallel, False
        self._parts: list[CallPart] = []
        self.num_calls = 0

    def begin(self, name: str) -> None:
        self._is_dropped = bool(self.num_calls) and not self._is_parallel
        if not self._is_dropped:
            self._parts.append(CallPart(self.num_calls, name=name, id=f"call_{uuid.uuid4().hex[:24]}"))
            self.num_calls += 1

    def add(self, arguments: str) -> None:
        """More of the arguments of the call begun last."""
        if self._is_dropped or not arguments:
            return
        if not self._parts:
            self._parts.append(CallPart(self.num_calls - 1))
        self._parts[-1].arguments += arguments

    def take(self) -> list[CallPart]:
        parts, self._parts = self._parts, []
        return parts


class Found(Enum):
    """Of a text that was read: it may go on; the markup is whole; what is left is no markup."""

    MORE = "more"
    END = "end"
    BROKEN = "broken"


class CallReader(ABC):
    """Reads one stretch of markup, from behind its opening tag to its end.

    tags: what opens such a stretch in a reply. is_bare: a `{` that a reply begins with opens one, too. marks: what in
    a chat template tells that the model was taught this form.
    """

    tags: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]
    is_bare: ClassVar[bool] = False

    def __init__(self, calls: CallWriter, schemas: Schemas) -> None:
        self.calls, self.schemas = calls, schemas

    @abstractmethod
    def read(self, text: str, *, is_last: bool) -> tuple[int, Found]:
        """How many characters of the text are done with, and what the rest is.

        What is not done with is given again with more behind it; is_last: nothing more comes. Nothing is done with
        before a call's name is certain: until then all of the markup may turn out to be text. Which calls are found
        must not depend on where the text is cut.
        """


def num_held(text: str, tags: tuple[str, ...]) -> int:
    """Length of the end of the text that may be the beginning of one of the tags."""
    longest = max(map(len, tags), default=0)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags)), 0)
