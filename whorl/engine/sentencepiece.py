"""SentencePiece vocabularies as GGUF files store them: pieces with scores, and byte tokens for all other text.

SentencePiece joins the two neighbours whose joint piece has the highest score, until no two form a piece. That is
byte-pair encoding with a merge for each way to split a piece in two, in the order of the pieces' scores.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

SPACE = "\u2581"  # stands for a space in a piece
_NORMAL, _USER_DEFINED = 1, 4  # values of tokenizer.ggml.token_type


def backend(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, unknown: int | None, has_prefix: bool
) -> Backend:
    """Build the tokenizer. has_prefix: a space is added before a text, and removed from the start of decoded text.

    Raises ValueError if some bytes have no token and there is no unknown token.
    """
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        ids.setdefault(token, i)
    bytes_missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in ids]
    if bytes_missing and unknown is None:
        raise ValueError(f"{len(bytes_missing)} of 256 bytes have no token, such as {bytes_missing[0]}, and no unknown")
    tokenizer = Backend(
        models.BPE(
            ids,
            list(_merges(tokens, types, scores, ids)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    words = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)] if has_prefix else words)
    return tokenizer


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], ids: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield merges, best pieces first; of one piece the split with the longest first part, as SentencePiece joins from
    the left."""
    pieces = [i for i, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED) and len(tokens[i]) > 1]
    for i in sorted(pieces, key=lambda i: -scores[i]):
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in ids and token[cut:] in ids:
                yield token[:cut], token[cut:]
