"""An operator's gradient: what its node keeps for backward, and how backward is computed from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._tracing import no_autocast

Values = dict[str, Any]  # an operator's arguments by name
Formula = Callable[..., Mapping[str, Tensor | None]]
Saved = tuple[tuple[str, ...], tuple[int, ...]]  # arguments by name and outputs by index


class Arguments(dict[str, Any]):
    """In a backward: the tensors that were saved, and everything that is not a tensor."""

    wanted: Sequence[str]  # whose gradients are asked for
    dtypes: Mapping[str, torch.dtype]  # of all tensors, saved or not


@dataclass(frozen=True, slots=True)
class Kept:
    """What backward finds: names of arguments, of which `saved` are tensors that are kept; indices of kept outputs."""

    saved: tuple[str, ...]
    outputs: tuple[int, ...]
    constants: tuple[str, ...]  # everything that is no tensor
    wanted: tuple[str, ...]  # whose gradients are asked for
    dtypes: Mapping[str, torch.dtype]  # of all tensors, saved or not
    inputs: tuple[str, ...]  # whose gradients backward returns, in this order


class Gradient:
    """An operator's backward, for its torch op (`setup_context`) and for calls that nobody looks at (`function`).

    formula: None differentiates the reference. is_absent(output, arguments): whether that output is None.
    """

    def __init__(
        self, reference: Callable[..., Any], names: Sequence[str], is_absent: Callable[[int, Values], bool]
    ) -> None:
        self.reference, self.names, self.is_absent = reference, names, is_absent
        self.formula: Formula | None = None
        self.saved: Saved | None = None  # None: every input, no output

    def kept(self, values: Values, inputs: Sequence[str] | None = None) -> Kept:
        """inputs: whose gradients are returned; None: of all tensors."""
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        saved, outputs = self.saved or (tuple(tensors), ())
        return Kept(
            saved=tuple(n for n in saved if n in tensors),
            outputs=tuple(outputs),
            constants=tuple(n for n in values if n not in tensors),
            wanted=tuple(n for n in self.names if n in tensors and tensors[n].requires_grad),
            dtypes={n: v.dtype for n, v in tensors.items()},
            inputs=tuple(tensors if inputs is None else inputs),
        )

    def keep(self, ctx: Any, kept: Kept, values: Values, output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.set_materialize_grads(False)  # an unused output costs nothing
        ctx.save_for_backward(*[values[n] for n in kept.saved], *[outputs[i] for i in kept.outputs])
        ctx.kept, ctx.constants = kept, {n: values[n] for n in kept.constants}

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Values) -> None:
        values = dict(zip(self.names, inputs, strict=False)) | keyword_only_inputs
        self.keep(ctx, self.kept(values, self.names[: len(inputs)]), values, output)

    def function(self, name: str, run: Callable[[Any, Values], Any]) -> type[torch.autograd.Function]:
        """The node of autograd's graph: run(plan, arguments), called as `apply(plan, arguments, *their tensors)`.

        A plain function in place of the torch op, which would cost tens of microseconds more to pass through torch's
        dispatcher. Hooks on saved tensors, version counters and second derivatives are autograd's own here, too.
        """

        def forward(ctx: Any, plan: Any, values: Values, *tensors: Tensor) -> Any:
            out = run(plan, values)
            self.keep(ctx, plan.kept, values, out)
            ctx.constants["backend"] = plan.asked
            return out

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, None, *self.backward(ctx, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(name, (torch.autograd.Function,), methods)

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        kept, tensors = ctx.kept, ctx.saved_tensors
        args = Arguments(ctx.constants)
        args.update(zip(kept.saved, tensors, strict=False))
        args.wanted, args.dtypes = kept.wanted, kept.dtypes
        outputs = dict(zip(kept.outputs, tensors[len(kept.saved) :], strict=True))
        grads = tuple([None if self.is_absent(i, ctx.constants) else g for i, g in enumerate(grads)])
        given = [g for g in grads if g is not None]
        if not given:
            return (None,) * len(kept.inputs)
        if self.formula is not None:
            found = self.formula(grads, args, outputs)
        else:
            args.pop("backend")
            with no_autocast(given[0].device.type):
                found = _differentiate(self.reference, args, grads, kept.wanted)
        return tuple([found.get(n) for n in kept.inputs])


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
