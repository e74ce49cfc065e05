"""`guard`: the checks that need a live model: its branch, rotary class, switches, and the first position ids.

Everything is read by attribute name, so it works on any nn.Module and imports neither torch nor Megatron.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from whorl.contracts import mrope_limit
from whorl.doctor.checks.branch import BRIDGE_SECTIONS, mrope_settings
from whorl.doctor.report import Finding, Report, Severity, by_severity

LOW_PRECISION: Final = ("torch.bfloat16", "torch.float16")


class GuardError(RuntimeError):
    """A live model will fail or go wrong; `.report` holds the findings."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__("; ".join(_sentence(finding) for finding in report.findings if finding.severity == "error"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """One module that owns a rotary object, and what decides how it is called."""

    name: str
    module: Any
    rotary: Any
    config: Any
    args: Any

    @property
    def branch(self) -> str | None:
        return getattr(self.module, "position_embedding_type", None)

    @property
    def sections(self) -> list[int] | None:
        for owner in (self.module, self.config, self.rotary):
            if (found := getattr(owner, "mrope_section", None)) is not None:
                return list(found)
        return None

    @property
    def is_mrope_class(self) -> bool:
        name = type(self.rotary).__name__
        return "Multimodal" in name or name.startswith("MRotary")

    def switch(self, name: str) -> bool:
        return any(getattr(owner, name, False) is True for owner in (self.config, self.args))


LiveCheck = Callable[[Live], Iterator[Finding]]


def guard(model: Any, *, args: Any = None, action: Literal["raise", "warn"] = "raise") -> Report:
    """Examine a built model now and its position ids at the first forward.

    Errors raise `GuardError` (or warn, with action="warn"), warnings warn; the report of the build is returned. `args`
    is the launcher's namespace, where switches such as use_fused_rotary_pos_emb live. The hooks remove themselves.
    """
    if action not in ("raise", "warn"):
        raise ValueError(f"guard: action must be 'raise' or 'warn', got {action!r}")
    owners = list(rotary_owners(model, args))
    findings = [finding for live in owners for check in BUILD_CHECKS for finding in check(live)]
    findings += list(_low_precision(model))
    report = _report(model, findings)
    _act(report, action)
    for live in owners:
        _watch_first_forward(live, action)
    return report


def rotary_owners(model: Any, args: Any) -> Iterator[Live]:
    """Modules with a rotary object, under any of the names frameworks give it."""
    for name, module in model.named_modules():
        for attribute in ("rotary_pos_emb", "rotary_emb"):
            rotary = getattr(module, attribute, None)
            if rotary is not None and callable(rotary):
                yield Live(
                    name=name or type(module).__name__, module=module, rotary=rotary, config=_config(module), args=args
                )


def _config(module: Any) -> Any:
    config = getattr(module, "config", None)
    return getattr(config, "language_transformer_config", config)


def _finding(code: str, severity: Severity, live: Live, found: str, expected: str, why: str, *fix: str) -> Finding:
    return Finding(code=code, severity=severity, where=live.name, found=found, expected=expected, why=why, fix=fix)


def _mrope_fix(live: Live) -> tuple[str, ...]:
    sections = live.sections or list(BRIDGE_SECTIONS)
    return mrope_settings(sections, mindspeed=live.switch("use_fused_rotary_pos_emb"))


def branch_and_class(live: Live) -> Iterator[Finding]:
    kind = type(live.rotary).__name__
    if live.branch is None or live.is_mrope_class == (live.branch == "mrope"):
        return
    if live.is_mrope_class:
        why = (
            "The rope branch calls get_rotary_seq_len and passes a sequence length; this class takes position_ids and "
            "mrope_section."
        )
        yield _finding(
            "rope-branch-mismatch",
            "error",
            live,
            f"position_embedding_type={live.branch!r} with {kind}",
            "'mrope'",
            why,
            *_mrope_fix(live),
        )
    elif "Rotary" in kind:
        why = "The mrope branch passes position_ids of three axes; this class takes a sequence length."
        yield _finding(
            "rope-branch-mismatch",
            "error",
            live,
            f"position_embedding_type='mrope' with {kind}",
            "a multimodal rotary class",
            why,
            "position_embedding_type=rope, or a model class that builds MRoPE",
        )


def config_and_module(live: Live) -> Iterator[Finding]:
    wanted = getattr(live.config, "position_embedding_type", None)
    if wanted is None or live.branch is None or wanted == live.branch:
        return
    why = "One of the two was changed after construction; code that reads the other takes another branch."
    yield _finding(
        "config-overrides-argument",
        "warning",
        live,
        f"config says {wanted!r}, the module {live.branch!r}",
        "one value",
        why,
        "set position_embedding_type before the model is built",
    )


def _fused_switches(live: Live) -> Iterator[Finding]:
    if live.branch is None or live.branch == "rope":
        return
    if live.switch("use_fused_rotary_pos_emb"):
        why = "MindSpeed's fused operator serves the rope branch alone."
        yield _finding(
            "fused-rope-needs-rope",
            "error",
            live,
            f"use_fused_rotary_pos_emb with {live.branch!r}",
            "the switch off",
            why,
            "remove --use-fused-rotary-pos-emb",
        )
    is_bridge = type(live.rotary).__name__.startswith("Qwen3VL")
    if live.branch == "mrope" and is_bridge and live.switch("apply_rope_fusion"):
        why = "Bridge's apply_rotary_pos_emb_absolute asserts that it is off."
        yield _finding(
            "rope-fusion-with-mrope", "error", live, "apply_rope_fusion=True", "False", why, "apply_rope_fusion=False"
        )


def _section_sum(live: Live) -> Iterator[Finding]:
    frequencies = getattr(live.rotary, "inv_freq", None)
    if live.branch != "mrope" or live.sections is None or frequencies is None:
        return
    pairs = int(frequencies.shape[-1])
    if sum(live.sections) != pairs:
        why = "Every rotary pair belongs to one axis."
        yield _finding(
            "mrope-section-sum",
            "error",
            live,
            f"mrope_section {live.sections} sums to {sum(live.sections)}",
            f"{pairs}",
            why,
            "take mrope_section from the model's config.json",
        )


BUILD_CHECKS: Final[tuple[LiveCheck, ...]] = (branch_and_class, config_and_module, _fused_switches, _section_sum)


def _low_precision(model: Any) -> Iterator[Finding]:
    for name, module in model.named_modules():
        dtype = str(getattr(getattr(module, "inv_freq", None), "dtype", ""))
        if dtype in LOW_PRECISION:
            live = Live(name=name or type(module).__name__, module=module, rotary=module, config=None, args=None)
            why = (
                "Angles computed from it are off by up to 2.0 in cos at 128k positions; model.to(bfloat16) casts it "
                "silently."
            )
            yield _finding(
                "low-precision-angles",
                "warning",
                live,
                f"inv_freq is {dtype}",
                "torch.float32",
                why,
                "recompute inv_freq in float32 after casting the model",
            )


def _watch_first_forward(live: Live, action: Literal["raise", "warn"]) -> None:
    is_module = hasattr(live.rotary, "register_forward_pre_hook")
    if not is_module or not (live.is_mrope_class or live.branch == "mrope"):
        return

    def examine(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        handle.remove()
        given = _arguments(module, positional, keywords)
        _act(_report(module, list(_first_call(live, given))), action)

    handle = live.rotary.register_forward_pre_hook(examine, with_kwargs=True)


def _arguments(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name. The call may not fit the signature: that is one of the mistakes to find."""
    names = list(inspect.signature(module.forward).parameters)
    return dict(zip(names, positional, strict=False)) | keywords


