"""Prompts of the command line are written and tokenized with limits: templates and tokenizers come from model files."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoints
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from whorl.chat import conversation
from whorl.chat.command import Options, build_session
from whorl.chat.options import ChatOptions
from whorl.engine.tokenizer import Tokenizer
from whorl.models.llama import Llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoints(tmp_path, {"llama": Llama.tiny()})["llama"]


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}"


def bomb() -> Backend:
    """A normaliser that makes ten letters of one, twelve times."""
    backend = Backend(models.BPE({"a": 0, "b": 1}, [], unk_token="b"))
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 12)
    return backend


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOP, "the model's chat template: it takes longer than 1 seconds"),
        (GROW, "the model's chat template: .*memory"),
        ("{{ 1 / 0 }}", "the model's chat template: the chat template failed: .*division by zero"),
        (None, "the model's tokenizer: it takes .* memory"),
    ],
    ids=["loop", "memory", "error", "normaliser"],
)
def test_prompts_of_the_command_line_are_bounded(
    folder: Path, template: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = bomb() if template is None else Backend(models.BPE({"a": 0, "b": 1}, [], unk_token="b"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template or "a"}))
    limits = {"seconds": 1, "memory": 1 << 28}
    monkeypatch.setattr(conversation.BoundedPrompts.__init__, "__kwdefaults__", limits)
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        build_session(Options(model=str(folder), prompt="a", chat=ChatOptions(chat=True)))
    assert time.monotonic() - began < 20


def test_prompts_in_a_process_are_those_of_this_one(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    tokenizer = Tokenizer.from_path(tmp_path)
    prompts = conversation.BoundedPrompts(tokenizer)
    message = {"role": "user", "content": "b"}
    assert prompts.apply_chat_template([message], enable_thinking=True) == tokenizer.apply_chat_template([message])
    assert prompts.encode("b", add_special=False) == tokenizer.encode("b", add_special=False) == [1]
    with pytest.raises(ValueError, match="surrogates not allowed"):
        prompts.encode("\ud800")
    prompts.close()


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0}, unk_token="none"),
        models.WordPiece({"a": 0}, unk_token="none"),
        models.BPE({"a": 0}, [], unk_token="none"),
        models.Unigram([("a", -1.0)]),
    ],
    ids=lambda model: type(model).__name__,
)
def test_an_unknown_token_that_is_not_in_the_vocabulary(tmp_path: Path, model: Any) -> None:
    Backend(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match=r"this text of 1 characters cannot be split into tokens: .*(token|unk)"):
        tokenizer.encode("b")
