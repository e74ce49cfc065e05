"""`whorl bench decode`: what it reads, fills, counts and refuses, and one run of each of its modes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from mock_model import ByteTokenizer
from typer.testing import CliRunner

from whorl.bench import (
    classify,
    decode_engine,
    decode_report,
    filled_cache,
    step_trace,
)
from whorl.bench.classify import LOW_DIVERSITY, OK
from whorl.bench.decode_engine import DecodeSettings, count_experts, expert_figures, time_steps
from whorl.bench.decode_profile import part_bytes
from whorl.bench.options import DecodeOptions
from whorl.bench.random_config import PRESETS
from whorl.bench.step_trace import Kernel, kernels, segments, with_eager_parts
from whorl.cli import app
from whorl.engine import sampler
from whorl.engine.llm import LLM
from whorl.engine.roofline import num_values, prompt_flops, step_bytes
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import build, random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.llama import Llama
from whorl.models.one_call import OneCall
from whorl.models.qwen3 import Qwen3
from whorl.nn import Experts

SMALL = ("--batch", "1,2", "--tokens", "4", "--repeats", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", *arguments])


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3.tiny(num_experts=8, max_position_embeddings=256) | {"dtype": "float32"}))
    return str(path)


def resolved(shape: str, engine: EngineSettings | None = None, **options: Any) -> DecodeSettings:
    settings = DecodeOptions(random_config=shape, **({"tokens": 4, "batch": "2"} | options))
    return DecodeSettings.resolve(None, settings, engine or EngineSettings(device="cpu"))


# ---- presets


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


def test_products_of_a_prompt_of_the_preset() -> None:
    """Counted by hand: the weights that a token meets, the head once, and half of the square of attention."""
    model = build(PRESETS["Qwen3-30B-A3B"], device="meta", dtype=torch.bfloat16)
    layer = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 2048 * 128 + 8 * 3 * 2048 * 768
    for length in (1, 8192):
        attention = 48 * 4 * 32 * 128 * length * (length + 1) // 2
        assert prompt_flops(model, length) == 2 * (48 * layer * length + 151936 * 2048) + attention


# ---- classes


def test_classes_of_outputs() -> None:
    text = list(range(60))
    assert classify.classify(text) == OK
    assert classify.classify(text + [7] * 24) == "LOOP_1"
    assert classify.classify(text + [7] * 23) == classify.classify([]) == OK
    assert classify.classify(text + [1, 2, 3] * 8 + [1, 2]) == "LOOP_3", "cut anywhere"
    assert classify.classify(text + list(range(30)) * 3) == LOW_DIVERSITY, "three times may be a list"
    assert classify.distinct([1, 1, 2, 2], 1) == classify.distinct([1, 1, 1, 1], 3) == 0.5


# ---- options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 0", "--context is 0, expected numbers such as"),
        ("--context 250 --tokens 8", "exceeds the model's 256 positions"),
        ("--warmup full", "--warmup full: only steps that are warm are timed"),
        ("--profile --pld-k 3", "--pld-k is an option of drafting"),
    ],
)
def test_refusals(shape: str, arguments: str, message: str) -> None:
    result = run("--random-config", shape, *arguments.split())
    assert result.exit_code == 2
    assert message in result.stderr


# ---- timing


def test_decode_of_random_weights_next_to_a_peer(shape: str) -> None:
    more = ("--prompt-tokens", "40", "--peer", "transformers", "--json")
    document = json.loads(run("--random-config", shape, *SMALL, *more).stdout)
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


# ---- contexts


def test_a_filled_cache_computes_no_prompt(shape: str) -> None:
    settings = resolved(shape, context="100")
    model: Any = decode_engine.load(settings)[0]
    llm = decode_engine.engine(model, 2, 100, settings)
    lengths: list[int] = []
    real = llm.runner.run_call
    llm.runner.run_call = lambda call: (lengths.append(call.size[0]), real(call))[1]  # type: ignore[method-assign]
    sequences = decode_engine.start(llm, model.vocab_size, 2, 100, 4)
    assert lengths == [2], "the last token of each prompt, at once"
    assert [len(seq.token_ids) for seq in sequences] == [101, 101]
    assert all(bool(cache.k.any()) and bool(cache.k.isfinite().all()) for cache in llm.runner.caches)
    while llm.has_work:
        llm.step()
    assert llm.pool.num_used == 0


# ---- experts

BATCH, CONTEXT, STEPS = 6, 20, 5
SPARSE = Qwen3.tiny(num_experts=16, vocab_size=97)
WIDE = {"n_routed_experts": 64, "n_group": 4, "topk_group": 4, "num_experts_per_tok": 2, "hidden_size": 128}


def filled_engine(
    config: dict[str, Any], batch: int = BATCH, context: int = CONTEXT, **changes: Any
) -> tuple[LLM, DecodeSettings]:
    kv_cache_dtype = changes.pop("kv_cache_dtype", "auto")
    options = EngineSettings(device="cpu", kv_cache_dtype=kv_cache_dtype)
    settings = DecodeSettings(name="tiny", engine=options, config=config, contexts=(context,), num_tokens=STEPS)
    with torch.inference_mode():
        model = random_model(config, device="cpu", dtype=torch.float32)
    return decode_engine.engine(model, batch, context, settings, **changes), settings


def started(llm: LLM, batch: int = BATCH, context: int = CONTEXT) -> Sequence[Any]:
    return decode_engine.start(llm, llm.model.vocab_size, batch, context, STEPS)


def test_the_count_is_what_the_ids_of_equal_steps_say(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = filled_engine(SPARSE)
    counted = count_experts(llm, lambda: started(llm), STEPS)
    ids_of: dict[Experts, list[set[int]]] = {layer: [] for layer in counted}
    forward = Experts.forward

    def recording(self: Experts, x: Any, weights: Any, ids: Any) -> Any:
        ids_of[self].append(set(ids.flatten().tolist()))
        return forward(self, x, weights, ids)

    sequences = started(llm)
    monkeypatch.setattr(OneCall, "__call__", lambda self, step, caches: None)  # it calls no layer
    monkeypatch.setattr(Experts, "forward", recording)
    time_steps(llm, sequences, STEPS)
    assert len(counted) == 2
    for layer, all_ids in ids_of.items():
        assert len(all_ids) == STEPS
        assert counted[layer] == sum(map(len, all_ids)) / STEPS
    assert not any(layer._forward_pre_hooks for layer in counted)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_sequence_ends_while_steps_are_timed(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = filled_engine(Llama.tiny(vocab_size=97), run_ahead=ahead)
    used: list[int] = []
    synchronize = decode_engine.devices.synchronize
    monkeypatch.setattr(
        decode_engine.devices, "synchronize", lambda device: (used.append(llm.pool.num_used), synchronize(device))[1]
    )
    for _ in range(2):
        sequences = started(llm)
        before = llm.num_steps
        time_steps(llm, sequences, STEPS)
        assert llm.num_steps - before == STEPS, "as many are launched as are timed"
        assert [seq.num_outputs for seq in sequences] == [1 + STEPS] * BATCH
        assert not llm.has_work
        assert not llm._flights
        assert llm.pool.num_used == 0
    assert min(used) >= BATCH


@pytest.mark.slow
def test_sequences_over_a_cache_of_bytes_choose_different_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes of one sign attention gives all sequences the same output, and they choose the same experts."""

    def figures() -> tuple[float, float]:
        llm, _ = filled_engine(DeepSeek.tiny(**WIDE), 24, 64, kv_cache_dtype="fp8")
        distinct = count_experts(llm, lambda: started(llm, 24, 64), STEPS)
        result = expert_figures(llm.model, 24, distinct)
        return result["distinct_experts"], result["independent_experts"]

    distinct, independent = figures()
    assert distinct > 0.9 * independent
    monkeypatch.setattr(filled_cache, "_SIGN", 0)
    assert figures()[0] < 0.8 * independent


