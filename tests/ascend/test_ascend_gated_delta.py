"""whorl.ascend's gated delta operators against whorl.ops, which computes by chunks, and torch's own convolution."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ascend import judge_limit
from torch import Tensor

from whorl import ascend, ops

HALF = torch.bfloat16
NK, NV, DK, DV = 2, 4, 16, 8


def drawn(num_tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Arguments of the rule by torch_npu's names."""
    q, k = (ops.l2_norm(torch.randn(num_tokens, NK, DK) + 0.5).to(dtype) for _ in range(2))
    values = {"query": q, "key": k, "value": torch.randn(num_tokens, NV, DV).to(dtype)}
    return values | {"beta": torch.rand(num_tokens, NV).to(dtype), "g": -0.1 * torch.rand(num_tokens, NV)}


def chunks(values: dict[str, Tensor], lengths: list[int]) -> Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return ops.gated_delta(*(values[n] for n in ("query", "key", "value", "g", "beta")), starts, scale=DK**-0.5)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prompt(values: dict[str, Tensor], states: Tensor, *lengths: int) -> tuple[Tensor, Tensor]:
    more: dict[str, Any] = {"initial_state": states, "actual_seq_lengths": ints(*lengths), "scale": DK**-0.5}
    with ascend.limits("ignore"):
        return ascend.npu_chunk_gated_delta_rule(**values, **more)


def test_a_prompt_is_the_rule() -> None:
    values = drawn(90)
    out, states = prompt(values, torch.zeros(2, NV, DV, DK), 70, 20)
    torch.testing.assert_close(out, chunks(values, [70, 20]), rtol=2e-5, atol=2e-6)
    first = {n: x[:30] for n, x in values.items()}
    rest = {n: x[30:70] for n, x in values.items()}
    before, middle = prompt(first, torch.zeros(1, NV, DV, DK), 30)
    after, last = prompt(rest, middle, 40)
    torch.testing.assert_close(torch.cat((before, after)), out[:70])
    torch.testing.assert_close(last[0], states[0])
    assert not torch.equal(middle, last)  # initial_state is not written


def test_tokens_continue_a_prompt_and_go_back_to_accepted_ones() -> None:
    values = drawn(40)
    expected = chunks(values, [40])
    _, after = prompt({n: x[:30] for n, x in values.items()}, torch.zeros(1, NV, DV, DK), 30)
    states = torch.zeros(9, NV, DV, DK)
    states[5] = after[0]

    def step(first: int, end: int, *, accepted: int, blocks: Tensor, wrong: int = 0) -> Tensor:
        part = {n: x[first:end].clone() for n, x in values.items()}
        if wrong:
            part["value"][-wrong:] += 1
        more: dict[str, Any] = {"actual_seq_lengths": ints(end - first), "num_accepted_tokens": ints(accepted)}
        with ascend.limits("ignore"):
            return ascend.npu_recurrent_gated_delta_rule(
                **part, state=states, scale=DK**-0.5, ssm_state_indices=blocks, **more
            )

    blocks = ints(5, 2, 7)
    drafts = step(30, 33, accepted=1, blocks=blocks, wrong=1)  # the third token is a wrong draft
    torch.testing.assert_close(drafts[:2], expected[30:32], rtol=2e-5, atol=2e-6)
    out = step(32, 35, accepted=2, blocks=blocks)
    torch.testing.assert_close(out, expected[32:35], rtol=2e-5, atol=2e-6)
    assert not states[[0, 1, 3, 4, 6, 8]].any()


def test_a_decay_of_key_channels() -> None:
    values, states = drawn(4), torch.randn(4, NV, DV, DK)
    more: dict[str, Any] = {"scale": 1.0, "actual_seq_lengths": ints(4), "ssm_state_indices": ints(0, 1, 2, 3)}
    equal = values["g"][:, :, None].expand(4, NV, DK)
    by_head, by_channel = states.clone(), states.clone()
    without = {n: x for n, x in values.items() if n != "g"}
    with ascend.limits("ignore"):
        expected = ascend.npu_recurrent_gated_delta_rule(**values, state=by_head, **more)
        actual = ascend.npu_recurrent_gated_delta_rule(**without, gk=equal, state=by_channel, **more)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(by_channel, by_head)


