"""A cache of keys and values in 8 bits: what is stored, what attention sees, and that no bit depends on the way."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoints
from kernels import without_cpu_kernels
from mock_model import ByteTokenizer, Logits, record
from one_sequence import PROMPT, Runner
from schedules import tiny
from test_cache_kinds import LatentModel
from test_engine_vision import EXPANDED, GREEDY, SETTINGS, run
from test_engine_vision import tiny as tiny_vision
from test_ops import backends_here
from torch import Tensor
from typer.testing import CliRunner

from whorl import ops
from whorl.bench.filled_cache import fill
from whorl.cli import app
from whorl.device import is_interpreting
from whorl.engine import roofline, tensor_parallel
from whorl.engine.llm import LLM
from whorl.engine.memory import cache_specs
from whorl.engine.sequence import SamplingParams
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import random_model
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3
from whorl.nn import PagedKV
from whorl.ops import OPS
from whorl.ops._op import Values

FORMATS = ("fp8", "int8")
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
CACHE = ("k_cache", "v_cache", "k_scale", "v_scale")
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
MODELS: dict[str, Any] = {
    "llama": lambda: tiny(Llama),
    "qwen3_window": lambda: tiny(Qwen3, **WINDOW),
    "qwen3_moe_bfloat16": lambda: tiny(Qwen3, torch.bfloat16, num_experts=8),
}


def cloned(values: Values) -> Values:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache of codes stands for."""
    return (codes.float() * scales.transpose(1, 2)[..., None]).to(dtype)


def plain(values: Values, dtype: torch.dtype) -> Values:
    """The same call over a cache of numbers."""
    wide = {f"{n}_cache": widened(values[f"{n}_cache"], values[f"{n}_scale"], dtype) for n in ("k", "v")}
    return values | wide | {"k_scale": None, "v_scale": None}