def _first_call(live: Live, given: dict[str, Any]) -> Iterator[Finding]:
    positions = given.get("position_ids", given.get("positions"))
    shape = getattr(positions, "shape", None)
    if positions is None:
        return
    if shape is None:
        why = (
            "This is the call of the rope branch. Megatron Bridge 0.5 and newer get this far because "
            "get_rotary_seq_len exists there."
        )
        yield _finding(
            "rope-branch-mismatch",
            "error",
            live,
            f"called with a sequence length ({positions})",
            "position_ids",
            why,
            *_mrope_fix(live),
        )
        return
    # Megatron's classes take position_ids first; vLLM's and transformers' accept plain positions as well.
    if next(iter(given)) == "position_ids":
        yield from position_shape(live, tuple(shape))
    yield from position_values(live, positions)
    yield from packed_twice(live, given.get("packed_seq_params"))
    yield from _fused_batch(live, tuple(shape), given.get("packed_seq_params"))


def position_shape(live: Live, shape: tuple[int, ...]) -> Iterator[Finding]:
    axes = len(live.sections or (0, 0, 0))
    if len(shape) == 3 and shape[0] == axes:
        return
    why = (
        "MRoPE rotates by temporal, height and width positions; in THD the axes stay first and the packed tokens last."
    )
    yield _finding(
        "position-ids-shape",
        "error",
        live,
        f"position_ids of shape {list(shape)}",
        f"[{axes}, B, S], or [{axes}, 1, T] when packed",
        why,
        "build position_ids with get_rope_index (whorl.positions)",
    )


