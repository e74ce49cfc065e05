"""Parts of the server by themselves, at their edges: the gate, log-probabilities, metrics."""

import asyncio
import json
import math
import re
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import byte_tokenizer
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from whorl.engine.sequence import FinishReason, Logprob, SamplingParams, Sequence
from whorl.serve.gate import Gate
from whorl.serve.logprobs import TokenTexts, for_chat, for_completion
from whorl.serve.metrics import Metrics
from whorl.serve.options import ServeOptions
from whorl.serve.running import Running
from whorl.serve.settings import ServerSettings

# ---- the gate


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(str(len((await receive())["body"])))(scope, receive, send)


def gate(app: Any = _answer, **options: Any) -> Gate:
    limits: dict[str, Any] = {"max_body": 100, "body_seconds": 5.0}
    return Gate(app, ServerSettings(**limits | options), running=Running())


@pytest.mark.parametrize(("number", "is_kept"), [("a" * 128, True), ("a" * 129, False), ("", False)])
def test_a_request_keeps_its_number_up_to_128_characters(number: str, is_kept: bool) -> None:
    returned = TestClient(gate()).get("/", headers={"x-request-id": number}).headers["x-request-id"]
    assert (returned == number) == is_kept
    assert 0 < len(returned) <= 128


def test_a_body_of_the_largest_size_is_taken() -> None:
    client = TestClient(gate())
    for size, status in ((100, 200), (101, 413)):
        response = client.post("/", content=b"x" * size, headers={"content-type": "application/json"})
        assert response.status_code == status


def test_an_error_behind_the_first_byte_is_not_a_second_answer() -> None:
    """The status is out: the answer is broken off, or a client would take what came for all."""
    sent: list[Any] = []

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with pytest.raises(ZeroDivisionError):
        asyncio.run(gate(half)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start"]


# ---- log-probabilities


def test_what_is_impossible_has_a_number() -> None:
    texts = TokenTexts(byte_tokenizer())
    one = Logprob(5, -math.inf, ((6, -0.5), (7, -math.inf)))
    (entry,) = for_chat(texts, [one])["content"]
    assert [entry["logprob"], *(top["logprob"] for top in entry["top_logprobs"])] == [-9999.0, -0.5, -9999.0]
    assert for_completion(texts, [one], start=0, num_top=1)["token_logprobs"] == [-9999.0]


def test_offsets_count_the_text_and_not_the_names_of_its_bytes() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a\u2603b")
    logprobs = for_completion(TokenTexts(tokenizer), [Logprob(i, -1.0) for i in ids], start=4, num_top=0)
    assert logprobs["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "b"]
    assert logprobs["text_offset"] == [4, 5, 6, 7, 8]


def test_every_byte_is_read_back_from_its_letter() -> None:
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    for character in ("\u00ad", "\u00ac", "\u00ae", "\u00e9", "\u2603", "\U0001f600", "\n", "\x7f", "~", "!"):
        ids = tokenizer.encode(character)
        assert [byte for i in ids for byte in texts.bytes(i)] == list(character.encode()), character


# ---- metrics


def metrics(monkeypatch: pytest.MonkeyPatch) -> tuple[Metrics, list[float]]:
    clock = [0.0]
    monkeypatch.setattr("whorl.serve.metrics.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return Metrics("m", lambda: defaultdict(lambda: 1)), clock


def read(recorded: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(recorded.render()[0].decode())
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {s.name.removeprefix("whorl:") + s.labels.get("finished_reason", ""): s.value for s in samples}


def sequence() -> Sequence:
    seq = Sequence([1, 2, 3], SamplingParams(), max_len=9)
    seq.timings.added = 0.0
    return seq


def test_tokens_of_one_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, clock = metrics(monkeypatch)
    seq = sequence()
    recorded.admitted(seq, 1.0)
    clock[0] = 2.0
    recorded.progressed(seq, 1)
    clock[0] = 8.0
    recorded.progressed(seq, 3)
    told = read(recorded)
    assert (told["inter_token_latency_seconds_count"], told["inter_token_latency_seconds_sum"]) == (3, 6.0)
    assert (told["time_to_first_token_seconds_sum"], told["request_prefill_time_seconds_sum"]) == (2.0, 1.0)
    assert (told["generation_tokens_total"], told["request_queue_time_seconds_sum"]) == (4, 1.0)


def test_who_left_is_counted_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, _ = metrics(monkeypatch)
    for reason in (FinishReason.ABORT, FinishReason.STOP):
        seq = sequence()
        recorded.admitted(seq, 0.0)
        recorded.progressed(seq, 1)
        recorded.finished(seq, reason)
    told = read(recorded)
    assert (told["request_success_totalabort"], told["request_success_totalstop"]) == (1, 1)
    for name in ("e2e_request_latency_seconds", "request_decode_time_seconds", "request_prompt_tokens"):
        assert told[f"{name}_count"] == 1


# ---- the dashboard


def test_every_metric_on_the_dashboard_exists() -> None:
    """The file is in the package, for Grafana to import."""
    text = (files("whorl.serve") / "grafana.json").read_text(encoding="utf-8")
    stats: dict[str, int] = defaultdict(int, num_blocks=1, num_encoded=0, num_state_bytes=0, num_host_bytes=0)
    families = text_string_to_metric_families(Metrics("m", lambda: stats).render()[0].decode())
    there = {sample.name for family in families for sample in family.samples}
    expressions = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    named = {name for expression in expressions for name in re.findall(r"whorl:\w+", expression)}
    assert len(named) > 20
    assert named <= there
    assert all('{model_name=~"$model"}' in expression for expression in expressions)


def test_what_grafana_is_started_with_is_there() -> None:
    folder = Path(__file__).parents[2] / "deploy" / "metrics"
    for service in yaml.safe_load((folder / "compose.yaml").read_text())["services"].values():
        for volume in service["volumes"]:
            source, _, mode = volume.split(":")
            assert (folder / source).resolve().is_file(), source
            assert mode == "ro"
    (job,) = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{ServeOptions().port}"]}]
