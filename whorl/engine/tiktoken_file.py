"""Kimi's tokenizer: tokens by rank in a `tiktoken.model`, as a byte-level BPE, without the repository's code."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

NAME = "tiktoken.model"
_CLASS = "TikTokenTokenizer"  # what tokenizer_config.json names; the pattern is that of this class
_RESERVED = 256  # special tokens after the others, named or not
_LONGEST = 1024  # bytes of a token: finding its merges takes the square of them

# Words: Chinese characters; letters with the mark before them and an English ending; numbers of up to three digits;
# marks; line breaks; spaces.
_UPPER, _LOWER = (rf"[{first}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for first in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def backend(folder: Path, config: Mapping[str, Any]) -> Backend:
    """Build the tokenizer of a folder. config: the values of tokenizer_config.json; ValueError for malformed files."""
    if config.get("tokenizer_class") != _CLASS:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class is {config.get('tokenizer_class')!r}, expected "
            f"{_CLASS}: how other classes split text before {NAME} applies is not known. Use a tokenizer.json"
        )
    ranks = _ranks(folder / NAME)
    letters = _letters()
    vocabulary = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    spelled = list(vocabulary)
    merges = [(spelled[left], spelled[right]) for _, left, right in sorted(_merges(ranks))]
    # A word that is a token is that token, whatever its parts would merge to.
    built = Backend(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    built.decoder = decoders.ByteLevel()
    for token_id, token in _special(folder / "tokenizer_config.json", config, len(ranks)):
        (built.add_special_tokens if token.special else built.add_tokens)([token])
        if built.token_to_id(token.content) != token_id:
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has {token.content!r} as {token_id}, and it "
                f"is {built.token_to_id(token.content)} already"
            )
    return built


def _ranks(path: Path) -> dict[bytes, int]:
    """Read the tokens, in the order of their ranks; each line has one, in base64, and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        try:
            decoded = base64.b64decode(token, validate=True)
            is_next = int(rank) == len(ranks) and decoded not in ranks and 0 < len(decoded) <= _LONGEST
        except (binascii.Error, ValueError):
            is_next = False
        if not is_next:
            raise ValueError(
                f"{path}: line {number} is {line[:40]!r}, expected a new token in base64, of at most {_LONGEST} bytes, "
                f"and its rank, {len(ranks)}"
            )
        ranks[decoded] = len(ranks)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"{path}: {len(missing)} of 256 bytes have no token, the first {missing[0]}")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[int, int, int]]:
    """Yield every way to make a token of two others: its rank, and those of the two."""
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left, right = ranks.get(token[:at]), ranks.get(token[at:])
            if left is not None and right is not None:
                yield rank, left, right


def _letters() -> dict[int, str]:
    """Return the letter of each byte in a byte-level vocabulary: its own if that is printable, else one past them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _special(path: Path, config: Mapping[str, Any], first: int) -> Iterator[tuple[int, AddedToken]]:
    """Yield the tokens after the ranked ones, by id: those that tokenizer_config.json names, and reserved ones."""
    named = config.get("added_tokens_decoder") or {}
    if not isinstance(named, Mapping) or not all(_is_token(key, value, first) for key, value in named.items()):
        raise ValueError(
            f"{path}: added_tokens_decoder is {str(named)[:80]}, expected ids from {first} to {first + _RESERVED - 1} "
            "with the content of each"
        )
    for token_id in range(first, first + _RESERVED):
        value = named.get(str(token_id)) or {"content": f"<|reserved_token_{token_id}|>"}
        yield token_id, AddedToken(value["content"], normalized=False, special=bool(value.get("special", True)))


def _is_token(key: Any, value: Any, first: int) -> bool:
    is_id = isinstance(key, str) and key.isdecimal() and first <= int(key) < first + _RESERVED
    return is_id and isinstance(value, Mapping) and isinstance(value.get("content"), str)
