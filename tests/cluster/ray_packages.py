"""Ray for the tests, in a folder of its own: it brings versions of packages that the others must not meet."""

import importlib.util
import os
import sys
import tomllib
from pathlib import Path

from folders import python_path
from package_index import pip

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "ray"


def requirement() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(name for name in extras["ray"] if name.startswith("ray["))


def environment(**more: str) -> dict[str, str]:
    """Of a process that has Ray; the test is skipped where that cannot be had."""
    paths = [python_path()]
    if importlib.util.find_spec("ray") is None:
        _install()
        paths.append(str(FOLDER))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def _install() -> None:
    done = FOLDER / "installed.txt"
    if not done.is_file() or done.read_text() != requirement():
        pip(sys.executable, "install", "--upgrade", "--target", str(FOLDER), requirement())
        done.write_text(requirement())
