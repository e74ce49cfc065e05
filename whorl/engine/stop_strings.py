"""Find stop strings in streamed text, in time linear in the text (Knuth, Morris, Pratt)."""

import functools
from collections.abc import Sequence


class StopStrings:
    """Finds strings in a text that comes in pieces. Each character is examined once or twice for each string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # how many characters of each string the text ends with
        self._num_read = 0

    def add(self, piece: str) -> list[tuple[int, str]]:
        """Return the strings that end in this piece, each with the index in the text where its first match begins."""
        matches = []
        for number, (stop, fallbacks) in enumerate(self._stops):
            matched, is_new = self._matched[number], True
            for end, char in enumerate(piece, start=self._num_read + 1):
                while matched and char != stop[matched]:
                    matched = fallbacks[matched]
                matched += char == stop[matched]
                if matched == len(stop):
                    if is_new:
                        matches.append((end - len(stop), stop))
                    is_new, matched = False, fallbacks[matched]
            self._matched[number] = matched
        self._num_read += len(piece)
        return matches

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)


@functools.lru_cache(maxsize=1024)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return, for each number of matched characters, how many stay matched when the next character does not fit."""
    fallbacks = [0, 0]
    for char in stop[1:]:
        matched = fallbacks[-1]
        while matched and char != stop[matched]:
            matched = fallbacks[matched]
        fallbacks.append(matched + (char == stop[matched]))
    return tuple(fallbacks)
