"""What a server needs beside the weights of a checkpoint: `whorl serve` takes a step's folder as it lies.

A model of bytes gets a tokenizer of bytes; of another tokenizer the files are copied.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG = "config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt"),
)
NAMES = frozenset((CONFIG, *TOKENIZER))
END = "<|endoftext|>"


def byte_letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies: itself where it can be seen, else one past 255."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of UTF-8 bytes, and 256 between documents, as `whorl.titan.data.ByteTokenizer` has them."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())} | {END: 256}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": END, **flags}],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def describer(config: dict[str, Any], *, is_bytes: bool, assets: Path) -> Callable[[Path], None]:
    """A function that writes these files into a folder. config: the values of config.json; assets: where the
    tokenizer's files are, if it is not one of bytes."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found = {CONFIG: config}
        if is_bytes:
            found |= {"tokenizer.json": byte_tokenizer(), "tokenizer_config.json": {"eos_token": END}}
        else:
            copy_tokenizer(assets, folder)
        for name, values in found.items():
            (folder / name).write_text(json.dumps(values, indent=1), encoding="utf-8")

    return write
