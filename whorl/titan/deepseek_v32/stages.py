"""The two stages of training: dense warm-up, where only indexers learn, and sparse training of everything."""

import dataclasses
from typing import get_args

from torch import nn

from .args import Stage
from .core import Core


def apply_stage(model: nn.Module, stage: Stage) -> None:
    """Freeze and unfreeze parameters, and tell the attention. Before the optimizer is built: it takes what is trained.

    warmup: attention is dense, the indexers learn to predict it, nothing else learns or gets optimizer state. sparse:
    attention is over the chosen keys; indexers learn from their own loss only, all else from the language model's only.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"stage is {stage!r}, expected one of {', '.join(get_args(Stage))}")
    for module in model.modules():
        if isinstance(module, Core):
            module.settings = dataclasses.replace(module.settings, stage=stage)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage == "sparse" or is_indexer(name))


def is_indexer(name: str) -> bool:
    """Whether a parameter is a lightning indexer's, by its name in the model."""
    return ".indexer." in f".{name}"
