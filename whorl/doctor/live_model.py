"""`guard` runs the checks that need a live model: its branch, rotary class, switches, and first position ids.

Every fact is read by attribute name, so `guard` works on any nn.Module and imports neither torch nor Megatron.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from whorl.contracts import mrope_limit
from whorl.doctor.checks.branch import BRIDGE_SECTIONS, mrope_settings
from whorl.doctor.report import Finding, Report, by_severity

LOW_PRECISION: Final = ("torch.bfloat16", "torch.float16")


class GuardError(RuntimeError):
    """`guard` raises it when a live model will fail or compute wrong results; `.report` holds the findings."""

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__("; ".join(_message(finding) for finding in report.findings if finding.severity == "error"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryOwner:
    """A module that owns a rotary object, with the config and launch arguments that decide how the object is called.

    branch: Megatron's position_embedding_type ("rope", "mrope", ...), None in models without branches.
    """

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
            if (sections := getattr(owner, "mrope_section", None)) is not None:
                return list(sections)
        return None

    @property
    def is_mrope_class(self) -> bool:
        name = type(self.rotary).__name__
        return "Multimodal" in name or name.startswith("MRotary")

    def switch(self, name: str) -> bool:
        """Return whether the config or the launch arguments turn the switch on."""
        return any(getattr(owner, name, False) is True for owner in (self.config, self.args))


BuildCheck = Callable[[RotaryOwner], Iterator[Finding]]  # a check of a built model, before its first forward


def guard(model: Any, *, args: Any = None, action: Literal["raise", "warn"] = "raise") -> Report:
    """Check the rotary embedding of a built model now, and its position ids at the first forward.

    model: any nn.Module; args: the launcher's namespace, which holds switches such as use_fused_rotary_pos_emb; action:
    "raise" or "warn". Returns the Report of the built model. Findings of severity "error" raise GuardError (with
    action="warn" they only warn), findings of severity "warning" warn. The forward hooks remove themselves after the
    first call. Raises ValueError for another action.

    Example: guard(model, args=args)
    """
    if action not in ("raise", "warn"):
        raise ValueError(f"guard: action must be 'raise' or 'warn', got {action!r}")
    owners = list(rotary_owners(model, args))
    findings = [finding for owner in owners for check in BUILD_CHECKS for finding in _located(check(owner), owner)]
    report = _report(model, [*findings, *_check_precision(model)])
    _raise_or_warn(report, action)
    for owner in owners:
        _watch_first_forward(owner, action)
    return report


def rotary_owners(model: Any, args: Any) -> Iterator[RotaryOwner]:
    """Yield every module that has a rotary object under one of the attribute names that frameworks use."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        config = getattr(config, "language_transformer_config", config)
        for attribute in ("rotary_pos_emb", "rotary_emb"):
            rotary = getattr(module, attribute, None)
            if rotary is not None and callable(rotary):
                name = name or type(module).__name__
                yield RotaryOwner(name=name, module=module, rotary=rotary, config=config, args=args)


def _located(findings: Iterable[Finding], owner: RotaryOwner) -> list[Finding]:
    return [replace(finding, where=owner.name) for finding in findings]


def _mrope_fix(owner: RotaryOwner) -> tuple[str, ...]:
    sections = owner.sections or list(BRIDGE_SECTIONS)
    return mrope_settings(sections, mindspeed=owner.switch("use_fused_rotary_pos_emb"))


def check_branch_and_class(owner: RotaryOwner) -> Iterator[Finding]:
    """Report an MRoPE class outside the mrope branch, or another rotary class inside it."""
    kind = type(owner.rotary).__name__
    if owner.branch is None or owner.is_mrope_class == (owner.branch == "mrope"):
        return
    if owner.is_mrope_class:
        yield Finding(
            code="rope-branch-mismatch",
            found=f"position_embedding_type={owner.branch!r} with {kind}",
            expected="'mrope'",
            why="The rope branch calls get_rotary_seq_len and passes a sequence length; this class takes position_ids "
            "and mrope_section.",
            fix=_mrope_fix(owner),
        )
    elif "Rotary" in kind:
        yield Finding(
            code="rope-branch-mismatch",
            found=f"position_embedding_type='mrope' with {kind}",
            expected="a multimodal rotary class",
            why="The mrope branch passes position_ids of three axes; this class takes a sequence length.",
            fix="position_embedding_type=rope, or a model class that builds MRoPE",
        )


