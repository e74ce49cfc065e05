"""Converters: the same numbers by our operators, in TorchTitan's models and ours, alone, sharded and compiled."""

import copy
from typing import Any

import pytest
import torch
from ranks import shared
from titan_models import LENGTH, MODELS, VOCAB, build, convert, initialise, job, run, small
from torch import Tensor, nn

from whorl import ops
from whorl.ops.cpu import library
from whorl.titan import cpu, local

pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")
cpu.install()

from whorl.titan.converters import gmm, permute, rms_norm, rope  # noqa: E402
from whorl.titan.converters.conversion import replace_forward  # noqa: E402
from whorl.titan.converters.table import CONVERTERS  # noqa: E402
from whorl.titan.local import assign_padding  # noqa: E402

OURS = ("whorl_rms_norm", "whorl_rope", "whorl_permute", "whorl_gmm", "whorl_dsa")
FOR = {
    "llama3": OURS[:2],
    "qwen3": OURS[:4],
    "deepseek_v3": OURS[:4],
    "deepseek_v32": OURS,
}


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(5))


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-5) -> None:
    """Of the largest element of each tensor; float32 sums in another order."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp_min(1e-6)
        assert error < bound, f"{name}: {error:.3g}"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same(name: str) -> None:
    model = build(name)
    expected = run(model, tokens())
    for one in FOR[name]:
        check_equal(run(convert(copy.deepcopy(model), one), tokens()), expected)
    converted = convert(copy.deepcopy(model), *FOR[name])
    check_equal(run(converted, tokens()), expected)
    assert converted.state_dict().keys() == model.state_dict().keys()
    check_equal(run(copy.deepcopy(converted), tokens()), expected)  # as pipeline stages are made


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3"])
def test_positions_are_looked_up(name: str) -> None:
    model = build(name)
    positions = torch.stack([torch.randperm(LENGTH), torch.randperm(LENGTH)])
    converted = convert(copy.deepcopy(model), "whorl_rope")
    for where in (positions, positions[:1]):
        check_equal(run(converted, tokens(), positions=where), run(model, tokens(), positions=where))


def test_the_operators_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for module, name in ((local, "rms_norm"), (permute, "permute"), (permute, "unpermute"), (gmm, "grouped_matmul")):
        op = getattr(ops, name)
        monkeypatch.setattr(module.ops, name, lambda *a, op=op, name=name, **k: (called.append(name), op(*a, **k))[1])
    model = build("deepseek_v3")
    with torch.no_grad():
        model(tokens())
        assert not called
        convert(model, *OURS[:4])
        called.clear()
        model(tokens())
    # norms: 2 in each of 2 blocks, 2 in each attention, 1 at the end; a mixture of experts in the second block
    assert {name: called.count(name) for name in called} == {
        "rms_norm": 9,
        "permute": 1,
        "unpermute": 1,
        "grouped_matmul": 3,
    }


def test_torchtitans_own_rotation_stays() -> None:
    from torchtitan.models.llama3.model import model as llama3

    before = llama3.apply_rotary_emb
    model = convert(build("llama3"), "whorl_rope")
    forward = type(model.layers["0"].attention).forward  # type: ignore[index, union-attr]
    assert llama3.apply_rotary_emb is before
    assert llama3.Attention.forward.__globals__["apply_rotary_emb"] is before
    assert forward.__globals__["apply_rotary_emb"] is rope.FUNCTIONS[before]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_pass_in_each_dtype(dtype: str) -> None:
    """The comparison itself, for both scorings and both products."""
    config = job(dtype)
    for name in MODELS:
        model = build(name)
        for module in model.modules():
            if hasattr(module, "use_grouped_mm"):
                module.use_grouped_mm = dtype == "bfloat16"
        convert(model, *FOR[name], config=config)


def test_autocast_is_followed() -> None:
    model = build("deepseek_v3")
    converted = convert(copy.deepcopy(model), *OURS[:4])
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = run(model, tokens()), run(converted, tokens())
    assert actual["logits"].dtype == expected["logits"].dtype
    exact = run(model, tokens())
    for name, value in exact.items():
        theirs, ours = ((x[name].float() - value).square().mean().sqrt() for x in (expected, actual))
        assert ours < 2 * theirs + 1e-6, name


def test_names_of_the_ascend_plug_in() -> None:
    for name in OURS:
        assert CONVERTERS[name.replace("whorl_", "npu_")] is CONVERTERS[name]


# ---- loud


def test_a_match_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"whorl_gmm matched nothing in Transformer, which consists of .*FeedForward"):
        convert(build("llama3"), "whorl_gmm")
    with pytest.raises(ValueError, match="whorl_dsa matched nothing"):
        convert(build("deepseek_v3"), "whorl_dsa")


def test_twice_is_an_error() -> None:
    for name in OURS:
        model = convert(build("deepseek_v32"), name)
        with pytest.raises(ValueError, match=f"{name} matched nothing"):
            convert(model, name)


def test_what_is_passed_over_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.RMSNorm(8, elementwise_affine=False), nn.RMSNorm((4, 8)))
    with pytest.raises(ValueError, match=r"skipped 0 \(it has no weight\); 1 \(it normalises 2 dims, \[4, 8\]\)"):
        convert(plain, "whorl_rms_norm")
    with caplog.at_level("INFO"):
        convert(nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8, elementwise_affine=False)), "whorl_rms_norm")
    assert "1 modules are not converted: 1 (it has no weight)" in caplog.text
    backend = "cpp" if library.missing() is None else "torch"
    assert f"whorl_rms_norm: 1 modules, rms_norm by {backend}" in caplog.text


def test_other_ways_to_rotate_and_dispatch_are_refused() -> None:
    from torchtitan.models.llama4.model.model import Attention
    from torchtitan.models.moe.moe import MoE

    class Other(MoE):
        def forward(self, x: Tensor) -> Tensor:
            return x

    attention = Attention.__new__(Attention)
    nn.Module.__init__(attention)
    with pytest.raises(ValueError, match=r"torchtitan.models.llama4.model.model.apply_rotary_emb is unknown"):
        convert(nn.Sequential(attention), "whorl_rope")
    model = build("deepseek_v3")
    model.layers["1"].moe.__class__ = Other  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="Other has another dispatch"):
        convert(model, "whorl_permute")


def _off(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return ops.rms_norm(x, self.weight, self.eps) * (1 + 2**-18)


def _wrong_gradient(self: nn.RMSNorm, x: Tensor) -> Tensor:
    y = ops.rms_norm(x, self.weight, self.eps)
    return y + (self.weight - self.weight.detach()) * 1e-3


@pytest.mark.parametrize("forward", [_off, _wrong_gradient])
def test_other_numbers_are_an_error(forward: Any) -> None:
    """In float32 an error of 2**-18 is far over twice the rounding error; so is a gradient that is off."""

    class Off(rms_norm.RMSNormConverter):
        name = "off"

        def replace(self, module: nn.Module) -> None:
            replace_forward(module, forward)

    model = build("llama3")
    with pytest.raises(ValueError, match=r"off: on a small RMSNorm in torch.float32: .*times"):
        Off(job(), None).convert(model)  # type: ignore[arg-type]
    assert {type(m).__name__ for m in model.modules()} >= {"RMSNorm"}, "nothing was replaced"
    Off(job(check_converters=False), None).convert(model)  # type: ignore[arg-type]


def test_tokens_of_each_expert_are_counted_as_before() -> None:
    """What the biases of the experts are balanced by."""
    torch.manual_seed(0)
    plain = permute.MoE(permute.MoEArgs(num_experts=4, num_shared_experts=0, top_k=2), dim=16, hidden_dim=8)
    plain.experts = permute.ScalingExperts(4)
    converted = copy.deepcopy(plain)
    permute.PermuteConverter.replace(None, converted)  # type: ignore[arg-type]
    for x in torch.randn(2, 1, 6, 16):
        assert torch.equal(plain(x) != 0, converted(x) != 0)
    assert plain.tokens_per_expert.sum() == 2 * 6 * 2
    assert torch.equal(converted.tokens_per_expert, plain.tokens_per_expert)


def test_wrong_dispatch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    unpermute = ops.unpermute
    monkeypatch.setattr(permute.ops, "unpermute", lambda rows, places, probs: unpermute(rows, places.flip(0), probs))
    with pytest.raises(ValueError, match="whorl_permute: on a small"):
        convert(build("qwen3"), "whorl_permute")


def test_comparing_draws_no_random_numbers() -> None:
    model = build("deepseek_v32")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    convert(model, *OURS)
    assert torch.equal(torch.rand(3), expected)


def test_padding_rows_go_to_the_last_expert() -> None:
    assert assign_padding(torch.tensor([3, 0, 2], dtype=torch.int32), 9).tolist() == [3, 0, 6]
    assert assign_padding(torch.tensor([4, 5]), 9).tolist() == [4, 5]


# ---- compiled


def test_a_compiled_block_has_no_breaks() -> None:
    """Both in one process: torch.compile must not take the code of one for the other's."""
    model = build("llama3")
    converted = convert(copy.deepcopy(model), *OURS[:2])
    outputs = []
    for one in (model, converted):
        block = torch.compile(one.layers["0"], backend="aot_eager", fullgraph=True)  # type: ignore[index]
        x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1))
        outputs.append(block(x, one.freqs_cis, None))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)


