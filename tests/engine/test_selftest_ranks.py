"""`whorl selftest --ranks`: checks that pass on gloo ranks, that see planted faults, and jobs that fail or hang."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import shared
from typer.testing import CliRunner

from whorl import collectives, selftest_ranks
from whorl.cli import app
from whorl.selftest_ranks import Outcome, Report, checks

TOGETHER = [name for name, check in checks.CHECKS.items() if not check.starts_ranks and not name.startswith("train")]


def run_check(name: str) -> str:
    try:
        return checks.CHECKS[name].run("cpu", 2)
    except checks.Skipped as reason:
        return f"skipped: {reason}"


def with_fault(fault: str, name: str) -> str:
    """What the check says of ranks whose collectives are wrong."""
    plant: Any = {
        "order": ("ordered_all_reduce", lambda x, group: ORDERED(x.flip(0), group).flip(0) * (1 + 2e-7)),
        "gather": ("all_gather_quantized", lambda x, tokens, group, format: QUANTIZED(x * 1.1, tokens, group, format)),
    }[fault]
    kept = getattr(collectives, plant[0])
    setattr(collectives, plant[0], plant[1])
    try:
        return run_check(name)
    except AssertionError as error:
        return f"failed: {error}"
    finally:
        setattr(collectives, plant[0], kept)


ORDERED, QUANTIZED = collectives.ordered_all_reduce, collectives.all_gather_quantized


@pytest.mark.parametrize("name", TOGETHER)
def test_on_gloo_ranks(name: str) -> None:
    said = shared(2).run(run_check, name)
    assert said[0] == said[1]
    assert said[0].startswith("skipped: symmetric memory needs CUDA") == (name == "symmetric memory")


@pytest.mark.parametrize(("fault", "name"), [("order", "ordered sums"), ("gather", "quantised gather")])
def test_planted_faults_are_seen(fault: str, name: str) -> None:
    assert all(said.startswith("failed: ") for said in shared(2).run(with_fault, fault, name))


def test_close_and_same_see_a_difference() -> None:
    x = torch.ones(4)
    with pytest.raises(AssertionError, match="here: 1 of 4 elements"):
        checks.same(torch.tensor([1.0, 1.0, 1.0, 2.0]), x, "here")
    with pytest.raises(AssertionError, match=r"here: off by 1\.0e-01"):
        checks.close(x * 1.1, x, "here", 1e-3)
    with pytest.raises(AssertionError, match="off by nan"):
        checks.close(x * float("nan"), x, "here", 1e-3)


@pytest.mark.slow
def test_the_whole_command() -> None:
    """Every check, each a job of two processes."""
    done = CliRunner().invoke(app, ["selftest", "--ranks", "2", "--device", "cpu", "--json"])
    report = json.loads(done.stdout)
    wrong = {o["name"]: o["detail"] for o in report["outcomes"] if o["status"] in ("failed", "hung")}
    assert wrong == {}
    assert done.exit_code == 0
    assert {o["name"] for o in report["outcomes"]} == set(checks.CHECKS)
    assert sum(o["status"] == "passed" for o in report["outcomes"]) >= len(checks.CHECKS) - 1


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert not selftest_ranks._run_job(asleep, limit=0.5)
    say(tmp_path, 1, "passed")
    assert selftest_ranks._judge(tmp_path, 2, False, 0.5) == (
        "hung",
        "not finished after 0.5 s; ranks that finished: [1] of 2",
    )


def say(folder: Path, rank: int, status: str, detail: str = "") -> None:
    (folder / f"rank{rank}.json").write_text(json.dumps({"rank": rank, "status": status, "detail": detail}))


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    say(tmp_path, 0, "passed")
    assert selftest_ranks._judge(tmp_path, 2, True, 1) == ("failed", "ranks [1] ended without a result")
    say(tmp_path, 1, "failed", "RuntimeError: no route")
    assert selftest_ranks._judge(tmp_path, 2, True, 1) == ("failed", "rank 1: RuntimeError: no route")


def test_the_report_names_what_failed() -> None:
    outcomes = [
        Outcome(name="collectives", status="passed", detail="all", seconds=1.0),
        Outcome(name="fused products", status="hung", detail="no end", seconds=300.0),
    ]
    report = Report(device="cpu", device_name="x", ranks=2, backend="gloo", versions={"torch": "2"}, outcomes=outcomes)
    assert not report.passed
    text = selftest_ranks.render(report)
    assert text.endswith("1 of 2 checks passed; failed: fused products")
    assert "collectives  gloo" in text


@pytest.mark.parametrize(
    ("ranks", "names", "message"),
    [(1, (), "at least 2"), (2, ("nothing",), "unknown checks nothing, expected some of collectives")],
)
def test_what_cannot_be_run_is_refused(ranks: int, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selftest_ranks.run(ranks, "cpu", names=names)
