"""Read a trainer's checkpoint directly: the files of torch.distributed.checkpoint, of any number of ranks.

The index is read as data, and tensors with `weights_only`: no code from a checkpoint is run.
"""

import io
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl import digests
from whorl.checkpoint_index import METADATA, check_lengths, read_index, why_unreadable
from whorl.nn import Index

from .checkpoint import Source, some

log = logging.getLogger(__name__)
# Entries that are not weights: the optimizer and the progress of training.
_NOT_WEIGHTS = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "whorl.")


class _Pieces:
    """The pieces of tensors as the ranks wrote them. The last piece read is cached, because all experts are one tensor
    and are read one by one."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        self._folder = folder
        self._places = {(key.fqn, tuple(key.offset or ())): place for key, place in metadata.storage_data.items()}
        self._load = lru_cache(maxsize=1)(self._read)

    def _read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place = self._places[name, offsets]
        try:
            with (self._folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                piece = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
            if piece.shape != sizes or piece.dtype != dtype:
                raise ValueError(f"found {list(piece.shape)} {piece.dtype}, expected {list(sizes)} {dtype}")
        except Exception as error:  # damaged data may raise anything
            raise ValueError(
                f"{self._folder}: {name} cannot be read from {place.relative_path}: {why_unreadable(error)}"
            ) from error
        return piece  # type: ignore[no-any-return]

    def part(self, name: str, entry: Any, index: Index) -> Tensor:
        """Return a part of a tensor, assembled from the pieces that overlap it."""
        spans = [range(*cut.indices(size)) for cut, size in zip(index, entry.size, strict=True)]
        out, num_copied = torch.empty([len(span) for span in spans], dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            ends = [first + size for first, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            overlap = [
                (max(span.start, first), min(span.stop, end))
                for span, first, end in zip(spans, chunk.offsets, ends, strict=True)
            ]
            if all(first < end for first, end in overlap):
                piece = self._load(name, tuple(chunk.offsets), tuple(chunk.sizes), entry.properties.dtype)
                source = tuple(slice(f - o, e - o) for (f, e), o in zip(overlap, chunk.offsets, strict=True))
                target = tuple(slice(f - s.start, e - s.start) for (f, e), s in zip(overlap, spans, strict=True))
                out[target] = piece[source]
                num_copied += out[target].numel()
        if num_copied != out.numel():
            raise ValueError(f"{self._folder}: the pieces of {name} hold {num_copied} of its {out.numel()} numbers")
        return out


def check_digests(folder: Path) -> None:
    """Raise ValueError when a file of a trainer's checkpoint is not the one that was written with its digests.

    Those of the tokenizer and config.json count as well. Any other folder is left unchecked.
    """
    if not (folder / METADATA).is_file():
        return
    if not (folder / digests.FILE).is_file():
        log.warning("%s has no %s: changed bytes in its files would not be noticed", folder, digests.FILE)
        return
    begin = time.perf_counter()
    try:
        names = [name for name in digests.read(folder) if (folder / name).is_file()]
        digests.check(folder, names)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: {error}") from error
    log.info("%s: %d files are as they were written (%.1f s)", folder, len(names), time.perf_counter() - begin)


def open_dcp(folder: Path, names: Mapping[str, str] | None, rename: Callable[[str], str] = str) -> dict[str, Source]:
    """Open a trainer's checkpoint; return its tensors under Hugging Face's names.

    names: the trainer's name by Hugging Face's name, where {} stands for a layer, then for an expert; None: whorl does
    not train this model. rename: maps a tensor's name in the files to one in `names`.
    """
    if names is None:
        raise ValueError(f"{folder}: a trainer's checkpoint of a model that is not trained here; export it first")
    try:
        metadata = read_index(folder)
        check_lengths(folder, metadata)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    pieces, known = _Pieces(folder, metadata), _patterns(names)
    sources: dict[str, Source] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks") and not name.startswith(_NOT_WEIGHTS):
            sources |= dict(_sources(rename(name), entry, known, pieces, name))
    if not sources:
        entries = some(sorted({name.partition(".")[0] for name in metadata.state_dict_metadata}))
        raise ValueError(f"{folder}: the checkpoint holds no weights, only {entries}")
    return sources


def _patterns(names: Mapping[str, str]) -> dict[str, list[tuple["re.Pattern[str]", str]]]:
    """Return patterns of the trainer's names: "stacked" if one tensor holds all experts, so that the name has one {}
    less than Hugging Face's, else "one"."""
    patterns: dict[str, list[tuple[re.Pattern[str], str]]] = {"one": [], "stacked": []}
    for theirs, ours in names.items():
        kind = "stacked" if theirs.count("{}") > ours.count("{}") else "one"
        patterns[kind].append((re.compile(re.escape(ours).replace(r"\{\}", r"(\d+)")), theirs))
    return patterns


def _sources(
    name: str, entry: Any, known: Mapping[str, Any], pieces: _Pieces, stored: str
) -> Iterator[tuple[str, Source]]:
    """Yield the sources of an entry under Hugging Face's names. stored: its name in the files."""
    shape = tuple(entry.size)
    for pattern, theirs in known["stacked"]:
        if match := pattern.fullmatch(name):
            for expert in range(shape[0]):
                yield theirs.format(*match.groups(), expert), _source(stored, entry, pieces, shape[1:], (expert,))
            return
    for pattern, theirs in known["one"]:
        if match := pattern.fullmatch(name):
            yield theirs.format(*match.groups()), _source(stored, entry, pieces, shape, ())
            return
    yield name, _source(stored, entry, pieces, shape, ())  # `check_fit` reports the unknown name


def _source(name: str, entry: Any, pieces: _Pieces, shape: tuple[int, ...], lead: tuple[int, ...]) -> Source:
    """Return the source of a tensor. lead: leading indices into the entry: the expert's, if it holds all experts."""
    dtype = entry.properties.dtype

    def read(index: Index) -> Tensor:
        part = pieces.part(name, entry, (*(slice(i, i + 1) for i in lead), *index))
        return part.flatten(0, 1) if lead else part

    kind = str(dtype).removeprefix("torch.")
    return Source(shape=shape, dtype=kind, gives=dtype, nbytes=math.prod(shape) * dtype.itemsize, read=read)
