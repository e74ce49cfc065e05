"""Add nodes to a captured graph without adding guards: sizes are kept as expressions and never evaluated."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node, Proxy

from .rows import value

COPIED_META = (
    *("nn_module_stack", "stack_trace", "source_fn_stack", "original_aten", "from_node", "seq_nr"),
    "low_precision_pointwise_barrier",  # where Inductor must round, see `capture.rounding`
)


class Editor:
    """Emits nodes into one graph, each with its fake value and with the metadata of the node it stands for."""

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
        self._symbols = symbol_sources(placeholders)
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
        """Add a call whose fake value follows from its arguments; for operators that check no sizes.

        like: the node whose source location and module the new node gets.
        """
        node = self.graph.call_function(target, args, dict(kwargs or {}))
        arguments = torch.fx.node.map_aggregate((args, node.kwargs), lambda a: value(a) if isinstance(a, Node) else a)
        with self._faking():
            node.meta["val"] = target(*arguments[0], **arguments[1])
        return self._copy_meta(node, like)

    def local(
        self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Node, lead: int, rows: Any
    ) -> Node:
        """Add the call of `target` that computes the node `like` on a rank's rows.

        Its fake value is that of `like` with one dim of `rows` in place of the first `lead` dims, the token dims.
        """
        node = self.graph.call_function(target, args, dict(kwargs))
        with self._faking():
            node.meta["val"] = torch.utils._pytree.tree_map_only(
                Tensor, lambda x: _with_rows(x, lead, rows), value(like)
            )
        return self._copy_meta(node, like)

    @staticmethod
    def _copy_meta(node: Node, like: Node | None) -> Node:
        if like is not None:
            node.meta.update({k: like.meta[k] for k in COPIED_META if k in like.meta})
        return node

    def knows(self, count: Any) -> bool:
        """Return whether a count can be computed from the sizes of the graph's inputs.

        The number of true elements of a mask, for example, cannot.
        """
        return not isinstance(count, torch.SymInt) or count.node.expr.free_symbols <= self._symbols.keys()

    def size(self, count: Any) -> Any:
        """Return a count as a graph argument: a number, or the node that computes it from the graph's inputs."""
        if not isinstance(count, torch.SymInt):
            return count
        expr = count.node.expr
        if expr.is_number:
            return int(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self._emit_size(expr, count)
        return self._sizes[expr]

    def _emit_size(self, expr: Any, count: torch.SymInt) -> Node:
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
        """Insert a size behind the placeholders and earlier sizes, so that every node may use it."""
        before = set(self.graph.nodes)
        first = next(iter(self.graph.nodes)) if self._last is None else self._last.next
        with self.graph.inserting_before(first):  # inserting_after would reverse the order of the new nodes
            node = make()
        for new in [n for n in self.graph.nodes if n not in before]:
            with self._faking():
                args = torch.fx.node.map_aggregate(new.args, lambda a: value(a) if isinstance(a, Node) else a)
                new.meta["val"] = new.target(*args)
            self._last = new
        node.meta["val"] = count
        return node

    def reshape(self, node: Node, sizes: Sequence[Any], like: Node | None = None) -> Node:
        """Add a reshape of `node` to these sizes."""
        reshaped = self.graph.call_function(torch.ops.aten.reshape.default, (node, [self.size(s) for s in sizes]))
        reshaped.meta["val"] = self.empty(sizes, like=node)
        return self._copy_meta(reshaped, like)

    def empty(self, sizes: Sequence[Any], like: Node) -> Tensor:
        """Return a fake tensor of these sizes, with the dtype and device of the node `like`."""
        with self._faking():
            return torch.empty(tuple(sizes), dtype=value(like).dtype, device=value(like).device)


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a copy of the graph that shares the parameters of `gm`."""
    graph = torch.fx.Graph()
    nodes: dict[Node, Node] = {}
    returned = graph.graph_copy(gm.graph, nodes)
    output = graph.output(returned)
    output.meta = dict(next(n for n in reversed(gm.graph.nodes) if n.op == "output").meta)
    new = GraphModule(gm, graph)
    new.meta = dict(gm.meta)
    return new


def erase(node: Node) -> None:
    """Erase a node, and the nodes that only it read."""
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for source in inputs:
        if source.op == "call_function" and not source.users and not source._erased:
            erase(source)


def retrace(gm: GraphModule, size: int) -> tuple[GraphModule, Any]:
    """Return a copy of the graph with new size symbols, and its fake tensor mode.

    Guards on sizes that its compilation adds then belong to the copy, not to the capture. size: the number of ranks.
    Symbols get a hint so large that a rank's share of it is not 0 or 1, which torch would treat as constants.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gm = copy_graph(gm)
    for node in gm.graph.nodes:
        node.meta.pop("unbacked_bindings", None)  # sizes that depend on data get new symbols as well
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    symbols: dict[Any, Any] = {}
    inputs = [_with_new_symbols(value(n), env, mode, symbols, size) for n in placeholders]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return gm, mode


def _with_new_symbols(old: Any, env: Any, mode: Any, symbols: dict[Any, Any], size: int) -> Any:
    if isinstance(old, torch.SymInt):
        return _new_size(old, env, symbols, size)
    if not isinstance(old, Tensor):
        return old
    sizes = [_new_size(s, env, symbols, size) for s in old.shape]
    strides = [_new_size(s, env, symbols, size) for s in old.stride()]
    with mode:
        return torch.empty_strided(sizes, strides, dtype=old.dtype, device=old.device)


def _new_size(old: Any, env: Any, symbols: dict[Any, Any], size: int) -> Any:
    if not isinstance(old, torch.SymInt):
        return old
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expr = old.node.expr
    for symbol in sorted(expr.free_symbols, key=str):
        if symbol in symbols:
            continue
        old_env = old.node.shape_env
        examples = (
            getattr(old_env, "backed_var_to_val", None) or old_env.var_to_val
        )  # the name in earlier versions of torch
        hint = int(examples[symbol])
        hint = hint if hint >= 4 * size else 8 * size
        source = ConstantSource(f"whorl_{symbol}")
        new = env.create_symbol(hint, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
        symbols[symbol] = env.create_symintnode(new, hint=hint, source=source)
    return int(expr) if expr.is_number else sympy_interp(PythonReferenceAnalysis, symbols, expr)


def symbol_sources(placeholders: Iterable[Node]) -> dict[Any, tuple[Node, int | None]]:
    """Return where each symbol of the inputs' shapes can be read: a SymInt input, or a dim of a tensor input."""
    tensors = [node for node in placeholders if isinstance(value(node), Tensor)]
    sizes = [(value(node), node, None) for node in placeholders if isinstance(value(node), torch.SymInt)]
    sizes += [(size, node, dim) for node in tensors for dim, size in enumerate(value(node).shape)]  # type: ignore[misc]
    sources: dict[Any, tuple[Node, int | None]] = {}
    for size, node, dim in sizes:
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
            sources.setdefault(size.node.expr, (node, dim))
    return sources


def _with_rows(x: Tensor, lead: int, rows: Any) -> Tensor:
    """Return a fake tensor with `rows` in place of the `lead` token dims of x and the features' strides kept."""
    features, strides = tuple(x.shape[lead:]), tuple(x.stride()[lead:])
    contiguous = [math.prod(features[i + 1 :]) for i in range(len(features))]
    if strides == tuple(contiguous) or not all(isinstance(s, int) for s in strides):
        return x.new_empty((rows, *features))
    return torch.empty_strided((rows, *features), (x.stride()[lead - 1], *strides), dtype=x.dtype, device=x.device)
