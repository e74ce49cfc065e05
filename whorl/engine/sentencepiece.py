"""Vocabularies of SentencePiece, as GGUF files hold them: pieces with scores, and bytes for what no piece spells.

SentencePiece joins the two neighbours whose joint piece has the highest score, until no two make a piece. That is
byte-pair encoding with a merge for each way to cut a piece in two, in the order of the pieces' scores.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

SPACE = "\u2581"  # what stands for a space in a piece
_NORMAL, _USER_DEFINED = 1, 4  # of tokenizer.ggml.token_type


def backend(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, unknown: int | None, has_prefix: bool
) -> Backend:
    """has_prefix: a space is put before a text, and taken from the start of what is decoded."""
    ids: dict[str, int] = {}
    for i, token in enumerate(tokens):
        ids.setdefault(token, i)
    bytes_missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in ids]
    if bytes_missing and unknown is None:
        raise ValueError(f"{len(bytes_missing)} of 256 bytes have no token, such as {bytes_missing[0]}, and no unknown")
    found = Backend(
        models.BPE(
            ids,
            list(_merges(tokens, types, scores, ids)),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    found.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    words = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)] if has_prefix else words)
    return found


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], ids: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """Best pieces first; of one piece the cut with the longest beginning, as neighbours are joined from the left."""
    pieces = [i for i, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED) and len(tokens[i]) > 1]
    for i in sorted(pieces, key=lambda i: -scores[i]):
        token = tokens[i]
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in ids and token[cut:] in ids:
                yield token[:cut], token[cut:]
