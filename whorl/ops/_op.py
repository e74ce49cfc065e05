"""An operator is one reference function; every backend implements exactly its signature.

`@operator(...)` on the reference defines the torch op `whorl::<name>`: one node in a graph, one in its backward.
The reference is the fake implementation, the fallback and the oracle of the tests. Read `rms_norm.py` for an example.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from whorl.device import HOST, unavailable

from ._schema import literals, torch_schema

_LIBRARY = Library("whorl", "FRAGMENT")
OPS: dict[str, "Op"] = {}
_WIDE = (torch.float32, torch.float64)
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

Values = dict[str, Any]  # an operator's arguments by name
Gradient = Callable[..., Mapping[str, Tensor | None]]
# One way to place tensors on one mesh axis: placements of the outputs, and of the inputs by name.
Sharding = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Impl:
    backend: str
    function: Callable[..., Any]
    accepts: Callable[..., str | None]  # None, or the reason it cannot take these arguments


@dataclass(frozen=True, slots=True)
class Choice:
    backend: str
    function: Callable[..., Any]
    reasons: dict[str, str]  # backends passed over


class Op:
    """A callable operator. See `operator` for what may be stated about it."""

    def __init__(
        self,
        reference: Callable[..., Any],
        *,
        check: Callable[..., None] | None = None,
        mutates: Sequence[str] = (),
        forward_only: bool = False,
        absent: Mapping[int, str] | None = None,
        totals: Sequence[int] = (),
        fake: Callable[..., Any] | None = None,
        sharding: Callable[[Values], list[Sharding]] | None = None,
        bytes: Callable[[Values, tuple[Tensor, ...]], int] | None = None,
        flops: Callable[[Values], int] | None = None,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.__doc__ = reference.__doc__
        self.check = check
        self.mutates = tuple(mutates)
        self.forward_only = forward_only or bool(mutates)
        self.absent = dict(absent or {})
        self.totals = tuple(totals)
        self.sharding = sharding
        self.impls: dict[str, Impl] = {}
        self.cases: tuple[Values, ...] = ()
        self.bench_cases: tuple[Values, ...] = ()
        self.make: Callable[..., Values] = _no_cases
        self.bytes = bytes or all_bytes
        self.flops = flops
        self._fake = fake or reference
        self._gradient: Gradient | None = None
        self._saved: tuple[tuple[str, ...], tuple[int, ...]] | None = None  # None: every input, no output
        self._forced = ""
        self._is_sharding_registered = False
        parameters = inspect.signature(reference).parameters.values()
        self._names = [p.name for p in parameters]
        self._order = {name: i for i, name in enumerate(self._names)}
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._num_positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self._choices = {p.name: o for p in parameters if (o := literals(p.annotation))}
        self.schema = torch_schema(reference, self.mutates)
        self._define()
        OPS[self.name] = self

    def _define(self) -> None:
        _LIBRARY.define(self.name + self.schema)
        _LIBRARY.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        name = f"whorl::{self.name}"
        register_fake(name, self._run_fake, lib=_LIBRARY)
        if not self.forward_only:  # torch has no autograd formula for a mutating op; __call__ refuses gradients instead
            register_autograd(name, self._backward, setup_context=self._setup_context, lib=_LIBRARY)
        self.node: torch._ops.OpOverload = getattr(torch.ops.whorl, self.name).default

    # ---- declaring

    def impl(self, backend: str, *, accepts: Callable[..., str | None] = lambda **_: None) -> Callable[..., Any]:
        """Add a backend. `accepts(**arguments)` returns None, or the reason it cannot take them."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            # Always called with every argument by name, so names are the contract; defaults and types stand once,
            # in the reference. `**rest` takes those a backend only hands on.
            parameters = inspect.signature(function).parameters.values()
            names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            has_rest = len(names) < len(parameters)
            if not set(names) <= set(self._names) or not (has_rest or names == self._names):
                raise TypeError(f"{self.name}/{backend} takes {names}, the reference {self._names}")
            self.impls[backend] = Impl(backend, function, accepts)
            return function

        return add

    def gradient(self, *, save: Sequence[str] = (), save_outputs: Sequence[int] = ()) -> Callable[[Gradient], Gradient]:
        """State the backward: `fn(grads, args, outputs)` returns gradients by argument name.

        `args` holds the saved tensors and everything that is not a tensor, `backend` (what the forward was asked to
        use) included; `outputs` the saved outputs by index. Without this the reference is differentiated.
        """

        def add(function: Gradient) -> Gradient:
            self._gradient, self._saved = function, (tuple(save), tuple(save_outputs))
            return function

        return add

    def inputs(self, *, cases: Sequence[Values], bench: Sequence[Values] = ()) -> Callable[..., Any]:
        """Sizes, and the function that makes arguments from them; tests, selftest and benchmarks walk these."""

        def add(function: Callable[..., Values]) -> Callable[..., Values]:
            self.cases, self.bench_cases, self.make = tuple(cases), tuple(bench), function
            return function

        return add

    # ---- choosing

    def choose(self, *args: Any, backend: str = "", **kwargs: Any) -> Choice:
        """The implementation that these arguments get, and why the others do not."""
        values = self._bind(args, kwargs)
        return self._choose(values, self._device(values), backend or self._forced)

    def _choose(self, values: Values, device: str, asked: str) -> Choice:
        reasons: dict[str, str] = {}
        for name, impl in self.impls.items():
            if asked and asked != name:
                continue
            reason = unavailable(name, device, asked=bool(asked)) or impl.accepts(**values)
            if reason is None:
                return Choice(name, impl.function, reasons)
            reasons[name] = reason
        if asked and asked != "torch":
            reason = reasons.get(asked, "it has no such backend")
            raise RuntimeError(
                f"{self.name}: backend {asked!r} was asked for: {reason}. Has: {', '.join(['torch', *self.impls])}"
            )
        return Choice("torch", self.reference, reasons)

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        """Force a backend for every call in the block, on all threads; `backend=` in a call does it for one call."""
        old, self._forced = self._forced, backend
        try:
            yield
        finally:
            self._forced = old

    def availability(self, device: str) -> dict[str, str | None]:
        """For each backend None, or the reason it cannot run on this machine's `device`."""
        return {"torch": None} | {name: unavailable(name, device) for name in self.impls}

    def matches(self, node: torch.fx.Node) -> bool:
        """Whether a graph node is this operator, also when functionalisation has wrapped a mutating one."""
        wrapped = getattr(torch.ops.higher_order, "auto_functionalized_v2", None)
        return node.target is self.node or (node.target is wrapped and node.args[0] is self.node)

    # ---- calling

    def __call__(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        for name, options in self._choices.items():
            if values[name] not in options:
                raise ValueError(f"{self.name}: {name} is {values[name]!r}, expected one of {', '.join(options)}")
        device = self._device(values, tensors)
        if self.check is not None:
            self.check(**values)
        backend = backend or self._forced
        if self.forward_only and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(f"{self.name}: {self._why_no_gradient()}")
        if not _needs_node(tensors):
            return self._run(values, device, backend)
        if _is_transformed():
            return self._run_transformed(values, backend)
        if self.sharding is not None and not self._is_sharding_registered and _has_dtensor(tensors):
            self._register_sharding()
        positional, keywords = self._split(values)
        return self._restore_absent(self.node(*positional, **keywords, backend=backend), values)

    def unchecked(self, *args: Any, **kwargs: Any) -> Any:
        """As a call, but arguments are not looked at on the CPU: for models, whose shapes hold since they were loaded.

        Looking costs as much there as small tensors' arithmetic does.
        """
        if self._forced or torch.compiler.is_compiling():  # first: a tracer stumbles over the questions below
            return self(*args, **kwargs)
        if not torch.is_inference_mode_enabled() or args[0].device.type != HOST:
            return self(*args, **kwargs)
        if _needs_node([args[0]]) or torch.is_autocast_enabled(HOST):
            return self(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def _why_no_gradient(self) -> str:
        if self.name.endswith("_"):
            return f"works in place and has no gradient; use {self.name.rstrip('_')} instead"
        return "is for inference and has no gradient; call it under torch.no_grad() or torch.inference_mode()"

    def _bind(self, args: tuple[Any, ...], kwargs: Values) -> Values:
        """Arguments by name; inspect's own bind is ten times slower and does not trace."""
        values = self._defaults.copy()
        values.update(zip(self._names, args, strict=False))
        values.update(kwargs)
        is_wrong = len(values) != len(self._names) or len(args) > self._num_positional
        for name in kwargs:
            is_wrong = is_wrong or self._order.get(name, -1) < len(args)  # unknown, or given twice
        if is_wrong:
            self._refuse(args, kwargs, values)
        return values

    def _refuse(self, args: tuple[Any, ...], kwargs: Values, values: Values) -> None:
        count = len(args)
        if count > self._num_positional:
            raise TypeError(f"{self.name} takes {self._num_positional} positional arguments, got {count}")
        if wrong := [k for k in kwargs if k not in self._names[count:]]:
            raise TypeError(f"{self.name}: unknown or repeated arguments {wrong}; it takes {self._names} and 'backend'")
        missing = next(name for name in self._names if name not in values)
        raise TypeError(f"{self.name}: argument {missing!r} is missing")

    def _device(self, values: Values, tensors: list[Tensor] | None = None) -> str:
        if tensors is None:
            tensors = [v for v in values.values() if isinstance(v, Tensor)]
        found = [t.device for t in tensors]
        if not found or found.count(found[0]) != len(found):
            where = {n: str(v.device) for n, v in values.items() if isinstance(v, Tensor)}
            raise ValueError(f"{self.name}: tensors must be on one device, got {where}")
        return found[0].type

    def _split(self, values: Values) -> tuple[list[Any], Values]:
        positional, keywords = self._names[: self._num_positional], self._names[self._num_positional :]
        return [values[n] for n in positional], {n: values[n] for n in keywords}

    def _run(self, values: Values, device: str, backend: str) -> Any:
        if device == HOST and not backend:  # no backend but the reference is at home here
            function = self.reference
        elif device == "meta" and backend in ("", "torch"):  # there are no values to read
            function = (lambda **_: None) if self.mutates else self._fake
        else:
            choice = self._choose(values, device, backend)
            function = choice.function
            if choice.backend == "torch" and device != HOST and not backend:
                _warn_fallback(self.name, device, tuple(choice.reasons.items()))
        if device == "meta" or not torch.is_autocast_enabled(device):
            out = function(**values)
        else:
            with torch.autocast(device, enabled=False):
                out = function(**values)
        for name in self.mutates:  # kernels write behind autograd's back
            if values[name] is not None:
                torch.autograd.graph.increment_version(values[name])
        return out

    def _run_transformed(self, values: Values, backend: str) -> Any:
        """The reference in the open: a torch op has no formula for these transforms and would lose derivatives."""
        if backend not in ("", "torch"):
            raise RuntimeError(
                f"{self.name}: backend {backend!r} was asked for: torch.func and forward mode run the reference only"
            )
        with _no_autocast(self._device(values)):
            return self.reference(**values)

    # ---- the torch op

    def _kernel(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        return self._fill_absent(self._run(values, self._device(values), backend), values)

    def _run_fake(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        if self.mutates:
            return None
        with _no_autocast(self._device(values)):
            return self._fill_absent(self._fake(**values), values)

    def _fill_absent(self, out: Any, values: Values) -> Any:
        """A torch op returns tensors only: an absent output leaves as an empty one."""
        if not self.absent:
            return out
        like = next(v for v in values.values() if isinstance(v, Tensor))
        return tuple(like.new_empty(0) if o is None else o for o in out)

    def _restore_absent(self, out: Any, values: Values) -> Any:
        if not self.absent:
            return out
        return tuple(None if self._is_absent(i, values) else o for i, o in enumerate(out))

    def _is_absent(self, output: int, values: Values) -> bool:
        name = self.absent.get(output, "")
        return name in values and (values[name] is None or values[name] is False)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Values) -> None:
        names = self._names
        values = dict(zip(names, inputs, strict=False)) | keyword_only_inputs
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        saved, saved_outputs = self._saved or (tuple(tensors), ())
        kept = [n for n in saved if n in tensors]
        ctx.set_materialize_grads(False)  # an unused output costs nothing
        ctx.save_for_backward(*(tensors[n] for n in kept), *(outputs[i] for i in saved_outputs))
        ctx.saved_names, ctx.saved_outputs = kept, saved_outputs
        ctx.constants = {n: v for n, v in values.items() if n not in tensors}
        ctx.wanted = [n for n in names if n in tensors and tensors[n].requires_grad]
        ctx.input_names = names[: len(inputs)]

    def _backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        args = dict(ctx.constants) | dict(zip(ctx.saved_names, tensors, strict=False))
        outputs = dict(zip(ctx.saved_outputs, tensors[len(ctx.saved_names) :], strict=True))
        grads = tuple(None if self._is_absent(i, ctx.constants) else g for i, g in enumerate(grads))
        given = [g for g in grads if g is not None]
        if not given:
            return (None,) * len(ctx.input_names)
        if self._gradient is not None:
            found = self._gradient(grads, args, outputs)
        else:
            args.pop("backend")
            with _no_autocast(given[0].device.type):
                found = _differentiate(self.reference, args, grads, ctx.wanted)
        return tuple(found.get(n) for n in ctx.input_names)

    def _register_sharding(self) -> bool:
        from torch.distributed.tensor.experimental import register_sharding

        def strategies(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
            kwargs.pop("backend", None)
            values = self._bind(args, kwargs)
            assert self.sharding is not None
            order = self._names[: len(args)]
            return [(list(outs), [ins.get(n) for n in order]) for outs, ins in self.sharding(values)]

        register_sharding(self.node)(strategies)
        self._is_sharding_registered = True
        return True

    # What torch.compiler.assume_constant_result sets; calling it would import the compiler, and Triton with it.
    _register_sharding._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<operator whorl::{self.name}{self.schema}, backends torch, {', '.join(self.impls)}>"


def operator(**statements: Any) -> Callable[[Callable[..., Any]], Op]:
    """Make an operator of a reference function, whose signature and docstring are the contract.

    check(**arguments)      raises ValueError for arguments no backend may see
    mutates=("cache",)      arguments written in place; such an operator returns None and refuses gradients
    forward_only=True       refuses gradients: an operator of inference
    absent={1: "k"}         output 1 is None exactly when argument k is None or False
    totals=(0,)             output 0 is one number, a sum over everything: a ratio of errors says nothing of it
    fake(**arguments)       shapes and dtypes, for a reference that reads values
    sharding(arguments)     DTensor placements that need no communication
    bytes, flops            what the benchmark divides by; all inputs and outputs unless stated
    `Literal[...]` parameters are checked against their options.
    """
    return lambda reference: Op(reference, **statements)


def widen(x: Tensor) -> Tensor:
    """The accumulation dtype: fp32, except that fp64 stays, since it is the gold in tests."""
    return x if x.dtype in _WIDE else x.float()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The one rounding at an operator's end; a cast to the same dtype would cost microseconds, too."""
    return x if x.dtype == dtype else x.to(dtype)


def is_readable(x: Tensor) -> bool:
    """Whether values can be looked at here for free: a real CPU tensor, nobody tracing."""
    return x.device.type == "cpu" and not _needs_node([x.detach()])


def _needs_node(tensors: list[Tensor]) -> bool:
    """Whether someone looks: autograd, a tracer, a dispatch mode, a transform or a tensor subclass.

    The torch op costs tens of microseconds; otherwise the implementation is called directly.
    """
    return (
        torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or not _PLAIN.issuperset(map(type, tensors))
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _is_transformed() -> bool:
    """Whether torch.func (functionalisation apart, which keeps the node) or forward mode differentiates or maps."""
    if torch.compiler.is_compiling():
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() != torch._C._functorch.TransformType.Functionalize


def _has_dtensor(tensors: list[Tensor]) -> bool:
    return any(type(t).__name__ == "DTensor" for t in tensors)


def _no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


_WARNED: set[tuple[Any, ...]] = set()


def _warn_fallback(name: str, device: str, reasons: tuple[tuple[str, str], ...]) -> None:
    """Once for each operator and reason."""
    if (name, device, reasons) in _WARNED:
        return
    _WARNED.add((name, device, reasons))
    why = "; ".join(f"{b}: {r}" for b, r in reasons) or "it has no other backend"
    warnings.warn(f"{name}: the torch reference runs on {device} ({why})", RuntimeWarning, stacklevel=4)


def _differentiate(
    function: Callable[..., Any], args: Values, grads: tuple[Tensor | None, ...], wanted: Sequence[str]
) -> Mapping[str, Tensor | None]:
    """Gradients of a reference by torch's own autograd, for operators that state no backward."""
    with torch.enable_grad():
        args = {n: a.detach().requires_grad_(n in wanted) if isinstance(a, Tensor) else a for n, a in args.items()}
        out = function(**args)
        outs = out if isinstance(out, tuple) else (out,)
        pairs = [
            (o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o is not None and o.requires_grad
        ]
        got = torch.autograd.grad(
            [o for o, _ in pairs], [args[n] for n in wanted], [g for _, g in pairs], allow_unused=True
        )
    return dict(zip(wanted, got, strict=True))


def all_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    tensors = [v for v in (*values.values(), *outputs) if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _no_cases(**_: Any) -> Values:
    raise RuntimeError("this operator has no cases: state them with @op.inputs(cases=[...])")
