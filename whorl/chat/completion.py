"""What Tab offers in a chat: commands, the values they take, and files."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence

FILES = "files"


class Completion:
    """Completes the line of a chat. values: what may follow each command; `FILES`: the name of a file."""

    def __init__(self, values: Mapping[str, Sequence[str] | str]) -> None:
        self._values = values

    def options(self, line: str) -> list[str]:
        """Return the words that the last word of a line may become."""
        name, space, argument = line.partition(" ")
        if not space:
            return _starting(self._values, name) if name.startswith("/") else []
        values = self._values.get(name, ())
        if values == FILES:
            return _files(argument.lstrip())
        return [] if " " in argument.lstrip() else _starting(values, argument.lstrip())


def _starting(words: Iterable[str], start: str) -> list[str]:
    return [f"{word} " for word in words if word.startswith(start)]


def _files(start: str) -> list[str]:
    """Return the files whose path begins so; a folder ends with a slash, so that one can go on. ~ stays as it is."""
    whole = os.path.expanduser(start)
    paths = sorted(glob.glob(f"{glob.escape(whole)}*"))
    shown = [start + path[len(whole) :] + ("/" if os.path.isdir(path) else "") for path in paths]
    last = start.rpartition(" ")[0]  # readline replaces the last word alone
    return [path[len(last) + 1 :] if last else path for path in shown]
