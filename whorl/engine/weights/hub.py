"""Find a model: in a folder, a file, the Hugging Face cache or its hub."""

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whorl import models
from whorl.device import is_installed

from ..model_names import HubModel, local_or_hub
from .checkpoint import read_config, some

log = logging.getLogger(__name__)
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
_HUB_LEFT = ("original/*", "consolidated*")  # the same weights in another format
# Types of GGUF files by preference, if none is requested: the smallest first that lose little.
_BEST = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0", "BF16", "F16", "F32")
_NO_MODELS = re.compile(r"mmproj|imatrix|-of-\d+\.gguf$", re.IGNORECASE)  # towers, statistics, parts of a file


def resolve(path_or_id: str | Path | None = None) -> Path:
    """Return a folder with config.json and weights, or a GGUF file.

    path_or_id: such a folder or file; the folder of a training run, of which the last checkpoint is taken; a Hugging
    Face id, `org/name` or `org/name@revision`, which is updated from the hub if there is a network and else taken from
    the cache; `org/name:FILE.gguf` or `org/name:Q4_K_M` for one of its GGUF files; the URL of one of these on
    huggingface.co; or None for the default model. Raises ValueError if there is no such model.
    """
    model = local_or_hub(path_or_id)
    return model if isinstance(model, Path) else _from_hub(model.id, model.revision, model.file)


def adapter_folder(path_or_id: str | Path) -> Path:
    """Return the folder of a PEFT adapter: an existing one, or that of a Hugging Face id, `org/name` or
    `org/name@revision`. Raises ValueError if there is none."""
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    model = None if folder.exists() else local_or_hub(str(path_or_id))
    if not isinstance(model, HubModel):
        raise ValueError(f"{path_or_id}: expected a folder with adapter_config.json, or a Hugging Face id")
    return _download(model.id, model.revision, "adapter_config.json", "adapter_model.*")


def _from_hub(name: str, revision: str | None, file: str | None) -> Path:
    """Download a model, or take it from the cache: safetensors if the repository has them, else one GGUF file.

    file: the GGUF file to take, by name or type; None: see `choose_gguf`.
    """
    if not is_installed("huggingface_hub"):
        raise ValueError(f"{name}: no such folder; to use it as a Hugging Face id: pip install huggingface_hub")
    is_new = not _cache(name).exists()
    if is_new:
        print(f"whorl: downloading {name} from huggingface.co, once", file=sys.stderr)
    path = _fetched(name, revision, file)
    if is_new:
        print(f"whorl: {name} lies in {path}; whorl rm {name} deletes it", file=sys.stderr)
    return path


def _cache(name: str) -> Path:
    """Return the folder of a model in the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _fetched(name: str, revision: str | None, file: str | None) -> Path:
    if file is not None:
        return _gguf(name, revision, _listed(name, revision) or [file], file)
    folder = _download(name, revision, "config.json")
    try:
        if (folder / "config.json").is_file():  # an unsupported model raises before its weights are downloaded
            models.find(read_config(folder))
        folder = _download(name, revision, *_HUB_FILES)
        if any(folder.glob("*.safetensors")):
            return folder
    except ValueError:  # config.json may be that of a larger model whose text part the GGUF files are
        listed = _listed(name, revision, folder)
        if not _is_only_gguf(listed):
            raise
    else:
        listed = _listed(name, revision, folder)
    return _gguf(name, revision, listed) if _is_only_gguf(listed) else folder


def _is_only_gguf(listed: Sequence[str]) -> bool:
    kinds = {Path(file).suffix for file in listed}
    return ".gguf" in kinds and ".safetensors" not in kinds


def _gguf(name: str, revision: str | None, listed: Sequence[str], requested: str | None = None) -> Path:
    files = [file for file in listed if file.endswith(".gguf") or file == requested]
    file = choose_gguf(name, files, requested)
    return _download(name, revision, file) / file


def _download(name: str, revision: str | None, *patterns: str) -> Path:
    """Return the folder of the files that match the patterns, from the hub or from the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    options: dict[str, Any] = {"revision": revision, "allow_patterns": [*patterns], "ignore_patterns": [*_HUB_LEFT]}
    try:
        return Path(snapshot_download(name, **options))
    except Exception as error:  # no network, no such model, not allowed, full disk, ...: the cache may have it
        try:
            return Path(snapshot_download(name, **options, local_files_only=True))
        except LocalEntryNotFoundError:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"{name}: no such folder, not in the Hugging Face cache, and the hub did not give it: {reason}"
            ) from error


def _listed(name: str, revision: str | None, folder: Path | None = None) -> list[str]:
    """Return the names of the repository's files; without the hub, of those in the cache. folder: where that is."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return [file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or []]
    except Exception:  # as in `_download`, which reports the error if the cache has nothing either
        try:
            local: dict[str, Any] = {"revision": revision, "allow_patterns": [], "local_files_only": True}
            folder = folder or Path(snapshot_download(name, **local))
        except LocalEntryNotFoundError:
            return []
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def choose_gguf(name: str, files: Sequence[str], requested: str | None) -> str:
    """Return one of a repository's files; ValueError if it is not certain which. requested: the name of a file, or the
    type of its weights, such as Q4_K_M; None: the best type."""
    candidates = [file for file in files if not _NO_MODELS.search(Path(file).name)]
    if requested is None and len(candidates) == 1:
        return candidates[0]
    for kind in _BEST if requested is None else [requested]:
        matches = [file for file in candidates if kind in (file, Path(file).name) or _is_of_type(file, kind)]
        if len(matches) == 1:
            log.info("%s: %s", name, matches[0])
            return matches[0]
    num_unusable = len(files) - len(candidates)
    unusable = f", and {num_unusable} that are a part or no model" if num_unusable else ""
    problem = "which GGUF file?" if requested is None else f"{requested} is not one GGUF file."
    names = some(candidates, 20) or "none"
    raise ValueError(f"{name}: {problem} Give {name}:FILE or {name}:TYPE; found {names}{unusable}")


def _is_of_type(file: str, kind: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(kind)}\.gguf$", file, re.IGNORECASE) is not None
