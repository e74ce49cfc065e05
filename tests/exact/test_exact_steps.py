"""A stock model of transformers, trained with whorl.exact, has the bits of the engine that samples for it."""

from typing import Any

import pytest
import torch
from exact_models import DTYPES, FAMILIES, give, sampled, scores, sequences, serving, stock
from kernels import without_cpu_kernels

from whorl import exact


def train(hf: Any, steps: int) -> int:
    """Sample, certify and update; return how many tokens were compared."""
    llm, count = serving(hf), 0
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-2)
    for step in range(steps):
        give(llm, hf, f"step {step}")
        outputs = sampled(llm, seed=step)
        with torch.no_grad():
            again = scores(hf, outputs, f"step {step}")
        trainer = scores(hf, outputs, f"step {step}")
        count += exact.certify(exact.Scores.of(outputs), trainer, recomputed=again).num_tokens
        optimizer.zero_grad()
        (-torch.cat(trainer.logprobs).mean()).backward()
        optimizer.step()
    return count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_have_no_mismatch(family: str, dtype: str) -> None:
    hf = stock(family, DTYPES[dtype])
    before = {name: each.clone() for name, each in hf.named_parameters()}
    exact.install(hf)
    assert train(hf, 20) == 20 * 4 * 8
    assert all(not torch.equal(each, before[name]) for name, each in hf.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_without_kernels_of_whorl_too(family: str) -> None:
    """As on a machine without a compiler: torch's products, in the engine's forms."""
    with without_cpu_kernels():
        hf = stock(family)
        exact.install(hf)
        assert train(hf, 2) == 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_model_has_other_bits(family: str, dtype: str) -> None:
    """Or the tests above would show nothing. `uninstall` brings them back."""
    hf = stock(family, DTYPES[dtype])
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    before = hf(input_ids=ids, use_cache=False).logits
    with exact.install(hf):
        assert train(hf, 1) == 32
        with torch.no_grad():
            hf.load_state_dict(stock(family, DTYPES[dtype]).state_dict())
    assert torch.equal(hf(input_ids=ids, use_cache=False).logits, before)
    llm = serving(hf)
    give(llm, hf, "start")
    outputs = sampled(llm)
    trainer = scores(hf, outputs, "start")
    with pytest.raises(exact.NotExactError, match="NOT EXACT"):
        exact.certify(exact.Scores.of(outputs), trainer, recomputed=trainer)


def test_windows_ties_biases_and_scaled_rotations() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
    for family, changes in (
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"rope_parameters": scaling}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ):
        hf = stock(family, **changes)
        exact.install(hf)
        assert train(hf, 2) == 64


def test_a_temperature() -> None:
    hf = stock("qwen3")
    exact.install(hf)
    llm = serving(hf)
    llm.sampler.mode = "processed_logprobs"
    give(llm, hf, "start")
    outputs = sampled(llm, temperature=0.7)
    at = exact.Distribution(temperature=0.7)
    values = exact.sequence_logprobs(hf, sequences(outputs), temperature=0.7)
    own = [each[len(output.prompt_ids) - 1 :] for each, output in zip(values, outputs, strict=True)]
    ids = [output.token_ids for output in outputs]
    trainer = exact.Scores(token_ids=ids, logprobs=own, versions=("start",), distribution=at)
    assert "temperature=0.7" in str(exact.certify(exact.Scores.of(outputs, at), trainer, recomputed=trainer))
    with pytest.raises(ValueError, match="another distribution"):
        exact.certify(exact.Scores.of(outputs), trainer, recomputed=trainer)


# ---- gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_against_fp64(family: str, dtype: str) -> None:
    """The error of installed gradients is at most twice that of the stock model's."""
    ids = torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    everything = {"num_experts_per_tok": 8} if family == "qwen3_moe" else {}  # a rounding may not change a choice

    def gradients(hf: Any) -> dict[str, torch.Tensor]:
        hf.set_experts_implementation("eager")  # the one that takes fp64
        logits = hf(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        torch.nn.functional.cross_entropy(wide, ids[:, 1:].flatten()).backward()
        return {name: each.grad.double() for name, each in hf.named_parameters()}

    plain = stock(family, DTYPES[dtype], **everything)
    expected = gradients(stock(family, DTYPES[dtype], **everything).double())
    theirs = gradients(plain)
    hf = stock(family, DTYPES[dtype], **everything)
    exact.install(hf)
    ours = gradients(hf)
    for name, gradient in expected.items():
        errors = [float((each[name] - gradient).norm() / gradient.norm()) for each in (ours, theirs)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (name, errors)
