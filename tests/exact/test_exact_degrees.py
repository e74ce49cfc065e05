"""With tp_segments the number of ranks changes no bit, neither of the engine nor of a trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exact_models import DTYPES, FAMILIES, PARAMS, prompts, scores, stock
from mock_model import ByteTokenizer
from ranks import shared
from torch import Tensor

from whorl import exact, nn
from whorl.engine.llm import LLM
from whorl.engine.sequence import SamplingParams
from whorl.engine.settings import EngineSettings
from whorl.engine.weights import load_model
from whorl.nn import Ranks

# Heads, and channels of experts, that 8 ranks can share.
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "moe_intermediate_size": 48}
SEQUENCES = prompts(3)


def checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model of transformers, and return it."""
    changes = {name: value for name, value in WIDE.items() if family == "qwen3_moe" or not name.startswith("moe")}
    hf = stock(family, dtype, **changes)
    hf.save_pretrained(folder)
    return hf


def logits_of(folder: Path, dtype: torch.dtype, segments: int, *sizes: int) -> dict[int, Tensor]:
    """The logits of packed sequences, by the number of ranks that compute them; on rank 0."""
    import torch.distributed as dist

    answers: dict[int, Tensor] = {}
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if dist.get_rank() >= size:
            continue
        ranks = Ranks(rank=dist.get_rank(), size=size, group=group, segments=segments)
        model: Any = load_model(folder, device="cpu", dtype=dtype, tp=ranks, progress=False)
        with torch.inference_mode():
            answers[size] = model.scored_logits(nn.pack(SEQUENCES, "cpu")).clone()
    return answers


def trained(folder: Path, hf: Any, segments: int) -> Tensor:
    exact.install(hf, tp_segments=segments)
    packed = nn.pack(SEQUENCES, "cpu")
    with torch.no_grad():
        return hf(input_ids=packed.token_ids[None], position_ids=packed.positions[None]).logits[0, packed.scored - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_degree_has_the_same_bits(size: int, family: str, dtype: str, tmp_path: Path) -> None:
    hf = checkpoint(tmp_path, family, DTYPES[dtype])
    sizes = [each for each in (1, 2, 4, 8) if each <= size]
    answers, *_ = shared(size).run(logits_of, tmp_path, DTYPES[dtype], 8, *sizes)
    assert list(answers) == sizes
    assert all(torch.equal(answers[each], answers[1]) for each in sizes)
    assert torch.equal(trained(tmp_path, hf, 8), answers[1])


def test_without_segments_the_degree_shows(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    hf = checkpoint(tmp_path, "qwen3")
    answers, *_ = shared(4).run(logits_of, tmp_path, torch.float32, 0, 1, 4)
    assert not torch.equal(answers[1], answers[4])
    torch.testing.assert_close(answers[1], answers[4], rtol=1e-4, atol=1e-5)
    assert torch.equal(trained(tmp_path, hf, 0), answers[1])


def test_an_engine_of_two_ranks_and_a_trainer_of_one(tmp_path: Path) -> None:
    hf = checkpoint(tmp_path, "qwen3_moe")
    exact.install(hf, tp_segments=8)
    sizes = {"num_blocks": 64, "block_size": 8, "max_model_len": 64}
    llm = LLM(tmp_path, tokenizer=ByteTokenizer(), device="cpu", dtype=torch.float32, tp=2, tp_segments=8, **sizes)
    try:
        outputs = llm.generate(prompts(0), SamplingParams(**PARAMS, seed=0), progress=False)
    finally:
        llm.close()
    version = outputs[0].weight_versions[0][0]
    rollout, trainer = exact.Scores.of(outputs), scores(hf, outputs, version)
    assert exact.certify(rollout, trainer, recomputed=trainer).num_tokens == 32
    exact_again = scores(_other(hf), outputs, version)
    with pytest.raises(exact.NotExactError):
        exact.certify(rollout, exact_again, recomputed=exact_again)


def _other(hf: Any) -> Any:
    """The same model without segments."""
    other = stock("qwen3_moe", **WIDE)
    other.load_state_dict(hf.state_dict())
    exact.install(other)
    return other


def test_gradients_of_segments() -> None:
    """Against those without, in fp64."""
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 32), (9, 32), (9,))
    )
    plain = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(nn.segmented_linear(x, weight, bias, 8), plain)
    torch.autograd.gradcheck(lambda *inputs: nn.segmented_linear(*inputs, 8), (x, weight, bias))


# ---- what is refused


@pytest.mark.parametrize(("size", "segments"), [(1, 6), (4, 2), (3, 8)])
def test_segments_that_no_tree_has(size: int, segments: int) -> None:
    with pytest.raises(ValueError, match="expected a power of two that is a multiple of the ranks"):
        Ranks(size=size, segments=segments)


def test_shares_that_are_no_branch() -> None:
    with pytest.raises(ValueError, match="100 channels cannot be cut into 8 equal segments"):
        nn.Linear(100, 4, shard="row", ranks=Ranks(segments=8))
    with pytest.raises(ValueError, match=r"48 channels cannot be cut into 4 equal segments of which rank 0 of 2"):
        nn.Linear(48, 4, shard="row", parts=(slice(0, 16),), ranks=Ranks(size=2, segments=4))
    with pytest.raises(ValueError, match="down_proj: 160 channels"):
        exact.install(stock("llama"), tp_segments=64)


@pytest.mark.parametrize("changes", [{"sp": "on"}, {"lora": ("a=b",)}])
def test_what_segments_are_not_possible_with(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tp_segments: neither sequence parallelism nor LoRA"):
        EngineSettings(tp_segments=8, **changes)


def test_a_model_that_is_passed_needs_its_own_ranks() -> None:
    from exact_models import serving
    from test_one_arithmetic import engine

    with pytest.raises(ValueError, match="tp_segments needs the path of a model"):
        engine(serving(stock("llama")).model, tp_segments=8)
