"""Where figures come from: every document of a benchmark begins with these."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whorl import device as devices

Document = dict[str, Any]  # what a benchmark found, as JSON has it


def provenance(device: str, **more_versions: str) -> Document:
    return {
        "command": " ".join(["whorl", *sys.argv[1:]]),
        "device": device,
        "device_name": devices.device_name(device),
        "versions": devices.versions() | more_versions,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def render_provenance(header: Mapping[str, Any]) -> list[str]:
    return [
        f"command   {header['command']}",
        f"device    {header['device']}: {header['device_name']}",
        "versions  " + ", ".join(f"{name} {version}" for name, version in header["versions"].items()),
        f"commit    {header['commit']}, {header['date']}",
    ]


def commit() -> str:
    """What WHORL_COMMIT says, for files that were copied from a checkout; else of the checkout this runs from."""
    if named := os.environ.get("WHORL_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with changes" if changed.stdout else "")
