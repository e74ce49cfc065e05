"""The passes one by one, on graphs of a pretended group of two ranks: what is found, refused, counted and said."""

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from passes_cases import captured, kinds
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from whorl import collectives, ops, passes
from whorl.passes import Layout, SequenceParallel, agree
from whorl.passes.cleanup import _check_node
from whorl.passes.cost import NEVER, least_tokens, table
from whorl.passes.layout import infer
from whorl.passes.placement import Region, minimum_cut
from whorl.passes.rows import RULES, register_row_wise
from whorl.passes.sequence_parallel import _trimming_slice, drop_noops

C = 64


@pytest.fixture(autouse=True, scope="module")
def _two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def summed(x: Tensor, op: str = "sum") -> Tensor:
    return functional.all_reduce(x, op, dist.group.WORLD)


def rewritten(function: Any, arguments: tuple[Tensor, ...], dump: Path | None = None, **options: Any) -> Any:
    """`varying`: names of inputs that differ between ranks; the second always does."""
    varying = options.pop("varying", ())
    gm = captured(function, arguments, False)
    second = [n.name for n in gm.graph.nodes if n.op == "placeholder"][1]
    inputs = dict.fromkeys((second, *varying), Layout.VARYING)
    return passes.rewrite(gm, SequenceParallel(**options), inputs=inputs, dump=dump)


