"""Lock the folder of a run, so that only one run writes into it.

The lock is a flock on a file in the folder; the operating system releases it when the process ends for any reason.
"""

import contextlib
import errno
import json
import os
import socket
import time
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Any

FILE = ".lock"
NOT_SUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # errors of a file system without locks


class FolderLocked(ValueError):
    """Another run writes into the folder; the message names it."""


class FolderLock:
    """A lock on a folder, acquired by the constructor and released by `release` or the end of the process.

    The lock file stays and names its last holder. Raises FolderLocked when another process has the lock; on a file
    system without locks it only warns.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # Append mode does not truncate the file, which another run may have locked.
        self._file: TextIOWrapper | None = (folder / FILE).open("a+", encoding="utf-8")
        try:
            self._acquire(self._file)
        except BaseException:
            self._file.close()
            raise

    def _acquire(self, file: TextIOWrapper) -> None:
        import fcntl  # Windows has neither fcntl nor TorchTitan

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderLocked(_describe_holder(self.folder, file)) from None
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            warnings.warn(
                f"{self.folder} cannot be locked ({error}); make sure that no other run writes into it",
                stacklevel=3,
            )
        file.truncate(0)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n")
        file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _describe_holder(folder: Path, file: TextIOWrapper) -> str:
    """Return the message of FolderLocked, with the process that the lock file names."""
    file.seek(0)
    holder: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # the holder may not have written its name yet
        holder = json.loads(file.read())
    if not holder:
        name, end = "a process that has not written its name yet", "end it"
    else:
        name = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        end = f"end it (kill {holder['pid']} there)"
    return (
        f"another run writes into {folder}: {name}. Wait for it, or {end}; or give this run another folder: "
        "--job.dump_folder FOLDER"
    )


def check_free(folders: list[Path]) -> None:
    """Raise FolderLocked if another run writes into one of the folders.

    This is for an early message. The run acquires the locks itself, because another run may start in between.
    """
    for folder in folders:
        if folder.is_dir():
            FolderLock(folder).release()
