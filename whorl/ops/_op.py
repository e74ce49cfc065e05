"""An operator is defined by one reference function, and every backend implements the reference's signature.

`@operator(...)` on the reference registers the torch op `whorl::<name>`, which is one node in a traced graph and one in
its backward. The reference is also the fake (meta) implementation unless `fake` replaces it, the fallback where no
other backend takes the arguments, and what tests compare the backends with. `rms_norm.py` is an example to read.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from whorl.device import BACKENDS, HOST, REFERENCE, load_backends, unavailable

from ._draw import Draw, Maker, with_tokens
from ._forced import Forced
from ._gradient import Formula, Gradient, Values
from ._impl import Choice, Impl, LazyFunction, Reason, check_signature, check_where, no_reason
from ._plan import NOT_DESCRIBED, Impls, Key, Plan, Plans, describer
from ._schema import literals, torch_schema
from ._spec import spec_of
from ._tracing import PLAIN, VALUE_READS, has_autocast, has_dtensor, is_transformed, is_watched, needs_node, no_autocast
from .cpu.library import BACKEND as CPP

_LIBRARY = Library("whorl", "FRAGMENT")
OPS: dict[str, "Op"] = {}
_WIDE = (torch.float32, torch.float64)

# One DTensor strategy for one mesh axis: placements of the outputs, and of the inputs by name.
Sharding = tuple[Sequence[Any], Mapping[str, Any]]


class Op:
    """A callable operator. `operator`, the decorator that makes it, describes the keywords of `__init__`.

    Call it with the reference's arguments. `backend="triton"` forces a backend for one call, `using` for a block;
    without them the first backend that takes the arguments runs. A call raises ValueError for arguments that the
    contract excludes, TypeError for missing or unknown arguments, and RuntimeError where a forced backend cannot run
    or where an operator without a gradient is asked for one.
    """

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
        sharding: Callable[[Values], list[Sharding]] | Literal["rows"] | None = None,
        bytes: Callable[[Values, tuple[Tensor, ...]], int] | None = None,
        flops: Callable[[Values], int] | str | None = None,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.spec = spec_of(reference)
        stated = "".join(f"\n    {name}: {text}" for name, text in self.spec.statements.items())
        self.__doc__ = f"{reference.__doc__}\n{stated}" if stated else reference.__doc__
        self.check = check
        self.mutates = tuple(mutates)
        self.forward_only = forward_only or bool(mutates)
        self.absent = dict(absent or {})
        self.totals = tuple(totals)
        self.without = dict(without or {})
        self.sharding = self.spec.shardings if isinstance(sharding, str) else sharding
        self._plans = Plans()
        self.impls = {}
        self.cases: tuple[Values, ...] = ()
        self.bench_cases: tuple[Values, ...] = ()
        self._maker: Maker | None = None
        self.bytes = bytes or all_bytes
        count = functools.partial(self.spec.count, flops) if isinstance(flops, str) else flops
        self.flops: Callable[[Values], int] | None = count
        self._fake = fake or (self._empty if self.spec.is_complete else reference)
        self._forced = Forced(self.name)
        self._is_plain_on_host = True  # the CPU has no implementation but the reference
        self._on_host: Callable[..., Any] | None = None  # what `unchecked` runs there; None: not known yet
        self._is_sharding_registered = False
        self._check_reads_values = False  # until a call in which it does
        parameters = self.spec.signature.parameters.values()
        self._names = [p.name for p in parameters]
        self._order = {name: i for i, name in enumerate(self._names)}
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self._num_positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        self._choices = {p.name: o for p in parameters if (o := literals(p.annotation))}
        self._describe = describer(self.name, self.spec.signature)
        self._gradient = Gradient(reference, self._names, tuple(self.absent), self._is_absent)
        self._apply = self._gradient.function(self.name, self._execute)
        self.schema = torch_schema(self.spec.signature, self.mutates)
        self._define()
        OPS[self.name] = self

    def _define(self) -> None:
        _LIBRARY.define(self.name + self.schema)
        _LIBRARY.impl(self.name, self._kernel, "CompositeExplicitAutograd")
        name = f"whorl::{self.name}"
        register_fake(name, self._run_fake, lib=_LIBRARY)
        if not self.forward_only:  # torch allows no autograd formula for a mutating op; __call__ refuses gradients
            register_autograd(name, self._gradient.backward, setup_context=self._gradient.setup_context, lib=_LIBRARY)
        self.node: torch._ops.OpOverload = getattr(torch.ops.whorl, self.name).default

    @property
    def impls(self) -> dict[str, Impl]:
        """Implementations by backend, in the order in which they are tried."""
        return self._impls

    @impls.setter
    def impls(self, impls: dict[str, Impl]) -> None:
        self._impls = Impls(impls, self._plans)
        self._plans.clear()

    # ---- declaration

    def impl(
        self,
        backend: str,
        where: str = "",
        *,
        accepts: Reason = no_reason,
        slower: Reason = no_reason,
        takes_fp64: bool | None = None,
    ) -> Callable[..., Any]:
        """Add a backend's implementation: the function that `where` names or, without `where`, the decorated one.

        where: "module:function", imported when the backend is first chosen; a module name without a dot is a module
        in the reference's package. accepts(**arguments) returns None, or the reason that the backend cannot take these
        arguments. slower(**arguments) returns None, or the reason that a backend tried later was measured to be
        faster; this backend then runs only where it is forced or no other backend takes the arguments. takes_fp64:
        whether it computes with fp64 tensors; Triton's and whorl's CPU kernels do not unless they say so.
        Raises ValueError for an unknown backend or a second implementation, TypeError for another signature or `where`.
        """
        if backend not in BACKENDS:
            raise ValueError(
                f"{self.name}: backend is {backend!r}, expected one of {', '.join(BACKENDS)}; register_backend adds "
                "another"
            )

        check_where(self.name, backend, where)
        takes_fp64 = backend not in ("triton", CPP) if takes_fp64 is None else takes_fp64

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            check_signature(f"{self.name}/{backend}", function, self._names)
            self._add(Impl(backend, function, accepts, slower, takes_fp64=takes_fp64))
            return function

        if where:
            package = self.reference.__module__.rpartition(".")[0]
            function = LazyFunction(self.name, self._names, backend, where, package)
            self._add(Impl(backend, function, accepts, slower, takes_fp64=takes_fp64))
        return add

    def _add(self, impl: Impl) -> None:
        if impl.backend in self.impls:
            raise ValueError(f"{self.name}: backend {impl.backend!r} has an implementation already")
        impls = [*self.impls.values(), impl]
        impls.sort(key=lambda one: -BACKENDS[one.backend].priority)  # stable: equal priorities keep their order
        self.impls = {one.backend: one for one in impls}
        self._is_plain_on_host = all(BACKENDS[name].home != HOST for name in self.impls)
        self._on_host = None

    def gradient(self, *, save: Sequence[str] = (), save_outputs: Sequence[int] = ()) -> Callable[[Formula], Formula]:
        """Register the decorated function as the backward: `fn(grads, args, outputs)` returns gradients by argument.

        save: tensor arguments to save; save_outputs: indices of outputs to save. `grads` has one entry per output,
        None where no gradient reaches it. `args` (`Arguments`) holds the saved tensors and every argument that is not
        a tensor, including `backend` (the one forced in the forward, or ""); `outputs` holds the saved outputs by
        index. An operator without a registered backward is differentiated through its reference by torch's autograd.
        """

        def add(function: Formula) -> Formula:
            self._gradient.formula, self._gradient.saved = function, (tuple(save), tuple(save_outputs))
            return function

        return add

    def inputs(
        self, *, cases: Sequence[Values], bench: Sequence[Values] = (), words: Mapping[str, str] | None = None
    ) -> Callable[..., Any]:
        """Register the cases of tests and the self-test, those of benchmarks, and how their arguments are made.

        Arguments are drawn as the signature states them: `_draw.py` says what a case may contain. words: from words of
        the cases to the dims that they stand for, such as {"size": "N, K"}. The decorated function, if there is one, is
        called as `fn(draw, **entries)` with those entries of a case that it names, and returns what is special. The
        keys `scale` and `sliced` of a case are settings of `draw`.
        """
        self.cases, self.bench_cases = (tuple(map(with_tokens, kind)) for kind in (cases, bench))

        def add(function: Callable[..., Values]) -> Callable[..., Values]:
            self._maker = Maker(self.spec, function, words or {})
            return function

        add(lambda draw: {})
        return add

    def make(self, *, dtype: torch.dtype, device: str, scale: float = 1.0, sliced: int = False, **case: Any) -> Values:
        """Return the arguments of a case by name, in this dtype and on this device."""
        return self.draw(Draw(dtype, device, scale, sliced), **case)

    def draw(self, draw: Draw, **case: Any) -> Values:
        """Return the arguments of a case by name; `inputs` says what it may contain."""
        if self._maker is None:
            raise RuntimeError(f"{self.name} has no cases: state them with @op.inputs(cases=[...])")
        return self._maker(draw, case)

    # ---- choice of a backend

    def choose(self, *args: Any, backend: str = "", **kwargs: Any) -> Choice:
        """Return the implementation that a call with these arguments would run, and why the others would not."""
        values = self._bind(args, kwargs)
        return self._choose(values, self._device(values), backend or self._forced.get())

    def _choose(self, values: Values, device: str, requested: str) -> Choice:
        """Try the requested backend or, where `requested` is "", all of them; RuntimeError if the former cannot run."""
        load_backends()
        reasons: dict[str, str] = {}
        slower: list[Impl] = []
        for name, impl in self.impls.items():
            if requested and requested != name:
                continue
            reason = unavailable(name, device, by_name=bool(requested)) or impl.accepts(**values)
            if reason is None and not requested and (reason := impl.slower(**values)) is not None:
                slower.append(impl)
            if reason is None:
                return Choice(name, impl.function, reasons)
            reasons[name] = reason
        if slower:
            return Choice(slower[0].backend, slower[0].function, reasons)
        if requested and requested != REFERENCE:
            reason = reasons.get(requested) or self._absence_reason(requested)
            backends = ", ".join([REFERENCE, *self.impls])
            raise RuntimeError(
                f"{self.name}: backend {requested!r} was requested but cannot run: {reason}. Backends: {backends}"
            )
        return Choice(REFERENCE, self.reference, reasons)

    def _absence_reason(self, backend: str) -> str:
        reason = self.without.get(backend)
        return "the operator has no such backend" + (f", since {reason}" if reason else "")

    def using(self, backend: str) -> contextlib.AbstractContextManager[None]:
        """Force a backend for every call in the block; `backend=` in a call does it for one call.

        It applies to calls of this thread or asyncio task, and to the backward of each, wherever autograd runs it. It
        does not apply to other threads; one of them is a CUDA device's backward thread, which recomputes activation
        checkpoints. Example: `with ops.rope.using("triton"): q, k = ops.rope(q, k, rows)`.
        """
        return self._forced.using(backend)

    def availability(self, device: str) -> dict[str, str | None]:
        """Return for each backend None, or the reason that it cannot run on this machine's `device`."""
        load_backends()
        return {REFERENCE: None} | {name: unavailable(name, device) for name in self.impls}

    def matches(self, node: torch.fx.Node) -> bool:
        """Return whether an FX node calls this operator; functionalisation wraps operators that mutate arguments."""
        wrapped = getattr(torch.ops.higher_order, "auto_functionalized_v2", None)
        return node.target is self.node or (node.target is wrapped and node.args[0] is self.node)

    # ---- calls

    def __call__(self, *args: Any, backend: str = "", **kwargs: Any) -> Any:
        if is_watched():
            return self._call_watched(args, kwargs, backend)
        try:
            described = self._describe(backend or self._forced.here(), *args, **kwargs)
            plan = None if described is None else self._plans.get(described[0])
        except NOT_DESCRIBED:  # the arguments are wrong: the slow path raises an error that names them
            return self._call_watched(args, kwargs, backend)
        if described is None:
            return self._call_watched(args, kwargs, backend)
        key, values = described
        if plan is None:
            plan = self._plan_kind(key, values)
        elif plan.check is not None:
            plan.check(**values)
        if plan.state is None or not torch.is_grad_enabled():
            return self._execute(plan, values)
        self._refuse_gradient()
        return self._apply(plan, values, *[values[n] for n in plan.state.inputs])

    def _plan_kind(self, key: Key, values: Values) -> Plan:
        """Check the first call of a kind (see `_plan.py`), and plan how this and later calls of it are computed."""
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        reads = VALUE_READS.count
        device = self._check_values(values, tensors)
        plan = self._plan(values, device, key[0], reads_values=VALUE_READS.count > reads)
        if all(type(t) in PLAIN for t in tensors):
            self._plans.remember(key, plan)
        return plan

    def _check_values(self, values: Values, tensors: list[Tensor]) -> str:
        """Raise ValueError for arguments that the contract excludes; return the device type of the tensors."""
        for name, options in self._choices.items():
            if values[name] not in options:
                texts = ", ".join(map(str, options))
                raise ValueError(f"{self.name}: {name} is {values[name]!r}, expected one of {texts}")
        device = self._device(values, tensors)
        self.spec.check(values)
        if self.check is not None:
            reads = VALUE_READS.count
            self.check(**values)
            if VALUE_READS.count > reads:  # set only then: torch.compile would see an effect in every call
                self._check_reads_values = True
        return device

    def _check_again(self, **values: Any) -> None:
        """Check the values of tensors, in a call of a kind that was checked before."""
        if self.spec.reads_values:
            self.spec.check_values(values)
        if self.check is not None and self._check_reads_values:
            self.check(**values)

    def _call_watched(self, args: tuple[Any, ...], kwargs: Values, backend: str) -> Any:
        """Take the slow path: a tracer, mode or transform is active, a tensor is a subclass, or arguments are wrong."""
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
        """Run whorl's own CPU kernel, or the reference, without checks on the CPU in inference mode; anywhere else this
        is a plain call, with the same result.

        Models use it, because their shapes were checked when they were loaded, and because the checks cost as much as
        the arithmetic on small CPU tensors.
        """
        if torch.compiler.is_compiling() or self._forced.here():  # first: torch.compile cannot trace the tests below
            return self(*args, **kwargs)
        first = args[0]
        if not (torch.is_inference_mode_enabled() and first.device.type == HOST) or first.dtype == torch.float64:
            return self(*args, **kwargs)
        if needs_node([first]) or torch.is_autocast_enabled(HOST):
            return self(*args, **kwargs)
        function = self._on_host
        if function is None:
            function = self._on_host = self._unchecked_on_host()
        return function(*args, **kwargs)

    def _unchecked_on_host(self) -> Callable[..., Any]:
        """Return what `unchecked` runs on the CPU. Whorl's kernels take all arguments that the contract allows."""
        names = [name for name in self.impls if BACKENDS[name].home == HOST and unavailable(name, HOST) is None]
        if names == [CPP]:
            return self.impls[CPP].function
        return self if names else self.reference

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
        """Return the arguments by name. inspect.Signature.bind is ten times slower and cannot be traced."""
        values = self._defaults.copy()
        values.update(zip(self._names, args, strict=False))
        values.update(kwargs)
        is_wrong = len(values) != len(self._names) or len(args) > self._num_positional
        for name in kwargs:
            is_wrong = is_wrong or self._order.get(name, -1) < len(args)  # unknown, or given twice
        if is_wrong:
            self._raise_for_arguments(args, kwargs, values)
        return values

    def _raise_for_arguments(self, args: tuple[Any, ...], kwargs: Values, values: Values) -> None:
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
        devices = [t.device for t in tensors]
        if not devices or devices.count(devices[0]) != len(devices):
            by_name = {n: str(v.device) for n, v in values.items() if isinstance(v, Tensor)}
            raise ValueError(f"{self.name}: tensors must be on one device, got {by_name}")
        return devices[0].type

    def _split(self, values: Values) -> tuple[list[Any], Values]:
        positional, keywords = self._names[: self._num_positional], self._names[self._num_positional :]
        return [values[n] for n in positional], {n: values[n] for n in keywords}

    def _plan(self, values: Values, device: str, backend: str, *, reads_values: bool = False) -> Plan:
        """Plan a call. backend: the forced one, or ""; reads_values: `check` must run again in every later call."""
        function: Callable[..., Any] | None = None
        if device == HOST and not backend and self._is_plain_on_host:
            pass
        elif device == "meta" and backend in ("", REFERENCE):  # meta tensors have no values
            function = (lambda **_: None) if self.mutates else self._fake
        else:
            choice = self._choose(values, device, backend)
            function = None if choice.backend == REFERENCE else choice.function
            if choice.backend == REFERENCE and device != HOST and not backend:
                _warn_fallback(self.name, device, tuple(choice.reasons.items()))
        has_grad = any(v.requires_grad for v in values.values() if isinstance(v, Tensor))
        return Plan(
            requested=backend,
            device=device,
            function=function,
            check=self._check_again if reads_values else None,
            state=self._gradient.saved_state(values) if has_grad else None,
        )

    def _execute(self, plan: Plan, values: Values) -> Any:
        function = plan.function or self.reference
        if not has_autocast():
            out = function(**values)
        else:
            with no_autocast(plan.device):
                out = function(**values)
        if self.mutates:  # autograd does not notice what kernels write, so it is told
            torch.autograd.graph.increment_version([v for n in self.mutates if (v := values[n]) is not None])
        return out

    def _run_transformed(self, values: Values, backend: str) -> Any:
        """Run the reference as plain torch code: the torch op has no formula for these transforms."""
        if backend not in ("", REFERENCE):
            raise RuntimeError(
                f"{self.name}: backend {backend!r} was requested but cannot run: torch.func and forward-mode autodiff "
                "run the reference only"
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

    def _empty(self, **values: Any) -> Any:
        """Return empty outputs as the signature states them."""
        outputs = self.spec.fake(values, [i for i in self.absent if self._is_absent(i, values)])
        return outputs[0] if len(outputs) == 1 else outputs

    def _fill_absent(self, out: Any, values: Values) -> Any:
        """Replace outputs that are None by empty tensors, because a torch op can return only tensors."""
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

    # This is what torch.compiler.assume_constant_result sets; calling that would import the compiler and Triton.
    _register_sharding._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<operator whorl::{self.name}{self.schema}, backends {', '.join([REFERENCE, *self.impls])}>"


def operator(**statements: Any) -> Callable[[Callable[..., Any]], Op]:
    """Return a decorator that makes an operator of a reference, whose signature and docstring are the contract.

    check(**arguments)      raises ValueError for what the signature cannot state; reads values only if `is_readable`
    mutates=("cache",)      arguments written in place; such an operator returns None and has no gradient
    forward_only=True       the operator is for inference and has no gradient
    absent={1: "k"}         output 1 is None exactly when argument k is None or False
    without={"triton": ..}  why one of whorl's backends has no implementation
    totals=(0,)             output 0 is one sum over everything, to which the usual error ratio of tests does not apply
    fake(**arguments)       returns empty outputs, where the signature does not state them in full
    sharding(arguments)     returns the DTensor placements that need no communication (`Sharding`); "rows": any of the
                            dims "..." may be sharded
    bytes(arguments, outputs), flops(arguments)   what a benchmark's rates count, flops also as an expression of sizes,
                            "2*T*N*K"; default: bytes of all tensors
    Shapes, dtypes and ranges are stated in the signature, as `_spec.py` says; parameters annotated `Literal[...]` are
    checked against their options.

        @operator()
        def double(x: Annotated[Tensor, "[...] float"]) -> Annotated[Tensor, "[...] x"]:
            "y = 2 x."
            return 2 * x
    """
    return lambda reference: Op(reference, **statements)


def widen(x: Tensor) -> Tensor:
    """Convert x to the accumulation dtype: fp32, except that fp64 stays, since tests compare with fp64."""
    return x if x.dtype in _WIDE else x.float()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to dtype. A tensor of that dtype is returned as it is: a cast to its own dtype costs microseconds."""
    return x if x.dtype == dtype else x.to(dtype)


_WARNED: set[tuple[Any, ...]] = set()


def _warn_fallback(name: str, device: str, reasons: tuple[tuple[str, str], ...]) -> None:
    """Warn once for each operator, device and set of reasons."""
    if (name, device, reasons) in _WARNED:
        return
    _WARNED.add((name, device, reasons))
    why = "; ".join(f"{b}: {r}" for b, r in reasons) or "the operator has no other backend"
    warnings.warn(f"{name}: the torch reference runs on {device} ({why})", RuntimeWarning, stacklevel=5)


def all_bytes(values: Values, outputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of all tensor arguments and outputs."""
    tensors = [v for v in (*values.values(), *outputs) if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)
