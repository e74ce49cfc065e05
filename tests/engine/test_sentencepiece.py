"""SentencePiece vocabularies in GGUF files, against its own rule written down as it is: join the best neighbours."""

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from whorl.engine.sentencepiece import SPACE
from whorl.engine.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = [
    "The capital of France is Paris, and the capital of Spain is Madrid.",
    "def f(x):\n    return [x for x in range(10) if x % 2 == 0]  # even numbers",
    "aaaa aaa aaaaa bananas, ananas; Mississippi  misses   its sister's sisters",
    "na\u00efve caf\u00e9 \u00fcber stra\u00dfe 1234567890 3.14159 http://example.org/a?b=c",
]


def vocabulary() -> tuple[list[str], list[int], list[float]]:
    """As Llama's: specials, bytes, pieces in the order they were learned, and letters last of all."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trained.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    pieces = [piece for piece in learned if len(piece) > 1] + [2 * SPACE, 4 * SPACE]
    letters = [piece for piece in learned if len(piece) == 1]
    heads = ["<unk>", "<s>", "</s>", "<end_of_turn>", "<tag>", "\n\n"]
    tokens = [*heads, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, *[BYTE] * 256]
    types += [NORMAL] * (len(tokens) - len(types))
    return tokens, types, [0.0] * (len(heads) + 256) + [-float(i) for i in range(len(tokens) - len(heads) - 256)]


TOKENS, TYPES, SCORES = vocabulary()
IDS = {token: i for i, token in enumerate(TOKENS)}


def write(path: Path, **changes: Any) -> Path:
    metadata = {"tokens": TOKENS, "scores": SCORES, "token_type": TYPES, "model": "llama"} | changes
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


IDENTIFIED = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


@pytest.fixture(params=[True, False], ids=["llama", "gemma"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, bool]:
    """Llama puts a space before a text, and says so by saying nothing; Gemma does not."""
    more = {} if request.param else {"add_space_prefix": False}
    return Tokenizer.from_path(write(tmp_path / "x.gguf", **IDENTIFIED, **more)), request.param


def joined(text: str, has_prefix: bool) -> list[int]:
    """By the rule: the two neighbours that make the piece with the highest score, the leftmost of equal ones."""
    symbols = list((" " + text if has_prefix and text else text).replace(" ", SPACE))
    while True:
        pairs = [(SCORES[IDS[a + b]], -i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in IDS]  # noqa: B905,RUF007
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for symbol in symbols for i in spelled(symbol)]


def spelled(symbol: str) -> list[int]:
    return [IDS[symbol]] if symbol in IDS else [IDS[f"<0x{byte:02X}>"] for byte in symbol.encode()]


def texts(count: int) -> list[str]:
    rng = random.Random(0)
    words = " ".join(CORPUS).split(" ")
    made = [" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count)]
    letters = "aans iMpx \u00e9\u4e2d\U0001f600\t1."
    made += ["".join(rng.choices(letters, k=rng.randint(0, 40))) for _ in range(count)]
    return [*made, "", " ", "   ", " lead", "trail ", "\u2581", "<0x41>", "<un", "a" * 50]


def test_ids_are_those_of_the_rule(both: tuple[Tokenizer, bool]) -> None:
    tokenizer, has_prefix = both
    used = set()
    for text in texts(150):
        actual = tokenizer.encode(text, add_special=False)
        assert actual == joined(text, has_prefix), text
        used |= set(actual)
    assert len(used) > 80
    assert any(TYPES[i] == BYTE for i in used), "no text had a letter that no piece spells"


def test_texts_come_back(both: tuple[Tokenizer, bool]) -> None:
    tokenizer, _ = both
    for text in texts(100):
        ids = tokenizer.encode(text)
        assert ids[0] == 1, "every prompt begins with <s>"
        plain = text.replace(SPACE, " ")
        assert tokenizer.decode(ids) == plain
        stream = tokenizer.detokenizer()
        assert "".join([stream.add(i) for i in ids]) + stream.finish() == plain
    assert tokenizer.max_token_bytes == max(len(token.encode()) for token in TOKENS)


def test_tokens_that_are_no_pieces(both: tuple[Tokenizer, bool]) -> None:
    """As llama.cpp does, the text after one begins anew, with its space."""
    tokenizer, has_prefix = both
    actual = tokenizer.encode("<s>the<tag>the\n\nthe</s>", add_special=False)
    the = joined("the", has_prefix)
    assert actual == [1, *the, 4, *the, 5, *the, 2]
    assert tokenizer.eos_ids == (2, 3), "a turn ends with <end_of_turn>, too"
    assert tokenizer.bos_id == 1
    assert tokenizer.decode([1, IDS["an"], 2]) == "an"
    assert tokenizer.decode([IDS["an"], 4, IDS["an"]]) == "an<tag>an"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": SCORES[:-1]}, f"{len(TOKENS)} tokens and {len(TOKENS) - 1} scores; expected one for each"),
        ({"scores": ["a"] * len(TOKENS)}, "scores is not a list of float"),
        ({"scores": [0.0] * len(TOKENS), "unknown_token_id": 99999}, "special token ids .* are outside the vocabulary"),
        ({"model": "t5"}, "tokenizer model 't5' cannot be read, only gpt2 and llama"),
        ({"tokens": ["a", "b"], "token_type": [1, 1], "scores": [0.0, 0.0]}, "256 of 256 bytes have no token, such as"),
    ],
)
def test_vocabularies_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(write(tmp_path / "x.gguf", **changes))


def test_scores_decide(tmp_path: Path) -> None:
    """With the pieces' scores turned round the same text is cut elsewhere."""
    turned = Tokenizer.from_path(write(tmp_path / "x.gguf", **IDENTIFIED, scores=[-score for score in SCORES]))
    assert any(turned.encode(text, add_special=False) != joined(text, True) for text in CORPUS)
    assert [turned.decode(turned.encode(text)) for text in CORPUS] == CORPUS
