"""Check whether a checkpoint of torch.distributed.checkpoint on disk is complete."""

import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpoint import TRAIN_STATE

from whorl.titan.served_files import NAMES

METADATA = ".metadata"


class BadCheckpoint(ValueError):
    """The error for a checkpoint that a run cannot continue from; the message says why and what to do."""


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint; raises `BadCheckpoint` when it cannot be read."""
    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except Exception as e:  # a truncated pickle can raise any exception
        raise BadCheckpoint(f"its {METADATA} cannot be read ({type(e).__name__}: {e})") from e
    if not isinstance(metadata, Metadata) or not metadata.storage_data:
        raise BadCheckpoint(f"its {METADATA} was not written by torch.distributed.checkpoint")
    return metadata


def check_files(folder: Path, metadata: Metadata) -> None:
    """Raise `BadCheckpoint` unless every file that the metadata names exists with the length it was written with."""
    lengths: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        end = entry.offset + entry.length
        lengths[entry.relative_path] = max(end, lengths.get(entry.relative_path, 0))
    for name, length in sorted(lengths.items()):
        path = folder / name
        if not path.is_file():
            raise BadCheckpoint(f"{name} is missing")
        if path.stat().st_size != length:
            raise BadCheckpoint(f"{name} has {path.stat().st_size} bytes, expected {length}")


def read_complete(folder: Path) -> Metadata:
    """Return the metadata of a complete checkpoint; raises `BadCheckpoint` with the reason when it is not complete."""
    if not (folder / METADATA).is_file():
        names = sorted(p.name for p in folder.iterdir() if p.name not in NAMES) if folder.is_dir() else []
        if any(name.endswith(".safetensors") or name.endswith(".safetensors.index.json") for name in names):
            raise BadCheckpoint(
                "it is a Hugging Face export; load it with checkpoint.initial_load_path and initial_load_in_hf"
            )
        if any(name.endswith(".distcp") for name in names) or not names:
            raise BadCheckpoint(f"it is incomplete: it has no {METADATA}, which is written last")
        raise BadCheckpoint(f"it is not a TorchTitan checkpoint: it has {', '.join(names[:4])} and no {METADATA}")
    metadata = read_metadata(folder)
    check_files(folder, metadata)
    return metadata


def is_resumable(metadata: Metadata) -> bool:
    """Return whether the checkpoint has the state of a run and not only a model."""
    return f"{TRAIN_STATE}.step" in metadata.state_dict_metadata


def is_unfinished(folder: Path) -> bool:
    """Return whether the folder is a save that was not finished: it has data files and no `.metadata`, the last file.

    A folder without any file counts as well; the files for a server are disregarded.
    """
    names = [p.name for p in folder.iterdir() if p.name not in NAMES]
    return METADATA not in names and all(n.endswith(".distcp") or n.startswith(METADATA) for n in names)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its metadata first, so that it never looks complete."""
    (folder / METADATA).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
