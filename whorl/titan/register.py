"""Register our models and converters with TorchTitan 0.2, through its own registries."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan.protocols.train_spec import TrainSpec

# For each `model.name` of a job, the Python module with the functions `train_spec` and `check_layout` of that model.
MODELS = {"deepseek_v32": "whorl.titan.deepseek_v32.spec"}


def model(name: str) -> Any:
    """Import and return the Python module of one of our models; `MODELS` lists what it contains."""
    return import_module(MODELS[name])


def train_spec(name: str = "deepseek_v32") -> "TrainSpec":
    """Return the TrainSpec of one of our models: the classes and functions that TorchTitan builds a run from."""
    return model(name).train_spec()


def register() -> None:
    """Register all models and converters; a second call does nothing."""
    from torchtitan.protocols import model_converter
    from torchtitan.protocols import train_spec as specs

    from whorl.titan.converters.table import CONVERTERS

    for name in MODELS:
        if name not in specs._extra_train_specs:
            specs.register_train_spec(name, train_spec(name))
    for name, converter in CONVERTERS.items():
        if name not in model_converter._registry_model_converter_cls:
            model_converter.register_model_converter(converter, name)
