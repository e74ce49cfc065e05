"""Capture a model once and run it as two graphs: the plain one below `min_tokens`, the rewritten one from there on."""

import contextlib
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from whorl import collectives, ops

from .config import SequenceParallel
from .cost import NEVER, least_tokens, local_cost_model
from .editor import retrace, symbol_sources
from .inputs import Input, input_layouts, name_inputs
from .pipeline import order_sums, rewrite
from .report import Report
from .rows import value

Backend = Literal["inductor", "eager"]
_CAPTURE = {
    # Otherwise torch captures an epsilon first as a variable, then as a constant, and remembers this for the process:
    # ranks with different histories would capture different numbers of times, and wait for each other for ever.
    "specialize_float": True,
    "capture_dynamic_output_shape_ops": True,  # a mask that selects rows gives a size that depends on data
}


class Compiled:
    """A compiled model; call it like the model it was made from, under torch.no_grad().

    reports: the reports of all captured graphs. last_run: "plain" or "rewritten", the graph that the last call ran.
    force: set it to one of these two to run that graph whatever the number of tokens, where both were compiled.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        config: SequenceParallel,
        backend: Backend,
        dynamic: bool | None,
        dump: str | Path | None,
    ) -> None:
        self.model, self.config, self.backend, self.dump = model, config, backend, dump
        self.reports: list[Report] = []
        self.last_run = ""
        self.force = ""
        self._hooked = [m for m in model.modules() if _has_backward_hooks(m)] if isinstance(model, nn.Module) else []
        self._call = torch.compile(model, backend=self._capture, fullgraph=True, dynamic=dynamic)

    @property
    def report(self) -> Report:
        """The report of the graph captured last; raises RuntimeError before the first call."""
        if not self.reports:
            raise RuntimeError("no graph has been captured yet: call the compiled model first")
        return self.reports[-1]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _wants_grad(self.model, args, kwargs):
            raise ValueError("whorl.passes is for inference: call the compiled model under torch.no_grad()")
        from torch._dynamo import config

        try:
            with config.patch(_CAPTURE), _without_backward_hooks(self._hooked):
                return self._call(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as e:
            raise RuntimeError(
                f"sequence parallelism needs the model as one graph, because the sharded residual runs through all "
                f"layers; torch.compile cannot capture it: {e}"
            ) from e
        except torch._dynamo.exc.FailOnRecompileLimitHit as e:
            raise RuntimeError(
                f"torch.compile has captured this model {config.recompile_limit} times and captures no more: pass "
                "compile(dynamic=True), so that one capture serves every number of tokens, or raise "
                "torch._dynamo.config.recompile_limit; TORCH_LOGS=recompiles prints what changed between calls"
            ) from e
        except torch._dynamo.exc.BackendCompilerFailed as e:
            raise e.inner_exception from None

    # ---- capturing

    def _capture(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        inputs = input_layouts(gm, self.config)

        def compiler(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._compile(gm, example_inputs, inputs)

        if self.backend == "eager":
            return aot_autograd(fw_compiler=compiler)(gm, example_inputs)
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(rounding(self.config)):
            return aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())(gm, example_inputs)

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any], inputs: list[Input]) -> Callable[..., Any]:
        """Compile the plain graph, the rewritten graph, or both, as the number of tokens needs."""
        layouts = name_inputs(gm, inputs)
        plain = order_sums(gm, self.config)
        source, mode = (gm, None) if self.backend == "eager" else retrace(gm, collectives.group_size(self._group()))
        rewritten_gm = rewrite(source, self.config, inputs=layouts, dump=self._dump_folder())
        report: Report = rewritten_gm.meta["report"]
        minimum = least_tokens(self.config, report)
        report.min_tokens = "never" if minimum == NEVER else minimum
        self.reports.append(report)
        tokens = rewritten_gm.meta["tokens"]
        is_plain = isinstance(tokens, int) and not self._takes_rewritten(tokens, minimum)
        if is_plain or not report.rewrites or minimum == NEVER:
            return _only("plain", self._lower(plain, example_inputs), self)
        compiled = self._lower(rewritten_gm, None, mode)
        if isinstance(tokens, int):
            return _only("rewritten", compiled, self)
        return _Dispatch(self._lower(plain, example_inputs), compiled, rewritten_gm, self, minimum)

    def _dump_folder(self) -> Path | None:
        """Return a new folder for each capture and rank, or None when no graphs are written."""
        if self.dump is None:
            return None
        rank = collectives.process_group(self._group()).rank()
        return Path(self.dump) / f"graph{len(self.reports)}_rank{rank}"

    def _group(self) -> str:
        return collectives.group_name(self.config.group)

    def _takes_rewritten(self, tokens: int, minimum: int) -> bool:
        """Return whether a call with so many tokens runs the rewritten graph."""
        return tokens >= minimum and (self.config.pad or tokens % collectives.group_size(self._group()) == 0)

    def _lower(self, gm: GraphModule, example_inputs: Sequence[Any] | None, mode: Any = None) -> Callable[..., Any]:
        """Return the graph as a callable, compiled unless eager; mode: the fake mode of a graph from `retrace`."""
        if self.backend == "eager":
            from functorch.compile import make_boxed_func

            return make_boxed_func(gm.forward)
        from torch._inductor.compile_fx import compile_fx_inner

        tag = f"{torch.compiler.config.cache_key_tag} {schemas_key()}"
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            if mode is None:
                return compile_fx_inner(gm, example_inputs or [])
            fakes = [value(n) for n in gm.graph.nodes if n.op == "placeholder"]
            with torch._guards.tracing(torch._guards.TracingContext(mode)):
                return compile_fx_inner(gm, fakes)


def schemas_key() -> str:
    """Return a hash of the schemas of whorl's operators, for the key of Inductor's cache on disk.

    Inductor's code writes default arguments out while its key leaves them out, so a graph compiled with an earlier
    signature would be taken from the cache and fail.
    """
    text = "\n".join(sorted(f"{name}{op.schema}" for name, op in ops.OPS.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def rounding(config: SequenceParallel) -> dict[str, Any]:
    """Return Inductor's settings under which the plain and the rewritten graph round alike.

    A fused kernel keeps the values between its operators in fp32, so bf16 would be rounded only where a collective
    happens to cut the graph, and the two graphs are cut at different places.
    """
    return {"emulate_precision_casts": True} if config.ordered else {}


def _wants_grad(model: Any, *inputs: Any) -> bool:
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    tensors = (x for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, Tensor))
    return any(x.requires_grad for x in itertools.chain(parameters, tensors))


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextlib.contextmanager
def _without_backward_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the modules' backward hooks while gradients are off.

    torch.compile captures no module that has one (transformers' tp_plan adds some), and without gradients none would
    run.
    """
    if torch.is_grad_enabled() or not modules:
        yield
        return
    removed = [(module, module._backward_hooks, module._backward_pre_hooks) for module in modules]
    for module in modules:
        module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, hooks, pre_hooks in removed:
            module._backward_hooks, module._backward_pre_hooks = hooks, pre_hooks


