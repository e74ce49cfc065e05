"""Kimi's tiktoken.model, read as a byte-level BPE: the tokens are those of the tiktoken package."""

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from whorl.engine import tiktoken_file
from whorl.engine.tokenizer import Tokenizer

TEXTS = [
    "Hello, world! It's 2026 and we're done.",
    "\u4f60\u597d,\u4e16\u754c\u3002Kimi \u662f moonshot \u7684\u6a21\u578b abc\u4e2d\u6587def 123456",
    "def f(x):\n    return x ** 2\n\n\n\tprint('a  b')   \n",
    (
        "\xc0\xc9\xce\xf5\xfc stra\xdfe \u0130stanbul \u0391\u0392\u0393 \u043f\u0440"
        "\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0928\u092e\u0938\u094d\u0924\u0947 "
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \ud55c\uad6d\uc5b4 "
        "\u306b\u307b\u3093\u3054 \u30ab\u30ca"
    ),
    "aaaaaaaaaaaaaaaaa    aaaa aaa aa a 'LL 'll I'LL",
    "\U0001f600\U0001f469\u200d\U0001f467 \r\n\r\n x\u00a0y",
    "",
]
SPECIAL = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<think>": False}


def trained(texts: list[str], count: int) -> list[bytes]:
    """Byte pairs merged by how often they occur, as a tokenizer is trained: tokens by rank."""
    import re

    words = [[bytes([byte]) for byte in word.encode()] for text in texts for word in re.findall(r"\w+|\W+", text) * 3]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < count:
        pairs: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None:
            break
        if (merged := best[0] + best[1]) not in tokens:
            tokens.append(merged)
        words = [_merge(word, best) for word in words]
    return tokens


def _merge(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged, i = [], 0
    while i < len(word):
        is_pair = tuple(word[i : i + 2]) == pair
        merged.append(pair[0] + pair[1] if is_pair else word[i])
        i += 1 + is_pair
    return merged


def write(folder: Path, tokens: list[bytes], **changes: Any) -> Path:
    lines = [base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    added = {
        str(len(tokens) + i): {"content": token, "special": is_special}
        for i, (token, is_special) in enumerate(SPECIAL.items())
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": added} | changes))
    return folder


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    return trained(TEXTS, 420)


def test_tokens_are_tiktoken_s(tokens: list[bytes], tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    theirs = tiktoken.Encoding(
        name="kimi",
        pat_str=tiktoken_file.PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={name: len(tokens) + i for i, name in enumerate(SPECIAL)},
    )
    ours = Tokenizer.from_path(write(tmp_path, tokens))
    draw, letters = random.Random(0), "".join(TEXTS) + "ab  \n'"
    texts = [*TEXTS, *("".join(draw.choices(letters, k=draw.randrange(60))) for _ in range(500))]
    for text in [*texts, "a[BOS]b<think>c<|im_end|>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, allowed_special="all"), text
        assert ours.decode(ids, skip_special=False) == text


def test_the_words_of_the_pattern_and_every_byte(tokens: list[bytes], tmp_path: Path) -> None:
    ours = Tokenizer.from_path(write(tmp_path, tokens))
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
    assert [ours.token(ours.encode(text)[0]) for text in ("a", "[BOS]", "<think>")] == ["a", "[BOS]", "<think>"]
    words = ours._backend.pre_tokenizer.pre_tokenize_str("Hello\u4f60\u597d it's 12345!!\n")
    spelled = ["Hello", "\xe4\xbd\u0142\xe5\xa5\xbd", "\u0120it's", "\u0120", "123", "45", "!!\u010a"]
    assert [word for word, _ in words] == spelled


def test_special_tokens(tokens: list[bytes], tmp_path: Path) -> None:
    """Named ones, and reserved ones for the rest of 256; those that are not special stay in a decoded text."""
    ours = Tokenizer.from_path(write(tmp_path, tokens))
    assert len(ours) == len(tokens) + 256
    assert (ours.bos_id, ours.eos_ids) == (len(tokens), (len(tokens) + 1,))
    assert ours.token(len(tokens) + 255) == f"<|reserved_token_{len(tokens) + 255}|>"
    assert ours.decode(ours.encode("a<think>b<|im_end|>")) == "a<think>b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"YQ==", r"line 421 is b'YQ=='"),
        (b"!!! 420", "line 421 is"),
        (b"YWFhYWFhYWFhYWFhYQ== 500", "its rank, 420"),
        (b"YQ== 420", "expected a new token"),
        (base64.b64encode(b"a" * 1025) + b" 420", "at most 1024 bytes"),  # else a small file takes hours
    ],
)
def test_malformed_files_are_refused(line: bytes, message: str, tokens: list[bytes], tmp_path: Path) -> None:
    file = write(tmp_path, tokens) / "tiktoken.model"
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class is 'QWenTokenizer', expected TikTokenTokenizer"),
        ({"added_tokens_decoder": {"3": {"content": "x"}}}, "expected ids from 420 to 675"),
        ({"added_tokens_decoder": {"420": {"content": "a"}}}, "has 'a' as 420, and it is"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is"),
    ],
)
def test_malformed_settings_are_refused(
    change: dict[str, Any], message: str, tokens: list[bytes], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(write(tmp_path, tokens, **change))


def test_missing_bytes_are_refused(tokens: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 of 256 bytes have no token, the first 0"):
        Tokenizer.from_path(write(tmp_path, tokens[1:]))
