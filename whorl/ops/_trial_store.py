"""What trials found, kept on disk between starts: which products of a library have the bits that they must have.

A trial compares a library's product with ours. Its outcome depends on both, so a file is for one machine, as
`whorl.device.arithmetic_of` describes it, and for one state of the code that was tried; every other file is left alone.
Nothing that is wrong with a file or a folder ends anything: the trials are made again.
"""

import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whorl.device import arithmetic_of, cache_folder

log = logging.getLogger(__name__)
_FORMAT = 1
_made: list[float] = []  # seconds of the trials of this process


def num_made() -> int:
    """Trials that this process has made itself."""
    return len(_made)


def seconds() -> float:
    """That they took."""
    return sum(_made)


class TrialStore:
    """Outcomes of one kind of trial. name: of its files; sources: files with the code whose results are compared."""

    def __init__(self, name: str, *sources: str) -> None:
        self.name, self._sources = name, sources
        self._files: dict[str, _File | None] = {}  # by device

    def outcome(self, key: str, device: str, trial: Callable[[], bool]) -> bool:
        """What `trial` said when it was last made on such a machine, or says now. key: all that it depends on beside
        the machine: shapes, dtypes, threads."""
        if device not in self._files:
            self._files[device] = self._open(device)
        file = self._files[device]
        if file is None:
            return _timed(trial)
        if key not in file.outcomes:
            file.outcomes[key] = _timed(trial)
            file.write()
        return file.outcomes[key]

    def _open(self, device: str) -> "_File | None":
        folder, machine = cache_folder(), arithmetic_of(device)
        if folder is None or machine is None:
            return None
        machine |= {"code": _digest(self._sources)}
        name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
        return _File(folder / "trials" / f"{self.name}-{name}.json", machine)


class _File:
    """The outcomes on one machine. Processes may write at once: each adds to what it finds, the last one stays."""

    def __init__(self, path: Path, machine: dict[str, str]) -> None:
        self.path, self._machine = path, machine
        self._can_write = True
        self.outcomes = self._read()

    def _read(self) -> dict[str, bool]:
        try:
            found: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            return self._ignored(f"it cannot be read: {error}")
        if not isinstance(found, dict) or found.get("format") != _FORMAT or found.get("machine") != self._machine:
            return self._ignored("it is of another machine, or of another program")
        outcomes = found.get("outcomes")
        if not isinstance(outcomes, dict) or not all(isinstance(value, bool) for value in outcomes.values()):
            return self._ignored("its outcomes are not true or false")
        return outcomes

    def _ignored(self, why: str) -> dict[str, bool]:
        log.warning("%s: ignored, and written anew: %s", self.path, why)
        return {}

    def write(self) -> None:
        """All at once: who reads sees the old file or the new one."""
        if not self._can_write:
            return
        self.outcomes = self._read() | self.outcomes
        document = {"format": _FORMAT, "machine": self._machine, "outcomes": self.outcomes}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            number, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
            try:
                with os.fdopen(number, "w", encoding="utf-8") as file:
                    json.dump(document, file, indent=1)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self._can_write = False
            log.warning("%s: not written, so the next start makes its trials again: %s", self.path, error)


def _timed(trial: Callable[[], bool]) -> bool:
    started = time.perf_counter()
    found = trial()
    _made.append(time.perf_counter() - started)
    return found


@functools.cache
def _digest(sources: tuple[str, ...]) -> str:
    found = hashlib.sha256()
    for source in sources:
        found.update(Path(source).read_bytes())
    return found.hexdigest()