# ---- profiles


def mark(part: str, start: float, end: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"whorl part {part}", "ts": start, "dur": end - start}


def launch(number: int, at: float) -> dict[str, Any]:
    return {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": at, "dur": 1, "args": {"correlation": number}}


def kernel(number: int, name: str, start: float, end: float, cat: str = "kernel") -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start, "dur": end - start, "args": {"correlation": number}}


STEP = [
    mark("step", 0, 100),
    mark("attention", 10, 40),
    mark("qkv product", 12, 20),
    mark("experts", 50, 70),
    mark("head", 80, 85),
]


def test_time_belongs_to_the_innermost_mark() -> None:
    spans = [(piece.start, piece.end, piece.part) for piece in segments(STEP)]
    assert spans == [
        (0, 10, "inputs"),
        (10, 12, "attention"),
        (12, 20, "qkv product"),
        (20, 40, "attention"),
        (40, 50, "other"),
        (50, 70, "experts"),
        (70, 80, "other"),
        (80, 85, "head"),
        (85, 100, "sampling"),
    ]
    second = [event | {"ts": event["ts"] + 100} for event in STEP]  # without a gap between the steps
    assert [piece.part for piece in segments(STEP + second)] == [part for _, _, part in spans] * 2
    assert sum(each.us for each in step_trace.host_parts(STEP + second)) == 200
    ops = [("aten::linear", 12, 18), ("aten::mm", 13, 17), ("aten::softmax", 25, 30), ("aten::argmax", 90, 91)]
    events = STEP + [{"cat": "cpu_op", "name": name, "ts": start, "dur": end - start} for name, start, end in ops]
    assert step_trace.num_calls(events) == {"qkv product": 1, "attention": 1, "sampling": 1}


