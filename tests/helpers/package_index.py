"""pip in the tests. A package index that cannot be reached skips a test; every other failure of pip is a fault."""

import os
import subprocess
from pathlib import Path

import pytest

SECONDS = 1200
# What pip says when the index cannot be reached.
_OFFLINE = ("after connection broken by", "Could not fetch URL", "Network is unreachable", "Temporary failure in name")
# What would let another environment see this checkout.
_OURS = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")


def clean_environment() -> dict[str, str]:
    """Return the variables for a process that must not see this checkout."""
    return {name: value for name, value in os.environ.items() if name not in _OURS}


def pip(python: Path | str, *words: str, cwd: Path | None = None) -> None:
    """Run pip of an environment. Skips the test without a package index, fails it when pip fails otherwise."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words, "-q"]
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode == 0:
        return
    if any(sign in done.stderr for sign in _OFFLINE):
        pytest.skip(f"the package index cannot be reached: pip {' '.join(words)}")
    pytest.fail(f"pip {' '.join(words)}:\n{done.stderr[-3000:]}")
