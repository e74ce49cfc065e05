"""LoRA for each request: logits of a merged model, neighbours, caches, slots and faults."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from lora_files import merge, write_adapter
from mock_model import alone, record
from one_sequence import close
from schedules import compare, random_settings, requests, run_at_random, tiny
from vision import expand, item

from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.weights import load_model, random_model
from whorl.models.deepseek import DeepSeek
from whorl.models.qwen3 import Qwen3
from whorl.models.qwen3_5 import Qwen3_5Text
from whorl.models.qwen3_vl import Qwen3VL
from whorl.nn.weights.dense import DENSE

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "dense": (Qwen3, {}, LINEAR),
    "experts": (
        Qwen3,
        {"num_experts": 4},
        ("q_proj", "o_proj", "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "latent": (DeepSeek, {}, ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "wk", "mlp.experts.down_proj")),
    "delta": (Qwen3_5Text, {}, ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj")),
    "head": (Qwen3, {}, ("lm_head",)),
    "tied": (Qwen3, {"tie_word_embeddings": True}, ("lm_head",)),
}
PROMPT = [(7 * i + 3) % 89 + 1 for i in range(21)]


def built(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    model_class, changes, _ = KINDS[kind]
    torch.manual_seed(0)
    return tiny(model_class, dtype, **changes)


def untied(kind: str) -> Any:
    """The model with a head of its own: an adapter of a tied head does not update the embedding."""
    if kind != "tied":
        return built(kind)
    model = built("head")
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def engine(model: Any, **changes: Any) -> LLM:
    return LLM(model=model, device="cpu", block_size=4, num_blocks=64, max_num_seqs=4, **changes)


def logits_of(llm: LLM, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    recorded = record(llm)
    (seq,) = llm.add(prompt, params)
    while llm.has_work:
        llm.step()
    return torch.stack([recorded[seq.id][place] for place in range(seq.num_outputs)])


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_model(kind: str, tmp_path: Path) -> None:
    model = built(kind)
    folder = write_adapter(tmp_path / "a", model, KINDS[kind][2])
    llm = engine(model, lora={"a": str(folder)})
    plain = logits_of(llm, PROMPT, SamplingParams(**GREEDY))
    actual = logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY))
    expected = logits_of(engine(merge(untied(kind), folder)), PROMPT, SamplingParams(**GREEDY))
    close(actual[0], expected[0])
    assert float((actual[0] - plain[0]).abs().max()) > 1e-2, "the adapter changes nothing"
    assert torch.equal(plain, logits_of(engine(built(kind)), PROMPT, SamplingParams(**GREEDY))), "the base has changed"


@pytest.mark.parametrize("kind", ["dense", "experts", "latent"])
@pytest.mark.parametrize("seed", range(2))
def test_bits_do_not_depend_on_neighbours(kind: str, seed: int, tmp_path: Path) -> None:
    """Nor on the schedule, on which slot an adapter has, on others being there, nor on prefixes of other adapters."""
    model, rng = built(kind), random.Random(seed)
    folders = {
        name: str(write_adapter(tmp_path / name, model, KINDS[kind][2], seed=i, rank=rank))
        for i, (name, rank) in enumerate((("a", 4), ("b", 8)))
    }
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "lora": lora} if i % 2 else {"temperature": 1.0, "seed": 3, "lora": lora}
        for i, lora in enumerate((None, "a", "b", None, "a"))
    ]
    chosen = list(requests(rng, model.vocab_size, kinds, fewest=4))
    plain = []
    for prompt, params in chosen:
        name = params.lora
        plain.append(alone(model, None, prompt, params, lora={} if name is None else {name: folders[name]}))
    llm = LLM(model=model, settings=random_settings(rng, seqs=4, block_size=4), lora=folders)
    recorded = record(llm)
    for index, seq in run_at_random(rng, llm, chosen):
        compare(*plain[index], seq, recorded.get(seq.id, {}))


# ---- a vision tower


SEEING = ("q_proj", "o_proj", "attn.qkv", "attn.proj", "mlp.linear_fc2", "merger.linear_fc1")


def test_an_adapter_of_the_tower_is_part_of_an_image(tmp_path: Path) -> None:
    """Its features are the merged tower's, and no other request gets them."""

    def seeing() -> Any:
        torch.manual_seed(0)
        return random_model(Qwen3VL.tiny(), device="cpu", dtype=torch.float32)

    folder = write_adapter(tmp_path / "a", seeing(), SEEING)
    ids, media = expand([5, 81, 2, item(0, (1, 4, 6)), 3, 4])
    plain, adapted = SamplingParams(**GREEDY), SamplingParams(lora="a", **GREEDY)

    def logits(llm: LLM, *all_params: SamplingParams) -> list[torch.Tensor]:
        recorded = record(llm)
        sequences = [llm.add(ids, params, media=media)[0] for params in all_params]
        while llm.has_work:
            llm.step()
        return [torch.stack([recorded[seq.id][i] for i in range(seq.num_outputs)]) for seq in sequences]

    (base,) = logits(engine(seeing()), plain)
    (merged,) = logits(engine(merge(seeing(), folder)), plain)
    llm = engine(seeing(), lora={"a": str(folder)})
    together = logits(llm, adapted, plain, adapted)
    close(together[0][0], merged[0])
    assert torch.equal(together[1], base)
    assert torch.equal(together[2], together[0])
    assert llm.encoder is not None
    assert llm.encoder.num_encoded == 2, "one image, with and without the adapter"


