"""Sequence parallelism in the engine: prompts with shared tokens, against the same engine without, bit by bit."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
import ranks
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, MockModel, record

from whorl import nn
from whorl.engine.launch import RankError
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.sequence_parallel import PromptForward, SPSettings, for_ranks
from whorl.engine.settings import EngineSettings
from whorl.engine.speculate.draft_model import DraftModel
from whorl.engine.speculate.prompt_lookup import PromptLookup
from whorl.engine.weights import load_model
from whorl.models.gemma3 import Gemma3
from whorl.models.llama import Llama
from whorl.models.qwen3 import Qwen3

WIDE = {"hidden_size": 96, "intermediate_size": 160}
CONFIGS = {
    "llama": Llama.tiny(**WIDE, num_attention_heads=6, num_key_value_heads=3, head_dim=16, attention_bias=True),
    "qwen3_moe": Qwen3.tiny(**WIDE, num_experts=8, norm_topk_prob=True),
    "eight heads": Qwen3.tiny(**WIDE, num_attention_heads=8, num_key_value_heads=4),
    "gemma3": Gemma3.tiny(**WIDE, num_hidden_layers=2),
}
COLLECTIVES = 5  # the embedding's, and two of each layer
CHUNK = 7  # prompt tokens of a step: chunks have odd sizes, of one token, too
BOUND = 0.02  # of the largest logit, with int8
COMMON = [5, 81, 2, 44, 44, 13, 7, 60, 9]
PROMPTS = [
    *([3], [8, 1], [4, 4, 9], COMMON + [1, 2] * 6, COMMON + [30], COMMON + [1, 2] * 3, list(range(20, 43))),
    *([17, 18, 19] * 5, COMMON + [1, 2] * 6),
]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), CONFIGS)


# ---- on every rank


class Counted:
    """Of the calls that run with sequence parallelism, the tokens of each."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts, self.sizes = prompts, []  # type: ignore[var-annotated]

    def takes(self, step: nn.Step) -> bool:
        return self.prompts.takes(step)

    def __call__(self, step: nn.Step, caches: Any) -> torch.Tensor:
        self.sizes.append(step.token_ids.shape[0])
        hidden, report = self.prompts(step, caches), self.prompts.report
        exchanged = tuple(self.prompts.last.summed), tuple(self.prompts.last.gathered)
        assert exchanged == (report.summed, report.gathered)
        return hidden


Found = tuple[list[list[int]], list[dict[int, torch.Tensor]], dict[str, int]]


def serve(model: Any, prompts: Any, *, chunk: int, proposer: Any = None, together: bool = True) -> Found:
    """Every rank is an engine of its own: what they decide is the same, since their logits are."""
    llm = LLM(
        model=model,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=chunk,
        block_size=4,
        num_blocks=40,
        max_model_len=48,
        speculate=proposer,
        draft_length="fixed",
        use_prefix_cache=together,
    )
    llm.runner.prompts = prompts
    logits, sequences = record(llm), []
    for prompt in PROMPTS:
        sequences += llm.add(prompt, GREEDY)
        llm.step()
        while llm.has_work and not together:
            llm.step()
    while llm.has_work:
        llm.step()
    return [seq.output_ids for seq in sequences], [logits[seq.id] for seq in sequences], llm.stats()


def check_equal(actual: Found, expected: Found) -> None:
    assert actual[0] == expected[0]
    for ours, theirs in zip(actual[1], expected[1], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[place], theirs[place]) for place in ours)


def share(path: Path, dtype: torch.dtype) -> Any:
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    return load_model(path, device="cpu", dtype=dtype, tp=mine, progress=False)


def proposers(path: Path, dtype: torch.dtype) -> list[Any]:
    """None, drafts from the prompt, and a draft model that no rank shares."""
    draft: Any = load_model(path, device="cpu", dtype=dtype, progress=False)
    model = DraftModel(model=draft, tokenizer=ByteTokenizer(), k=3, device="cpu", num_blocks=40)  # type: ignore[arg-type]
    return [None, PromptLookup(k=4, min_hist=1, guard=False), model]


