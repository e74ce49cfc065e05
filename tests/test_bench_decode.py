"""`whorl bench decode`: what it counts, what it calls an output, what it refuses, and that every mode runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from mock_model import ByteTokenizer, MockModel
from typer.testing import CliRunner

from whorl.bench import classify, decode, decode_report, draft_lengths, draft_sweep
from whorl.bench.classify import LOW_DIVERSITY, OK, distinct
from whorl.bench.decode_options import parse_batches
from whorl.bench.draft_sweep import parse_sweep
from whorl.bench.random_config import PRESETS, read_config
from whorl.cli import app
from whorl.engine import roofline
from whorl.engine.roofline import num_values, prompt_flops, step_bytes
from whorl.engine.runner import Runner
from whorl.engine.weights import build, random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "decode", *arguments])


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3.tiny(num_experts=8) | {"dtype": "float32"}))
    return str(path)


# ---- presets


@pytest.mark.parametrize("name", [*(name for name in PRESETS if name.endswith("-FP8")), "Qwen3-0.6B:fp8"])
def test_fp8_is_described_as_published_checkpoints_do(name: str) -> None:
    """vLLM refuses a `quantization_config` of FP8 that has no activation_scheme."""
    settings = read_config(name)["quantization_config"]
    published = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    more = {"scale_fmt": "ue8m0"} if name.startswith("DeepSeek") else {"modules_to_not_convert": ["lm_head"]}
    assert settings == published | more


# ---- bytes


def test_bytes_of_a_token_of_the_preset() -> None:
    """Counted by hand: 3.042 B weights are read for a token of Qwen3-30B-A3B, and its 30.532 B fill 61.064 GB."""
    model = build(PRESETS["Qwen3-30B-A3B"], device="meta", dtype=torch.bfloat16)
    assert num_values(model) == sum(p.numel() for p in model.parameters()) == pytest.approx(30.532e9, rel=1e-4)
    assert step_bytes(model) == pytest.approx(6.084e9, rel=1e-3)
    cache = step_bytes(model, context=4096) - step_bytes(model)
    assert cache == 4096 * 98_304
    # 125.9 of 128 experts in a step of 64.
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    rest = step_bytes(model) - experts * 8 / 128
    assert step_bytes(model, batch=64) == pytest.approx(rest + experts * 125.9 / 128, rel=1e-2)


def test_bytes_of_a_dense_model() -> None:
    tied = build(Llama.tiny(tie_word_embeddings=True), device="meta", dtype=torch.float32)
    weights = sum(p.numel() for p in tied.parameters()) * 4
    assert 0 < step_bytes(tied) - weights < 4096, "all weights, a row of the embedding, a token of the cache"
    untied = build(Llama.tiny(tie_word_embeddings=False), device="meta", dtype=torch.float32)
    assert step_bytes(untied) == step_bytes(tied), "an embedding that is not the head is not read"


def test_bytes_with_a_window() -> None:
    options = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    model = build(Qwen3.tiny(**options), device="meta", dtype=torch.float32)
    per_key = 2 * 2 * 16 * 4
    assert step_bytes(model, context=100) - step_bytes(model) == per_key * (100 + 7)


def test_products_of_a_prompt_of_the_preset() -> None:
    """Counted by hand: the weights that a token meets, the head once, and half of the square of attention."""
    model = build(PRESETS["Qwen3-30B-A3B"], device="meta", dtype=torch.bfloat16)
    layer = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 2048 * 128 + 8 * 3 * 2048 * 768
    for length in (1, 8192):
        attention = 48 * 4 * 32 * 128 * length * (length + 1) // 2
        assert prompt_flops(model, length) == 2 * (48 * layer * length + 151936 * 2048) + attention


def test_products_with_a_window() -> None:
    options = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    windowed, full = (build(Qwen3.tiny(**more), device="meta", dtype=torch.float32) for more in (options, {}))
    unseen = sum(max(0, position + 1 - 7) for position in range(100))
    assert prompt_flops(full, 100) - prompt_flops(windowed, 100) == 4 * 4 * 16 * unseen


def test_share_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(Llama.tiny(), device="cpu", dtype=torch.float32)
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: 100 * step_bytes(model))
    assert roofline.share(model, 25.0) == pytest.approx(0.25)
    assert roofline.share(MockModel(), 25.0) is None


# ---- classes


def test_classes_of_outputs() -> None:
    text = list(range(60))
    assert classify.classify(text) == OK
    assert classify.classify(text + [7] * 24) == "LOOP_1"
    assert classify.classify(text + [7] * 23) == OK
    assert classify.classify(text + [1, 2, 3] * 8) == "LOOP_3"
    assert classify.classify(text + [1, 2, 3] * 8 + [1, 2]) == "LOOP_3", "cut anywhere"
    assert classify.classify(text + list(range(30)) * 4) == "LOOP_30"
    assert classify.classify(text + list(range(30)) * 3) == LOW_DIVERSITY, "three times may be a list"
    assert classify.classify([i % 7 * (i % 3) for i in range(90)]) == "LOOP_21"
    few = [number for i in range(24) for number in (1, 2, 3, 10 + i)]
    assert classify.classify(few) == OK
    assert classify.classify([1, 2, 1, 3, 2, 1, 1, 2, 3, 3] * 3 + [1, 1, 3, 2, 2]) == LOW_DIVERSITY
    assert classify.classify([]) == OK


def test_distinct() -> None:
    assert distinct([1, 1, 2, 2], 1) == 0.5
    assert distinct([1, 1, 2, 2], 2) == 1.0
    assert distinct([1, 1, 1, 1], 3) == 0.5
    assert distinct([1], 2) == 1.0


# ---- options


def test_batches() -> None:
    assert parse_batches("1,8,64") == (1, 8, 64)
    assert parse_batches("1..4") == (1, 2, 3, 4)
    for wrong in ("", "a", "0", "1..", "4..1", "1,,2"):
        with pytest.raises(ValueError, match="expected numbers such as"):
            parse_batches(wrong)


def test_sweeps() -> None:
    assert parse_sweep("k=2,4,8,ngram=1,2") == {"k": [2, 4, 8], "ngram": [1, 2]}
    assert parse_sweep("ngram=3 k=1") == {"k": [1], "ngram": [3]}
    assert parse_sweep("k=5") == {"k": [5], "ngram": [1]}
    for wrong in ("", "4", "k=", "k=0", "n=1", "k=a"):
        with pytest.raises(ValueError, match="expected lengths such as"):
            parse_sweep(wrong)


# ---- every mode runs


def test_decode_of_random_weights_next_to_a_peer(shape: str) -> None:
    arguments = ["--random-config", shape, "--batch", "1,2", "--tokens", "4", "--repeats", "1", "--device", "cpu"]
    document = json.loads(run(*arguments, "--prompt-tokens", "40", "--peer", "transformers", "--json").stdout)
    assert [row["batch"] for row in document["decode"]] == [1, 2]
    assert [(row["label"], row["batch"]) for row in document["peers"]] == [("transformers", 1), ("transformers", 2)]
    for row in document["decode"] + document["peers"]:
        assert row["tok_s"] > 0, row
        assert row["tb_s"] == pytest.approx(row["bytes_per_step"] * row["tok_s"] / row["batch"] / 1e12)
    copy = document["header"]["copy_tb_s"]
    assert all(row["share_of_roofline"] == pytest.approx(row["tb_s"] / copy) for row in document["decode"])
    assert document["prefill"]["tok_s"] > 0
    peer = document["peer_prefill"]
    assert (peer["label"], peer["chunk"], peer["attention"]) == ("transformers", 40, "sdpa")
    assert peer["ratio"] == pytest.approx(peer["seconds"] / document["prefill"]["seconds"])
    text = decode_report.render(document)
    for word in ("of roofline", "GB/s", "prefill   40 tokens", "transformers", "random weights", "40 tokens at once"):
        assert word in text


@pytest.mark.slow
def test_random_weights_may_be_quantised(shape: str) -> None:
    """Behind the name; a quarter of the bytes, and the embedding, the head and the norms as they are."""
    plain, packed = (
        json.loads(
            run(
                "--random-config", name, "--batch", "1", "--tokens", "2", "--repeats", "1", "--device", "cpu", "--json"
            ).stdout
        )
        for name in (shape, f"{shape}:w4a16")
    )
    assert packed["header"]["weight_bytes"] < plain["header"]["weight_bytes"]
    assert packed["decode"][0]["bytes_per_step"] < plain["decode"][0]["bytes_per_step"]
    with pytest.raises(ValueError, match=r"--random-config is Qwen3-0.6B:w3, expected one of"):
        read_config("Qwen3-0.6B:w3")


def test_a_peer_that_fails_is_reported(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.bench import decode_peer

    def fail(settings: Any) -> None:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(decode_peer, "_load", fail)
    result = run("--random-config", shape, "--batch", "1", "--tokens", "2", "--repeats", "1", "--peer", "transformers")
    assert result.exit_code == 0
    assert "transformers: did not run: RuntimeError: no such thing" in result.stdout


@pytest.mark.slow
def test_a_peers_prompt_is_cut_until_it_fits(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.bench import decode_peer

    real, chunks = decode_peer._forward, []

    def forward(model: Any, ids: Any, chunk: int) -> None:
        chunks.append(chunk)
        if chunk > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(model, ids, chunk)

    monkeypatch.setattr(decode_peer, "_forward", forward)
    monkeypatch.setattr(decode_peer, "LEAST_CHUNK", 8)
    arguments = ["--random-config", shape, "--batch", "1", "--tokens", "2", "--repeats", "1", "--device", "cpu"]
    arguments += ["--prompt-tokens", "40", "--peer", "transformers"]
    assert json.loads(run(*arguments, "--json").stdout)["peer_prefill"]["chunk"] == 10
    assert chunks == [40, 20, 10, 10]
    monkeypatch.setattr(decode_peer, "LEAST_CHUNK", 16)
    assert "transformers: did not run: OutOfMemoryError: CUDA out of memory" in run(*arguments).stdout


def test_verify(shape: str) -> None:
    document = json.loads(
        run("--random-config", shape, "--verify", "--batch", "1..3", "--repeats", "1", "--json").stdout
    )
    assert list(document["seconds"]) == ["1", "2", "3"]
    assert (
        "pays from acceptance" in run("--random-config", shape, "--verify", "--batch", "1..3", "--repeats", "1").stdout
    )


@pytest.mark.slow
def test_draft_lengths(shape: str) -> None:
    arguments = ["--random-config", shape, "--draft-lengths", "1,3", "--batch", "2", "--tokens", "3", "--repeats", "1"]
    arguments += ["--context", "20"]
    document = json.loads(run(*arguments, "--json").stdout)
    rows = document["rows"]
    assert [(row["batch"], row["context"], row["k"]) for row in rows] == [(2, 20, 0), (2, 20, 1), (2, 20, 3)]
    assert rows[0]["times"] == 1.0
    for row in rows[1:]:
        assert row["times"] == row["seconds"] / rows[0]["seconds"]
        assert row["break_even"] == draft_lengths.break_even(row["k"], row["times"])
        assert row["mtp"] is None
    rows[1] |= {"times": 1.4, "break_even": 0.4}
    rows[1]["mtp"] = {"seconds": 0.002, "times": 2.4, "break_even": None}
    text = draft_lengths.render(document)
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
    settings = decode.DecodeSettings.resolve(random_config=shape, batch="2", num_tokens=6, repeats=1)
    model = random_model(settings.config or {}, device="cpu", dtype=torch.float32)
    draft_lengths._seconds(model, 97, 2, 16, settings, draft_lengths.RejectedProposer(4, 97))
    decoding = [size for size in rows if size[0] <= 10]
    assert len(decoding) >= 12
    assert set(decoding) == {(10, 2)}


@pytest.mark.slow
def test_drafts_of_the_models_own_layer_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DeepSeek.tiny(num_nextn_predict_layers=1, num_hidden_layers=1) | {"dtype": "float32"}))
    arguments = ["--random-config", str(path), "--draft-lengths", "5", "--tokens", "2", "--repeats", "1"]
    for context in ([], ["--context", "30"]):
        document = json.loads(run(*arguments, *context, "--block-size", "2", "--json").stdout)
        assert document["rows"][0]["mtp"] is None
        assert document["rows"][1]["mtp"]["seconds"] > 0


def test_break_even() -> None:
    assert draft_lengths.break_even(1, 1.5) == 0.5
    assert draft_lengths.break_even(2, 1.75) == pytest.approx(0.5, abs=1e-5)
    assert draft_lengths.break_even(3, 4.0) == 1.0
    assert draft_lengths.break_even(3, 4.1) is None
    assert draft_lengths.break_even(8, 0.9) == 0.0
    assert draft_sweep._break_even(1, 1.0) == "-"
    assert draft_sweep._break_even(2, 1.5) == "50%"
    assert draft_sweep._break_even(4, 4.1) == "never"
    assert draft_sweep._break_even(3, 1.0) == "0%"


class Words(ByteTokenizer):
    """Bytes with a chat template that adds nothing."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[0]["content"])


