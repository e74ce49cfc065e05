"""`whorl quantize`: write a model's folder with quantised weights, shard by shard, and copy its other files."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.files import output_file, output_folder
from whorl.nn import weights as formats

from ..memory import named_errors
from .checkpoint import Checkpoint
from .fill import progress_bar
from .quantize import Cost, Quantized, quantized

SHARD_BYTES = 1 << 28  # also bounds the memory needed: a shard and one tensor
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".py", ".onnx", ".distcp", ".metadata")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """The result of `quantize_folder`: sizes, and the error of each module."""

    path: Path
    format: str
    bytes_before: int
    bytes_after: int
    modules: dict[str, Cost]

    def by_layer(self) -> dict[str, tuple[float, str, float]]:
        """Return by layer the error of its weights together, the module with the largest error, and that error."""
        layers: dict[str, dict[str, Cost]] = {}
        for name, cost in self.modules.items():
            match = _LAYER.match(name)
            layers.setdefault(match[1] if match else name, {})[name] = cost
        errors = {}
        for layer, costs in layers.items():
            count = sum(cost.num_values for cost in costs.values())
            mean = (sum(cost.error**2 * cost.num_values for cost in costs.values()) / count) ** 0.5
            worst = max(costs, key=lambda name: costs[name].error)
            errors[layer] = mean, _LAYER.sub("", worst), costs[worst].error
        return errors

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "path": str(self.path),
            "format": self.format,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": {
                layer: {"error": mean, "worst": worst, "worst_error": most}
                for layer, (mean, worst, most) in self.by_layer().items()
            },
            "modules": {name: cost.error for name, cost in self.modules.items()},
        }


def quantize_folder(
    model: str, out: Path, *, scheme: str, ignore: Sequence[str] = (), progress: bool = True
) -> Rewritten:
    """Quantise a model to a new folder. model: a folder of safetensors or a Hugging Face id. out: a folder that does
    not exist, or an empty one. ignore: as in `quantized`. Raises ValueError if the model or the folder cannot be used,
    CannotWrite if the folder cannot be written; then nothing of it is left.
    """
    from . import build, open_checkpoint, resolve

    if scheme not in formats.SCHEME_NAMES:
        raise ValueError(f"format is {scheme!r}, expected one of {', '.join(formats.SCHEME_NAMES)}")
    path = resolve(model)
    if path.suffix == ".gguf":
        raise ValueError(f"{path}: a GGUF file is already quantised, and contains its tokenizer; give a folder")
    with named_errors(f"quantising {path}"), output_folder(out) as folder, open_checkpoint(path) as checkpoint:
        skeleton = build(checkpoint.config, device="meta", dtype=torch.float32)
        result = quantized(checkpoint, skeleton, scheme, ignore)
        build(result.checkpoint.config, device="meta", dtype=torch.float32)  # raises if part of a matrix is left out
        bytes_after = _write(result, folder, progress)
        _copy_other_files(path, folder)
        _write_json(result.checkpoint.config, folder / "config.json")
        bytes_before = sum(source.nbytes for source in checkpoint.sources.values())
    return Rewritten(path=out, format=scheme, bytes_before=bytes_before, bytes_after=bytes_after, modules=result.errors)


def _write(result: Quantized, folder: Path, progress: bool) -> int:
    """Write the shards and their index; return the bytes of all tensors."""
    from safetensors.torch import save_file

    total = sum(source.nbytes for source in result.checkpoint.sources.values())
    shards: list[list[str]] = []
    with torch.inference_mode(), progress_bar("Quantising", total, progress) as advance:
        for shard in _shards(result.checkpoint, advance):
            with output_file(folder / f"{len(shards)}.partial") as path:
                save_file(shard, path, metadata={"format": "pt"})
            shards.append(list(shard))
            del shard  # frees it before the next one is read
    by_name: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / f"{number}.partial").rename(folder / file)
        by_name |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
        _write_json(index, folder / "model.safetensors.index.json")
    return total


def _write_json(values: dict[str, Any], path: Path) -> None:
    with output_file(path) as file:
        file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _shards(checkpoint: Checkpoint, advance: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each shard."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, source in checkpoint.sources.items():
        shard[name] = source.read(tuple(slice(None) for _ in source.shape)).contiguous()
        size += source.nbytes
        advance(source.nbytes)
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _copy_other_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, templates and the like; neither weights nor code."""
    for file in sorted(source.iterdir()):
        is_weights = file.name.endswith(_WEIGHTS) or file.name in ("config.json", "model.safetensors.index.json")
        if file.is_file() and not is_weights and not file.name.endswith(".index.json"):
            with output_file(target / file.name) as copy:
                shutil.copyfile(file, copy)


def render(result: Rewritten) -> str:
    """Return a table of errors by layer."""
    lines = [f"{'layer':>8}  {'error':>8}  worst"]
    for layer, (mean, worst, most) in result.by_layer().items():
        lines.append(f"{layer:>8}  {mean:>8.2%}  {worst} {most:.2%}")
    ratio = result.bytes_after / result.bytes_before
    before, after = (f"{count / 1e6:.1f} MB" for count in (result.bytes_before, result.bytes_after))
    size = f"{after} of {before} ({ratio:.0%})"
    lines.append(f"{result.path}: {result.format}, {size}; errors are relative to the weights")
    return "\n".join(lines)
