"""Dummy calls, to record graphs, to warm up and to measure. They run in the spare lane and write nothing to caches."""

from collections.abc import Mapping

import numpy as np

from .call import Call, field_offsets

STRIDE = 7919  # between token ids: different tokens select different experts, whose weights are read


class DummyCalls:
    """Makes the dummy calls of a runner. padding: the values of padding elements by array, if they are not 0."""

    def __init__(self, padding: Mapping[str, int], vocab_size: int) -> None:
        self._padding, self._vocab_size = padding, vocab_size

    def _arrays(self, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
        """Return the arrays of a call of this size: all padding, but for the tokens."""
        fields = field_offsets(size)[0]
        arrays = {name: np.full(count, self._padding.get(name, 0)) for name, _, _, count in fields}
        return arrays | {"tokens": np.arange(size[0]) * STRIDE % self._vocab_size}

    def prompt(self, length: int) -> Call:
        """Return a call with a prompt of `length` tokens, which samples no token."""
        arrays = self._arrays((length, 1, 0)) | {"positions": np.arange(length), "context_lens": np.array([length])}
        arrays["query_starts"] = np.array([0, length])
        return Call(1, arrays, num_keys=length, tables=[])

    def decode(self, count: int) -> Call:
        """Return a call with `count` sequences of one token."""
        arrays = self._arrays((count,) * 3) | {"context_lens": np.ones(count)}
        arrays |= {"query_starts": np.arange(count + 1), "sample_indices": np.arange(count)}
        return Call(0, arrays, num_keys=1, tables=[])

    def joined(self, length: int, count: int) -> Call:
        """Return a call with a prompt of `length` tokens, and `count` sequences that decode beside it."""
        prompt = self.prompt(length)
        if not count:
            return prompt
        decoding = self.decode(count)
        both = {name: (np.asarray(prompt.arrays[name]), np.asarray(array)) for name, array in decoding.arrays.items()}
        arrays = {name: np.concatenate(pair) for name, pair in both.items()}
        starts, later_starts = both["query_starts"]
        arrays["query_starts"] = np.append(starts, later_starts[1:] + length)
        arrays["sample_indices"] = both["sample_indices"][1] + length  # the prompt has no samples
        return Call(1, arrays, max(prompt.num_keys, decoding.num_keys), tables=[])