def norm_of_sum(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return ops.add_rms_norm(summed(x @ weight), residual, torch.ones(C))[0] @ weight


ARGUMENTS = (torch.randn(6, C), torch.randn(C, C), torch.randn(6, C))
WIDE = torch.randn(6, 8)
SHARDED = {"weight_1": Layout.VARYING}


# ---- layouts


def test_layouts() -> None:
    def function(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        part = x @ weight
        return summed(part) + y, part.relu(), torch.rand_like(y), passes.local_rows(y, dist.group.WORLD.group_name)

    gm = captured(function, ARGUMENTS, False)
    layouts = infer(gm.graph, collectives.group_name(None), SHARDED, frozenset())
    by_target = {str(n.target): layout.value for n, layout in layouts.items() if n.op == "call_function"}
    assert by_target["aten.relu.default"] == "varying"
    assert by_target["aten.add.Tensor"] == "replicated"
    assert by_target["aten.rand_like.default"] == "varying", "ranks draw their own numbers"
    assert by_target["whorl.local_rows.default"] == "sharded"
    product = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    assert layouts[product] is Layout.VARYING, "it is used as it is, too"


def test_a_value_that_is_only_summed_is_partial() -> None:
    gm = captured(norm_of_sum, ARGUMENTS, False)
    layouts = infer(gm.graph, collectives.group_name(None), SHARDED, frozenset())
    product = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    assert layouts[product] is Layout.PARTIAL


def test_constants_that_differ_between_ranks_are_varying() -> None:
    gm = captured(lambda x, w, y: (summed(x @ w) + y) * 3.0, ARGUMENTS, False)
    name = next(n.name for n in gm.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    layouts = infer(gm.graph, collectives.group_name(None), SHARDED, frozenset([name]))
    assert next(layout for n, layout in layouts.items() if n.name == name) is Layout.VARYING


def test_an_operator_of_unknown_hands_is_varying() -> None:
    @torch.library.custom_op("whorl_test::reads_the_rank", mutates_args=())
    def reads_the_rank(x: Tensor) -> Tensor:
        return x + dist.get_rank()

    reads_the_rank.register_fake(lambda x: torch.empty_like(x))
    with pytest.warns(RuntimeWarning, match="does not compute the same on all ranks"):
        gm = rewritten(lambda x, w, y: reads_the_rank(summed(x @ w)) @ w, ARGUMENTS)
    assert gm.meta["report"].rewrites == 0


# ---- what is sliced


def test_only_what_is_equal_on_all_ranks_is_sliced() -> None:
    assert rewritten(norm_of_sum, ARGUMENTS).meta["report"].sliced == ["residual_1"]
    with pytest.warns(RuntimeWarning, match="its operand residual_1 is varying"):
        gm = rewritten(norm_of_sum, ARGUMENTS, varying=("residual_1",))
    assert not gm.meta["report"].sliced
    assert kinds(gm)["ordered_all_reduce"] == 1, "what cannot be moved is an all-reduce as before"


def test_broadcasting_operands() -> None:
    def function(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        h = summed((x @ w).view(2, 3, C))  # two token dims
        h = h * y.view(2, 3, C)[:, :1] + y.view(2, 3, C)[:1] + torch.arange(C) + torch.ones(1, 1, C)
        return h.view(6, C) @ w

    gm = rewritten(function, ARGUMENTS)
    assert gm.meta["report"].rewrites == 1
    assert kinds(gm)["local_rows"] == 2, "both slices of y, each expanded to all tokens first"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda h: h.cumsum(0), "works on dim 0, which is a token dim"),
        (lambda h: h.t().contiguous(), "aten.t.default is not row-wise"),
        (lambda h: h.sum(), "aten.sum.default is not row-wise"),
        (lambda h: h.view(3, 2 * C), "mixes tokens and features"),
        (lambda h: h.softmax(0), "works on dim 0, which is a token dim"),
        (lambda h: torch.nn.functional.pad(h, (0, 0, 0, 1)), "pads the tokens"),
        (lambda h: h, "the graph returns it, and outputs are not sharded"),
    ],
)
def test_nothing_rewritten_is_a_loud_warning_with_the_nearest_miss(function: Any, reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"rewrote none of 1 collectives. Nearest miss") as caught:
        rewritten(lambda x, w: function(summed(x @ w)), ARGUMENTS[:2], quantize=None)
    said = str(next(w.message for w in caught if "Nearest" in str(w.message)))
    assert reason in said or "fewer bytes here" in said
    assert "test_passes.py" in said or "all_reduce [6, 64]" in said


def test_other_groups_and_other_sums_are_left_alone() -> None:
    with pytest.warns(RuntimeWarning, match="it reduces by 'avg', not 'sum'"):
        rewritten(lambda x, w: summed(x @ w, "avg").relu() @ w, ARGUMENTS[:2])
    other = dist.new_group([0, 1])
    with pytest.warns(RuntimeWarning, match="it is over group .*, not "):
        rewritten(lambda x, w: summed(x @ w).relu() @ w, ARGUMENTS[:2], group=other)
    with pytest.warns(RuntimeWarning, match="no collective over group"):
        rewritten(lambda x, w: (x @ w).relu(), ARGUMENTS[:2])


def test_a_collective_over_more_ranks_makes_all_of_a_group_alike() -> None:
    alone = dist.new_group([0])
    world, part = collectives.group_name(None), collectives.group_name(alone)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return summed(x), functional.all_reduce(x, "sum", alone)

    graph = captured(function, (ARGUMENTS[0],), False).graph
    inputs = {n.name: Layout.VARYING for n in graph.nodes if n.op == "placeholder"}
    for group, expected in ((world, ["replicated", "varying"]), (part, ["replicated", "replicated"])):
        layouts = infer(graph, group, inputs, set())
        assert [layouts[n].value for n in graph.nodes if "wait_tensor" in str(n.target)] == expected


# ---- the registry


def test_an_operator_of_your_own() -> None:
    @torch.library.custom_op("whorl_test::scaled", mutates_args=())
    def scaled(x: Tensor, table: Tensor) -> Tensor:
        return x * table.sum()

    scaled.register_fake(lambda x, table: torch.empty_like(x))
    with pytest.raises(ValueError, match=r"has the arguments \['x', 'table'\], got rows \['y'\]"):
        register_row_wise(torch.ops.whorl_test.scaled, ("y",))
    register_row_wise(torch.ops.whorl_test.scaled, ("x",))
    try:
        gm = rewritten(lambda x, w: scaled(summed(x @ w), torch.ones(3)) @ w, ARGUMENTS[:2])
        assert gm.meta["report"].local_operators == 1
        with pytest.warns(RuntimeWarning, match="argument table is read in full by every row"):
            rewritten(lambda x, w: scaled(torch.ones(3), summed(x @ w)) @ torch.ones(3, 3), ARGUMENTS[:2])
    finally:
        del RULES[torch.ops.whorl_test.scaled.default]


def test_a_matrix_that_is_added_to_a_product_has_rows_too() -> None:
    gm = rewritten(lambda x, w, r: torch.addmm(r, summed(x @ w).relu(), torch.ones(C, 8)), (*ARGUMENTS[:2], WIDE))
    report = gm.meta["report"]
    assert (report.local_operators, len(report.sliced)) == (2, 1)


# ---- placement


def test_the_cut_is_the_cheapest_there_is() -> None:
    """Against every possible choice, on small random graphs."""
    for seed in range(40):
        draw = random.Random(seed)
        graph = torch.fx.Graph()
        nodes = [graph.placeholder(f"root{i}") for i in range(draw.randint(1, 2))]
        roots = list(nodes)
        for _ in range(draw.randint(1, 7)):
            nodes.append(graph.call_function(torch.add, tuple(draw.choices(nodes, k=2))))
        for node in draw.choices(nodes, k=2):
            graph.call_function(torch.sum, (node,))
        for node in graph.nodes:
            node.meta["val"] = torch.empty(1)
        sizes = {n: draw.randint(1, 9) for n in nodes}
        region = Region(1, roots, shardable=dict.fromkeys(nodes, 1))
        cut = minimum_cut(region, lambda n, _, sizes=sizes: sizes[n])

        def cost(local: set[Any], sizes: Any = sizes) -> tuple[int, int]:
            gathered = [n for n in local if any(u not in local for u in n.users)]
            return sum(sizes[n] for n in gathered), len(gathered)

        others = [n for n in nodes if n not in roots]
        choices = itertools.chain.from_iterable(itertools.combinations(others, k) for k in range(len(others) + 1))
        assert cost(set(cut.local)) == min(cost({*roots, *more}) for more in choices), seed
        assert set(cut.gathered) == {n for n in cut.local if any(u not in cut.local for u in n.users)}


def test_of_two_cuts_with_equal_bytes_the_one_with_fewer_messages_wins() -> None:
    def halves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        whole = summed(x @ w).relu()
        return whole[:, : C // 2].flip(0), whole[:, C // 2 :].flip(0)

    assert [g.row_bytes for g in rewritten(halves, ARGUMENTS[:2]).meta["report"].gathers] == [4 * C]


def test_a_rank_takes_its_rows_only_where_tokens_are_one_dim() -> None:
    """Of [2, 3, C] a rank takes one of two sequences; its share of the six tokens is another thing."""
    group = collectives.group_name(None)
    x = torch.randn(2, 3, C)
    gm = rewritten(lambda x, w: collectives.local_rows(summed(x @ w).relu(), group) @ w, (x, ARGUMENTS[1]))
    assert [n.meta["val"].shape for n in gm.graph.nodes if "local_rows" in str(n.target)] == [(1, 3, C)]


def test_the_same_graph_gives_the_same_cut() -> None:
    hashes = {rewritten(norm_of_sum, ARGUMENTS).meta["report"].graph_hash for _ in range(3)}
    assert len(hashes) == 1


def test_a_wide_head_is_behind_the_gather_and_a_narrow_one_before() -> None:
    for width, gathered in ((8, 4 * 8), (4 * C, 4 * C)):
        head = torch.randn(C, width)
        arguments = (*ARGUMENTS[:2], head)
        gm = rewritten(lambda x, w, h: summed(x @ w).relu() @ h, arguments)
        assert [g.row_bytes for g in gm.meta["report"].gathers] == [gathered]


def test_what_the_graph_returns_is_not_rounded() -> None:
    for function, is_rounded in ((lambda x, w: summed(x @ w).relu(), 0), (lambda x, w: summed(x @ w).relu() @ w, 1)):
        counts = kinds(rewritten(function, ARGUMENTS[:2], quantize="int8"))
        assert (counts.get("all_gather", 0), counts.get("all_gather_quantized", 0)) == (1 - is_rounded, is_rounded)


def test_only_a_slice_of_the_first_rows_cuts_off_padding() -> None:
    """Of 4 ranks with a row each: the first two are what 2 tokens filled up to; every other one is not."""
    for function, is_trimmed in ((lambda x: x[:2] + 1, True), (lambda x: x[::2] + 1, False)):
        graph = captured(function, (torch.randn(4, C),), False).graph
        gathered = next(iter(graph.nodes))
        assert (_trimming_slice(gathered, 1, 4) is not None) == is_trimmed


# ---- the pipeline


def test_passes_are_counted_and_can_be_left_out(tmp_path: Path) -> None:
    counts = rewritten(norm_of_sum, ARGUMENTS, dump=tmp_path).meta["report"].counts
    assert list(counts) == [name for name, _ in passes.PIPELINE]
    assert (counts["split"], counts["place"], counts["report"]) == (1, 3, 1)
    assert "ordered_reduce_scatter" in (tmp_path / "3_split_after.txt").read_text()
    assert "ordered_reduce_scatter" not in (tmp_path / "3_split_before.txt").read_text()
    with pytest.warns(RuntimeWarning, match="rewrote none"):
        skipped = rewritten(norm_of_sum, ARGUMENTS, skip=("place", "fold"))
    assert kinds(skipped)["ordered_reduce_scatter"] == kinds(skipped)["all_gather"] == 1
    with pytest.raises(ValueError, match=r"skip has \['report'\]; passes that can be left out: \['noops'"):
        rewritten(norm_of_sum, ARGUMENTS, skip=("report",))


def test_what_does_nothing_goes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        h = summed(x @ w)
        h = h.view(6, C)[0:6].expand(6, C).view(2, 3, C).view(6, C)
        return h.relu() @ w

    gm = rewritten(function, ARGUMENTS[:2])
    assert gm.meta["report"].counts["noops"] >= 4
    assert not {"view", "slice.Tensor", "expand", "reshape"} & set(kinds(gm))


def test_updates_by_numbers_are_not_spread() -> None:
    def function(x: Tensor, w: Tensor, rows: Tensor, places: Tensor, mask: Tensor, add: bool) -> Tensor:
        index = mask if add else places
        return summed(x @ w).index_put((index,), rows, add) @ w

    places, mask = torch.tensor([1, 1]), torch.tensor([False, True, True, False, False, False])
    for add in (False, True):
        with pytest.warns(RuntimeWarning, match="index_put.default is not row-wise"):
            gm = rewritten(lambda *a, add=add: function(*a, add), (*ARGUMENTS[:2], torch.randn(2, C), places, mask))
        assert gm.meta["report"].counts["masks"] == 0


def test_an_in_place_sum_leaves_no_copy() -> None:
    """torch.compile makes a copy of dist.all_reduce's result; over a value of another dtype it stays."""

    def function(x: Tensor, w: Tensor, kept: torch.dtype) -> Tensor:
        part = x @ w
        return torch.ops.aten.copy(part.to(kept), summed(part)).float().relu() @ w

    for kept, copies in ((torch.float32, 0), (torch.bfloat16, 1)):
        gm = captured(lambda *a, kept=kept: function(*a, kept), ARGUMENTS[:2], False)
        drop_noops(gm.graph)
        assert kinds(gm).get("copy", 0) == copies


def test_the_graph_given_is_not_changed() -> None:
    gm = captured(norm_of_sum, ARGUMENTS, False)
    before = str(gm.graph)
    passes.rewrite(gm, SequenceParallel(), inputs=SHARDED)
    passes.order_sums(gm, SequenceParallel())
    assert str(gm.graph) == before


def test_unknown_inputs_and_settings_are_errors() -> None:
    with pytest.raises(ValueError, match=r"inputs has \['nobody'\]"):
        rewritten(norm_of_sum, ARGUMENTS, varying=("nobody",))
    with pytest.raises(ValueError, match="quantize is 'int4'"):
        SequenceParallel(quantize="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_tokens is -1"):
        SequenceParallel(min_tokens=-1)
    with pytest.raises(ValueError, match="backend is 'triton'"):
        passes.compile(norm_of_sum, backend="triton")  # type: ignore[arg-type]
    plain = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ValueError, match="the graph has no shapes"):
        passes.rewrite(plain, SequenceParallel())


def test_a_value_of_another_dtype_than_said_is_an_error() -> None:
    gm = captured(lambda x: x + 1, (ARGUMENTS[0],), False)
    (node,) = (n for n in gm.graph.nodes if n.op == "call_function")
    _check_node(node)
    node.meta["val"] = node.meta["val"].to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"gives \[6, 64\] torch.float32, not \[6, 64\] torch.bfloat16"):
        _check_node(node)


