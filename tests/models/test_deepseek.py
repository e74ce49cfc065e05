"""DeepSeek-V3 and -V3.2 in the engine: against transformers, and bit by bit against themselves however tokens come."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, Oracle, alone, record
from one_sequence import PROMPT, Runner, close
from schedules import compare, random_settings, requests, run_at_random
from test_models import hf_greedy, hf_logits, save
from test_one_arithmetic import SAMPLED, decoded, engine, prefilled

from whorl import ops
from whorl.engine import graphs, roofline, weights
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.models.deepseek import DeepSeek
from whorl.models.glm4_moe_lite import Glm4MoeLite
from whorl.models.glm_moe_dsa import GlmMoeDsa
from whorl.nn import LatentKV
from whorl.ops.latent import attention, heads, indexer
from whorl.ops.linear import multiply

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0}
V3: dict[str, Any] = {"model_type": "deepseek_v3"}
VARIANTS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"index_topk": 128},
    "sparse-yarn": {"rope_parameters": YARN},
    "one-group": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "two-shared": {"n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2},
    "glm4-moe-lite": Glm4MoeLite.tiny(mlp_layer_types=["dense", "sparse", "sparse"]),
    "glm-moe-dsa": GlmMoeDsa.tiny(),
    "glm-moe-dsa-one-each": GlmMoeDsa.tiny(hidden_size=48, index_topk_freq=1, rope_parameters={"rope_theta": 1e6}),
    "v3": V3,
    "v3-yarn": V3 | {"rope_parameters": YARN},
}


def saved(folder: Path, config: dict[str, Any]) -> Any:
    """A checkpoint of transformers whose biases, of experts and of the indexer's norm, are not zero."""
    hf = save(folder, config)
    with torch.no_grad():
        for name, tensor in (*hf.named_parameters(), *hf.named_buffers()):
            if name.endswith(("e_score_correction_bias", "k_norm.bias")):
                tensor.normal_(std=0.1)
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return hf


def tiny(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "index_topk": 8}
    return weights.random_model(DeepSeek.tiny(**sizes | changes), device="cpu", dtype=dtype)


MODELS = {
    "sparse": tiny,
    "sparse_bfloat16": lambda: tiny(torch.bfloat16),
    "v3": lambda: tiny(**V3),
    "glm5": lambda: tiny(**GlmMoeDsa.tiny(hidden_size=96, intermediate_size=160, index_topk=8)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    """40 greedy steps: the tokens are equal, and the logits of every step to 1e-5."""
    config = DeepSeek.tiny(**VARIANTS[name])
    hf = saved(tmp_path, config)
    model = weights.load_model(tmp_path, device="cpu", dtype="float32", progress=False)
    expected, expected_tokens = hf_greedy(hf, PROMPT, 40)
    logits, tokens = Runner(model).greedy(PROMPT, 40)
    assert len(set(tokens)) > 4, "the random model says too little to compare"
    assert tokens == expected_tokens
    close(logits, expected)


def test_the_choice_of_keys_matters(tmp_path: Path) -> None:
    """A prompt of which every token leaves most keys out equals transformers, and does not where all keys are seen."""
    config = DeepSeek.tiny()
    hf = saved(tmp_path, config)
    prompt = [(7 * i * i + 3) % 97 for i in range(150)]
    expected = hf_logits(hf, prompt)
    close(Runner(weights.load_model(tmp_path, device="cpu", progress=False), 160).run(prompt), expected)
    (tmp_path / "config.json").write_text(json.dumps(config | {"index_topk": 150}))
    dense = Runner(weights.load_model(tmp_path, device="cpu", progress=False), 160).run(prompt)
    close(dense[:16], expected[:16])
    assert float((dense[100:] - expected[100:]).abs().max()) > 0.1


def test_layers_of_multi_token_prediction_are_left_aside(tmp_path: Path) -> None:
    """As they lie in the published checkpoints: after the others, with copies of the embeddings."""
    from safetensors.torch import load_file, save_file

    hf = saved(tmp_path, DeepSeek.tiny(num_nextn_predict_layers=1))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {name.replace("layers.2.", "layers.3."): x.clone() for name, x in tensors.items() if ".layers.2." in name}
    more |= {"model.layers.3.eh_proj.weight": torch.zeros(32, 64), "model.layers.3.enorm.weight": torch.zeros(32)}
    save_file(tensors | more, file, metadata={"format": "pt"})
    model = weights.load_model(tmp_path, device="cpu", progress=False)
    close(Runner(model).run(PROMPT), hf_logits(hf, PROMPT))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 3}, "n_routed_experts is 8, n_group 3"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave is True"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.build(DeepSeek.tiny(**change), device="meta", dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False, expected True"),
        ({"indexer_types": ["full", "shared"]}, "expected 4 of full, shared"),
        ({"indexer_types": ["full", "full", "full", "half"]}, "expected 4 of full, shared"),
        ({"index_topk_pattern": "SFFF"}, "the first layer shares"),
        ({"index_topk_pattern": "FXFF"}, "the kinds of indexers are"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"n_group": 3}, "n_routed_experts is 8, n_group 3"),
    ],
)
def test_configurations_of_glm_5_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weights.build(GlmMoeDsa.tiny(**change), device="meta", dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "FFSF"),
        ({"index_topk_freq": 1}, "FFFF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFS"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, "FSSF"),
    ],
)
def test_which_layers_of_glm_5_share_a_selection(change: dict[str, Any], expected: str) -> None:
    """As transformers reads the same file. A layer that shares caches no keys; one of multi-token prediction does."""
    from transformers import AutoConfig

    values = GlmMoeDsa.tiny(**change)
    theirs = AutoConfig.for_model(**values).indexer_types
    assert "".join(kind[0].upper() for kind in theirs) == expected
    model = weights.build(values, device="meta", dtype=torch.float32)
    specs = model.cache_specs()
    assert "".join("F" if spec.index_dim else "S" for spec in specs) == expected
    assert all(spec.topk == 16 for spec in specs)
    assert model.config.selects(4)


