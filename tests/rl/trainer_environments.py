"""A virtual environment for each trainer: their requirements contradict those of the tests."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from client_environments import made
from folders import ROOT, python_path
from package_index import clean_environment

HERE = Path(__file__).parent
FOLDER = ROOT / ".cache" / "trainers"
_WHORL = ("torch==2.13.0", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "gguf", "numpy", "typer", "rich")
_WHORL += ("PyYAML", "fastapi", "uvicorn", "prometheus-client", "llguidance>=1.9", "setuptools>=77", "triton")
# Of each: what pip installs with its requirements, and what it installs alone.
REQUIREMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "verl": (
        (*_WHORL, "ray>=2.60,<2.61", "tensordict==0.10.0", "transformers>=5.5.3,<5.11,!=5.6.0", "hydra-core"),
        ("codetiming", "pandas", "pyzmq", "cachetools", "torchdata", "peft", "accelerate", "datasets", "dill"),
        ("--no-deps", "verl==0.9.1"),
    ),
    "titan": (
        (*_WHORL, "torchmonarch==0.7.0", "pygtrie", "tyro", "einops", "spmd_types==0.2.3", "datasets<4.8"),
        ("torchdata", "tensorboard", "pillow", "cloudpickle"),
        ("--no-deps", "torchtitan==0.3.0", "torchstore==0.1.2", "torch_checkpointing"),
    ),
}


def environment(name: str) -> Path:
    """The python of a trainer. It is made once; the test is skipped where nothing can be downloaded."""
    folder = FOLDER / name
    made(folder, REQUIREMENTS[name], (lambda: _fit_torchstore(folder)) if name == "titan" else lambda: None)
    return folder / "bin" / "python"


def _fit_torchstore(folder: Path) -> None:
    """torchstore on the index is older than this Monarch, which wants all endpoints of an actor to be async."""
    (file,) = folder.glob("lib/python*/site-packages/torchstore/controller.py")
    file.write_text(re.sub(r"(@endpoint\n    )def ", r"\1async def ", file.read_text()))


def run(name: str, *arguments: str | Path, first: tuple[Path, ...] = (), seconds: float = 1500, **more: str) -> Any:
    """What `use_NAME.py` prints last, as JSON. first: folders before the others in its path."""
    python = environment(name)
    variables = clean_environment() | {"PYTHONPATH": python_path(*first), "OMP_NUM_THREADS": "1"} | more
    command = [str(python), str(HERE / f"use_{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def write_metadata(folder: Path, python: Path) -> None:
    """What pip would install beside whorl: its entry points, from pyproject.toml."""
    command = [str(python), "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": ""}, check=True, capture_output=True)
