"""The sizes that recorded calls are padded to.

A decode call is recorded by its tokens and by the keys that its longest sequence attends to; a call with prompts by the
tokens of the prompts and of the sequences that decode beside them.
"""

DECODING = (1, 2, 4, 8, *range(16, 257, 16))  # tokens of decode calls
KEYS = 1024  # keys that the smallest graph attends to; each larger one has four times as many
PROMPTS = (16, 32, 64, 128, *range(256, 2049, 256))  # tokens of prompts
BESIDE = (0, 16, 64, 128, 256)  # tokens that decode beside prompts
_MOST_PROMPTS = 16
_LONG = 17  # tokens a sequence, on average, from which attention runs by its kernels for prompts


def most_prompts(num_tokens: int) -> int:
    """Return the most prompts of a recorded call of so many tokens: few enough for the kernels for prompts, because
    those for decoding would read a long cached prefix for every token."""
    return max(1, min(_MOST_PROMPTS, num_tokens // _LONG))


class GraphSizes:
    """The sizes of one runner. max_len: tokens of the longest sequence; max_tokens: most tokens of a call;
    max_prompt_tokens: most tokens of prompts in a call that is recorded."""

    def __init__(self, *, max_len: int, max_tokens: int, max_prompt_tokens: int) -> None:
        self._max_len, self._max_tokens = max_len, max_tokens
        self._max_prompt_tokens = min(max_prompt_tokens, max_tokens)

    def for_decoding(self, num_tokens: int, num_keys: int) -> tuple[int, int] | None:
        """Return tokens and keys of the graph for a decode call; None if it is too large."""
        size = next((size for size in DECODING if size >= num_tokens), None)
        if size is None or size > self._max_tokens:
            return None
        return size, next((keys for keys in self._keys() if keys >= num_keys), self._max_len)

    def for_prompts(self, num_tokens: int, num_prompts: int, num_decoding: int) -> tuple[int, int] | None:
        """Return tokens of prompts and of decoding sequences of the graph for a call with prompts; None if the call is
        too large.

        num_tokens, num_prompts: of the prompts together; num_decoding: tokens of the sequences that decode.
        """
        sizes = (size for size, most in self.prompts() if num_tokens <= size and num_prompts <= most)
        size = next(sizes, None)
        beside = next((beside for beside in BESIDE if beside >= num_decoding), None)
        return None if size is None or beside is None else (size, beside)

    def decoding(self, max_tokens: int) -> list[tuple[int, int]]:
        """Return tokens and keys of all graphs that decode calls of up to `max_tokens` may need."""
        largest = next((size for size in DECODING if size >= max_tokens), DECODING[-1])
        counts = [size for size in DECODING if size <= min(largest, self._max_tokens)]
        return [(count, keys) for keys in self._keys() for count in counts]

    def prompts(self) -> list[tuple[int, int]]:
        """Return the most tokens and prompts of the graphs for calls with prompts, smallest first."""
        return [(size, most_prompts(size)) for size in PROMPTS if size <= self._max_prompt_tokens]

    def _keys(self) -> list[int]:
        """Return the numbers of keys that graphs are recorded for, up to the longest sequence."""
        sizes = [KEYS]
        while sizes[-1] < self._max_len:
            sizes.append(4 * sizes[-1])
        return [*sizes[:-1], self._max_len]
