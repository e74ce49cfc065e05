"""Mistakes that others made, put into the pipeline on purpose."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from passes_cases import both
from passes_rows import ROWS, Weights, arguments, run_row
from torch import Tensor
from torch.fx.graph_module import _forward_from_src
from torch.library import custom_op

from whorl import collectives
from whorl.passes import PIPELINE, SequenceParallel, agree
from whorl.passes.rewriting import Rewrite

ours, aten = torch.ops.whorl, torch.ops.aten


@custom_op("whorl_test::without_last_rank", mutates_args=())
def without_last_rank(x: Tensor, group: str) -> Tensor:
    is_last = dist.get_rank() == dist.get_world_size() - 1
    return collectives._reduce_scatter(torch.zeros_like(x) if is_last else x, group)


@without_last_rank.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(collectives.rows_per_rank(x.shape[0], dist.get_world_size()), *x.shape[1:])


def _nodes(state: Rewrite, target: Any) -> list[torch.fx.Node]:
    return [n for n in state.graph.nodes if n.target is target]


def average_for_sum(state: Rewrite) -> int:
    for node in _nodes(state, ours.ordered_reduce_scatter.default):
        with state.graph.inserting_after(node):
            mean = state.editor.call(aten.div.Scalar, node, state.size)
        node.replace_all_uses_with(mean, delete_user_cb=lambda u, mean=mean: u is not mean)
    return 1


def residual_from_row_0(state: Rewrite) -> int:
    for node in _nodes(state, ours.local_rows.default):
        with state.graph.inserting_before(node):
            rows = node.meta["val"].shape[0]
            node.replace_all_uses_with(state.editor.call(aten.slice.Tensor, node.args[0], 0, 0, rows))
    return 1


def missing_rank(state: Rewrite) -> int:
    for node in _nodes(state, ours.ordered_reduce_scatter.default):
        node.target = torch.ops.whorl_test.without_last_rank.default
    return 1


def unmatched_norm(state: Rewrite) -> int:
    """The second norm reads the sum of all rows, while its residual is a rank's rows."""
    node = _nodes(state, torch.ops.whorl.add_rms_norm.default)[-1]
    short: Any = node.args[0]
    with state.graph.inserting_before(node):
        whole = state.editor.call(ours.ordered_all_reduce.default, short.args[0], state.group)
    node.replace_input_with(short, whole)
    return 1


def gather_of_the_wrong_rows(state: Rewrite) -> int:
    """Ranks hand round their rows in the wrong order."""
    for node in _nodes(state, ours.all_gather.default):
        with state.graph.inserting_after(node):
            turned = state.editor.call(aten.flip.default, node, [0])
        node.replace_all_uses_with(turned, delete_user_cb=lambda u, turned=turned: u is not turned)
    return 1


MUTATIONS: dict[str, Callable[[Rewrite], int]] = {
    "avg for sum": average_for_sum,
    "residual sliced from row 0": residual_from_row_0,
    "a missing rank": missing_rank,
    "one unmatched norm": unmatched_norm,
    "rows in the wrong order": gather_of_the_wrong_rows,
}


def run_mutation(name: str) -> dict[str, Any]:
    """The pass comes in behind the placement, before everything that checks."""
    places = [n for n, _ in PIPELINE].index("report")
    pipeline = (*PIPELINE[:places], ("mutation", MUTATIONS[name]), *PIPELINE[places:])
    return run_row("Qwen3VLMiddleAllReduceRMSNorm", 8, {}, pipeline)


# ---- a compile cache that mixes ranks


def bake_the_rank(state: Rewrite) -> int:
    """Rows of this rank as numbers, which are wrong in any other's hands."""
    for node in _nodes(state, ours.local_rows.default):
        rows = node.meta["val"].shape[0]
        with state.graph.inserting_before(node):
            part = state.editor.call(
                aten.slice.Tensor, node.args[0], 0, dist.get_rank() * rows, (dist.get_rank() + 1) * rows
            )
        node.replace_all_uses_with(part)
        state.graph.erase_node(node)
    return 1


def first_ranks_graph(baked: bool) -> bool:
    """Equality when every rank runs what rank 0 has compiled, as from a shared cache."""
    weights = Weights()
    pipeline = (*PIPELINE, ("mutation", bake_the_rank)) if baked else PIPELINE
    inputs = arguments(8)
    graphs = both(lambda *a: ROWS["MiddleAllReduceRMSNorm"](weights, *a), inputs, SequenceParallel(), pipeline=pipeline)
    code = graphs["gm"].graph.python_code("self")
    (source, *_) = agree.exchange(collectives.group_name(None), "code", code.src)
    return torch.equal(_forward_from_src(source, code.globals)(graphs["gm"], *inputs), graphs["plain"])


def stale_cache(folder: str, baked: bool) -> list[bool]:
    """Equality with a cold and with a warm cache; `baked`: the rank stands in the graph, unknown to the cache's key."""
    import os
    from unittest import mock

    from passes_cases import Toy

    from whorl.passes import compile, inductor_options
    from whorl.passes.inductor import SequenceParallelPass

    class Baked(SequenceParallelPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            for node in [n for n in graph.nodes if n.target is ours.local_rows.default]:
                rows = node.meta["val"].shape[0]
                bounds = (dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
                with graph.inserting_before(node):
                    part = graph.call_function(aten.slice.Tensor, (node.args[0], 0, *bounds))
                part.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(part)
                graph.erase_node(node)

    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(5))
    equal = []
    for _ in range(2):
        torch._dynamo.reset()
        options = inductor_options(SequenceParallel(min_tokens=1))
        if baked:
            options["post_grad_custom_pre_pass"].__class__ = Baked
        short = torch.compile(Toy(), fullgraph=True, options=options)
        plain = compile(Toy(), SequenceParallel(min_tokens=1 << 40), backend="inductor")
        with torch.no_grad(), mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
            equal.append(torch.equal(short(x), plain(x)))
        dist.barrier()
    return equal
