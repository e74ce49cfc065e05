"""The tokenizer: text to token ids and back, from `tokenizer.json`, Kimi's `tiktoken.model`, or a GGUF file's metadata.

It is built on the tokenizers package. Chat prompts are written in `chat_template`.
"""

import copy
import functools
import json
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from . import tiktoken_file, tokenizer_gguf
from .chat_template import ChatTemplate, Message, PromptWriter, format_of, prompt_writer, write_open
from .sampling_params import PARAMETERS
from .tokenizer_errors import DecodeError as DecodeError
from .tokenizer_errors import errors_as

_REPLACEMENT = "\ufffd"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLING = [name for name, (_, declared) in PARAMETERS.items() if declared.is_advised]
_WINDOW = 32  # latest ids, which are decoded again with each new one; the list is cut to this at twice the length
# By how many times a normaliser may shorten a text at most, by its type.
_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Prepend": 1}
_KEEPS = ("ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that remove nothing from a text


class Tokenizer:
    """A model's tokenizer, with its end-of-text ids and its chat template or the built-in prompt format.

    roles: special tokens by role, such as bos_token. templates: chat templates by name. sampling: parameters that the
    model's authors recommend; None: greedy. prompt_format: see `chat_template`.
    Example: `Tokenizer.from_path(folder).encode("Hi")`
    """

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
        # Files may set padding or truncation to some length: neither may happen to a prompt.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._size, self._longest = max(vocabulary.values()) + 1, max(len(token.encode()) for token in vocabulary)
        added = backend.get_added_tokens_decoder()
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = self.token_id(roles["bos_token"]) if "bos_token" in roles else None
        # The think and tool tokens of Qwen3 are added but not special: they stay in the decoded text.
        self.special_ids = frozenset({i for i, token in added.items() if token.special} | set(self.eos_ids))
        self.added_ids = frozenset(added)
        self.skipped_ids = frozenset(i for i, token in added.items() if token.special)  # `decode` leaves these out
        self.sampling = {"temperature": 0.0} if sampling is None else dict(sampling)
        self.prompt_format = prompt_format
        self.folder: Path | None = None  # the model folder that it was read from
        self.template: PromptWriter = prompt_writer(templates, roles, prompt_format)
        if bad := [i for i in self.eos_ids if not 0 <= i < self._size]:
            raise ValueError(f"tokenizer: end-of-text ids {bad} are outside the vocabulary of {self._size}")

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """Load from a model folder, a `tokenizer.json`, a `tiktoken.model` or a `.gguf` file.

        A `tokenizer.json` next to it is preferred. Raises ValueError if there is none or it cannot be read.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        ggufs = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix == ".gguf" else []
        if (path.is_dir() or path.is_file()) and (folder / "tokenizer.json").is_file():
            return _from_folder(folder, _read_backend(folder / "tokenizer.json"))
        if (folder / tiktoken_file.NAME).is_file():
            config = _read_json(folder / "tokenizer_config.json")
            with errors_as(ValueError, str(folder / tiktoken_file.NAME)):
                return _from_folder(folder, tiktoken_file.backend(folder, config))
        if ggufs and ggufs[0].is_file():
            return cls(**tokenizer_gguf.read(ggufs[0]))
        raise ValueError(f"tokenizer: {path} has no tokenizer.json or tiktoken.model and is not a .gguf file")

    def __len__(self) -> int:
        """Size of the vocabulary: ids from it on are padding of the model's embedding and must not be sampled."""
        return self._size

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it: bytes as byte-level letters."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"tokenizer: id {token_id} is not in the vocabulary of {self._size}")
        return token

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens that the text spells out become their ids. add_special: add
        the tokens that every prompt starts with.

        Raises ValueError if the text is not Unicode, because it has half a surrogate pair, or if it is too much for the
        regular expression that splits it into words.
        """
        text.encode()
        with errors_as(ValueError, f"tokenizer: this text of {len(text)} characters cannot be split into tokens"):
            return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        if bad := [i for i in token_ids if not 0 <= i < self._size]:
            raise ValueError(f"tokenizer: ids {bad[:4]} are outside the vocabulary of {self._size}")
        with errors_as(DecodeError, f"tokenizer: {len(token_ids)} ids cannot be decoded"):
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json, for libraries that read one."""
        return self._backend.to_str()

    def state(self) -> dict[str, Any]:
        """Return the whole tokenizer as a JSON object, for `from_state` in another process."""
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
        """Rebuild a tokenizer from what `state` returned."""
        return cls(Backend.from_str(state["backend"]), **{k: v for k, v in state.items() if k != "backend"})

    def with_template(self, source: str) -> "Tokenizer":
        """Return a copy with another chat template; ValueError if it cannot be parsed."""
        other = copy.copy(self)
        other.template, other.prompt_format = ChatTemplate({"default": source}, self.template.variables), None
        return other

    def with_sampling(self, sampling: Mapping[str, float]) -> "Tokenizer":
        """Return a copy that recommends these sampling parameters, and its own for the others."""
        other = copy.copy(self)
        other.sampling = {**self.sampling, **sampling}
        return other

    @functools.cached_property
    def max_token_bytes(self) -> int | None:
        """The most bytes of text that one token can stand for; None if a token may stand for any number, as an unknown
        word does, or white space that a special token swallows."""
        model, added = self._backend.model, self._backend.get_added_tokens_decoder().values()
        is_bytes = isinstance(model, models.BPE) and (model.unk_token is None or bool(model.byte_fallback))
        factor = _shrinks(_settings(self._backend.normalizer))
        is_kept = _keeps_all(_settings(self._backend.pre_tokenizer))
        if not is_bytes or any(token.lstrip or token.rstrip for token in added) or factor is None or not is_kept:
            return None
        return factor * self._longest

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that each stand for one byte, for text that no other token spells; none in a byte-level vocabulary.

        The package decodes a run of them at once, and all of it to U+FFFD if it is not UTF-8.
        """
        ids = [i for byte in range(256) if (i := self.token_id(f"<0x{byte:02X}>")) is not None]
        letter = self.token_id("<0x41>")
        return frozenset(ids if letter is not None and self.decode([letter]) == "A" else ())

    @functools.cached_property
    def letter_id(self) -> int | None:
        """A token that is a single letter: a token decoded after it is not at the start of a text."""
        return next((i for letter in string.ascii_letters if (i := self.token_id(letter)) is not None), None)

    def detokenizer(self, *, skip_special: bool = True) -> "Detokenizer":
        """Return a new incremental decoder."""
        return Detokenizer(self, skip_special=skip_special)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the conversation as the text of a prompt. enable_thinking: None leaves the choice to the template.
        continue_final_message: see `chat_template.write_open`; then there is no generation prompt."""
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        if continue_final_message:
            return write_open(self.template, messages, tools, **variables)
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt, **variables)

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Apply the chat template, then `encode` without special tokens: the template itself writes the first token."""
        return self.encode(self.apply_chat_template(messages, **options), add_special=False)


class Detokenizer:
    """Decodes token ids one at a time. What `add` and `finish` return, joined, equals `decode` of all ids.

    A character whose bytes are not complete yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        # Ids whose text has not been returned yet, after an earlier one that determines the spacing.
        self._window: list[int] = []
        self._shown = 0

    def add(self, token_id: int) -> str:
        """Return the text that the token completes."""
        if self._skip_special and token_id in self._tokenizer.skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        # An incomplete character has at most 3 bytes, each of which may be decoded to one U+FFFD.
        end = max(len(text.rstrip(_REPLACEMENT)), len(text) - 3)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        # Keep the latest id in the window if it has text: decoders strip a space from the start of a text.
        if end == len(text) and (last := self._decode([token_id])):
            self._window, self._shown = [token_id], len(last)
            letter = self._tokenizer.letter_id
            if token_id in self._tokenizer.byte_ids and letter is not None:  # a later byte must not join this run
                self._window, self._shown = [letter], 1
        elif len(self._window) > 2 * _WINDOW:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drop old ids from the window: bytes that never make a character would be decoded again with each token."""
        recent = self._window[-_WINDOW:]
        tail, num_held = self._decode(recent), len(text) - self._shown
        if len(tail) >= num_held and text.endswith(tail[len(tail) - num_held :]):
            self._window, self._shown = recent, len(tail) - num_held

    def finish(self) -> str:
        """Return the text that was held back: bytes that will never become a character."""
        text = self._decode(self._window)[self._shown :]
        self._shown += len(text)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=self._skip_special)


def _settings(part: Any) -> dict[str, Any] | None:
    """Return what a tokenizer.json says of a part, without writing all of the vocabulary."""
    return None if part is None else json.loads(part.__getstate__())  # type: ignore[no-any-return]


def _shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return by how many times a normaliser may shorten a text at most; None if that is unknown."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        factors = [_shrinks(part) for part in normalizer["normalizers"]]
        return None if None in factors else math.prod(factor or 1 for factor in factors)
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(pattern.encode()) <= len(normalizer["content"].encode()) else None
    return _SHRINKS.get(normalizer["type"])


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether pre-tokenization removes nothing from a text."""
    if pre_tokenizer is None or pre_tokenizer["type"] in _KEEPS:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return pre_tokenizer["type"] in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:  # a ValueError also for bytes that are not UTF-8
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(values).__name__}")
    return values


