"""`whorl bench decode`: what it reads, fills, counts and refuses, and one run of each of its modes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from mock_model import ByteTokenizer, MockModel
from typer.testing import CliRunner

from whorl.bench import (
    classify,
    decode_engine,
    decode_peer,
    decode_profile,
    decode_report,
    filled_cache,
    steady_steps,
    step_trace,
)
from whorl.bench.classify import LOW_DIVERSITY, OK, distinct
from whorl.bench.decode_engine import DecodeSettings
from whorl.bench.decode_profile import marked, part_bytes
from whorl.bench.options import DecodeOptions, parse_counts
from whorl.bench.random_config import PRESETS, read_config
from whorl.bench.steady_steps import count_experts, expert_figures, expert_layers, time_steps
from whorl.bench.step_trace import Kernel, kernels, segments, with_eager_parts
from whorl.cli import app
from whorl.engine import graph_sizes, roofline, runner, sampler
from whorl.engine.llm import LLM
from whorl.engine.roofline import num_values, prompt_flops, step_bytes
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import build, random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.llama import Llama
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


def test_counts() -> None:
    assert parse_counts("1,8,64", "--batch") == (1, 8, 64)
    assert parse_counts("1..4", "--batch") == (1, 2, 3, 4)
    for wrong in ("", "a", "0", "1..", "4..1", "1,,2"):
        with pytest.raises(ValueError, match="expected numbers such as"):
            parse_counts(wrong, "--batch")


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


def test_a_device_that_the_profiler_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_profile.devices, "accelerator", lambda device: torch)
    with pytest.raises(ValueError, match="profiler cannot trace npu kernels"):
        decode_profile.need_profiler("npu")
    decode_profile.need_profiler("cuda")


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


@pytest.mark.slow
def test_random_weights_may_be_quantised(shape: str) -> None:
    """Behind the name; a quarter of the bytes, and the embedding, the head and the norms as they are."""
    plain, packed = (
        json.loads(run("--random-config", name, *SMALL, "--json").stdout) for name in (shape, f"{shape}:w4a16")
    )
    assert packed["header"]["weight_bytes"] < plain["header"]["weight_bytes"]
    assert packed["decode"][0]["bytes_per_step"] < plain["decode"][0]["bytes_per_step"]
    with pytest.raises(ValueError, match=r"--random-config is Qwen3-0.6B:w3, expected one of"):
        read_config("Qwen3-0.6B:w3")


def test_a_peer_that_fails_is_reported(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: Any) -> None:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(decode_peer, "_load", fail)
    result = run("--random-config", shape, *SMALL, "--peer", "transformers")
    assert result.exit_code == 0
    assert "transformers: did not run: RuntimeError: no such thing" in result.stdout


@pytest.mark.slow
def test_a_peers_prompt_is_cut_until_it_fits(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, chunks = decode_peer._forward, []

    def forward(model: Any, ids: Any, chunk: int) -> None:
        chunks.append(chunk)
        if chunk > 10:
            raise torch.OutOfMemoryError("CUDA out of memory")
        real(model, ids, chunk)

    monkeypatch.setattr(decode_peer, "_forward", forward)
    monkeypatch.setattr(decode_peer, "LEAST_CHUNK", 8)
    arguments = ["--random-config", shape, *SMALL, "--prompt-tokens", "40", "--peer", "transformers"]
    assert json.loads(run(*arguments, "--json").stdout)["peer_prefill"]["chunk"] == 10
    assert chunks == [40, 20, 10, 10]
    monkeypatch.setattr(decode_peer, "LEAST_CHUNK", 16)
    assert "transformers: did not run: OutOfMemoryError: CUDA out of memory" in run(*arguments).stdout


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


# ---- contexts


@pytest.mark.slow
def test_rows_of_every_context(shape: str) -> None:
    arguments = ["--random-config", shape, "--batch", "1,2", "--context", "5,90", "--tokens", "2", "--repeats", "1"]
    document = json.loads(run(*arguments, "--json").stdout)
    rows = document["decode"]
    assert [(row["context"], row["batch"]) for row in rows] == [(5, 1), (5, 2), (90, 1), (90, 2)]
    per_key = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, channels, bytes
    assert rows[2]["bytes_per_step"] - rows[0]["bytes_per_step"] == 85 * per_key
    assert "keys" in run(*arguments).stdout


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


def test_without_a_context_prompts_are_computed(shape: str) -> None:
    settings = resolved(shape)
    model: Any = decode_engine.load(settings)[0]
    llm = decode_engine.engine(model, 2, decode_engine.CONTEXT, settings)
    assert type(llm.pool).__name__ == "BlockPool"
    assert settings.rows == [(decode_engine.CONTEXT, 2)]


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
    monkeypatch.setattr(Experts, "forward", recording)
    time_steps(llm, sequences, STEPS)
    assert len(counted) == 2
    for layer, all_ids in ids_of.items():
        assert len(all_ids) == STEPS
        assert counted[layer] == sum(map(len, all_ids)) / STEPS
    assert not any(layer._forward_pre_hooks for layer in counted)


def test_steps_of_graphs_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU recorded graphs: their replays call no hook of a module."""
    expected = count_experts(*_counted(filled_engine(SPARSE)[0]), STEPS)
    replays: list[str] = []

    def record(device: str, function: Any, pool: Any = None) -> Any:
        def replay() -> None:
            replays.append("replay")
            layers = [m for m in llm.model.modules() if isinstance(m, Experts)]  # type: ignore[attr-defined]
            hooks = [layer._forward_pre_hooks.copy() for layer in layers]
            for layer in layers:
                layer._forward_pre_hooks.clear()
            function()
            for layer, layer_hooks in zip(layers, hooks, strict=True):
                layer._forward_pre_hooks.update(layer_hooks)

        return replay

    monkeypatch.setattr(runner, "wants_graphs", lambda device, requested: True)
    monkeypatch.setattr(runner, "graph_pool", lambda device: None)
    monkeypatch.setattr(runner, "record_graph", record)
    monkeypatch.setattr(graph_sizes, "PROMPTS", ())  # only decode steps are recorded
    llm, _ = filled_engine(SPARSE)
    time_steps(llm, started(llm), STEPS)
    assert len(replays) == STEPS
    counted = count_experts(*_counted(llm), STEPS)
    assert list(counted.values()) == list(expected.values())
    time_steps(llm, started(llm), STEPS)
    assert len(replays) == 2 * STEPS, "graphs are replayed again"


