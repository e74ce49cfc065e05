"""`whorl bench serve` against a server that does what it is told, the real one, and an engine in process."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_openai import Act, faking
from mock_model import MockModel
from serving import serving, told
from typer.testing import CliRunner

from whorl.bench import serve, serve_report
from whorl.bench.options import LoadOptions
from whorl.bench.random_config import PRESETS
from whorl.bench.report import Benchmark
from whorl.bench.serve_engine import EngineLoad, vocabulary
from whorl.bench.serve_record import Record
from whorl.bench.serve_stream import RUNNING, SPREAD
from whorl.bench.workload import Lengths, Load, Request, Workload
from whorl.cli import app
from whorl.engine.llm import LLM
from whorl.engine.settings import EngineSettings
from whorl.models.qwen3 import Qwen3

AT_ONCE = Load(kind="concurrency", value=2)
VOCABULARY = 5000


def run(*arguments: str) -> Result:
    """Each argument may be several, as in a shell."""
    return CliRunner().invoke(app, ["bench", "serve", *(word for text in arguments for word in shlex.split(text))])


def document(*arguments: str, exit_code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == exit_code, (result.output, result.exception)
    return json.loads(result.stdout)


def workload(**changes: Any) -> Workload:
    return Workload(**({"input": Lengths(low=5, high=9), "output": Lengths(low=3, high=3), "count": 20} | changes))


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3.tiny() | {"dtype": "float32"}))
    return str(path)


# ---- over HTTP, with a server that does what it is told


def test_known_delays(tmp_path: Path) -> None:
    """80 ms to the first token, then three pieces of 2 tokens, 60 ms apart: bounds from below are exact, a machine
    that is busy may be later."""
    acts = [Act(0.08, 1), *[Act(0.06, 2)] * 3]
    with faking(lambda body: acts, num_cached=4) as fake:
        options = "--requests 8 --concurrency 4 --input 20 --output 7 --warmup-requests 2 --slo ttft=5000,e2e=60"
        report = document("--url", fake.url + "/v1", options, "--records", str(tmp_path / "all.jsonl"))
    assert fake.most_open == 4
    assert len(fake.bodies) == 1 + 2 + 8, "one to see whether it works, two to warm up"
    assert all(body["max_tokens"] == 7 and body["ignore_eos"] and len(body["prompt"]) == 20 for body in fake.bodies[1:])
    (row,) = report["rows"]
    assert (row["num_good"], row["failures"], row["counted"]) == (8, {}, {RUNNING: 8})
    assert row["output_tokens"] == 56
    assert 80 <= row["ttft_ms"]["p50"] < 800
    assert 60 <= row["gap_ms"]["p50"] < 600
    assert 30 <= row["itl_ms"]["p50"] < 300
    assert row["itl_ms"]["mean"] == pytest.approx(row["gap_ms"]["mean"] / 2)
    assert 260 <= row["e2e_ms"]["p50"] < 2600
    assert row["tokens_per_piece"] == pytest.approx(7 / 4)
    assert row["seconds"] >= 2 * 0.26
    assert row["cached_share"] == pytest.approx(0.4)
    assert row["goodput"]["share"] == 0.0, "none ends within 60 ms"
    assert row["send_late_ms"]["p50"] < 100
    assert row["queue_ms"] is None
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(8))
    assert all([count for _, count in line["arrivals_ms"]] == [1, 2, 2, 2] for line in lines)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with faking(lambda body: [Act(0.6, 1)]) as fake:
        report = document("--url", fake.url, "--requests 12 --rate 200 --output 1 --warmup-requests 0")
    assert fake.most_open > 4
    assert report["rows"][0]["num_good"] == 12
    assert report["rows"][0]["load"] == {"kind": "rate", "value": 200.0}


def test_every_kind_of_failure_is_counted() -> None:
    fates = {
        10: [Act(0.0, 1)],
        11: [Act(status=429)],
        12: [Act(0.0, 1), Act(then="drop")],
        13: [Act(0.0, 1), Act(then="stall")],
        14: [Act(status=503)],
    }

    def script(body: dict[str, Any]) -> list[Act]:
        return fates.get(len(body["prompt"]), fates[10])

    with faking(script) as fake:
        options = "--requests 20 --concurrency 20 --input 10:14 --output 1 --timeout 4 --warmup-requests 0"
        report = document("--url", fake.url, options, exit_code=1)
    (row,) = report["rows"]
    lengths = [len(body["prompt"]) for body in fake.bodies[1:]]
    expected = {"http 429": 11, "dropped": 12, "timeout": 13, "http 503": 14}
    assert row["failures"] == {kind: lengths.count(length) for kind, length in expected.items()}
    assert row["num_good"] == lengths.count(10)
    assert row["failure_messages"]["http 429"] == "go away"
    warning = f"{lengths.count(13)} of 20 requests failed: timeout: no data for 4 s"
    assert warning in serve_report.render(report)


def test_servers_that_say_less() -> None:
    acts = [Act(0.0, 1), Act(0.01, 2, text="xx"), Act(0.0, 1)]
    options = "--requests 3 --concurrency 1 --output 4 --warmup-requests 0"
    with faking(lambda body: acts, usage="final", refuses=("continuous_usage_stats",), has_tokenizer=False) as fake:
        report = document("--url", fake.url, options)
        assert report["rows"][0]["counted"] == {SPREAD: 3}
        assert report["rows"][0]["output_tokens"] == 12
        assert any("reports no running usage" in text for text in report["rows"][0]["warnings"])
        assert all(isinstance(body["prompt"], str) for body in fake.bodies)
        chat = document("--url", fake.url, options, "--chat", """--body '{"cache_salt": "7", "temperature": 1}'""")
        assert chat["rows"][0]["output_tokens"] == 12
        assert [m["role"] for m in fake.bodies[-1]["messages"]] == ["user"]
        assert (fake.bodies[-1]["cache_salt"], fake.bodies[-1]["temperature"]) == ("7", 1)
    with faking(lambda body: acts, refuses=("ignore_eos",)) as fake:
        refused = run("--url", fake.url, options)
        assert refused.exit_code == 2
        assert "what is ignore_eos?" in refused.stderr
        assert "--no-ignore-eos" in refused.stderr
        assert document("--url", fake.url, options, "--no-ignore-eos")["rows"][0]["num_good"] == 3


def test_the_key_is_sent_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["whorl", "bench", "serve", "--api-key", "very-secret"])
    with faking(lambda body: [Act(0.0, 1)]) as fake:
        done = run("--url", fake.url, "--api-key", "very-secret", "--requests 2 --output 1 --json")
    assert done.exit_code == 0
    assert all("very-secret" in head for head in fake.headers)
    assert "very-secret" not in done.stdout
    assert "--api-key ***" in json.loads(done.stdout)["header"]["command"]


def test_the_servers_own_queue() -> None:
    """Its histogram's growth: the mean is exact, percentiles are upper edges."""

    def text(low: int, high: int, total: float) -> str:
        name = 'vllm:request_queue_time_seconds_{}{{engine="0"{}}} {}\n'
        rows = [("bucket", ',le="0.1"', low), ("bucket", ',le="0.5"', high), ("bucket", ',le="+Inf"', high)]
        return "".join(name.format(*row) for row in [*rows, ("sum", "", total), ("count", "", high)])

    with faking(lambda body: [Act(0.0, 1)], metrics=[text(5, 9, 3.0), text(11, 19, 5.0)]) as fake:
        options = "--requests 10 --output 1 --warmup-requests 0"
        row = document("--url", fake.url, options)["rows"][0]
    assert row["queue_ms"] == {"mean": 200.0, "p50": 100.0, "p90": 500.0, "p99": 500.0, "max": None, "are_bounds": True}


