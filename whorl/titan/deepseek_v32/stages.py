"""The two training stages: dense warm-up, in which only indexers train, and sparse training of everything."""

import dataclasses
from typing import get_args

from torch import nn

from .args import Stage
from .core import Core


def apply_stage(model: nn.Module, stage: Stage) -> None:
    """Freeze and unfreeze parameters for a stage and set the stage of the attention cores.

    Call it before the optimizer is built, because the optimizer takes the parameters that are trainable then. warmup:
    attention is dense, the indexers learn to predict it, and nothing else trains or gets optimizer state. sparse:
    attention is over the selected keys; indexers learn only from their own loss, all else only from the language-model
    loss. Raises ValueError for another stage.
    """
    if stage not in get_args(Stage):
        raise ValueError(f"stage is {stage!r}, expected one of {', '.join(get_args(Stage))}")
    for module in model.modules():
        if isinstance(module, Core):
            module.settings = dataclasses.replace(module.settings, stage=stage)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(stage == "sparse" or is_indexer(name))


def is_indexer(name: str) -> bool:
    """Return whether a parameter belongs to a lightning indexer, by its name in the model."""
    return ".indexer." in f".{name}"
