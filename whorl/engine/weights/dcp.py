"""Checkpoints of a trainer as they lie: torch.distributed.checkpoint's files, of any number of ranks.

Its index, `.metadata`, is a pickle. Here it may name the classes of such an index and nothing else, and tensors are
read as torch reads weights alone: no code of a checkpoint runs.
"""

import io
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Index

from .checkpoint import Source, some

METADATA = ".metadata"
# What lies beside the model: the optimizer and how far training has come.
_BESIDE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "whorl.")
_PARTS = (
    *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "TensorProperties"),
    *("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _PARTS),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no such index has")


def _read_metadata(folder: Path) -> Any:
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not found.storage_data:
            raise ValueError("it names no data")
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{folder / METADATA}: not an index of torch.distributed.checkpoint: {error}") from error
    return found


class _Pieces:
    """The pieces that tensors were written in, each of one rank. The last one read is kept: experts are one tensor
    there, and are read one by one."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        self._folder = folder
        self._places = {(key.fqn, tuple(key.offset or ())): place for key, place in metadata.storage_data.items()}
        self._load = lru_cache(maxsize=1)(self._read)
        self._check()

    def _check(self) -> None:
        lengths: dict[str, int] = {}
        for place in self._places.values():
            if getattr(place, "transform_descriptors", None):
                raise ValueError(f"{self._folder}: the data is transformed ({place.transform_descriptors}), not plain")
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"{self._folder}: {place.relative_path!r} is not a file of this folder")
            lengths[place.relative_path] = max(lengths.get(place.relative_path, 0), place.offset + place.length)
        for name, length in lengths.items():
            path = self._folder / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < length:
                what = "is missing" if size is None else f"has {size} bytes, and {length} were written"
                raise ValueError(f"{self._folder}: {name} {what}: the checkpoint is not whole")

    def _read(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        place = self._places[name, offsets]
        with (self._folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        return torch.load(data, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]

    def part(self, name: str, entry: Any, index: Index) -> Tensor:
        """A part of a tensor, put together of the pieces that have some of it."""
        wanted = [range(*cut.indices(size)) for cut, size in zip(index, entry.size, strict=True)]
        out, found = torch.empty([len(each) for each in wanted], dtype=entry.properties.dtype), 0
        for chunk in entry.chunks:
            ends = [first + size for first, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            both = [
                (max(w.start, first), min(w.stop, end))
                for w, first, end in zip(wanted, chunk.offsets, ends, strict=True)
            ]
            if all(first < end for first, end in both):
                piece = self._load(name, tuple(chunk.offsets))
                here = tuple(slice(f - o, e - o) for (f, e), o in zip(both, chunk.offsets, strict=True))
                there = tuple(slice(f - w.start, e - w.start) for (f, e), w in zip(both, wanted, strict=True))
                out[there] = piece[here]
                found += out[there].numel()
        if found != out.numel():
            raise ValueError(f"{self._folder}: the pieces of {name} hold {found} of {out.numel()} numbers of it")
        return out


def open_dcp(folder: Path, names: Mapping[str, str] | None, rename: Callable[[str], str] = str) -> dict[str, Source]:
    """names: those of training by Hugging Face's, {} standing for a layer, then for an expert; None: this model is not
    trained here. rename: from a tensor's name in the files to one that `names` knows."""
    if names is None:
        raise ValueError(f"{folder}: a trainer's checkpoint of a model that is not trained here; export it first")
    metadata = _read_metadata(folder)
    pieces, known = _Pieces(folder, metadata), _patterns(names)
    sources: dict[str, Source] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks") and not name.startswith(_BESIDE):
            sources |= dict(_sources(rename(name), entry, known, pieces, name))
    if not sources:
        found = some(sorted({name.partition(".")[0] for name in metadata.state_dict_metadata}))
        raise ValueError(f"{folder}: the checkpoint holds no weights, only {found}")
    return sources


def _patterns(names: Mapping[str, str]) -> dict[str, list[tuple["re.Pattern[str]", str]]]:
    """By the number of {}s that a name of training has fewer than Hugging Face's."""
    found: dict[str, list[tuple[re.Pattern[str], str]]] = {"one": [], "stacked": []}
    for theirs, ours in names.items():
        kind = "stacked" if theirs.count("{}") > ours.count("{}") else "one"
        found[kind].append((re.compile(re.escape(ours).replace(r"\{\}", r"(\d+)")), theirs))
    return found


def _sources(
    name: str, entry: Any, known: Mapping[str, Any], pieces: _Pieces, stored: str
) -> Iterator[tuple[str, Source]]:
    """stored: its name in the files."""
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
    yield name, _source(stored, entry, pieces, shape, ())  # whoever fits it to the model says that it is unknown


def _source(name: str, entry: Any, pieces: _Pieces, shape: tuple[int, ...], lead: tuple[int, ...]) -> Source:
    dtype = entry.properties.dtype

    def read(index: Index) -> Tensor:
        part = pieces.part(name, entry, (*(slice(i, i + 1) for i in lead), *index))
        return part.flatten(0, 1) if lead else part

    kind = str(dtype).removeprefix("torch.")
    return Source(shape=shape, dtype=kind, gives=dtype, nbytes=math.prod(shape) * dtype.itemsize, read=read)
