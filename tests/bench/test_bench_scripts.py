"""The scripts in `bench`: each runs once on a small case; what they count is right, and what is wrong has no speed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from test_bench_decode import resolved, speaking
from typer.testing import CliRunner

from bench import (
    calls,
    collectives,
    draft_lengths,
    draft_sweep,
    first_steps,
    network,
    positions,
    rope_lookup,
    sp,
    train_curve,
    vllm_peer,
    vllm_turn,
)
from whorl.bench.random_config import PRESETS
from whorl.engine.runner import Runner
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model
from whorl.models.qwen3 import Qwen3
from whorl.ops import OPS
from whorl.ops._impl import Impl
from whorl.ops.cpu import library
from whorl.passes.cost import TABLE, Traffic

SMALL = ("--batch", "2", "--tokens", "3", "--repeats", "1")


def run(app: typer.Typer, *words: str) -> Result:
    return CliRunner().invoke(app, [*words])


def document(app: typer.Typer, *words: str) -> Any:
    done = run(app, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3.tiny(num_experts=8, max_position_embeddings=256) | {"dtype": "float32"}))
    return str(path)


def test_the_command_of_a_script_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[2] / "bench" / "calls.py"
    monkeypatch.setattr("sys.argv", [str(script), "--json"])
    assert calls.provenance("cpu")["command"] == "python -m bench.calls --json"


# ---- calls


def test_calls_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLS", 2)
    report = document(calls.app, "--device", "cpu", "--repeats", "2")
    assert {"command", "device", "versions", "commit", "dtype", "repeats", "rows"} <= set(report)
    with_gradient = {"rms_norm", "add_rms_norm", "rope", "glu", "linear", "route", "log_softmax"}
    rows = {(row["op"], row["mode"]): row for row in report["rows"]}
    assert set(rows) == {(name, mode) for name in with_gradient for mode in calls.MODES} | {("rope_", "inference")}
    for (name, mode), row in rows.items():
        assert row["is_right"]
        assert row["backend"] == ("cpp" if "cpp" in OPS[name].impls and library.missing() is None else "torch")
        assert min(row["whorl_us"], row["torch_us"]) > 0
        assert (row["direct_us"] is None) == (row["mechanism_us"] is None) == (mode == "both")
        assert row["triton_us"] is row["liger_us"] is None  # both need a GPU


def test_calls_with_a_wrong_answer_have_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = OPS["glu"].reference
    wrong = Impl("triton", lambda **values: 2 * reference(**values), lambda **_: None)
    monkeypatch.setitem(OPS["glu"].impls, "triton", wrong)
    case = next(case for case in calls._cases() if case.op.name == "glu")
    with OPS["glu"].using("triton"):
        row = calls._row(case, "inference", torch.float32, "cpu", 1)
    assert not row["is_right"]
    assert row["whorl_us"] is None
    report: dict[str, Any] = {"rows": [row], "dtype": "float32"} | calls.provenance("cpu")
    assert "wrong answer" in calls.render(report)
    assert not calls.is_good(report)


# ---- beside vLLM


def test_every_row_beside_vllm_is_work_that_whorl_does(tmp_path: Path) -> None:
    config = PRESETS["Qwen3-0.6B"] | {"vocab_size": 300, "num_hidden_layers": 1, "dtype": "float32"}
    config |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = vllm_turn.whorl_engine(str(tmp_path), {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32})
    sizes = {"decode": [2, 16, 4], "prefill": [40], "mixed": [3, 8, 20, 2, 6]}
    assert {row["kind"] for row in vllm_peer.WORK} == set(sizes)
    work = [{"name": kind, "kind": kind, "sizes": size, "turns": 1} for kind, size in sizes.items()]
    assert list(vllm_turn.measure(run, work, config["vocab_size"])) == list(sizes)
    # If an engine took a second for each token of an answer, and none for prompts:
    rates = vllm_turn.measure(lambda prompts, answers: sum(answers), work, config["vocab_size"])
    assert rates == {"decode": 1.0, "prefill": 40.0, "mixed": 1.0}
    with pytest.raises(SystemExit, match=r"have \[7\] tokens; asked for \[8\]"):
        vllm_turn._check([7], [8])


def test_ratios_to_vllm_are_above_one_where_whorl_is_faster() -> None:
    rows = {"whorl": {"decode": 300.0, "ready, s": 10.0}, "vllm": {"decode": 200.0, "ready, s": 20.0}}
    assert vllm_peer.table(rows).splitlines()[2:] == [
        "| decode | 300 | 200 | 1.50 |",
        "| ready, s | 10 | 20 | 2.00 |",
    ]


# ---- positions and rows of the table


def test_positions_are_compared_and_timed() -> None:
    report = document(positions.app, "--repeats", "5")
    assert (report["tokens"], report["images"]) == (32768, 200)
    for row in report["rows"]:
        assert row["equal"]
        # Ten times faster when measured alone; a busy machine is allowed for.
        assert row["whorl_ms"] < row["transformers_ms"] / 3
    assert "outputs differ: no speed" in positions.render(report | {"rows": [{"model_type": "x", "equal": False}]})


def test_lookups_are_compared_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--device", "cpu", "--tokens", "8", "--layers", "3", "--repeats", "2")
    report = document(rope_lookup.app, *words)
    assert [row["case"] for row in report["rows"]] == ["rope", "mrope"]
    for row in report["rows"]:
        assert row["equal"]
        assert row["ratio"] == pytest.approx(row["per_layer_us"] / row["hoisted_us"])
    assert "3 layers, 32+4 heads x 128" in rope_lookup.render(report)
    monkeypatch.setattr(rope_lookup, "_equal", lambda *_: False)
    wrong = run(rope_lookup.app, *words)
    assert wrong.exit_code == 1
    assert "outputs differ: no speed" in wrong.output


@pytest.mark.slow
def test_collectives() -> None:
    report = document(collectives.app, "--device", "cpu", "--rows", "2", "--repeats", "2")
    assert report["library"] == "gloo"
    assert "HCCL_ALGO" in report["not_applicable"]
    assert [each["name"] for each in report["settings"]] == [collectives.PLAIN]
    assert len(report["settings"][0]["rows"]) == 5
    assert "sum in rank order" in collectives.render(report)


# ---- sequence parallelism


def test_the_table_is_the_cost_models() -> None:
    report = document(sp.app, "--simulate")
    assert [(row["link"], row["ranks"]) for row in report["rows"]] == [(n, p) for n in TABLE for p in (2, 4, 8, 16)]
    for row in report["rows"]:
        traffic = Traffic.of_norm(8192, torch.bfloat16)
        assert row["min_tokens"] == TABLE[row["link"]].threshold(row["ranks"], traffic)
        assert max(row["speedup"]["sp"]) <= 1, "plain sequence parallelism sends as much as an all-reduce"
    ethernet = next(row for row in report["rows"] if (row["link"], row["ranks"]) == ("ethernet", 4))
    assert ethernet["speedup"]["sp_int8"][-1] == pytest.approx(1 / 0.75, rel=0.02)  # bytes are all that counts there
    assert ethernet["speedup"]["sp, MLA"][-1] == pytest.approx(1 / 0.647, rel=0.02)
    assert "[tokens, 4096]" in run(sp.app, "--simulate", "--hidden", "4096").output


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, "20mbit"], ids=["loopback", "namespaces"])
def test_sequence_parallelism_is_measured(rate: str | None) -> None:
    if rate is not None and (reason := network.refusal()) is not None:
        pytest.skip(reason)  # namespaces of the network are for root, on Linux
    tokens = 129 if rate is None else 128
    try:
        report = sp.run(sp.SpSettings(tokens=tokens, hidden=256, layers=1, repeats=1, rate=rate, timeout=400))
    except ValueError as refused:
        if "this kernel refused" not in str(refused):
            raise
        pytest.skip(str(refused))  # a kernel without the queue that limits the rate; other refusals are faults
    assert sp.is_good(report), report
    assert ("its times are not" in sp.render(report)) == (rate is None)
    wrong = {**report, "rows": [row | {"bytes_error": 0.05} for row in report["rows"]]}
    assert "BYTES SENT DIFFER FROM THE REPORT" in sp.render(wrong)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["SP"]["bytes_ratio"] == pytest.approx(1, abs=0.01)
    assert rows["SP + int8"]["bytes_ratio"] == pytest.approx(0.75, abs=0.02)
    assert rows["SP + MLA placement"]["bytes_ratio"] < 0.85  # the last gather is of the output, in full
    assert rows["SP"]["difference"] == rows["all-reduce"]["difference"] == 0
    assert 0 < rows["SP + int8"]["difference"] < 0.05
    for row in rows.values() if rate is not None else ():  # headers of Ethernet, IP and TCP on top
        assert row["payload_bytes"] < row["interface_bytes"] < 1.2 * row["payload_bytes"]


# ---- drafts


def test_break_even() -> None:
    assert draft_lengths.break_even(1, 1.5) == 0.5
    assert draft_lengths.break_even(2, 1.75) == pytest.approx(0.5, abs=1e-5)
    assert draft_lengths.break_even(3, 4.0) == 1.0
    assert draft_lengths.break_even(3, 4.1) is None
    assert draft_lengths.break_even(8, 0.9) == 0.0
    shown = [draft_sweep._break_even(*case) for case in ((1, 1.0), (2, 1.5), (4, 4.1), (3, 1.0))]
    assert shown == ["-", "50%", "never", "0%"]


@pytest.mark.slow
def test_draft_lengths(shape: str) -> None:
    words = ("--random-config", shape, "--lengths", "1,3", *SMALL, "--context", "20", "--device", "cpu")
    report = document(draft_lengths.app, *words)
    rows = report["rows"]
    assert [(row["batch"], row["context"], row["k"]) for row in rows] == [(2, 20, 0), (2, 20, 1), (2, 20, 3)]
    assert rows[0]["times"] == 1.0
    for row in rows[1:]:
        assert row["times"] == row["seconds"] / rows[0]["seconds"]
        assert row["break_even"] == draft_lengths.break_even(row["k"], row["times"])
        assert row["mtp"] is None
    assert "pays from acceptance" in draft_lengths.render(report)


def test_steps_of_drafts_have_their_length(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that is timed checks a whole draft of every sequence, at every length of the sequence."""
    rows: list[tuple[int, int]] = []
    run_call = Runner.run_call

    def recording(self: Runner, call: Any, *states: Any) -> Any:
        rows.append(call.size[:2])
        return run_call(self, call, *states)

    monkeypatch.setattr(Runner, "run_call", recording)
    settings = resolved(shape, tokens=6, repeats=1)
    model = random_model(settings.config or {}, device="cpu", dtype=torch.float32)
    draft_lengths._seconds(model, 97, 2, 16, settings, draft_lengths.RejectedProposer(4, 97))
    decoding = [size for size in rows if size[0] <= 10]
    assert len(decoding) >= 12
    assert set(decoding) == {(10, 2)}


