"""`whorl quantize`: a model's folder with fewer bits, written shard by shard beside what else the folder has."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .fill import progress_bar
from .quantize import Cost, Quantized, quantized

SHARD_BYTES = 1 << 28  # which is what is held in memory, and a tensor
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".py", ".onnx", ".distcp", ".metadata")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    path: Path
    format: str
    bytes_before: int
    bytes_after: int
    modules: dict[str, Cost]

    def by_layer(self) -> dict[str, tuple[float, str, float]]:
        """The error of a layer's weights together, and the module with the largest and what that is."""
        layers: dict[str, dict[str, Cost]] = {}
        for name, cost in self.modules.items():
            match = _LAYER.match(name)
            layers.setdefault(match[1] if match else name, {})[name] = cost
        found = {}
        for layer, held in layers.items():
            count = sum(each.num_values for each in held.values())
            mean = (sum(each.error**2 * each.num_values for each in held.values()) / count) ** 0.5
            worst = max(held, key=lambda name: held[name].error)
            found[layer] = mean, _LAYER.sub("", worst), held[worst].error
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "layers": {
                layer: {"error": mean, "worst": worst, "worst_error": most}
                for layer, (mean, worst, most) in self.by_layer().items()
            },
            "modules": {name: each.error for name, each in self.modules.items()},
        }


def quantize_folder(
    model: str, out: Path, *, scheme: str, ignore: Sequence[str] = (), progress: bool = True
) -> Rewritten:
    """model: a folder of safetensors or a Hugging Face id. out: a folder that is not there yet, or empty."""
    from . import build, open_checkpoint, resolve

    path = resolve(model)
    if path.suffix == ".gguf":
        raise ValueError(f"{path}: a GGUF file is quantised already, and has its tokenizer inside: name a folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is there already: name a folder that is not, or an empty one")
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():
        raise ValueError(f"{partial}: is left over from a run that did not end, or still goes on: remove it")
    with open_checkpoint(path) as checkpoint:
        skeleton = build(checkpoint.config, device="meta", dtype=torch.float32)
        made = quantized(checkpoint, skeleton, scheme, ignore)
        build(made.checkpoint.config, device="meta", dtype=torch.float32)  # refuses half of a matrix
        partial.mkdir(parents=True)
        try:
            after = _write(made, partial, progress)
            _copy_rest(path, partial)
            text = json.dumps(made.checkpoint.config, indent=2)
            (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        except BaseException:
            shutil.rmtree(partial)
            raise
        if out.exists():
            out.rmdir()
        partial.rename(out)
        before = sum(source.nbytes for source in checkpoint.sources.values())
    return Rewritten(path=out, format=scheme, bytes_before=before, bytes_after=after, modules=made.found)


def _write(made: Quantized, folder: Path, progress: bool) -> int:
    """Shards and their index. Returns the bytes of all tensors."""
    from safetensors.torch import save_file

    total = sum(source.nbytes for source in made.checkpoint.sources.values())
    shards: list[list[str]] = []
    with torch.inference_mode(), progress_bar("Quantising", total, progress) as advance:
        for held in _shards(made.checkpoint, advance):
            save_file(held, folder / f"{len(shards)}.partial", metadata={"format": "pt"})
            shards.append(list(held))
            del held
    by_name: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        (folder / f"{number}.partial").rename(folder / file)
        by_name |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": by_name}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _shards(checkpoint: Checkpoint, advance: Any) -> Iterator[dict[str, Tensor]]:
    held: dict[str, Tensor] = {}
    size = 0
    for name, source in checkpoint.sources.items():
        held[name] = source.read(tuple(slice(None) for _ in source.shape)).contiguous()
        size += source.nbytes
        advance(source.nbytes)
        if size >= SHARD_BYTES:
            yield held
            held, size = {}, 0
    if held:
        yield held


def _copy_rest(source: Path, target: Path) -> None:
    """Tokenizer, templates and the like; neither weights nor code."""
    for file in sorted(source.iterdir()):
        is_weights = file.name.endswith(_WEIGHTS) or file.name in ("config.json", "model.safetensors.index.json")
        if file.is_file() and not is_weights and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


def render(found: Rewritten) -> str:
    """A table of errors by layer."""
    lines = [f"{'layer':>8}  {'error':>8}  worst"]
    for layer, (mean, worst, most) in found.by_layer().items():
        lines.append(f"{layer:>8}  {mean:>8.2%}  {worst} {most:.2%}")
    ratio = found.bytes_after / found.bytes_before
    before, after = (f"{count / 1e6:.1f} MB" for count in (found.bytes_before, found.bytes_after))
    lines.append(f"{found.path}: {found.format}, {after} of {before} ({ratio:.0%}); errors are relative to the weights")
    return "\n".join(lines)
