"""The rule that judges answers, the self-test and the operator benchmark: right answers pass, planted faults do not."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from whorl import device as devices
from whorl import judge, selftest, timing
from whorl.bench import ops as bench
from whorl.bench import peers, provenance
from whorl.bench.ops import GROUPS
from whorl.bench.options import OpsOptions
from whorl.cases import shrink
from whorl.cli import app
from whorl.ops import OPS, glu, qk_norm_rope, rms_norm, rope, rope_
from whorl.ops._impl import Impl

rms_norm_backward = OPS["rms_norm_backward"]


@pytest.fixture
def planted(monkeypatch):
    """Give an operator a backend that runs here and is wrong."""

    def plant(op, function, backend="triton"):
        monkeypatch.setattr(
            devices, "unavailable", lambda name, device, by_name=False: None if name == backend else "no"
        )
        monkeypatch.setattr("whorl.ops._op.unavailable", devices.unavailable)
        monkeypatch.setitem(op.impls, backend, Impl(backend, function, lambda **_: None))

    return plant


def rounded(values, dtype=torch.bfloat16):
    return values.to(dtype), values.to(dtype), values


class TestRule:
    gold = torch.linspace(-3, 3, 4001, dtype=torch.float64)

    def test_the_reference_itself_is_about_1(self):
        assert judge.error_ratio(*rounded(self.gold)) == pytest.approx(1, abs=0.05)

    def test_one_rounding_more_passes_and_twice_the_error_does_not(self):
        got, reference, gold = rounded(self.gold)
        error = got.double() - gold
        assert judge.judge([got], [reference], [gold]).passed
        worse = (gold + 2.5 * error).float()
        wide = reference.float()
        assert judge.judge([worse], [wide], [gold]).problem is not None
        assert judge.judge([(gold + 1.5 * error).float()], [wide], [gold]).passed

    def test_one_wrong_element_among_many_is_found(self):
        got, reference, gold = rounded(torch.linspace(1, 2, 1_000_000, dtype=torch.float64))
        got[123_456] += 0.2
        verdict = judge.judge([got], [reference], [gold])
        assert verdict.ratio < judge.LIMIT
        assert "an element is off by" in verdict.problem

    def test_few_elements_that_the_reference_hits_by_luck(self):
        gold = torch.ones(2, dtype=torch.float64)
        half = torch.finfo(torch.bfloat16).eps / 2
        near = (gold - half).to(torch.bfloat16)  # next below 1
        assert judge.judge([near], [gold.to(torch.bfloat16)], [gold]).passed
        far = (gold - 4 * half).to(torch.bfloat16)
        assert not judge.judge([far], [gold.to(torch.bfloat16)], [gold]).passed

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda t: t[:-1],
            lambda t: t.float(),
            lambda t: t.index_fill(0, torch.tensor([3]), math.nan),
            lambda t: t.index_fill(0, torch.tensor([3]), math.inf),
            torch.neg,
        ],
        ids=["shape", "dtype", "nan", "inf", "sign"],
    )
    def test_what_is_never_right(self, spoil):
        got, reference, gold = rounded(self.gold)
        assert judge.judge([spoil(got)], [reference], [gold]).problem is not None

    def test_nan_where_the_reference_has_it_is_right(self):
        gold = self.gold.clone()
        gold[0] = math.nan
        assert judge.judge(*([t] for t in rounded(gold))).passed

    def test_whole_numbers_are_compared_exactly(self):
        one = torch.arange(5)
        assert judge.judge([one], [one], [one]).passed
        assert not judge.judge([one + 1], [one], [one]).passed

    def test_number_of_outputs(self):
        one = torch.ones(3)
        assert not judge.judge([one], [one, one], [one, one]).passed

    def test_a_table_rounded_to_bf16_passes(self):
        """What Ascend's operators do to cos and sin: within the rule, so they need no bound of their own."""
        for case in rope.cases:
            values = rope.make(**case, dtype=torch.bfloat16, device="cpu")
            low = values | {"cos_sin": values["cos_sin"].bfloat16().float()}
            outs = [judge.answers(rope, rope.reference, v) for v in (low, values, judge.widened(values))]
            assert judge.judge(*outs).passed, case