def position_values(live: Live, positions: Any) -> Iterator[Finding]:
    on_npu = str(getattr(positions, "device", "")).startswith("npu")
    if on_npu and not positions.is_contiguous():
        why = "npu_mrope's callers copy positions first; a slice of a larger buffer is a strided view."
        yield _finding(
            "positions-not-contiguous",
            "warning",
            live,
            "position_ids are a strided view",
            "position_ids.contiguous()",
            why,
            "call .contiguous() before npu_mrope",
        )
    table = getattr(live.rotary, "cos_sin_cache", None)
    if table is not None and positions.numel() and int(positions.max()) >= table.shape[0]:
        found = f"position {int(positions.max())} with a table of {table.shape[0]} rows"
        why = "It is read out of bounds, or crashes the engine (vllm-project/vllm#47407)."
        yield _finding(
            "table-too-short",
            "error",
            live,
            found,
            f"at most {table.shape[0] - 1}",
            why,
            "a longer table, or shorter inputs",
        )


def packed_twice(live: Live, packed: Any) -> Iterator[Finding]:
    group = getattr(live.rotary, "cp_group", None)
    ranks = group.size() if group is not None else 1
    if packed is None or ranks == 1 or getattr(live.rotary, "is_thd_format", None) is not False:
        return
    why = (
        "Bridge slices positions for context parallelism once when it packs and sets is_thd_format, so that the class "
        "does not slice again."
    )
    yield _finding(
        "packed-positions",
        "warning",
        live,
        f"packed sequences over {ranks} ranks with is_thd_format=False",
        "is_thd_format=True",
        why,
        "set rotary_pos_emb.is_thd_format = True where position_ids are packed",
    )


def _fused_batch(live: Live, shape: tuple[int, ...], packed: Any) -> Iterator[Finding]:
    if packed is not None or len(shape) != 3 or shape[1] == 1 or not live.switch("apply_rope_fusion"):
        return
    why = (
        "TransformerEngine's kernel takes MRoPE with a batch of 1; Megatron Core warns and runs unfused at every call."
    )
    found = f"apply_rope_fusion=True with a batch of {shape[1]}"
    yield _finding("mrope-batch-unfused", "warning", live, found, "False, or THD", why, "apply_rope_fusion=False")


def check_npu_mrope(
    positions: Any,
    query: Any,
    key: Any,
    cos_sin_cache: Any,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> str | None:
    """The documented limit that these arguments of npu_mrope break, or None. Takes tensors of any device."""
    return mrope_limit(
        query_shape=tuple(query.shape),
        key_shape=tuple(key.shape),
        positions_shape=tuple(positions.shape),
        rotary_dim=int(cos_sin_cache.shape[-1]),
        head_size=head_size,
        dtype=str(query.dtype).removeprefix("torch."),
        table_dtype=str(cos_sin_cache.dtype).removeprefix("torch."),
        sections=mrope_section,
        rotary_mode=rotary_mode,
        cache_mode=cache_mode,
    )


def _report(model: Any, findings: list[Finding]) -> Report:
    return Report(
        framework="live model",
        framework_because="given",
        device="any",
        device_because="not needed",
        train=bool(getattr(model, "training", False)),
        model=type(model).__name__,
        findings=by_severity(findings),
    )


def _act(report: Report, action: Literal["raise", "warn"]) -> None:
    if action == "raise" and any(finding.severity == "error" for finding in report.findings):
        raise GuardError(report)
    for finding in report.findings:
        if finding.severity != "note":
            warnings.warn(_sentence(finding), stacklevel=3)


def _sentence(finding: Finding) -> str:
    return (
        f"{finding.code} at {finding.where}: {finding.found}; expected {finding.expected}. Set {', '.join(finding.fix)}"
    )
