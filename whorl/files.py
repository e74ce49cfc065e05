"""Output files and folders: whole under their names, or not there at all. It needs no torch."""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}  # errors of nothing but writing
_PARTIAL = re.compile(r"\..+\.\d+\.partial(\.\w+)?")  # see _create_beside
_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and others written in Rust do not raise OSError


class CannotWrite(OSError):
    """An output file that cannot be written; `str` of it is one line. `whorl` prints that line and exits with 1."""


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file in the folder of `path`, which takes its name when the block ends.

    After an error in the block `path` is as it was, and nothing else is left. A new file has the umask's mode, even if
    the block wrote through a library that makes private files; one that is replaced keeps its mode. A link stays a
    link. What is no regular file, such as /dev/stdout, is yielded as it is. Raises CannotWrite when the file cannot be
    made or the block runs out of space; other errors of the block pass.
    """
    with _one_line(path):
        target = path.resolve()
        if _is_special(target):
            yield path
            return
        partial, mode = _create_beside(target)
        try:
            yield partial
            _keep(partial, mode)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def is_partial(path: Path) -> bool:
    """Return whether the name is one of `output_file` before its end: a process that was killed leaves such a file."""
    return _PARTIAL.fullmatch(path.name) is not None


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`, which takes its name when the block ends; parents are made.

    After an error in the block `path` is as it was, and nothing else is left. Raises ValueError if `path` exists and is
    no empty folder, or if an earlier run left its folder behind, and CannotWrite when a folder cannot be made. What the
    block writes is its own affair: see `output_file`.
    """
    with _one_line(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path}: it exists; give a new folder or an empty one")
        partial = path.with_name(f"{path.name}.partial")
        if partial.exists():
            raise ValueError(f"{partial}: is left over from a run that did not end, or is still running; remove it")
        partial.mkdir(parents=True)
    try:
        yield partial
        with _one_line(path):
            partial.replace(path)  # takes the place of an empty folder
    except BaseException:
        shutil.rmtree(partial)
        raise


def check_output_file(path: Path) -> None:
    """Raise CannotWrite if `output_file` could not begin: called before the work whose result the file will hold."""
    with _one_line(path):
        target = path.resolve()
        if not _is_special(target):
            _create_beside(target)[0].unlink()


def _is_special(target: Path) -> bool:
    """Return whether the path is a device or a pipe; raises OSError for a folder."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return target.exists() and not target.is_file()


def _create_beside(target: Path) -> tuple[Path, int]:
    """Create an empty file in the target's folder; returns its path and the mode that the target shall have."""
    # The suffix stays last: matplotlib and others read the format from it.
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial{target.suffix}")
    number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        mode = (target.stat() if target.exists() else os.fstat(number)).st_mode
    finally:
        os.close(number)
    return partial, stat.S_IMODE(mode)


def _keep(partial: Path, mode: int) -> None:
    """Give the file its mode, and wait until its content is on the disk: a crash must not leave a name without it."""
    os.chmod(partial, mode)
    number = os.open(partial, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except CannotWrite:
        raise
    except OSError as error:
        raise CannotWrite(f"{path}: cannot be written: {error.strerror or error}") from error
    except Exception as error:
        if (number := _RUST.search(str(error))) is None:
            raise
        raise CannotWrite(f"{path}: cannot be written: {os.strerror(int(number[1]))}") from error