def test_kernels_belong_to_the_part_that_launched_them() -> None:
    """They run later than their launches, overlap, and one is a copy."""
    events = [
        *STEP,
        *(launch(number, at) for number, at in enumerate((5, 15, 30, 55, 60, 65, 82, 95))),
        kernel(0, "Memcpy HtoD", 200, 210, "gpu_memcpy"),
        kernel(1, "_few_kernel", 210, 230),
        kernel(2, "_decode_kernel", 225, 250),  # began before the one ahead of it had ended
        kernel(3, "_gate_up_few_kernel", 260, 280),
        kernel(4, "_down_few_kernel", 280, 290),
        kernel(5, "_combine_kernel", 290, 295),
        kernel(6, "_few_kernel", 300, 340),
        kernel(7, "_draw_kernel", 340, 342),
        kernel(99, "_unknown", 342, 343),
        kernel(100, "_fold_kernel", 343, 345),  # of a recorded step: without a launch of its own
    ]
    assert kernels(events) == [
        Kernel("Memcpy HtoD", "inputs", 10),
        Kernel("_few_kernel", "qkv product", 20),
        Kernel("_decode_kernel", "attention", 20),
        Kernel("_gate_up_few_kernel", "experts gate/up", 20),
        Kernel("_down_few_kernel", "experts down", 10),
        Kernel("_combine_kernel", "experts combine", 5),
        Kernel("_few_kernel", "head", 40),
        Kernel("_draw_kernel", "sampling", 2),
        Kernel("_unknown", "other", 1),
        Kernel("_fold_kernel", "attention", 2),
    ]


def test_a_replay_takes_the_parts_of_the_launches() -> None:
    eager = [Kernel(name, part, 9.0) for name, part in zip("abacd", ("q", "att", "o", "x", "head"), strict=True)]
    replayed = [Kernel(name, "other", i) for i, name in enumerate("abzacd")]  # one more than was launched
    kernels = with_eager_parts(replayed, eager)
    assert [each.part for each in kernels] == ["q", "att", "other", "o", "x", "head"]
    assert [each.us for each in kernels] == list(range(6)), "times are the replay's own"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_bytes_of_the_parts_are_those_of_the_step(tied: bool, kind: str) -> None:
    make = Llama if kind == "dense" else Qwen3
    changes = {"num_experts": 8} if kind == "experts" else {}
    model = build(make.tiny(tie_word_embeddings=tied, **changes), device="meta", dtype=torch.float32)
    for seen in (set(), {"experts down"}):
        sizes = part_bytes(model, 3, 50, seen)
        assert sum(sizes.values()) == pytest.approx(step_bytes(model, batch=3, context=50))
        assert sizes["attention"] == 3 * 2 * 51 * (2 * 2 * (16 if kind == "experts" else 8) * 4)
        if kind == "experts":
            assert ("experts down" in sizes) == bool(seen)
            assert not seen or sizes["experts gate/up"] == pytest.approx(2 * sizes["experts down"])


def test_a_profile_on_the_host(shape: str) -> None:
    arguments = ["--random-config", shape, "--profile", "--batch", "2", "--context", "40", "--tokens", "16"]
    document = json.loads(run(*arguments, "--json").stdout)
    (profile,) = document["profiles"]
    parts = {row["part"]: row for row in profile["parts"]}
    needed = {"norms", "qkv product", "attention", "output product", "router", "experts", "head", "sampling"}
    assert needed <= set(parts)
    assert profile["how"] == "host"
    assert sum(row["us"] for row in profile["parts"]) == pytest.approx(profile["step_us"])
    assert parts["head"]["us_per_layer"] is None
    assert parts["qkv product"]["us_per_layer"] == pytest.approx(parts["qkv product"]["us"] / 2)
    assert all(parts[part]["launches"] >= 1 for part in needed)
    assert 0 < parts["attention"]["share_of_roofline"] < 1
    text = decode_report.render_profile(document)
    assert "us a layer" in text
    assert "batch 2, 40 keys" in text


# ---- speculation


class Words(ByteTokenizer):
    """Bytes with a chat template that adds nothing."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode(messages[0]["content"])


def speaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a model that answers quickly in the place of the default one."""

    def load(settings: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        config = Qwen3.tiny(vocab_size=264, num_hidden_layers=1, hidden_size=32)
        return random_model(config, device="cpu", dtype=torch.float32), Words()

    monkeypatch.setattr(classify, "load", load)


def test_classify(monkeypatch: pytest.MonkeyPatch) -> None:
    speaking(monkeypatch)
    result = run("--classify", "--tokens", "40", "--repeats", "1", "--draft-fixed", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["class"] for row in document["classes"]] == ["structured", "creative", "factual", "code"]
    for row in document["classes"]:
        assert row["equal"] == row["runs"] == sum(row["outputs"].values()) == 2
        assert (row["ok"] or {"runs": 0})["runs"] == row["outputs"].get(OK, 0)
        assert len(row["acceptance_by_position"]) == len(row["drafted_by_position"])
    assert any(row["acceptance"] for row in document["classes"])
    assert "as plain" in classify.render(document)


def test_classify_finds_an_output_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    speaking(monkeypatch)
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