# ---- quantised bases


@pytest.mark.parametrize("quantize", ["w4a16", "w8a8", "fp8"])
def test_quantised_bases(quantize: Any, tmp_path: Path) -> None:
    (path,) = write_checkpoints(tmp_path, {"m": Qwen3.tiny(hidden_size=128, intermediate_size=128)}).values()

    def load(**options: Any) -> Any:
        return load_model(path, device="cpu", dtype="float32", quantize=quantize, progress=False, **options)

    model = load(unpack=False)
    assert model.model.layers[0].self_attn.o_proj.format != DENSE
    folder, zero = (write_adapter(tmp_path / str(scale), model, LINEAR, scale=scale) for scale in (1.0, 0.0))
    llm = engine(model, lora={"a": str(folder), "zero": str(zero)})
    plain, actual, same = (logits_of(llm, PROMPT, SamplingParams(lora=n, **GREEDY)) for n in (None, "a", "zero"))
    assert torch.equal(same, plain)
    assert float((actual[0] - plain[0]).abs().max()) > 1e-2
    if quantize == "w4a16":  # its products are those of the values, so these can be merged
        expected = logits_of(engine(merge(load(unpack=True), folder)), PROMPT, SamplingParams(**GREEDY))
        close(actual[0], expected[0])


# ---- names, slots and faults


def test_names_slots_and_versions(tmp_path: Path) -> None:
    model = built("dense")
    folders = {name: write_adapter(tmp_path / name, model, LINEAR, seed=i) for i, name in enumerate("abc")}
    llm = engine(model, max_loras=2)
    with pytest.raises(ValueError, match=r"lora: no adapter is named 'a'; none is loaded"):
        llm.add(PROMPT, SamplingParams(lora="a"))
    first = llm.load_lora("a", folders["a"])
    before = logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY))
    with pytest.raises(ValueError, match=r"lora: 'a' is loaded, from .*; unload it, or replace it"):
        llm.load_lora("a", folders["b"])
    (running,) = llm.add(PROMPT, SamplingParams(lora="a", max_tokens=20, temperature=0, ignore_eos=True))
    llm.step()
    second = llm.load_lora("a", folders["b"], replace=True)
    assert (first.slot, second.slot) == (0, 1)
    with pytest.raises(ValueError, match=r"all 2 slots are taken, by a, 1 unloaded ones are still used; .*--max-loras"):
        llm.load_lora("c", folders["c"])
    other = logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY))
    assert running.is_finished
    assert running.output_ids[: len(before)] == before.argmax(-1).tolist(), "it began with the old version"
    assert not torch.equal(other, before)
    assert llm.load_lora("c", folders["c"]).slot == 0
    llm.unload_lora("a")
    assert torch.equal(logits_of(llm, PROMPT, SamplingParams(lora=None, **GREEDY)), _base(model))
    llm.load_lora("a", folders["a"])
    assert torch.equal(logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY)), before)
    with pytest.raises(ValueError, match="no adapter is named 'b'; loaded are c, a"):
        llm.unload_lora("b")


def _base(model: Any) -> torch.Tensor:
    return logits_of(engine(model), PROMPT, SamplingParams(**GREEDY))


def test_scores_of_a_prompt_are_the_adapters(tmp_path: Path) -> None:
    """Those are computed outside of a call; the head has an update."""
    model = built("head")
    folder = write_adapter(tmp_path / "a", model, ("lm_head", "q_proj"))
    llm = engine(model, lora={"a": str(folder)})
    expected_llm = engine(merge(built("head"), folder))
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}
    ours, theirs = (
        [
            one.logprob
            for one in each.generate(PROMPT, SamplingParams(**options, **more), progress=False)[0].prompt_logprobs
        ]
        for each, more in ((llm, {"lora": "a"}), (expected_llm, {}))
    )
    close(torch.tensor(ours), torch.tensor(theirs))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"hidden_size": 64}, r"_proj is updated as \[\d+, 64\], expected \[\d+, 96\]"),
    "depth": (
        {"num_hidden_layers": 3},
        r"the model cannot update model\.layers\.2\.\S+ for each request: it has no such",
    ),
    "shallow": (
        {"num_hidden_layers": 1},
        r"its config names model\.layers\.1\.self_attn\.q_proj, .*which the file does not",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_of_another_model_is_refused(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    folder = write_adapter(
        tmp_path / "a",
        random_model(Qwen3.tiny(**SIZES | changes), device="cpu", dtype=torch.float32),
        ("q_proj", "k_proj"),
        target_modules=["q_proj", "k_proj"],  # as PEFT writes them: of any layer
    )
    llm = engine(built("dense"))
    with pytest.raises(ValueError, match=message):
        llm.load_lora("a", folder)
    assert not llm.adapters.by_name
    assert not llm.adapters.low_ranks.slots


SIZES = {"hidden_size": 96, "intermediate_size": 160}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 5}, r"A is \[4, 96\] and B \[64, 4\], expected rank 5"),
    "no-number": ({"lora_alpha": "much"}, "lora_alpha is 'much', expected a number"),
    "no-regex": ({"target_modules": "(q_proj"}, "target_modules is .*, which is no regular expression"),
    "not-named": ({"target_modules": ["k_proj"]}, "the file updates .*q_proj, which its config does not name"),
    "from-the-future": ({"use_warp_lora": True}, "use_warp_lora: not known"),
    "bias": ({"bias": "all"}, "bias is 'all', which is not served: it changes biases of the base"),
    "method": ({"peft_type": "IA3"}, "peft_type is 'IA3', which is not served"),
    "init": ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16', which changes the base"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_config_that_cannot_be_served_is_refused(fault: str, tmp_path: Path) -> None:
    fields, message = BROKEN[fault]
    model = built("dense")
    folder = write_adapter(tmp_path / "a", model, ("q_proj",))
    values = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(values | fields))
    with pytest.raises(ValueError, match=message):
        engine(model, lora={"a": str(folder)})


def test_a_warm_up_runs_steps_with_adapters(tmp_path: Path) -> None:
    """They change no sequence, and their adapters are those of nobody."""
    model = built("dense")
    folder = write_adapter(tmp_path / "a", model, LINEAR)
    expected = logits_of(engine(model, lora={"a": str(folder)}), PROMPT, SamplingParams(lora="a", **GREEDY))
    llm = engine(model, lora={"a": str(folder)})
    adapted: list[bool] = []
    run_call = llm.runner.run_call
    llm.runner.run_call = lambda call, *rest: adapted.append(call.is_adapted) or run_call(call, *rest)  # type: ignore
    llm.warm_up("short", progress=False)
    llm.runner.run_call = run_call  # type: ignore[method-assign]
    assert True in adapted
    assert False in adapted
    assert torch.equal(logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY)), expected)


def test_a_model_of_transformers_code_takes_adapters(tmp_path: Path) -> None:
    """Whatever is a linear layer of whorl there, under the names of its checkpoint."""
    config = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "vocab_size": 97, "hidden_size": 32}
    config |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

    def other() -> Any:
        return random_model(config | {"max_position_embeddings": 256}, device="cpu", dtype=torch.float32)

    folder = write_adapter(tmp_path / "a", other(), ("q_proj", "o_proj", "down_proj"))
    expected = logits_of(engine(merge(other(), folder)), PROMPT, SamplingParams(**GREEDY))
    llm = engine(other(), lora={"a": str(folder)})
    close(logits_of(llm, PROMPT, SamplingParams(lora="a", **GREEDY))[0], expected[0])
