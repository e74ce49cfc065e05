"""An operator is one reference function; every backend implements exactly its signature.

`@operator(...)` on the reference defines the torch op `whorl::<name>`: one node in a graph, one in its backward.
The reference is the fake implementation, the fallback and the oracle of the tests. Read `rms_norm.py` for an example.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from whorl.device import BACKENDS, HOST, REFERENCE, load_backends, unavailable

from ._draw import Draw
from ._forced import Forced
from ._gradient import Formula, Gradient, Values
from ._impl import Accepts, Choice, Impl, Named, check_signature, takes_all
from ._plan import NOT_DESCRIBED, Impls, Key, Plan, Plans, describer
from ._schema import literals, torch_schema
from ._tracing import LOOKS, PLAIN, has_dtensor, is_transformed, is_watched, needs_node, no_autocast

_LIBRARY = Library("whorl", "FRAGMENT")
OPS: dict[str, "Op"] = {}
_WIDE = (torch.float32, torch.float64)

# One way to place tensors on one mesh axis: placements of the outputs, and of the inputs by name.
Sharding = tuple[Sequence[Any], Mapping[str, Any]]


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
        without: Mapping[str, str] | None = None,
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
        self.without = dict(without or {})
        self.sharding = sharding
        self._plans = Plans()
        self.impls = {}
        self.cases: tuple[Values, ...] = ()
        self.bench_cases: tuple[Values, ...] = ()
        self._drawn: Callable[..., Values] = _no_cases
        self.bytes = bytes or all_bytes
        self.flops = flops
        self._fake = fake or reference
        self._forced = Forced(self.name)
        self._is_plain_on_host = True  # no backend but the reference is at home there
        self._is_sharding_registered = False
        parameters = inspect.signature(reference).parameters.values()
        self._names = [p.name for p in parameters]
        self._order = {name: i for i, name in enumerate(self._names)}
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._num_positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self._choices = {p.name: o for p in parameters if (o := literals(p.annotation))}
        self._describe = describer(reference)
        self._gradient = Gradient(reference, self._names, self._is_absent)
        self._function = self._gradient.function(self.name, self._execute)
        self.schema = torch_schema(reference, self.mutates)
        self._define()
        OPS[self.name] = self

    def _define(self) -> None:
        _LIBRARY.define(self.name + self.schema)
        _LIBRARY.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        name = f"whorl::{self.name}"
        register_fake(name, self._run_fake, lib=_LIBRARY)
        if not self.forward_only:  # torch has no autograd formula for a mutating op; __call__ refuses gradients instead
            register_autograd(name, self._gradient.backward, setup_context=self._gradient.setup_context, lib=_LIBRARY)
        self.node: torch._ops.OpOverload = getattr(torch.ops.whorl, self.name).default

    @property
    def impls(self) -> dict[str, Impl]:
        """Implementations by backend, the first to be asked first."""
        return self._impls

    @impls.setter
    def impls(self, impls: dict[str, Impl]) -> None:
        self._impls = Impls(impls, self._plans)
        self._plans.clear()

    # ---- declaring

    def impl(
        self, backend: str, where: str = "", *, accepts: Accepts = takes_all, slower: Accepts = takes_all
    ) -> Callable[..., Any]:
        """Add a backend. `accepts(**arguments)` returns None, or the reason it cannot take them.

        `slower(**arguments)` returns None, or why a backend that is asked later is faster, as measured: this one is
        then taken only if it is asked for, or no other takes them.
        where: "module:function", imported when the backend is first chosen; a module without a dot in its name lies
        beside the reference's. Without it this decorates the function.
        """
        if backend not in BACKENDS:
            raise ValueError(
                f"{self.name}: backend {backend!r} is not known; there are {', '.join(BACKENDS)}: register_backend "
                "adds another"
            )

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            check_signature(f"{self.name}/{backend}", function, self._names)
            self._add(Impl(backend, function, accepts, slower))
            return function

        if where:
            package = self.reference.__module__.rpartition(".")[0]
            self._add(Impl(backend, Named(self.name, self._names, backend, where, package), accepts, slower))
        return add

    def _add(self, impl: Impl) -> None:
        if impl.backend in self.impls:
            raise ValueError(f"{self.name}: backend {impl.backend!r} has an implementation already")
        found = [*self.impls.values(), impl]
        found.sort(key=lambda one: -BACKENDS[one.backend].priority)  # stable: of equals the first
        self.impls = {one.backend: one for one in found}
        self._is_plain_on_host = all(BACKENDS[name].home != HOST for name in self.impls)

    def gradient(self, *, save: Sequence[str] = (), save_outputs: Sequence[int] = ()) -> Callable[[Formula], Formula]:
        """State the backward: `fn(grads, args, outputs)` returns gradients by argument name.

        `args` (`Arguments`) holds the saved tensors and everything that is not a tensor, `backend` (what the forward
        was asked to use) included; `outputs` the saved outputs by index. Without this the reference is differentiated.
        """

        def add(function: Formula) -> Formula:
            self._gradient.formula, self._gradient.saved = function, (tuple(save), tuple(save_outputs))
            return function

        return add

    def inputs(self, *, cases: Sequence[Values], bench: Sequence[Values] = ()) -> Callable[..., Any]:
        """Sizes, and the function that makes arguments from them; tests, selftest and benchmarks walk these.

        It is called as `fn(draw, **case)`: draw makes tensors, and knows `scale` and `sliced` of the case.
        """

        def add(function: Callable[..., Values]) -> Callable[..., Values]:
            self.cases, self.bench_cases, self._drawn = tuple(cases), tuple(bench), function
            return function

        return add

    def make(self, *, dtype: torch.dtype, device: str, scale: float = 1.0, sliced: bool = False, **case: Any) -> Values:
        """The arguments of a case."""
        return self._drawn(Draw(dtype, device, scale, sliced), **case)

    # ---- choosing

    def choose(self, *args: Any, backend: str = "", **kwargs: Any) -> Choice:
        """The implementation that these arguments get, and why the others do not."""
        values = self._bind(args, kwargs)
        return self._choose(values, self._device(values), backend or self._forced.get())

    def _choose(self, values: Values, device: str, asked: str) -> Choice:
        load_backends()
        reasons: dict[str, str] = {}
        slower: list[Impl] = []
        for name, impl in self.impls.items():
            if asked and asked != name:
                continue
            reason = unavailable(name, device, by_name=bool(asked)) or impl.accepts(**values)
            if reason is None and not asked and (reason := impl.slower(**values)) is not None:
                slower.append(impl)
            if reason is None:
                return Choice(name, impl.function, reasons)
            reasons[name] = reason
        if slower:
            return Choice(slower[0].backend, slower[0].function, reasons)
        if asked and asked != REFERENCE:
            reason = reasons.get(asked) or self._why_not(asked)
            raise RuntimeError(
                f"{self.name}: backend {asked!r} was asked for: {reason}. Has: {', '.join([REFERENCE, *self.impls])}"
            )
        return Choice(REFERENCE, self.reference, reasons)

    def _why_not(self, backend: str) -> str:
        said = self.without.get(backend)
        return "it has no such backend" + (f", since {said}" if said else "")

    def using(self, backend: str) -> contextlib.AbstractContextManager[None]:
        """Force a backend for every call in the block; `backend=` in a call does it for one call.

        Calls of this thread or asyncio task, and the backward of each, wherever autograd runs it. Not those of other
        threads; among them is a CUDA device's backward thread, where activation checkpoints are computed again.
        """
        return self._forced.using(backend)

    def availability(self, device: str) -> dict[str, str | None]:
        """For each backend None, or the reason it cannot run on this machine's `device`."""
        load_backends()
        return {REFERENCE: None} | {name: unavailable(name, device) for name in self.impls}

    def matches(self, node: torch.fx.Node) -> bool:
        """Whether a graph node is this operator, also when functionalisation has wrapped a mutating one."""
        wrapped = getattr(torch.ops.higher_order, "auto_functionalized_v2", None)
        return node.target is self.node or (node.target is wrapped and node.args[0] is self.node)

    # ---- calling

    def __call__(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        if is_watched():
            return self._call_watched(args, kwargs, backend)
        try:
            found = self._describe(backend or self._forced.here(), *args, **kwargs)
            plan = None if found is None else self._plans.get(found[0])
        except NOT_DESCRIBED:  # what is wrong with them is said there
            return self._call_watched(args, kwargs, backend)
        if found is None:
            return self._call_watched(args, kwargs, backend)
        key, values = found
        if plan is None:
            plan = self._decide(key, values)
        elif plan.check is not None:
            plan.check(**values)
        if plan.kept is None or not torch.is_grad_enabled():
            return self._execute(plan, values)
        self._refuse_gradient()
        return self._function.apply(plan, values, *[values[n] for n in plan.kept.inputs])

    def _decide(self, key: Key, values: Values) -> Plan:
        """Check the first call of a kind, and say how it and the next are computed."""
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        looks = LOOKS.count
        device = self._check_values(values, tensors)
        plan = self._plan(values, device, key[0], has_looked=LOOKS.count > looks)
        if all(type(t) in PLAIN for t in tensors):
            self._plans.remember(key, plan)
        return plan

    def _check_values(self, values: Values, tensors: list[Tensor]) -> str:
        """ValueError for what no backend may see; else the device."""
        for name, options in self._choices.items():
            if values[name] not in options:
                raise ValueError(f"{self.name}: {name} is {values[name]!r}, expected one of {', '.join(options)}")
        device = self._device(values, tensors)
        if self.check is not None:
            self.check(**values)
        return device

    def _call_watched(self, args: tuple[Any, ...], kwargs: Values, backend: str) -> Any:
        """A call that someone else looks at, or that has tensors of a subclass, or wrong arguments."""
        values = self._bind(args, kwargs)
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        device = self._check_values(values, tensors)
        backend = backend or self._forced.get()
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            self._refuse_gradient()
        if not needs_node(tensors):
            return self._execute(self._plan(values, device, backend), values)
        if is_transformed():
            return self._run_transformed(values, backend)
        if self.sharding is not None and not self._is_sharding_registered and has_dtensor(tensors):
            self._register_sharding()
        positional, keywords = self._split(values)
        return self._restore_absent(self.node(*positional, **keywords, backend=backend), values)

    def unchecked(self, *args: Any, **kwargs: Any) -> Any:
        """As a call, but arguments are not looked at on the CPU: for models, whose shapes hold since they were loaded.

        Looking costs as much there as small tensors' arithmetic does.
        """
        if torch.compiler.is_compiling() or self._forced.here():  # first: a tracer stumbles over the questions below
            return self(*args, **kwargs)
        if not (torch.is_inference_mode_enabled() and args[0].device.type == HOST and self._is_plain_on_host):
            return self(*args, **kwargs)
        if needs_node([args[0]]) or torch.is_autocast_enabled(HOST):
            return self(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def _refuse_gradient(self) -> None:
        if not self.forward_only:
            return
        if self.name.endswith("_"):
            raise RuntimeError(f"{self.name}: works in place and has no gradient; use {self.name.rstrip('_')} instead")
        raise RuntimeError(
            f"{self.name}: is for inference and has no gradient; call it under torch.no_grad() or "
            "torch.inference_mode()"
        )

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

    def _plan(self, values: Values, device: str, backend: str, *, has_looked: bool = False) -> Plan:
        function: Callable[..., Any] | None = None
        if device == HOST and not backend and self._is_plain_on_host:
            pass
        elif device == "meta" and backend in ("", REFERENCE):  # there are no values to read
            function = (lambda **_: None) if self.mutates else self._fake
        else:
            choice = self._choose(values, device, backend)
            function = None if choice.backend == REFERENCE else choice.function
            if choice.backend == REFERENCE and device != HOST and not backend:
                _warn_fallback(self.name, device, tuple(choice.reasons.items()))
        has_grad = any(v.requires_grad for v in values.values() if isinstance(v, Tensor))
        return Plan(
            asked=backend,
            device=device,
            function=function,
            check=self.check if has_looked else None,
            kept=self._gradient.kept(values) if has_grad else None,
        )

    def _execute(self, plan: Plan, values: Values) -> Any:
        function = plan.function or self.reference
        if plan.device == "meta" or not torch.is_autocast_enabled(plan.device):
            out = function(**values)
        else:
            with torch.autocast(plan.device, enabled=False):
                out = function(**values)
        if self.mutates:  # kernels write behind autograd's back
            torch.autograd.graph.increment_version([v for n in self.mutates if (v := values[n]) is not None])
        return out

    def _run_transformed(self, values: Values, backend: str) -> Any:
        """The reference in the open: a torch op has no formula for these transforms and would lose derivatives."""
        if backend not in ("", REFERENCE):
            raise RuntimeError(
                f"{self.name}: backend {backend!r} was asked for: torch.func and forward mode run the reference only"
            )
        with no_autocast(self._device(values)):
            return self.reference(**values)

    # ---- the torch op

    def _kernel(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        plan = self._plan(values, self._device(values), backend)
        return self._fill_absent(self._execute(plan, values), values)

    def _run_fake(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        values = self._bind(args, kwargs)
        if self.mutates:
            return None
        with no_autocast(self._device(values)):
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
        return f"<operator whorl::{self.name}{self.schema}, backends {', '.join([REFERENCE, *self.impls])}>"


def operator(**statements: Any) -> Callable[[Callable[..., Any]], Op]:
    """Make an operator of a reference function, whose signature and docstring are the contract.

    check(**arguments)      raises ValueError for arguments no backend may see; values only where `is_readable`
    mutates=("cache",)      arguments written in place; such an operator returns None and refuses gradients
    forward_only=True       refuses gradients: an operator of inference
    absent={1: "k"}         output 1 is None exactly when argument k is None or False
    without={"triton": ..}  why a backend of whorl's has no implementation
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


_WARNED: set[tuple[Any, ...]] = set()


def _warn_fallback(name: str, device: str, reasons: tuple[tuple[str, str], ...]) -> None:
    """Once for each operator and reason."""
    if (name, device, reasons) in _WARNED:
        return
    _WARNED.add((name, device, reasons))
    why = "; ".join(f"{b}: {r}" for b, r in reasons) or "it has no other backend"
    warnings.warn(f"{name}: the torch reference runs on {device} ({why})", RuntimeWarning, stacklevel=5)


def all_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    tensors = [v for v in (*values.values(), *outputs) if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _no_cases(draw: Draw, **_: Any) -> Values:
    raise RuntimeError("this operator has no cases: state them with @op.inputs(cases=[...])")
