"""The index of a trainer's checkpoint, read as data: `.metadata` of torch.distributed.checkpoint.

It is a pickle, and a pickle can name any function to be called. Unpickling is restricted to the classes of such an
index, so that no code from a checkpoint is run.
"""

import pickle
import re
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"  # written last: a checkpoint without it is incomplete
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
    """Loads only the classes that such an index has."""

    def find_class(self, module: str, name: str) -> Any:
        import torch  # here, so that the name of the index can be known without it

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which no such index has")


def read_index(folder: Path) -> "Metadata":
    """Return the index of a checkpoint; raises ValueError when it is not one, or not one of files in this folder."""
    try:
        with (folder / METADATA).open("rb") as file:
            index = _Unpickler(file).load()
        _check(index)
    except Exception as error:  # a damaged pickle may raise anything
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(
            f"its {METADATA} cannot be read as an index of torch.distributed.checkpoint ({kind}{error})"
        ) from error
    return index  # type: ignore[no-any-return]


def _check(index: Any) -> None:
    """Raise an exception unless all of the index has the types and the bounds that readers rely on."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

    if not isinstance(index, Metadata) or not index.storage_data:
        raise ValueError("it names no data")
    places = set()
    for key, place in index.storage_data.items():
        is_place = isinstance(key, MetadataIndex) and isinstance(place, _StorageInfo)
        if not is_place or not _are_sizes((place.offset, place.length)):
            raise ValueError(f"its place of {key!r:.80} is damaged")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"the data is transformed ({place.transform_descriptors}), not plain")
        places.add((key.fqn, tuple(key.offset or ())))
    for name in {place.relative_path for place in index.storage_data.values()}:
        if name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} is not a file of this folder")
    for name, entry in index.state_dict_metadata.items():
        is_bytes = isinstance(entry, BytesStorageMetadata)
        if not isinstance(name, str) or not (is_bytes or _is_tensor(name, entry, places)):
            raise ValueError(f"its entry {name!r:.80} is damaged")


def _is_tensor(name: str, entry: Any, places: Container[tuple[str, tuple[int, ...]]]) -> bool:
    """Return whether an entry describes a tensor with pieces that lie inside it, each with a place in a file."""
    import torch

    is_whole = isinstance(entry.properties.dtype, torch.dtype) and _are_sizes(entry.size)
    for chunk in entry.chunks:
        is_whole &= _are_sizes(chunk.offsets) and _are_sizes(chunk.sizes)
        is_whole &= all(o + s <= end for o, s, end in zip(chunk.offsets, chunk.sizes, entry.size, strict=True))
        is_whole &= (name, tuple(chunk.offsets)) in places
    return is_whole


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values)


def why_unreadable(error: BaseException) -> str:
    """Return a sentence for an error of `torch.load`, whose own one advises to run the code that a file names."""
    if match := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it names {match[1]}, and reading that could run any code"
    return "it is damaged" if isinstance(error, pickle.UnpicklingError) else f"{type(error).__name__}: {error}"


def data_files(index: "Metadata") -> dict[str, int]:
    """Return the files of a checkpoint by name, and the length that each was written with."""
    lengths: dict[str, int] = {}
    for place in index.storage_data.values():
        lengths[place.relative_path] = max(lengths.get(place.relative_path, 0), place.offset + place.length)
    return lengths


def check_lengths(folder: Path, index: "Metadata") -> None:
    """Raise ValueError unless each file of a checkpoint has the length that it was written with."""
    for name, length in sorted(data_files(index).items()):
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing: the checkpoint is incomplete")
        if path.stat().st_size != length:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, expected {length}")
