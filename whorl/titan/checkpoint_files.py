"""One checkpoint on disk, of torch.distributed.checkpoint: is it whole, and what is wrong with it?"""

import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpoint import TRAIN_STATE

from whorl.titan.served_files import NAMES

METADATA = ".metadata"


class Refused(ValueError):
    """A checkpoint that cannot be continued; the message says what was found and what to do."""


def read_metadata(folder: Path) -> Metadata:
    try:
        found = dcp.FileSystemReader(folder).read_metadata()
    except Exception as e:  # a pickle of which a part is missing can raise anything
        raise Refused(f"its {METADATA} cannot be read ({type(e).__name__}: {e})") from e
    if not isinstance(found, Metadata) or not found.storage_data:
        raise Refused(f"its {METADATA} is not torch.distributed.checkpoint's")
    return found


def check_files(folder: Path, metadata: Metadata) -> None:
    """Every file that the metadata names is there, as long as it was written."""
    lengths: dict[str, int] = {}
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        lengths[place.relative_path] = max(end, lengths.get(place.relative_path, 0))
    for name, length in sorted(lengths.items()):
        path = folder / name
        if not path.is_file():
            raise Refused(f"{name} is missing")
        if path.stat().st_size != length:
            raise Refused(f"{name} has {path.stat().st_size} bytes, written were {length}")


def read_whole(folder: Path) -> Metadata:
    """The metadata of a whole checkpoint; else `Refused` says what is wrong with it."""
    if not (folder / METADATA).is_file():
        names = sorted(p.name for p in folder.iterdir() if p.name not in NAMES) if folder.is_dir() else []
        if any(name.endswith(".safetensors") or name.endswith(".safetensors.index.json") for name in names):
            raise Refused("it is a Hugging Face export: load it with checkpoint.initial_load_path and _in_hf")
        if any(name.endswith(".distcp") for name in names) or not names:
            raise Refused(f"it has no {METADATA}: writing it was never finished")
        raise Refused(f"it has no {METADATA} and is no checkpoint of TorchTitan; it has {', '.join(names[:4])}")
    metadata = read_metadata(folder)
    check_files(folder, metadata)
    return metadata


def is_resumable(metadata: Metadata) -> bool:
    return f"{TRAIN_STATE}.step" in metadata.state_dict_metadata


def is_unfinished(folder: Path) -> bool:
    """Nothing but data, and what a server needs beside it: torch writes `.metadata` when all of it is there."""
    names = [p.name for p in folder.iterdir() if p.name not in NAMES]
    return METADATA not in names and all(n.endswith(".distcp") or n.startswith(METADATA) for n in names)


def remove(folder: Path) -> None:
    (folder / METADATA).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
