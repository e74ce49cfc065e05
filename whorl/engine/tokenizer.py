"""Text to token ids and back, from `tokenizer.json` or from the metadata of a GGUF file.

Built on the tokenizers package. Who writes prompts is in `prompt_formats`.
"""

import contextlib
import copy
import functools
import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from . import sentencepiece
from .chat_template import ChatTemplate, Message
from .gguf_header import read_metadata
from .prompt_formats import PromptWriter, format_of, prompt_writer

_REPLACEMENT = "\ufffd"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


_WINDOW = 32  # ids that are decoded again with each new one, at most twice as many
# How many times longer than what it makes of it a text may be, by kind of normaliser.
_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Prepend": 1}
_KEEPS = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers


@contextlib.contextmanager
def _panics_as(kind: type[Exception], what: str) -> Iterator[None]:
    """Around a call of the tokenizers package, where a failed assumption is a panic, which is not even an Exception.

    A regular expression that gives up on a text, as millions of spaces make it, is one.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class has no module that could be imported
            raise
        raise kind(f"{what}: {error}") from error


class Tokenizer:
    """One model's vocabulary, its end-of-text ids and its chat template, or the format that stands for one."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int],
        roles: Mapping[str, str],
        templates: Mapping[str, str],
        sampling: Mapping[str, float] | None = None,
        prompt_format: str | None = None,
    ) -> None:
        # Files may ask for padding to any length, or cut what is longer: neither is wanted of a prompt.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder()
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = self.token_id(roles["bos_token"]) if "bos_token" in roles else None
        # Think and tool tokens of Qwen3 are added but not special: they stay in the decoded text.
        self.special_ids = frozenset({i for i, token in added.items() if token.special} | set(self.eos_ids))
        self.added_ids = frozenset(added)
        self.skipped_ids = frozenset(i for i, token in added.items() if token.special)  # by `decode`
        self.sampling = dict(sampling or {})
        self.prompt_format = prompt_format
        self.folder: Path | None = None  # that it was read from, as a model's publisher laid it out
        self.template: PromptWriter = prompt_writer(templates, roles, prompt_format)
        if bad := [i for i in self.eos_ids if not 0 <= i < self._size]:
            raise ValueError(f"tokenizer: end-of-text ids {bad} are outside the vocabulary of {self._size}")

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """From a model folder, a `tokenizer.json` or a `.gguf` file; a `tokenizer.json` beside the latter wins."""
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else []
        if (path.is_dir() or path.is_file()) and (folder / "tokenizer.json").is_file():
            found = _from_json(folder / "tokenizer.json")
            found.folder = folder
            return found
        if ggufs and ggufs[0].is_file():
            return _from_gguf(ggufs[0])
        raise ValueError(f"tokenizer: {path} has no tokenizer.json and is not a .gguf file")

    def __len__(self) -> int:
        """Ids from here on are padding of the model's vocabulary and must not be sampled."""
        return self._size

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling: bytes in byte-level letters."""
        found = self._backend.id_to_token(token_id)
        if found is None:
            raise ValueError(f"tokenizer: id {token_id} is not in the vocabulary of {self._size}")
        return found

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Special tokens written out in the text become their ids; `add_special` adds what every prompt starts with.

        ValueError: the text is not Unicode, because it has half a surrogate pair, or is too much for the expression
        that cuts it into words.
        """
        text.encode()
        with _panics_as(ValueError, f"tokenizer: this text of {len(text)} characters cannot be cut into tokens"):
            return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        if bad := [i for i in token_ids if not 0 <= i < self._size]:
            raise ValueError(f"tokenizer: ids {bad[:4]} are outside the vocabulary of {self._size}")
        with _panics_as(RuntimeError, f"tokenizer: {len(token_ids)} ids cannot be made text"):
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def to_json(self) -> str:
        """As a tokenizer.json, for libraries that read one."""
        return self._backend.to_str()

    def state(self) -> dict[str, Any]:
        """All of it as JSON, for `from_state` in another process."""
        return {
            "backend": self.to_json(),
            "eos_ids": self.eos_ids,
            "roles": self.template.variables,
            "templates": self.template.sources,
            "sampling": self.sampling,
            "prompt_format": self.prompt_format,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Tokenizer":
        return cls(Backend.from_str(state["backend"]), **{k: v for k, v in state.items() if k != "backend"})

    def with_template(self, source: str) -> "Tokenizer":
        """The same, with another chat template; ValueError where it cannot be parsed."""
        other = copy.copy(self)
        other.template, other.prompt_format = ChatTemplate({"default": source}, self.template.variables), None
        return other

    @functools.cached_property
    def max_token_bytes(self) -> int | None:
        """Bytes of text that one token can stand for at most; None where a token may stand for any number, as an
        unknown word does, or white space that a special token swallows."""
        file = json.loads(self.to_json())
        model, normalizer = file["model"], file["normalizer"]
        is_bytes = model["type"] == "BPE" and (model.get("unk_token") is None or bool(model.get("byte_fallback")))
        has_strips = any(token["lstrip"] or token["rstrip"] for token in file["added_tokens"])
        factor = _shrinks(normalizer)
        if not is_bytes or has_strips or factor is None or not _keeps_all(file["pre_tokenizer"]):
            return None
        return factor * max(len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True))

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that stand for a byte each where no piece spells a text; none where bytes are letters of the pieces.

        The package decodes a run of them at once, and all of it to U+FFFD where it is not UTF-8.
        """
        found = [i for byte in range(256) if (i := self.token_id(f"<0x{byte:02X}>")) is not None]
        letter = self.token_id("<0x41>")
        return frozenset(found if letter is not None and self.decode([letter]) == "A" else ())

    @functools.cached_property
    def letter_id(self) -> int | None:
        """A token that is one letter and nothing else: what follows it is not the start of a text."""
        return next((i for letter in string.ascii_letters if (i := self.token_id(letter)) is not None), None)

    def detokenizer(self, *, skip_special: bool = True) -> "Detokenizer":
        return Detokenizer(self, skip_special=skip_special)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model's prompt, in text. `enable_thinking` None leaves the choice to the template."""
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """`apply_chat_template`, then `encode`: the template itself writes the first token."""
        return self.encode(self.apply_chat_template(messages, **options), add_special=False)


