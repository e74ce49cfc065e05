"""Tiny random models as folders, as every rank loads them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from whorl import nn
from whorl.engine.weights import random_model, random_prediction


def write_checkpoints(folder: Path, configs: Mapping[str, dict[str, Any]]) -> dict[str, Path]:
    """A folder of each config.json, with random weights in fp32, those of multi-token prediction included."""
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        model: Any = random_model(config, device="cpu", dtype=torch.float32)
        parts = [model, random_prediction(model)] if config.get("num_nextn_predict_layers") else [model]
        tensors = {n: slot.tensor().contiguous() for part in parts for n, slot in nn.destinations(part).items()}
        save_file(tensors, folder / name / "model.safetensors")
    return {name: folder / name for name in configs}
