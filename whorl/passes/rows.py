"""Which operators work row by row, and how each looks on a rank's rows alone.

A value of the region that may be sharded has `lead` leading token dims and feature dims after them; T, the product of
the token dims, is the number of rows. On a rank it is [ceil(T / p), *features]: the token dims are flattened, so a rule
must say which arguments have rows and keep its hands off the token dims. A rule returns a `Plan`, or the reason why the
node is not row-wise. `register_row_wise` adds an operator of your own.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from whorl import collectives

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, slots=True)
class Rows:
    """An argument's place where this rank's rows of `node` go, the first `lead` of its dims being tokens.

    tokens: what those dims are expanded to first, where broadcasting would have done it.
    """

    node: Node
    lead: int
    tokens: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """An argument's place where `node` goes without its `lead` leading dims of size 1."""

    node: Node
    lead: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a node on a rank's rows: its arguments with `Rows` and `Features` in place of tensors.

    lead: token dims of the outputs. is_gemm: rows that run together may change a row's last bits.
    """

    lead: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Callable[..., Any] | None = None
    is_gemm: bool = False


Held = Mapping[Node, int]  # nodes that may be held as rows, and how many token dims they have
Rule = Callable[[Node, Held, Any], Plan | str]
RULES: dict[Any, Rule] = {}


def value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def label(node: Node) -> str:
    """What a reader calls a node: the model's name of an input, else the graph's."""
    return str(node.meta.get("whorl_name", node.name))


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), Tensor)


def same(a: Any, b: Any) -> bool:
    return bool(statically_known_true(a == b))


def example(count: Any) -> int:
    """A count, or what a symbol was when captured; 0 where only data can say."""
    return int(count) if isinstance(count, int) else int(count.node.hint or 0)


def product(sizes: Sequence[Any]) -> Any:
    return math.prod(sizes)


def name_of(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def plan_for(node: Node, held: Held, tokens: Any) -> Plan | str:
    """The plan for a node that reads held values, or why there is none."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        lead = held[source]  # type: ignore[index]
        return Plan(lead, node.args) if _has_rows(node, lead, tokens) else "output without token dims"
    rule = _pointwise if is_pointwise(target) else RULES.get(target)
    if rule is None:
        return f"{name_of(target)} is not row-wise"
    return rule(node, held, tokens)


def is_pointwise(target: Any) -> bool:
    if target in RULES:
        return RULES[target] is _pointwise
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def _has_rows(node: Node, lead: int, tokens: Any) -> bool:
    found = value(node)
    return isinstance(found, Tensor) and found.dim() >= lead and same(product(found.shape[:lead]), tokens)