def _counted(llm: LLM) -> tuple[LLM, Any]:
    return llm, lambda: started(llm)


def test_long_runs_are_counted_here_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_steps, "_COUNTED", 2)
    llm, _ = filled_engine(SPARSE)
    seen: list[int] = []
    eager = llm.runner.eager
    monkeypatch.setattr(llm.runner, "eager", lambda: (seen.append(llm.num_steps), eager())[1])
    count_experts(llm, lambda: started(llm), STEPS)
    assert [step - seen[0] for step in seen] == [0, 2, 4]


def test_a_dense_model_has_none() -> None:
    llm, _ = filled_engine(Llama.tiny(vocab_size=97))
    assert count_experts(llm, lambda: pytest.fail("it started"), STEPS) == {}
    assert expert_figures(llm.model, 4, {}) == {"distinct_experts": None, "independent_experts": None}


def test_bytes_are_those_of_the_counted_experts() -> None:
    model: Any = build(SPARSE, device="meta", dtype=torch.float32)
    layers = expert_layers(model)
    one = sum(p.nbytes for p in layers[0].parameters()) / 16
    none, some = (step_bytes(model, batch=4, distinct=dict.fromkeys(layers, count)) for count in (0.0, 2.5))
    assert some - none == pytest.approx(2 * 2.5 * one)
    estimated = step_bytes(model, batch=4)
    assert estimated - none == pytest.approx(2 * one * 16 * (1 - (7 / 8) ** 4))


