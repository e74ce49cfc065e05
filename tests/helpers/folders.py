"""Where tests lie: a folder for each room of the package, and helpers that several rooms share."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Rooms import from each other by name alone, so no two files in them have the same name.
ROOMS = sorted(str(folder) for folder in (ROOT / "tests").iterdir() if folder.is_dir())


def python_path(*first: str | Path) -> str:
    """PYTHONPATH of a process that imports whorl and what tests share."""
    return os.pathsep.join([*map(str, first), str(ROOT), *ROOMS])
