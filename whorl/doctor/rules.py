"""The list of checks. A check is one function with a `@rule`: it yields a `Problem` for each thing it finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from whorl.doctor.launch import Launch
from whorl.doctor.report import Finding, RotaryPath, Severity, Steps, steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a check found; the rule adds its code, and its severity where the problem names none.

    Its place is `where`, or where the launch sets `setting`; a problem without either is one of the path. Without `fix`
    the thing to do is what is `expected`.
    """

    where: str | None = None
    setting: str | None = None
    found: str
    expected: str
    why: str
    fix: Steps | None = None
    severity: Severity | None = None

    def place(self, launch: Launch, path: RotaryPath) -> str:
        if self.where is not None:
            return self.where
        return f"{path.runs_in}, {path.branch}" if self.setting is None else launch.where(self.setting)


CheckFunction = Callable[[Launch, RotaryPath], Iterator[Problem]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    code: str
    severity: Severity
    function: CheckFunction

    def findings(self, launch: Launch, path: RotaryPath) -> Iterator[Finding]:
        for problem in self.function(launch, path):
            yield Finding(
                code=self.code,
                severity=problem.severity or self.severity,
                where=problem.place(launch, path),
                found=problem.found,
                expected=problem.expected,
                why=problem.why,
                fix=steps(problem.expected if problem.fix is None else problem.fix),
            )


RULES: Final[list[Rule]] = []


def rule(code: str, severity: Severity = "error") -> Callable[[CheckFunction], CheckFunction]:
    """Add a check to RULES under `code`. Several functions may share a code."""

    def add(function: CheckFunction) -> CheckFunction:
        RULES.append(Rule(code=code, severity=severity, function=function))
        return function

    return add
