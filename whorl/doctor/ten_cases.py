"""`checklist` tries ten cases on a live model; each case passes, fails, or says why it does not apply."""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

from whorl.contracts import interleaved_axes, interleaved_formulas_differ, mrope_limit
from whorl.doctor.live_model import (
    check_branch_and_class,
    check_config_and_module,
    check_position_shape,
    check_position_values,
    check_sliced_once,
    rotary_owners,
)
from whorl.doctor.report import Finding
from whorl.doctor.rotation import (
    NOT_TEXT,
    AnglesUnavailable,
    Call,
    Subject,
    compute_angles,
    half_width,
    in_dtype,
    in_plain_torch,
    record_forward,
    reference,
    replace_rotations,
    rotate,
    rotated_tensors,
    run,
)
from whorl.doctor.trace import BACKWARD, UNFUSED, read_trace

if TYPE_CHECKING:
    from torch import Tensor

Outcome = Literal["pass", "fail", "does not apply"]
Answer = tuple[Outcome, str]  # the outcome of a case, and what was seen
SWITCHES: Final = ("apply_rope_fusion", "use_fused_rotary_pos_emb")
DTYPES: Final = ("bfloat16", "float16")
BOUNDS: Final = (0, 4, 12)  # where the sequences of a pack begin and end; the last one is the longest
# The allowed error is ROUNDINGS * eps * the largest value: cos, a product and the sum are rounded, each by at most
# eps / 2.
ROUNDINGS: Final = 3
# The allowed difference of two float32 results, as a share of the largest value: sums may be in another order.
RESULTS_AGREE: Final = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One case of the checklist and its outcome; `found` says what was seen, or why the case does not apply."""

    name: str
    outcome: Outcome
    found: str

    def __str__(self) -> str:
        return f"{self.outcome:<14}  {self.name}: {self.found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checklist:
    """The ten cases of a `checklist`, in order. `checklist[name]` is the case of that name."""

    cases: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        """Whether no case failed; a case that does not apply is no failure."""
        return all(case.outcome != "fail" for case in self.cases)

    def __getitem__(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)

    def __str__(self) -> str:
        return "\n".join(f"{number:>2}  {case}" for number, case in enumerate(self.cases, 1))


def checklist(model: Any, batch: Any, *, args: Any = None, switch: Any = None) -> Checklist:
    """Try the ten cases of an MRoPE launch on a live model and print pass or fail for each.

    model: an nn.Module with a rotary_pos_emb or rotary_emb; batch: the inputs of one forward, as a mapping of keyword
    arguments or a sequence of positional ones; args: the launcher's namespace, which holds switches such as
    use_fused_rotary_pos_emb; switch: an object whose attribute `enabled` turns a fused path on and off, such as
    whorl.adapters.megatron.install returns: fused and unfused are then compared through the whole model. Returns the
    Checklist. Raises ValueError for a model without a rotary object. The model runs in evaluation mode without
    autograd, and its weights and modes are restored.

    Example: assert checklist(model, {"input_ids": ids, "position_ids": positions}).passed
    """
    owners = [owner for owner in rotary_owners(model, args) if not NOT_TEXT.search(type(owner.rotary).__name__)]
    if not owners:
        raise ValueError("checklist: no module with a rotary_pos_emb or rotary_emb; pass the model with the decoder")
    subject = Subject(model=model, batch=batch, owner=owners[0], switch=switch)
    record_forward(subject)
    answers = Checklist(cases=tuple(_try_case(name, examine, subject) for name, examine in CASES.items()))
    print(answers)
    return answers


def _try_case(name: str, examine: Callable[[Subject], Answer], subject: Subject) -> Case:
    try:
        outcome, text = examine(subject)
    except AnglesUnavailable as reason:
        outcome, text = "does not apply", str(reason)
    except Exception as error:  # a case that raises has failed, whatever the exception
        outcome, text = "fail", f"{type(error).__name__}: {error}"
    return Case(name=name, outcome=outcome, found=" ".join(text.split())[:400])


def _answer(findings: list[Finding], passed: str) -> Answer:
    """Return "fail" with the findings, or "pass" with the text `passed` if there are none."""
    if findings:
        return "fail", "; ".join(f"{finding.found}, expected {finding.expected}" for finding in findings)
    return "pass", passed


def _branch(subject: Subject) -> Answer:
    owner = subject.owner
    if owner.branch is None:
        kind = type(owner.module).__name__
        return "does not apply", f"{kind} has no position_embedding_type: it has one path"
    findings = [*check_branch_and_class(owner), *check_config_and_module(owner)]
    return _answer(findings, f"position_embedding_type={owner.branch!r}")


def _rotary_object(subject: Subject) -> Answer:
    kind = type(subject.owner.rotary).__name__
    if not subject.is_mrope:
        is_mismatch = subject.owner.is_mrope_class
        return ("fail", f"{kind}, but the model has no mrope_section") if is_mismatch else ("pass", kind)
    missing = sorted({0, 1, 2} - set(measure_pair_axes(subject)))
    return ("fail", f"{kind} gives no channel to axis {missing}") if missing else ("pass", kind)


def measure_pair_axes(subject: Subject) -> list[int]:
    """Return the axis of each rotary pair, measured by moving along one axis at a time; -1 for a pair without axis."""
    import torch

    pairs = int(subject.owner.rotary.inv_freq.shape[-1])
    axes = [-1] * pairs
    at_origin = compute_angles(subject.owner, torch.zeros(3, 1, 1, dtype=torch.long))
    for axis in range(3):
        positions = torch.zeros(3, 1, 1, dtype=torch.long)
        positions[axis] = 1
        moved = (compute_angles(subject.owner, positions) != at_origin).view(-1, 2 * pairs).any(0)  # in cos or in sin
        for pair in half_width(moved, subject.style).nonzero().flatten().tolist():
            axes[pair] = axis
    return axes


def _position_ids(subject: Subject) -> Answer:
    positions = subject.positions
    shape = getattr(positions, "shape", None)
    if positions is None:
        return "fail", _no_positions(subject)
    if shape is None and not subject.is_mrope:
        return "does not apply", f"Megatron's plain RoPE takes a sequence length ({positions}) and no position ids"
    if shape is None:
        return "fail", f"called with a sequence length ({positions}), expected position_ids"
    findings = list(check_position_shape(subject.owner, tuple(shape))) if subject.is_mrope else []
    return _answer([*findings, *check_position_values(subject.owner, positions)], f"position_ids {list(shape)}")


def _no_positions(subject: Subject) -> str:
    """Say why no positions are known."""
    if subject.failure is not None:
        return f"the forward raised {subject.failure}"
    if not subject.rotary:
        return "the rotary object was not called"
    names = ", ".join(subject.rotary[0]) or "no arguments"
    return f"the rotary object was called with {names}, expected position_ids, positions or max_seq_len"


def _switches(subject: Subject) -> Answer:
    owners = (subject.owner.config, subject.owner.args)
    present = [name for name in SWITCHES if any(hasattr(owner, name) for owner in owners)]
    on = [name for name in present if subject.owner.switch(name)]
    if not present:
        return "does not apply", "neither apply_rope_fusion nor use_fused_rotary_pos_emb exists in this model"
    if on and subject.is_mrope:
        return "fail", f"{' and '.join(on)} on, but both support only the rope branch"
    return "pass", f"{' and '.join(on)} on, in the rope branch" if on else f"{' and '.join(present)} off"


def _npu_mrope(subject: Subject) -> Answer:
    config, positions = subject.owner.config, subject.positions
    if positions is None:
        return "does not apply", f"its positions are unknown: {_no_positions(subject)}"
    if not hasattr(config, "num_attention_heads"):
        return "does not apply", "the model has no config with num_attention_heads, from which q and k get their shapes"
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_query_groups", None) or getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "kv_channels", None) or getattr(config, "head_dim", None) or config.hidden_size // heads)
    shape = tuple(getattr(positions, "shape", ()))
    tokens = int(positions.shape[-2:].numel()) if shape else int(positions)
    sections = subject.sections
    # npu_mrope takes positions with B and S flattened to tokens: [axes, T] for MRoPE, otherwise [T].
    flat = ((shape[0] if len(shape) == 3 else 1, tokens) if sections else (tokens,)) if shape else (tokens,)
    dtype = str(next(subject.model.parameters()).dtype).removeprefix("torch.")
    layout = declared_layout(subject) if sections else None
    reason = mrope_limit(
        query_shape=(tokens, heads * size),
        key_shape=(tokens, groups * size),
        positions_shape=flat,
        rotary_dim=2 * int(subject.owner.rotary.inv_freq.shape[-1]),
        head_size=size,
        dtype=dtype,
        table_dtype=dtype,
        sections=sections,
        rotary_mode="interleave" if subject.style == "pairs" else "half",
        cache_mode="interleave" if layout == "interleaved" else "default",
    )
    call = f"positions {list(flat)}, query {[tokens, heads * size]}, key {[tokens, groups * size]}, head_size {size}"
    return ("fail", reason) if reason is not None else ("pass", call)


def declared_layout(subject: Subject) -> str | None:
    """Return the section layout that the config declares, or that the rotary class is known to use; None if unknown."""
    rope, kind = subject.rope, type(subject.owner.rotary).__name__
    if rope is not None and rope.layout is not None:
        return rope.layout
    if kind.startswith("Qwen3VL"):
        return "interleaved"
    return "chunked" if kind == "MultimodalRotaryEmbedding" else None


def _axes(subject: Subject) -> Answer:
    sections, layout = subject.sections, declared_layout(subject)
    if not subject.is_mrope or sections is None:
        return "does not apply", "the model has no mrope_section, so it has one axis"
    if len(sections) != 3 or layout not in (None, "interleaved", "chunked"):
        other = f"{layout} sections {sections}"
        return "does not apply", f"{other}: npu_mrope supports only interleaved and chunked ones"
    pair_axes = measure_pair_axes(subject)
    chunked = [axis for axis, count in enumerate(sections) for _ in range(count)]
    known = {"interleaved": list(interleaved_axes(sections)), "chunked": chunked}
    actual = next((name for name, axes in known.items() if axes == pair_axes), None)
    if actual is None or (layout is not None and actual != layout):
        wrong = [pair for pair, axis in enumerate(pair_axes) if axis != known[layout or "interleaved"][pair]]
        return "fail", f"pairs {wrong[:8]} follow other axes than {layout or 'either'} sections {sections} give"
    if actual == "interleaved" and interleaved_formulas_differ(sections):
        return "fail", f"npu_mrope's published formula gives {sections} other axes than the model"
    mode = "interleave" if actual == "interleaved" else "default"
    return "pass", f"{actual} sections {sections}: cache_mode={mode!r}"


def _numbers(subject: Subject) -> Answer:
    if subject.failure is not None:
        return "fail", f"the forward raised {subject.failure}"
    if subject.switch is not None:
        return _compare_whole_model(subject)
    if not subject.calls:
        return "does not apply", "no known rotating function was called; pass `switch` to compare whole forwards"
    errors = [(dtype, *_largest_error(subject.calls[:2], dtype, subject.style)) for dtype in DTYPES]
    text = ", ".join(f"{dtype} off by {error:.2g} (allowed {allowed:.2g})" for dtype, error, allowed in errors)
    return ("pass" if all(error <= allowed for _, error, allowed in errors) else "fail"), text


def _largest_error(calls: list[Call], dtype: str, style: str) -> tuple[float, float]:
    """Repeat the calls in `dtype`; return their largest error against plain torch in float32, and the error allowed.

    `calls` are the first rotations of a forward: Megatron rotates q and k in two calls, transformers in one.
    """
    import torch

    kind = getattr(torch, dtype)
    error = largest = 0.0
    for call in calls:
        names = ("t",) if call.takes_angles else ("q", "k", "cos", "sin")
        cast = {name: call.arguments[name].to(kind) for name in names}
        out = call.repeat(**cast)
        outputs = out if isinstance(out, tuple) else (out,)
        for actual, expected in zip(outputs, _cast_reference(call, cast, style), strict=True):
            difference = (actual.float() - expected).abs().max().item()
            error = max(error, difference if difference == difference else float("inf"))
            largest = max(largest, expected.abs().max().item())
    return error, ROUNDINGS * torch.finfo(kind).eps * largest


def _cast_reference(call: Call, cast: dict[str, Any], style: str) -> "tuple[Tensor, ...]":
    """Return the expected results of a call with the arguments `cast`, in float32; packed calls (THD) by sequence."""
    packed = call.arguments.get("cu_seqlens")
    if packed is None:
        return reference(Call(function=call.function, arguments=call.arguments | cast), style)
    return (_rotate_by_sequence(cast["t"].float(), call.arguments["freqs"], packed.tolist(), style),)


def _compare_whole_model(subject: Subject) -> Answer:
    """Compare forwards with the switch on and off, with the weights in bfloat16, then in float16."""
    import torch

    differences = []
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        with in_dtype(subject.model, kind):
            difference = _relative_difference(rotated_tensors(subject.model, subject.batch), _unfused_tensors(subject))
        differences.append((dtype, difference, ROUNDINGS * torch.finfo(kind).eps))
    text = ", ".join(f"{dtype} off by {difference:.2g} of the largest value" for dtype, difference, _ in differences)
    return ("pass" if all(difference <= allowed for _, difference, allowed in differences) else "fail"), text


def _unfused_tensors(subject: Subject) -> "list[Tensor]":
    """Run a forward with the fused path switched off and return its rotated tensors."""
    was_enabled, subject.switch.enabled = subject.switch.enabled, False
    try:
        return rotated_tensors(subject.model, subject.batch)
    finally:
        subject.switch.enabled = was_enabled


def _relative_difference(fused: "list[Tensor]", plain: "list[Tensor]") -> float:
    """Return the largest difference as a share of the largest value; infinity where a value is NaN."""
    shares = [0.0]
    for actual, expected in zip(fused, plain, strict=True):
        share = (actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
        shares.append(float(share) if float(share) == float(share) else float("inf"))
    return max(shares)


def _packed(subject: Subject) -> Answer:
    """Compare packed sequences (THD), and the slices of two context-parallel ranks, with sequences one by one.

    A token must rotate in a pack, and on a context-parallel rank, as it does in its sequence alone.
    """
    import torch

    from whorl.positions import packed_positions

    packed = subject.rotary[0].get("packed_seq_params") if subject.rotary else None
    if findings := list(check_sliced_once(subject.owner, packed)):
        return _answer(findings, "")
    positions = packed_positions(torch.tensor(BOUNDS))[None]
    if subject.is_mrope:
        positions = torch.stack((positions, positions // 2, positions // 3))
    pack_angles = compute_angles(subject.owner, positions)
    if difference := _describe_different_angles(subject, positions, pack_angles):
        return "fail", difference
    rotating = next((call for call in subject.calls if call.takes_angles), None)
    if rotating is None:
        return "pass", "tokens get the same angles in a pack and in context-parallel slices as alone"
    return _check_packed_rotation(subject, rotating, pack_angles)


def _describe_different_angles(subject: Subject, positions: "Tensor", pack_angles: "Tensor") -> str | None:
    """Say which tokens get other angles in a pack, or on a context-parallel rank, than alone; None if none do."""
    import torch

    from whorl.positions import context_indices

    for start, end in itertools.pairwise(BOUNDS):
        alone = compute_angles(subject.owner, positions[..., start:end])
        if not torch.allclose(alone, pack_angles[:, start:end], atol=1e-5):
            return f"a sequence of {end - start} tokens gets other angles in a pack than alone"
    for rank in range(2):
        tokens = BOUNDS[-2] + context_indices(torch.tensor([0, BOUNDS[-1] - BOUNDS[-2]]), rank, 2)
        if not torch.allclose(compute_angles(subject.owner, positions[..., tokens]), pack_angles[:, tokens], atol=1e-5):
            return f"context-parallel rank {rank} of 2 gets other angles than the whole sequence"
    return None


def _check_packed_rotation(subject: Subject, call: Call, pack_angles: "Tensor") -> Answer:
    """Compare the rotation of a pack (THD), whole and on each of two context-parallel ranks, with plain torch."""
    import torch

    from whorl.positions import context_indices

    style, heads = subject.style, call.arguments["t"].shape[-2:]
    t = torch.randn(BOUNDS[-1], *heads, generator=torch.Generator().manual_seed(0)).to(pack_angles.device)
    # MRoPE angles have a row per packed token. Plain RoPE has one table of positions 0, 1, ... for all sequences: the
    # rows of the last sequence, which is the longest.
    freqs = pack_angles[0][:, None, None] if subject.is_mrope else pack_angles[0][BOUNDS[-2] :][:, None, None]
    cu_seqlens = torch.tensor(BOUNDS, dtype=torch.int32, device=pack_angles.device)
    expected = _rotate_by_sequence(t, freqs, BOUNDS, style, call.arguments.get("mscale", 1.0))
    accepts_group = "cp_group" in call.arguments
    for rank, size in ((0, 1), (0, 2), (1, 2)) if accepts_group else ((0, 1),):
        tokens = context_indices(cu_seqlens, rank, size)
        group = SimpleNamespace(size=lambda size=size: size, rank=lambda rank=rank: rank)
        options = {"cp_group": group} if accepts_group else {}
        out = call.repeat(t=t[tokens], freqs=freqs, cu_seqlens=cu_seqlens, **options)
        if out.shape != expected[tokens].shape or not torch.allclose(out, expected[tokens], atol=1e-4):
            where = f"context-parallel rank {rank} of {size}" if size > 1 else "the pack"
            return "fail", f"THD: {where} is not rotated as its sequences are one by one"
    lengths = [end - start for start, end in itertools.pairwise(BOUNDS)]
    return "pass", f"THD of lengths {lengths}" + ", whole and on 2 context-parallel ranks" * accepts_group


def _rotate_by_sequence(
    t: "Tensor", freqs: "Tensor", bounds: Sequence[int], style: str, scale: float = 1.0
) -> "Tensor":
    """Rotate each sequence of a pack by itself in plain torch.

    A sequence uses its own rows of freqs where freqs has a row per packed token, else the first rows.
    """
    import torch

    parts = []
    for start, end in itertools.pairwise(bounds):
        rows = freqs[start:end] if freqs.shape[0] == bounds[-1] else freqs[: end - start]
        angles = half_width(rows.float(), style).squeeze(1)
        parts.append(rotate(t[start:end], angles.cos() * scale, angles.sin() * scale, style))
    return torch.cat(parts)


def _profiler(subject: Subject) -> Answer:
    import torch

    if subject.failure is not None:
        return "fail", f"the forward raised {subject.failure}"
    with torch.profiler.profile() as profile:
        run(subject.model, subject.batch)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        ran = {name: count for name, count in read_trace(file).items() if not BACKWARD.search(name)}
    if not ran and _is_on(subject.switch) and next(subject.model.parameters()).device.type == "cpu":
        return "does not apply", "on the CPU the fused path is plain torch, so no event has its name"
    if not ran:
        return "fail", "no rotary operator among the profiler events of one forward"
    text = ", ".join(f"{name} x{count}" for name, count in ran.items())
    fused = [name for name in SWITCHES if subject.owner.switch(name)] + (["switch"] if _is_on(subject.switch) else [])
    if fused and set(ran) == {UNFUSED}:
        return "fail", f"{' and '.join(fused)} on, but only {text} ran"
    return "pass", text


def _is_on(switch: Any) -> bool:
    return switch is not None and bool(switch.enabled)


def _fallback(subject: Subject) -> Answer:
    import torch

    if subject.failure is not None:
        return "fail", f"the forward raised {subject.failure}"
    fused = rotated_tensors(subject.model, subject.batch)
    if subject.switch is not None:
        plain, how = _unfused_tensors(subject), "with the switch off"
    elif subject.calls:
        with replace_rotations(subject.model, lambda function: in_plain_torch(function, subject.style)):
            plain = rotated_tensors(subject.model, subject.batch)
        how = "with every rotation in plain torch"
    else:
        return "does not apply", "no known rotating function was called; pass `switch` to turn the fused path off"
    if not all(bool(torch.isfinite(value).all()) for value in plain):
        return "fail", f"{how} the results are not finite"
    difference = _relative_difference(fused, plain)
    allowed = max(RESULTS_AGREE, ROUNDINGS * torch.finfo(plain[0].dtype).eps)
    text = f"{how} the results differ by {difference:.2g} of the largest value (allowed {allowed:.2g})"
    return ("pass" if difference <= allowed else "fail"), text


CASES: Final[dict[str, Callable[[Subject], Answer]]] = {
    "branch": _branch,
    "rotary object": _rotary_object,
    "position ids": _position_ids,
    "fusion switches": _switches,
    "npu_mrope arguments": _npu_mrope,
    "axes of the channels": _axes,
    "numbers in bf16 and fp16": _numbers,
    "packed and context parallel": _packed,
    "profiler": _profiler,
    "fallback": _fallback,
}
