"""New weights for a running engine: by which names they come, what is refused, and that nothing old is used again."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from schedules import tiny
from torch import Tensor

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.output import Output
from whorl.engine.sequence import SamplingParams, WeightsError
from whorl.engine.weights.update import UpdateError
from whorl.models.gemma3 import Gemma3
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

PROMPT = list(range(3, 40))
GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
Tensors = dict[str, Tensor]


def engine(model: Any, **changes: Any) -> LLM:
    settings = {"device": "cpu", "num_blocks": 64, "block_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    return LLM(model=model, **{**settings, **changes})


def by_name(model: Any) -> Tensors:
    return {name: place.into.detach().clone() for name, place in nn.destinations(model).items()}


def other(model_class: Any = Qwen3, dtype: torch.dtype = torch.float32, **changes: Any) -> Tensors:
    """Weights that differ from those of `tiny`."""
    tensors = by_name(tiny(model_class, dtype, **changes))
    return {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors.items()}


def said(llm: LLM, prompt: Iterable[int] = PROMPT, params: SamplingParams = GREEDY) -> Output:
    (output,) = llm.generate([list(prompt)], params, progress=False)
    return output


def fresh(tensors: Tensors, model_class: Any = Qwen3, dtype: torch.dtype = torch.float32, **changes: Any) -> LLM:
    """An engine that has had these weights from the start."""
    model = tiny(model_class, dtype, **changes)
    with torch.no_grad():
        for name, place in nn.destinations(model).items():
            place.into.copy_(tensors[name])
    return engine(model)


def same(one: Output, two: Output) -> bool:
    return (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)


def finish(llm: LLM) -> None:
    while llm.may_step:
        llm.step()


MODELS: dict[str, tuple[Any, torch.dtype, dict[str, Any]]] = {
    "llama": (Llama, torch.float32, {}),
    "qwen3_bfloat16": (Qwen3, torch.bfloat16, {}),
    "qwen3_moe": (Qwen3, torch.float32, {"num_experts": 8}),
    "gemma3_tied": (Gemma3, torch.float32, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_updated_engine_is_a_fresh_one(name: str) -> None:
    model_class, dtype, changes = MODELS[name]
    tensors = other(model_class, dtype, **changes)
    llm = engine(tiny(model_class, dtype, **changes))
    before = said(llm)
    assert llm.update_weights(reversed(tensors.items())) == llm.weight_version == "1"
    after, expected = said(llm), said(fresh(tensors, model_class, dtype, **changes))
    assert same(after, expected)
    assert not same(after, before)
    assert (before.weight_versions, after.weight_versions) == ((("0", 0),), (("1", 0),))
    assert llm.update_weights(tensors.items(), version="step 7") == "step 7"


def test_a_prefix_of_old_weights_never_serves_new_ones() -> None:
    llm = engine(tiny(Qwen3))
    said(llm)
    assert said(llm).num_cached > 0
    llm.update_weights(other().items())
    assert said(llm).num_cached == 0
    assert said(llm).num_cached > 0


def stacked(tensors: Tensors, *, transposed: bool = False) -> Tensors:
    """As transformers has experts in memory: one tensor for all of a layer."""
    layers = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in layers:
        count = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in tensors if n.startswith(f"{layer}.experts"))
        get = [
            {key: tensors[f"{layer}.experts.{i}.{key}_proj.weight"] for key in ("gate", "up", "down")}
            for i in range(count)
        ]
        gate_up = torch.stack([torch.cat([each["gate"], each["up"]]) for each in get])
        down = torch.stack([each["down"] for each in get])
        out[f"{layer}.experts.gate_up_proj"] = gate_up.mT if transposed else gate_up
        out[f"{layer}.experts.down_proj"] = down.mT if transposed else down
    return out


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_come_one_by_one_or_all_together(transposed: bool) -> None:
    tensors = other(num_experts=8)
    llm, expected = engine(tiny(Qwen3, num_experts=8)), fresh(tensors, num_experts=8)
    llm.update_weights(stacked(tensors, transposed=transposed).items())
    assert same(said(llm), said(expected))
    name = next(name for name in stacked(tensors) if name.endswith("experts.down_proj"))
    left_out = {n: t for n, t in stacked(tensors).items() if n != name}
    with pytest.raises(UpdateError, match=rf"1 tensors are missing: {name}"):
        llm.update_weights(left_out.items())


def test_a_tied_head_may_come_under_either_name_or_both() -> None:
    tensors = other(Llama, tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    llm, expected = engine(tiny(Llama, tie_word_embeddings=True)), fresh(tensors, Llama, tie_word_embeddings=True)
    rest = {name: tensor for name, tensor in tensors.items() if "embed_tokens" not in name}
    for more in ({"lm_head.weight": embedding}, {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding}):
        llm.update_weights((more | rest).items())
        assert same(said(llm), said(expected))
    with pytest.raises(UpdateError, match="are one matrix here, and came with other values"):
        llm.update_weights((tensors | {"lm_head.weight": embedding + 1}).items())


WRONG = {
    "another shape": (lambda t: t | {"model.norm.weight": torch.ones(31)}, r"1 of another shape: model.norm.weight"),
    "unknown": (lambda t: t | {"model.norm.bias": torch.ones(96)}, r"1 not part of the model: model.norm.bias"),
    "a dtype": (lambda t: t | {"model.norm.weight": torch.ones(96).int()}, "of a dtype that cannot be converted"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tensors_that_do_not_fit_leave_the_old_weights(name: str) -> None:
    change, message = WRONG[name]
    llm = engine(tiny(Qwen3))
    before = said(llm)
    with pytest.raises(UpdateError, match=message):
        llm.update_weights(change(other()).items())
    assert same(said(llm), before)
    assert llm.weight_version == "0"


def test_an_update_that_fails_half_way_is_refused_until_it_is_repaired() -> None:
    tensors = other()
    llm = engine(tiny(Qwen3))
    (running,) = llm.add(PROMPT, GREEDY)
    llm.step()

    def dying() -> Iterable[tuple[str, Tensor]]:
        yield next(iter(tensors.items()))
        raise OSError("the sender is gone")

    update = llm.control.begin()
    update.copy(list(tensors.items())[:3])
    llm.control.fail("the sender is gone")
    assert [delta.finish_reason for delta in llm.step()] == ["abort"]
    assert running.is_finished
    with pytest.raises(WeightsError, match=r"an update failed .the sender is gone.; repair them by a whole update"):
        llm.add(PROMPT, GREEDY)
    with pytest.raises(WeightsError, match="incomplete"):
        llm.update_weights(list(tensors.items())[3:], partial=True)
    with pytest.raises(OSError, match="the sender is gone"):
        llm.update_weights(dying())
    llm.update_weights(tensors.items())
    assert same(said(llm), said(fresh(tensors)))


def test_a_part_of_the_weights_may_change_if_one_says_so() -> None:
    tensors = by_name(tiny(Qwen3))
    llm = engine(tiny(Qwen3))
    norm = {"model.norm.weight": tensors["model.norm.weight"] * 1.5}
    with pytest.raises(UpdateError, match="tensors are missing"):
        llm.update_weights(norm.items())
    llm = engine(tiny(Qwen3))
    llm.update_weights(norm.items(), partial=True)
    assert same(said(llm), said(fresh(tensors | norm)))


def test_two_updates_at_once_are_refused() -> None:
    llm = engine(tiny(Qwen3))
    llm.control.begin()
    with pytest.raises(WeightsError, match="another update is in progress"):
        llm.update_weights(other().items())
    llm.control.fail("given up")
    assert llm.weight_version == "0"
    llm.update_weights(other().items())


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("on_update", ["continue", "restart", "abort"])
def test_a_request_that_spans_an_update_does_what_it_asked_for(on_update: Any, run_ahead: bool) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True, on_update=on_update)
    tensors = other()
    llm = engine(tiny(Qwen3), run_ahead=run_ahead)
    (seq,) = llm.add(PROMPT, params)
    while seq.num_outputs < 5:
        llm.step()
    llm.update_weights(tensors.items())
    first = seq.num_outputs
    finish(llm)
    assert seq.is_finished
    assert llm.pool.num_used == 0
    if on_update == "abort":
        assert (seq.finish_reason, seq.weight_versions) == ("abort", [("0", 0)])
    elif on_update == "restart":
        expected = said(fresh(tensors), PROMPT, params)
        assert (seq.output_ids, seq.weight_versions) == (expected.token_ids, [("1", 0)])
    else:
        assert seq.weight_versions == [("0", 0), ("1", first)]
        # What follows is what the new weights say after these tokens.
        (again,) = fresh(tensors).add(seq.token_ids[: seq.prompt_len], params)
        again.token_ids += seq.output_ids[:first]
        expected_llm = fresh(tensors)
        expected_llm.scheduler.add(again)
        finish(expected_llm)
        assert seq.token_ids == again.token_ids


def test_prompt_scores_are_of_one_version() -> None:
    tensors = other()
    llm = engine(tiny(Qwen3))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (seq,) = llm.add(PROMPT, params)
    llm.step()
    assert 0 < len(seq.prompt_logprobs) < len(PROMPT) - 1
    llm.update_weights(tensors.items())
    finish(llm)
    assert seq.prompt_logprobs == said(fresh(tensors), PROMPT, params).prompt_logprobs


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pauses(mode: Any) -> None:
    llm = engine(tiny(Qwen3))
    expected = said(llm)
    (before,) = llm.add(PROMPT, GREEDY)
    llm.step()
    llm.step()
    llm.step()
    llm.pause(mode)
    (late,) = llm.add(PROMPT[:20], GREEDY)
    finish(llm)
    assert before.finish_reason == {"keep": None, "wait": "length", "abort": "abort"}[mode]
    assert not late.num_outputs
    assert llm.has_work
    assert llm.step() == []
    with pytest.raises(RuntimeError, match="paused; call resume"):
        said(llm)
    llm.abort(llm.add(PROMPT, GREEDY)[0])
    llm.resume()
    finish(llm)
    assert late.finish_reason == "length"
    if mode != "abort":
        assert before.output_ids == expected.token_ids
    assert llm.pool.num_used == 0


def test_quantised_weights_are_not_replaced() -> None:
    llm = engine(tiny(Qwen3))
    layer = next(module for module in llm.model.modules() if isinstance(module, nn.Linear))  # type: ignore[attr-defined]

    class Codes:
        has_weight = False

        def __str__(self) -> str:
            return "codes"

    layer.format = Codes()  # type: ignore[assignment]
    with pytest.raises(UpdateError, match=r"is quantised \(codes\), expected plain weights"):
        llm.update_weights([])