def check_config_and_module(owner: RotaryOwner) -> Iterator[Finding]:
    """Report a module whose position_embedding_type is not that of its config."""
    config_branch = getattr(owner.config, "position_embedding_type", None)
    if config_branch is not None and owner.branch not in (None, config_branch):
        yield Finding(
            code="config-overrides-argument",
            severity="warning",
            found=f"the config has {config_branch!r}, the module has {owner.branch!r}",
            expected="the same value in both",
            why="One of the two was changed after construction; code that reads the other one takes a different "
            "branch.",
            fix="set position_embedding_type before the model is built",
        )


def _check_fused_switches(owner: RotaryOwner) -> Iterator[Finding]:
    if owner.branch not in (None, "rope") and owner.switch("use_fused_rotary_pos_emb"):
        yield Finding(
            code="fused-rope-needs-rope",
            found=f"use_fused_rotary_pos_emb with {owner.branch!r}",
            expected="the switch off",
            why="MindSpeed's fused operator supports only the rope branch.",
            fix="remove --use-fused-rotary-pos-emb",
        )
    is_bridge = type(owner.rotary).__name__.startswith("Qwen3VL")
    if owner.branch == "mrope" and is_bridge and owner.switch("apply_rope_fusion"):
        yield Finding(
            code="rope-fusion-with-mrope",
            found="apply_rope_fusion=True",
            expected="False",
            why="Bridge's apply_rotary_pos_emb_absolute asserts that apply_rope_fusion is off.",
            fix="apply_rope_fusion=False",
        )


def _check_section_sum(owner: RotaryOwner) -> Iterator[Finding]:
    frequencies = getattr(owner.rotary, "inv_freq", None)
    if owner.branch != "mrope" or owner.sections is None or frequencies is None:
        return
    if sum(owner.sections) != int(frequencies.shape[-1]):
        yield Finding(
            code="mrope-section-sum",
            found=f"mrope_section {owner.sections} sums to {sum(owner.sections)}",
            expected=f"{frequencies.shape[-1]}",
            why="Every rotary pair belongs to exactly one axis.",
            fix="take mrope_section from the model's config.json",
        )


BUILD_CHECKS: Final[tuple[BuildCheck, ...]] = (
    check_branch_and_class,
    check_config_and_module,
    _check_fused_switches,
    _check_section_sum,
)


def _check_precision(model: Any) -> Iterator[Finding]:
    """Report every inv_freq in 16 bits."""
    for name, module in model.named_modules():
        dtype = str(getattr(getattr(module, "inv_freq", None), "dtype", ""))
        if dtype in LOW_PRECISION:
            yield Finding(
                code="low-precision-angles",
                severity="warning",
                where=name or type(module).__name__,
                found=f"inv_freq is {dtype}",
                expected="torch.float32",
                why="At 128k positions the cos of an angle computed from it is off by up to 2.0; model.to(bfloat16) "
                "casts inv_freq silently.",
                fix="recompute inv_freq in float32 after casting the model",
            )


