"""Outcomes of trials, stored on disk between starts of a process.

A trial is a test whether a faster matrix product of a library gives, bit for bit, the numbers of the slower product
that an operator promises. The outcome depends on the library and on our code, so one file belongs to one machine, as
`whorl.device.arithmetic_of` describes it, and to one state of our source files; other files are not touched. A damaged
file or an unwritable folder is never an error: the trials are run again.
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
_trial_seconds: list[float] = []  # the duration of each trial that this process has run


def num_trials() -> int:
    """Return how many trials this process has run, not counting outcomes read from disk."""
    return len(_trial_seconds)


def seconds() -> float:
    """Return how many seconds the trials of this process have taken."""
    return sum(_trial_seconds)


class TrialStore:
    """Outcomes of one kind of trial.

    name: the prefix of its file names; sources: paths of source files whose change makes stored outcomes invalid.
    """

    def __init__(self, name: str, *sources: str) -> None:
        self.name, self._sources = name, sources
        self._files: dict[str, _File | None] = {}  # by device

    def outcome(self, key: str, device: str, trial: Callable[[], bool]) -> bool:
        """Return the stored outcome of `trial` on this machine; where none is stored, run the trial and store it.

        key: everything that the outcome depends on besides the machine and our code, such as shapes, dtypes and
        threads; device: the torch device type that the trial runs on.
        """
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
    """The outcomes on one machine. Of processes that write at once the last wins; each adds to what it has read."""

    def __init__(self, path: Path, machine: dict[str, str]) -> None:
        self.path, self._machine = path, machine
        self._can_write = True
        self.outcomes = self._read()

    def _read(self) -> dict[str, bool]:
        try:
            document: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            return self._ignore(f"it cannot be read: {error}")
        is_ours = isinstance(document, dict) and document.get("format") == _FORMAT
        if not is_ours or document.get("machine") != self._machine:
            return self._ignore("it is of another machine, or of another program")
        outcomes = document.get("outcomes")
        if not isinstance(outcomes, dict) or not all(isinstance(value, bool) for value in outcomes.values()):
            return self._ignore("its outcomes are not true or false")
        return outcomes

    def _ignore(self, why: str) -> dict[str, bool]:
        log.warning("%s: ignored, and written anew: %s", self.path, why)
        return {}

    def write(self) -> None:
        """Replace the file atomically, so that a reader sees the old file or the new one."""
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
            log.warning("%s: not written, so the next start runs its trials again: %s", self.path, error)


def _timed(trial: Callable[[], bool]) -> bool:
    started = time.perf_counter()
    outcome = trial()
    _trial_seconds.append(time.perf_counter() - started)
    return outcome


@functools.cache
def _digest(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()