class Detokenizer:
    """Text of a growing list of ids. What `add` and `finish` return joins to what `decode` gives for all of them.

    A character whose bytes are not all there yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        # Ids whose text is not out yet, after one before them that settles the spacing.
        self._window: list[int] = []
        self._shown = 0

    def add(self, token_id: int) -> str:
        if self._skip_special and token_id in self._tokenizer.skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        # An unfinished character is at most 3 bytes, each of which may show as a replacement of its own.
        end = max(len(text.rstrip(_REPLACEMENT)), len(text) - 3)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        # The latest id stays, if it has text: decoders strip a space from the start of a text.
        if end == len(text) and (last := self._decode([token_id])):
            self._window, self._shown = [token_id], len(last)
            letter = self._tokenizer.letter_id
            if token_id in self._tokenizer.byte_ids and letter is not None:  # a finished run must not be gone on with
                self._window, self._shown = [letter], 1
        elif len(self._window) > 2 * _WINDOW:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Bytes that never make a character would be decoded again with each token: keep the last of them."""
        recent = self._window[-_WINDOW:]
        tail, num_held = self._decode(recent), len(text) - self._shown
        if len(tail) >= num_held and text.endswith(tail[len(tail) - num_held :]):
            self._window, self._shown = recent, len(tail) - num_held

    def finish(self) -> str:
        """What was held back: bytes that will never become a character."""
        text = self._decode(self._window)[self._shown :]
        self._shown += len(text)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=self._skip_special)


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times longer than what it makes of it a text may be; None: nobody knows."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        factors = [_shrinks(each) for each in normalizer["normalizers"]]
        return None if None in factors else math.prod(factor or 1 for factor in factors)
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(pattern.encode()) <= len(normalizer["content"].encode()) else None
    return _SHRINKS.get(normalizer["type"])


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether all of a text is left after it is cut."""
    if pre_tokenizer is None or pre_tokenizer["type"] in _KEEPS:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8, too
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(found).__name__}")
    return found


def _end_ids(path: Path, values: Mapping[str, Any]) -> list[int]:
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{path}: eos_token_id is {value!r}, expected an id or a list of ids")
    return ids


def _sampling(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """What the model's makers sample with; nothing where they say that it is greedy."""
    if not generation.get("do_sample", False):
        return {}
    found = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: {name} is {value!r}, expected a number")
    return found


def _from_json(path: Path) -> Tokenizer:
    folder = path.parent
    try:
        with _panics_as(ValueError, "the tokenizers package fails"):
            backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    roles = _roles(folder / "tokenizer_config.json", config)
    model = _read_json(folder / "config.json")
    eos_ids = _end_ids(folder / "generation_config.json", generation) or _end_ids(folder / "config.json", model)
    if "eos_token" in roles and (eos_id := backend.token_to_id(roles["eos_token"])) is not None:
        eos_ids = [*eos_ids, eos_id]
    templates = _templates(folder, config)
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        roles=roles,
        templates=templates,
        sampling=_sampling(folder / "generation_config.json", generation),
        prompt_format=format_of(model, templates),
    )


