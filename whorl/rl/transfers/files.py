"""Weights from a folder of safetensors that the trainer has written."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from whorl.engine.weights.safetensors import open_safetensors

from .tensors import Batch

_AT_ONCE = 1 << 28  # bytes


def read_folder(folder: Any, device: torch.device) -> Iterator[Batch]:
    """Yield the tensors of a folder. Raises ValueError if it has none that can be read."""
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"weights: the folder is {folder!r}, expected a path")
    path = Path(folder).expanduser()
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"weights: {folder} has no *.safetensors; the trainer writes them there first")
    with ExitStack() as stack:
        batch: Batch = []
        size = 0
        for name, source in open_safetensors(path, device, stack).items():
            batch.append((name, source.read(tuple(slice(None) for _ in source.shape))))
            size += source.nbytes
            if size >= _AT_ONCE:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
