"""What the passes leave alone, refuse or warn of, and what they then say; on a pretended group of two ranks."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from passes_cases import captured, kinds
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from whorl import passes
from whorl.passes import Layout, SequenceParallel
from whorl.passes.cost import least_tokens, table

C = 16
X, W = torch.randn(6, C), torch.randn(C, C)
PLAIN = SequenceParallel(min_tokens=1 << 40, sharded=("weight",))
ON = SequenceParallel(min_tokens=0, sharded=("weight",))


@pytest.fixture(autouse=True, scope="module")
def _two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def summed(x: Tensor, group: Any = None) -> Tensor:
    return functional.all_reduce(x, "sum", group or dist.group.WORLD)


def rewritten(function: Callable[..., Any], *arguments: Tensor, **options: Any) -> Any:
    """The graph of function(weight, ...), whose weight differs between ranks."""
    gm = captured(function, (W, *arguments), False)
    first = next(n.name for n in gm.graph.nodes if n.op == "placeholder")
    return passes.rewrite(gm, SequenceParallel(**options), inputs={first: Layout.VARYING})


class Model(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(W, requires_grad=False), function

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(self.weight, *arguments)


def compiled(function: Callable[..., Any], *arguments: Tensor, config: SequenceParallel = ON, **options: Any) -> Any:
    torch._dynamo.reset()
    model = passes.compile(Model(function), config, backend="eager", **options)
    with torch.no_grad():
        model(*arguments)
    return model


def gated(weight: Tensor, x: Tensor) -> Tensor:
    return summed(x @ weight).relu() @ weight


# ---- sums that are not split


def test_a_graph_captured_with_as_many_tokens_as_ranks() -> None:
    """A rank's rows are one then, and one is what broadcasting asks about."""

    def function(weight: Tensor, x: Tensor) -> Tensor:
        return (summed(x @ weight).relu() + torch.arange(C)) @ weight

    gm = captured(lambda x: function(W, x), (X[:2],), True)
    assert passes.rewrite(gm, SequenceParallel(sharded=("_tensor_constant0",))).meta["report"].rewrites == 1
    assert compiled(function, X[:2], dynamic=True).last_run == "rewritten"


def test_a_sum_of_numbers_stays_as_it_is() -> None:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return gated(weight, x), summed((x @ weight).sum())

    assert compiled(function, X, config=PLAIN).last_run == "plain"
    model = compiled(function, X)
    assert model.last_run == "rewritten"
    assert "all_reduce [] (test_passes_limits.py" in str(model.report)
    assert model.report.bytes_before() == 2 * 3 * 4 * C + 2 * 4


def test_sums_that_cannot_be_split_are_in_rank_order_like_those_of_the_plain_graph() -> None:
    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return gated(weight, x), summed((x @ weight).sum(-1))

    gm = rewritten(function, X)
    assert kinds(gm).get("all_reduce", 0) == 0
    assert kinds(gm)["ordered_all_reduce"] == 1
    assert kinds(rewritten(function, X, ordered=False))["all_reduce"] == 1


def test_the_backends_own_sums_of_any_number_of_tokens() -> None:
    model = compiled(gated, X, config=dataclasses.replace(ON, ordered=False), dynamic=True)
    assert model.last_run == "rewritten"
    assert model.report.exactness == "up to the order of sums, which is left to the backend"
    with torch.no_grad():
        assert model(X[:5]).shape == (5, C)
    assert len(model.reports) == 1


def test_rows_that_only_data_can_count() -> None:
    def function(weight: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return gated(weight, x), summed(x[mask] @ weight).relu() @ weight

    mask = torch.tensor([True, False, True, True, False, True])
    for dynamic in (False, True):
        model = compiled(function, X, mask, dynamic=dynamic)
        assert model.last_run == "rewritten"
        left = [c for c in model.report.collectives if not c.rewritten]
        assert len(left) == 1
        assert "is known only from data" in left[0].reason


# ---- padding


def test_without_padding_rows_that_ranks_do_not_share_stay_together() -> None:
    with pytest.warns(RuntimeWarning, match="5 rows do not divide evenly over 2 ranks, and pad is off"):
        assert not rewritten(gated, X[:5], pad=False).meta["report"].rewrites
    assert rewritten(gated, X, pad=False).meta["report"].rewrites == 1
    model = compiled(gated, X, config=dataclasses.replace(ON, pad=False), dynamic=True)
    runs = [model.last_run]
    with torch.no_grad():
        for count in (5, 4, 3):
            model(X[:count])
            runs.append(model.last_run)
    assert runs == ["rewritten", "plain", "rewritten", "plain"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_tokens": 9}, "6 tokens, and min_tokens is 9"),
        ({"min_tokens": 0, "pad": False}, "s[0-9]+ tokens may not divide evenly over 2 ranks, and pad is off"),
    ],
)
def test_the_pass_inside_inductor_says_why_it_left_a_graph(options: dict[str, Any], reason: str) -> None:
    from whorl.passes.inductor import SequenceParallelPass

    run = SequenceParallelPass(SequenceParallel(**options))
    with pytest.raises(RuntimeError, match="has not run yet"):
        _ = run.report
    gm = captured(gated, (W, X), "pad" in options)
    run(gm.graph)
    assert kinds(gm)["ordered_all_reduce"] == 1
    with pytest.raises(RuntimeError, match=f"nothing was rewritten: .*{reason}"):
        _ = run.report


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_pass_inside_inductor_rewrites_from_min_tokens_on(is_dynamic: bool) -> None:
    from whorl.passes.inductor import SequenceParallelPass

    at, below = (SequenceParallelPass(SequenceParallel(min_tokens=count)) for count in (6, 7))
    for run in (at, below):
        run(captured(lambda x: gated(W, x), (X,), is_dynamic).graph)
    assert at.report.rewrites == 1, "6 tokens reach 6"
    with pytest.raises(RuntimeError, match="nothing was rewritten: 6 tokens, and min_tokens is 7"):
        _ = below.report


