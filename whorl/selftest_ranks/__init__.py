"""`whorl selftest --ranks N`: what several processes do together, on this machine's own cards and collectives.

Each check is a job of its own, started by torchrun: one that hangs or dies is ended, named, and does not take the
others with it. `checks` says what is compared with what; `worker` is one process of a job.
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
    """One check. detail: what was compared, why it was left out, or the first error of the lowest rank that has one."""

    name: str
    status: Status
    detail: str
    seconds: float


@dataclass(kw_only=True, slots=True)
class Report:
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
    """Every check, or those named, on so many ranks of `device`; `tell` hears each as it ends."""
    cards = devices.device_count(device)
    if ranks < 2:
        raise ValueError(f"selftest: {ranks} ranks were asked for; several processes are at least 2")
    if cards is not None and cards < ranks:
        raise ValueError(f"selftest: {ranks} ranks were asked for, and this machine has {cards} of {device}")
    if unknown := sorted(set(names) - CHECKS.keys()):
        raise ValueError(f"selftest: no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
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
        is_over = _run_job(command, limit)
        status, detail = _judge(Path(folder), processes, is_over, limit)
    return Outcome(name=name, status=status, detail=detail, seconds=round(time.monotonic() - start, 1))


def _run_job(command: list[str], limit: float) -> bool:
    """Whether the job ended by itself; one that does not is ended with all its processes."""
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


def _judge(folder: Path, processes: int, is_over: bool, limit: float) -> tuple[Status, str]:
    """From what the ranks wrote down."""
    said = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    for answer in said:
        if answer["status"] == "failed":
            return "failed", f"rank {answer['rank']}: {answer['detail']}"
    if not is_over:
        ended = [answer["rank"] for answer in said]
        return "hung", f"no end after {limit:g} s; ranks that came through: {ended or 'none'} of {processes}"
    if len(said) < processes:
        missing = sorted(set(range(processes)) - {answer["rank"] for answer in said})
        return "failed", f"ranks {missing} died without a word"
    return said[0]["status"], said[0]["detail"]


def render(report: Report) -> str:
    """The report as text to paste into a bug report."""
    width = 2 + max(len(outcome.name) for outcome in report.outcomes)
    lines = [
        f"whorl selftest --ranks {report.ranks}",
        f"device       {report.device}: {report.device_name}",
        f"collectives  {report.backend}",
        "versions     " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
        "",
    ]
    lines += [f"{o.name:<{width}}{o.status:<9}{o.seconds:>6.1f} s  {o.detail}" for o in report.outcomes]
    wrong = [outcome.name for outcome in report.outcomes if outcome.status in ("failed", "hung")]
    passed = sum(outcome.status == "passed" for outcome in report.outcomes)
    lines += ["", f"{passed} of {len(report.outcomes)} checks passed" + (f"; not: {', '.join(wrong)}" if wrong else "")]
    return "\n".join(lines)
