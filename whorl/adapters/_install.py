"""The record of an installation: which attributes were replaced and why, and how they are restored."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

# Set on every owner while one of its attributes is replaced, so that a second installation is detected and refused.
_MARK = "__whorl_replaced__"
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Replaced:
    """One replaced attribute.

    before: the value that the owner itself had, or _ABSENT if it was inherited; path: the owner's name in its model,
    where it is known.
    """

    owner: Any
    name: str
    why: str
    before: Any
    after: Any
    path: str = ""

    def __str__(self) -> str:
        return f"{self.path or _describe(self.owner)}.{self.name}: {self.why}"


class Installation:
    """The record of what an `install` replaced. `uninstall()`, or the end of a `with` block, restores it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._replaced: list[Replaced] = []

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The replaced attributes, in order."""
        return tuple(self._replaced)

    def replace(self, owner: Any, name: str, after: Any, why: str, path: str = "") -> None:
        """Set the attribute `name` of `owner` to `after`, on that object alone, and record why.

        Raises RuntimeError when an installation has already replaced it, or when the owner has no such attribute.
        """
        marks = vars(owner).get(_MARK, frozenset())
        if name in marks:
            raise RuntimeError(
                f"{self.name}: {_describe(owner)}.{name} is already replaced by an installation; uninstall() it first."
            )
        if not hasattr(owner, name):
            raise RuntimeError(f"{self.name}: {_describe(owner)} has no {name!r} to replace; is its version supported?")
        before = _own_value(owner, name)
        setattr(owner, name, after)
        setattr(owner, _MARK, marks | {name})
        self._replaced.append(Replaced(owner, name, why, before, after, path))

    def uninstall(self) -> None:
        """Restore everything, the last replacement first; a second call does nothing.

        Raises RuntimeError, and restores nothing, when another library has replaced an attribute since.
        """
        for entry in self._replaced:
            if _own_value(entry.owner, entry.name) is not entry.after:
                raise RuntimeError(
                    f"{self.name}: {_describe(entry.owner)}.{entry.name} was replaced again by another library. "
                    "Undo that first; nothing was restored."
                )
        while self._replaced:
            entry = self._replaced.pop()
            if entry.before is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.before)
            remaining = vars(entry.owner)[_MARK] - {entry.name}
            if remaining:
                setattr(entry.owner, _MARK, remaining)
            else:
                delattr(entry.owner, _MARK)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Undo the replacements made so far if `install` raises; a context manager around one `install`."""
        try:
            yield
        except BaseException:
            self.uninstall()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {len(self._replaced)} replaced", *(f"  {entry}" for entry in self._replaced)])


def _own_value(owner: Any, name: str) -> Any:
    """Return the value that the owner itself has, without binding it, or _ABSENT if it is inherited or missing.

    torch modules keep their children, parameters and buffers in separate tables.
    """
    for table in (vars(owner), *(vars(owner).get(kind, {}) for kind in ("_modules", "_parameters", "_buffers"))):
        if name in table:
            return table[name]
    return _ABSENT


def _describe(owner: Any) -> str:
    return getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__name__
