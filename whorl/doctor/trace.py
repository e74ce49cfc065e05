"""Read torch profiler traces: which rotary operators ran, and whether they are those of the predicted path."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from whorl.doctor.report import Finding, RotaryPath
from whorl.doctor.settings import BadInput

# By pattern of an event's name: the operator that the event proves to have run, or several, separated by spaces, where
# they launch the same kernel. The first match wins.
EVIDENCE: Final = {
    r"npu_mrope|RopeWithSinCosCache": "npu_mrope",
    r"npu_interleave_rope|InterleaveRope|npu_kv_rmsnorm_rope_cache|KvRmsNormRopeCache": "npu_interleave_rope",
    r"npu_apply_rotary_pos_emb|ApplyRotaryPosEmb": "npu_apply_rotary_pos_emb",
    r"_npu_rotary_embedding|RopeOperation": "_npu_rotary_embedding",
    r"npu_rotary_position_embedding": "npu_rotary_position_embedding",
    r"npu_rotary_mul|RotaryMul": "npu_rotary_mul",
    r"RotaryPositionEmbedding": "npu_rotary_mul npu_rotary_position_embedding",
    r"whorl::m?rope|_m?rope_kernel|qk_norm_rope": "whorl",
    r"triton_mrope_fused": "sglang_mrope",
    r"triton_mrope": "triton_mrope",
    r"fused_qk_(gemma_)?rmsnorm_rope_gate": "sglang_gated_rope",
    r"apply_rope_(pos_ids_)?(with_)?cos_sin_cache|BatchQKApplyRotaryPosIdsCosSinCache": "sglang_rope",
    r"_C_ascend::rotary_embedding": "ascend_rotary_embedding",
    r"rope_forward_triton|_triton_rope|npu_rotary_embedding": "triton_rope",
    r"fused_apply_mla_rope|rotary_fwd_(q|kv)_kernel": "mla_fused_rope",
    r"fused_rope_thd": "te_fused_rope_thd",
    r"fused_rope|FusedRoPE": "te_fused_rope te_fused_rope_thd",
    # vllm-ascend 0.10 registers its operator under vLLM's name.
    r"rotary_embedding(_kernel)?\b": "vllm_rotary_embedding ascend_rotary_embedding",
    r"triton_\w*(neg|cat)\w*(cos|sin|mul)\w*": "inductor",
    r"aten::view_as_complex": "torch_complex",
}
ROTATE_HALF: Final = ("aten::neg", "aten::cat", "aten::mul")
UNFUSED: Final = f"{', '.join(ROTATE_HALF)} in a row"
# Names of events of the backward pass, which no comparison uses: the predicted path is that of the forward.
BACKWARD: Final = re.compile(r"(?i)backward|grad")


def read_trace(file: str | Path) -> dict[str, int]:
    """Count the rotary events of a chrome trace (.json or .json.gz) by name; kernels and host calls count separately.

    Raises BadInput when the file is not a chrome trace.
    """
    events = _events(Path(file))
    counts: Counter[str] = Counter()
    for event in events:
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and operators_of(name):
            counts[name] += 1
    if unfused := _unfused_rotations(events):
        counts[UNFUSED] = unfused
    return dict(counts.most_common())


def operators_of(name: str) -> tuple[str, ...]:
    """Return the operators that an event of this name proves to have run."""
    if name == UNFUSED:
        return ("torch",)
    return next((tuple(operators.split()) for pattern, operators in EVIDENCE.items() if re.search(pattern, name)), ())


def compare(ran: dict[str, int], paths: Iterable[RotaryPath], where: str) -> list[Finding]:
    """Return a finding for each predicted path that the trace contradicts; none where they agree.

    ran: the counts that `read_trace` returns; where: the name of the trace, for the findings.
    """
    forward = {name for name in ran if not BACKWARD.search(name)}
    if not forward:
        nothing = Finding(
            code="trace-without-rotary",
            severity="warning",
            where=where,
            found="no rotary operator among the events",
            expected="a rotary operator, or aten::neg, aten::cat and aten::mul in a row",
            why="The trace may cover no forward step, it may hold no host events (record with activities CPU and "
            "device), or the rotation is fused into another kernel.",
            fix="profile one whole forward step with CPU and device activities",
        )
        return [nothing]
    operators = {operator for name in forward for operator in operators_of(name)}
    if "inductor" in operators:
        operators.add("torch")  # Inductor compiles the plain torch code
    paths = list(paths)
    missing = [path for path in paths if path.operator not in operators]
    # A trace of verl shows the actor or the rollout, so one path that agrees is enough.
    return [
        Finding(
            code="trace-disagrees",
            severity="warning",
            where=where,
            found=", ".join(f"{name} x{count}" for name, count in ran.items()),
            expected=f"{path.operator} ({path.runs_in}, {path.branch})",
            why=f"By its settings this launch runs {path.operator}: {path.because}. The trace shows another path, so a "
            "setting does not reach the model, or another library replaced the call.",
            fix=("print the settings where the model is built", "call whorl.doctor.guard(model) after it"),
        )
        for path in missing
        if len(missing) == len(paths)
    ]


def _events(file: Path) -> list[dict[str, Any]]:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        data = json.loads(raw)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{file}: cannot be read ({reason}). Give a trace written by prof.export_chrome_trace"
        ) from error
    except ValueError as error:
        raise BadInput(f"{file}: is not JSON ({error}). Give a trace written by prof.export_chrome_trace") from error
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise BadInput(f"{file}: has no traceEvents. Give a trace written by prof.export_chrome_trace")
    return [event for event in events if isinstance(event, dict)]


def _unfused_rotations(events: list[dict[str, Any]]) -> int:
    """Count how often a thread calls neg, cat and mul in a row: rotate_half and its product with sin."""
    threads: dict[Any, list[tuple[float, str]]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("name") in ROTATE_HALF:
            calls = threads.setdefault((event.get("pid"), event.get("tid")), [])
            calls.append((float(event.get("ts", 0)), event["name"]))
    rows = [[name for _, name in sorted(calls)] for calls in threads.values()]
    return sum(tuple(names[at : at + 3]) == ROTATE_HALF for names in rows for at in range(len(names)))
