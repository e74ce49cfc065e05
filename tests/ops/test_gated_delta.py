"""Gated delta layers against transformers' own functions, in fp64 and in fp32."""

import pytest
import torch
from delta_runs import CHANNELS, HK, HV, WIDTH, D, call, draw, in_cuts, new_lanes
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from whorl import ops

MODULES = [modeling_qwen3_next, modeling_qwen3_5]


def theirs(name: str, module: object, values: dict[str, Tensor], **options: object) -> tuple[Tensor, Tensor]:
    """One of transformers' functions, undecorated, with a batch of one. They compute in fp32, here in fp64."""
    function = getattr(module, name)
    function = getattr(function, "__wrapped__", function)
    q, k = (values[n].repeat_interleave(HV // HK, 1)[None] for n in ("q", "k"))
    v, g, beta = (values[n][None] for n in ("v", "g", "beta"))
    out, state = function(q, k, v, g, beta, output_final_state=True, **options)
    return out[0], state[0]


def packed(values: dict[str, Tensor], lengths: tuple[int, ...]) -> Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return ops.gated_delta(**values, starts=starts, scale=D**-0.5)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_rule_is_transformers(module: object, name: str) -> None:
    values = draw(150, torch.float32)
    ours = packed({n: x.double() for n, x in values.items()}, (150,))
    expected, _ = theirs(name, module, values)
    # Theirs is in fp32; ours in fp64 shows how far from exact they are, and ours in fp32 must be as near.
    error, of_theirs = ((x - ours).norm() / ours.norm() for x in (packed(values, (150,)), expected))
    assert of_theirs < 1e-6
    assert error < 3 * of_theirs


def test_sequences_do_not_meet() -> None:
    values = draw(150, torch.float32)
    alone = [packed({n: x[part] for n, x in values.items()}, (part.stop - part.start,)) for part in PARTS]
    assert torch.equal(packed(values, (70, 0, 1, 79)), torch.cat(alone))


PARTS = [slice(0, 70), slice(70, 71), slice(71, 150)]


def test_the_state_is_transformers() -> None:
    values, states = draw(192, torch.float32), new_lanes(2, torch.float32)
    in_cuts("rule", values, [64, 100, 101, 128, 192], states, lane=1)
    _, expected = theirs("torch_recurrent_gated_delta_rule", modeling_qwen3_5, values)
    assert (states["state"][1] - expected).norm() < 2e-6 * expected.norm()
    assert not states["state"][0].any()


def test_the_convolution_is_transformers() -> None:
    x, weight = torch.randn(90, CHANNELS), torch.randn(CHANNELS, WIDTH)
    expected = torch.nn.functional.silu(
        torch.nn.functional.conv1d(x.T[None], weight[:, None], padding=WIDTH - 1, groups=CHANNELS)
    )[0, :, :90].T
    actual = ops.causal_conv(x, weight, torch.tensor([0, 90], dtype=torch.int32))
    torch.testing.assert_close(actual, expected)
    states = new_lanes(1, torch.float32)
    cached = call("conv", {"x": x, "weight": weight}, states, [(0, 0, 90)])
    assert torch.equal(cached, actual)
    assert torch.equal(states["tail"][0], x[61:64])


def test_gates_and_norms_are_transformers() -> None:
    a, b, a_log, bias = torch.randn(7, 5), torch.randn(7, 5), torch.randn(5), torch.randn(5)
    g, beta = ops.delta_gates(a, b, a_log, bias)
    torch.testing.assert_close(g, -a_log.exp() * torch.nn.functional.softplus(a + bias))
    torch.testing.assert_close(beta, b.sigmoid())
    x, z = torch.randn(7, 5, 24), torch.randn(7, 5, 24)
    torch.testing.assert_close(ops.l2_norm(x), modeling_qwen3_5.l2norm(x))
    theirs = modeling_qwen3_5.Qwen3_5RMSNormGated(24)
    torch.nn.init.normal_(theirs.weight)
    torch.testing.assert_close(ops.gated_rms_norm(x, z, theirs.weight), theirs(x, z))
    torch.testing.assert_close(ops.output_gate(x, z), x * z.sigmoid())


# ---- gradients


def gradients(function: object, values: dict[str, Tensor], cotangent: Tensor) -> list[Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
    return list(torch.autograd.grad(function(leaves), list(leaves.values()), cotangent))  # type: ignore[operator]


def recurrence(values: dict[str, Tensor]) -> Tensor:
    """The rule token by token, as its docstring has it."""
    q, k = (values[n].repeat_interleave(HV // HK, 1) for n in ("q", "k"))
    state, outs = q.new_zeros(HV, D, values["v"].shape[2]), []
    for t in range(len(q)):
        state = values["g"][t].exp()[:, None, None] * state
        error = values["v"][t] - (k[t, :, :, None] * state).sum(1)
        state = state + k[t, :, :, None] * (values["beta"][t, :, None] * error)[:, None]
        outs.append(D**-0.5 * (q[t, :, :, None] * state).sum(1))
    return torch.stack(outs)


def test_gradients_of_the_rule_are_autograds() -> None:
    values = draw(150, torch.float64)
    cotangent = torch.randn(150, *values["v"].shape[1:], dtype=torch.float64)

    def packed_in_two(leaves: dict[str, Tensor]) -> Tensor:
        return packed(leaves, (70, 80))

    def one_by_one(leaves: dict[str, Tensor]) -> Tensor:
        return torch.cat([recurrence({n: x[part] for n, x in leaves.items()}) for part in (slice(70), slice(70, 150))])

    torch.testing.assert_close(packed_in_two(values), one_by_one(values), rtol=1e-10, atol=1e-12)
    for actual, expected in zip(
        *(gradients(f, values, cotangent) for f in (packed_in_two, one_by_one)), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def check_gradients(op: ops.Op, *arguments: Tensor, rest: tuple[Tensor, ...] = (), **options: object) -> None:
    leaves = [x.double().requires_grad_() for x in arguments]
    assert torch.autograd.gradcheck(lambda *tensors: op(*tensors, *rest, **options), leaves)


def test_gradients_of_the_rest_are_numerical_ones() -> None:
    x, z = torch.randn(5, 3, 6), torch.randn(5, 3, 6)
    check_gradients(ops.l2_norm, x)
    check_gradients(ops.output_gate, x, z)
    for activation in ("silu", "sigmoid"):
        check_gradients(ops.gated_rms_norm, x, z, torch.randn(6), activation=activation)
    check_gradients(ops.delta_gates, x, z, torch.randn(6), torch.randn(6))
    starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    check_gradients(ops.causal_conv, torch.randn(10, 3), torch.randn(3, 4), rest=(starts,))
