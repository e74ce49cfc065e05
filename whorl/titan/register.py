"""What TorchTitan 0.2 learns from us: our models by name, and the converters. It is told, not changed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.protocols.train_spec import TrainSpec

# `model.name` of a job, and the module that has its `train_spec` and its `check_layout`.
MODELS = {"deepseek_v32": "whorl.titan.deepseek_v32.spec"}


def model(name: str) -> Any:
    """The module of one of our models."""
    return import_module(MODELS[name])


def train_spec(name: str = "deepseek_v32") -> "TrainSpec":
    return model(name).train_spec()


def register() -> None:
    """Once in a process; again it does nothing."""
    from torchtitan.protocols import model_converter
    from torchtitan.protocols import train_spec as specs

    from whorl.titan.converters.table import CONVERTERS

    for name in MODELS:
        if name not in specs._extra_train_specs:
            specs.register_train_spec(name, train_spec(name))
    for name, converter in CONVERTERS.items():
        if name not in model_converter._registry_model_converter_cls:
            model_converter.register_model_converter(converter, name)