# ---- the real server


def test_the_real_server() -> None:
    with serving(told(), api_key="k") as served:
        options = (
            f"--url {served.url} --api-key k --requests 6 --concurrency 2 --input 16 --output 8 --warmup-requests 1"
        )
        row = document(options)["rows"][0]
        assert (row["num_good"], row["counted"]) == (6, {RUNNING: 6})
        assert (row["input_tokens"], row["output_tokens"]) == (96, 48), "lengths are exact: prompts are token ids"
        assert row["cached_share"] == 0.0
        assert row["queue_ms"]["mean"] >= 0
        again = document(options)["rows"][0]
        assert again["cached_share"] > 0.2
        assert any("has seen this workload before" in text for text in again["warnings"])
        salted = document(options, """--body '{"cache_salt": "other"}'""")["rows"][0]
        assert salted["cached_share"] == 0.0
        shared = document(options, "--shared-prefix", "32", "--seed", "1", "--chat")["rows"][0]
        assert shared["num_good"] == 6
        assert shared["cached_share"] > 0.3
        assert served.is_idle()


# ---- an engine in process


def test_an_engine_in_process(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "load.png"
    options = "--device cpu --requests 6 --input 8:24 --output 3:6 --sweep 1,3 --slo ttft=60000 --block-size 8"
    report = document("--random-config", shape, options, "--plot", str(path))
    assert path.stat().st_size > 10_000
    assert report["header"]["weights"] == "random"
    assert report["header"]["workload"]["input"] == "8:24"
    first, second = report["rows"]
    assert [row["load"]["value"] for row in (first, second)] == [1, 3]
    for row in (first, second):
        assert (row["num_good"], row["counted"]) == (6, {"steps": 6})
        assert not [text for text in row["warnings"] if " late" not in text]  # a busy machine may be
        assert row["output_tokens"] == row["asked_output_tokens"]
        assert row["goodput"]["share"] == 1.0
        assert row["queue_ms"]["p50"] <= row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"]
    assert first["num_steps"] > second["num_steps"], "three at once share steps"
    text = serve_report.render(report)
    for words in ("3 at once", "first token", "between tokens", "in the queue", "output tok/s", "100.0%"):
        assert words in text


def engine_load(llm: LLM, requests: Sequence[Request], load: Load, **more: Any) -> list[Record]:
    return EngineLoad(llm, vocabulary(llm), load, requests, **more).run()


def mock_engine(**settings: Any) -> LLM:
    return LLM(model=MockModel(), device="cpu", block_size=4, **({"num_blocks": 128, "max_num_seqs": 2} | settings))  # type: ignore[arg-type]


def test_waiting_for_a_place_is_time_in_the_queue() -> None:
    """Three at once, and two places: the third begins when another has ended."""
    requests = workload(count=3).requests(Load(kind="rate"), 200)
    records = sorted(engine_load(mock_engine(), requests, Load(kind="rate")), key=lambda each: each.queue or 0.0)
    assert all(each.failure is None and each.num_output == 3 for each in records)
    assert records[2].queue is not None
    assert records[2].queue >= min(each.end for each in records[:2]) - 1e-3
    assert records[2].ttft >= records[2].queue


# ---- what is asked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rate 1 --concurrency 2", "give only one of"),
        ("--rate inf --seconds 3", "--rate inf"),
        ("--input 0", "--input is 0, expected tokens"),
        ("--chat", "--chat needs --url"),
        ("--prefixes 3", "--shared-prefix"),
        ("--url http://127.0.0.1:9 --random-config x", "give only one of"),
        ("--url http://127.0.0.1:9 --max-num-seqs 3", "give max_num_seqs to that server"),
        ("--trace nowhere.jsonl", "nowhere.jsonl"),
        ("MODEL --random-config x", "give only one of"),
        ("--body [] --url http://127.0.0.1:9", "expected a JSON object"),
    ],
)
def test_what_does_not_go_together(options: str, said: str) -> None:
    done = run(options)
    assert done.exit_code == 2
    assert said in done.stderr


