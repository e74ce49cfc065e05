"""Copy a captured graph into a new shape environment."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .editor import copy_graph
from .rows import value


def retrace(gm: GraphModule, size: int) -> tuple[GraphModule, Any]:
    """Return a copy of the graph with new size symbols, and its fake tensor mode.

    Guards on sizes that its compilation adds then belong to the copy, not to the capture. size: the number of ranks.
    Symbols get a hint so large that a rank's share of it is not 0 or 1, which torch would treat as constants.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gm = copy_graph(gm)
    for node in gm.graph.nodes:
        node.meta.pop("unbacked_bindings", None)  # sizes that depend on data get new symbols as well
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    symbols: dict[Any, Any] = {}
    inputs = [_with_new_symbols(value(n), env, mode, symbols, size) for n in placeholders]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return gm, mode


def _with_new_symbols(old: Any, env: Any, mode: Any, symbols: dict[Any, Any], size: int) -> Any:
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
        old_env = old.node.shape_env
        examples = (
            getattr(old_env, "backed_var_to_val", None) or old_env.var_to_val
        )  # the name in earlier versions of torch
        hint = int(examples[symbol])
        hint = hint if hint >= 4 * size else 8 * size
        source = ConstantSource(f"whorl_{symbol}")
        new = env.create_symbol(hint, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True)
        symbols[symbol] = env.create_symintnode(new, hint=hint, source=source)
    return int(expr) if expr.is_number else sympy_interp(PythonReferenceAnalysis, symbols, expr)