# ---- operators


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", backends_here(OPS["write_kv"]))
def test_codes_are_the_nearest_there_are(backend: str, format: str) -> None:
    """By the grid of codes itself: every number goes to one that is not further away than the next."""
    values = ops.write_kv.make(dtype=torch.float32, device="cpu", tokens=(6,), kv_heads=2, dim=24, format=format)
    ops.write_kv(**values, backend=backend)
    every = torch.arange(256, dtype=torch.uint8).view(DTYPES[format]).float()
    every = every[every.isfinite() & (every.abs() <= LARGEST[format])]
    for i, slot in enumerate(values["slots"].tolist()):
        for name in ("k", "v"):
            source, at = values[name][i], (slot // 4, slot % 4)
            scale = values[f"{name}_scale"][at[0], :, at[1], None]
            torch.testing.assert_close(scale, source.abs().amax(-1, keepdim=True) / LARGEST[format])
            errors = (values[f"{name}_cache"][at].float() * scale - source).abs()
            best = (every * scale[..., None] - source[..., None]).abs().amin(-1)
            assert bool((errors <= best * (1 + 1e-5) + 1e-7).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", backends_here(OPS["write_kv"])[1:])
def test_kernels_write_the_codes_of_the_reference(backend: str, format: str, dtype: torch.dtype) -> None:
    """Zeros, an infinity and NaN among them; and nothing where there is no slot."""
    values = ops.write_kv.make(
        dtype=dtype, device="cpu", tokens=(7,), kv_heads=3, dim=40, format=format, skipped=1, sliced=True
    )
    values["k"][1], values["v"][2, 0, 3], values["k"][3, 1, 0], values["v"][4] = 0, torch.inf, torch.nan, 1e-45
    ours, reference = cloned(values), cloned(values)
    ops.write_kv(**ours, backend=backend)
    ops.write_kv.reference(**reference)
    for name in CACHE:
        assert torch.equal(ours[name].view(torch.uint8), reference[name].view(torch.uint8)), name


@pytest.mark.parametrize("style", ["half", "pairs"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", backends_here(OPS["qk_norm_rope_write"]))
def test_what_is_written_fused_is_the_code_of_what_is_written_plainly(backend: str, format: str, style: str) -> None:
    case: Values = {"tokens": (5,), "heads": 3, "kv_heads": 2, "dim": 64, "rotary": 32, "style": style, "skipped": True}
    op = ops.qk_norm_rope_write
    coded = op.make(dtype=torch.bfloat16, device="cpu", format=format, **case)
    numbers = cloned(plain(coded, torch.bfloat16))
    op(**coded, backend=backend)
    op(**numbers, backend=backend)
    assert torch.equal(coded["q"], numbers["q"])
    for t, slot in enumerate(coded["slots"].tolist()):
        if slot >= 0:
            for name in ("k", "v"):
                at = slot // 4, slot % 4
                codes, scales = ops.dynamic_quant(numbers[f"{name}_cache"][at], format=format)
                assert torch.equal(coded[f"{name}_cache"][at].view(torch.int8), codes.view(torch.int8)), (t, name)
                assert torch.equal(coded[f"{name}_scale"][at[0], :, at[1]], scales), (t, name)


# A walk along the cuts, cuts that are shared, a prompt; blocks and windows.
READS: dict[str, Values] = {
    "walks": {"queries": (1, 1), "contexts": (20, 9)},
    "shares cuts": {"queries": (1,), "contexts": (140,), "block": 16, "heads": 2, "kv_heads": 1},
    "drafts": {"queries": (3, 1), "contexts": (140, 5)},
    "prompt": {"queries": (20,), "contexts": (50,), "heads": 2, "kv_heads": 1},
    "window": {"queries": (19,), "contexts": (150,), "window": 33, "sliced": True},
}
QUICKLY = [("walks", "int8"), ("shares cuts", "fp8"), ("prompt", "int8")]  # of kernels that are interpreted


def reads() -> list[Any]:
    """backend, name, format, dtype"""
    cases, bf16 = [], torch.bfloat16
    for backend in backends_here(OPS["paged_attention"]):
        for name, (format, dtype) in product(READS, [("fp8", bf16), ("int8", bf16), ("fp8", torch.float32)]):
            is_slow = backend == "triton" and is_interpreting() and (name, format) not in QUICKLY
            is_slow = is_slow or (backend == "triton" and is_interpreting() and dtype == torch.float32)
            cases.append(pytest.param(backend, name, format, dtype, marks=[pytest.mark.slow] if is_slow else []))
    return cases


@pytest.mark.parametrize(("backend", "name", "format", "dtype"), reads())
def test_attention_sees_the_numbers_that_codes_stand_for(
    backend: str, name: str, format: str, dtype: torch.dtype
) -> None:
    case: Values = {"heads": 4, "kv_heads": 2, "dim": 32, **READS[name]}
    values = ops.paged_attention.make(dtype=dtype, device="cpu", format=format, **case)
    assert torch.equal(
        ops.paged_attention(**values, backend=backend), ops.paged_attention(**plain(values, dtype), backend=backend)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_scale": None}, "one of k_scale and v_scale is given"),
        ({"k_scale": torch.zeros(1, 2, 3)}, r"k_scale is \[1, 2, 3\] torch.float32, expected \[7, 2, 8\]"),
        ({"k_cache": torch.zeros(7, 8, 2, 32), "v_cache": torch.zeros(7, 8, 2, 32)}, "expected int8 or float8_e4m3fn"),
        ({"k_scale": None, "v_scale": None}, "k_cache is torch.int8 and k_scale is None, expected the scales"),
        ({"k_scale": torch.zeros(7, 8, 2).transpose(1, 2)}, "expected a contiguous tensor"),
    ],
)
def test_caches_that_do_not_go_together(changes: Values, message: str) -> None:
    case: Values = {"queries": (1,), "contexts": (30,), "heads": 4, "kv_heads": 2, "dim": 32}
    values = ops.paged_attention.make(dtype=torch.float32, device="cpu", format="int8", **case)
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        ops.paged_attention(**values | changes)


# ---- models and the engine


class CodedRunner(Runner):
    """One sequence, its cache in 8 bits."""

    def __init__(self, model: Any, format: str) -> None:
        super().__init__(model)
        self.caches = [spec.empty(len(self.table[0]), 4, "cpu") for spec in cache_specs(model, format)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_where_a_prompt_is_cut_changes_no_logit(name: str, format: str) -> None:
    """Its own keys are read back from the cache; else the first chunk would see what the next cannot."""
    model = MODELS[name]()
    whole = CodedRunner(model, format).run(PROMPT)
    for sizes in ((1,) * len(PROMPT), (5, 9, 7), (20, 1)):
        runner, at = CodedRunner(model, format), 0
        for size in sizes:
            assert torch.equal(runner.run(PROMPT[at : at + size]), whole[at : at + size]), (sizes, at)
            at += size
    assert not torch.equal(whole, Runner(model).run(PROMPT)), "nothing was rounded"


def test_a_prompt_that_saw_its_own_keys_unrounded_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = tiny(Llama), {}
    write, attend = ops.write_kv.reference, ops.paged_attention.reference

    def keep(k: Tensor, v: Tensor, k_cache: Tensor, *rest: Any) -> None:
        kept[k_cache.data_ptr()] = (k, v, rest[1])
        write(k, v, k_cache, *rest)

    def hasty(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any, **how: Any) -> Tensor:
        k, v, slots = kept[k_cache.data_ptr()]
        wide = [widened(*pair, torch.float32) for pair in ((k_cache, rest[3]), (v_cache, rest[4]))]
        for cache, new in zip(wide, (k, v), strict=True):
            cache.flatten(0, 1)[slots] = new
        return attend(q, *wide, *rest[:3], **how)

    monkeypatch.setattr(ops.write_kv, "reference", keep)
    monkeypatch.setattr(ops.paged_attention, "reference", hasty)
    with without_cpu_kernels():  # which would run in the place of these references
        whole, cut = CodedRunner(model, "int8"), CodedRunner(model, "int8")
        assert not torch.equal(whole.run(PROMPT), torch.cat([cut.run(PROMPT[:9]), cut.run(PROMPT[9:])]))


SHARED = [5, 81, 2, 44, 44, 13, 7, 60, 9]
PROMPTS = [SHARED + [1, 2] * 6, [3], SHARED + [30], list(range(20, 43)), SHARED + [1, 2] * 3]
ANSWER = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_prompt_tokens": 5},
    "crowded": {"num_blocks": 13, "max_model_len": 40, "max_prompt_tokens": 7},
    "running ahead": {"run_ahead": True, "max_prompt_tokens": 9},
    "drafts": {"speculate": PromptLookup(k=5, min_hist=1, guard=False), "draft_length": "fixed"},
}


def served(model: Any, prompts: list[list[int]], **options: Any) -> tuple[dict[str, int], list[tuple[Any, Logits]]]:
    """Added one a step, so that they meet in the middle."""
    sizes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 3, "block_size": 4, "num_blocks": 64}
    llm = LLM(model=model, **sizes | options)
    logits, sequences = record(llm), []
    for prompt in prompts:
        sequences += llm.add(prompt, ANSWER)
        llm.step()
    while llm.has_work:
        llm.step()
    return llm.stats(), [(seq.output_ids, logits[seq.id]) for seq in sequences]


def assert_same(actual: list[tuple[Any, Logits]], expected: list[tuple[Any, Logits]]) -> None:
    for (output, mine), (other, theirs) in zip(actual, expected, strict=True):
        assert output == other
        assert all(torch.equal(mine[place], theirs[place]) for place in theirs)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        pytest.param(name, format, marks=[] if (format == "fp8") == (name == "qwen3_window") else [pytest.mark.slow])
        for name, format in product(MODELS, FORMATS)
    ],
)
def test_logits_do_not_depend_on_the_schedule(name: str, format: str) -> None:
    model = MODELS[name]()
    one: dict[str, Any] = {"kv_cache_dtype": format, "use_prefix_cache": False, "max_prompt_tokens": 2048}
    alone = [served(model, [prompt], **one)[1][0] for prompt in PROMPTS]
    seen: dict[str, int] = {}
    for options in WAYS.values():
        stats, actual = served(model, PROMPTS, kv_cache_dtype=format, **options)
        assert_same(actual, alone)
        seen = {event: seen.get(event, 0) + count for event, count in stats.items()}
    for event in ("num_preemptions", "num_tokens_hit", "num_accepted"):
        assert seen[event] > 0, f"no {event} in these"


