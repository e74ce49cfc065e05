"""The provenance of a benchmark: command, device, versions and commit, with which every document begins."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Document = dict[str, Any]  # a JSON object: the result of a benchmark or a part of it


def provenance(device: str, **more_versions: str) -> Document:
    """Return the fields that every document begins with."""
    from whorl import device as devices

    return {
        "command": " ".join([_program(), *sys.argv[1:]]),
        "device": device,
        "device_name": devices.device_name(device),
        "versions": devices.versions() | more_versions,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _program() -> str:
    """Return how this process was started: `whorl`, or one of the scripts in `bench` at the top of the checkout."""
    script = Path(sys.argv[0]).resolve()
    return f"python -m bench.{script.stem}" if script.parent == Path(__file__).parents[2] / "bench" else "whorl"


def render_provenance(header: Mapping[str, Any]) -> list[str]:
    """Return the provenance as lines of text."""
    return [
        f"command   {header['command']}",
        f"device    {header['device']}: {header['device_name']}",
        "versions  " + ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
        f"commit    {header['commit']}, {header['date']}",
    ]


def commit() -> str:
    """Return the commit of this checkout, with " with changes" when files differ from it.

    In a copy without history it is the first line of the file `.commit`, which `make commit` writes before the copy is
    made, or else "unknown". WHORL_COMMIT takes precedence.
    """
    if named := os.environ.get("WHORL_COMMIT"):
        return named
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        written = root / ".commit"
        return written.read_text().split("\n")[0] if written.exists() else "unknown"
    return head.stdout.strip() + (" with changes" if changed.stdout else "")
