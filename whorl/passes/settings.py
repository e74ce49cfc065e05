"""Read vLLM's and vllm-ascend's settings of sequence parallelism, by their names and in their order of resolution.

enable_sp, sp_min_token_num       of pass_config; None by default, which means off
fuse_gemm_comms                   of pass_config: matmuls fused with collectives; enable_async_tp is its older name
compile_ranges_endpoints          of the compilation config: token counts at which a compile range ends, inclusive;
                                  compile_ranges_split_points is its older name
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.device import BACKENDS, default_device

from .config import SequenceParallel, TokenRange

ASCEND_MIN_TOKENS = 1000  # with fewer the fixed cost of collectives outweighs the gain, in the vendor's experience
ASCEND_MIN_TOKENS_MOE = 1  # with experts the tokens are gathered anyway
DEFAULT_MIN_TOKENS = {BACKENDS["torch_npu"].home: (ASCEND_MIN_TOKENS, ASCEND_MIN_TOKENS_MOE)}  # device: dense, MoE
ENDPOINTS, OLD_ENDPOINTS = "compile_ranges_endpoints", "compile_ranges_split_points"
FUSE, OLD_FUSE = "fuse_gemm_comms", "enable_async_tp"
_PASS_SETTINGS = ("enable_sp", "sp_min_token_num", FUSE, OLD_FUSE)
READ = (*_PASS_SETTINGS, ENDPOINTS, OLD_ENDPOINTS, "pass_config", "mode", "level", "enforce_eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileRange(TokenRange):
    """A range of token counts that is compiled as one graph."""

    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The result of resolving settings: the passes' options or None (off), the ranges, and each step in words."""

    sequence_parallel: SequenceParallel | None
    ranges: tuple[CompileRange, ...]
    steps: tuple[str, ...]


def resolve(settings: Mapping[str, Any] | str, **situation: Any) -> SequenceParallel | None:
    """Return the options of sequence parallelism that these settings mean, or None for off.

    Arguments and errors as in `explain`. Example: resolve('{"pass_config": {"enable_sp": true, "sp_min_token_num":
    1000}}')
    """
    return explain(settings, **situation).sequence_parallel


def explain(
    settings: Mapping[str, Any] | str,
    *,
    is_moe: bool = False,
    is_captured: bool = True,
    device: str | None = None,
    max_tokens: int | None = None,
    **options: Any,
) -> Resolution:
    """Resolve settings and return the result with every step in words.

    settings: a compilation config (JSON text or a dict), or the settings above on one level. is_moe: the model has
    experts. is_captured: the model runs as a graph of torch.compile. device: where it runs; default: the best device
    here. max_tokens: the most tokens of one step; a higher threshold is lowered to it. options: go to
    `SequenceParallel`.
    Raises ValueError for a value of the wrong type, or when enable_sp is on and the model is not captured; warns of
    settings that are not read.
    """
    values = _flat(settings)
    enabled, threshold = values.get("enable_sp"), values.get("sp_min_token_num")
    steps = [f"settings: enable_sp {enabled}, sp_min_token_num {threshold}"]
    if (fuse := bool(values.get(FUSE) or values.get(OLD_FUSE))) and not enabled:
        enabled = True
        steps.append(f"{FUSE}: needs sequence parallelism, so enable_sp becomes True")
    where = device or default_device()
    if enabled and threshold is None and where in DEFAULT_MIN_TOKENS:
        threshold = DEFAULT_MIN_TOKENS[where][is_moe]
        steps.append(f"platform {where}: sp_min_token_num {threshold} ({'MoE' if is_moe else 'dense'})")
    if enabled is None:
        steps.append("enable_sp is not set: it stays off, which is vLLM's default")
    if enabled and threshold is None:
        reason = f"sp_min_token_num is not set and {where} has no default: enable_sp becomes False"
        steps.append(reason)
        warnings.warn(
            f'{reason}. Set sp_min_token_num, or use SequenceParallel(min_tokens="auto")', RuntimeWarning, stacklevel=3
        )
        enabled = False
    if not enabled:
        return Resolution(sequence_parallel=None, ranges=_ranges(_endpoints(values), None), steps=tuple(steps))
    if not is_captured or _is_eager(values):
        raise ValueError(
            "enable_sp: the model is not captured, and sequence parallelism rewrites graphs. "
            "Run it through torch.compile (no enforce_eager, compilation mode above 0), or leave enable_sp out"
        )
    assert threshold is not None
    if max_tokens is not None and threshold > max_tokens:
        steps.append(f"sp_min_token_num {threshold} is lowered to max_tokens, {max_tokens}")
        threshold = max_tokens
    return Resolution(
        sequence_parallel=SequenceParallel(**{"min_tokens": threshold, "fuse": fuse, **options}),
        ranges=_ranges(_endpoints(values), threshold),
        steps=tuple(steps),
    )


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
        warnings.warn(f"compilation config: not read: {', '.join(unread)}", RuntimeWarning, stacklevel=4)
    threshold = values.get("sp_min_token_num")
    for name in ("enable_sp", FUSE, OLD_FUSE):
        if values.get(name) is not None and not isinstance(values[name], bool):
            raise ValueError(f"{name} is {values[name]!r}, expected true, false or null")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1):
        raise ValueError(f"sp_min_token_num is {threshold!r}, expected a count of tokens, 1 or more")
    return values


def _is_eager(values: Mapping[str, Any]) -> bool:
    return bool(values.get("enforce_eager")) or any(values.get(name) in (0, "NONE") for name in ("mode", "level"))


def _endpoints(values: Mapping[str, Any]) -> tuple[int, ...]:
    new, old = values.get(ENDPOINTS), values.get(OLD_ENDPOINTS)
    if new is not None and old is not None and list(new) != list(old):
        raise ValueError(f"{ENDPOINTS} is {new} and {OLD_ENDPOINTS}, its older name, is {old}; give only one of them")
    ends = new if new is not None else old or ()
    if not isinstance(ends, Sequence) or not all(isinstance(e, int) and e > 0 for e in ends):
        raise ValueError(f"{ENDPOINTS} is {ends!r}, expected counts of tokens, 1 or more")
    return tuple(sorted(set(ends)))


def _ranges(ends: tuple[int, ...], threshold: int | None) -> tuple[CompileRange, ...]:
    """Return ranges that end where the settings say; the threshold starts a range."""
    stops = sorted({*ends, *((threshold - 1,) if threshold is not None and threshold > 1 else ())})
    starts = [1, *(stop + 1 for stop in stops)]
    return tuple(
        CompileRange(start=start, end=end, sequence_parallel=threshold is not None and start >= threshold)
        for start, end in zip(starts, [*stops, None], strict=True)
    )
