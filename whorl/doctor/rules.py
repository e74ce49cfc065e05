"""The list of checks. A check is a function with the decorator `@rule` that yields a `Finding` for each fault."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from whorl.doctor.launch import Launch
from whorl.doctor.report import Finding, RotaryPath, Severity

CheckFunction = Callable[[Launch, RotaryPath], Iterator[Finding]]
# The key of the setting at which the fault lies, or a function that returns the place; None: the rotary path.
At = str | Callable[[Launch], str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A check function with the code, the usual severity and the usual place of its findings."""

    code: str
    severity: Severity
    at: At
    function: CheckFunction

    def findings(self, launch: Launch, path: RotaryPath) -> Iterator[Finding]:
        """Yield what the check finds, with the code, and with severity and place where the check names none."""
        for finding in self.function(launch, path):
            severity = self.severity if finding.severity == "error" else finding.severity
            yield replace(finding, code=self.code, severity=severity, where=finding.where or self.place(launch, path))

    def place(self, launch: Launch, path: RotaryPath) -> str:
        if self.at is None:
            return f"{path.runs_in}, {path.branch}"
        return launch.where(self.at) if isinstance(self.at, str) else self.at(launch)


RULES: Final[list[Rule]] = []


def rule(code: str, severity: Severity = "error", at: At = None) -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that adds a check to RULES under `code`. Several functions may share a code."""

    def add(function: CheckFunction) -> CheckFunction:
        RULES.append(Rule(code=code, severity=severity, at=at, function=function))
        return function

    return add


def model_file(launch: Launch) -> str:
    return launch.inputs.model_where


def rope_place(launch: Launch) -> str:
    return launch.rope_where