# ---- what was meant


def test_settings_that_cannot_be_meant_are_errors() -> None:
    with pytest.raises(ValueError, match=r"skip is 'fold', expected several names: \('fold',\)"):
        SequenceParallel(skip="fold")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sharded is 'up_proj'"):
        SequenceParallel(sharded="up_proj")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_tokens is True"):
        SequenceParallel(min_tokens=True)
    with pytest.raises(ValueError, match="this rank is not in the group"):
        SequenceParallel(group=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_declaration_that_matches_nothing_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match=r"sharded has \['wieght'\], which match no input of the graph; .*'weight'"):
        compiled(gated, X, config=dataclasses.replace(ON, sharded=("wieght", "weight")))
    with pytest.warns(RuntimeWarning, match=r"sharded has \['nobody'\]"):
        passes.rewrite(captured(gated, (W, X), False), SequenceParallel(sharded=("nobody",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled(gated, X)


def test_an_input_of_one_repeated_value_is_named() -> None:
    """A first call with zeros would keep the plain graph for good."""

    def function(weight: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        return (summed(x @ weight) + residual) @ weight

    with pytest.warns(RuntimeWarning, match=r"one repeated value, .* the same: \w*1_?; .*first call with real"):
        model = compiled(function, X, torch.zeros(6, C))
    assert "one repeated value" in str(model.report)
    assert not compiled(function, X, torch.randn(6, C)).report.unproven
    empty = compiled(function, X[:0], torch.zeros(0, C))
    assert not empty.report.unproven, "no tokens are the same tokens everywhere"
    assert empty.last_run == "rewritten"


def test_gradients_are_refused_for_inputs_too() -> None:
    torch._dynamo.reset()
    model = passes.compile(lambda x: summed(x @ W).relu(), ON, backend="eager")
    with pytest.raises(ValueError, match="is for inference"):
        model(X.clone().requires_grad_())


def test_too_many_captures_say_what_to_do() -> None:
    torch._dynamo.reset()
    model = passes.compile(Model(gated), ON, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        model(X[:2])
        model(X[:3])
        with pytest.raises(RuntimeError, match=r"captured this model 2 times .* pass compile\(dynamic=True\)"):
            model(X[:4])


def test_each_capture_has_its_own_folder_of_graphs(tmp_path: Path) -> None:
    model = compiled(gated, X, dump=tmp_path, dynamic=False)
    with torch.no_grad():
        model(X[:4])
    for i, rows in enumerate((6, 4)):
        text = (tmp_path / f"graph{i}_rank0" / "3_split_after.txt").read_text()
        assert f"whorl.all_gather.default](args = (%ordered_reduce_scatter_default, {rows}" in text


# ---- bytes


def test_bytes_of_sums_with_other_rows_and_over_other_groups() -> None:
    alone = dist.new_group([0])

    def function(weight: Tensor, x: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        return gated(weight, x), gated(weight, x + 1), gated(weight, images), summed(x @ weight, alone)

    report = rewritten(function, X, torch.randn(20, C)).meta["report"]
    assert report.bytes_before() == report.bytes_after() == (6 + 6 + 20) * 4 * C
    assert report.bytes_before(60) == (60 + 60 + 20) * 4 * C
    assert [c.size for c in report.collectives] == [None, None, None, 1]


def test_collectives_of_every_kind_are_in_the_report() -> None:
    alone = dist.new_group([0])

    def function(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        part = x @ weight
        own = functional.reduce_scatter_tensor(part, "sum", 0, dist.group.WORLD)
        moved = functional.all_to_all_single(part, None, None, dist.group.WORLD)
        return gated(weight, x), own, moved, functional.all_gather_tensor(part, 0, alone)

    report = rewritten(function, X).meta["report"]
    reasons = {c.kind: c.reason for c in report.collectives}
    assert reasons["reduce_scatter"].startswith("the model itself scatters here")
    assert "exchanges rows between ranks" in reasons["all_to_all"]
    assert "it is over group" in reasons["all_gather"]
    row = 4 * C
    assert report.bytes_before() == 6 * row + 3 * row + 3 * row


# ---- prediction


def test_gathers_that_the_model_had_count_for_the_threshold() -> None:
    """Expert parallelism gathers by itself; gathering 8 bits instead pays from some number of tokens on."""
    wide = torch.randn(1024, 1024)

    def function(weight: Tensor, x: Tensor) -> Tensor:
        return functional.all_gather_tensor(x @ weight, 0, dist.group.WORLD).relu() @ weight

    gm = captured(function, (wide, torch.randn(8, 1024)), False)
    first = next(n.name for n in gm.graph.nodes if n.op == "placeholder")
    auto = SequenceParallel(cost=table("ethernet"), quantize="int8")
    report = passes.rewrite(gm, auto, inputs={first: Layout.VARYING}).meta["report"]
    assert report.rewrites == 1
    assert report.is_quantized
    assert least_tokens(auto, report) < 1000
    report.tokens = 1 << 16
    least_tokens(auto, report)
    assert report.predicted_gain > 3


def test_the_gain_is_predicted_for_a_fixed_threshold_too() -> None:
    report = rewritten(gated, X).meta["report"]
    assert least_tokens(SequenceParallel(min_tokens=5, cost=table("pcie")), report) == 5
    assert 0 < report.predicted_gain <= 1
    assert "predicted: communication" in str(report)
    assert "predicted by bytes alone: communication 1.00 times as fast" in str(rewritten(gated, X).meta["report"])
