"""Checkpoints of the trainer on disk: digests that notice every changed byte, and nothing in a file that is run."""

import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")

from torch.utils.data import IterableDataset
from torchtitan.components.checkpoint import AsyncMode
from torchtitan.components.dataloader import ParallelAwareDataloader

from whorl import digests
from whorl.checkpoint_index import METADATA, read_index
from whorl.titan.checkpoint_files import (
    BadCheckpoint,
    Writer,
    check_digests,
    read_complete,
    read_states,
    write_states,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def states() -> dict[str, Any]:
    """A tensor, and values that torch pickles."""
    return {"weight": torch.arange(12.0).view(3, 4), "train_state": {"step": 7, "betas": (0.9, 0.95), "raw": b"bytes"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "step-7"
    path.mkdir()
    (path / "config.json").write_text("{}")
    write_states(states(), str(path), AsyncMode.DISABLED, None, None)
    return path


def test_what_was_written_is_read(folder: Path) -> None:
    empty: dict[str, Any] = {"weight": torch.zeros(3, 4), "train_state": {"step": 0, "betas": (), "raw": b""}}
    read_states(empty, folder, no_dist=True)
    assert torch.equal(empty["weight"], states()["weight"])
    assert empty["train_state"] == states()["train_state"]
    check_digests(folder)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="a common tool that is not here")
def test_a_common_tool_checks_the_digests(folder: Path) -> None:
    def said() -> subprocess.CompletedProcess[str]:
        command = ["sha256sum", "-c", digests.FILE]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    assert said().stdout.splitlines() == [".metadata: OK", "__0_0.distcp: OK", "config.json: OK"]
    (folder / "config.json").write_text("[]")
    assert "config.json: FAILED" in said().stdout


def is_undamaged(folder: Path) -> None:
    read_complete(folder)
    check_digests(folder)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp", digests.FILE])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_one_bit_is_noticed(name: str, share: float, folder: Path) -> None:
    """In all of a file, padding included; which the lengths and torch's reader do not notice."""
    path = folder / name
    at = int(share * path.stat().st_size)
    flip(path, at)
    with pytest.raises(
        BadCheckpoint, match=r"is not as it was written: its SHA-256 is \w+|cannot be read|has the line"
    ):
        is_undamaged(folder)
    flip(path, at)
    check_digests(folder)


def test_ranks_share_the_files(folder: Path) -> None:
    flip(folder / "__0_0.distcp", 100)
    check_digests(folder, slice(0, None, 2))  # the index alone
    with pytest.raises(BadCheckpoint, match=r"__0_0\.distcp is not as it was written"):
        check_digests(folder, slice(1, None, 2))
    check_digests(folder, slice(2, None, 3))
    (folder / digests.FILE).unlink()
    check_digests(folder)  # one of TorchTitan's own trainer


def test_digests_are_there_before_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed in between leaves an incomplete checkpoint, and not one without digests."""
    monkeypatch.setattr(digests, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(BaseException):  # noqa: B017, PT011  # whatever torch makes of it
        write_states(states(), str(tmp_path / "step-1"), AsyncMode.DISABLED, None, None)
    assert not (tmp_path / "step-1" / METADATA).exists()


def test_a_writer_goes_to_another_process(tmp_path: Path) -> None:
    """To that of checkpoint.async_mode async_with_pinned_mem."""
    writer = pickle.loads(pickle.dumps(Writer(str(tmp_path))))
    assert isinstance(writer, Writer)
    assert writer.path == tmp_path


# ---- code


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"echo run > {self.mark}",)


def test_an_index_runs_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    for read in (read_complete, lambda folder: read_states(states(), folder, no_dist=True)):
        with pytest.raises(BadCheckpoint, match=r"its \.metadata cannot be read .*system, which no such index has"):
            read(folder)
    assert not (tmp_path / "mark").exists()


def test_values_run_nothing(folder: Path, tmp_path: Path) -> None:
    """torch's planner unpickles every value that is not a tensor without a restriction."""
    index = read_index(folder)
    place = next(place for key, place in index.storage_data.items() if key.fqn == "train_state.step")
    data = folder / place.relative_path
    place.offset = data.stat().st_size
    with data.open("ab") as file:
        torch.save(Evil(tmp_path / "mark"), file)
    place.length = data.stat().st_size - place.offset
    (folder / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(
        BadCheckpoint, match=r"its data cannot be read: it names \w+\.system, and reading that could run any code"
    ):
        read_states(states(), folder, no_dist=True)
    assert not (tmp_path / "mark").exists()


class Loader:
    """As TorchTitan's loaders do, it keeps its state as a pickle."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": pickle.dumps(self.state), "world_size": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = pickle.loads(state_dict["dp_rank_0"])


class Numbers(IterableDataset[int]):
    """As TorchTitan's datasets, it has a state."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_torchtitans_own_loaders_resume(num_workers: int, tmp_path: Path) -> None:
    def loader() -> ParallelAwareDataloader:
        return ParallelAwareDataloader(Numbers(), 0, 1, batch_size=2, num_workers=num_workers)

    first = loader()
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(2)] == [[1, 2], [3, 4]]
    write_states({"dataloader": first}, str(tmp_path / "step-2"), AsyncMode.DISABLED, None, None)
    second = loader()
    read_states({"dataloader": second}, tmp_path / "step-2", no_dist=True)
    assert next(iter(second)).tolist() == [5, 6]


def test_the_state_of_data_runs_nothing(tmp_path: Path) -> None:
    for name, state in (("plain", {"epoch": 3, "buffer": [1, 2], "none": None}), ("evil", Evil(tmp_path / "mark"))):
        write_states({"dataloader": Loader(state)}, str(tmp_path / name), AsyncMode.DISABLED, None, None)
    loader = Loader(None)
    read_states({"dataloader": loader}, tmp_path / "plain", no_dist=True)
    assert loader.state == {"epoch": 3, "buffer": [1, 2], "none": None}
    with pytest.raises(BadCheckpoint, match=r"the state of its data has \w+\.system .*exclude_from_loading dataloader"):
        read_states({"dataloader": Loader(None)}, tmp_path / "evil", no_dist=True)
    assert not (tmp_path / "mark").exists()
