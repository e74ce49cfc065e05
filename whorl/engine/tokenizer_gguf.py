"""Tokenizers from the metadata of GGUF files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from . import sentencepiece
from .gguf_header import read_metadata
from .tokenizer_errors import errors_as

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type
# A GGUF file names one end-of-text id; models that were trained with these tokens end a turn with any of them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>")
# A vocabulary has three lists: tokens, types, and this one, by kind of tokenizer (byte-level BPE, SentencePiece).
_LISTS = {"gpt2": ("merges", str), "llama": ("scores", float)}
_QWEN = ("qwen2", "qwen35")
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
_INSTEAD = "Put the model's tokenizer.json next to the file"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?LETTER+|\p{N}DIGITS"
    r"| ?[^\sLETTERS\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words(digits: str, *, with_marks: bool = False) -> Any:
    """Return the pre-tokenizer of Qwen2, which splits numbers into digits, or of Llama 3: up to three at a time.

    with_marks: accents and vowel signs belong to words, as in Qwen3.5.
    """
    letter, letters = (r"[\p{L}\p{M}]", r"\p{L}\p{M}") if with_marks else (r"\p{L}", r"\p{L}")
    pattern = Regex(_WORDS.replace("DIGITS", digits).replace("LETTERS", letters).replace("LETTER", letter))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), _byte_level(use_regex=False)])


def _pre_tokenizer(kind: str | None, path: Path) -> Any:
    """Return how text is split before merging; the kinds are llama.cpp's names."""
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])
    if kind == "gpt-2":
        return _byte_level()
    if kind == "qwen2":
        return _words("")
    if kind == "qwen35":
        return _words("", with_marks=True)
    if kind in _LLAMA_3:
        return _words("{1,3}")
    known = ", ".join(("smollm", "gpt-2", *_QWEN, *_LLAMA_3))
    raise ValueError(f"{path}: pre-tokenizer {kind!r} is not known. Known: {known}. {_INSTEAD}")


def read(path: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer` for a GGUF file; ValueError if it has no tokenizer that can be built."""
    metadata = read_metadata(path)
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = values.get("model")
    if not isinstance(model, str) or model not in _LISTS:
        raise ValueError(f"{path}: tokenizer model {model!r} cannot be read, only {' and '.join(_LISTS)}. {_INSTEAD}")
    third, third_kind = _LISTS[model]
    if missing := [key for key in ("tokens", "token_type", third) if key not in values]:
        raise ValueError(f"{path}: the metadata has no tokenizer.ggml.{missing[0]}")
    tokens, types = values["tokens"], values["token_type"]
    _check_vocabulary(path, tokens, types, {third: (values[third], third_kind)})
    while types and types[-1] == _UNUSED:  # padding of the embedding table
        tokens, types = tokens[: len(types) - 1], types[:-1]
    bos_id, ids = values.get("bos_token_id"), [values.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    padding, unknown = values.get("padding_token_id"), values.get("unknown_token_id")
    if bad := [i for i in (bos_id, padding, unknown, *ids) if i is not None and not _is_id(i, len(tokens))]:
        raise ValueError(f"{path}: special token ids {bad} are outside the vocabulary of {len(tokens)}")
    ends = [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _ENDS]
    named = {"bos_token": bos_id, "eos_token": ids[0], "pad_token": padding}
    if model == "llama":
        backend = _spm(path, tokens, types, values)
    else:
        backend = _bpe(tokens, values["merges"], values.get("pre"), path)
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        added = [token for token, role in zip(tokens, types, strict=True) if role == kind]
        add([AddedToken(token, normalized=False) for token in added])
    if values.get("add_bos_token", model == "llama" or values.get("pre") in _LLAMA_3) and bos_id is not None:
        bos = (tokens[bos_id], bos_id)
        backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return {
        "backend": backend,
        "eos_ids": [*(i for i in ids if i is not None), *ends],
        "roles": {name: tokens[i] for name, i in named.items() if i is not None},
        "templates": _templates(metadata),
    }


def _is_id(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def _check_vocabulary(path: Path, tokens: Any, types: Any, more: dict[str, tuple[Any, type]]) -> None:
    for name, (values, kind) in ({"tokens": (tokens, str), "token_type": (types, int)} | more).items():
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ValueError(f"{path}: tokenizer.ggml.{name} is not a list of {kind.__name__}")
    if not tokens or len(tokens) != len(types):
        raise ValueError(f"{path}: {len(tokens)} tokens and {len(types)} types of tokens; expected one type for each")
    if "scores" in more and len(more["scores"][0]) != len(tokens):
        raise ValueError(f"{path}: {len(tokens)} tokens and {len(more['scores'][0])} scores; expected one for each")


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    templates = named | ({"default": metadata[key]} if key in metadata else {})
    if wrong := [name for name, text in templates.items() if not isinstance(text, str)]:
        raise ValueError(f"tokenizer.chat_template: {wrong} are not texts")
    return templates


def _spm(path: Path, tokens: Sequence[str], types: Sequence[int], values: Mapping[str, Any]) -> Backend:
    unknown, has_prefix = values.get("unknown_token_id"), values.get("add_space_prefix", True)
    with errors_as(ValueError, f"{path}: the pieces make no tokenizer"):
        return sentencepiece.backend(tokens, types, values["scores"], unknown=unknown, has_prefix=has_prefix)


def _bpe(tokens: Sequence[str], merges: Sequence[str], kind: str | None, path: Path) -> Backend:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # In Llama 3 a word that is in the vocabulary is one token, whatever the merges say.
    with errors_as(ValueError, f"{path}: the merges do not fit the vocabulary"):
        backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=kind in _LLAMA_3))
    backend.pre_tokenizer = _pre_tokenizer(kind, path)
    backend.decoder = decoders.ByteLevel()
    if kind in _QWEN:
        backend.normalizer = normalizers.NFC()
    return backend
