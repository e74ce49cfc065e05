"""The scripts in `bench`: each runs once on a small case; what they count is right, and what is wrong has no speed."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from click.testing import Result
from ranks import Ranks
from stub_driver import stub_driver
from test_bench_decode import resolved, speaking
from test_launch import ROW, arguments, scaled
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
    sp_rank,
    train_curve,
)
from whorl import collectives as whorl_collectives
from whorl.engine.runner import Runner
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.qwen3 import Qwen3
from whorl.ops import OPS
from whorl.ops._impl import Impl
from whorl.ops._launch_triton import Launched
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
    script = Path(__file__).parents[1] / "bench" / "calls.py"
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
    for (_, mode), row in rows.items():
        assert row["is_right"]
        assert row["backend"] == "torch"
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


REFUSED = {
    "--rate fast": "--rate is fast, expected bits per second such as 100mbit",
    "--rate 1mbit --delay soon": "--delay is soon, expected a time such as 500us",
    "--delay 1ms": "--delay needs --rate",
    "--hidden 200": "--hidden is 200, expected a multiple of 128",
    "--plot chart.txt": "--plot is chart.txt, expected a file name that ends in",
}


@pytest.mark.parametrize("words", REFUSED)
def test_asked_wrongly(words: str) -> None:
    done = run(sp.app, *words.split())
    assert done.exit_code == 2
    assert REFUSED[words] in done.output


def test_without_root_or_tools_a_link_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.platform, "system", lambda: "Linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"network namespaces need root\. Without --rate the ranks communicate"):
        sp.SpSettings(rate="1mbit")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    assert network.refusal() == "ip and tc not found: install iproute2"
    monkeypatch.setattr(network.platform, "system", lambda: "Darwin")
    assert network.refusal() == "network namespaces need Linux, this is Darwin"
    sp.SpSettings()  # loopback needs nothing


def test_namespaces_are_removed_where_the_kernel_refuses_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def refuse_delay(command: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(list(command))
        return subprocess.CompletedProcess(command, int("netem" in command), "", "Error: qdisc kind is unknown.")

    monkeypatch.setattr(network, "refusal", lambda: None)
    monkeypatch.setattr(network.subprocess, "run", refuse_delay)
    link = network.Link(rate="10mbit", delay="1ms")
    unknown = r"refused `tc .* netem delay 1ms.*qdisc kind is unknown"
    with pytest.raises(ValueError, match=unknown), network.namespaces(2, link):
        pytest.fail("there is no delay")
    made = [c[3] for c in ran if c[1:3] == ["netns", "add"]]
    assert [c[3] for c in ran if c[1:3] == ["netns", "del"]] == made
    assert len(made) == 3


def test_payload_is_counted_to_the_byte() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as sender, listener.accept()[0] as receiver:
        before = sp_rank.payload_sent()
        sender.sendall(b"x" * 12345)
        left = 12345
        while left:
            left -= len(receiver.recv(left))
        assert sp_rank.payload_sent() - before == 12345
    listener.close()


def bytes_on_the_wire() -> dict[str, list[int]]:
    group, world = whorl_collectives.group_name(None), dist.get_world_size()
    x = torch.randn(301, 256).bfloat16()  # ranks do not divide 301
    rows = whorl_collectives.local_rows(x, group)
    functions = {
        "all_reduce": (lambda: whorl_collectives.ordered_all_reduce(x, group), 512),
        "reduce_scatter": (lambda: whorl_collectives.ordered_reduce_scatter(x, group), 512),
        "all_gather": (lambda: whorl_collectives.all_gather(rows, 301, group), 512),
        "quantized": (lambda: whorl_collectives.all_gather_quantized(rows, 301, group, "int8"), 256 + 4),
    }
    sizes = {}
    for name, (call, row_bytes) in functions.items():
        call()
        dist.barrier()
        before = sp_rank.payload_sent()
        call()
        dist.barrier()  # what waits in the kernel is counted when it leaves
        sent = sp_rank.payload_sent() - before
        what = "all_gather" if name == "quantized" else name
        sizes[name] = [sent, whorl_collectives.wire_bytes(what, row_bytes, 301, world)]
    return sizes


@pytest.mark.slow
def test_collectives_send_what_the_report_counts() -> None:
    ranks = Ranks(3)
    by_rank = ranks.run(bytes_on_the_wire)
    ranks.stop()
    for answers in by_rank:
        for name, (sent, said) in answers.items():
            assert said <= sent < said * 1.02 + 1000, f"{name}: {sent} bytes, the report says {said}"
    total = {name: sum(a[name][0] for a in by_rank) for name in by_rank[0]}
    assert total["reduce_scatter"] < 0.52 * total["all_reduce"], "a true reduce-scatter is half an all-reduce"


def sp_row(name: str, seconds: float, off: float) -> dict[str, Any]:
    bytes_sent = {"bytes_ratio": seconds, "payload_bytes": 1000.0, "report_bytes": 1000, "bytes_error": off}
    times = {"compute_seconds": 0.2, "predicted_seconds": 1.0, "prediction_error": 0.1, "communication_share": 0.8}
    return {"name": name, "seconds": seconds, "speedup": 1 / seconds} | bytes_sent | times


SP_HEADER = {"device_name": "a machine", "versions": {"torch": "2.13"}, "network": "loopback", "load": 0.5}
SP_HEADER |= {"settings": {"ranks": 2, "layers": 4, "hidden": 512, "tokens": 256, "repeats": 5, "rate": None}}
SP_DOCUMENT = {"header": SP_HEADER, "rows": [sp_row("all-reduce", 1.0, 0.0), sp_row("SP + int8", 0.8, 0.001)]}


def test_the_report_of_sequence_parallelism(tmp_path: Path) -> None:
    text = sp.render(SP_DOCUMENT)
    assert "1.25x" in text
    assert "its times are not" in text
    assert sp.is_good(SP_DOCUMENT)
    wrong = SP_DOCUMENT | {"rows": [sp_row("all-reduce", 1.0, 0.05)]}
    assert not sp.is_good(wrong)
    assert "BYTES SENT DIFFER FROM THE REPORT" in sp.render(wrong)
    busy = SP_DOCUMENT | {"rows": [row | {"communication_share": -0.3} for row in SP_DOCUMENT["rows"]]}  # type: ignore[operator]
    assert "the machine is busy" in sp.render(busy)
    assert "the machine is busy" not in text
    pytest.importorskip("matplotlib")
    sp.write_plot(SP_DOCUMENT, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


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
    rows[1] |= {"times": 1.4, "break_even": 0.4, "mtp": {"seconds": 0.002, "times": 2.4, "break_even": None}}
    text = draft_lengths.render(report)
    assert "pays from acceptance" in text
    cells = next(line.split() for line in text.splitlines() if line.split()[:3] == ["20", "2", "1"])
    assert cells[4:] == ["1.40", "40%", "2.000", "2.40", "never"]


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


@pytest.mark.slow
def test_drafts_of_the_models_own_layer_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DeepSeek.tiny(num_nextn_predict_layers=1, num_hidden_layers=1) | {"dtype": "float32"}))
    words = ("--random-config", str(path), "--lengths", "5", "--tokens", "2", "--repeats", "1", "--block-size", "2")
    for context in ([], ["--context", "30"]):
        report = document(draft_lengths.app, *words, *context)
        assert report["rows"][0]["mtp"] is None
        assert report["rows"][1]["mtp"]["seconds"] > 0


def test_drafts_that_are_too_many_tokens(shape: str) -> None:
    done = run(draft_lengths.app, "--random-config", shape, "--lengths", "8", "--batch", "512")
    assert done.exit_code == 2
    assert "give shorter drafts, or fewer sequences" in done.stderr


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
    refused = run(draft_sweep.app, "--random-config", shape)
    assert "needs a trained MODEL" in refused.stderr


def test_verified_tokens(shape: str) -> None:
    report = document(draft_sweep.app, "--random-config", shape, "--verify", "--batch", "1..3", "--repeats", "1")
    assert list(report["seconds"]) == ["1", "2", "3"]
    seconds = {int(tokens): value for tokens, value in report["seconds"].items()}
    assert "pays from acceptance" in draft_sweep.render_verify(report | {"seconds": seconds})


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
    report["load"]["late_steps"] = 1
    assert not first_steps.is_good(report)
    assert first_steps.is_good(report | {"warmup": "short"})


def test_what_is_done_late_is_seen(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU recorded graphs, and nothing had been warmed up."""
    from whorl.engine import runner

    monkeypatch.setattr(runner, "record_graph", lambda device, function, pool=None: function)
    monkeypatch.setattr(runner, "wants_graphs", lambda device, requested: True)
    sizes: dict[str, Any] = {"batch": "3", "context": "30", "tokens": 5, "prompt_tokens": 16}
    off = first_steps.run(resolved(shape, **sizes))
    assert off["warmup"] == "off"
    assert off["load"]["late_steps"] > 0
    assert any("graphs" in what for step in off["load"]["slow"] for what in step["late"])
    warm = first_steps.run(resolved(shape, EngineSettings(device="cpu", warmup="full"), **sizes))
    assert warm["load"]["late_steps"] == 0


def test_what_the_host_does_beside_is_said() -> None:
    before = first_steps.HostWork(allocations=3, retries=0, collections=5, reserved_bytes=2**20)
    now = first_steps.HostWork(allocations=5, retries=1, collections=6, reserved_bytes=3 * 2**20)
    said = "2 allocations from the driver (+2 MiB)", "1 of them after cached memory", "1 full garbage collections"
    told = first_steps._new_host_work(before, now)
    assert all(text.startswith(start) for text, start in zip(told, said, strict=True))
    assert first_steps._new_host_work(now, now) == []
    assert first_steps.host_work("cpu").collections > 0


# ---- a training curve


@pytest.mark.slow
def test_a_curve_falls_and_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torchtitan")
    from whorl.titan import cpu

    cpu.install()
    from bench import train_curve_steps as curve

    schedule = curve.CurveSettings(device="cpu", switches=frozenset(), before=100, steps=200, lr=1.0, warmup=20)
    rates = [schedule.rate(step) for step in (1, 20, 150, 225, 300)]
    assert rates == pytest.approx([0.05, 1, 1, 0.55, 0.1])
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