def convolved(x: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    inputs = torch.cat((before, x)).T[None]
    return torch.nn.functional.conv1d(inputs, weight.T[:, None], groups=x.shape[1])[0].T


@pytest.mark.parametrize("residual", [0, 1])
def test_the_convolution_and_its_cache(residual: int) -> None:
    x, weight, states = torch.randn(12, 64), torch.randn(3, 64), torch.randn(6, 4, 64)
    before = states.clone()
    y = ascend_conv(
        x,
        weight,
        states,
        query_start_loc=ints(0, 5, 5, 12),
        cache_indices=ints(4, 2, 0),
        num_computed_tokens=ints(3, 1, 0),
        residual_connection=residual,
    )
    first, second = convolved(x[:5], before[4, 2:], weight), convolved(x[5:], torch.zeros(2, 64), weight)
    torch.testing.assert_close(y, torch.cat((first, second)) + residual * x)
    assert torch.equal(states[4], x[1:5])
    assert torch.equal(states[0], x[8:])
    assert torch.equal(states[[1, 2, 3, 5]], before[[1, 2, 3, 5]])


def test_the_convolution_goes_back_to_accepted_tokens() -> None:
    x, weight, states = torch.randn(2, 3, 64), torch.randn(3, 64), torch.randn(2, 4, 64)
    before = states.clone()
    y = ascend_conv(x, weight, states, num_accepted_tokens=ints(1, 2))
    for b, accepted in enumerate((1, 2)):
        torch.testing.assert_close(y[b], convolved(x[b], before[b, accepted - 1 : accepted + 1], weight))


def ascend_conv(x: Tensor, weight: Tensor, states: Tensor, **more: Any) -> Tensor:
    with ascend.limits("ignore"):
        return ascend.npu_fused_causal_conv1d(x, weight, states, **more)


def half(num_tokens: int, **more: Any) -> dict[str, Any]:
    return drawn(num_tokens, HALF) | more


def rows(count: int, **more: Any) -> dict[str, Any]:
    state = torch.zeros(count, NV, DV, DK, dtype=HALF)
    places = {"actual_seq_lengths": ints(count), "ssm_state_indices": ints(*range(count))}
    return half(count, state=state, scale=1.0, **places) | more


BEYOND: dict[str, tuple[Callable[[], Any], str]] = {
    "npu_chunk_gated_delta_rule": (
        lambda: ascend.npu_chunk_gated_delta_rule(**half(3, initial_state=torch.zeros(1, NV, DV, DK))),
        "the state must be one of bfloat16, got float32",
    ),
    "npu_recurrent_gated_delta_rule": (
        lambda: ascend.npu_recurrent_gated_delta_rule(**rows(9)),
        "a sequence must have 1 to 8 tokens, got 9",
    ),
    "npu_fused_causal_conv1d": (
        lambda: ascend.npu_fused_causal_conv1d(
            *(torch.randn(*shape, dtype=HALF) for shape in ((5, 64), (4, 64), (1, 3, 64))), query_start_loc=ints(0, 5)
        ),
        r"weight must have 3 taps, \[3, dim\], got \(4, 64\)",
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_limit_is_an_error_until_it_is_lifted(name: str) -> None:
    judge_limit(name, *BEYOND[name])


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="scale is None, expected a value"):
        ascend.npu_recurrent_gated_delta_rule(**rows(3, scale=None))
    with pytest.raises(ValueError, match=r"actual_seq_lengths are \[2\], expected numbers of tokens that sum to 3"):
        prompt(half(3), torch.zeros(1, NV, DV, DK), 2)
    with pytest.raises(ValueError, match="conv_mode='pangu' is implemented on an NPU only"):
        ascend_conv(torch.randn(5, 64), torch.randn(3, 64), torch.randn(1, 2, 64), conv_mode="pangu")
    with pytest.raises(RuntimeError, match="a gradient is needed and torch_npu drops it silently"):
        ascend.npu_chunk_gated_delta_rule(**half(3, value=torch.randn(3, NV, DV, requires_grad=True)))
