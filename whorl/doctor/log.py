"""Find the failures that the doctor knows in a log and turn each into a finding."""

import re
from collections.abc import Iterator
from dataclasses import replace

from whorl.doctor.launch import Launch
from whorl.doctor.report import Finding, as_steps
from whorl.doctor.symptom import Place, Symptom
from whorl.doctor.symptoms import SYMPTOMS
from whorl.doctor.tracebacks import Failure, Line, read_failures


def explain(text: str, where: str, launch: Launch | None = None) -> list[Finding]:
    """Return one finding per failure in a log, or a note that no known failure is in it.

    launch: that of the files beside the log, whose sizes some fixes are computed from.
    """
    failures, lines = read_failures(text)
    findings: list[Finding] = []
    explained: set[tuple[str, int]] = set()
    for symptom in SYMPTOMS:
        for line, message, place in _matches(symptom, failures, lines):
            if (symptom.code, line) not in explained:
                explained.add((symptom.code, line))
                symptom_here = symptom.at(replace(place, log=text, launch=launch))
                findings.append(_finding(symptom_here, f"{where}:{line}", message))
                break
    return findings or [_unknown(failures, lines, where)]


def _matches(symptom: Symptom, failures: list[Failure], lines: list[Line]) -> Iterator[tuple[int, str, Place]]:
    """Yield the line number and the text of every place where the symptom appears."""
    for failure in failures:
        match = re.search(symptom.text, failure.text)
        if match is None or not _is_raised_in(symptom, failure):
            continue
        offset = failure.text.count("\n", 0, match.start())
        message = _describe_match(failure.text.split("\n")[offset], symptom, failure)
        yield failure.lines[offset], message, Place(text=failure.text[match.start() :], failure=failure)
    for line in lines if symptom.is_printed else ():
        if _is_printed(symptom, line):
            yield line.number, line.text.strip()[:300], Place(text=line.text)


def _is_raised_in(symptom: Symptom, failure: Failure) -> bool:
    if symptom.raised_in is None:
        return True
    return failure.origin is not None and re.search(symptom.raised_in, str(failure.origin)) is not None


def _is_printed(symptom: Symptom, line: Line) -> bool:
    return not line.is_code and re.search(symptom.text, line.text) is not None


def _describe_match(text: str, symptom: Symptom, failure: Failure) -> str:
    frame = failure.origin
    if symptom.raised_in is None or frame is None:
        return text.strip()[:300]
    return f"{text.strip()[:300]} (in {frame.function}, {frame.file}:{frame.line})"


def _finding(symptom: Symptom, where: str, message: str) -> Finding:
    return Finding(
        code=symptom.code,
        severity=symptom.severity,
        where=where,
        found=message,
        expected=symptom.expected,
        why=symptom.cause,
        fix=as_steps(symptom.fix),
    )


def _unknown(failures: list[Failure], lines: list[Line], where: str) -> Finding:
    last = next((line.text.strip() for line in reversed(lines) if line.text.strip()), "")
    message = failures[-1].text.split("\n")[0] if failures else last
    return Finding(
        code="log-not-recognised",
        severity="note",
        where=where,
        found=message[:300] or "an empty log",
        expected="one of the failures listed in docs/doctor.md",
        why="No known failure of rotation or of memory is in this text; the cause may lie elsewhere.",
        fix=("run `whorl doctor` on the configuration itself",),
    )