def _end_ids(path: Path, values: Mapping[str, Any]) -> list[int]:
    value = values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{path}: eos_token_id is {value!r}, expected an id or a list of ids")
    return ids


def _sampling(path: Path, generation: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the sampling parameters that the model's authors recommend; None if do_sample is false."""
    if not generation.get("do_sample", False):
        return None
    parameters = {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{path}: {name} is {value!r}, expected a number")
    if "top_k" in parameters:
        parameters["top_k"] = max(int(parameters["top_k"]), 0)  # -1: all, in some files
    return {"temperature": 1.0, **parameters}


def _read_backend(path: Path) -> Backend:
    with errors_as(ValueError, str(path)):
        return Backend.from_file(str(path))


def _from_folder(folder: Path, backend: Backend) -> Tokenizer:
    """Return the tokenizer with what the other files of the folder say of it."""
    config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    roles = _roles(folder / "tokenizer_config.json", config)
    model = _read_json(folder / "config.json")
    eos_ids = _end_ids(folder / "generation_config.json", generation) or _end_ids(folder / "config.json", model)
    if "eos_token" in roles and (eos_id := backend.token_to_id(roles["eos_token"])) is not None:
        eos_ids = [*eos_ids, eos_id]
    templates = _templates(folder, config)
    tokenizer = Tokenizer(
        backend,
        eos_ids=eos_ids,
        roles=roles,
        templates=templates,
        sampling=_sampling(folder / "generation_config.json", generation),
        prompt_format=format_of(model, templates),
    )
    tokenizer.folder = folder
    return tokenizer


def _roles(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by role; in older files a token is a dictionary with its flags."""
    tokens = {name: config[name] for name in _ROLES if config.get(name)}
    roles: dict[str, Any] = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    for name, token in roles.items():
        if not isinstance(token, str):
            raise ValueError(f"{path}: {name} is {tokens[name]!r}, expected a token's text")
    return roles


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name. `chat_template.jinja` is preferred to those in tokenizer_config.json."""
    configured = config.get("chat_template") or []
    named = [{"name": "default", "template": configured}] if isinstance(configured, str) else configured
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
    """Raise ValueError for a template that is a link to a file outside of the model's folder: a server shows templates
    to its clients, so such a link could reveal a private file.

    A link into the folder of the real tokenizer.json is fine, as in Hugging Face's cache, where every file is a link.
    """
    real = file.resolve()
    homes = (folder.resolve(), (folder / "tokenizer.json").resolve().parent)
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"{file}: is a link to {real}, outside of the model's folder; put a copy in its place")