# ---- one arithmetic


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "sparse")) for name in MODELS])
def test_decoded_equals_prefilled(name: str) -> None:
    llm = engine(MODELS[name]())
    outputs = llm.generate([PROMPT[:n] for n in (1, 12, 21)], SAMPLED, progress=False)
    for output in outputs:
        assert decoded(output) == prefilled(llm, output)


def other_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A library's way: few rows are summed in another order than many."""
    return multiply(x.flip(1), weight.flip(1)) if len(x) <= 24 else multiply(x, weight)


@pytest.mark.parametrize("module", [attention, heads])
def test_products_that_depend_on_the_number_of_rows_would_show(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(tiny(index_topk=128), max_num_batched_tokens=64)
    monkeypatch.setattr(module, "multiply", other_order)
    (output,) = llm.generate([PROMPT], SAMPLED, progress=False)
    assert decoded(output) != prefilled(llm, output)


def test_scores_depend_on_query_and_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does the choice: of one query, of many, of more keys than there were before."""
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(*shape, generator=generator) for shape in ((40, 24, 128), (700, 128)))
    weight = torch.randn(40, 24, generator=generator)

    def is_equal() -> bool:
        whole = indexer.compute_scores(q, weight, keys)
        parts = [indexer.compute_scores(q[i : i + 1], weight[i : i + 1], keys[: 300 + i])[0] for i in range(40)]
        return all(torch.equal(whole[i, : 300 + i], part) for i, part in enumerate(parts))

    assert is_equal()
    monkeypatch.setattr(indexer, "multiply", other_order)
    assert not is_equal()


@pytest.mark.parametrize(("name", "seeds"), [("sparse", range(6)), ("v3", range(3))])
def test_logits_do_not_depend_on_the_schedule(name: str, seeds: range) -> None:
    """Batches, chunks, preemption, prefix hits and drafts, against plain runs of one token a step, bit by bit."""
    model = MODELS[name]()
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.5, "seed": 3}]
    cases = list(requests(random.Random(5), model.vocab_size, kinds * 3, fewest=6))
    plain = [alone(model, None, *request) for request in cases]
    seen = dict.fromkeys(("num_preemptions", "num_tokens_hit", "num_accepted"), 0)
    for seed in seeds:
        rng = random.Random(seed)
        drafts = Oracle([seq.token_ids for seq, _ in plain], k=rng.randint(1, 12), wrong=rng.randint(2, 9))
        settings = random_settings(rng, seqs=rng.choice((1, 4, 6)), block_size=rng.choice((1, 2, 5)))
        proposer = rng.choice([drafts, drafts, PromptLookup(k=6, min_hist=1, guard=False)])
        llm = LLM(model=model, settings=settings, speculate=proposer, draft_length="fixed")
        recorded = record(llm)
        for index, seq in run_at_random(rng, llm, cases):
            compare(*plain[index], seq, recorded.get(seq.id, {}))
        seen = {event: count + llm.stats()[event] for event, count in seen.items()}
    assert all(seen.values()), seen


def test_a_list_of_every_key_is_every_key() -> None:
    """Whether the indexer was asked or not changes no bit where it leaves nothing out."""
    sizes = {"queries": (35,), "contexts": (300,), "heads": 3, "dim": 40, "value_dim": 33}
    values = ops.latent_attention.make(dtype=torch.float32, device="cpu", **sizes)
    every = torch.full((35, 300), -1, dtype=torch.int32)
    for i in range(35):
        every[i, : 266 + i] = torch.arange(266 + i)
    out = ops.latent_attention(**values)
    assert torch.equal(ops.latent_attention(**values | {"indices": every}), out)
    assert not torch.equal(ops.latent_attention(**values | {"indices": every[:, :299]})[-1], out[-1])


# ---- in 8 bits


class Coded(DeepSeek):
    """As the engine asks for it by a setting."""

    def cache_specs(self) -> list[Any]:
        return [spec.quantised("fp8") for spec in super().cache_specs()]


def coded(**changes: Any) -> Any:
    model = tiny(**changes)
    model.__class__ = Coded
    return model


def test_bytes_of_a_latent_and_of_a_key() -> None:
    """By hand: codes, then scales for 128s, then bf16; and planes of a block, the key transformed."""
    torch.manual_seed(0)
    kv, weight, slot = torch.randn(1, 576) * 3, torch.rand(512) + 0.5, torch.tensor([66])
    angles = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    cache, plain = torch.zeros(2, 64, 656, dtype=torch.uint8), torch.zeros(2, 64, 576)
    for each in (cache, plain):
        ops.latent_write(kv, weight, angles, each, slot)
    row, latent = cache[1, 2], plain[1, 2]
    scales = row[512:528].view(torch.float32)
    for i, group in enumerate(latent[:512].split(128)):
        least = float(group.abs().max()) / 448
        assert least <= float(scales[i]) < 2 * least
        assert float(scales[i]).hex().startswith("0x1.0000000000000p")
        codes = row[128 * i : 128 * i + 128].view(torch.float8_e4m3fn)
        assert torch.equal(codes.float(), (group / scales[i]).to(torch.float8_e4m3fn).float())
    assert torch.equal(row[528:].view(torch.bfloat16), latent[512:].bfloat16())
    assert cache.count_nonzero() == row.count_nonzero()
    k, index = torch.randn(1, 128), torch.zeros(2, 64, 132, dtype=torch.uint8)
    ops.index_write(k, torch.ones(128), torch.zeros(128), angles, index, slot)
    block = index[1].flatten()
    codes, scale = block[256:384].view(torch.float8_e4m3fn).float(), block[8192 + 8 : 8192 + 12].view(torch.float32)
    normed = torch.nn.functional.layer_norm(k, (128,), eps=1e-6)
    assert float((ops.hadamard(codes * scale) - normed).abs().max()) < 0.3
    assert index.count_nonzero() == block[256:384].count_nonzero() + block[8200:8204].count_nonzero()


@pytest.mark.parametrize("changes", [{}, V3])
def test_codes_decoded_equal_prefilled(changes: dict[str, Any]) -> None:
    """A prompt reads what it has rounded, so no bit depends on how its tokens came."""
    llm = engine(coded(**changes))
    assert llm.runner.caches[0].latent.dtype == torch.uint8
    outputs = llm.generate([PROMPT[:n] for n in (1, 21)], SAMPLED, progress=False)
    for output in outputs:
        assert decoded(output) == prefilled(llm, output)


def test_codes_are_close() -> None:
    """Where rounding changes no choice, of keys or of experts."""
    how = {"index_topk": 128, "first_k_dense_replace": 3}
    plain, rounded = (Runner(model).run(PROMPT) for model in (tiny(**how), coded(**how)))
    assert 1e-4 < float((rounded - plain).abs().max() / plain.abs().max()) < 0.2


# ---- planted keys


def test_planted_keys_decide_the_output_far_away() -> None:
    """Attention is even and one value is planted: it comes out if, and only if, the indexer finds its key. The newest
    and the oldest key, and keys past 4096, among 5000; equal scores go to the earliest."""
    length, block, topk = 5000, 16, 8
    count = -(-length // block)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int()[None]
    lengths = (table, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))
    q, weight = torch.ones(2, 4, 16), torch.full((2, 4), 0.25)
    for place in (0, 127, 4095, 4096, 4777, length - 2, length - 1):
        index, latents = torch.zeros(count, block, 16), torch.zeros(count, block, 12)
        block_id, offset = int(table[0, place // block]), place % block
        latents[block_id, offset, 3] = 1.0
        unplanted = ops.paged_indexer(q, weight, index, *lengths, topk)
        assert unplanted.tolist() == [list(range(topk))] * 2  # all scores are equal
        index[block_id, offset] = 1.0
        chosen = ops.paged_indexer(q, weight, index, *lengths, topk)
        is_seen = [place < length - 1, True]
        expected = sorted({*range(topk - (place >= topk)), place})
        assert [place in row for row in chosen.tolist()] == is_seen
        assert chosen[1].tolist() == expected
        for keys, seen in ((chosen, is_seen), (unplanted, [place < topk] * 2)):
            out = ops.latent_attention(torch.zeros(2, 3, 12), latents, *lengths, keys, scale=1.0, value_dim=6)
            assert out[:, :, 3].tolist() == [[1 / topk * each] * 3 for each in seen]
            assert out.count_nonzero() == 3 * sum(seen)


# ---- what it costs


def test_what_a_step_reads_and_a_token_keeps() -> None:
    spec = LatentKV(latent_dim=512, rotary_dim=64, dtype=torch.bfloat16, index_dim=128, topk=2048)
    assert spec.token_bytes == 1152 + 256
    assert spec.step_bytes(100) == 101 * (1152 + 256)
    assert spec.step_bytes(131072) == 2048 * 1152 + 131072 * 256 + 1408
    assert LatentKV(latent_dim=512, rotary_dim=64, dtype=torch.bfloat16).step_bytes(5000) == 5001 * 1152
    coded = spec.quantised("fp8")
    assert (coded.token_bytes, coded.latent_bytes, coded.index_bytes) == (656 + 132, 656, 132)
    cache = coded.empty(3, 64, "cpu")
    assert cache.index is not None
    assert cache.latent[0].nbytes + cache.index[0].nbytes == 64 * (656 + 132)
    with pytest.raises(ValueError, match="kv_cache_dtype is int8"):
        spec.quantised("int8")
    model = tiny(index_topk=8, num_hidden_layers=1, first_k_dense_replace=1)
    read = roofline.step_bytes(model, context=50) - roofline.step_bytes(model, context=8)
    assert read == 42 * 16 * 4  # past the chosen keys a step reads those of the indexer alone
    assert model.attention_flops(8) == 2 * 4 * 48 * 36 + 24 * 16 * 72


def test_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of other models, where the device records: kernels read lengths there."""
    monkeypatch.setattr(graphs, "wants_graphs", lambda *_: True)
    monkeypatch.setattr(graphs, "graph_pool", lambda _: None)
    assert [rows for rows, _ in engine(tiny()).runner.graphs.decoding_sizes(8)] == [1, 2, 4, 8]


def test_training_is_somebody_elses() -> None:
    with pytest.raises(ValueError, match="train it with `whorl train`"):
        tiny().logprobs(None)


def test_long_prompts_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past what is multiplied at once: pieces of any size have the bits of the whole."""
    monkeypatch.setattr(attention, "ROWS", 64)
    model = tiny(num_hidden_layers=2, max_position_embeddings=1024, index_topk=150)
    prompt = [(7 * i * i + 3) % 97 for i in range(420)]
    whole = Runner(model, 512).run(prompt)
    runner = Runner(model, 512)
    parts = [runner.run(prompt[a:b]) for a, b in ((0, 1), (1, 130), (130, 131), (131, 260), (260, 419), (419, 420))]
    assert torch.equal(torch.cat(parts), whole)


def test_greedy_tokens_of_a_crowd() -> None:
    model, params = tiny(), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    prompts = [[(a * i + 5) % 97 for i in range(3 * a)] for a in range(1, 9)]
    crowd = engine(model, max_num_seqs=8, num_blocks=128).generate(prompts, params, progress=False)
    for prompt, among in list(zip(prompts, crowd, strict=True))[::3]:
        (output,) = engine(model, max_num_seqs=1, max_num_batched_tokens=7).generate([prompt], params, progress=False)
        assert (output.token_ids, decoded(output)) == (among.token_ids, decoded(among))


@pytest.mark.slow
def test_prompts_with_shared_tokens(tmp_path: Path) -> None:
    """Two ranks that keep their share of a prompt's tokens between attentions: the logits of two that do not."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "index_topk": 8, "num_hidden_layers": 2}
    paths = write_checkpoints(tmp_path, {"deepseek": DeepSeek.tiny(**sizes)})
    outputs = []
    for sp in ("off", "on"):
        how: dict[str, Any] = {"tp": 2, "sp": sp, "device": "cpu", "dtype": torch.float32, "num_blocks": 40}
        llm = LLM(paths["deepseek"], tokenizer=ByteTokenizer(), block_size=4, max_model_len=80, **how)  # type: ignore[arg-type]
        logits, sequences = record(llm), [llm.add(PROMPT[:n], SAMPLED)[0] for n in (21, 7)]
        while llm.has_work:
            llm.step()
        outputs.append([logits[seq.id] for seq in sequences])
        if sp == "on":
            assert llm.sp_report is not None
            assert llm.sp_report.bytes_after() < llm.sp_report.bytes_before(), "latents are gathered, not hidden states"
        llm.close()
    for off, on in zip(*outputs, strict=True):
        assert off.keys() == on.keys()
        assert all(torch.equal(off[place], on[place]) for place in off)


# ---- FP8 blocks


def to_blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """e4m3 codes, scales of blocks, and the values that they stand for, as DeepSeek publishes weights."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    tiles = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    scales = tiles.abs().amax((1, 3), keepdim=True) / 448
    codes = (tiles / scales).to(torch.float8_e4m3fn)
    whole = [x.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous() for x in (codes, codes.float() * scales)]
    return whole[0], scales[:, 0, :, 0].contiguous(), whole[1]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "deepseek_v3"])
def test_fp8_blocks(model_type: str, tmp_path: Path) -> None:
    """As published: the embedding, the head, the router and the indexer's weights of heads are not quantised, and no
    list says so. The same bits as of the values, whether they are unpacked or not; kv_b_proj always is."""
    from safetensors.torch import load_file, save_file

    config = DeepSeek.tiny(model_type=model_type)
    saved(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")
    coded, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and not name.endswith(kept):
            coded[name], coded[f"{name}_scale_inv"], values[name] = to_blocks(tensor, 16)
    (tmp_path / "coded").mkdir()
    save_file(coded, tmp_path / "coded" / "model.safetensors")
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    (tmp_path / "coded" / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    save_file(values, tmp_path / "model.safetensors")
    expected = Runner(weights.load_model(tmp_path, device="cpu", progress=False)).run(PROMPT)
    for unpack in (True, False):
        model: Any = weights.load_model(tmp_path / "coded", device="cpu", unpack=unpack, progress=False)
        layer = model.decoder.layers[1].self_attn
        assert layer.kv_b_proj.weight.dtype == torch.float32
        assert layer.q_b_proj.weight.dtype == (torch.float32 if unpack else torch.float8_e4m3fn)
        assert torch.equal(Runner(model).run(PROMPT), expected)
