"""The matrices of a PEFT adapter, read from its folder and checked against its config."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.device import HOST
from whorl.files import output_folder
from whorl.nn import TrainedUpdates, Update

from ..weights.checkpoint import some
from ..weights.hub import adapter_folder
from ..weights.safetensors import open_file
from .config import LoraConfig

_PREFIX = "base_model.model."
# A module, how many wrappers of parameters are inside of its own, and which matrix of it.
_TENSOR = re.compile(
    r"(?P<module>.+?)(?P<inner>(?:\.base_layer)*)\.lora_(?P<kind>A|B)(?:\.default)?\.(?P<end>weight|bias)"
)


# Beside the update of a head PEFT saves the base's own head and embedding.
_COPY = re.compile(r"(?P<module>(?:.+\.)?(?:lm_head|embed_tokens))(?:\.base_layer)?\.weight")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as its folder has it. modules: by the module's name in the checkpoint of the base, without wrappers;
    a module with parameters that are updated has one pair of matrices for each. copies: weights of the base."""

    config: LoraConfig
    modules: Mapping[str, tuple[Mapping[str, Tensor], ...]]
    copies: Mapping[str, Tensor]

    @property
    def path(self) -> Path:
        return self.config.path.parent

    def update(self, key: str, tensors: Mapping[str, Tensor], experts: int | None = None) -> Update:
        """Return the update of a module, or of a stacked parameter of `experts` matrices.

        key: its name in the model, by which the config knows it. Raises ValueError if the ranks disagree.
        """
        a, b = tensors["A.weight"], tensors["B.weight"]
        count = experts or 1
        rank = self.config.rank(key)
        if a.shape[0] != rank * count or b.shape[1] != rank * count:
            expected = f"rank {rank}" if experts is None else f"rank {rank} for each of {experts} experts"
            raise ValueError(f"{self.path}: {key}: A is {list(a.shape)} and B {list(b.shape)}, expected {expected}")
        if experts is not None:  # PEFT's order: A by expert, then by rank; B by rank, then by expert
            a, b = a.unflatten(0, (experts, rank)), b.unflatten(1, (rank, experts)).permute(2, 0, 1)
        return Update(a=a, b=b, scale=self.config.scale(key), bias=tensors.get("B.bias"))


def read_adapter(path: str | Path) -> AdapterFile:
    """Read an adapter from a folder or a Hugging Face id, to the host; ValueError if it cannot be served."""
    folder = adapter_folder(path)
    config = LoraConfig.read(folder)
    modules: dict[str, dict[int, dict[str, Tensor]]] = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in _tensors(folder):
        if (copy := _COPY.fullmatch(name.removeprefix(_PREFIX))) is not None:
            copies[copy["module"]] = tensor
            continue
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            raise ValueError(f"{folder}: {name} is no matrix of a LoRA of a linear layer, and nothing else is served")
        of_module = modules.setdefault(match["module"], {})
        of_module.setdefault(match["inner"].count("."), {})[f"{match['kind']}.{match['end']}"] = tensor
    if not modules:
        raise ValueError(f"{folder}: the file has no tensors, expected lora_A and lora_B of the updated modules")
    for module, pairs in modules.items():
        for tensors in pairs.values():
            _check_pair(folder, config, module, tensors)
    return AdapterFile(config, {module: tuple(pairs.values()) for module, pairs in modules.items()}, copies)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the folder's file."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        pickled = "; a pickle is not read, since it can run any code" if file.with_suffix(".bin").is_file() else ""
        raise ValueError(f"{folder}: no adapter_model.safetensors{pickled}; save the adapter with save_pretrained")
    with ExitStack() as stack:
        for name, source in open_file(file, torch.device(HOST), stack).items():
            if source.gives is None or not source.gives.is_floating_point or source.gives.itemsize < 2:
                raise ValueError(f"{folder}: {name} is {source.dtype}, expected floating point of 16 bits or more")
            yield name, source.read(tuple(slice(0, size) for size in source.shape))


def _check_pair(folder: Path, config: LoraConfig, module: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a module has both matrices, two-dimensional, of one rank and finite."""
    expected = ["A.weight", "B.weight", *(["B.bias"] if config.lora_bias else [])]
    if sorted(tensors) != sorted(expected):
        raise ValueError(f"{folder}: {module} has lora_{some(tensors)}, expected lora_{', lora_'.join(expected)}")
    a, b = tensors["A.weight"], tensors["B.weight"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.numel() or not b.numel():
        raise ValueError(f"{folder}: {module}: A is {list(a.shape)} and B {list(b.shape)}, expected [r, K] and [N, r]")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{folder}: {module}: lora_{name} has values that are not finite")


def write_adapter(folder: str | Path, trained: TrainedUpdates, *, base: str = "") -> None:
    """Write trained updates to a folder, as PEFT's save_pretrained does. base: the path or id of the model.

    Raises ValueError if the folder has files, CannotWrite if it cannot be made.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    stacks = set()
    for name, update in trained.updates().items():
        a, b, module = update.a.detach(), update.b.detach(), name
        if a.dim() == 3:  # PEFT's order, and its wrappers: that of gate and up is inside of that of down
            module, _, parameter = name.rpartition(".")
            stacks.add(f"{module.rpartition('.')[2]}.{parameter}")
            is_inner = parameter == "gate_up_proj" and f"{module}.down_proj" in trained.targets
            module += ".base_layer" if is_inner else ""
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = a.cpu().contiguous()
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = b.cpu().contiguous()
    modules = [name for name, target in trained.targets.items() if not target.is_stack]
    values: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    values |= {"r": trained.rank, "lora_alpha": trained.alpha, "init_lora_weights": True, "inference_mode": True}
    values |= {"target_modules": modules, "target_parameters": sorted(stacks) or None, "bias": "none"}
    with output_folder(Path(folder)) as path:
        (path / "adapter_config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
