"""Ray for the tests, in a folder of its own: it brings versions of packages that the others must not meet."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "ray"
_SECONDS = 600


def requirement() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(each for each in extras["ray"] if each.startswith("ray["))


def environment(**more: str) -> dict[str, str]:
    """Of a process that has Ray; the test is skipped where that cannot be had."""
    paths = [str(ROOT), str(ROOT / "tests")]
    if importlib.util.find_spec("ray") is None:
        _install()
        paths.append(str(FOLDER))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def _install() -> None:
    done = FOLDER / "installed.txt"
    if done.is_file() and done.read_text() == requirement():
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", str(FOLDER), requirement()]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{requirement()} was not downloaded within {_SECONDS} seconds")
    if made.returncode != 0:
        pytest.skip(f"{requirement()} cannot be installed here: {made.stderr.strip().splitlines()[-1:]}")
    done.write_text(requirement())
