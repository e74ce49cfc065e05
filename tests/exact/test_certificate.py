"""A certificate is given for equal bits alone, and refused where the comparison would show nothing."""

import dataclasses
from typing import Any

import pytest
import torch
from exact_models import give, sampled, scores, serving, stock

from whorl import exact
from whorl.engine.sequence import SamplingParams

IDS = [[1, 2, 3], [4]]
LOGPROBS = [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25])]


def side(**changes: Any) -> exact.Scores:
    return dataclasses.replace(exact.Scores(token_ids=IDS, logprobs=LOGPROBS, versions=("3",)), **changes)


def test_equal_bits_are_certified() -> None:
    certificate = exact.certify(side(), side(logprobs=[x.tolist() for x in LOGPROBS]), recomputed=side())
    assert (certificate.num_tokens, certificate.num_sequences, certificate.mismatches) == (4, 2, ())
    assert str(certificate).startswith("whorl.exact: EXACT: 0 mismatches of 8 comparisons\n")


@pytest.mark.parametrize("where", ["trainer", "recomputed"])
def test_one_bit_is_enough(where: str) -> None:
    other = [LOGPROBS[0].clone(), LOGPROBS[1]]
    other[0][1] = torch.nextafter(other[0][1], torch.tensor(0.0))
    sides = {"trainer": side(), "recomputed": side(), where: side(logprobs=other)}
    with pytest.raises(exact.NotExactError) as caught:
        exact.certify(side(), **sides)
    assert len(caught.value.certificate.mismatches) == 1
    assert f"answer 0, token 1: rollout and {where} have -2.0 (c0000000)" in str(caught.value)


NAN = [torch.tensor([-1.0, float("nan"), -0.5]), LOGPROBS[1]]
INFINITE = [LOGPROBS[0], torch.tensor([float("inf")])]
MASKED = [torch.tensor([-1.0, -2.0, float("-inf")]), LOGPROBS[1]]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no token": ({"token_ids": [[], []], "logprobs": [[], []]}, "has no token"),
    "no answer": ({"token_ids": [], "logprobs": []}, "has no token"),
    "nan": ({"logprobs": NAN}, "the logprob of token 1 is nan"),
    "infinite": ({"logprobs": INFINITE}, "the logprob of token 0 is inf"),
    "masked": ({"logprobs": MASKED}, "the logprob of token 2 is -inf"),
    "a token skipped": ({"logprobs": [LOGPROBS[0][1:], LOGPROBS[1]]}, "none may be skipped"),
    "an answer skipped": (
        {"token_ids": IDS[:1], "logprobs": LOGPROBS[:1]},
        "3 tokens, expected those of the rollout, 4",
    ),
    "a token more": (
        {"token_ids": [[1, 2, 3, 5], [4]], "logprobs": [torch.ones(4), LOGPROBS[1]]},
        "tokens, expected those of the rollout",
    ),
    "an answer without logprobs": ({"logprobs": LOGPROBS[:1]}, "2 answers and logprobs of 1"),
    "other tokens": ({"token_ids": [[1, 2, 4], [4]]}, "other tokens than the rollout"),
    "another version": ({"versions": ("4",)}, "versions of the weights"),
    "two versions": ({"versions": ("3", "4")}, "versions of the weights"),
    "no version": ({"versions": ()}, "versions of the weights"),
    "temperature": ({"distribution": exact.Distribution(temperature=0.5)}, "another distribution"),
    "top-p": ({"distribution": exact.Distribution(top_p=0.9)}, "another distribution"),
    "grammar": ({"distribution": exact.Distribution(grammar="json")}, "another distribution"),
    "rounded": ({"logprobs": [x.bfloat16() for x in LOGPROBS]}, "expected fp32 values"),
    "not rounded": ({"logprobs": [[-1.0, -2.0, -0.1], [-0.25]]}, "expected fp32 values"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["trainer", "recomputed", "rollout"])
def test_what_shows_nothing_is_refused(name: str, where: str) -> None:
    changes, message = REFUSED[name]
    sides = {"rollout": side(), "trainer": side(), "recomputed": side(), where: side(**changes)}
    message = message if where != "rollout" or "3 tokens" not in message else "4 tokens"
    with pytest.raises(ValueError, match=message):
        exact.certify(**sides)


def test_what_the_engine_says_of_its_distribution() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, logit_bias={3: 1.0}, allow=lambda ids: None)
    assert exact.Distribution.of(params, "raw_logprobs") == exact.Distribution()
    expected = exact.Distribution(temperature=0.5, top_p=0.9, grammar="allow", changes=(("logit_bias of 3", 1.0),))
    assert exact.Distribution.of(params, "processed_logprobs") == expected
    with pytest.raises(ValueError, match="expected raw_logprobs"):
        exact.Distribution.of(params, "other")


@pytest.mark.parametrize("part", ["model.layers.1.self_attn.o_proj", "model.norm", "lm_head"])
def test_a_planted_rounding_is_seen(part: str) -> None:
    """In the trainer alone, of one module's input, to bf16."""
    hf = stock("qwen3")
    exact.install(hf)
    llm = serving(hf)
    give(llm, hf, "start")
    outputs = sampled(llm)
    again = scores(hf, outputs, "start")
    exact.certify(exact.Scores.of(outputs), again, recomputed=again)
    hf.get_submodule(part).register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16().float(),))
    with pytest.raises(exact.NotExactError) as caught:
        exact.certify(exact.Scores.of(outputs), scores(hf, outputs, "start"), recomputed=again)
    assert len(caught.value.certificate.mismatches) > 0
