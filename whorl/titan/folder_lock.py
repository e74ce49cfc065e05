"""One run writes into a folder. The lock is the system's: it is gone when its holder is, however that ended."""

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
NOT_SUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # by a file system without locks


class Held(ValueError):
    """Another run writes there; the message says which."""


class FolderLock:
    """Taken when it is made; `release`, or the end of the process, gives it back. The file itself stays."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file: TextIOWrapper | None = (folder / FILE).open("a+", encoding="utf-8")  # not yet ours to empty
        try:
            self._take(self._file)
        except BaseException:
            self._file.close()
            raise

    def _take(self, file: TextIOWrapper) -> None:
        import fcntl  # not on Windows, where TorchTitan is not either

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Held(_who(self.folder, file)) from None
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            warnings.warn(
                f"{self.folder} cannot be locked ({error}): see to it yourself that no other run writes there",
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


def _who(folder: Path, file: TextIOWrapper) -> str:
    file.seek(0)
    holder: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # it may be just about to write its name
        holder = json.loads(file.read())
    if not holder:
        name, end = "one that has not said its name yet", "end it"
    else:
        name = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        end = f"end it (kill {holder['pid']} there)"
    return (
        f"another run writes into {folder}: {name}. Wait for it, or {end}; or give this run another folder: "
        "--job.dump_folder FOLDER"
    )


def check_free(folders: list[Path]) -> None:
    """Before anything is started. The run itself takes the locks: between the two another may have come."""
    for folder in folders:
        if folder.is_dir():
            FolderLock(folder).release()
