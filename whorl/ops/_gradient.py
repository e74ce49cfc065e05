"""An operator's gradient: which tensors its autograd node saves, and how backward is computed from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._tracing import no_autocast

Values = dict[str, Any]  # an operator's arguments by name
Formula = Callable[..., Mapping[str, Tensor | None]]  # a backward, as `Op.gradient` registers it
Saved = tuple[tuple[str, ...], tuple[int, ...]]  # arguments by name and outputs by index


class Arguments(dict[str, Any]):
    """The arguments that a backward formula sees, by name: the saved tensors, and every argument that is no tensor."""

    __slots__ = ("dtypes", "needs_grad")
    needs_grad: Sequence[str]  # arguments whose gradients autograd needs
    dtypes: Mapping[str, torch.dtype]  # of all tensors, saved or not


@dataclass(frozen=True, slots=True)
class SavedState:
    """What calls of one kind save for backward: names of arguments and indices of outputs, not the tensors."""

    saved: tuple[str, ...]  # tensor arguments that are saved
    outputs: tuple[int, ...]  # indices of the outputs that are saved
    constants: tuple[str, ...]  # arguments that are not tensors
    needs_grad: tuple[str, ...]  # arguments whose gradients autograd needs
    dtypes: Mapping[str, torch.dtype]  # of all tensors, saved or not
    inputs: tuple[str, ...]  # arguments whose gradients backward returns, in this order
    absent: tuple[int, ...]  # indices of the outputs that are None


class Gradient:
    """An operator's backward, for its torch op (`setup_context`) and for direct calls that bypass it (`function`).

    formula: the registered backward; where it is None, the reference is differentiated. absent_outputs: indices of the
    outputs that may be None; is_absent(index, arguments) returns whether one is.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        names: Sequence[str],
        absent_outputs: Sequence[int],
        is_absent: Callable[[int, Values], bool],
    ) -> None:
        self.reference, self.names, self.absent_outputs, self.is_absent = reference, names, absent_outputs, is_absent
        self.formula: Formula | None = None
        self.saved: Saved | None = None  # None: save every tensor argument and no output

    def saved_state(self, values: Values, inputs: Sequence[str] | None = None) -> SavedState:
        """Return what a call saves. inputs: arguments whose gradients backward returns; None means all tensors."""
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        saved, outputs = self.saved or (tuple(tensors), ())
        return SavedState(
            saved=tuple(n for n in saved if n in tensors),
            outputs=tuple(outputs),
            constants=tuple(n for n in values if n not in tensors),
            needs_grad=tuple(n for n in self.names if n in tensors and tensors[n].requires_grad),
            dtypes={n: v.dtype for n, v in tensors.items()},
            inputs=tuple(tensors if inputs is None else inputs),
            absent=tuple(i for i in self.absent_outputs if self.is_absent(i, values)),
        )

    def save(self, ctx: Any, state: SavedState, values: Values, output: Any) -> None:
        """Store on the autograd context what backward needs."""
        saved = [values[n] for n in state.saved]
        if state.outputs:
            outputs = output if isinstance(output, tuple) else (output,)
            saved += [outputs[i] for i in state.outputs]
        ctx.set_materialize_grads(False)  # no zeros are allocated for an unused output
        ctx.save_for_backward(*saved)
        ctx.state, ctx.constants = state, {n: values[n] for n in state.constants}

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Values) -> None:
        """Store what backward needs; registered as the `setup_context` of the torch op's autograd formula."""
        values = dict(zip(self.names, inputs, strict=False)) | keyword_only_inputs
        self.save(ctx, self.saved_state(values, self.names[: len(inputs)]), values, output)

    def function(self, name: str, run: Callable[[Any, Values], Any]) -> Callable[..., Any]:
        """Return `apply` of an autograd Function called `name`, whose forward calls run(plan, arguments).

        Apply it to the plan, the arguments by name, and the tensors among them, which autograd must see separately. It
        replaces the torch op in direct calls, because torch's dispatcher would cost tens of microseconds more.
        Saved-tensor hooks, version counters and second derivatives work as in any autograd Function.
        """

        def forward(ctx: Any, plan: Any, values: Values, *tensors: Tensor) -> Any:
            out = run(plan, values)
            self.save(ctx, plan.state, values, out)
            ctx.constants["backend"] = plan.requested
            return out

        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return None, None, *self.backward(ctx, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function = type(name, (torch.autograd.Function,), methods)
        # What `function.apply` itself calls once it knows that no transform is active, as `is_watched` knows already.
        apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        return apply

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of `state.inputs`, in that order; None where there is none."""
        state: SavedState = ctx.state
        if state.absent:
            grads = tuple(None if i in state.absent else g for i, g in enumerate(grads))
        present = [g for g in grads if g is not None]
        if not present:
            return (None,) * len(state.inputs)
        args, tensors = Arguments(ctx.constants), ctx.saved_tensors
        args.update(zip(state.saved, tensors, strict=False))
        args.needs_grad, args.dtypes = state.needs_grad, state.dtypes
        if self.formula is None:
            args.pop("backend")
            with no_autocast(present[0].device.type):
                input_grads = _differentiate(self.reference, args, grads, state.needs_grad)
        else:
            outputs = dict(zip(state.outputs, tensors[len(state.saved) :], strict=True)) if state.outputs else {}
            input_grads = self.formula(grads, args, outputs)
        return tuple([input_grads.get(n) for n in state.inputs])


def _differentiate(
    function: Callable[..., Any], args: Values, grads: tuple[Tensor | None, ...], needs_grad: Sequence[str]
) -> Mapping[str, Tensor | None]:
    """Differentiate a reference with torch's autograd, for operators without a registered backward."""
    with torch.enable_grad():
        args = {n: a.detach().requires_grad_(n in needs_grad) if isinstance(a, Tensor) else a for n, a in args.items()}
        out = function(**args)
        outs = out if isinstance(out, tuple) else (out,)
        pairs = [
            (o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o is not None and o.requires_grad
        ]
        input_grads = torch.autograd.grad(
            [o for o, _ in pairs], [args[n] for n in needs_grad], [g for _, g in pairs], allow_unused=True
        )
    return dict(zip(needs_grad, input_grads, strict=True))
