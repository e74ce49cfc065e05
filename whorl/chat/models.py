"""`whorl list`, `pull`, `rm`, `show` and `ps`: the models of this machine, and what a server runs."""

import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whorl.engine import model_names
from whorl.engine.model_names import HubModel

from .blocks import HARMLESS


@dataclass(frozen=True, slots=True)
class Stored:
    """A model of this machine. size: its bytes."""

    name: str
    size: int
    path: Path


def stored() -> list[Stored]:
    """Return the default model, if it is installed, and the models of the Hugging Face cache."""
    return [*_default(), *(Stored(repo.repo_id, repo.size_on_disk, repo.repo_path) for repo in _cached())]


def _default() -> Iterator[Stored]:
    try:
        path = model_names.local_or_hub(None)
    except ValueError:
        return
    assert isinstance(path, Path)
    yield Stored("SmolLM2-135M-Instruct (the default)", path.stat().st_size, path)


def _cached() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    return sorted(repos, key=lambda repo: str(repo.repo_id))


def listed() -> str:
    """Return a table of the models of this machine."""
    models = stored()
    if not models:
        return "no models here: whorl pull ORG/NAME downloads one"
    width = max(len(model.name) for model in models)
    return "\n".join(f"{model.name:{width}}  {readable(model.size):>9}  {model.path}" for model in models)


def readable(size: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def pull(name: str) -> str:
    """Download a model; say where it lies."""
    if isinstance(model_names.local_or_hub(name), Path):
        raise ValueError(f"pull: {name} is on this machine already")
    from whorl.engine.weights import resolve

    path = resolve(name)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{name}: {readable(sum(file.stat().st_size for file in files))} in {path}"


def remove(name: str) -> str:
    """Delete a model from the Hugging Face cache; ValueError if it is not there."""
    model = model_names.local_or_hub(model_names.plain_name(name))
    if not isinstance(model, HubModel):
        raise ValueError(f"rm: {name} is not of the Hugging Face cache: delete the file or folder yourself")
    if model.file or model.revision:
        raise ValueError(f"rm: deletes all files of a model: expected {model.id}, got {name}")
    repo = next((repo for repo in _cached() if repo.repo_id == model.id), None)
    if repo is None:
        raise ValueError(f"rm: {model.id} is not in the Hugging Face cache; whorl list shows what is")
    from huggingface_hub import scan_cache_dir

    scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    return f"{model.id}: deleted, {readable(repo.size_on_disk)} freed"


def shown(name: str | None) -> dict[str, Any]:
    """Describe a model of this machine from its files, without its weights."""
    from whorl.engine.tokenizer import Tokenizer
    from whorl.engine.weights import resolve

    path = resolve(name)
    files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.is_file()]
    about: dict[str, Any] = {"model": name or "the default", "path": str(path)}
    about["size"] = readable(sum(file.stat().st_size for file in files))
    about |= _from_gguf(path) if path.is_file() else _from_config(path)
    tokenizer = Tokenizer.from_path(path)
    about |= {"vocabulary": len(tokenizer), "sampling": tokenizer.sampling}
    template = tokenizer.template.sources.get("default") or ""
    about["chat template"] = ("with tools" if "tools" in template else "yes") if template else "none"
    return about


def _from_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'}: is a {type(config).__name__}, expected an object")
    text = config.get("text_config") or config
    method = (config.get("quantization_config") or {}).get("quant_method", "none")
    names = {"context": "max_position_embeddings", "layers": "num_hidden_layers", "hidden size": "hidden_size"}
    sizes = {shown_as: text.get(key) for shown_as, key in names.items()}
    return {"architecture": ", ".join(config.get("architectures") or [config.get("model_type", "?")]), **sizes} | {
        "quantization": method
    }


def _from_gguf(path: Path) -> dict[str, Any]:
    from gguf import GGMLQuantizationType

    from whorl.engine.gguf_header import read_header

    header = read_header(path)
    counts: dict[str, int] = {}
    for _, dims, code, _ in header.tensors:
        name = GGMLQuantizationType(code).name
        counts[name] = counts.get(name, 0) + math.prod(dims)
    kind = header.metadata.get("general.architecture")
    keys = {"context": "context_length", "layers": "block_count", "hidden size": "embedding_length"}
    sizes = {name: header.metadata.get(f"{kind}.{key}") for name, key in keys.items()}
    parameters = f"{sum(counts.values()) / 1e6:.4g} million"
    quantization = max(counts, key=lambda name: counts[name])
    return {"architecture": kind, "parameters": parameters, "quantization": quantization, **sizes}


def as_table(about: dict[str, Any]) -> str:
    """Return a description as lines of a name and a value. A file may have control characters for the terminal."""
    lines = (f"{name:14} {_text(value)}" for name, value in about.items() if value is not None)
    return "\n".join(line.translate(HARMLESS) for line in lines)


def _text(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def running(url: str, key: str | None = None) -> str:
    """Return what a server runs; ValueError if none answers."""
    key = key or os.environ.get("WHORL_API_KEY", "").split(" ")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment gets the key

    def ask(path: str) -> Any:
        with directly.open(urllib.request.Request(f"{url}{path}", headers=headers), timeout=5) as response:
            return json.load(response)

    try:
        models, engine = ask("/api/ps")["models"], ask("/page/stats")["engine"]
        counts = f"{engine['num_running']} running, {engine['num_waiting']} waiting"
        lines = [f"{m['name']}  {readable(m['size'])}  context {m['context_length']}  {counts}  {url}" for m in models]
    except urllib.error.HTTPError as error:
        raise ValueError(f"ps: {url} answers {error.code} {error.reason}") from None
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"ps: no server of whorl at {url}: {reason}. Start one with whorl serve") from None
    return "\n".join(line.translate(HARMLESS) for line in lines)