def test_results_state_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SPARSE | {"dtype": "float32"}))
    arguments = ["--random-config", str(path), "--batch", "1,6", "--context", "20", "--tokens", "5", "--repeats", "1"]
    document = json.loads(run(*arguments, "--json").stdout)
    model: Any = build(SPARSE, device="meta", dtype=torch.float32)
    one, crowd = document["decode"]
    assert (one["distinct_experts"], one["independent_experts"]) == (2, 2)
    assert crowd["independent_experts"] == pytest.approx(16 * (1 - (7 / 8) ** 6))
    assert 2 < crowd["distinct_experts"] <= 12
    for row in (one, crowd):
        distinct = dict.fromkeys(expert_layers(model), row["distinct_experts"])
        assert row["bytes_per_step"] == pytest.approx(
            step_bytes(model, batch=row["batch"], context=22, distinct=distinct)
        )
    assert f"{crowd['distinct_experts']:.1f} / {crowd['independent_experts']:.1f}" in run(*arguments).stdout


def test_a_profile_has_the_experts_of_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_profile, "count_experts", lambda llm, start, num: dict.fromkeys(layers, 3.0))
    llm, settings = filled_engine(SPARSE)
    layers = expert_layers(llm.model)
    profile = decode_profile._profile(llm.model, llm.model.vocab_size, BATCH, CONTEXT, settings)
    assert profile["distinct_experts"] == 3
    (experts,) = (row for row in profile["parts"] if row["part"] == "experts")
    assert experts["bytes"] == sum(layer.read_bytes(3.0) for layer in layers)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_sequence_ends_while_steps_are_timed(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = filled_engine(Llama.tiny(vocab_size=97), run_ahead=ahead)
    used: list[int] = []
    synchronize = steady_steps.devices.synchronize
    monkeypatch.setattr(
        steady_steps.devices, "synchronize", lambda device: (used.append(llm.pool.num_used), synchronize(device))[1]
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


def test_sequences_say_different_tokens() -> None:
    llm, _ = filled_engine(Qwen3.tiny(num_experts=16, vocab_size=997), 16)
    sequences = started(llm, 16)
    for _ in range(STEPS):
        llm.step()
        assert len({seq.token_ids[-1] for seq in sequences}) > 12


def test_random_packed_weights_have_no_common_mean() -> None:
    config = Llama.tiny(hidden_size=512, intermediate_size=512, num_hidden_layers=1)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    model: Any = random_model(config | {"quantization_config": settings}, device="cpu", dtype=torch.float32)
    layer = model.model.layers[0].mlp.down_proj
    values = layer.format.values(layer).float()
    assert abs(float(values.mean())) < 0.02 * float(values.std())
    assert float(values.std()) == pytest.approx(512**-0.5, rel=0.05)


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


def test_calls_on_the_host_are_counted_once() -> None:
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


def test_replays_are_aligned_step_by_step() -> None:
    eager = [Kernel(name, name.upper(), 1.0) for name in "abcab" * decode_profile._STEPS]
    replayed = [Kernel(name, "other", 2.0) for name in "abcab" * decode_profile._STEPS]
    assert decode_profile._aligned(replayed, eager) == [each._replace(us=2.0) for each in eager]
    assert [each.part for each in decode_profile._aligned(replayed[1:], eager)] == [each.part for each in eager[1:]]


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


def test_marks_are_gone_afterwards() -> None:
    model: Any = random_model(Qwen3.tiny(num_experts=8), device="cpu", dtype=torch.float32)
    with marked(model):
        assert "logits" in vars(model)
        assert model.model.layers[0].self_attn._forward_hooks
    assert "logits" not in vars(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_profile_on_the_host(shape: str) -> None:
    arguments = ["--random-config", shape, "--profile", "--batch", "2", "--context", "40", "--tokens", "16"]
    document = json.loads(run(*arguments, "--json").stdout)
    (profile,) = document["profiles"]
    parts = {row["part"]: row for row in profile["parts"]}
    needed = {"norms", "qkv product", "attention", "output product", "router", "experts", "head", "sampling"}
    assert needed <= set(parts)
    assert profile["how"] == "host"
    assert sum(row["us"] for row in profile["parts"]) == pytest.approx(profile["step_us"])
    layers = {part: row["us_per_layer"] for part, row in parts.items()}
    assert layers["head"] is None
    assert layers["qkv product"] == pytest.approx(parts["qkv product"]["us"] / 2)
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
    document["classes"][0]["equal"] = 0
    assert "WRONG" in classify.render(document)
    assert not classify.is_good(document)


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