def _watch_first_forward(owner: RotaryOwner, action: Literal["raise", "warn"]) -> None:
    """Hook an MRoPE object so that the arguments of its first call are checked; the hook then removes itself."""
    is_module = hasattr(owner.rotary, "register_forward_pre_hook")
    if not is_module or not (owner.is_mrope_class or owner.branch == "mrope"):
        return

    def examine(module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        handle.remove()
        arguments = arguments_by_name(own_forward(module), positional, keywords)
        _raise_or_warn(_report(module, _located(_check_first_call(owner, arguments), owner)), action)

    handle = owner.rotary.register_forward_pre_hook(examine, with_kwargs=True)


def own_forward(module: Any) -> Callable[..., Any]:
    """Return the forward of a module's class, bound to the module, whatever its first parameter is called.

    What a hook sees are the arguments of this one, also where another forward was set on the module itself.
    """
    forward: Callable[..., Any] = inspect.getattr_static(type(module), "forward").__get__(module, type(module))
    return forward


def arguments_by_name(
    function: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Map parameter names of `function` to the values of a call; a call that does not fit the signature is accepted."""
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind in named]
    return dict(zip(names, positional, strict=False)) | dict(keywords)


def _check_first_call(owner: RotaryOwner, arguments: dict[str, Any]) -> Iterator[Finding]:
    positions, packed = arguments.get("position_ids", arguments.get("positions")), arguments.get("packed_seq_params")
    shape = getattr(positions, "shape", None)
    if positions is None:
        return
    if shape is None:
        yield Finding(
            code="rope-branch-mismatch",
            found=f"called with a sequence length ({positions})",
            expected="position_ids",
            why="The rope branch made this call. Megatron Bridge 0.5 and newer get this far because their class has a "
            "get_rotary_seq_len.",
            fix=_mrope_fix(owner),
        )
        return
    # Megatron's classes take position_ids first; vLLM's and transformers' accept plain positions as well.
    if next(iter(arguments)) == "position_ids":
        yield from check_position_shape(owner, tuple(shape))
    yield from check_position_values(owner, positions)
    yield from check_sliced_once(owner, packed)
    if packed is None and len(shape) == 3 and shape[1] != 1 and owner.switch("apply_rope_fusion"):
        yield Finding(
            code="mrope-batch-unfused",
            severity="warning",
            found=f"apply_rope_fusion=True with a batch of {shape[1]}",
            expected="False, or THD",
            why="TransformerEngine's kernel supports MRoPE only with a batch of 1; Megatron Core warns and runs "
            "unfused at every call.",
            fix="apply_rope_fusion=False",
        )


def check_position_shape(owner: RotaryOwner, shape: tuple[int, ...]) -> Iterator[Finding]:
    """Report position_ids of an MRoPE class that are not [axes, B, S]."""
    axes = len(owner.sections or (0, 0, 0))
    if len(shape) != 3 or shape[0] != axes:
        yield Finding(
            code="position-ids-shape",
            found=f"position_ids of shape {list(shape)}",
            expected=f"[{axes}, B, S], or [{axes}, 1, T] when packed",
            why="MRoPE rotates by temporal, height and width positions; in THD the axes stay the first dimension and "
            "the packed tokens the last.",
            fix="build position_ids with get_rope_index (whorl.positions)",
        )


def check_position_values(owner: RotaryOwner, positions: Any) -> Iterator[Finding]:
    """Report positions that are a strided view on an NPU, or that lie past the end of the cos/sin table."""
    if str(getattr(positions, "device", "")).startswith("npu") and not positions.is_contiguous():
        yield Finding(
            code="positions-not-contiguous",
            severity="warning",
            found="position_ids are a strided view",
            expected="position_ids.contiguous()",
            why="Every known caller of npu_mrope makes positions contiguous first; a slice of a larger buffer is "
            "strided.",
            fix="call .contiguous() before npu_mrope",
        )
    table = getattr(owner.rotary, "cos_sin_cache", None)
    if table is not None and positions.numel() and int(positions.max()) >= table.shape[0]:
        yield Finding(
            code="table-too-short",
            found=f"position {int(positions.max())} with a table of {table.shape[0]} rows",
            expected=f"at most {table.shape[0] - 1}",
            why="The table is read out of bounds, or the engine crashes (vllm-project/vllm#47407).",
            fix="build a longer table, or send shorter inputs",
        )


def check_sliced_once(owner: RotaryOwner, packed: Any) -> Iterator[Finding]:
    """Report packed positions that the rotary class would slice for context parallelism a second time.

    packed: the call's packed_seq_params, None where sequences are not packed.
    """
    group = getattr(owner.rotary, "cp_group", None)
    ranks = group.size() if group is not None else 1
    if packed is not None and ranks != 1 and getattr(owner.rotary, "is_thd_format", None) is False:
        yield Finding(
            code="packed-positions",
            severity="warning",
            found=f"packed sequences over {ranks} ranks with is_thd_format=False",
            expected="is_thd_format=True",
            why="Bridge slices positions for context parallelism when it packs sequences, and sets is_thd_format so "
            "that the rotary class does not slice them a second time.",
            fix="set rotary_pos_emb.is_thd_format = True where position_ids are packed",
        )


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
    """Return the documented limit that a call of torch_npu.npu_mrope with these arguments breaks, or None.

    positions: [T] or [axes, T]; query: [T, heads * head_size]; key: [T, kv_heads * head_size]; cos_sin_cache:
    [rows, rotary_dim]; tensors may be on any device, since only shapes and dtypes are read. Raises nothing.

    Example: check_npu_mrope(positions, q, k, table, 128, mrope_section=[24, 20, 20], cache_mode="interleave")
    """
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
        framework_because="passed to guard",
        device="any",
        device_because="not needed",
        train=bool(getattr(model, "training", False)),
        model=type(model).__name__,
        findings=by_severity(findings),
    )


def _raise_or_warn(report: Report, action: Literal["raise", "warn"]) -> None:
    if action == "raise" and any(finding.severity == "error" for finding in report.findings):
        raise GuardError(report)
    for finding in report.findings:
        if finding.severity != "note":
            warnings.warn(_message(finding), stacklevel=3)


def _message(finding: Finding) -> str:
    return (
        f"{finding.code} at {finding.where}: {finding.found}; expected {finding.expected}. "
        f"Fix: {', '.join(finding.fix)}"
    )
