"""The doctor's report: the rotary paths that will run, and the findings. Plain data that converts to JSON."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
Steps = str | tuple[str, ...]  # one step of a fix, or several
# What a framework decides of a `RotaryPath`: branch, operator, because, then pairs of passed_over.
Prediction = tuple[str, str, str, *tuple[tuple[str, str], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem of a launch, or a fact worth knowing (severity "note").

    code: the name in docs/doctor.md; where: file:line or the path; found and expected: the actual and the right value;
    why: what goes wrong; fix: the steps that correct it, or alternatives, which begin with "or": the text of `expected`
    unless others are named. A check leaves out what its rule adds: code, where, and the severity.
    """

    code: str = ""
    severity: Severity = "error"
    where: str = ""
    found: str
    expected: str
    why: str
    fix: Steps = ()

    def __post_init__(self) -> None:
        steps = self.fix or self.expected
        object.__setattr__(self, "fix", (steps,) if isinstance(steps, str) else steps)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"fix": list(self.fix)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryPath:
    """One place where q and k are rotated, and the operator that does it.

    role: whether the launch trains; runs_in: the framework, or the part of a verl launch; branch: the class or code
    path of that framework; operator: a key of `paths.OPERATORS`, the name that contracts, traces and checks use; style:
    which channels form a pair, "half" or "pairs"; layout: that of the MRoPE sections, None for plain RoPE; because: why
    this operator runs; passed_over: the operators that do not run, each with the reason.
    """

    role: Literal["train", "infer"]
    runs_in: str
    branch: str
    operator: str
    backend: str
    call: str
    style: str
    layout: str | None
    device: str
    because: str
    passed_over: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"passed_over": [{"operator": name, "reason": reason} for name, reason in self.passed_over]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Aspect:
    """One thing that a trainer and its rollout both compute, in words, and whether they agree; None: not known."""

    name: str
    trainer: str
    rollout: str
    agrees: bool | None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of one `check`: rotary paths, then findings (errors, warnings, notes).

    `read` are the names of the files that were read; `ran` counts the rotary events of a profiler trace by name;
    `sides`: what a trainer and its rollout compute, where the two were compared.
    """

    framework: str
    framework_because: str
    device: str
    device_because: str
    train: bool
    model: str
    read: tuple[str, ...] = ()
    paths: tuple[RotaryPath, ...] = ()
    findings: tuple[Finding, ...] = ()
    ran: dict[str, int] = field(default_factory=dict)
    sides: tuple[Aspect, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether there is an error or a warning; notes do not count."""
        return any(finding.severity != "note" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; `schema` rises when a key changes its meaning or is removed."""
        sides = {"sides": [side.to_dict() for side in self.sides]} if self.sides else {}
        return {
            "schema": 1,
            "framework": {"name": self.framework, "because": self.framework_because},
            "device": {"name": self.device, "because": self.device_because},
            "train": self.train,
            "model": self.model,
            "read": list(self.read),
            "paths": [path.to_dict() for path in self.paths],
            **sides,
            "findings": [finding.to_dict() for finding in self.findings],
            "ran": self.ran,
            "exit_code": self.exit_code,
        }


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings into errors, warnings and notes; within each the order of the checks is kept."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
