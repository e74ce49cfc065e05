"""Stop strings in a text that comes in pieces, in time that grows with the text alone (Knuth, Morris, Pratt)."""

import functools
from collections.abc import Sequence


class StopStrings:
    """Where the first of some strings is. Each character is looked at once or twice for each string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _falls(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how much of each string the text ends with
        self._num_read = 0

    def add(self, piece: str) -> list[tuple[int, str]]:
        """Strings that end in this piece, each with the place where it first begins in the text."""
        found = []
        for number, (stop, falls) in enumerate(self._stops):
            matched, is_new = self._matched[number], True
            for at, char in enumerate(piece, start=self._num_read + 1):
                while matched and char != stop[matched]:
                    matched = falls[matched]
                matched += char == stop[matched]
                if matched == len(stop):
                    if is_new:
                        found.append((at - len(stop), stop))
                    is_new, matched = False, falls[matched]
            self._matched[number] = matched
        self._num_read += len(piece)
        return found

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that a string may begin with."""
        return max(self._matched, default=0)


@functools.lru_cache(maxsize=1024)
def _falls(stop: str) -> tuple[int, ...]:
    """For each number of characters matched, how many are left when the next one does not fit."""
    falls = [0, 0]
    for char in stop[1:]:
        left = falls[-1]
        while left and char != stop[left]:
            left = falls[left]
        falls.append(left + (char == stop[left]))
    return tuple(falls)