class TestSelftest:
    @pytest.mark.parametrize(
        "some",
        [("rope", "rms_norm", "glu", "route", "linear", "sample"), pytest.param((), marks=pytest.mark.slow)],
        ids=["some", "all by default"],
    )
    def test_passes_here_and_names_the_operators(self, some, monkeypatch):
        monkeypatch.setattr(devices, "is_interpreting", lambda: False)  # test_ops.py runs the kernels
        report = selftest.run("cpu", {name: OPS[name] for name in some}) if some else selftest.run("cpu")
        names = some or tuple(OPS)
        assert report.passed, report.failures
        torch_rows = {row.operator: row for row in report.rows if row.backend == "torch"}
        assert tuple(torch_rows) == names
        assert all(row.passed >= 3 * len(OPS[name].cases) for name, row in torch_rows.items())
        text = selftest.render(report)
        assert all(name in text for name in (*(f"\n{name}  " for name in names), torch.__version__, "checks passed."))
        json.dumps(report.as_dict())

    @pytest.mark.slow
    def test_processes_side_by_side_report_the_same(self, monkeypatch):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        ops = {name: OPS[name] for name in ("glu", "route", "permute")}
        alone, together = selftest.run("cpu", ops), selftest.run("cpu", ops, jobs=2)
        assert [*dict.fromkeys(row.operator for row in together.rows)] == list(ops)
        assert together.passed
        for a, b in zip(alone.rows, together.rows, strict=True):
            assert (a.operator, a.backend, a.passed, a.worst_ratio) == (b.operator, b.backend, b.passed, b.worst_ratio)

    def test_a_wrong_backend_fails_and_exits_1(self, planted, monkeypatch):
        planted(glu, lambda x, **options: glu.reference(x * 1.01, **options))
        report = selftest.run("cpu", {"glu": glu})
        assert not report.passed
        assert {f.backend for f in report.failures} == {"triton"}
        assert "glu/triton, 17x128" in selftest.render(report)
        monkeypatch.setattr("whorl.selftest.run", lambda device, jobs: report)
        assert CliRunner().invoke(app, ["selftest"]).exit_code == 1

    def test_a_backend_that_raises_is_a_failure_not_a_crash(self, planted):
        def broken(x, weight, eps, plus_one):
            raise RuntimeError("vendor error 507015\nmore")

        planted(rms_norm, broken)
        report = selftest.run("cpu", {"rms_norm": rms_norm})
        assert {f.problem for f in report.failures} == {"RuntimeError: vendor error 507015"}

    def test_a_wrong_gradient_is_found(self, planted):
        def half(dy, x, weight, residual_grad, eps, plus_one):
            dx, dweight = rms_norm_backward.reference(dy, x, weight, residual_grad, eps=eps, plus_one=plus_one)
            return dx * 0.5, dweight

        planted(rms_norm_backward, half)
        planted(rms_norm, lambda x, weight, eps, plus_one: rms_norm.reference(x, weight, eps, plus_one=plus_one))
        failed = selftest.run("cpu", {"rms_norm": rms_norm}).failures
        assert failed
        assert all(f.what.startswith("gradient of") for f in failed)

    @pytest.mark.slow
    def test_writing_to_an_argument_is_found(self, planted):
        def careless(x, weight, eps, plus_one):
            y = rms_norm.reference(x, weight, eps, plus_one=plus_one)
            x.zero_()
            return y

        planted(rms_norm, careless)
        problems = {f.problem for f in selftest.run("cpu", {"rms_norm": rms_norm}).failures}
        assert "wrote to arguments that it must not change: x" in problems

    def test_cases_a_backend_does_not_take_are_counted_with_the_reason(self, planted, monkeypatch):
        planted(glu, lambda x, **options: glu.reference(x, **options))
        refuses = Impl("triton", glu.reference, lambda x, **_: "only fp32" if x.dtype != torch.float32 else None)
        monkeypatch.setitem(glu.impls, "triton", refuses)
        row = next(r for r in selftest.run("cpu", {"glu": glu}).rows if r.backend == "triton")
        assert dict(row.skipped) == {"only fp32": 4 * len(glu.cases)}  # two dtypes, value and gradient


