"""Read vLLM's and vllm-ascend's settings of sequence parallelism, by their names and in their order of resolution.

enable_sp, sp_min_token_num       of pass_config; None by default, which means off
fuse_gemm_comms                   of pass_config: matmuls fused with collectives; enable_async_tp is its older name
compile_ranges_endpoints          of the compilation config: token counts at which a compile range ends, inclusive;
                                  checked, without effect; compile_ranges_split_points is its older name
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from whorl.device import BACKENDS, default_device

from .config import SequenceParallel

ASCEND_MIN_TOKENS = 1000  # with fewer the fixed cost of collectives outweighs the gain, in the vendor's experience
ASCEND_MIN_TOKENS_MOE = 1  # with experts the tokens are gathered anyway
DEFAULT_MIN_TOKENS = {BACKENDS["torch_npu"].home: (ASCEND_MIN_TOKENS, ASCEND_MIN_TOKENS_MOE)}  # device: dense, MoE
ENDPOINTS, OLD_ENDPOINTS = "compile_ranges_endpoints", "compile_ranges_split_points"
FUSE, OLD_FUSE = "fuse_gemm_comms", "enable_async_tp"
_PASS_SETTINGS = ("enable_sp", "sp_min_token_num", FUSE, OLD_FUSE)
READ = (*_PASS_SETTINGS, ENDPOINTS, OLD_ENDPOINTS, "pass_config", "mode", "level", "enforce_eager")


def resolve(
    settings: Mapping[str, Any] | str,
    *,
    is_moe: bool = False,
    device: str | None = None,
    max_tokens: int | None = None,
) -> SequenceParallel | None:
    """Return the options of sequence parallelism that these settings mean, or None for off.

    settings: a compilation config (JSON text or a dict), or the settings above on one level. is_moe: the model has
    experts. device: where it runs; default: the best device here. max_tokens: the most tokens of one step; a higher
    threshold is lowered to it.
    Raises ValueError for a value of the wrong type, or when enable_sp is on and the model is not captured; warns of
    settings that are not read.
    Example: resolve('{"pass_config": {"enable_sp": true, "sp_min_token_num": 1000}}')
    """
    values = _flat(settings)
    enabled, threshold = values.get("enable_sp"), values.get("sp_min_token_num")
    fuse = bool(values.get(FUSE) or values.get(OLD_FUSE))
    if not (enabled or fuse):  # fused matmuls need sequence parallelism, so they switch it on
        return None
    where = device or default_device()
    if threshold is None and where in DEFAULT_MIN_TOKENS:
        threshold = DEFAULT_MIN_TOKENS[where][is_moe]
    if threshold is None:
        warnings.warn(
            f"sp_min_token_num is not set and {where} has no default: enable_sp becomes False. "
            'Set sp_min_token_num, or use SequenceParallel(min_tokens="auto")',
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if values.get("enforce_eager") or any(values.get(name) in (0, "NONE") for name in ("mode", "level")):
        raise ValueError(
            "enable_sp: the model is not captured, and sequence parallelism rewrites graphs. "
            "Run it through torch.compile (no enforce_eager, compilation mode above 0), or leave enable_sp out"
        )
    return SequenceParallel(min_tokens=min(threshold, max_tokens or threshold), fuse=fuse)


def _flat(settings: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return all settings on one level, checked; warns of those that are not read."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except json.JSONDecodeError as error:
            raise ValueError(f"compilation config: not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise ValueError(f"compilation config: expected an object with names and values, got {settings!r}")
    inner = settings.get("pass_config") or {}
    values = {**{k: v for k, v in settings.items() if k != "pass_config"}, **inner}
    if unread := [name for name in values if name not in READ]:
        warnings.warn(f"compilation config: not read: {', '.join(unread)}", RuntimeWarning, stacklevel=3)
    threshold = values.get("sp_min_token_num")
    for name in ("enable_sp", FUSE, OLD_FUSE):
        if values.get(name) is not None and not isinstance(values[name], bool):
            raise ValueError(f"{name} is {values[name]!r}, expected true, false or null")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1):
        raise ValueError(f"sp_min_token_num is {threshold!r}, expected a count of tokens, 1 or more")
    _check_endpoints(values)
    return values


def _check_endpoints(values: Mapping[str, Any]) -> None:
    """Raise ValueError for ends of compile ranges that are no counts, or that two names give differently."""
    new, old = values.get(ENDPOINTS), values.get(OLD_ENDPOINTS)
    if new is not None and old is not None and list(new) != list(old):
        raise ValueError(f"{ENDPOINTS} is {new} and {OLD_ENDPOINTS}, its older name, is {old}; give only one of them")
    ends = new if new is not None else old or ()
    if not isinstance(ends, Sequence) or not all(isinstance(e, int) and e > 0 for e in ends):
        raise ValueError(f"{ENDPOINTS} is {ends!r}, expected counts of tokens, 1 or more")
