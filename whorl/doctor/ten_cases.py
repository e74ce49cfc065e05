"""`checklist`: ten questions to a live model, each answered by trying it: pass, fail, or why it does not apply."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whorl.contracts import interleaved_formulas_differ, mrope_limit
from whorl.doctor.live_model import (
    branch_and_class,
    config_and_module,
    position_shape,
    position_values,
    rotary_owners,
)
from whorl.doctor.packed import by_sequences, packed_and_sliced
from whorl.doctor.report import Finding
from whorl.doctor.rotation import (
    NOT_TEXT,
    Call,
    PositionsTravel,
    angles_of,
    half_width,
    in_dtype,
    plainly,
    reference,
    replaced,
    rope_config,
    rotated,
    rotating_functions,
    run,
    style_of,
    watch,
)
from whorl.doctor.subject import Answer, Outcome, Subject
from whorl.doctor.trace import BACKWARD, UNFUSED, read_trace

if TYPE_CHECKING:
    from torch import Tensor

SWITCHES: Final = ("apply_rope_fusion", "use_fused_rotary_pos_emb")
DTYPES: Final = ("bfloat16", "float16")
ROUNDINGS: Final = 3  # of cos, of a product, of the sum: each at most half an eps of the largest value, and some air
RESULTS_AGREE: Final = 1e-4  # of the largest value in float32: sums in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One question and its answer; `found` says what was seen, or why the question does not apply."""

    name: str
    outcome: Outcome
    found: str

    def __str__(self) -> str:
        return f"{self.outcome:<14}  {self.name}: {self.found}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checklist:
    """The ten cases in order."""

    cases: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        return all(case.outcome != "fail" for case in self.cases)

    def __getitem__(self, name: str) -> Case:
        return next(case for case in self.cases if case.name == name)

    def __str__(self) -> str:
        return "\n".join(f"{number:>2}  {case}" for number, case in enumerate(self.cases, 1))


def checklist(model: Any, batch: Any, *, args: Any = None, switch: Any = None) -> Checklist:
    """Try the ten cases of an MRoPE launch on a live model and print pass or fail for each.

    `batch` is what one forward takes: a mapping of keyword arguments or a sequence of arguments. `args` is the
    launcher's namespace, where switches such as use_fused_rotary_pos_emb live. `switch` is an object whose `enabled`
    turns a fused path on and off, such as whorl.adapters.megatron.install gives; fused and unfused are then compared
    through the whole model. The model is run in evaluation mode without a graph, and left as it was.
    """
    owners = [live for live in rotary_owners(model, args) if not NOT_TEXT.search(type(live.rotary).__name__)]
    if not owners:
        raise ValueError("checklist: no module with a rotary_pos_emb or rotary_emb was found in this model.")
    live = owners[0]
    subject = Subject(model=model, batch=batch, live=live, switch=switch, seen=watch(model, live, batch))
    answers = Checklist(cases=tuple(_ask(name, question, subject) for name, question in CASES.items()))
    print(answers)
    return answers


def _ask(name: str, question: Callable[[Subject], Answer], subject: Subject) -> Case:
    try:
        outcome, found = question(subject)
    except PositionsTravel as reason:
        outcome, found = "does not apply", str(reason)
    except Exception as error:  # a case that cannot be tried has failed, whatever broke in it
        outcome, found = "fail", f"{type(error).__name__}: {error}"
    return Case(name=name, outcome=outcome, found=" ".join(found.split())[:400])


def _judged(findings: list[Finding], otherwise: str) -> Answer:
    if findings:
        return "fail", "; ".join(f"{finding.found}, expected {finding.expected}" for finding in findings)
    return "pass", otherwise


def _branch(subject: Subject) -> Answer:
    live = subject.live
    if live.branch is None:
        return "does not apply", f"{type(live.module).__name__} has no position_embedding_type: it has one path"
    findings = [*branch_and_class(live), *config_and_module(live)]
    return _judged(findings, f"position_embedding_type={live.branch!r}")


def _object(subject: Subject) -> Answer:
    kind = type(subject.live.rotary).__name__
    if not subject.is_mrope:
        wrong = subject.live.is_mrope_class
        return ("fail", f"{kind}, but the model has no mrope_section") if wrong else ("pass", kind)
    missing = sorted({0, 1, 2} - set(channel_axes(subject)))
    return ("fail", f"{kind} gives axis {missing} no channel") if missing else ("pass", kind)


def channel_axes(subject: Subject) -> list[int]:
    """The axis of each rotary pair, found by moving along one axis at a time; -1 for a pair that follows none."""
    import torch

    pairs = int(subject.live.rotary.inv_freq.shape[-1])
    axes = [-1] * pairs
    still = angles_of(subject.live, torch.zeros(3, 1, 1, dtype=torch.long))
    for axis in range(3):
        positions = torch.zeros(3, 1, 1, dtype=torch.long)
        positions[axis] = 1
        moved = (angles_of(subject.live, positions) != still).view(-1, 2 * pairs).any(0)  # of cos, or of sin
        for pair in half_width(moved, style_of(subject.live)).nonzero().flatten().tolist():
            axes[pair] = axis
    return axes


