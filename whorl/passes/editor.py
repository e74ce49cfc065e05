"""Adding nodes to a captured graph without adding guards: shapes are carried, never evaluated."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy

from .rows import value

KEPT_META = (
    *("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "from_node", "seq_nr"),
    "low_precision_pointwise_barrier",  # where Inductor must round, see `capture.rounding`
)


class Editor:
    """Emits nodes into one graph, each with its fake value and with the provenance of the node it stands for."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.graph = gm, gm.graph
        fakes = [value(n) for n in gm.graph.nodes if hasattr(value(n), "fake_mode")]
        if not fakes:
            raise ValueError(
                "the graph has no shapes: trace it with torch.compile, torch.export or "
                "make_fx(tracing_mode='symbolic'), which leave a fake value in node.meta['val']"
            )
        self.mode = fakes[0].fake_mode
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._last: Node | None = placeholders[-1] if placeholders else None
        self._symbols = _symbol_sources(placeholders)
        self._sizes: dict[Any, Node] = {}

    @contextlib.contextmanager
    def _faking(self) -> Any:
        env = self.mode.shape_env
        with self.mode, env.suppress_guards() if env is not None else contextlib.nullcontext():
            yield

    def call(
        self,
        target: Callable[..., Any],
        *args: Any,
        like: Node | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Node:
        """A node whose value follows from its arguments; for operators that ask nothing of sizes."""
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        read = torch.fx.node.map_aggregate((args, node.kwargs), lambda a: value(a) if isinstance(a, Node) else a)
        with self._faking():
            node.meta["val"] = target(*read[0], **read[1])
        return self._remember(node, like)

    def local(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Node, lead: int, rows: Any
    ) -> Node:
        """The node `like` on a rank's rows: the same features, `rows` instead of its `lead` token dims."""
        node = self.graph.call_function(target, args, dict(kwargs))
        with self._faking():
            node.meta["val"] = torch.utils._pytree.tree_map_only(
                Tensor, lambda x: _shortened(x, lead, rows), value(like)
            )
        return self._remember(node, like)

    @staticmethod
    def _remember(node: Node, like: Node | None) -> Node:
        if like is not None:
            node.meta.update({k: like.meta[k] for k in KEPT_META if k in like.meta})
        return node

    def knows(self, count: Any) -> bool:
        """Whether a count follows from the graph's inputs; how many elements of a mask are true does not."""
        return not isinstance(count, torch.SymInt) or count.node.expr.free_symbols <= self._symbols.keys()

    def size(self, count: Any) -> Any:
        """A count as a graph argument: a number, or the node that computes it from the graph's inputs."""
        if not isinstance(count, torch.SymInt):
            return count
        expr = count.node.expr
        if expr.is_number:
            return int(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self._emit(expr, count)
        return self._sizes[expr]

    def _emit(self, expr: Any, count: torch.SymInt) -> Node:
        if isinstance(expr, sympy.Symbol):
            source, dim = self._symbols[expr]
            if dim is None:
                return source
            return self._append(lambda: self.graph.call_function(torch.ops.aten.sym_size.int, (source, dim)), count)
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        proxies = {}
        for symbol in sorted(expr.free_symbols, key=str):
            env = count.node.shape_env
            proxies[symbol] = Proxy(
                self.size(torch.SymInt(torch.fx.experimental.sym_node.SymNode(symbol, env, int, None)))
            )
        return self._append(lambda: sympy_interp(PythonReferenceAnalysis, proxies, expr).node, count)

    def _append(self, make: Callable[[], Node], count: torch.SymInt) -> Node:
        """Behind the placeholders and earlier sizes, so that every node may use it."""
        before = set(self.graph.nodes)
        first = next(iter(self.graph.nodes)) if self._last is None else self._last.next
        with self.graph.inserting_before(first):  # inserting_after would turn the order round
            node = make()
        for new in [n for n in self.graph.nodes if n not in before]:
            with self._faking():
                args = torch.fx.node.map_aggregate(new.args, lambda a: value(a) if isinstance(a, Node) else a)
                new.meta["val"] = new.target(*args)
            self._last = new
        node.meta["val"] = count
        return node

    def reshape(self, node: Node, sizes: Sequence[Any], like: Node | None = None) -> Node:
        """`node` with these sizes, unless it has them."""
        reshaped = self.graph.call_function(torch.ops.aten.reshape.default, (node, [self.size(s) for s in sizes]))
        reshaped.meta["val"] = self.empty(sizes, like=node)
        return self._remember(reshaped, like)

    def empty(self, sizes: Sequence[Any], like: Node) -> Tensor:
        """A fake value of these sizes, of a node's dtype and device."""
        with self._faking():
            return torch.empty(tuple(sizes), dtype=value(like).dtype, device=value(like).device)


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own over the same parameters."""
    graph = torch.fx.Graph()
    nodes: dict[Node, Node] = {}
    returned = graph.graph_copy(gm.graph, nodes)
    output = graph.output(returned)
    output.meta = dict(next(n for n in reversed(gm.graph.nodes) if n.op == "output").meta)
    new = GraphModule(gm, graph)
    new.meta = dict(gm.meta)
    return new


def _symbol_sources(placeholders: Iterable[Node]) -> dict[Any, tuple[Node, int | None]]:
    """Where each symbol of the inputs' shapes can be read: a SymInt input, or a dim of a tensor input."""
    found: dict[Any, tuple[Node, int | None]] = {}
    for node in placeholders:
        if isinstance(value(node), torch.SymInt):
            found.setdefault(value(node).node.expr, (node, None))
    for node in placeholders:
        if isinstance(value(node), Tensor):
            for dim, size in enumerate(value(node).shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(size.node.expr, (node, dim))
    return found


def _shortened(x: Tensor, lead: int, rows: Any) -> Tensor:
    """Fake rows of x, its features laid out as they were."""
    features, strides = tuple(x.shape[lead:]), tuple(x.stride()[lead:])
    dense = [math.prod(features[i + 1 :]) for i in range(len(features))]
    if strides == tuple(dense) or not all(isinstance(s, int) for s in strides):
        return x.new_empty((rows, *features))
    return torch.empty_strided((rows, *features), (x.stride()[lead - 1], *strides), dtype=x.dtype, device=x.device)
