"""An operator's gradient: what its node keeps for backward, and how backward is computed from it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._tracing import no_autocast

Values = dict[str, Any]  # an operator's arguments by name
Formula = Callable[..., Mapping[str, Tensor | None]]
Saved = tuple[tuple[str, ...], tuple[int, ...]]  # arguments by name and outputs by index


class Gradient:
    """What torch.library asks of an operator with a backward.

    formula: None differentiates the reference. is_absent(output, arguments): whether that output is None.
    """

    def __init__(
        self, reference: Callable[..., Any], names: Sequence[str], is_absent: Callable[[int, Values], bool]
    ) -> None:
        self.reference, self.names, self.is_absent = reference, names, is_absent
        self.formula: Formula | None = None
        self.saved: Saved | None = None  # None: every input, no output
        self.dtypes: tuple[str, ...] = ()  # of arguments by name

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Values) -> None:
        names = self.names
        values = dict(zip(names, inputs, strict=False)) | keyword_only_inputs
        outputs = output if isinstance(output, tuple) else (output,)
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        saved, saved_outputs = self.saved or (tuple(tensors), ())
        kept = [n for n in saved if n in tensors]
        ctx.set_materialize_grads(False)  # an unused output costs nothing
        ctx.save_for_backward(*(tensors[n] for n in kept), *(outputs[i] for i in saved_outputs))
        ctx.saved_names, ctx.saved_outputs = kept, saved_outputs
        ctx.constants = {n: v for n, v in values.items() if n not in tensors}
        ctx.constants |= {f"{n}_dtype": tensors[n].dtype for n in self.dtypes}
        ctx.wanted = [n for n in names if n in tensors and tensors[n].requires_grad]
        ctx.input_names = names[: len(inputs)]

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        args = dict(ctx.constants) | dict(zip(ctx.saved_names, tensors, strict=False))
        outputs = dict(zip(ctx.saved_outputs, tensors[len(ctx.saved_names) :], strict=True))
        grads = tuple(None if self.is_absent(i, ctx.constants) else g for i, g in enumerate(grads))
        given = [g for g in grads if g is not None]
        if not given:
            return (None,) * len(ctx.input_names)
        if self.formula is not None:
            found = self.formula(grads, args, outputs)
        else:
            args.pop("backend")
            with no_autocast(given[0].device.type):
                found = _differentiate(self.reference, args, grads, ctx.wanted)
        return tuple(found.get(n) for n in ctx.input_names)


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