def _position_ids(subject: Subject) -> Answer:
    positions = subject.positions
    shape = getattr(positions, "shape", None)
    if positions is None:
        return "fail", subject.seen.failure or "the rotary object was not called"
    if shape is None and not subject.is_mrope:
        return "does not apply", f"plain RoPE of Megatron takes a sequence length ({positions}), no position ids"
    if shape is None:
        return "fail", f"called with a sequence length ({positions}), expected position_ids"
    findings = list(position_shape(subject.live, tuple(shape))) if subject.is_mrope else []
    return _judged([*findings, *position_values(subject.live, positions)], f"position_ids {list(shape)}")


def _switches(subject: Subject) -> Answer:
    owners = (subject.live.config, subject.live.args)
    there = [name for name in SWITCHES if any(hasattr(owner, name) for owner in owners)]
    on = [name for name in there if subject.live.switch(name)]
    if not there:
        return "does not apply", "neither apply_rope_fusion nor use_fused_rotary_pos_emb exists here"
    if on and subject.is_mrope:
        return "fail", f"{' and '.join(on)} on; both serve the rope branch alone"
    return "pass", f"{' and '.join(on)} on, in the rope branch" if on else f"{' and '.join(there)} off"


def _npu_mrope(subject: Subject) -> Answer:
    config, positions = subject.live.config, subject.positions
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_query_groups", None) or getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "kv_channels", None) or getattr(config, "head_dim", None) or config.hidden_size // heads)
    shape = tuple(getattr(positions, "shape", ()))
    tokens = int(positions.shape[-2:].numel()) if shape else int(positions)
    sections = subject.sections
    flat = ((shape[0] if len(shape) == 3 else 1, tokens) if sections else (tokens,)) if shape else (tokens,)
    dtype = str(next(subject.model.parameters()).dtype).removeprefix("torch.")
    layout = declared_layout(subject) if sections else None
    reason = mrope_limit(
        query_shape=(tokens, heads * size),
        key_shape=(tokens, groups * size),
        positions_shape=flat,
        rotary_dim=2 * int(subject.live.rotary.inv_freq.shape[-1]),
        head_size=size,
        dtype=dtype,
        table_dtype=dtype,
        sections=sections,
        rotary_mode="interleave" if style_of(subject.live) == "pairs" else "half",
        cache_mode="interleave" if layout == "interleaved" else "default",
    )
    call = f"positions {list(flat)}, query {[tokens, heads * size]}, key {[tokens, groups * size]}, head_size {size}"
    return ("fail", reason) if reason is not None else ("pass", call)


def declared_layout(subject: Subject) -> str | None:
    """How the model says that its sections lie, or how its class is known to lay them; None where nothing says."""
    rope, kind = rope_config(subject.live), type(subject.live.rotary).__name__
    if rope is not None and rope.layout is not None:
        return rope.layout
    if kind.startswith("Qwen3VL"):
        return "interleaved"
    return "chunked" if kind == "MultimodalRotaryEmbedding" else None


def _axes(subject: Subject) -> Answer:
    sections, layout = subject.sections, declared_layout(subject)
    if not subject.is_mrope or sections is None:
        return "does not apply", "one axis: the model has no mrope_section"
    if len(sections) != 3 or layout not in (None, "interleaved", "chunked"):
        return "does not apply", f"sections {sections} in {layout} order are none of npu_mrope's two"
    found = channel_axes(subject)
    known = {name: _axes_of(sections, name) for name in ("interleaved", "chunked")}
    seen = next((name for name, axes in known.items() if axes == found), None)
    if seen is None or (layout is not None and seen != layout):
        wrong = [pair for pair, axis in enumerate(found) if axis != known[layout or "interleaved"][pair]]
        return "fail", f"pairs {wrong[:8]} follow other axes than {layout or 'either'} sections {sections} give"
    if seen == "interleaved" and interleaved_formulas_differ(sections):
        return "fail", f"npu_mrope's published formula gives {sections} other axes than the model"
    mode = "interleave" if seen == "interleaved" else "default"
    return "pass", f"{seen} sections {sections}: cache_mode={mode!r}"


def _axes_of(sections: list[int], layout: str) -> list[int]:
    if layout == "chunked":
        return [axis for axis, count in enumerate(sections) for _ in range(count)]
    axes = [0] * sum(sections)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
    return axes


def _numbers(subject: Subject) -> Answer:
    if subject.seen.failure is not None:
        return "fail", f"the forward raised {subject.seen.failure}"
    if subject.switch is not None:
        return _numbers_of_the_model(subject)
    if not subject.calls:
        return "does not apply", "no rotating function was called by name; give `switch` to compare whole forwards"
    report = [(dtype, *_largest_error(subject.calls[:2], dtype, style_of(subject.live))) for dtype in DTYPES]
    text = ", ".join(f"{dtype} off by {error:.2g} (allowed {allowed:.2g})" for dtype, error, allowed in report)
    return ("pass" if all(error <= allowed for _, error, allowed in report) else "fail"), text


