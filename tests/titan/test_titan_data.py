"""The text of training at its edges: the last window, orders of several seeds, vocabularies past 16 bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def corpus(folder: Path, num_tokens: int, seq_len: int = 8) -> Any:
    """Of bytes, and the end of the document as the last token."""
    from whorl.titan.data import ByteTokenizer, Corpus

    file = folder / f"{num_tokens}.txt"
    file.write_text("".join(chr(ord("a") + i % 26) for i in range(num_tokens - 1)))
    return Corpus([file], ByteTokenizer(), seq_len)


@pytest.mark.parametrize(("num_tokens", "windows"), [(16, 1), (17, 2), (24, 2), (25, 3)])
def test_every_window_has_a_token_to_predict_at_its_end(num_tokens: int, windows: int, tmp_path: Path) -> None:
    text = corpus(tmp_path, num_tokens)
    assert text.windows == windows
    assert {len(text.window(number, seed=0)) for number in range(2 * windows)} == {9}


def test_each_seed_keeps_its_order_when_others_are_asked_for(tmp_path: Path) -> None:
    text = corpus(tmp_path, 1000)
    first, second = ([text.window(n, seed).tolist() for n in range(20)] for seed in (1, 2))
    assert first != second
    taken = [(text.window(n, 1).tolist(), text.window(n, 2).tolist()) for n in range(20)]
    assert taken == list(zip(first, second, strict=True))


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32), (200_000, np.uint32)])
def test_tokens_are_as_wide_as_the_vocabulary(size: int, dtype: Any) -> None:
    from whorl.titan.data import encode

    class Last:
        """Every text is the last token of the vocabulary."""

        def get_vocab_size(self) -> int:
            return size

        def encode(self, text: str, **_: bool) -> list[int]:
            return [size - 1]

    encoded = encode(Last(), "text")  # type: ignore[arg-type]
    assert (encoded.dtype, encoded.tolist()) == (dtype, [size - 1])
