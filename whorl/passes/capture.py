"""Capturing a model once and running it as two graphs: as it is below `min_tokens`, rewritten from there on."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from . import agree, collectives
from .config import SequenceParallel
from .layout import Layout
from .pipeline import matches, order_sums, rewrite
from .report import Report
from .rows import value

Backend = Literal["inductor", "eager"]
NEVER = 1 << 62  # more tokens than there are


class Compiled:
    """A compiled model. `report` is that of the graph captured last, `reports` of all of them."""

    def __init__(self, model: Callable[..., Any], config: SequenceParallel, backend: Backend, dynamic: bool | None, dump: Any) -> None:
        self.model, self.config, self.reports, self.dump = model, config, [], dump
        self.backend, self._call = backend, torch.compile(model, backend=self._capture, fullgraph=True, dynamic=dynamic)
        self.reports: list[Report] = []
        self.dispatched: list[str] = []  # which graph each capture runs first, for tests and curious readers

    @property
    def report(self) -> Report:
        if not self.reports:
            raise RuntimeError("no graph has been captured yet: call the compiled model first")
        return self.reports[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and isinstance(self.model, nn.Module) and _wants_grad(self.model):
            raise ValueError("whorl.passes is for inference: call the compiled model under torch.no_grad()")
        try:
            return self._call(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as e:
            raise RuntimeError(
                f"sequence parallelism needs the model as one graph, since its residual lives across it; torch.compile "
                f"cannot capture it: {e}"
            ) from e

    # ---- capturing

    def _capture(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        layouts = input_layouts(gm, self.config)
        decompositions = select_decomp_table() if self.backend == "inductor" else {}

        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._compile(gm, example_inputs, layouts)

        return aot_autograd(fw_compiler=compiler, decompositions=decompositions)(gm, example_inputs)

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any], layouts: list[Layout]) -> Callable[..., Any]:
        inputs = _by_name(gm, layouts)
        plain = order_sums(gm, self.config)
        source, mode = (gm, None) if self.backend == "eager" else _retraced(gm, collectives.group_size(self._group()))
        short = rewrite(source, self.config, inputs=inputs, dump=self.dump)
        report: Report = short.meta["report"]
        report.min_tokens = minimum = least_tokens(self.config, report)
        self.reports.append(report)
        tokens = short.meta["tokens"]
        if not report.rewrites or minimum == NEVER or (isinstance(tokens, int) and not self._is_short(tokens, minimum)):
            return self._lower(plain, example_inputs)
        rewritten = self._lower(short, None, mode)
        if isinstance(tokens, int):
            return rewritten
        return _Dispatch(self._lower(plain, example_inputs), rewritten, short, self, minimum)

    def _group(self) -> str:
        return collectives.group_name(self.config.group)

    def _is_short(self, tokens: int, minimum: int) -> bool:
        return tokens >= minimum and (self.config.pad or tokens % collectives.group_size(self._group()) == 0)

    def _lower(self, gm: GraphModule, example_inputs: Sequence[Any] | None, mode: Any = None) -> Callable[..., Any]:
        if self.backend == "eager":
            return _Boxed(gm.forward)
        from torch._inductor.compile_fx import compile_fx_inner

        if mode is None:
            return compile_fx_inner(gm, example_inputs or [])
        fakes = [value(n) for n in gm.graph.nodes if n.op == "placeholder"]
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            return compile_fx_inner(gm, fakes)


def _wants_grad(model: nn.Module) -> bool:
    return any(p.requires_grad for p in model.parameters())


class _Boxed:
    """torch's convention for graphs: one list of inputs."""

    _boxed_call = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, args: list[Any]) -> Any:
        return self.function(*args)


class _Dispatch:
    """Runs the plain or the rewritten graph by the number of tokens of this call; torch's guards are left as they were."""

    _boxed_call = True

    def __init__(self, plain: Any, short: Any, gm: GraphModule, owner: Compiled, minimum: int) -> None:
        self.plain, self.short, self.owner, self.minimum = plain, short, owner, minimum
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.symbols = _symbol_places(placeholders)
        tokens = gm.meta["tokens"]
        self.tokens = tokens.node.expr
        env = tokens.node.shape_env
        # The rewritten graph was compiled in a shape environment of its own, whose guards are asked here.
        self.guards = [guard.expr for guard in env.guards] if owner.backend == "inductor" else []
        self.chosen: dict[tuple[int, ...], Any] = {}
        self.num_runs = {"plain": 0, "rewritten": 0}

    def __call__(self, args: list[Any]) -> Any:
        sizes = tuple(args[i] if dim is None else args[i].shape[dim] for i, dim in self.symbols.values())
        if sizes not in self.chosen:
            self.chosen[sizes] = self._choose(sizes)
        name, graph = self.chosen[sizes]
        self.owner.dispatched.append(name)
        return graph(args)

    def _choose(self, sizes: tuple[int, ...]) -> tuple[str, Any]:
        known = dict(zip(self.symbols, sizes, strict=True))
        tokens = int(self.tokens.xreplace(known))
        holds = all(bool(guard.xreplace(known)) for guard in self.guards)
        is_short = holds and self.owner._is_short(tokens, self.minimum)
        return ("rewritten", self.short) if is_short else ("plain", self.plain)


