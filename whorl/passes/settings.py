"""vLLM's and vllm-ascend's settings of sequence parallelism, under their names and with their order of resolution.

enable_sp, sp_min_token_num       of pass_config; both None, that is off, unless said
fuse_gemm_comms                   of pass_config: products fused with collectives; enable_async_tp is its older name
compile_ranges_endpoints          of the compilation config, inclusive ends of ranges of token counts that are
                                  compiled apart; compile_ranges_split_points is its older name
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.device import BACKENDS, default_device

from .config import SequenceParallel, TokenRange

ASCEND_MIN_TOKENS = 1000  # below, the fixed cost of collectives outweighs what they save, by the vendor's experience
ASCEND_MIN_TOKENS_MOE = 1  # experts gather anyway
DEFAULT_MIN_TOKENS = {BACKENDS["torch_npu"].home: (ASCEND_MIN_TOKENS, ASCEND_MIN_TOKENS_MOE)}  # device: dense, MoE
ENDPOINTS, OLD_ENDPOINTS = "compile_ranges_endpoints", "compile_ranges_split_points"
FUSE, OLD_FUSE = "fuse_gemm_comms", "enable_async_tp"
_OF_PASSES = ("enable_sp", "sp_min_token_num", FUSE, OLD_FUSE)
READ = (*_OF_PASSES, ENDPOINTS, OLD_ENDPOINTS, "pass_config", "mode", "level", "enforce_eager")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileRange(TokenRange):
    """Those that are compiled as one graph."""

    sequence_parallel: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """What the settings come to: the passes' configuration or None, the ranges, and how each step went."""

    sequence_parallel: SequenceParallel | None
    ranges: tuple[CompileRange, ...]
    steps: tuple[str, ...]


def resolve(settings: Mapping[str, Any] | str, **situation: Any) -> SequenceParallel | None:
    """The configuration that these settings ask for, or None: off. Arguments as `explain`."""
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
    """Resolve settings: a compilation config (its JSON, or a dict), or the names above alone.

    is_captured: whether the model runs as a graph of torch.compile. device: where it runs; default: the best here.
    max_tokens: the most that one step takes; the threshold is never above. `options` go to `SequenceParallel`.
    """
    given = _flat(settings)
    enabled, threshold = given.get("enable_sp"), given.get("sp_min_token_num")
    steps = [f"settings: enable_sp {enabled}, sp_min_token_num {threshold}"]
    if (fuse := bool(given.get(FUSE) or given.get(OLD_FUSE))) and not enabled:
        enabled = True
        steps.append(f"{FUSE}: it needs sequence parallelism, so enable_sp becomes True")
    where = device or default_device()
    if enabled and threshold is None and where in DEFAULT_MIN_TOKENS:
        threshold = DEFAULT_MIN_TOKENS[where][is_moe]
        steps.append(f"platform {where}: sp_min_token_num {threshold} ({'MoE' if is_moe else 'dense'})")
    if enabled is None:
        steps.append("optimisation level: enable_sp stays off, as upstream's default is")
    if enabled and threshold is None:
        reason = f"sp_min_token_num is not set and {where} has no default: enable_sp becomes False"
        steps.append(reason)
        warnings.warn(
            f'{reason}. Set sp_min_token_num, or use SequenceParallel(min_tokens="auto")', RuntimeWarning, stacklevel=3
        )
        enabled = False
    if not enabled:
        return Resolution(sequence_parallel=None, ranges=_ranges(_endpoints(given), None), steps=tuple(steps))
    if not is_captured or _is_eager(given):
        raise ValueError(
            "enable_sp: the model is not captured, and sequence parallelism rewrites graphs. "
            "Run it through torch.compile (no enforce_eager, compilation mode above 0), or leave enable_sp out"
        )
    assert threshold is not None
    if max_tokens is not None and threshold > max_tokens:
        steps.append(f"sp_min_token_num {threshold} is cut to the most tokens of a step, {max_tokens}")
        threshold = max_tokens
    return Resolution(
        sequence_parallel=SequenceParallel(**{"min_tokens": threshold, "fuse": fuse, **options}),
        ranges=_ranges(_endpoints(given), threshold),
        steps=tuple(steps),
    )


def _flat(settings: Mapping[str, Any] | str) -> dict[str, Any]:
    """All settings on one level, checked; what is not read is said once."""
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except json.JSONDecodeError as error:
            raise ValueError(f"compilation config: not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise ValueError(f"compilation config: expected an object with names and values, got {settings!r}")
    inner = settings.get("pass_config") or {}
    given = {**{k: v for k, v in settings.items() if k != "pass_config"}, **inner}
    if unread := [name for name in given if name not in READ]:
        warnings.warn(f"compilation config: not read: {', '.join(unread)}", RuntimeWarning, stacklevel=4)
    threshold = given.get("sp_min_token_num")
    for name in ("enable_sp", FUSE, OLD_FUSE):
        if given.get(name) is not None and not isinstance(given[name], bool):
            raise ValueError(f"{name} is {given[name]!r}, expected true, false or nothing")
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 1):
        raise ValueError(f"sp_min_token_num is {threshold!r}, expected a count of tokens, 1 or more")
    return given


def _is_eager(given: Mapping[str, Any]) -> bool:
    return bool(given.get("enforce_eager")) or any(given.get(name) in (0, "NONE") for name in ("mode", "level"))


def _endpoints(given: Mapping[str, Any]) -> tuple[int, ...]:
    new, old = given.get(ENDPOINTS), given.get(OLD_ENDPOINTS)
    if new is not None and old is not None and list(new) != list(old):
        raise ValueError(f"{ENDPOINTS} is {new} and {OLD_ENDPOINTS}, its older name, is {old}: say one")
    ends = new if new is not None else old or ()
    if not isinstance(ends, Sequence) or not all(isinstance(e, int) and e > 0 for e in ends):
        raise ValueError(f"{ENDPOINTS} is {ends!r}, expected counts of tokens, 1 or more")
    return tuple(sorted(set(ends)))


def _ranges(ends: tuple[int, ...], threshold: int | None) -> tuple[CompileRange, ...]:
    """Ranges that end where the settings say; the threshold starts one of its own."""
    stops = sorted({*ends, *((threshold - 1,) if threshold is not None and threshold > 1 else ())})
    starts = [1, *(stop + 1 for stop in stops)]
    return tuple(
        CompileRange(start=start, end=end, sequence_parallel=threshold is not None and start >= threshold)
        for start, end in zip(starts, [*stops, None], strict=True)
    )