def test_an_answer_sent_back_has_the_same_logprobs() -> None:
    """And is found in the cache."""
    llm = LLM(model=tiny(Qwen3), device="cpu", num_blocks=64, block_size=8, kv_cache_dtype="fp8")
    sampled = SamplingParams(max_tokens=30, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
    (first,) = llm.generate([PROMPT], sampled, progress=False)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for _ in range(2):
        (again,) = llm.generate([first.prompt_ids + first.token_ids], scored, progress=False)
        actual = [each.logprob for each in again.prompt_logprobs[len(PROMPT) - 1 :]]
        assert actual == [each.logprob for each in first.logprobs]
        llm.forget()
    (hit,) = llm.generate([PROMPT], sampled, progress=False)
    (hit,) = llm.generate([hit.prompt_ids + hit.token_ids], replace(ANSWER, max_tokens=1), progress=False)
    assert hit.num_cached == (len(PROMPT) + 30 - 1) // 8 * 8


@pytest.mark.parametrize("format", [pytest.param("fp8", marks=pytest.mark.slow), "int8"])
def test_pictures(format: str) -> None:
    model = tiny_vision()

    def logits(prompts: Any, **options: Any) -> list[tuple[Any, Logits]]:
        llm = LLM(model=model, **SETTINGS | {"kv_cache_dtype": format} | options)
        recorded = record(llm)
        return [(seq.output_ids, recorded[seq.id]) for seq in run(llm, prompts, GREEDY)]

    chosen = EXPANDED[:4]
    alone = [logits([prompt], use_prefix_cache=False, max_prompt_tokens=2048)[0] for prompt in chosen]
    assert_same(logits(chosen, max_prompt_tokens=5), alone)


RANKED = {"llama": Llama.tiny(hidden_size=96, intermediate_size=160), "qwen3": Qwen3.tiny(**WINDOW)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "format"), [("llama", "fp8"), ("qwen3", "int8")])
def test_two_ranks_and_sequence_parallelism(name: str, format: str, tmp_path: Path) -> None:
    """Whole prompts run with sequence parallelism here, their pieces do not."""
    folder = write_checkpoints(tmp_path, {name: RANKED[name]})[name]
    sizes: dict[str, Any] = {"block_size": 4, "memory": 40_000, "max_model_len": 40, "sp": "on", "sp_min_tokens": 9}
    llm = LLM(folder, tokenizer=ByteTokenizer(), device="cpu", dtype="float32", tp=2, kv_cache_dtype=format, **sizes)  # type: ignore[arg-type]
    try:
        assert llm.pool.num_blocks == 40_000 // (4 * 2 * 2 * (RANKED[name].get("head_dim", 24) + 4))
        logits = record(llm)

        def last(count: int) -> Tensor:
            (seq,) = llm.add(PROMPT[:count], replace(ANSWER, max_tokens=1))
            while llm.has_work:
                llm.step()
            return logits[seq.id][0]

        whole = last(len(PROMPT))
        llm.forget()
        assert torch.equal([last(count) for count in (5, 9, 13, 17, 21)][-1], whole)
        assert llm.stats()["num_tokens_hit"] > 0
    finally:
        llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_graphs_and_kernels_on_a_gpu(format: str) -> None:
    """Recorded, eager, in chunks, and prompts against decoded tokens: heads of 128 have kernels of their own."""
    config = Qwen3.tiny(hidden_size=256, num_attention_heads=8, num_key_value_heads=2) | {"head_dim": 128}
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    ways: list[dict[str, Any]] = [{"use_graphs": True}, {"use_graphs": False, "max_prompt_tokens": 40}]
    expected: list[tuple[Any, Logits]] = []
    for options in ways:
        prompts = [list(range(n % 90, n % 90 + 7)) * 20 for n in (1, 30, 60)]
        actual = served(model, prompts, device="cuda", kv_cache_dtype=format, block_size=16, **options)[1]
        assert_same(actual, expected or actual)
        expected = expected or actual
    llm = LLM(model=model, device="cuda", kv_cache_dtype=format, num_blocks=64)
    (first,) = llm.generate([PROMPT * 7], replace(ANSWER, logprobs=0, max_tokens=60), progress=False)
    llm.forget()
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (again,) = llm.generate([first.prompt_ids + first.token_ids], scored, progress=False)
    found_logprobs = [each.logprob for each in again.prompt_logprobs[len(first.prompt_ids) - 1 :]]
    assert found_logprobs == [each.logprob for each in first.logprobs]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_kernels_see_the_numbers_on_a_gpu(format: str, dim: int) -> None:
    """The same bits as over a cache of these numbers, which the kernel for Hopper reads; a prompt's, and decoded."""
    for queries, contexts in (((1,) * 64, (700,) * 64), ((1,), (3000,)), ((900, 65), (1400, 77))):
        case: Values = {"heads": 32, "kv_heads": 4, "dim": dim, "block": 16, "queries": queries, "contexts": contexts}
        values = ops.paged_attention.make(dtype=torch.bfloat16, device="cuda", format=format, **case)
        coded, numbers = ops.paged_attention(**values), ops.paged_attention(**plain(values, torch.bfloat16))
        assert torch.equal(coded, numbers), (queries[:3], contexts[:3])


