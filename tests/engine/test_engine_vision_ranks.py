"""Pictures on two ranks: every rank has the tower, and sequence parallelism changes no bit of what comes out."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from checkpoints import write_checkpoints
from mock_model import ByteTokenizer, Logits, record
from test_engine_vision import EXPANDED, run

from whorl import nn
from whorl.engine.llm import LLM
from whorl.engine.sequence_parallel import PromptForward, SPSettings
from whorl.engine.weights import load_model
from whorl.models.qwen3_vl import Qwen3VL

WIDE = {"hidden_size": 96, "intermediate_size": 160}
CONFIGS = {"dense": Qwen3VL.tiny(**WIDE), "experts": Qwen3VL.tiny(**WIDE, num_experts=4)}
COLLECTIVES = 1 + 2 * 3  # the embedding's, and two of each layer
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "block_size": 4, "num_blocks": 160}
BOUND = 1e-4  # of two ranks against one, which sum in another order


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), CONFIGS)


class Counted:
    """Of the calls that run with sequence parallelism: whether they had pictures."""

    def __init__(self, prompts: PromptForward) -> None:
        self.prompts = prompts
        self.had_pictures: list[bool] = []

    def takes(self, step: nn.Step) -> bool:
        return self.prompts.takes(step)

    def __call__(self, step: nn.Step, caches: Any) -> torch.Tensor:
        self.had_pictures.append(step.inserted is not None)
        hidden = self.prompts(step, caches)
        assert len(self.prompts.last.summed) == len(self.prompts.last.gathered) == COLLECTIVES
        return hidden


def serve(model: Any, prompts: Any, **options: Any) -> tuple[list[list[int]], list[Logits]]:
    """Every rank is an engine of its own: what they decide is the same, since their logits are."""
    llm = LLM(model=model, **SETTINGS | options)
    llm.runner.prompts = prompts
    logits = record(llm)
    sequences = run(llm, EXPANDED)
    return [seq.output_ids for seq in sequences], [logits[seq.id] for seq in sequences]


def on_and_off(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    mine = nn.Ranks(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
    model = load_model(path, device="cpu", dtype=dtype, tp=mine, progress=False)
    prompts = Counted(PromptForward(model, "cpu", SPSettings(mode="on")))
    off = serve(model, None, use_prefix_cache=False, max_prompt_tokens=2048)
    for chunk in (7, 64):
        on = serve(model, prompts, max_prompt_tokens=chunk)
        assert on[0] == off[0]
        for ours, theirs in zip(on[1], off[1], strict=True):
            assert all(torch.equal(ours[place], theirs[place]) for place in theirs)
    return {
        "sums": len(prompts.prompts.report.summed),
        "text": str(prompts.prompts.report),
        "had_pictures": set(prompts.had_pictures),
        "first": [logits[0] for logits in off[1]],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("dense", torch.float32),
        ("dense", torch.bfloat16),
        ("experts", torch.float32),
        ("experts", torch.bfloat16),
    ],
    ids=str,
)
def test_sequence_parallelism_changes_no_bit(name: str, dtype: torch.dtype, checkpoints: dict[str, Path]) -> None:
    """Logits of all outputs, with and without it: in chunks through pictures, with deepstack, with prefix hits."""
    for result in ranks.shared(2).run(on_and_off, checkpoints[name], dtype, timeout=600):
        assert result["sums"] == COLLECTIVES
        assert "equality: bitwise" in result["text"]
        assert result["had_pictures"] == {True, False}
        if dtype == torch.float32:
            one = serve(load_model(checkpoints[name], device="cpu", dtype=dtype, progress=False), None)
            for ours, theirs in zip(result["first"], one[1], strict=True):
                assert (ours - theirs[0]).abs().max() < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_an_engine_of_two_ranks(name: str, checkpoints: dict[str, Path]) -> None:
    """Rank 0 says what is encoded, dropped and inserted; answers are those of one rank."""
    made: dict[str, Any] = {"dtype": "float32", "max_prompt_tokens": 9, "encoder_cache": 20, **SETTINGS}
    made |= {"use_prefix_cache": False}
    two = LLM(checkpoints[name], tokenizer=ByteTokenizer(), tp=2, sp="on", **made)  # type: ignore[arg-type]
    try:
        logits = record(two)
        sequences = run(two, EXPANDED)
        assert two.stats()["num_encoded"] > 4, "some were dropped, and encoded again"
    finally:
        two.close()
    actual = [logits[seq.id] for seq in sequences]
    one = serve(load_model(checkpoints[name], device="cpu", progress=False), None)
    for seq, ours, output, theirs in zip(sequences, actual, *one, strict=True):
        assert (ours[0] - theirs[0]).abs().max() < BOUND
        assert seq.output_ids == output