class TestBench:
    @pytest.fixture(autouse=True)
    def _brief(self, monkeypatch):
        monkeypatch.setattr(timing, "REPEATS", 1)
        monkeypatch.setattr(bench, "QUICK_TOKENS", 4)

    def test_quick_cases_are_small(self):
        """On a CPU one case with the sequences of a tower takes minutes."""
        settings = bench.OpsSettings.resolve([], bench.OpsOptions(device="cpu"))
        for name in settings.names:
            for case in settings.cases(OPS[name]):
                values = OPS[name].make(**case, dtype=torch.float32, device="meta")
                count = sum(value.numel() for value in values.values() if isinstance(value, torch.Tensor))
                assert count < 2_000_000, (name, case)

    def test_walks_the_registry_and_prints_one_document(self):
        result = CliRunner().invoke(app, ["bench", "ops", "--device", "cpu", "--json"])
        assert result.exit_code == 0, result.output
        document = json.loads(result.output)
        assert {row["op"] for row in document["rows"]} == {n for n, op in OPS.items() if op.bench_cases}
        assert {"device_name", "versions", "commit", "copy_tb_s_by_bytes", "notes"} <= set(document["header"])
        for row in document["rows"]:
            assert row["passed"]
            assert {"us", "bytes", "tb_s", "share_of_copy", "copy_tb_s", "backend", "error_ratio"} <= set(row)
            assert any(p["label"] == "reference, eager" and p["us"] > 0 for p in row["peers"])
        assert not any("note" in p for row in document["rows"] for p in row["peers"]), "a peer answers something else"

    def test_a_wrong_answer_has_no_speed_and_exits_1(self, planted):
        planted(glu, lambda x, **options: glu.reference(x, **options) * 1.01)
        result = CliRunner().invoke(app, ["bench", "ops", "glu", "--device", "cpu"])
        assert result.exit_code == 1
        assert "FAILED" in result.output
        assert not re.search(r"\d us\b", result.output)
        document = json.loads(CliRunner().invoke(app, ["bench", "ops", "glu", "--device", "cpu", "--json"]).output)
        assert not any({"us", "tb_s", "peers"} & set(row) for row in document["rows"])

    def test_a_group_is_its_operators_each_once(self):
        settings = bench.OpsSettings.resolve(["indexer", "top_k", "rope"], OpsOptions(device="cpu"))
        assert settings.names == (*GROUPS["indexer"], "rope")
        assert all(name in OPS for names in GROUPS.values() for name in names)
        with pytest.raises(ValueError, match=r"no operator nonsense; expected .*, or the groups sparse_attention, ind"):
            bench.OpsSettings.resolve(["nonsense"], OpsOptions(device="cpu"))

    @pytest.mark.parametrize("name", ["sparse_attention", "masked_attention", "masked_attention_backward", "top_k"])
    def test_peers_of_sparse_attention_answer_the_same(self, name):
        for row in bench.run(bench.OpsSettings.resolve([name], OpsOptions(device="cpu", quick=True)))["rows"]:
            assert row["passed"]
            assert all("us" in peer for peer in row["peers"]), row["peers"]
            if "flops" in row:
                assert row["tflop_s"] == pytest.approx(row["flops"] / row["us"] / 1e6)
                assert row["share_of_matmul"] == pytest.approx(row["tflop_s"] / row["matmul_tflop_s"])

    @pytest.mark.parametrize("direction", ["", "_backward"])
    def test_peers_of_attention_answer_the_same(self, direction):
        lengths = {"heads": 4, "kv_heads": 2, "dim": 16}
        sparse = {"tokens": (6,), "keys": 40, "topk": 20, "heads": 3, "dim": 24, "value_dim": 16}
        for name, case, label in (
            ("causal_attention", {"lengths": (9,), **lengths}, "scaled_dot"),
            ("sparse_attention", {**sparse, "causal": False}, "gather"),
            ("sparse_attention", {**sparse, "causal": True}, "gather"),
        ):
            op = OPS[name + direction]
            values = op._bind((), op.make(**case, dtype=torch.float32, device="cpu"))
            (peer,) = [peer for peer in peers.peers_of(op, values, compiled=False) if label in peer.label]
            gold = peer.select_expected(judge.answers(op, op.reference, judge.widened(values)))
            assert bench._peer_problem(peer.bind(values), gold) is None
        op = OPS["causal_attention" + direction]
        packed = op._bind((), op.make(lengths=(9, 3), **lengths, dtype=torch.float32, device="cpu"))
        labels = [peer.label for peer in peers.peers_of(op, packed, compiled=False)]
        assert not any("scaled_dot" in each for each in labels), "it would let one sequence see the other"

    def test_a_peer_that_answers_something_else_has_no_speed(self, monkeypatch):
        monkeypatch.setattr(peers, "_torch_rms_norm", lambda x, weight, eps: 1.1 * x)
        document = bench.run(bench.OpsSettings.resolve(["rms_norm"], OpsOptions(device="cpu")))
        wrong = [p for row in document["rows"] for p in row["peers"] if p["label"] == "torch.nn.functional.rms_norm"]
        assert wrong
        assert all("wrong output" in p["note"] for p in wrong)

    def test_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "bench.png"
        result = CliRunner().invoke(app, ["bench", "ops", "rope", "--device", "cpu", "--plot", str(path)])
        assert result.exit_code == 0, result.output
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("op", [rope, rms_norm_backward, qk_norm_rope, rope_, glu], ids=lambda op: op.name)
def test_compiled_peers_answer_the_same(op, monkeypatch):
    monkeypatch.setattr(bench, "QUICK_TOKENS", 4)
    row = bench._row(
        op, shrink(op.bench_cases[0], 4), bench.OpsSettings.resolve([op.name], OpsOptions(device="cpu", compiled=True))
    )
    compiled = [p for p in row["peers"] if "torch.compile" in p["label"]]
    assert compiled
    assert all("us" in p for p in compiled), compiled


