"""Adapters in PEFT's format, written without PEFT, and weights that they are merged into."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from whorl.nn import Target
from whorl.nn.low_rank import targets

# A config as PEFT 0.21 writes it; what a test sets comes on top.
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "init_lora_weights": True,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_dropout": 0.0,
    "use_dora": False,
    "loftq_config": {},
}
EXPERTS = ("experts.down_proj", "experts.gate_up_proj")


def names(model: Any, kinds: str | tuple[str, ...]) -> dict[str, Target]:
    """The targets of a model whose names end so; those of single experts are left out."""
    every = targets(model)
    return {name: target for name, target in every.items() if name.endswith(kinds) and target.entry is None}


def write_adapter(
    folder: Path, model: Any, kinds: tuple[str, ...], *, rank: int = 4, seed: int = 0, scale: float = 1.0, **fields: Any
) -> Path:
    """An adapter of random matrices for the linear layers and stacks of experts whose names end so."""
    torch.manual_seed(seed)
    chosen, tensors = names(model, kinds), {}
    for name, target in chosen.items():
        module, count, wrapper = name, 1, ""
        if target.is_stack:
            module, _, parameter = name.rpartition(".")
            count, wrapper = target.matrix.shape[0], ".base_layer" if parameter == "gate_up_proj" else ""
        rows, columns = target.shape
        at = f"base_model.model.{module}{wrapper}"
        tensors[f"{at}.lora_A.weight"] = torch.randn(count * rank, columns) * columns**-0.5
        tensors[f"{at}.lora_B.weight"] = torch.randn(rows, count * rank) * scale * rank**-0.5
        if fields.get("lora_bias"):
            tensors[f"{at}.lora_B.bias"] = torch.randn(rows)
    linear = [name for name, target in chosen.items() if not target.is_stack]
    stacks = sorted({kind for kind in EXPERTS for name in chosen if name.endswith(kind)})
    config = {"r": rank, "target_modules": linear, **({"target_parameters": stacks} if stacks else {})}
    write_files(folder, CONFIG | config | fields, tensors)
    return folder


def write_files(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def merge(model: Any, folder: Path) -> Any:
    """Add the adapter's matrices to a model's plain weights, as PEFT merges them."""
    from whorl.engine.lora import read_adapter
    from whorl.engine.lora.adapters import place

    every = targets(model)
    for name, update in place(read_adapter(folder), every).items():
        target, delta = every[name], update.scale * update.b.double() @ update.a.double()
        for part, rows in zip(target.parts, target.rows * len(target.parts), strict=False):
            mine = delta[part.entry] if target.is_stack else delta
            at = target.matrix.weight[part.place]
            at.copy_(at.double() + mine[rows][part.rows])
    return model
