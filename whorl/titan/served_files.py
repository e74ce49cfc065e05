"""Write config.json and the tokenizer beside the weights, so that `whorl serve` can load the checkpoint of a step.

A model trained on bytes gets a byte tokenizer; the files of any other tokenizer are copied.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whorl.files import output_file

CONFIG = "config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "vocab.txt"),
)
NAMES = frozenset((CONFIG, *TOKENIZER))  # all files that may be written here
END = "<|endoftext|>"  # the text of token 256, which ends a document


def byte_letters() -> list[str]:
    """Return for each byte the character that stands for it in byte-level vocabularies, as GPT-2 defined them.

    It is the character with the same code if that is printable, else one with a code above 255.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def byte_tokenizer() -> dict[str, Any]:
    """Return the tokenizer.json of `whorl.titan.data.ByteTokenizer`: UTF-8 bytes, and 256 as the end of a document."""
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
    """Copy the files of a tokenizer that exist in `source`."""
    for name in TOKENIZER:
        if (source / name).is_file():
            with output_file(folder / name) as path:
                shutil.copyfile(source / name, path)


def describer(config: dict[str, Any], *, is_bytes: bool, assets: Path) -> Callable[[Path], None]:
    """Return a function that writes config.json and the tokenizer into a folder.

    config: the values of config.json. is_bytes: write the byte tokenizer. assets: otherwise, the folder that the files
    of the tokenizer are copied from.
    """

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files = {CONFIG: config}
        if is_bytes:
            files |= {"tokenizer.json": byte_tokenizer(), "tokenizer_config.json": {"eos_token": END}}
        else:
            copy_tokenizer(assets, folder)
        for name, values in files.items():
            with output_file(folder / name) as path:
                path.write_text(json.dumps(values, indent=1), encoding="utf-8")

    return write