LIGER = """
import torch
from whorl import device
from whorl.bench import ops, peers
from whorl.ops import OPS
from whorl.cases import shrink

device.unavailable = lambda *_, **__: None
for name, more in (("rope", {}), ("rope", {"inverse": True}), ("glu", {})):
    op = OPS[name]
    values = op.make(**shrink(op.bench_cases[0] | more, 3), dtype=torch.float32, device="cpu")
    found = [p for p in peers.peers_of(op, values, compiled=False) if p.label.startswith("Liger")]
    assert found, name
    for peer in found:
        bound = peer.bind(values)
        problem = ops._peer_problem(bound, ops._gold(op, values, "cpu"))
        assert problem is None, (name, peer.label, problem)
print("same answers")
"""


@pytest.mark.slow
def test_liger_is_asked_the_same_question():
    """Those of its kernels that Triton's interpreter takes, in a process where it is on from the start."""
    pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", LIGER], capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.strip() == "same answers", result.stderr[-2000:]


@pytest.fixture
def paper(monkeypatch):
    """A device of paper: a launch takes 3 us. Returns the launch."""
    clock = {"now": 0.0}

    class Event:
        def record(self):
            self.at = clock["now"]

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3

    def launch():
        clock["now"] += 3.0

    def record_graph(device, function):
        before = clock["now"]
        function()
        took = clock["now"] - before
        return lambda: clock.__setitem__("now", clock["now"] + took)

    monkeypatch.setattr(devices, "accelerator", lambda device: object())
    monkeypatch.setattr(devices, "synchronize", lambda device: None)
    monkeypatch.setattr(devices, "timing_event", lambda device: Event())
    monkeypatch.setattr(devices, "record_graph", record_graph)
    return launch


def test_timing_counts_every_launch_of_a_graph(paper):
    measured = timing.measure([paper] * 16, "paper", short=True)
    assert (measured.us, measured.hot_us) == (pytest.approx(3.0), pytest.approx(3.0))
    assert measured.how == "graph of 128 launches over 16 buffers"


def test_a_call_that_no_graph_records_is_timed_by_events(paper, monkeypatch):
    def record_graph(device, function):
        raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")

    monkeypatch.setattr(devices, "record_graph", record_graph)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    monkeypatch.setattr(timing, "_backlog", lambda *_: 1)
    measured = timing.measure([paper] * 16, "cpu", short=True)
    assert (measured.us, measured.hot_us, measured.how) == (pytest.approx(3.0), None, "events, cache flushed")


def test_a_call_of_seconds_is_timed_once(paper, monkeypatch):
    calls = []

    def slow():
        calls.append(paper())
        for _ in range(int(timing.SLOW_US) // 3):
            paper()

    measured = timing.measure([slow] * 16, "paper")
    assert (len(calls), measured.how) == (2, "one call")
    assert measured.us > timing.SLOW_US


def test_buffers_together_never_fit_the_cache(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda device: object())
    assert timing.num_buffers(20_000, "paper") == timing.SHORT_LAUNCHES
    for num_bytes in (timing.SHORT_BYTES - 1, timing.SHORT_BYTES, 117_000_000, 311_000_000):
        assert timing.num_buffers(num_bytes, "paper") * num_bytes >= 2 * timing.FLUSH_BYTES - timing.FLUSH_BYTES // 8
    assert timing.num_buffers(10**9, "paper") == 1


def test_a_copy_without_history_knows_its_commit(tmp_path, monkeypatch):
    monkeypatch.delenv("WHORL_COMMIT", raising=False)
    (tmp_path / "whorl" / "bench").mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "whorl" / "bench" / "provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() == "unknown"
    (tmp_path / ".commit").write_text("abc1234 with changes\n")
    assert provenance.commit() == "abc1234 with changes"
    monkeypatch.setenv("WHORL_COMMIT", "f00")
    assert provenance.commit() == "f00"


def test_the_page_of_results_lists_the_commits_that_no_command_wrote():
    folder = Path(__file__).parents[2] / "bench" / "results"
    filled_in = {path.name for path in folder.glob("*.json") if '"commit_origin"' in path.read_text()}
    assert filled_in
    assert set(re.findall(r"`(\w+\.json)`", (folder / "README.md").read_text())) == filled_in