def _bind(node: Node) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    bound: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if i < len(node.args):
            bound[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def _unbind(node: Node, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Back to args and kwargs, without what is default."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    args = [bound[a.name] for a in arguments if not a.kwarg_only]
    defaults = [a.default_value if a.has_default_value() else ... for a in arguments if not a.kwarg_only]
    while args and defaults[len(args) - 1] is not ... and _is_default(args[-1], defaults[len(args) - 1]):
        args.pop()
    kwargs = {a.name: bound[a.name] for a in arguments if a.kwarg_only and a.name in node.kwargs}
    return tuple(args), kwargs


def _is_default(given: Any, default: Any) -> bool:
    return (
        not isinstance(given, Node | Rows | Features | list | tuple)
        and type(given) is type(default)
        and given == default
    )


def _leading(node: Node, held: Held) -> int | str:
    """The one number of token dims of all held arguments."""
    leads = {held[a] for a in node.all_input_nodes if a in held}
    return leads.pop() if len(leads) == 1 else "its arguments have different token dims"


# ---- element by element


def _pointwise(node: Node, held: Held, tokens: Any) -> Plan | str:
    lead, out = _leading(node, held), value(node)
    if isinstance(lead, str):
        return lead
    if not isinstance(out, Tensor) or not _has_rows(node, lead, tokens):
        return "its output has other rows"
    shape = out.shape
    if any(value(a).dim() != out.dim() for a in node.all_input_nodes if a in held):
        return "broadcasting puts dims before the tokens"

    def place(argument: Any) -> Any:
        if not is_tensor(argument):
            return argument
        if argument in held:
            return Rows(argument, lead)
        own = value(argument).shape
        reach = len(own) - (len(shape) - lead)  # how many of its dims stand beside token dims
        if reach <= 0:
            return argument
        if all(same(size, 1) for size in own[:reach]):
            return Features(argument, reach)
        if reach == lead and all(same(a, b) for a, b in zip(own, shape[:lead], strict=False)):
            return Rows(argument, lead)
        return Rows(argument, reach, tuple(shape[:lead]))

    return Plan(lead, torch.fx.node.map_aggregate(node.args, place), torch.fx.node.map_aggregate(node.kwargs, place))


for _target in (
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
):
    RULES[_target] = _pointwise


# ---- over feature dims


def _over_features(rows: Sequence[str], dims: Sequence[str], *, of_output: bool = False) -> Rule:
    """Operators with dim arguments: every dim must be a feature's; `rows` are the tensor arguments with tokens."""

    def rule(node: Node, held: Held, tokens: Any) -> Plan | str:
        lead, bound = _leading(node, held), _bind(node)
        if isinstance(lead, str):
            return lead
        given = bound[rows[0]]
        first = given[0] if isinstance(given, list | tuple) else given
        total = value(first).dim() + (1 if of_output else 0)
        for name in dims:
            found = _negative(bound[name], total, lead)
            if found is None:
                return f"{name_of(node.target)} works on dim {bound[name]}, which is a token dim"
            bound[name] = found
        for name in rows:
            placed = _place_rows(bound[name], value(first).shape[:lead], lead, held)
            if isinstance(placed, str):
                return placed
            bound[name] = placed
        return Plan(lead, *_unbind(node, bound))

    return rule


def _negative(dims: Any, total: int, lead: int) -> Any:
    """Dims counted from the end, where flattening tokens does not move them; None if one is a token dim, or for all."""
    if isinstance(dims, int):
        found = dims if dims < 0 else dims - total
        return found if found + total >= lead else None
    if not dims:
        return None
    each = [_negative(d, total, lead) for d in dims]
    return None if None in each else each


def _place_rows(argument: Any, token_dims: Sequence[Any], lead: int, held: Held) -> Any:
    if isinstance(argument, list | tuple):
        placed = [_place_rows(a, token_dims, lead, held) for a in argument]
        return next((p for p in placed if isinstance(p, str)), placed)
    if not is_tensor(argument) or argument in held:
        return Rows(argument, lead) if is_tensor(argument) else argument
    own = value(argument).shape
    if len(own) < lead or not all(same(a, b) for a, b in zip(own, token_dims, strict=False)):
        return f"its argument {label(argument)} has other token dims"
    return Rows(argument, lead)


def _features(targets: Sequence[Any], *dims: str, rows: Sequence[str] = ("self",), of_output: bool = False) -> None:
    for target in targets:
        RULES[target] = _over_features(rows, dims, of_output=of_output)


_features(
    (
        *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction),
        *(aten.var_mean.correction, aten.std.correction, aten.any.dim, aten.all.dim, aten.argmax.default),
        *(aten.argmin.default, aten.prod.dim_int, aten.max.dim, aten.min.dim, aten.logsumexp.default),
        *(aten.linalg_vector_norm.default, aten._softmax.default, aten._log_softmax.default, aten.softmax.int),
        *(aten.log_softmax.int, aten.cumsum.default, aten.cumprod.default, aten.topk.default, aten.sort.default),
        *(aten.sort.stable, aten.glu.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor),
        *(aten.split_with_sizes.default, aten.unbind.int, aten.squeeze.dim, aten.argsort.default),
    ),
    "dim",
)
_features((aten.flip.default,), "dims")
_features((aten.unsqueeze.default,), "dim", of_output=True)
_features((aten.transpose.int,), "dim0", "dim1")
_features((aten.gather.default,), "dim", rows=("self", "index"))
_features((aten.scatter.src,), "dim", rows=("self", "index", "src"))
_features((aten.scatter.value,), "dim", rows=("self", "index"))
_features((aten.cat.default,), "dim", rows=("tensors",))
_features((aten.stack.default,), "dim", rows=("tensors",), of_output=True)


def _permute(node: Node, held: Held, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    dims: Any = node.args[1]
    lead, total = held[source], len(dims)
    order = [d % total for d in dims]
    if order[:lead] != list(range(lead)):
        return "it moves the token dims"
    return Plan(lead, (Rows(source, lead), [0, *(d - lead + 1 for d in order[lead:])]))


RULES[aten.permute.default] = _permute


def _reshape(node: Node, held: Held, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    shape = value(node).shape
    fitting = [i for i in range(1, len(shape) + 1) if same(product(shape[:i]), tokens)]
    if not fitting:
        return "it mixes tokens and features"
    lead = held[source] if held[source] in fitting else fitting[0]
    if not all(isinstance(size, int) and size for size in shape[lead:]):
        return "its feature dims are not known numbers"
    return Plan(lead, (Rows(source, held[source]), [-1, *shape[lead:]]), target=aten.reshape.default)


for _target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.default):
    RULES[_target] = _reshape
RULES[aten.squeeze.dims] = _reshape
RULES[aten.flatten.using_ints] = _reshape


def _expand(node: Node, held: Held, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    lead, shape = held[source], value(node).shape
    if len(shape) != value(source).dim() or not _has_rows(node, lead, tokens):
        return "it expands the token dims"
    if not all(isinstance(size, int) for size in shape[lead:]):
        return "its feature dims are not known numbers"
    return Plan(lead, (Rows(source, lead), [-1, *shape[lead:]]), target=aten.expand.default)


RULES[aten.expand.default] = _expand


def _pad(node: Node, held: Held, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    widths: Any = node.args[1]
    if len(widths) // 2 > value(source).dim() - held[source]:
        return "it pads the tokens"
    return Plan(held[source], (Rows(source, held[source]), *node.args[1:]))


RULES[aten.constant_pad_nd.default] = _pad


# ---- named arguments


def _named(rows: Sequence[str], *, single: bool = False, is_gemm: bool = False) -> Rule:
    """Operators whose arguments `rows`, where given, have leading token dims; no other argument may be held."""

    def rule(node: Node, held: Held, tokens: Any) -> Plan | str:
        lead, bound = _leading(node, held), _bind(node)
        if isinstance(lead, str):
            return lead
        if single and lead != 1:
            return f"{name_of(node.target)} takes one token dim"
        given = [n for n in rows if isinstance(bound[n], Node)]
        for name, argument in bound.items():
            if name not in rows and isinstance(argument, Node) and argument in held:
                return f"its argument {name} is read whole by every row"
        first = next(bound[n] for n in given if bound[n] in held)
        for name in given:
            placed = _place_rows(bound[name], value(first).shape[:lead], lead, held)
            if isinstance(placed, str):
                return placed
            bound[name] = placed
        args, kwargs = _unbind(node, bound)
        return Plan(lead, args, kwargs, is_gemm=is_gemm)

    return rule


def register_row_wise(op: Any, rows: Sequence[str], *, single: bool = False, is_gemm: bool = False) -> None:
    """Say that an operator works row by row: `rows` are its arguments with leading token dims, and so are its outputs.

    Every other argument is read whole by every row. single: it takes one token dim only. is_gemm: a row's last bits
    may depend on how many rows run together.
    """
    op = getattr(op, "node", op)
    overload = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    known = [a.name for a in overload._schema.arguments]
    wrong = [name for name in rows if name not in known]
    if wrong or not rows:
        raise ValueError(f"register_row_wise: {overload} has the arguments {known}, asked for {list(rows)}")
    RULES[overload] = _named(rows, single=single, is_gemm=is_gemm)


def is_registered(target: Any) -> bool:
    return target in RULES


def _addmm(node: Node, held: Held, tokens: Any) -> Plan | str:
    bias: Any = node.args[0]
    has_rows = bias in held or value(bias).dim() == 2
    return _named(("self", "mat1") if has_rows else ("mat1",), single=True, is_gemm=True)(node, held, tokens)


RULES[aten.addmm.default] = _addmm
for _target in (aten.mm.default, aten._int_mm.default):
    register_row_wise(_target, ("self",), single=True, is_gemm=True)
register_row_wise(aten.linear.default, ("input",), is_gemm=True)
register_row_wise(aten.embedding.default, ("indices",))


def _normalised(node: Node, held: Held, tokens: Any) -> Plan | str:
    if len(node.args[1]) > value(node.args[0]).dim() - _first(held, node):  # type: ignore[arg-type]
        return "it normalises over tokens"
    return _named(("input",))(node, held, tokens)


def _first(held: Held, node: Node) -> int:
    return next(held[a] for a in node.all_input_nodes if a in held)


for _target in (aten.native_layer_norm.default, aten.layer_norm.default, aten._fused_rms_norm.default):
    RULES[_target] = _normalised
RULES[aten.rms_norm.default] = _normalised


def _register_ours() -> None:
    from whorl import ops
    from whorl.ops.quant import dequantize, dynamic_quant

    for op, rows in (
        (ops.rms_norm, ("x",)),
        (ops.add_rms_norm, ("x", "residual")),
        (ops.swiglu, ("x",)),
        (ops.geglu, ("x",)),
        (dynamic_quant, ("x",)),
        (dequantize, ("q", "scale")),
    ):
        register_row_wise(op, rows)
    register_row_wise(ops.rope, ("q", "k", "positions"))
    register_row_wise(ops.linear, ("x",), single=True)
    register_row_wise(ops.route, ("logits",), single=True)
    register_row_wise(ops.experts, ("x", "weights", "ids"), single=True)


_register_ours()

# Operators that hand out the rows of a full tensor that belong to this rank.
CHUNKS: set[Any] = {collectives.local_rows._opoverload}
