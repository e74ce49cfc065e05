"""Text for training without a network: any file or folder, in bytes or a tokenizer's tokens, resumed exactly.

A corpus is one row of tokens, cut into windows of a sequence length; an epoch visits them all in an order of its own.
What a step reads is a function of how many windows came before it, so the number of them is the whole state, and a
run may go on with another number of data-parallel ranks.
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

from whorl.titan.config import Whorl

SYNTHETIC = "synthetic"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
# Not the standard library's own text: what was installed into it, and tests, a good part of which are tables.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def settings(job_config: JobConfig) -> Whorl:
    """The `[whorl]` section, or its defaults where the job has none."""
    return getattr(job_config, "whorl", None) or Whorl()


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes, and 256 between documents."""

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
    """Bytes, or the one of `model.hf_assets_path`: what `whorl.tokenizer` asks for."""
    asked, folder = settings(job_config).tokenizer, Path(job_config.model.hf_assets_path)
    has_files = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if asked == "bytes" or (asked == "auto" and not has_files):
        return ByteTokenizer()
    if not has_files:
        raise ValueError(
            f"whorl.tokenizer is 'hf': {folder} has none of {', '.join(TOKENIZER_FILES)}; "
            "set model.hf_assets_path, or whorl.tokenizer to bytes"
        )
    return build_hf_tokenizer(job_config)


def text_files(where: str, suffixes: str) -> list[Path]:
    """In an order that is the same everywhere; `where` may be empty: the standard library."""
    root = Path(where) if where else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ValueError(f"whorl.data: {root} is neither a file nor a folder; leave it out for the standard library")
    wanted = {".py"} if not where else {s.strip() for s in suffixes.split(",")}
    skipped = SKIPPED if not where else {"__pycache__"}
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped]
        found += [path for name in files if (path := Path(folder, name)).suffix in wanted]
    found.sort()
    if not found:
        raise ValueError(f"whorl.data: no file under {root} ends in one of {', '.join(sorted(wanted))}")
    return found


def documents(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield json.loads(line)["text"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: expected an object with a field 'text', found {line[:60]!r}") from error


def encode(tokenizer: BaseTokenizer, text: str) -> np.ndarray:
    """Tokens and the end of the document, in as few bytes as they need."""
    if isinstance(tokenizer, ByteTokenizer):  # without a Python object for every byte
        return np.append(np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.uint16), np.uint16(256))
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return np.asarray(tokenizer.encode(text, add_bos=False, add_eos=True), dtype=dtype)


class Corpus:
    """All tokens of some files, in memory, documents ended by the tokenizer's end of sequence."""

    def __init__(self, files: list[Path], tokenizer: BaseTokenizer, seq_len: int) -> None:
        self.tokens = np.concatenate([encode(tokenizer, text) for path in files for text in documents(path)])
        self.windows = (len(self.tokens) - 1) // seq_len
        self.seq_len = seq_len
        self.name = hashlib.sha256(self.tokens.tobytes()).hexdigest()[:16]
        if not self.windows:
            raise ValueError(
                f"whorl.data: {len(files)} files hold {len(self.tokens)} tokens, fewer than a sequence of {seq_len}"
            )
        logger.info(f"Text: {len(files)} files, {len(self.tokens):,} tokens, {self.windows:,} sequences of {seq_len}")

    def window(self, number: int, seed: int) -> Tensor:
        """[S + 1] tokens; the windows of an epoch come in an order drawn for it."""
        epoch, place = divmod(number, self.windows)
        start = int(self._order(epoch, seed)[place]) * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))

    def _order(self, epoch: int, seed: int) -> Tensor:
        key = (epoch, seed)
        if getattr(self, "_drawn", None) != key:
            self._drawn = key
            self._drawn_order = torch.randperm(self.windows, generator=_generator(seed, epoch))
        return self._drawn_order


class RandomTokens:
    """No text at all: tokens drawn alike from the whole vocabulary, for measuring speed and memory."""

    def __init__(self, vocab_size: int, seq_len: int) -> None:
        self.vocab_size, self.seq_len = vocab_size, seq_len
        self.name = f"{SYNTHETIC}-{vocab_size}"

    def window(self, number: int, seed: int) -> Tensor:
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=_generator(seed, number))


def _generator(*numbers: int) -> torch.Generator:
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class WindowLoader(BaseDataLoader):
    """Batches of windows; data-parallel rank r of n takes every n-th, from r on."""

    def __init__(
        self, source: Corpus | RandomTokens, *, batch_size: int, dp_rank: int, dp_world_size: int, seed: int
    ) -> None:
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.seen = 0  # windows that all ranks together have read

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.seen + self.dp_rank
            numbers = range(first, first + self.batch_size * self.dp_world_size, self.dp_world_size)
            rows = torch.stack([self.source.window(number, self.seed) for number in numbers])
            self.seen += self.batch_size * self.dp_world_size
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "source": self.source.name, "seq_len": self.source.seq_len, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        now = self.state_dict()
        for key, what in (("source", "text"), ("seq_len", "sequence length"), ("seed", "seed")):
            if state_dict.get(key) != now[key]:
                raise ValueError(
                    f"the checkpoint's data has {what} {state_dict.get(key)}, this run {now[key]}: it would not go on "
                    "where it stopped. Give the same whorl.data, training.seq_len and debug.seed, or leave the data's "
                    "state out with --checkpoint.exclude_from_loading dataloader"
                )
        self.seen = state_dict["seen"]


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> BaseDataLoader:
    """Of `whorl.data`. The order is drawn by `debug.seed`, 0 where there is none."""
    asked, training = settings(job_config), job_config.training
    vocab = _vocab_size(job_config)
    source: Corpus | RandomTokens
    if asked.data == SYNTHETIC:
        source = RandomTokens(vocab, training.seq_len)
    elif tokenizer.get_vocab_size() > vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, {job_config.model.name} "
            f"{job_config.model.flavor} a vocabulary of {vocab}: give the model's own in model.hf_assets_path"
        )
    else:
        source = Corpus(text_files(asked.data, asked.data_suffixes), tokenizer, training.seq_len)
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
    return int(args.vocab_size)  # type: ignore[attr-defined]  # every language model's have it
