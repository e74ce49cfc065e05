"""Logs: the exceptions in them, and the finding each stands for."""

import re
from collections.abc import Iterator

from whorl.doctor.report import Finding, steps
from whorl.doctor.symptoms import SYMPTOMS, Symptom
from whorl.doctor.tracebacks import Failure, Line, read_failures


def explain(text: str, where: str) -> list[Finding]:
    """What a log says about the rotary path: one finding per cause, or a note that none is known."""
    failures, lines = read_failures(text)
    findings: list[Finding] = []
    explained: set[tuple[str, int]] = set()
    for symptom in SYMPTOMS:
        for line, found in _matches(symptom, failures, lines):
            if (symptom.code, line) not in explained:
                explained.add((symptom.code, line))
                findings.append(_finding(symptom, f"{where}:{line}", found))
                break
    return findings or [_unknown(failures, lines, where)]


def _matches(symptom: Symptom, failures: list[Failure], lines: list[Line]) -> Iterator[tuple[int, str]]:
    """Where the symptom stands and how it reads there."""
    for failure in failures:
        match = re.search(symptom.text, failure.text)
        if match is None or not _is_raised_in(symptom, failure):
            continue
        offset = failure.text.count("\n", 0, match.start())
        yield failure.lines[offset], _shown(failure.text.split("\n")[offset], symptom, failure)
    if symptom.is_printed:
        yield from ((line.number, line.text.strip()[:300]) for line in lines if _is_printed(symptom, line))


def _is_raised_in(symptom: Symptom, failure: Failure) -> bool:
    if symptom.raised_in is None:
        return True
    return failure.origin is not None and re.search(symptom.raised_in, str(failure.origin)) is not None


def _is_printed(symptom: Symptom, line: Line) -> bool:
    return not line.is_code and re.search(symptom.text, line.text) is not None


def _shown(text: str, symptom: Symptom, failure: Failure) -> str:
    frame = failure.origin
    if symptom.raised_in is None or frame is None:
        return text.strip()[:300]
    return f"{text.strip()[:300]} (in {frame.function}, {frame.file}:{frame.line})"


def _finding(symptom: Symptom, where: str, found: str) -> Finding:
    return Finding(
        code=symptom.code,
        severity=symptom.severity,
        where=where,
        found=found,
        expected=symptom.expected,
        why=symptom.cause,
        fix=steps(symptom.fix),
    )


def _unknown(failures: list[Failure], lines: list[Line], where: str) -> Finding:
    last = next((line.text.strip() for line in reversed(lines) if line.text.strip()), "")
    found = failures[-1].text.split("\n")[0] if failures else last
    return Finding(
        code="log-not-recognised",
        severity="note",
        where=where,
        found=found[:300] or "an empty log",
        expected="one of the rotary failures listed in docs/doctor.md",
        why="No known rotary failure stands in this text; the cause may lie elsewhere.",
        fix=("run `whorl doctor` on the configuration itself",),
    )
