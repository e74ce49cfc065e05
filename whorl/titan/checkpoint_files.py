"""The files of a checkpoint of torch.distributed.checkpoint: checked, written with digests, and read as data.

torch's own reader runs what the pickles of a checkpoint name. Here its index is restricted to the classes of an index,
and its values to tensors and plain values.
"""

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torchtitan.components.checkpoint import DATALOADER, TRAIN_STATE, AsyncMode

from whorl import digests
from whorl.checkpoint_index import METADATA, check_lengths, data_files, read_index, why_unreadable
from whorl.files import CannotWrite, is_partial
from whorl.titan.served_files import NAMES

BESIDE = NAMES | {digests.FILE}  # files in the folder that torch.distributed.checkpoint does not know


class BadCheckpoint(ValueError):
    """The error for a checkpoint that a run cannot continue from; the message says why and what to do."""


def _names(folder: Path) -> list[str]:
    """Return the names of torch's files: not those for a server, nor a file that was being written when a run died."""
    return sorted(p.name for p in folder.iterdir() if p.name not in BESIDE and not is_partial(p))


def read_complete(folder: Path) -> Metadata:
    """Return the metadata of a complete checkpoint; raises `BadCheckpoint` with the reason when it is not complete."""
    if not (folder / METADATA).is_file():
        names = _names(folder) if folder.is_dir() else []
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
    names = _names(folder)
    return METADATA not in names and all(n.endswith(".distcp") or n.startswith(METADATA) for n in names)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its metadata first, so that it never looks complete."""
    (folder / METADATA).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# ---- writing


class _DigestedFiles(FileSystem):
    """torch's file system, with the digest of each file that is written, by its name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        path = Path(path)
        if mode != "wb":
            raise ValueError(f"{path} is opened with mode {mode}, expected wb")
        try:
            with digests.DigestedFile(path) as file:
                yield file
        except OSError as error:
            path.unlink(missing_ok=True)  # half of it, which would also leave no room for the log
            raise CannotWrite(f"{path}: cannot be written: {error.strerror or error}") from error
        self.digests[path.name] = file.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give the index its name, which makes the checkpoint complete; the digests are written before."""
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)
        digests.write(Path(path).parent, self.digests)
        super().rename(path, new_path)


@dataclass(frozen=True)
class _DigestedResult(WriteResult):
    """What rank 0 learns of an item that a rank has written, with the digest of its file."""

    digest: str


class Writer(dcp.FileSystemWriter):
    """torch's writer, which also writes the digests of all files in the folder."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.fs: _DigestedFiles = _DigestedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [_DigestedResult(**vars(r), digest=self.fs.digests[r.storage_data.relative_path]) for r in written]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write digests and index on rank 0, when all ranks have written their data."""
        written = [r for part in results for r in part if isinstance(r, _DigestedResult)]
        self.fs.digests = {r.storage_data.relative_path: r.digest for r in written}
        self.fs.digests |= {p.name: digests.digest(p) for p in Path(self.path).iterdir() if p.name in NAMES}
        super().finish(metadata, results)


def write_states(
    states: dict[str, Any], folder: str, mode: AsyncMode, group: ProcessGroup | None, stager: AsyncStager | None
) -> Any:
    """Write states as `dcp.save` does; in the background, with the result of `dcp.async_save`, unless mode is DISABLED.

    stager: copies the states for the background, where the writer itself would do so otherwise.
    """
    if mode == AsyncMode.DISABLED:
        dcp.save(states, storage_writer=Writer(folder))
        return None
    in_process = mode == AsyncMode.ASYNC_WITH_PINNED_MEM
    return dcp.async_save(
        states,
        storage_writer=Writer(folder),
        process_group=group,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD,
        async_stager=stager,
    )


# ---- reading


class _Reader(dcp.FileSystemReader):
    def read_metadata(self) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)  # which would run what `value` names


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise BadCheckpoint(
            f"the state of its data has {module}.{name} and not only plain values; reading that could run any code. "
            f"Skip the state of the data with --checkpoint.exclude_from_loading {DATALOADER}"
        )


class _PlainData:
    """The loader of a run, whose state is checked before it is loaded: TorchTitan's loaders have pickles in it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for value in state_dict.values():
            if isinstance(value, bytes):
                _PlainUnpickler(io.BytesIO(value)).load()
        self.loader.load_state_dict(state_dict)


def read_states(states: dict[str, Any], folder: str | Path, *, no_dist: bool = False) -> None:
    """Load states as `dcp.load` does, without running code from the files.

    no_dist: this process reads alone. Raises BadCheckpoint when data cannot be read, or has more than plain values.
    """
    if DATALOADER in states:
        states[DATALOADER] = _PlainData(states[DATALOADER])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist disables it
        try:
            dcp.load(states, storage_reader=_Reader(folder), planner=_Planner(), no_dist=no_dist)
        except CheckpointException as e:
            error = first_error(e)
            raise BadCheckpoint(f"its data cannot be read: {why_unreadable(error)}") from e


def first_error(errors: CheckpointException) -> BaseException:
    """Return the error of the first rank that has one; torch raises those of all ranks with their traces."""
    return min(errors.failures.items())[1][0]