def _only(name: str, graph: Callable[..., Any], owner: Compiled) -> Callable[..., Any]:
    """Return a function that runs the only graph of a capture, and tells its owner the name."""

    def run(args: list[Any]) -> Any:
        owner.last_run = name
        return graph(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Dispatch:
    """Runs the plain or the rewritten graph, depending on the number of tokens of the call.

    The choice is made here, so torch's guards stay as the capture left them.
    """

    _boxed_call = True

    def __init__(self, plain: Any, rewritten: Any, gm: GraphModule, owner: Compiled, minimum: int) -> None:
        self.graphs = {"plain": plain, "rewritten": rewritten}
        self.owner, self.minimum = owner, minimum
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        # For each size symbol the input, and its dim (None: the input is the size), that gives its value.
        self.symbols = {symbol: (inputs.index(node), dim) for symbol, (node, dim) in symbol_sources(inputs).items()}
        self.tokens = gm.meta["tokens"].node.expr
        # The rewritten graph was compiled in its own shape environment; the guards of that one are checked here.
        env = gm.meta["tokens"].node.shape_env
        self.guards = [guard.expr for guard in env.guards] if owner.backend == "inductor" else []
        self.chosen: dict[tuple[int, ...], str] = {}

    def __call__(self, args: list[Any]) -> Any:
        sizes = tuple(args[i] if dim is None else args[i].shape[dim] for i, dim in self.symbols.values())
        if sizes not in self.chosen:
            self.chosen[sizes] = self._choose(sizes)
        name = self.owner.last_run = self.owner.force or self.chosen[sizes]
        return self.graphs[name](args)

    def _choose(self, sizes: tuple[int, ...]) -> str:
        sizes_of_symbols = dict(zip(self.symbols, sizes, strict=True))
        tokens = int(self.tokens.xreplace(sizes_of_symbols))
        guards_hold = all(bool(guard.xreplace(sizes_of_symbols)) for guard in self.guards)
        return "rewritten" if guards_hold and self.owner._takes_rewritten(tokens, self.minimum) else "plain"


# ---- entry point


def compile(
    model: Callable[..., Any],
    sequence_parallel: SequenceParallel | None = None,
    *,
    backend: Backend = "inductor",
    dynamic: bool | None = None,
    dump: str | Path | None = None,
) -> Compiled:
    """Compile a model so that with enough tokens each rank keeps only its share of them between all-reduces.

    model: anything torch.compile captures as one graph, called with the same inputs on every rank of the group.
    sequence_parallel: the options; default `SequenceParallel()`. backend: "inductor", or "eager" to run the graphs
    operator by operator. dynamic: as in torch.compile. dump: a folder to which the graph is written before and after
    each pass, in a subfolder for each capture and rank. Returns a `Compiled` with the model's arguments and outputs;
    both graphs come from one capture, and the number of tokens of a call decides which of them runs. Raises ValueError
    for another backend.

    Example: model = passes.compile(model, passes.SequenceParallel(min_tokens=1000), dynamic=True)
    """
    if backend not in ("inductor", "eager"):
        raise ValueError(f"compile: backend is {backend!r}, expected 'inductor' or 'eager'")
    config = sequence_parallel or SequenceParallel()
    group = collectives.group_name(config.group)
    if config.min_tokens == "auto" and config.cost is None:
        # It is measured here, because collectives cannot run during tracing.
        config = replace(config, cost=local_cost_model(group))
    return Compiled(model, config, backend, dynamic, dump)
