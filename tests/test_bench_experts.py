"""The experts that `whorl bench decode` counts, what it makes of the number, and that its sequences differ."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_steps import run

from whorl.bench import decode, decode_profile, filled_cache, steady_steps
from whorl.bench.decode import DecodeSettings
from whorl.bench.steady_steps import count_experts, expert_figures, expert_layers, time_steps
from whorl.engine import graph_sizes, runner
from whorl.engine.llm import LLM
from whorl.engine.roofline import step_bytes
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import build, random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.nn import Experts

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
    return decode.engine(model, batch, context, settings, **changes), settings


def started(llm: LLM, batch: int = BATCH, context: int = CONTEXT) -> Sequence[Any]:
    return decode.start(llm, llm.model.vocab_size, batch, context, STEPS)


# ---- counting


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


# ---- what is made of the number


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


# ---- steps that are timed


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


# ---- a crowd of strangers


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
