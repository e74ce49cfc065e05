"""What all cached blocks of an engine depend on: blocks of two engines with one identity have equal bits."""

import hashlib
import json
import os
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from whorl import __version__
from whorl.device import HOST, arithmetic_of
from whorl.nn import Experts, Linear
from whorl.ops.cpu.library import kernels_digest

if TYPE_CHECKING:
    from .llm import LLM

# Settings that change bits and show neither in weights nor in caches.
_SETTINGS = ("sp_quantize", "sp_min_tokens")


def identity(llm: "LLM", is_private: bool) -> bytes:
    """Return the identity; a new one each time for an engine whose blocks no other may use.

    It has the model's class, config and weights, the layout of its caches, the settings that change bits, and all that
    decides which kernels run: versions, device and number of threads.
    """
    if is_private:
        return os.urandom(16)
    config = getattr(llm.model, "config", None)
    known: dict[str, Any] = {
        "whorl": __version__,
        "arithmetic": arithmetic_of(llm.runner.device),
        "threads": torch.get_num_threads(),
        "ranks": 1 if llm._lead is None else llm._lead.group.size,  # they add in an order of their own
        "kernels": kernels_digest() if llm.runner.device == HOST else "",
        "model": [type(llm.model).__qualname__, str(llm.model.dtype)],
        "length": _length(llm.model),
        "segments": _segments(llm.model),
        "config": _plain(config),
        "caches": [repr(spec) for spec in llm.cache_specs],
        "block": [llm.pool.block_size, llm.runner.beyond.slot_bytes if llm.runner.beyond is not None else 0],
        "settings": {name: getattr(llm.settings, name) for name in _SETTINGS},
    }
    text = json.dumps(known, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode() + llm.runner.weights_digest()).digest()


def _length(model: Any) -> int | None:
    """Return the tokens that rotations were made for; None where they do not depend on it."""
    rope = getattr(getattr(model, "config", None), "rope", None)
    return None if rope is not None and not rope.depends_on_length else getattr(model, "max_length", None)


def _segments(model: Any) -> list[int]:
    """Return into how many segments layers cut K."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return sorted({module.segments for module in modules if isinstance(module, Linear | Experts)})


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, the same in every process."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return value.to_dict()
    return str(value)
