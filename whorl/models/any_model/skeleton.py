"""A model of transformers, built by its own class on the meta device: its modules without their weights."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from whorl.models.fields import BACKEND

from . import interface

OLDEST = (5, 17)  # releases of transformers that this is tested with: from this one on
# Keys of config.json that do not describe the model's arithmetic, or that name code, which is never run.
_LEFT_OUT = ("architectures", "auto_map", "quantization_config", "compression_config", "dtype", "torch_dtype", BACKEND)


class RefusedError(ValueError):
    """The reason that a model does not run through transformers' code."""


def skeleton(values: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config.json on the meta device, with whorl's attention chosen.

    No code of a checkpoint is run: the class is one of the installed transformers. Raises RefusedError.
    """
    _check_version()
    hf_class, config = _class_of(values)
    interface.register()
    for switch in ("output_router_logits", "output_attentions", "output_hidden_states", "use_cache"):
        if hasattr(config, switch):
            setattr(config, switch, False)
    config.return_dict = True
    try:
        with torch.device("meta"):
            hf = hf_class._from_config(
                config,
                dtype=torch.float32,
                attn_implementation=interface.NAME,
                experts_implementation=interface.NAME,
            )
    except Exception as error:  # whatever transformers' code raises is the reason that this road ends
        if isinstance(error, KeyError) and error.args == (interface.NAME,):  # a table of its own attention classes
            raise RefusedError(f"{hf_class.__name__} does not ask transformers' attention interface") from error
        raise RefusedError(f"transformers cannot build it: {type(error).__name__}: {error}") from error
    _check_states(hf)
    return hf.eval()


def _check_states(hf: Any) -> None:
    """Raise RefusedError if layers keep a state beside keys and values."""
    kinds = {str(kind) for kind in getattr(hf.config, "layer_types", None) or []}
    recurrent = sorted(kind for kind in kinds if not kind.endswith("attention") or kind == "linear_attention")
    convolutions = sorted({type(each).__name__ for each in hf.modules() if isinstance(each, nn.Conv1d)})
    if recurrent or convolutions:
        raise RefusedError(f"it has layers of {', '.join(recurrent or convolutions)}, which keep a state of their own")
    if getattr(hf, "_is_stateful", False):
        raise RefusedError(f"{type(hf).__name__} keeps a recurrent state, or a cache of its own")


def _check_version() -> None:
    try:
        import transformers
    except ImportError as error:
        raise RefusedError("transformers is not installed: pip install transformers") from error
    version = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:2])
    if version < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise RefusedError(f"transformers {transformers.__version__} is installed, expected {least} or newer")


def _class_of(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return transformers' class of a causal language model, and its config."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type, names = values.get("model_type"), values.get("architectures") or []
    installed = f"transformers {transformers.__version__}"
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise RefusedError(f"{installed} has no model_type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    try:
        config = config_class.from_dict({name: each for name, each in values.items() if name not in _LEFT_OUT})
    except Exception as error:  # config classes check their fields by many kinds of errors
        raise RefusedError(f"{installed} does not take this config.json: {error}") from error
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusedError(f"{installed} has no causal language model of model_type {model_type!r}")
    hf_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if not isinstance(names, list):
        raise RefusedError(f"architectures is {names!r}, expected a list")
    if names and hf_class.__name__ not in names:
        raise RefusedError(f"architectures is {names}, and the causal language model is {hf_class.__name__}")
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise RefusedError("it has cross attention, which needs keys of an encoder")
    if config.get_text_config(decoder=True) is not config:
        raise RefusedError("it has parts beside its text model, and only text models run this way")
    return hf_class, config


def frozen_rotations(hf: Any) -> dict[nn.Module, Any]:
    """Make the rotary modules keep their frequencies, and return the kinds of those whose frequencies change with the
    longest sequence of a batch: a token's result would depend on the other sequences."""
    frozen: dict[nn.Module, Any] = {}
    for module in hf.modules():
        kinds = getattr(module, "rope_type", None)
        each = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in each):
            frozen[module] = kinds
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    return frozen


def fill_buffers(hf: Any, frozen: Mapping[nn.Module, Any], max_length: int) -> None:
    """Compute the buffers that no checkpoint has, on the host. frozen: of `frozen_rotations`; their frequencies become
    those of a sequence of `max_length` tokens."""
    for module in hf.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        for name in names:
            meta = module._buffers[name]
            module._buffers[name] = torch.zeros(meta.shape, dtype=meta.dtype, device="cpu")
        if names:
            with torch.device("cpu"), torch.no_grad():
                _start(hf, module, frozen.get(module))
    for module, kinds in frozen.items():
        _fix_frequencies(module, kinds, max_length)
    for name, module in hf.named_modules():
        lost = [key for key, each in vars(module).items() if isinstance(each, Tensor) and each.is_meta]
        if lost:
            raise RefusedError(f"{name or type(module).__name__} computes {lost[0]} when it is built, and keeps it")


def _start(hf: Any, module: nn.Module, kinds: Any) -> None:
    """Let transformers compute a module's buffers. kinds: of rope types, if they were frozen."""
    current: Any = getattr(module, "rope_type", None)
    if kinds is not None:
        module.rope_type = kinds
    try:
        hf._init_weights(module)
    finally:
        if kinds is not None:
            module.rope_type = current


def _fix_frequencies(module: nn.Module, kinds: Any, max_length: int) -> None:
    """Let a rotary module compute what it has for a sequence of `max_length` tokens, and keep that."""
    current: Any = module.rope_type
    module.rope_type = kinds
    last = torch.tensor([[max_length - 1]], device="cpu")
    with torch.device("cpu"), torch.no_grad():
        for layer_type in kinds if isinstance(kinds, dict) else [None]:
            module(torch.zeros(1, device="cpu"), last, **({} if layer_type is None else {"layer_type": layer_type}))
    module.rope_type = current