# ---- settings, figures and commands


def test_more_tokens_fit_in_the_same_memory() -> None:
    model = tiny(Qwen3, torch.bfloat16)  # two key heads of 16 channels in two layers
    engines = {
        name: LLM(model=model, device="cpu", memory=300_000, block_size=8, max_num_seqs=64, kv_cache_dtype=name)
        for name in ("auto", *FORMATS)
    }
    assert engines["auto"].pool.num_blocks == 300_000 // (8 * 2 * 2 * 2 * 16 * 2)
    assert engines["fp8"].pool.num_blocks == engines["int8"].pool.num_blocks == 300_000 // (8 * 2 * 2 * 2 * (16 + 4))
    cache = engines["fp8"].runner.caches[0]
    held = sum(tensor.numel() * tensor.element_size() for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale))
    assert held == engines["fp8"].pool.num_blocks * 8 * engines["fp8"].cache_specs[0].token_bytes


def test_a_step_reads_fewer_bytes() -> None:
    spec = PagedKV(num_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    assert spec.step_bytes(99) / spec.quantised("fp8").step_bytes(99) == 256 / 132
    model = tiny(Qwen3, torch.bfloat16)
    saved = roofline.step_bytes(model, context=99) - roofline.step_bytes(model, context=99, kv_cache_dtype="int8")
    assert saved == 100 * 2 * 2 * 2 * (32 - 20)
    room = tensor_parallel._cache_room(model, "cpu", 1, "int8")
    assert room["token"] == 2 * 2 * 2 * 20, "what a rank says of its share"


@pytest.mark.parametrize("format", FORMATS)
def test_a_filled_cache_is_finite(format: str) -> None:
    llm = LLM(model=tiny(Qwen3), device="cpu", num_blocks=8, block_size=4, kv_cache_dtype=format)
    fill(llm)
    for cache in llm.runner.caches:
        assert bool(cache.k.float().any())
        assert bool(cache.k.float().isfinite().all())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8': LatentModel has a LatentSpec.* leave kv_cache_"):
        LLM(model=LatentModel(), device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp4', expected one of auto, fp8, int8"):
        LLM(model=tiny(Llama), device="cpu", kv_cache_dtype="fp4")


def test_bench_decode(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Qwen3.tiny()))
    command = ["bench", "decode", "--random-config", str(tmp_path / "config.json"), "--device", "cpu", "--json"]
    command += ["--kv-cache-dtype", "int8", "--batch", "2", "--context", "20", "--tokens", "2", "--repeats", "1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    header, model = document["header"], random_model(Qwen3.tiny(), device="cpu", dtype=torch.bfloat16)
    assert header["kv_cache_dtype"] == "int8"
    assert header["bytes_per_token"] == roofline.step_bytes(model, kv_cache_dtype="int8") < roofline.step_bytes(model)


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_commands_take_it(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--kv-cache-dtype", "fp4"])
    assert done.exit_code == 2
    assert "'auto', 'fp8', 'int8'" in done.output


@pytest.mark.slow
def test_whorl_generate_with_the_default_model() -> None:
    done = CliRunner().invoke(
        app, ["generate", "--kv-cache-dtype", "fp8", "--max-tokens", "8", "--prompt", "The capital of France is"]
    )
    assert done.exit_code == 0, done.output
    assert "Paris" in done.stdout
