"""Rules that say which operators work row by row, and how each of them runs on a rank's rows alone.

A shardable value has `lead` leading token dims and feature dims after them. A row is the features of one token; T, the
product of the token dims, is the number of rows. On a rank the value is [ceil(T / p), *features]: the token dims are
flattened, so a rule says which arguments have rows and must not touch the token dims. A rule returns a `Plan`, or the
reason why the node is not row-wise. `register_row_wise` adds a rule for an operator of your own.
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
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


@dataclass(frozen=True, slots=True)
class Rows:
    """Stands in a plan's arguments for this rank's rows of `node`, whose first `lead` dims are token dims.

    tokens: the sizes to which these dims are expanded first, where broadcasting would have done it.
    """

    node: Node
    lead: int
    tokens: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """Stands in a plan's arguments for `node` without its `lead` leading dims of size 1."""

    node: Node
    lead: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run a node on a rank's rows: its arguments, with `Rows` and `Features` in place of tensors.

    lead: token dims of the outputs. target: the operator, if not the node's. is_gemm: a row's last bits may depend on
    the rows that run with it.
    """

    lead: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Callable[..., Any] | None = None
    is_gemm: bool = False


Shardable = Mapping[Node, int]  # values that may be sharded by rows, with their number of token dims
Rule = Callable[[Node, Shardable, Any], Plan | str]
RULES: dict[Any, Rule] = {}


def value(node: Any) -> Any:
    """Return the fake value of a node, or None for anything else."""
    return node.meta.get("val") if isinstance(node, Node) else None


def label(node: Node) -> str:
    """Return the name to print for a node: the model's name of an input, otherwise the graph's."""
    return str(node.meta.get("whorl_name", node.name))


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), Tensor)


def same(a: Any, b: Any) -> bool:
    """Return whether two sizes are known to be equal, without adding a guard."""
    return bool(statically_known_true(a == b))


def has_shape_of(node: Node, other: Node) -> bool:
    """Return whether two nodes are known to have the same shape."""
    a, b = value(node), value(other)
    return len(a.shape) == len(b.shape) and all(same(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def example(count: Any) -> int:
    """Return a count as a number; of a symbol its hint, the value at capture, or 0 if it depends on data."""
    return int(count) if isinstance(count, int) else int(count.node.hint or 0)


def product(sizes: Sequence[Any]) -> Any:
    return math.prod(sizes)


def name_of(target: Any) -> str:
    """Return the name of an operator, for messages."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def plan_for(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    """Return the plan for a node that reads shardable values, or the reason why there is none."""
    target = node.target
    if target is operator.getitem:
        source = node.args[0]
        lead = shardable[source]  # type: ignore[index]
        return Plan(lead, node.args) if _has_rows(node, lead, tokens) else "its output has no token dims"
    rule = _pointwise if is_pointwise(target) else RULES.get(target)
    if rule is None:
        return f"{name_of(target)} is not row-wise"
    return rule(node, shardable, tokens)


def is_pointwise(target: Any) -> bool:
    """Return whether an operator works element by element and is not random."""
    if target in RULES:
        return RULES[target] is _pointwise
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def _has_rows(node: Node, lead: int, tokens: Any) -> bool:
    fake = value(node)
    return isinstance(fake, Tensor) and fake.dim() >= lead and same(product(fake.shape[:lead]), tokens)


def _bind(node: Node) -> dict[str, Any]:
    """Return the node's arguments by name, with defaults filled in."""
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
    """Return arguments by name as args and kwargs, without trailing defaults."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    args = [bound[a.name] for a in arguments if not a.kwarg_only]
    defaults = [a.default_value if a.has_default_value() else ... for a in arguments if not a.kwarg_only]
    while args and defaults[len(args) - 1] is not ... and _is_default(args[-1], defaults[len(args) - 1]):
        args.pop()
    kwargs = {a.name: bound[a.name] for a in arguments if a.kwarg_only and a.name in node.kwargs}
    return tuple(args), kwargs


def _is_default(argument: Any, default: Any) -> bool:
    return (
        not isinstance(argument, Node | Rows | Features | list | tuple)
        and type(argument) is type(default)
        and argument == default
    )


def _leading(node: Node, shardable: Shardable) -> int | str:
    """Return the number of token dims that all shardable arguments have, or a reason if they differ."""
    leads = {shardable[a] for a in node.all_input_nodes if a in shardable}
    return leads.pop() if len(leads) == 1 else "its arguments have different token dims"


# ---- element by element


def _pointwise(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    lead, out = _leading(node, shardable), value(node)
    if isinstance(lead, str):
        return lead
    if not isinstance(out, Tensor) or not _has_rows(node, lead, tokens):
        return "its output has another number of rows"
    shape = out.shape
    if any(value(a).dim() != out.dim() for a in node.all_input_nodes if a in shardable):
        return "broadcasting puts dims before the tokens"

    def place(argument: Any) -> Any:
        if not is_tensor(argument):
            return argument
        if argument in shardable:
            return Rows(argument, lead)
        sizes = value(argument).shape
        beside_tokens = len(sizes) - (len(shape) - lead)  # how many of its dims broadcast against token dims
        if beside_tokens <= 0:
            return argument
        if all(same(size, 1) for size in sizes[:beside_tokens]):
            return Features(argument, beside_tokens)
        if beside_tokens == lead and all(same(a, b) for a, b in zip(sizes, shape[:lead], strict=False)):
            return Rows(argument, lead)
        return Rows(argument, beside_tokens, tuple(shape[:lead]))

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
    """Return the rule of operators with dim arguments `dims`, which must all be feature dims.

    rows: the tensor arguments with token dims. of_output: dims count those of the output, which has one more.
    """

    def rule(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
        lead, bound = _leading(node, shardable), _bind(node)
        if isinstance(lead, str):
            return lead
        argument = bound[rows[0]]
        first = argument[0] if isinstance(argument, list | tuple) else argument
        total = value(first).dim() + (1 if of_output else 0)
        for name in dims:
            counted = _negative(bound[name], total, lead)
            if counted is None:
                return f"{name_of(node.target)} works on dim {bound[name]}, which is a token dim"
            bound[name] = counted
        for name in rows:
            placed = _place_rows(bound[name], value(first).shape[:lead], lead, shardable)
            if isinstance(placed, str):
                return placed
            bound[name] = placed
        return Plan(lead, *_unbind(node, bound))

    return rule


def _negative(dims: Any, total: int, lead: int) -> Any:
    """Return dims counted from the end, where flattening the token dims does not move them.

    None if one is a token dim, or if no dims are given, which means all of them.
    """
    if isinstance(dims, int):
        counted = dims if dims < 0 else dims - total
        return counted if counted + total >= lead else None
    if not dims:
        return None
    counted_dims = [_negative(d, total, lead) for d in dims]
    return None if None in counted_dims else counted_dims


def _place_rows(argument: Any, token_dims: Sequence[Any], lead: int, shardable: Shardable) -> Any:
    """Return `Rows` for a tensor with these token dims, or a list of them; a string, the reason, if it has others."""
    if isinstance(argument, list | tuple):
        placed = [_place_rows(a, token_dims, lead, shardable) for a in argument]
        return next((p for p in placed if isinstance(p, str)), placed)
    if not is_tensor(argument) or argument in shardable:
        return Rows(argument, lead) if is_tensor(argument) else argument
    sizes = value(argument).shape
    if len(sizes) < lead or not all(same(a, b) for a, b in zip(sizes, token_dims, strict=False)):
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


def _permute(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    dims: Any = node.args[1]
    lead, total = shardable[source], len(dims)
    order = [d % total for d in dims]
    if order[:lead] != list(range(lead)):
        return "it moves the token dims"
    return Plan(lead, (Rows(source, lead), [0, *(d - lead + 1 for d in order[lead:])]))


RULES[aten.permute.default] = _permute


def _reshape(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    shape = value(node).shape
    possible_leads = [i for i in range(1, len(shape) + 1) if same(product(shape[:i]), tokens)]
    if not possible_leads:
        return "it mixes tokens and features"
    lead = shardable[source] if shardable[source] in possible_leads else possible_leads[0]
    if not all(isinstance(size, int) and size for size in shape[lead:]):
        return "the sizes of its feature dims are not constants"
    return Plan(lead, (Rows(source, shardable[source]), [-1, *shape[lead:]]), target=aten.reshape.default)


for _target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.squeeze.default):
    RULES[_target] = _reshape
RULES[aten.squeeze.dims] = _reshape
RULES[aten.flatten.using_ints] = _reshape


def _expand(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    lead, shape = shardable[source], value(node).shape
    if len(shape) != value(source).dim() or not _has_rows(node, lead, tokens):
        return "it expands the token dims"
    if not all(isinstance(size, int) for size in shape[lead:]):
        return "the sizes of its feature dims are not constants"
    return Plan(lead, (Rows(source, lead), [-1, *shape[lead:]]), target=aten.expand.default)


RULES[aten.expand.default] = _expand


def _pad(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    source: Any = node.args[0]
    widths: Any = node.args[1]
    if len(widths) // 2 > value(source).dim() - shardable[source]:
        return "it pads the tokens"
    return Plan(shardable[source], (Rows(source, shardable[source]), *node.args[1:]))


RULES[aten.constant_pad_nd.default] = _pad


# ---- over arguments by name


def _named(rows: Sequence[str], *, single: bool = False, is_gemm: bool = False) -> Rule:
    """Return the rule of operators whose arguments `rows`, where present, have leading token dims.

    No other argument may be shardable. single: the operator takes one token dim only.
    """

    def rule(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
        lead, bound = _leading(node, shardable), _bind(node)
        if isinstance(lead, str):
            return lead
        if single and lead != 1:
            return f"{name_of(node.target)} takes one token dim"
        present = [n for n in rows if isinstance(bound[n], Node)]
        for name, argument in bound.items():
            if name not in rows and isinstance(argument, Node) and argument in shardable:
                return f"its argument {name} is read in full by every row"
        first = next(bound[n] for n in present if bound[n] in shardable)
        for name in present:
            placed = _place_rows(bound[name], value(first).shape[:lead], lead, shardable)
            if isinstance(placed, str):
                return placed
            bound[name] = placed
        args, kwargs = _unbind(node, bound)
        return Plan(lead, args, kwargs, is_gemm=is_gemm)

    return rule


def register_row_wise(op: Any, rows: Sequence[str], *, single: bool = False, is_gemm: bool = False) -> None:
    """Declare that an operator works row by row.

    op: an operator of torch or whorl, or one of its overloads. rows: the names of its arguments with leading token
    dims; all its outputs have them as well, and every other argument is read in full by every row. single: it takes one
    token dim only. is_gemm: a row's last bits may depend on how many rows run together.
    Raises ValueError when `rows` is empty or names an argument that the operator does not have.
    Example: register_row_wise(torch.ops.mylib.gelu_tanh, ("x",))
    """
    op = getattr(op, "node", op)
    overload = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    names = [a.name for a in overload._schema.arguments]
    unknown = [name for name in rows if name not in names]
    if unknown or not rows:
        raise ValueError(f"register_row_wise: {overload} has the arguments {names}, got rows {list(rows)}")
    RULES[overload] = _named(rows, single=single, is_gemm=is_gemm)


def is_registered(target: Any) -> bool:
    """Return whether an operator has a rule."""
    return target in RULES


def _addmm(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    bias: Any = node.args[0]
    has_rows = bias in shardable or value(bias).dim() == 2
    return _named(("self", "mat1") if has_rows else ("mat1",), single=True, is_gemm=True)(node, shardable, tokens)


RULES[aten.addmm.default] = _addmm
for _target in (aten.mm.default, aten._int_mm.default):
    register_row_wise(_target, ("self",), single=True, is_gemm=True)
register_row_wise(aten.linear.default, ("input",), is_gemm=True)
register_row_wise(aten.embedding.default, ("indices",))


def _normalised(node: Node, shardable: Shardable, tokens: Any) -> Plan | str:
    if len(node.args[1]) > value(node.args[0]).dim() - _token_dims(shardable, node):  # type: ignore[arg-type]
        return "it normalises over tokens"
    return _named(("input",))(node, shardable, tokens)


def _token_dims(shardable: Shardable, node: Node) -> int:
    """Return the number of token dims of the node's first shardable argument."""
    return next(shardable[a] for a in node.all_input_nodes if a in shardable)


for _target in (aten.native_layer_norm.default, aten.layer_norm.default, aten._fused_rms_norm.default):
    RULES[_target] = _normalised
RULES[aten.rms_norm.default] = _normalised


def _register_whorl_operators() -> None:
    from whorl import ops
    from whorl.ops.quant import dequantize, dynamic_quant

    for op, rows in (
        (ops.rms_norm, ("x",)),
        (ops.add_rms_norm, ("x", "residual")),
        (ops.glu, ("x",)),
        (dynamic_quant, ("x",)),
        (dequantize, ("q", "scale")),
    ):
        register_row_wise(op, rows)
    register_row_wise(ops.rope, ("q", "k", "positions"))
    register_row_wise(ops.linear, ("x",), single=True)
    register_row_wise(ops.route, ("logits",), single=True)
    register_row_wise(ops.experts, ("x", "weights", "ids"), single=True)


_register_whorl_operators()

# Operators that return this rank's rows of a full tensor.
LOCAL_ROWS: set[Any] = {collectives.local_rows._opoverload}