def _symbol_places(placeholders: Sequence[Node]) -> dict[Any, tuple[int, int | None]]:
    found: dict[Any, tuple[int, int | None]] = {}
    for i, node in enumerate(placeholders):
        if isinstance(value(node), torch.SymInt) and value(node).node.expr.is_Symbol:
            found.setdefault(value(node).node.expr, (i, None))
    for i, node in enumerate(placeholders):
        for dim, size in enumerate(value(node).shape if isinstance(value(node), Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (i, dim))
    return found


# ---- inputs


def input_layouts(gm: GraphModule, config: SequenceParallel) -> list[Layout]:
    """Of each input of a graph from Dynamo: by its placement, by name, or by comparing it on all ranks."""
    group = collectives.group_name(config.group)
    tensors: dict[str, Any] = {}
    found: dict[str, Layout] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        argument = node.meta.get("grapharg")
        name = _source_name(argument, node)
        example = None if argument is None else argument.example
        if matches(name, config.sharded):
            found[node.name] = Layout.VARYING
        elif hasattr(example, "placements"):
            is_whole = all(p.is_replicate() for p in example.placements)
            found[node.name] = Layout.REPLICATED if is_whole else Layout.VARYING
        elif isinstance(example, Tensor) and config.probe:
            tensors[node.name] = example
        else:
            found[node.name] = Layout.REPLICATED
    found |= agree.probe(tensors, group) if config.probe else {}
    return [found[node.name] for node in placeholders]


def _source_name(argument: Any, node: Node) -> str:
    """`layers.0.up.weight` of L['self']._modules['layers']._modules['0']._modules['up']._parameters['weight']."""
    import re

    source = getattr(argument, "source", None)
    if source is None:
        return node.name
    name = source.name() if callable(source.name) else source.name
    parts = re.findall(r"(?:\._(?:modules|parameters|buffers)\['([^']+)'\])|L\['([^']+)'\]|\.(\w+)$", name)
    named = [next(p for p in part if p) for part in parts]
    return ".".join(named[1:] if len(named) > 1 and named[0] in ("self", "slf", "s", "fn") else named) or node.name


def _by_name(gm: GraphModule, layouts: list[Layout]) -> dict[str, Layout]:
    """Layouts of the traced graph's inputs. What the graph writes to is not equal on all ranks for being so once."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    mutated = set(metadata.mutated_inp_runtime_indices) if metadata is not None else set()
    found = {}
    for i, node in enumerate(placeholders):
        index = _input_index(node.meta.get("desc"))
        index = i if index is None and len(placeholders) == len(layouts) else index
        known = layouts[index] if index is not None and index < len(layouts) else Layout.VARYING
        found[node.name] = Layout.VARYING if i in mutated else known
    return found


def _input_index(description: Any) -> int | None:
    """The captured input that an input of the traced graph is, or is a part of (a DTensor's local tensor)."""
    while description is not None and not hasattr(description, "idx"):
        description = getattr(description, "base", None)
    return getattr(description, "idx", None)


# ---- thresholds


def least_tokens(config: SequenceParallel, report: Report) -> int:
    """min_tokens, or where the cost model says that the rewritten graph is the faster one."""
    if config.min_tokens != "auto":
        return int(config.min_tokens)
    from .cost import Traffic

    model = config.cost or _measured(report.group)
    reduced = tuple(float(c.row_bytes) for c in report.collectives if c.rewritten and c.kind == "all_reduce")
    gathered = tuple(float(g.row_bytes) for g in report.gathers)
    traffic = Traffic(reduced=reduced, gathered=gathered, quantized=gathered if report.is_quantized else None)
    way: Any = "sp_int8" if report.is_quantized else "sp"
    found = model.threshold(0, torch.bfloat16, report.size, traffic, ("all_reduce", way))
    at = report.tokens or 1
    plain, new = (model.seconds(c, at, report.size, traffic) for c in ("all_reduce", way))
    report.predicted_gain = plain / new if new else None
    return NEVER if found is None else found


def _measured(group: str) -> Any:
    from .cost import measure, table

    return table("h200_nvlink") if agree.is_alone(group) else measure(group)


# ---- a shape environment of its own


def _retraced(gm: GraphModule, size: int) -> tuple[GraphModule, Any]:
    """A copy of the graph with symbols of its own: what its compilation asks of sizes is no guard of the capture.

    Symbols get an example large enough that no rank's share looks like a constant 0 or 1.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gm = copy.deepcopy(gm)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    symbols: dict[Any, Any] = {}
    inputs = [_renewed(value(n), env, mode, symbols, size) for n in placeholders]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return gm, mode


def _renewed(old: Any, env: Any, mode: Any, symbols: dict[Any, Any], size: int) -> Any:
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
        hint = int(old.node.shape_env.size_hint(symbol))
        hint = hint if hint >= 4 * size else 8 * size
        source = ConstantSource(f"whorl_{symbol}")
        new = env.create_symbol(hint, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
        symbols[symbol] = env.create_symintnode(new, hint=hint, source=source)
    return int(expr) if expr.is_number else sympy_interp(PythonReferenceAnalysis, symbols, expr)


def compile(  # noqa: A001 - the name that readers know from torch
    model: Callable[..., Any],
    sequence_parallel: SequenceParallel | None = None,
    *,
    backend: Backend = "inductor",
    dynamic: bool | None = None,
    dump: str | Path | None = None,
) -> Compiled:
    """A model, compiled, that keeps its rows apart between all-reduces when there are enough tokens.

    Inputs and outputs are as they were. Both graphs come from one capture; which of them runs is decided at each call by
    the number of tokens. backend "eager" runs the graphs operator by operator. dump: a folder for graphs.
    """
    if backend not in ("inductor", "eager"):
        raise ValueError(f"compile: backend is {backend!r}, expected 'inductor' or 'eager'")
    config = sequence_parallel or SequenceParallel()
    collectives.group_name(config.group)
    return Compiled(model, config, backend, dynamic, dump)