# ---- sharded


def _sharded(name: str, layout: dict[str, int], names: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """On one of the ranks: the model as TorchTitan parallelises it, before and after converting."""
    from whorl.titan import cpu

    cpu.install()
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.train_spec import get_train_spec

    from whorl.titan.register import register

    register()
    degrees = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | layout
    dims = ParallelDims(**degrees, world_size=torch.distributed.get_world_size())
    config = job()
    config.parallelism.expert_parallel_degree = degrees["ep"]
    config.parallelism.tensor_parallel_degree = degrees["tp"]
    cls, args = small(name)
    answers = []
    for chosen in ((), names):
        with torch.device("meta"):
            model = cls(args)
        convert(model, *chosen, config=config)
        get_train_spec(name).parallelize_fn(model, dims, config)
        model.to_empty(device="cpu")
        torch.manual_seed(11)
        initialise(model)
        replica = torch.distributed.get_rank() // degrees["tp"]
        mine = tokens(4).chunk(dims.world_size // degrees["tp"])[replica]
        results = run(model, mine)
        answers.append({k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in results.items()})
    return answers


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("deepseek_v3", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"tp": 2}, marks=pytest.mark.slow),
        ("llama3", {"tp": 2}),
        ("deepseek_v32", {"ep": 2}),
        ("deepseek_v32", {"tp": 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "x".join(f"{k}{v}" for k, v in x.items()),
)
def test_sharded_models_compute_the_same(name: str, layout: dict[str, int]) -> None:
    for expected, actual in shared(2).run(_sharded, name, layout, FOR[name], timeout=300):
        check_equal(actual, expected)


@pytest.mark.slow
def test_tokens_cut_among_tensor_parallel_ranks() -> None:
    """Whole experts over all ranks: each routes its part of the tokens, and the offset comes by a hook."""
    for expected, actual in shared(4).run(_sharded, "deepseek_v3", {"tp": 2, "ep": 4}, FOR["deepseek_v3"], timeout=300):
        check_equal(actual, expected)
