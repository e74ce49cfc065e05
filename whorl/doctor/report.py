"""What the doctor says: the rotary path that will run, and findings. Plain data, ready for JSON."""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
Steps = str | tuple[str, ...]  # what to do: one thing, or several


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that goes wrong, or is worth knowing (severity "note")."""

    code: str
    severity: Severity
    where: str
    found: str
    expected: str
    why: str
    fix: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"fix": list(self.fix)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryPath:
    """One place where q and k are rotated. `operator` is the name that contracts, traces and checks share."""

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
        row = {name: getattr(self, name) for name in self.__slots__}
        return row | {"passed_over": [{"operator": name, "reason": reason} for name, reason in self.passed_over]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The answer to one `check`: paths first, then findings, errors before warnings before notes."""

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

    @property
    def failed(self) -> bool:
        """Errors and warnings fail; notes do not."""
        return any(finding.severity != "note" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON: `schema` rises when a key changes its meaning or goes."""
        return {
            "schema": 1,
            "framework": {"name": self.framework, "because": self.framework_because},
            "device": {"name": self.device, "because": self.device_because},
            "train": self.train,
            "model": self.model,
            "read": list(self.read),
            "paths": [path.to_dict() for path in self.paths],
            "findings": [finding.to_dict() for finding in self.findings],
            "ran": self.ran,
            "exit_code": self.exit_code,
        }


def steps(fix: Steps) -> tuple[str, ...]:
    return (fix,) if isinstance(fix, str) else fix


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors, warnings, notes; within each the order in which the checks are listed."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))