@pytest.fixture
def speaking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A model that answers quickly in the place of the default one."""

    def load(settings: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        config = Qwen3.tiny(vocab_size=264, num_hidden_layers=1, hidden_size=32)
        return random_model(config, device="cpu", dtype=torch.float32), Words()

    for module in (decode, classify):
        monkeypatch.setattr(module, "load", load)
    return lambda: None


def test_classify(speaking: Any) -> None:
    result = run("--classify", "--tokens", "40", "--repeats", "1", "--draft-fixed", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["class"] for row in document["classes"]] == ["structured", "creative", "factual", "code"]
    for row in document["classes"]:
        assert row["equal"] == row["runs"] == sum(row["outputs"].values()) == 2
        assert (row["ok"] or {"runs": 0})["runs"] == row["outputs"].get(OK, 0)
        assert len(row["acceptance_by_position"]) == len(row["drafted_by_position"])
    assert any(row["acceptance"] for row in document["classes"])
    document["classes"][0]["equal"] = 0
    assert "WRONG" in classify.render(document)
    assert not classify.is_good(document)


def test_classify_finds_an_output_that_differs(speaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.engine import sampler

    monkeypatch.setattr(sampler, "_num_equal", lambda draft, tokens: len(draft))  # whatever is drafted stays
    monkeypatch.setattr(classify, "PROMPTS", {"code": classify.PROMPTS["code"]})
    real = sampler._accept

    def swallow(samples: Any, ids: Any, logprobs: Any) -> Any:
        accepted = real(samples, ids, logprobs)
        return {
            chunk: [sampler.Token(i) for i in chunk.draft] + tokens[len(chunk.draft) :]
            for chunk, tokens in accepted.items()
        }

    monkeypatch.setattr(sampler, "_accept", swallow)
    result = run("--classify", "--tokens", "40", "--repeats", "1", "--draft-fixed")
    assert result.exit_code == 1
    assert "WRONG: speculation changed an output" in result.stdout


def test_sweep(speaking: Any) -> None:
    result = run("--sweep", "k=2,4,ngram=1,2", "--tokens", "30", "--repeats", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-3].split() == ["k", "ngram", "1", "ngram", "2"]
    assert [line.split()[0] for line in lines[-2:]] == ["2", "4"]


# ---- what it needs


@pytest.mark.slow
def test_random_weights_need_no_packages_of_checkpoints(shape: str) -> None:
    code = f"""
import sys
for name in ("gguf", "safetensors", "tokenizers", "jinja2", "huggingface_hub"):
    sys.modules[name] = None
from whorl.cli import app
app(["bench", "decode", "--random-config", {shape!r}, "--batch", "1", "--tokens", "2", "--repeats", "1",
     "--device", "cpu"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "of roofline" in done.stdout
