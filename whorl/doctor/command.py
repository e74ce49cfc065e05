"""`whorl doctor` runs the check, prints the report and returns the exit code (0 clean, 1 findings, 2 bad input)."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from whorl.doctor.checkup import check
from whorl.doctor.compare import check_pair
from whorl.doctor.inputs import parse_overrides
from whorl.doctor.report import SEVERITIES, Aspect, Finding, Report, RotaryPath
from whorl.doctor.settings import BadInput

Line = tuple[str, str, str]  # rich style, label, text; a heading has no label
COLOURS: Final = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
EMPTY: Final = ("", "", "")
BAD_INPUT: Final = 2


def run(
    path: str | Path | None,
    framework: str | None = None,
    settings: Iterable[str] | Mapping[str, Any] | None = None,
    train: bool = False,
    device: str | None = None,
    log: str | Path | None = None,
    trace: str | Path | None = None,
    as_json: bool = False,
    trainer: str | Path | None = None,
    rollout: str | Path | None = None,
) -> int:
    """Run `whorl doctor` and return its exit code; `settings` are the key=value strings of --set, or a mapping.

    With `trainer`, both sides of a training are compared, and `path` is the model of both.
    """
    try:
        overrides = settings if isinstance(settings, Mapping) else parse_overrides(settings or ())
        if trainer is not None or rollout is not None:
            if trainer is None or framework or log or trace:
                raise BadInput("--rollout needs --trainer, and neither goes with --framework, --log or --trace")
            report = check_pair(trainer, rollout, model=path, settings=overrides, device=device)
        else:
            report = check(
                path, framework=framework, settings=overrides, train=train, device=device, log=log, trace=trace
            )
    except BadInput as error:
        print(f"whorl doctor: {error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"schema": 1, "error": str(error), "exit_code": BAD_INPUT}, indent=2))
        return BAD_INPUT
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        both = " and ".join(str(side) for side in (trainer, rollout) if side is not None)
        _print(render(report, both or str(path or log or trace)))
    return report.exit_code


def render(report: Report, title: str) -> list[Line]:
    """Return the report as styled lines: the inputs, the rotary paths, then the findings."""
    lines: list[Line] = [_heading(f"whorl doctor: {title}")]
    if report.paths:
        lines += [
            _row("framework", f"{report.framework} ({report.framework_because})"),
            _row("device", f"{report.device} ({report.device_because})"),
            _row("model", report.model),
        ]
    if report.read:
        lines.append(_row("read", ", ".join(report.read)))
    for path in report.paths:
        lines += _render_path(path)
    lines += _render_sides(report.sides)
    if report.ran:
        lines += [EMPTY, _heading("Rotary operators in the trace")]
        lines += [_row(f"{count} x", name) for name, count in report.ran.items()]
    lines += [EMPTY, _summary(report)]
    for finding in report.findings:
        lines += _render_finding(finding)
    return lines


def _render_path(path: RotaryPath) -> list[Line]:
    rows = [(name, getattr(path, name)) for name in ("branch", "operator", "call")]
    rows.append(("style", path.style + ("" if path.layout is None else f", {path.layout} sections")))
    rows += [("backend", f"{path.backend} on {path.device}"), ("because", path.because)]
    rows += [("not", f"{name}: {reason}") for name, reason in path.passed_over]
    return [EMPTY, _heading(f"Rotary path ({path.role}, {path.runs_in})"), *(_row(*row) for row in rows)]


def _render_sides(sides: Iterable[Aspect]) -> list[Line]:
    """Return a heading and two lines per aspect: = where both sides agree, ! where they differ, ? where unknown."""
    lines: list[Line] = []
    for aspect in sides:
        sign = "?" if aspect.agrees is None else "=" if aspect.agrees else "!"
        lines += [_heading(f"{sign} {aspect.name}"), _row("trainer", aspect.trainer), _row("rollout", aspect.rollout)]
    return [EMPTY, _heading("Both sides (= agree, ! differ, ? not known)"), *lines] if lines else []


def _render_finding(finding: Finding) -> list[Line]:
    lines: list[Line] = [EMPTY, (COLOURS[finding.severity], "", f"{finding.severity}: {finding.code}")]
    lines += [_row(name, getattr(finding, name)) for name in ("where", "found", "expected", "why")]
    return lines + [_row("fix" if index == 0 else " ", step) for index, step in enumerate(finding.fix)]


def _row(name: str, text: str) -> Line:
    return "", name, text


def _heading(text: str) -> Line:
    return "bold", "", text


def _summary(report: Report) -> Line:
    if not report.findings:
        return "bold green", "", "No findings."
    counts = [(severity, sum(f.severity == severity for f in report.findings)) for severity in SEVERITIES]
    words = [f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts if count]
    return _heading(", ".join(words))


def _print(lines: list[Line]) -> None:
    if not sys.stdout.isatty():
        print("\n".join(f"  {label:<10} {text}" if label else text for _, label, text in lines))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for style, label, text in lines:
        if not label:
            console.print(Text(text, style=style))
            continue
        # A grid keeps wrapped text in its column.
        row = Table.grid(padding=(0, 1))
        row.add_column(width=12)
        row.add_column()
        row.add_row(Text(f"  {label}", style="dim"), Text(text, style=style))
        console.print(row)
