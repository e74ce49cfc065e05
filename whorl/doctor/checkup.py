"""`check` reads inputs, builds a Launch, predicts its rotary paths and collects the findings of all checks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import whorl.doctor.checks  # noqa: F401  (fills RULES)
from whorl.doctor.build_launch import build_launch
from whorl.doctor.inputs import read_inputs, read_text
from whorl.doctor.jobs import parts
from whorl.doctor.launch import Launch
from whorl.doctor.log import explain
from whorl.doctor.paths import predict, predict_tower
from whorl.doctor.report import Finding, Report, RotaryPath, by_severity
from whorl.doctor.rules import RULES
from whorl.doctor.settings import BadInput
from whorl.doctor.trace import compare, read_trace


def check(
    path: str | Path | None,
    *,
    framework: str | None = None,
    settings: Mapping[str, Any] | None = None,
    train: bool = False,
    device: str | None = None,
    log: str | Path | None = None,
    trace: str | Path | None = None,
) -> Report:
    """Check the rotary configuration of a launch and return the Report.

    path: a file or folder of configuration, or None when only `log` or `trace` is given; framework: one of
    whorl.doctor.launch.FRAMEWORKS, inferred when None; settings: values that override those of the files; train: the
    launch trains; device: "cuda" or "npu", inferred when None; log: a file with a traceback to explain; trace: a chrome
    trace of torch's profiler to compare with the predicted path. Raises BadInput (a ValueError) when an input cannot be
    read or names an unknown framework or device.

    Example: assert not check("runs/qwen3_vl", settings={"position_embedding_type": "mrope"}).failed
    """
    if path is None and log is None and trace is None:
        raise BadInput("nothing to check: give a file or folder, a log or a trace")
    inputs = read_inputs(path, settings)
    launch = build_launch(inputs, framework=framework, train=train, device=device)
    paths, findings = _check_parts(launch) if inputs.model or inputs.settings else ((), [])
    if log is not None:
        inputs.logs.append((Path(log).name, read_text(log)))
    for where, text in inputs.logs:
        findings += explain(text, where, launch)
    ran = read_trace(trace) if trace is not None else {}
    if trace is not None:
        findings += compare(ran, paths, Path(trace).name)
    return Report(
        framework=launch.framework,
        framework_because=launch.framework_because,
        device=launch.device,
        device_because=launch.device_because,
        train=launch.train,
        model=describe_model(launch),
        read=tuple(inputs.read),
        paths=paths,
        findings=by_severity(findings),
        ran=ran,
    )


def _check_parts(launch: Launch) -> tuple[tuple[RotaryPath, ...], list[Finding]]:
    paths, findings = [], []
    for part in parts(launch):
        path, alone = check_part(part)
        paths.append(path)
        findings += [finding for finding in alone if finding not in findings]
    if (tower := predict_tower(launch)) is not None:
        paths.append(tower)
    return tuple(paths), findings


def check_part(part: Launch) -> tuple[RotaryPath, list[Finding]]:
    """Return the rotary path of a launch that is not a job, and the findings of all checks."""
    path = predict(part)
    return path, list(dict.fromkeys(finding for rule in RULES for finding in rule.findings(part, path)))


def describe_model(launch: Launch) -> str:
    """Describe the model's rotary embedding in one line."""
    if launch.text is None:
        return "no config.json: only the launch settings are checked"
    name = str(launch.text.get("model_type") or (launch.text.get("architectures") or ["a model"])[0])
    rope = launch.rope
    if rope is None:
        return f"{name}: its rotary configuration cannot be read"
    axes = f", {rope.layout} sections {list(rope.sections)}" if rope.sections else ""
    scaling = "" if rope.rope_type == "default" else f", {rope.rope_type} factor {rope.factor:g}"
    rotated = f"{rope.rotary_dim} of {rope.head_dim} channels in {rope.style} style"
    return f"{name}: {rotated}{axes}, base {rope.base:g}{scaling}"