def test_records_without_a_folder_are_refused_before_the_load() -> None:
    done = run("--records /nowhere/x")
    assert done.exit_code == 1
    assert done.stderr == "whorl: /nowhere/x: cannot be written: No such file or directory\n"


def test_requests_that_never_fit(shape: str) -> None:
    done = run("--random-config", shape, "--device", "cpu", "--input", "512")
    assert done.exit_code == 2
    assert "up to 576 tokens" in done.stderr
    assert "have up to 256" in done.stderr


def test_a_generator_that_is_late_says_so() -> None:
    row = {"ttft_ms": {"p50": 100.0}, "send_late_ms": {"p99": 30.0}, "loop_late_ms": {"p99": 1.0}}
    (line,) = serve._lateness_warnings(row)
    assert "sent its requests up to 30 ms late" in line
    assert not list(serve._lateness_warnings(row | {"send_late_ms": {"p99": 4.9}}))
    assert not list(serve._lateness_warnings(row | {"ttft_ms": {"p50": 1000.0}})), "30 ms of a second"


def test_the_mixed_load_is_one_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/benchmarks.md has it."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text().replace("\\\n", " ")
    (line,) = [line for line in page.splitlines() if "bench serve --random-config" in line]
    calls: list[Any] = []

    def benchmark(model: str | None, load: LoadOptions, engine: EngineSettings) -> Benchmark:
        calls.extend((load, engine))
        return Benchmark(run=dict, render=str)

    monkeypatch.setattr(serve, "benchmark", benchmark)
    assert run(line.partition("bench serve")[2]).exit_code == 0
    load, engine = calls
    made = serve._workload(load).requests(serve._loads(load)[0], VOCABULARY)
    assert load.random_config in PRESETS
    assert (len(made), engine.max_num_seqs, engine.max_num_batched_tokens) == (256, 128, 8192)
    assert all(512 <= len(request.prompt) <= 1536 and 64 <= request.num_output <= 320 for request in made)
