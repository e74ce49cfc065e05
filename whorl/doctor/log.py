"""Find the failures that the doctor knows in a log and turn each into a finding."""

import re
from collections.abc import Iterator
from dataclasses import replace

from whorl.doctor.launch import Launch
from whorl.doctor.report import Finding
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
                here = symptom.at(replace(place, log=text, launch=launch))
                finding = Finding(found=message, expected=here.expected, why=here.cause, fix=here.fix)
                findings.append(replace(finding, code=here.code, severity=here.severity, where=f"{where}:{line}"))
                break
    if findings:
        return findings
    last = next((line.text.strip() for line in reversed(lines) if line.text.strip()), "an empty log")
    unknown = Finding(
        code="log-not-recognised",
        severity="note",
        where=where,
        found=(failures[-1].text.split("\n")[0] if failures else last)[:300],
        expected="one of the failures listed in docs/doctor.md",
        why="No known failure of rotation or of memory is in this text; the cause may lie elsewhere.",
        fix="run `whorl doctor` on the configuration itself",
    )
    return [unknown]


def _matches(symptom: Symptom, failures: list[Failure], lines: list[Line]) -> Iterator[tuple[int, str, Place]]:
    """Yield the line number and the text of every place where the symptom appears."""
    for failure in failures:
        match, frame = re.search(symptom.text, failure.text), failure.origin
        raised_in = symptom.raised_in
        if match is None or (raised_in is not None and (frame is None or not re.search(raised_in, str(frame)))):
            continue
        offset = failure.text.count("\n", 0, match.start())
        message = failure.text.split("\n")[offset].strip()[:300]
        if raised_in is not None and frame is not None:
            message += f" (in {frame.function}, {frame.file}:{frame.line})"
        yield failure.lines[offset], message, Place(text=failure.text[match.start() :], failure=failure)
    for line in lines if symptom.is_printed else ():
        if not line.is_code and re.search(symptom.text, line.text):
            yield line.number, line.text.strip()[:300], Place(text=line.text)