def _roles(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by what they are for; in older files a token is a dictionary with its flags."""
    tokens = {name: config[name] for name in _ROLES if config.get(name)}
    roles: dict[str, Any] = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    for name, token in roles.items():
        if not isinstance(token, str):
            raise ValueError(f"{path}: {name} is {tokens[name]!r}, expected a token's text")
    return roles


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`chat_template.jinja` wins over the tokenizer's configuration, where a list holds several by name."""
    own = config.get("chat_template") or []
    named = [{"name": "default", "template": own}] if isinstance(own, str) else own
    if not isinstance(named, list) or not all(_is_template(entry) for entry in named):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named texts"
        )
    templates = {entry["name"]: entry["template"] for entry in named}
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for file in files.values():
        _check_link(file, folder)
    return templates | {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def _is_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _check_link(file: Path, folder: Path) -> None:
    """A template is shown to whoever asks: it must not be a link to what its author may not read, but the user can.

    What lies beside the real tokenizer.json is fine, as in Hugging Face's cache, where every file is a link.
    """
    real = file.resolve()
    homes = (folder.resolve(), (folder / "tokenizer.json").resolve().parent)
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"{file}: is a link to {real}, outside of the model's folder; put a copy in its place")


# ---- GGUF

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type
# A GGUF file names one end-of-text id; models trained on these end a turn with any of them.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>")
# What is in the lists beside tokens and their types, by kind of tokenizer: of byte pairs, and of SentencePiece.
_LISTS = {"gpt2": ("merges", str), "llama": ("scores", float)}
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
_INSTEAD = "Put the model's tokenizer.json beside the file"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _words(digits: str) -> Any:
    """Qwen2 takes digits one by one, Llama 3 up to three at a time."""
    pattern = Regex(_WORDS.replace("DIGITS", digits))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), _byte_level(use_regex=False)])


def _pre_tokenizer(kind: str | None, path: Path) -> Any:
    """How text is cut before merging; the kinds are llama.cpp's names."""
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])
    if kind == "gpt-2":
        return _byte_level()
    if kind == "qwen2":
        return _words("")
    if kind in _LLAMA_3:
        return _words("{1,3}")
    known = ", ".join(("smollm", "gpt-2", "qwen2", *_LLAMA_3))
    raise ValueError(f"{path}: pre-tokenizer {kind!r} is not known. Known: {known}. {_INSTEAD}")


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_metadata(path)
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if (model := found.get("model")) not in _LISTS:
        raise ValueError(f"{path}: tokenizer model {model!r} cannot be read, only {' and '.join(_LISTS)}. {_INSTEAD}")
    third, third_kind = _LISTS[model]
    if missing := [key for key in ("tokens", "token_type", third) if key not in found]:
        raise ValueError(f"{path}: the metadata has no tokenizer.ggml.{missing[0]}")
    tokens, types = found["tokens"], found["token_type"]
    _check_vocabulary(path, tokens, types, {third: (found[third], third_kind)})
    while types and types[-1] == _UNUSED:  # padding of the embedding table
        tokens, types = tokens[: len(types) - 1], types[:-1]
    bos_id, ids = found.get("bos_token_id"), [found.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    padding, unknown = found.get("padding_token_id"), found.get("unknown_token_id")
    if bad := [i for i in (bos_id, padding, unknown, *ids) if i is not None and not _is_id(i, len(tokens))]:
        raise ValueError(f"{path}: special token ids {bad} are outside the vocabulary of {len(tokens)}")
    ends = [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _ENDS]
    named = {"bos_token": bos_id, "eos_token": ids[0], "pad_token": padding}
    backend = (
        _spm(path, tokens, types, found) if model == "llama" else _bpe(tokens, found["merges"], found.get("pre"), path)
    )
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        chosen = [token for token, role in zip(tokens, types, strict=True) if role == kind]
        add([AddedToken(token, normalized=False) for token in chosen])
    if found.get("add_bos_token", model == "llama" or found.get("pre") in _LLAMA_3) and bos_id is not None:
        bos = (tokens[bos_id], bos_id)
        backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return Tokenizer(
        backend,
        eos_ids=[*(i for i in ids if i is not None), *ends],
        roles={name: tokens[i] for name, i in named.items() if i is not None},
        templates=_gguf_templates(metadata),
    )


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


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    found = named | ({"default": metadata[key]} if key in metadata else {})
    if wrong := [name for name, text in found.items() if not isinstance(text, str)]:
        raise ValueError(f"tokenizer.chat_template: {wrong} are not texts")
    return found


def _spm(path: Path, tokens: Sequence[str], types: Sequence[int], found: Mapping[str, Any]) -> Backend:
    unknown, has_prefix = found.get("unknown_token_id"), found.get("add_space_prefix", True)
    try:
        return sentencepiece.backend(tokens, types, found["scores"], unknown=unknown, has_prefix=has_prefix)
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: the pieces make no tokenizer: {error}") from error


def _bpe(tokens: Sequence[str], merges: Sequence[str], kind: str | None, path: Path) -> Backend:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Llama 3: a word that is a token is one, whatever the merges say.
    try:
        backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=kind in _LLAMA_3))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: the merges do not fit the vocabulary: {error}") from error
    backend.pre_tokenizer = _pre_tokenizer(kind, path)
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend
