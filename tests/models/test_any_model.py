"""Models that run through transformers' own code: equal to transformers, and one arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from lora_files import merge, write_adapter
from one_sequence import PROMPT, Runner, close
from test_models import ROPES, hf_greedy, hf_logits, save
from test_one_arithmetic import SAMPLED, decoded, engine, prefilled
from torch import Tensor

from whorl import nn
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import build, load_model
from whorl.judge import judge
from whorl.models import BACKEND, find
from whorl.models.any_model import AnyModel, row_invariant
from whorl.models.qwen3 import Qwen3

# Odd sizes: a row ends anywhere in a vector of the CPU.
TINY = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {**TINY, "hidden_size": 96, "intermediate_size": 164}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24, "head_dim": 16}
SHARED = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROPE = {"rope_theta": 10000.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 4}),
    "granite": ("GraniteForCausalLM", GRANITE),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
    "cohere": ("CohereForCausalLM", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2ForCausalLM", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 9, "tie_word_embeddings": False, **GEMMA2}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 9, "use_bias": True, "tie_word_embeddings": False}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, **SHARED}),
    "olmoe": ("OlmoeForCausalLM", EXPERTS),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "stablelm": ("StableLmForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 8}),
    "nemotron": ("NemotronForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 40, "ffn_dim": 51}),
    "phi": ("PhiForCausalLM", {"hidden_size": 48}),
    "granitemoe": ("GraniteMoeForCausalLM", {"num_local_experts": 4, **GRANITE}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {"hidden_size": 32, "original_max_position_embeddings": 128, "rope_parameters": {**ROPE, **ROPES["longrope"]}},
    ),
    "olmo2-dynamic": ("Olmo2ForCausalLM", {"rope_parameters": {**ROPE, **ROPES["dynamic"]}}),
}
NAMED = list(FAMILIES)[: list(FAMILIES).index("olmoe") + 1]  # those that the others are like
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in NAMED]


def config_of(name: str, sizes: dict[str, Any] = TINY) -> dict[str, Any]:
    architecture, changes = FAMILIES[name]
    wide = {key: sizes["hidden_size"] for key in ("word_embed_proj_dim",) if key in changes}
    model_type = name.partition("-")[0]
    return {"architectures": [architecture], "model_type": model_type, **sizes, **changes, **wide}


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, **{"device": "cpu", "dtype": "float32", "progress": False, **options})


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """40 greedy steps: the tokens are equal, and the logits of every step are close."""
    config = config_of(name)
    hf = save(tmp_path, config)
    hf.set_attn_implementation("eager")  # transformers 5.17 drops Gemma 2's softcap otherwise
    length = 128 if name == "phi3-longrope" else None  # frequencies are those of the longest sequence
    model = load(tmp_path, max_model_len=length)
    assert isinstance(model, AnyModel)
    expected, expected_tokens = hf_greedy(hf, PROMPT, 40)
    logits, tokens = Runner(model).greedy(PROMPT, 40)
    assert hf.config.tie_word_embeddings or len(set(tokens)) > 4, "the random model says too little to compare"
    assert tokens == expected_tokens
    close(logits, expected)


@pytest.mark.parametrize("rope", ["yarn", "llama3", "linear"])
def test_rotations_equal_transformers(rope: str, tmp_path: Path) -> None:
    config = config_of("olmo2-dynamic") | {"rope_parameters": {**ROPE, **ROPES[rope]}}
    hf = save(tmp_path, config)
    close(Runner(load(tmp_path)).run(PROMPT), hf_logits(hf, PROMPT))


@pytest.mark.parametrize("name", ["phi3-longrope", "olmo2-dynamic"])
def test_long_frequencies_are_those_of_max_length(name: str, tmp_path: Path) -> None:
    """Of a sequence past the length that the frequencies change at, and of its beginning."""
    config = config_of(name) | {"max_position_embeddings": 40}
    if name == "phi3-longrope":
        config |= {"original_max_position_embeddings": 20}
        config["rope_parameters"] = {**config["rope_parameters"], "original_max_position_embeddings": 20}
    hf = save(tmp_path, config)
    prompt = (PROMPT * 3)[:60]
    model = load(tmp_path, max_model_len=60)
    close(Runner(model).run(prompt), hf_logits(hf, prompt))
    close(Runner(model).run(prompt[:10]), hf_logits(hf, prompt)[:10])


def test_windows_are_what_the_mask_means(tmp_path: Path) -> None:
    """Also ones as long as no sequence of a test, and none where the mask has none."""
    for window, expected in ((9, 9), (32768, 32768), (None, None)):
        config = {**config_of("starcoder2"), "sliding_window": window, "max_position_embeddings": 65536}
        assert [spec.window for spec in build(config, device="meta", dtype=torch.float32).cache_specs()] == [
            expected
        ] * 2
    config = {**config_of("olmoe"), "sliding_window": 9}  # transformers' mask of OLMoE has no window
    assert build(config, device="meta", dtype=torch.float32).cache_specs()[0].window is None


@pytest.mark.sampled("dtype", keep=2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*NAMED, *OTHERS])
def test_one_arithmetic(name: str, dtype: str, tmp_path: Path) -> None:
    """Decoded among others, in chunks, alone, and sent back as a prompt: the same bits."""
    save(tmp_path, config_of(name, WIDE))
    llm = engine(load(tmp_path, dtype=dtype))
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    prompts = [PROMPT[:n] for n in (1, 5, 12, 21)]
    outputs = llm.generate(prompts, params, progress=False)
    for output in outputs:
        assert decoded(output) == prefilled(llm, output)
    alone = engine(llm.model, max_num_seqs=1, max_num_batched_tokens=7)
    (output,) = alone.generate([prompts[3]], params, progress=False)
    assert (output.token_ids, decoded(output)) == (outputs[3].token_ids, decoded(outputs[3]))


# ---- in the engine


def test_the_prefix_cache_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, config_of("gemma2", WIDE))
    llm = engine(load(tmp_path))
    (first,) = llm.generate([PROMPT], SAMPLED, progress=False)
    history = first.prompt_ids + first.token_ids
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0)
    (again,) = llm.generate([[*history, 5, 6, 7]], params, progress=False)
    assert again.num_cached == (len(history) - 1) // 8 * 8
    (fresh,) = engine(llm.model).generate([[*history, 5, 6, 7]], params, progress=False)
    assert (again.token_ids, decoded(again)) == (fresh.token_ids, decoded(fresh))


def test_elementwise_functions_of_torch_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the last elements of a call have other bits, and which these are depends on the number of tokens."""
    save(tmp_path, config_of("granite", WIDE))
    llm = engine(load(tmp_path))
    monkeypatch.setattr(row_invariant, "ELEMENTWISE", {})
    outputs = llm.generate([PROMPT[:n] for n in (1, 5, 12)], SAMPLED, progress=False)
    assert any(decoded(output) != prefilled(llm, output) for output in outputs)


def test_products_have_row_invariant_forms() -> None:
    """A product as a router has it, of each row alone and of all; torch's own differ."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 576), torch.randn(1536, 576), torch.randn(1536)
    gold = x.double() @ weight.double().t()
    forms = {
        "linear": lambda x: torch.nn.functional.linear(x, weight, bias),
        "matmul": lambda x: x @ weight.t(),
        "addmm": lambda x: torch.addmm(bias, x, weight.t()),
    }
    for name, form in forms.items():
        with row_invariant.RowInvariant():
            together, alone = form(x), torch.cat([form(row) for row in x.split(1)])
        assert torch.equal(together, alone), name
        # Torch's library sums in another order on every kind of CPU: what both owe is the rule against fp64.
        assert (problem := judge([together], [form(x)], [gold + (name != "matmul") * bias]).problem) is None, problem
        assert not torch.equal(form(x), torch.cat([form(row) for row in x.split(1)])), name


@pytest.mark.parametrize(
    "function",
    [torch.sigmoid, torch.tanh, torch.nn.functional.silu, torch.nn.functional.gelu, torch.nn.functional.softplus],
)
def test_elementwise_functions_have_row_invariant_forms(function: Any) -> None:
    x = torch.randn(10007, generator=torch.Generator().manual_seed(0)) * 4
    with row_invariant.RowInvariant():
        whole = function(x)
        for start in range(0, 40, 3):
            assert torch.equal(function(x[start : start + 7].clone()), whole[start : start + 7])
    torch.testing.assert_close(whole, function(x))


def test_an_8_bit_cache_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(tmp_path, config_of("cohere2", WIDE))
    llm = engine(load(tmp_path), kv_cache_dtype="int8")
    (output,) = llm.generate([PROMPT], SAMPLED, progress=False)
    assert decoded(output) == prefilled(llm, output)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("granite", ("q_proj", "o_proj", "up_proj")),
        ("mixtral", ("v_proj", "experts.gate_up_proj", "experts.down_proj")),
    ],
)
def test_adapters_give_the_logits_of_a_merged_model(name: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path / "model", config_of(name, WIDE))
    model = load(tmp_path / "model")
    folder = write_adapter(tmp_path / "adapter", model, kinds)
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    llm = engine(model, lora={"a": str(folder)})
    (plain,) = llm.generate([PROMPT], SamplingParams(**params), progress=False)
    (output,) = llm.generate([PROMPT], SamplingParams(lora="a", **params), progress=False)
    merged = engine(merge(load(tmp_path / "model"), folder))
    (expected,) = merged.generate([PROMPT], SamplingParams(**params), progress=False)
    assert output.token_ids == expected.token_ids
    torch.testing.assert_close(torch.tensor(decoded(output)), torch.tensor(decoded(expected)), rtol=1e-3, atol=1e-4)
    assert decoded(output) != decoded(plain), "the adapter changes nothing"


def test_drafts_change_no_bit(tmp_path: Path) -> None:
    save(tmp_path, config_of("gemma2", WIDE))
    model = load(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
    (plain,) = engine(model).generate([PROMPT[:4] * 6], params, progress=False)
    llm = engine(model, speculate=PromptLookup())
    (drafted,) = llm.generate([PROMPT[:4] * 6], params, progress=False)
    assert (drafted.token_ids, decoded(drafted)) == (plain.token_ids, decoded(plain))
    assert llm.stats()["num_accepted"] > 0


def test_weights_rounded_while_they_are_read(tmp_path: Path) -> None:
    save(tmp_path, config_of("granite", {**WIDE, "hidden_size": 128, "intermediate_size": 192}))
    rounded, plain = (Runner(load(tmp_path, quantize=scheme)).run(PROMPT) for scheme in ("w8a8", None))
    error = float((rounded - plain).norm() / plain.norm())
    assert 1e-4 < error < 0.3, error


# ---- the way that is chosen


def test_a_native_model_by_transformers_code(tmp_path: Path) -> None:
    """Chosen by the option, with the tokens of whorl's own file."""
    hf = save(tmp_path, Qwen3.tiny())
    native, through = load(tmp_path), load(tmp_path, backend="transformers")
    assert isinstance(native, Qwen3)
    assert isinstance(through, AnyModel)
    results = [Runner(model).greedy(PROMPT, 12) for model in (native, through)]
    assert results[0][1] == results[1][1]
    close(*(logits for logits, _ in results))
    close(results[1][0][: len(PROMPT)], hf_logits(hf, PROMPT))


def test_native_alone_refuses_what_has_no_file(tmp_path: Path) -> None:
    save(tmp_path, config_of("granite"))
    with pytest.raises(ValueError, match=r"architectures is \['GraniteForCausalLM'\]; known are"):
        load(tmp_path, backend="native")


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """A name in auto_map is ignored; the class is transformers' own."""
    save(tmp_path, config_of("granite"))
    text = (tmp_path / "config.json").read_text()
    names = {"AutoConfig": "stolen.Config", "AutoModelForCausalLM": "stolen.Model"}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(text) | {"auto_map": names}))
    (tmp_path / "stolen.py").write_text("raise SystemExit('code of a checkpoint ran')")
    assert isinstance(load(tmp_path), AnyModel)
    unknown = json.loads(text) | {"auto_map": names, "model_type": "stolen", "architectures": ["Stolen"]}
    with pytest.raises(ValueError, match="has no model_type 'stolen'"):
        find(unknown)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "falcon": ("FalconForCausalLM", {}, "does not ask transformers' attention interface"),
    "gptj": ("GPTJForCausalLM", {}, "does not ask transformers' attention interface"),
    "bloom": ("BloomForCausalLM", {}, "without transformers' attention interface"),
    "mpt": ("MptForCausalLM", {}, "MptModel: its forward fails in a trial"),
    "mamba": ("MambaForCausalLM", {}, "layers of linear_attention, which keep a state"),
    "jamba": ("JambaForCausalLM", {}, "layers of linear_attention, which keep a state"),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"]},
        "layers of conv, which keep a state of their own",
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}, "heads of 192 channels for queries and of 128 for values"),
    "bart": ("BartForCausalLM", {}, "cross attention"),
    "diffllama": ("DiffLlamaForCausalLM", {}, "calls attention twice"),
    "llava": ("LlavaForConditionalGeneration", {}, "has no causal language model"),
    "granite": ("GraniteForCausalLM", {"hidden_act": "nothing"}, "transformers cannot build it: KeyError"),
}


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_which_way_was_tried_and_why_it_ended(name: str) -> None:
    architecture, changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match="Through transformers' code: ") as error:
        find({"architectures": [architecture], "model_type": name, **TINY, **changes})
    message = str(error.value)
    assert reason in message
    assert "What you can do" in message


def test_an_unknown_argument_of_the_attention_call() -> None:
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **TINY, BACKEND: "transformers"}
    with pytest.raises(
        ValueError, match="backend is transformers: GptOssAttention calls attention with s_aux, which is"
    ):
        find(config)


def test_a_gguf_file_is_not_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="which takes safetensors, and this is a GGUF file"):
        load(tmp_path / "a.gguf", backend="transformers")


def test_sequences_longer_than_the_model_was_made_for(tmp_path: Path) -> None:
    save(tmp_path, config_of("granite"))
    with pytest.raises(ValueError, match="sequences of 300 tokens are too long: the model was made for 256"):
        load(tmp_path, max_model_len=300)


# ---- several ranks


def on_a_rank(paths: dict[str, Path]) -> dict[str, Tensor]:
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    return {name: Runner(load(path, tp=mine)).run(PROMPT) for name, path in paths.items()}


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Plans that cut heads, that gather the output of a projection, and that cut experts."""
    paths = {name: tmp_path / name for name in ("granite", "phi3", "mixtral", "olmoe", "gemma2")}
    for name, path in paths.items():
        save(path, config_of(name, WIDE))
    one = {name: Runner(load(path)).run(PROMPT) for name, path in paths.items()}
    for result in ranks.shared(2).run(on_a_rank, paths):
        for name, expected in one.items():
            close(result[name], expected)


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [("gpt2", 2, "transformers has no tensor-parallel plan"), ("granite", 4, "cannot be shared by 4 ranks")],
)
def test_ranks_that_are_refused(name: str, size: int, reason: str, tmp_path: Path) -> None:
    save(tmp_path, config_of(name, WIDE))
    with pytest.raises(ValueError, match=reason):
        load(tmp_path, tp=nn.Ranks(rank=0, size=size))