def test_sweeps() -> None:
    assert draft_sweep.parse_sweep("k=2,4,8,ngram=1,2") == {"k": [2, 4, 8], "ngram": [1, 2]}
    assert draft_sweep.parse_sweep("ngram=3 k=1") == {"k": [1], "ngram": [3]}
    assert draft_sweep.parse_sweep("k=5") == {"k": [5], "ngram": [1]}
    for wrong in ("", "4", "k=", "k=0", "n=1", "k=a"):
        with pytest.raises(ValueError, match="expected lengths such as"):
            draft_sweep.parse_sweep(wrong)


def test_a_sweep(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speaking(monkeypatch)
    done = run(draft_sweep.app, "--lengths", "k=2,4,ngram=1,2", "--tokens", "30", "--repeats", "1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[-3].split() == ["k", "ngram", "1", "ngram", "2"]
    assert [line.split()[0] for line in lines[-2:]] == ["2", "4"]
    report = document(draft_sweep.app, "--random-config", shape, "--verify", "--batch", "1..3", "--repeats", "1")
    assert list(report["seconds"]) == ["1", "2", "3"]


# ---- a start


def test_a_start_phase_by_phase(shape: str) -> None:
    sizes = ("--random-config", shape, "--batch", "3", "--context", "30", "--tokens", "5", "--prompt-tokens", "16")
    report = document(first_steps.app, *sizes, "--warmup", "full", "--device", "cpu")
    phases = {row["phase"]: row["seconds"] for row in report["phases"]}
    for phase in ("weights", "cache and runner", "warm-up: record", "warm-up: compile", "warm-up: sample"):
        assert phases[phase] >= 0
    assert report["warmup"] == "full"
    load = report["load"]
    assert (load["requests"], load["late_steps"]) == (6, 0)
    assert load["steps"] > 5
    assert "total" in first_steps.render(report)


def test_what_is_done_late_is_seen(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU recorded graphs, and nothing had been warmed up."""
    from whorl.engine import graphs

    monkeypatch.setattr(graphs, "record_graph", lambda device, function, pool=None: function)
    monkeypatch.setattr(graphs, "wants_graphs", lambda device, requested: True)
    sizes: dict[str, Any] = {"batch": "3", "context": "30", "tokens": 5, "prompt_tokens": 16}
    off = first_steps.run(resolved(shape, **sizes))
    assert off["warmup"] == "off"
    assert off["load"]["late_steps"] > 0
    assert any("graphs" in what for step in off["load"]["slow"] for what in step["late"])
    warm = first_steps.run(resolved(shape, EngineSettings(device="cpu", warmup="full"), **sizes))
    assert warm["load"]["late_steps"] == 0


# ---- a training curve


@pytest.mark.slow
def test_a_curve_falls_and_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torchtitan")
    from whorl.titan import cpu

    cpu.install()
    from bench import train_curve_steps as curve

    settings = curve.CurveSettings(
        device="cpu", switches=frozenset({"dsa"}), flavour="tiny", seq=32, batch=2, before=4, steps=8, warmup=2
    )
    report = curve.run(settings)
    rows = report["steps"]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["indexer_kl"] is None for row in rows] == [True] * 4 + [False] * 8
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["grad_norm"] > 0 for row in rows)
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(report))
    shown = run(train_curve.app, "--read", str(path), "--plot", str(tmp_path / "curve.png"), "--device", "cpu")
    assert "means of the first and the last 10 steps" in shown.stdout
    assert (tmp_path / "curve.png").stat().st_size > 0
