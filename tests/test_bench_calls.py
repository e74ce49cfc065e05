"""`whorl bench calls`: what it measures, and in what form it says so."""

import json
from typing import Any

import pytest
import torch
from stub_driver import stub_driver
from test_launch import ROW, arguments, scaled
from typer.testing import CliRunner

from whorl.bench import calls
from whorl.cli import app
from whorl.ops import OPS
from whorl.ops._impl import Impl
from whorl.ops._launch_triton import Launched

WITH_GRADIENT = ("rms_norm", "add_rms_norm", "rope", "swiglu", "linear", "route", "log_softmax")


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLS", 2)


def test_every_operator_in_every_mode() -> None:
    done = CliRunner().invoke(app, ["bench", "calls", "--device", "cpu", "--repeats", "2", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert {"command", "device", "versions", "commit", "dtype", "repeats", "rows"} <= set(document)
    rows = {(row["op"], row["mode"]): row for row in document["rows"]}
    assert set(rows) == {(name, mode) for name in WITH_GRADIENT for mode in calls.MODES} | {("rope_", "inference")}
    for (_, mode), row in rows.items():
        assert row["is_right"]
        assert row["backend"] == "torch"
        assert row["whorl_us"] > 0
        assert row["torch_us"] > 0
        assert (row["direct_us"] is None) == (mode == "both")
        assert (row["mechanism_us"] is None) == (mode == "both")
        assert row["triton_us"] is None  # both need a GPU
        assert row["liger_us"] is None


def test_a_wrong_answer_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = OPS["swiglu"].reference
    monkeypatch.setitem(
        OPS["swiglu"].impls, "triton", Impl("triton", lambda **arguments: 2 * reference(**arguments), lambda **_: None)
    )
    case = next(case for case in calls._cases() if case.op.name == "swiglu")
    with OPS["swiglu"].using("triton"):
        row = calls._row(case, "inference", torch.float32, "cpu", 1)
    assert not row["is_right"]
    assert row["whorl_us"] is None
    document: dict[str, Any] = {"rows": [row], "dtype": "float32"} | calls.provenance("cpu")
    assert "wrong answer" in calls.render(document)
    assert not calls.is_good(document)


def test_bare_launches_are_those_of_the_call() -> None:
    ours = Launched(scaled)
    args, options = arguments()
    with stub_driver(scaled) as stub:
        ours[(3,)](*args, **options)

        def call() -> None:
            ours[(3,)](*args, **options)
            ours[(5,)](*args, **options)

        launches = calls.recorded_launches(call)
        stub.launches.clear()
        for launch in launches:
            launch()
    assert [one.grid for one in stub.launches] == [(3, 1, 1), (5, 1, 1)]
    assert stub.launches[0].args[0] is ROW