def on_and_off(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    model = share(path, dtype)
    prompts = Counted(PromptForward(model, "cpu", SPSettings(mode="on")))
    off = serve(model, None, chunk=CHUNK, together=False)
    for proposer in proposers(path, dtype):
        on = serve(model, prompts, chunk=CHUNK, proposer=proposer)
        check_equal(on, off)
        assert on[2]["num_tokens_hit"] > 0
        assert proposer is None or on[2]["num_accepted"] > 0
    check_equal(serve(model, prompts, chunk=64, together=False), off)
    report = prompts.prompts.report
    return {"sums": len(report.summed), "text": str(report), "gathers": len(report.gathered), "sizes": prompts.sizes}


def rounded(path: Path) -> dict[str, Any]:
    model = share(path, torch.float32)
    prompts = Counted(PromptForward(model, "cpu", SPSettings(mode="on", quantize="int8")))
    off = serve(model, None, chunk=64, together=False)
    alone = serve(model, prompts, chunk=64, together=False)
    check_equal(serve(model, prompts, chunk=CHUNK), alone)
    errors = [float((a[0] - b[0]).abs().max() / b[0].abs().max()) for a, b in zip(alone[1], off[1], strict=True)]
    report = prompts.prompts.report
    return {
        "errors": errors,
        "sums": len(report.summed),
        "bytes": report.bytes_after() / report.bytes_before(),
        "is_quantized": report.is_quantized,
        "sizes": prompts.sizes,
    }


def fused(path: Path) -> dict[str, Any]:
    """Products beside their collectives, and only where there are tokens enough."""
    model = share(path, torch.float32)
    settings = for_ranks(EngineSettings(sp="on", sp_min_tokens=5, sp_fuse=True), 2, device="cpu")
    assert settings is not None
    prompts = Counted(PromptForward(model, "cpu", SPSettings(**settings)))
    off = serve(model, None, chunk=CHUNK, together=False)
    check_equal(serve(model, prompts, chunk=CHUNK), off)
    report = prompts.prompts.report
    return {"fused": report.num_fused, "text": str(report), "sizes": prompts.sizes}


def automatic(path: Path) -> tuple[Any, list[bool]]:
    """Where it begins, and what becomes of prompts around there."""
    prompts = PromptForward(share(path, torch.float32), "cpu", SPSettings(mode="auto"))
    start = prompts.report.min_tokens
    sizes = [1 << 20] if start == float("inf") else [max(int(start) - 1, 0), int(start)]
    return start, [prompts.takes(cast("nn.Step", Prompt(size))) for size in sizes]


class Prompt:
    """As much of a step as is looked at."""

    def __init__(self, size: int) -> None:
        self.token_ids = torch.zeros(size)


# ---- two of them


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("llama", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", torch.bfloat16, marks=pytest.mark.slow),
        ("llama", torch.bfloat16),
        pytest.param("qwen3_moe", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_equals_off(name: str, dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    """Logits of all outputs, bit by bit: batched, in odd chunks, with prefix hits, with drafts."""
    check_on_ranks(2, checkpoints[name], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_equals_off_on_four_ranks(dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    check_on_ranks(4, checkpoints["eight heads"], dtype)


def check_on_ranks(size: int, path: Path, dtype: torch.dtype) -> None:
    for result in ranks.shared(size).run(on_and_off, path, dtype, timeout=600):
        assert result["sums"] == result["gathers"] == COLLECTIVES
        assert "equality: bitwise" in result["text"]
        assert {2, 3, 5, 23} <= set(result["sizes"])


@pytest.mark.slow
def test_int8_is_close_and_does_not_depend_on_neighbours(checkpoints: dict[str, Path]) -> None:
    for result in ranks.shared(2).run(rounded, checkpoints["llama"]):
        assert 0 < max(result["errors"]) < BOUND
        assert result["sums"] == COLLECTIVES
        assert result["is_quantized"]
        assert result["bytes"] < 0.75
        assert 1 in result["sizes"], "a chunk of one token is rounded as any other"


def test_fused_products_from_so_many_tokens_on(checkpoints: dict[str, Path]) -> None:
    for result in ranks.shared(2).run(fused, checkpoints["llama"]):
        assert result["fused"] >= COLLECTIVES
        assert "equality: bitwise" in result["text"]
        assert min(result["sizes"]) == 5


SP = '{"pass_config": {"enable_sp": true%s}}'
COMPILED = {
    SP % ', "sp_min_token_num": 512': SPSettings(mode="on", min_tokens=512),
    SP % ', "sp_min_token_num": 9999': SPSettings(mode="on", min_tokens=2048),
    SP % ', "fuse_gemm_comms": true, "sp_min_token_num": 8': SPSettings(mode="on", min_tokens=8, fuse=True),
    '{"pass_config": {"enable_async_tp": true, "sp_min_token_num": 8}}': SPSettings(mode="on", min_tokens=8, fuse=True),
}


@pytest.mark.parametrize(("text", "expected"), COMPILED.items())
def test_a_compilation_config_is_what_it_comes_to(text: str, expected: SPSettings) -> None:
    settings = EngineSettings(compilation_config=text)
    assert for_ranks(settings, 2, device="cpu") == asdict(expected)
    with pytest.raises(ValueError, match="sp is on, and there is one rank"):
        LLM(model=cast("Any", MockModel()), device="cpu", compilation_config=text)


def test_a_compilation_config_knows_devices_and_experts(checkpoints: dict[str, Path]) -> None:
    settings = EngineSettings(compilation_config=SP % "")
    for name, least in {"llama": 1000, "qwen3_moe": 1}.items():
        model = load_model(checkpoints[name], device="cpu", progress=False)
        assert for_ranks(settings, 2, device="npu", model=model) == asdict(SPSettings(mode="on", min_tokens=least))
    with pytest.warns(RuntimeWarning, match="cpu has no default: enable_sp becomes False"):
        assert for_ranks(settings, 2, device="cpu") is None
    off = EngineSettings(compilation_config='{"pass_config": {"enable_sp": false}}')
    assert for_ranks(off, 2, device="cpu") is None


def test_auto_begins_where_the_cost_model_says_on_all_ranks(checkpoints: dict[str, Path]) -> None:
    one, other = ranks.shared(2).run(automatic, checkpoints["llama"])
    assert one == other
    start, taken = one
    assert taken == ([False] if start == float("inf") else [False, True])


# ---- the engine's own ranks


@pytest.fixture
def llm(checkpoints: dict[str, Path]) -> Iterator[LLM]:
    made = LLM(
        checkpoints["llama"],
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        device="cpu",
        dtype=torch.float32,
        tp=2,
        sp="on",
        num_blocks=40,
    )
    yield made
    made.close()


@pytest.mark.slow
def test_an_engine_until_a_rank_is_killed(llm: LLM, checkpoints: dict[str, Path]) -> None:
    assert llm.sp_report is not None
    assert f"{COLLECTIVES} of {COLLECTIVES} collectives rewritten" in str(llm.sp_report)
    one = LLM(
        model=load_model(checkpoints["llama"], device="cpu", dtype=torch.float32, progress=False),
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        device="cpu",
    )
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [out.token_ids for out in outputs] == [
        out.token_ids for out in one.generate(PROMPTS, GREEDY, progress=False)
    ]
    assert llm._lead is not None
    llm._lead.group._processes[1].kill()
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        llm.generate(PROMPTS, GREEDY, progress=False)


def test_what_is_refused() -> None:
    model: Any = MockModel()
    with pytest.raises(ValueError, match="sp is on, and there is one rank"):
        LLM(model=model, device="cpu", sp="on")
    assert LLM(model=model, device="cpu", sp="auto").sp_report is None
    with pytest.raises(ValueError, match="sp is 'yes', expected one of auto, on, off"):
        LLM(model=model, device="cpu", sp="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sp_quantize is 'int8', and sp is off"):
        LLM(model=model, device="cpu", sp_quantize="int8")
    with pytest.raises(ValueError, match="'fp4', expected None or 'int8'"):
        LLM(model=model, device="cpu", sp="on", sp_quantize="fp4")  # type: ignore[arg-type]
    for wrong, message in {
        (("sp_fuse", True),): "sp_fuse is True, and sp is off",
        (("sp_min_tokens", 5), ("sp", "auto")): "sp is auto, which chooses the number of tokens",
        (("sp_min_tokens", 5000), ("sp", "on")): "no step has more than 2048 tokens",
        (("sp", "on"), ("compilation_config", "{}")): "sp is on, and compilation_config is set",
        (("compilation_config", "{"),): "compilation config: not JSON",
        (("compilation_config", "3"),): "expected an object with names and values, got 3",
    }.items():
        with pytest.raises(ValueError, match=message):
            LLM(model=model, device="cpu", **dict(wrong))
    with pytest.raises(ValueError, match="MockModel has no `hidden`"):
        PromptForward(model, "cpu", SPSettings(mode="on"))


@pytest.mark.slow
def test_the_default_model() -> None:
    words = "generate -n 8 --temperature 0 --json --device cpu --prompt"
    arguments = [*words.split(), "The capital of France is"]
    outputs = []
    for sp in ("off", "on"):
        command = [sys.executable, "-m", "whorl", *arguments, "--tp", "2", "--sp", sp, "--report"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout)["token_ids"])
        assert ("61 of 61 collectives rewritten" if sp == "on" else "sequence parallelism is off") in done.stderr
    assert outputs[0] == outputs[1]
