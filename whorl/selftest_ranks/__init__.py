"""Run `whorl selftest --ranks N`: check what several processes compute together on this machine's cards.

Each check is a separate torchrun job. A job that hangs or dies is ended and reported, and the other checks still run.
`checks` defines what is compared; `worker` is one process of a job.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from whorl import device as devices

from .checks import CHECKS

Status = Literal["passed", "failed", "skipped", "hung"]
_LIMIT = 300.0  # seconds for one check: the first run of a kernel compiles it


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one check.

    detail: what was compared, why the check was skipped, or the first line of the error of the lowest failed rank.
    """

    name: str
    status: Status
    detail: str
    seconds: float


@dataclass(kw_only=True, slots=True)
class Report:
    """The machine, its versions, and the outcome of every check."""

    device: str
    device_name: str
    ranks: int
    backend: str
    versions: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not any(outcome.status in ("failed", "hung") for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def run(
    ranks: int,
    device: str,
    *,
    names: Sequence[str] = (),
    limit: float = _LIMIT,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Run every check, or those in `names`, on `ranks` ranks of `device`, and return the report.

    limit: seconds for one check. tell: called with each outcome as it is known. Raises ValueError when there are fewer
    than 2 ranks, fewer cards than ranks, or an unknown name.

        print(render(run(2, "cpu", names=["collectives"])))
    """
    cards = devices.device_count(device)
    if ranks < 2:
        raise ValueError(f"selftest: ranks is {ranks}, expected at least 2")
    if cards is not None and cards < ranks:
        raise ValueError(
            f"selftest: ranks is {ranks}, expected at most {cards}: this machine has {cards} {device} devices"
        )
    if unknown := sorted(set(names) - CHECKS.keys()):
        raise ValueError(f"selftest: unknown checks {', '.join(unknown)}, expected some of {', '.join(CHECKS)}")
    report = Report(
        device=device,
        device_name=devices.device_name(device),
        ranks=ranks,
        backend=devices.collective_backend(device),
        versions=devices.versions(),
    )
    for name in names or CHECKS:
        outcome = _run_check(name, ranks, device, limit)
        report.outcomes.append(outcome)
        tell(outcome)
    return report


def _run_check(name: str, ranks: int, device: str, limit: float) -> Outcome:
    start = time.monotonic()
    processes = 1 if CHECKS[name].starts_ranks else ranks
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "whorl.selftest_ranks.worker", name, device, str(ranks), folder]
        is_complete = _run_job(command, limit)
        status, detail = _judge(Path(folder), processes, is_complete, limit)
    return Outcome(name=name, status=status, detail=detail, seconds=round(time.monotonic() - start, 1))


def _run_job(command: list[str], limit: float) -> bool:
    """Run a command and return whether it ended within the limit; one that did not is killed with all its processes."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        job.wait(limit)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _judge(folder: Path, processes: int, is_complete: bool, limit: float) -> tuple[Status, str]:
    """Return the status and the detail of a check from the files that its ranks wrote."""
    answers = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    for answer in answers:
        if answer["status"] == "failed":
            return "failed", f"rank {answer['rank']}: {answer['detail']}"
    if not is_complete:
        finished = [answer["rank"] for answer in answers]
        return "hung", f"not finished after {limit:g} s; ranks that finished: {finished or 'none'} of {processes}"
    if len(answers) < processes:
        missing = sorted(set(range(processes)) - {answer["rank"] for answer in answers})
        return "failed", f"ranks {missing} ended without a result"
    return answers[0]["status"], answers[0]["detail"]


def render(report: Report) -> str:
    """Return the report as text that can be pasted into a bug report."""
    width = 2 + max(len(outcome.name) for outcome in report.outcomes)
    lines = [
        f"whorl selftest --ranks {report.ranks}",
        f"device       {report.device}: {report.device_name}",
        f"collectives  {report.backend}",
        "versions     " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "",
    ]
    lines += [f"{o.name:<{width}}{o.status:<9}{o.seconds:>6.1f} s  {o.detail}" for o in report.outcomes]
    failed = [outcome.name for outcome in report.outcomes if outcome.status in ("failed", "hung")]
    passed = sum(outcome.status == "passed" for outcome in report.outcomes)
    lines += [
        "",
        f"{passed} of {len(report.outcomes)} checks passed" + (f"; failed: {', '.join(failed)}" if failed else ""),
    ]
    return "\n".join(lines)
