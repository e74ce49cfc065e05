"""`whorl bench decode` with --context, --profile and --first: what it fills, whose a kernel is, what is late."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from whorl.bench import decode, decode_command, decode_profile, decode_profile_report, first_steps, step_trace
from whorl.bench.decode import DecodeSettings
from whorl.bench.decode_options import DecodeOptions
from whorl.bench.decode_profile import marked, part_bytes
from whorl.bench.step_trace import Kernel, kernels, segments, with_eager_parts
from whorl.cli import app
from whorl.engine.drafting import DraftOptions
from whorl.engine.roofline import step_bytes
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import build, random_model
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "decode", "--device", "cpu", *arguments])


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(Qwen3.tiny(num_experts=8, max_position_embeddings=256) | {"dtype": "float32"}))
    return str(path)


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


def settings(shape: str, **changes: Any) -> DecodeSettings:
    options = {"num_tokens": 4, "batch": "2", "engine": EngineSettings(device="cpu")}
    return DecodeSettings.resolve(random_config=shape, **(options | changes))


def test_a_filled_cache_computes_no_prompt(shape: str) -> None:
    resolved = settings(shape, context="100")
    model: Any = decode.load(resolved)[0]
    llm = decode.engine(model, 2, 100, resolved)
    lengths: list[int] = []
    real = llm.runner.run_call
    llm.runner.run_call = lambda call: (lengths.append(call.size[0]), real(call))[1]  # type: ignore[method-assign]
    sequences = decode.start(llm, model.vocab_size, 2, 100, 4)
    assert lengths == [2], "the last token of each prompt, at once"
    assert [len(seq.token_ids) for seq in sequences] == [101, 101]
    assert all(bool(cache.k.any()) and bool(cache.k.isfinite().all()) for cache in llm.runner.caches)
    while llm.has_work:
        llm.step()
    assert llm.pool.num_used == 0


def test_without_a_context_prompts_are_computed(shape: str) -> None:
    resolved = settings(shape)
    model: Any = decode.load(resolved)[0]
    llm = decode.engine(model, 2, decode.CONTEXT, resolved)
    assert type(llm.pool).__name__ == "BlockPool"
    assert resolved.rows == [(decode.CONTEXT, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--context 0", "--context is 0, expected numbers such as"),
        ("--context 250 --tokens 8", "exceeds the model's 256 positions"),
        ("--context 20 --verify", "--context 20 does not apply to --verify"),
        ("--profile --first", "give only one of --profile and --first"),
        ("--warmup full", "--warmup full needs --first"),
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
    text = decode_profile_report.render(document)
    assert "us a layer" in text
    assert "batch 2, 40 keys" in text


# ---- a start


def test_a_start_phase_by_phase(shape: str) -> None:
    sizes = ["--random-config", shape, "--batch", "3", "--context", "30", "--tokens", "5", "--prompt-tokens", "16"]
    result = run(*sizes, "--first", "--warmup", "full", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    phases = {row["phase"]: row["seconds"] for row in document["phases"]}
    for phase in ("weights", "cache and runner", "warm-up: record", "warm-up: compile", "warm-up: sample"):
        assert phases[phase] >= 0
    assert document["warmup"] == "full"
    load = document["load"]
    assert (load["requests"], load["late_steps"]) == (6, 0)
    assert load["steps"] > 5
    text = first_steps.render(document)
    assert "total" in text
    document["load"]["late_steps"] = 1
    assert not first_steps.is_good(document)
    assert first_steps.is_good(document | {"warmup": "short"})


def test_what_is_done_late_is_seen(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU recorded graphs, and nothing had been warmed up."""
    from whorl.engine import runner

    monkeypatch.setattr(runner, "record_graph", lambda device, function, pool=None: function)
    monkeypatch.setattr(runner, "wants_graphs", lambda device, requested: True)
    resolved = settings(shape, batch="3", context="30", num_tokens=5, prompt_tokens=16)
    off = first_steps.run(resolved)
    assert off["warmup"] == "off"
    assert off["load"]["late_steps"] > 0
    assert any("graphs" in what for step in off["load"]["slow"] for what in step["late"])
    engine = resolved.engine.changed(warmup="full")
    warm = first_steps.run(settings(shape, batch="3", context="30", num_tokens=5, prompt_tokens=16, engine=engine))
    assert warm["load"]["late_steps"] == 0


def test_what_the_host_does_beside_is_said() -> None:
    before = first_steps.HostWork(allocations=3, retries=0, collections=5, reserved_bytes=2**20)
    now = first_steps.HostWork(allocations=5, retries=1, collections=6, reserved_bytes=3 * 2**20)
    said = "2 allocations from the driver (+2 MiB)", "1 of them after cached memory", "1 full garbage collections"
    assert all(
        text.startswith(start) for text, start in zip(first_steps._new_host_work(before, now), said, strict=True)
    )
    assert first_steps._new_host_work(now, now) == []
    gc.collect()
    assert first_steps.host_work("cpu").collections > 0


def test_every_mode_has_its_work(shape: str) -> None:
    for mode in ("profile", "first"):
        options = DecodeOptions(random_config=shape, **{mode: True})
        assert callable(decode_command.build_benchmark(None, options, EngineSettings(device="cpu"), DraftOptions()))
