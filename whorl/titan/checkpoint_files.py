"""Check whether a checkpoint of torch.distributed.checkpoint on disk is complete and undamaged."""

import shutil
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpoint import TRAIN_STATE

from whorl import digests
from whorl.checkpoint_index import METADATA, check_lengths, data_files, read_index
from whorl.titan.served_files import NAMES

BESIDE = NAMES | {digests.FILE}  # files in the folder that torch.distributed.checkpoint does not know


class BadCheckpoint(ValueError):
    """The error for a checkpoint that a run cannot continue from; the message says why and what to do."""


def read_complete(folder: Path) -> Metadata:
    """Return the metadata of a complete checkpoint; raises `BadCheckpoint` with the reason when it is not complete."""
    if not (folder / METADATA).is_file():
        names = sorted(p.name for p in folder.iterdir() if p.name not in BESIDE) if folder.is_dir() else []
        if any(name.endswith(".safetensors") or name.endswith(".safetensors.index.json") for name in names):
            raise BadCheckpoint(
                "it is a Hugging Face export; load it with checkpoint.initial_load_path and initial_load_in_hf"
            )
        if any(name.endswith(".distcp") for name in names) or not names:
            raise BadCheckpoint(f"it is incomplete: it has no {METADATA}, which is written last")
        raise BadCheckpoint(f"it is not a TorchTitan checkpoint: it has {', '.join(names[:4])} and no {METADATA}")
    try:
        metadata = read_index(folder)
        check_lengths(folder, metadata)
    except ValueError as e:
        raise BadCheckpoint(str(e)) from e
    return metadata


def check_digests(folder: Path, part: slice = slice(None)) -> None:
    """Raise `BadCheckpoint` unless the files of a complete checkpoint are those that its digests were written for.

    part: which of the files to check, where several ranks share the work. A checkpoint without digests, such as one of
    TorchTitan's own trainer, is not checked.
    """
    if not (folder / digests.FILE).is_file():
        return
    try:
        digests.check(folder, [METADATA, *sorted(data_files(read_index(folder)))][part])
    except (OSError, ValueError) as e:
        raise BadCheckpoint(str(e)) from e


def is_resumable(metadata: Metadata) -> bool:
    """Return whether the checkpoint has the state of a run and not only a model."""
    return f"{TRAIN_STATE}.step" in metadata.state_dict_metadata


def is_unfinished(folder: Path) -> bool:
    """Return whether the folder is a save that was not finished: it has data files and no `.metadata`, the last file.

    A folder without any file counts as well; the files for a server are disregarded.
    """
    names = [p.name for p in folder.iterdir() if p.name not in BESIDE]
    return METADATA not in names and all(n.endswith(".distcp") or n.startswith(METADATA) for n in names)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its metadata first, so that it never looks complete."""
    (folder / METADATA).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
