"""Read folders of safetensors: the files that belong to a model, and the tensors in them."""

import json
import struct
from contextlib import ExitStack
from math import prod
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.nn import Index

from .checkpoint import Source, read_object, some

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
}
_FIRST = "embed_tokens.weight"


def open_safetensors(folder: Path, device: torch.device, stack: ExitStack) -> dict[str, Source]:
    """Open the files of a folder; return their tensors by name. ValueError if a file is missing or damaged."""
    sources: dict[str, Source] = {}
    for path in _files(folder):
        for name, source in open_file(path, device, stack).items():
            if name in sources:
                raise ValueError(f"{path}: {name} is also in another file of the checkpoint")
            sources[name] = source
    # A model that was saved without its head, such as an embedding model, has names without the prefix.
    return {f"model.{name}": source for name, source in sources.items()} if _FIRST in sources else sources


def open_file(path: Path, device: torch.device, stack: ExitStack) -> dict[str, Source]:
    """Open one file; return its tensors by name. ValueError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        file = stack.enter_context(safe_open(path, framework="pt", device=str(device)))
    except (SafetensorError, OSError) as error:
        cut = _truncated(path)
        problem = f"truncated, which cuts {some(cut)}" if cut else f"not a readable safetensors file: {error}"
        raise ValueError(f"{path}: {problem}") from error
    return {name: _safetensor(file, name) for name in file.offset_keys()}


def _safetensor(file: Any, name: str) -> Source:
    view = file.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()

    def read(index: Index) -> Tensor:
        return file.get_slice(name)[index]  # type: ignore[no-any-return]

    gives = _DTYPES.get(dtype)
    num_bytes = prod(shape) * (1 if gives is None else gives.itemsize)
    return Source(shape=shape, dtype=dtype, gives=gives, nbytes=num_bytes, read=read)


def _files(folder: Path) -> list[Path]:
    """Return the shards that the index names, or every safetensors file if there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if files:
            return files
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{folder}: only pickled weights found ({some(pickled)}). Reading a pickle can run any code, so they "
                f"are not read: convert them to safetensors with save_pretrained of transformers"
            )
        raise ValueError(f"{folder}: no *.safetensors found next to config.json: the weights are missing")
    by_name = read_object(index).get("weight_map")
    if not isinstance(by_name, dict) or not by_name or not all(isinstance(file, str) for file in by_name.values()):
        raise ValueError(f"{index}: weight_map is {str(by_name)[:60]}, expected the file of each tensor by its name")
    names = sorted(set(by_name.values()))
    for name in names:
        if Path(name).name != name or not name:
            raise ValueError(f"{index}: {name[:80]!r} is not a file of this folder")
        if not isfile(folder / name):  # False also for what no file system would take as a name
            tensors = [tensor for tensor, file in by_name.items() if file == name]
            raise ValueError(f"{folder}: {name[:80]} is missing, which holds {some(tensors)}")
    return [folder / name for name in names]


def _truncated(path: Path) -> list[str]:
    """Return the tensors that lie past the end of the file by its header."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                return []
            header = json.loads(file.read(length))
        ends = {name: value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"}
        return [name for name, end in ends.items() if 8 + length + end > size]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):  # no such header
        return []
