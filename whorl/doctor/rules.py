"""The list of checks. A check is a function with the decorator `@rule` that yields a `Problem` for each fault."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from whorl.doctor.launch import Launch
from whorl.doctor.report import Finding, RotaryPath, Severity, Steps, as_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One fault that a check reports; the rule adds its code, and its severity where the problem has none.

    found and expected: the actual and the right value; why: what goes wrong. The fault's location is `where`, or the
    place that sets `setting` (a settings key), or, without either, the rotary path. Without `fix` the only step of the
    fix is the text of `expected`.
    """

    where: str | None = None
    setting: str | None = None
    found: str
    expected: str
    why: str
    fix: Steps | None = None
    severity: Severity | None = None

    def location(self, launch: Launch, path: RotaryPath) -> str:
        if self.where is not None:
            return self.where
        return f"{path.runs_in}, {path.branch}" if self.setting is None else launch.where(self.setting)


CheckFunction = Callable[[Launch, RotaryPath], Iterator[Problem]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A check function with the code and the usual severity of its findings."""

    code: str
    severity: Severity
    function: CheckFunction

    def findings(self, launch: Launch, path: RotaryPath) -> Iterator[Finding]:
        for problem in self.function(launch, path):
            yield Finding(
                code=self.code,
                severity=problem.severity or self.severity,
                where=problem.location(launch, path),
                found=problem.found,
                expected=problem.expected,
                why=problem.why,
                fix=as_steps(problem.expected if problem.fix is None else problem.fix),
            )


RULES: Final[list[Rule]] = []


def rule(code: str, severity: Severity = "error") -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that adds a check to RULES under `code`. Several functions may share a code."""

    def add(function: CheckFunction) -> CheckFunction:
        RULES.append(Rule(code=code, severity=severity, function=function))
        return function

    return add