def test_no_guards_are_added() -> None:
    weight = ARGUMENTS[1]
    gm = captured(lambda x, residual: norm_of_sum(x, weight, residual), (ARGUMENTS[0], ARGUMENTS[2]), True)
    env = next(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder").fake_mode.shape_env
    before = [str(g.expr) for g in env.guards]
    report = passes.rewrite(gm, SequenceParallel(sharded=("_tensor_constant0",))).meta["report"]
    assert report.rewrites == 1
    assert [str(g.expr) for g in env.guards] == before


# ---- the report


def test_report() -> None:
    report = rewritten(norm_of_sum, ARGUMENTS, quantize="int8").meta["report"]
    read = json.loads(report.json())
    row = 4 * C
    assert read["bytes_before"] == 2 * 3 * row
    assert read["bytes_after"] == 3 * row + 3 * (C + 4)
    assert read["gathers"][0]["dtype"] == "int8"
    assert read["exactness"].startswith("rounds")
    text = str(report)
    assert "1 of 1 collectives rewritten" in text
    assert "sliced, equal on all ranks: residual_1" in text
    assert "its operand weight_1 is varying" in text


def test_min_tokens_from_the_cost_model() -> None:
    report = rewritten(norm_of_sum, ARGUMENTS).meta["report"]
    auto = SequenceParallel(cost=table("ethernet"))
    assert least_tokens(auto, report) == NEVER, "the bytes of an all-reduce, in two messages"
    packed = rewritten(norm_of_sum, ARGUMENTS, quantize="int8").meta["report"]
    threshold = least_tokens(dataclasses.replace(auto, quantize="int8"), packed)
    assert 1 < threshold < 1 << 20
    assert packed.predicted_gain is not None
    assert least_tokens(SequenceParallel(min_tokens=17), report) == 17


def test_the_cache_key_knows_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    from whorl.passes.inductor import SequenceParallelPass

    base = SequenceParallelPass(SequenceParallel(min_tokens=8))
    assert base.uuid() == SequenceParallelPass(SequenceParallel(min_tokens=8)).uuid()
    for change in (
        {"min_tokens": 9},
        {"quantize": "int8"},
        {"ordered": False},
        {"skip": ("fold",)},
        {"sharded": ("w",)},
    ):
        other = SequenceParallelPass(dataclasses.replace(SequenceParallel(min_tokens=8), **change))
        assert other.uuid() != base.uuid(), change
    named = SequenceParallelPass(SequenceParallel(min_tokens=8))
    named.inputs = [("weight", Layout.VARYING)]
    assert named.uuid() != base.uuid()
    before = base.uuid()
    monkeypatch.setattr(collectives, "group_size", lambda group: 4)
    assert base.uuid() != before, "the number of ranks"
    with pytest.raises(ValueError, match=r"'auto' needs whorl\.passes\.compile"):
        SequenceParallelPass(SequenceParallel())


def test_checksums() -> None:
    x = torch.randn(300, 40)
    assert agree.checksum(x) == agree.checksum(x.clone())
    changed = x.clone()
    changed[17, 3] += 1e-6
    assert agree.checksum(changed) != agree.checksum(x)
    assert agree.checksum(torch.zeros(5, 5))[-1], "says nothing about ranks"
    assert agree.probe({"cache": torch.zeros(4, 4), "norm": torch.ones(4)}, collectives.group_name(None)) == {
        "cache": Layout.VARYING,
        "norm": Layout.REPLICATED,
    }


# ---- capturing


def test_what_cannot_be_captured_is_refused() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(RuntimeError, match="needs the model as one graph"), torch.no_grad():
        passes.compile(broken, SequenceParallel(min_tokens=1), backend="eager")(torch.ones(2, 2))
    trained = passes.compile(torch.nn.Linear(2, 2), SequenceParallel(min_tokens=1), backend="eager")
    with pytest.raises(ValueError, match="is for inference"):
        trained(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="no graph has been captured yet"):
        _ = trained.report