def _largest_error(calls: list[Call], dtype: str, style: str) -> tuple[float, float]:
    """Of the live rotation in `dtype` against plain torch in float32; the calls are those of q and k."""
    import torch

    kind = getattr(torch, dtype)
    error = largest = 0.0
    for call in calls:
        names = ("t",) if call.takes_angles else ("q", "k", "cos", "sin")
        cast = {name: call.given[name].to(kind) for name in names}
        out = call.again(**cast)
        for one, wanted in zip(out if isinstance(out, tuple) else (out,), _reference(call, cast, style), strict=True):
            difference = (one.float() - wanted).abs().max().item()
            error = max(error, difference if difference == difference else float("inf"))
            largest = max(largest, wanted.abs().max().item())
    return error, ROUNDINGS * torch.finfo(kind).eps * largest


def _reference(call: Call, cast: dict[str, Any], style: str) -> "tuple[Tensor, ...]":
    packed = call.given.get("cu_seqlens")
    if packed is None:
        return reference(Call(function=call.function, given=call.given | cast), style)
    return (by_sequences(cast["t"].float(), call.given["freqs"], packed.tolist(), style),)


def _numbers_of_the_model(subject: Subject) -> Answer:
    import torch

    found = []
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        with in_dtype(subject.model, kind):
            distance = _distance(rotated(subject.model, subject.batch), _without(subject))
        found.append((dtype, distance, ROUNDINGS * torch.finfo(kind).eps))
    text = ", ".join(f"{dtype} off by {distance:.2g} of the largest" for dtype, distance, _ in found)
    return ("pass" if all(distance <= allowed for _, distance, allowed in found) else "fail"), text


def _device(subject: Subject) -> str:
    return str(next(subject.model.parameters()).device.type)


def _without(subject: Subject) -> "list[Tensor]":
    """A forward with the fused path off."""
    before, subject.switch.enabled = subject.switch.enabled, False
    try:
        return rotated(subject.model, subject.batch)
    finally:
        subject.switch.enabled = before


def _distance(some: "list[Tensor]", others: "list[Tensor]") -> float:
    """The largest difference, as a share of the largest value; infinite where something is not a number."""
    distances = [0.0]
    for one, other in zip(some, others, strict=True):
        share = (one.float() - other.float()).abs().max() / other.float().abs().max().clamp(min=1e-30)
        distances.append(float(share) if float(share) == float(share) else float("inf"))
    return max(distances)


def _profiler(subject: Subject) -> Answer:
    import torch

    if subject.seen.failure is not None:
        return "fail", f"the forward raised {subject.seen.failure}"
    with torch.profiler.profile() as profile:
        run(subject.model, subject.batch)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        ran = {name: count for name, count in read_trace(file).items() if not BACKWARD.search(name)}
    if not ran and _is_on(subject.switch) and _device(subject) == "cpu":
        return "does not apply", "on the CPU the fused path is plain torch, and no event bears its name"
    if not ran:
        return "fail", "no rotary operator among the events of a forward"
    text = ", ".join(f"{name} x{count}" for name, count in ran.items())
    fused = [name for name in SWITCHES if subject.live.switch(name)] + (["switch"] if _is_on(subject.switch) else [])
    if fused and set(ran) == {UNFUSED}:
        return "fail", f"{' and '.join(fused)} on, but only {text} ran"
    return "pass", text


def _is_on(switch: Any) -> bool:
    return switch is not None and bool(switch.enabled)


def _fallback(subject: Subject) -> Answer:
    import torch

    if subject.seen.failure is not None:
        return "fail", f"the forward raised {subject.seen.failure}"
    fused = rotated(subject.model, subject.batch)
    if subject.switch is not None:
        plain, how = _without(subject), "with the switch off"
    elif subject.calls:
        style = style_of(subject.live)
        with replaced(rotating_functions(subject.model), lambda function: plainly(function, style)):
            plain = rotated(subject.model, subject.batch)
        how = "with every rotation in plain torch"
    else:
        return "does not apply", "no rotating function was called by name; give `switch` to turn the fused path off"
    if not all(bool(torch.isfinite(value).all()) for value in plain):
        return "fail", f"{how} the results are not finite"
    distance = _distance(fused, plain)
    allowed = max(RESULTS_AGREE, ROUNDINGS * torch.finfo(plain[0].dtype).eps)
    text = f"{how} the results differ by {distance:.2g} of the largest (allowed {allowed:.2g})"
    return ("pass" if distance <= allowed else "fail"), text


CASES: Final[dict[str, Callable[[Subject], Answer]]] = {
    "branch": _branch,
    "rotary object": _object,
    "position ids": _position_ids,
    "fusion switches": _switches,
    "npu_mrope arguments": _npu_mrope,
    "axes of the channels": _axes,
    "numbers in bf16 and fp16": _numbers,
    "packed and context parallel": packed_and_sliced,
    "profiler": _profiler,
    "fallback": _fallback,
}
