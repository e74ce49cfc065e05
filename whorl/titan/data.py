"""Read training text from files, as bytes or as the tokens of a tokenizer; a run resumes exactly where it stopped.

A corpus is one sequence of tokens, divided into windows of the sequence length. Each epoch visits all windows in a new
random order. What a step reads depends only on how many windows were read before, so that this number is the whole
state, and a run can resume with another number of data-parallel ranks.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from whorl.titan.config import settings

SYNTHETIC = "synthetic"
# A folder with one of these files has a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
# Folders of the standard library that are not read: installed packages, and tests, which consist largely of tables.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class ByteTokenizer(BaseTokenizer):
    """A tokenizer whose tokens are UTF-8 bytes; token 256 ends a document."""

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 256

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*text.encode("utf-8", "surrogatepass"), *([256] if add_eos else [])]

    def decode(self, token_ids: list[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")

    def get_vocab_size(self) -> int:
        return 257


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """Return the tokenizer that `whorl.tokenizer` names: bytes, or that of `model.hf_assets_path`.

    Raises ValueError when it is 'hf' and the folder has no tokenizer.
    """
    kind, folder = settings(job_config).tokenizer, Path(job_config.model.hf_assets_path)
    has_files = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if kind == "bytes" or (kind == "auto" and not has_files):
        return ByteTokenizer()
    if not has_files:
        raise ValueError(
            f"whorl.tokenizer is 'hf', and {folder} has none of {', '.join(TOKENIZER_FILES)}; "
            "set model.hf_assets_path, or set whorl.tokenizer to bytes"
        )
    return build_hf_tokenizer(job_config)


def text_files(where: str, suffixes: str) -> list[Path]:
    """Return the text files under `where` in sorted order; an empty `where` is Python's standard library.

    Raises ValueError when there is no such file or folder, or no file in it has one of the suffixes.
    """
    root = Path(where) if where else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(
            f"whorl.data: {root} is neither a file nor a folder; omit the option to read the standard library"
        )
    endings = {".py"} if not where else {s.strip() for s in suffixes.split(",")}
    skipped = SKIPPED if not where else {"__pycache__"}
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        paths += [path for name in files if (path := Path(folder, name)).suffix in endings]
    paths.sort()
    if not paths:
        raise ValueError(f"whorl.data: no file under {root} ends in one of {', '.join(sorted(endings))}")
    return paths


def documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file: one for each line of a .jsonl file, else the whole text."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield json.loads(line)["text"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: expected an object with a field 'text', got {line[:60]!r}") from error


def encode(tokenizer: BaseTokenizer, text: str) -> np.ndarray:
    """Return the tokens of a document and its end token, in the smallest dtype that fits the vocabulary."""
    if isinstance(tokenizer, ByteTokenizer):  # this avoids a Python object for every byte
        return np.append(np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.uint16), np.uint16(256))
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return np.asarray(tokenizer.encode(text, add_bos=False, add_eos=True), dtype=dtype)


class Corpus:
    """All tokens of some files, in memory; every document ends with the tokenizer's end-of-sequence token."""

    def __init__(self, files: list[Path], tokenizer: BaseTokenizer, seq_len: int) -> None:
        self.tokens = np.concatenate([encode(tokenizer, text) for path in files for text in documents(path)])
        self.windows = (len(self.tokens) - 1) // seq_len  # their number; each also needs the token after it as a label
        self.seq_len = seq_len
        # Identifies the text: a checkpoint records it, and a run with another text cannot resume.
        self.name = hashlib.sha256(self.tokens.tobytes()).hexdigest()[:16]
        if not self.windows:
            raise ValueError(
                f"whorl.data: {len(files)} files have {len(self.tokens)} tokens, fewer than a sequence of {seq_len}"
            )
        logger.info(f"Text: {len(files)} files, {len(self.tokens):,} tokens, {self.windows:,} sequences of {seq_len}")

    def window(self, number: int, seed: int) -> Tensor:
        """Return the tokens [S + 1] int64 of a window. number: how many windows training has read before this one."""
        epoch, position = divmod(number, self.windows)
        start = int(self._order(epoch, seed)[position]) * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))

    def _order(self, epoch: int, seed: int) -> Tensor:
        """Return the random order of the windows in an epoch; the last order is cached."""
        key = (epoch, seed)
        if getattr(self, "_order_key", None) != key:
            self._order_key = key
            self._order_cache = torch.randperm(self.windows, generator=_generator(seed, epoch))
        return self._order_cache


class RandomTokens:
    """Tokens drawn uniformly from the vocabulary instead of text, to measure speed and memory."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.name = f"{SYNTHETIC}-{vocab_size}"

    def window(self, number: int, seed: int) -> Tensor:
        """Return tokens [S + 1] int64 that depend only on both numbers, as `Corpus.window` does."""
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=_generator(seed, number))


def _generator(*numbers: int) -> torch.Generator:
    """Return a generator that is seeded by all the numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class WindowLoader(BaseDataLoader):
    """Yields batches of {"input": tokens [B, S]} and labels [B, S], without end.

    Data-parallel rank r of n reads every n-th window, starting with the r-th.
    """

    def __init__(
        self, source: Corpus | RandomTokens, *, batch_size: int, dp_rank: int, dp_world_size: int, seed: int
    ) -> None:
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.seen = 0  # number of windows that all ranks together have read

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.seen + self.dp_rank
            numbers = range(first, first + self.batch_size * self.dp_world_size, self.dp_world_size)
            windows = torch.stack([self.source.window(number, self.seed) for number in numbers])
            self.seen += self.batch_size * self.dp_world_size
            yield {"input": windows[:, :-1].contiguous()}, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "source": self.source.name, "seq_len": self.source.seq_len, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        current = self.state_dict()
        for key, label in (("source", "text"), ("seq_len", "sequence length"), ("seed", "seed")):
            if state_dict.get(key) != current[key]:
                raise ValueError(
                    f"the {label} of the checkpoint's data is {state_dict.get(key)}, that of this run {current[key]}: "
                    "it cannot resume where it stopped. Give the same whorl.data, training.seq_len and debug.seed, or "
                    "skip the state of the data with --checkpoint.exclude_from_loading dataloader"
                )
        self.seen = state_dict["seen"]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> BaseDataLoader:
    """Return the loader of the text that `whorl.data` names; `debug.seed` (0 by default) determines the order.

    Raises ValueError when the tokenizer has more tokens than the vocabulary of the model, or the text cannot be read.
    """
    options, training = settings(job_config), job_config.training
    vocab = _vocab_size(job_config)
    source: Corpus | RandomTokens
    if options.data == SYNTHETIC:
        source = RandomTokens(vocab, training.seq_len)
    elif tokenizer.get_vocab_size() > vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, {job_config.model.name} "
            f"{job_config.model.flavor} a vocabulary of {vocab}; set model.hf_assets_path to the model's tokenizer"
        )
    else:
        source = Corpus(text_files(options.data, options.data_suffixes), tokenizer, training.seq_len)
    return WindowLoader(
        source,
        batch_size=training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        seed=job_config.debug.seed or 0,
    )


def _vocab_size(job_config: JobConfig) -> int:
    from torchtitan.protocols.train_spec import get_train_spec

    args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    return int(args.vocab_size)  # type: ignore[attr-defined]  # the arguments of every language model have it
