"""The API page: signatures and docstrings of every public name, read from the code."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whorl.ops import Op

ROOT = Path(__file__).parents[2]
_HEAD = """# API

Written by `make docs` from the docstrings; do not edit it here. Operators with their maths are in
[operators.md](operators.md), command lines in `whorl --help`, settings in [settings.md](settings.md).
"""
# Module, the names to list (None: its __all__), and what a reader finds there.
_MODULES: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    ("whorl", ("LLM", "SamplingParams"), "Generate text in Python: [engine.md](engine.md)."),
    ("whorl.engine.settings", ("EngineSettings",), "What `LLM` takes as keywords: [settings.md](settings.md)."),
    ("whorl.engine", ("load_model",), "A model without an engine."),
    ("whorl.ops", None, "Operators, each on three backends: [operators.md](operators.md)."),
    ("whorl.rope_table", ("get_rope", "RopeTable"), "Tables of cosines and sines: [rope.md](rope.md)."),
    ("whorl.positions", None, "Position ids of text and images: [rope.md](rope.md#positions-of-text-and-vision)."),
    ("whorl.ascend", None, "torch_npu's operators on any device: [ascend.md](ascend.md)."),
    ("whorl.doctor", None, "Check a configuration or a live model: [doctor.md](doctor.md)."),
    ("whorl.passes", None, "Sequence parallelism as graph passes: [passes.md](passes.md)."),
    ("whorl.media", None, "Pictures and videos for `LLM.generate`: [vision.md](vision.md)."),
    ("whorl.adapters.transformers", ("install",), "Our operators inside transformers: [adapters.md](adapters.md)."),
    ("whorl.adapters.megatron", ("install",), "Our operators inside Megatron: [adapters.md](adapters.md)."),
)


def page() -> str:
    parts = [_HEAD, "| module | what it has |\n|---|---|"]
    parts[-1] += "".join(f"\n| [`{name}`](#{_anchor(name)}) | {about} |" for name, _, about in _MODULES)
    for name, listed, _ in _MODULES:
        parts.append(f"\n## {name}\n")
        parts += [_entry(name, public) for public in _names(name, listed)]
    return "\n".join(parts).rstrip() + "\n"


def _names(module: str, listed: tuple[str, ...] | None) -> list[str]:
    if listed is not None:
        return list(listed)
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    return sorted(names, key=str.lower)


def _entry(module: str, name: str) -> str:
    public = getattr(importlib.import_module(module), name)
    source = getattr(public, "reference", public)  # an operator is documented by its reference
    if not (inspect.isfunction(source) or inspect.isclass(source)):
        return f"### `{name}`\n\n{_about(public)}\n"
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(source)))).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    link, text = _link(source), _text(tree)
    signature = _operator_signature(public) if isinstance(public, Op) else _signature(tree)
    gap = "\n\n" if text.rpartition("\n")[2].startswith("    ") else " "  # no link inside an example
    lines = [f"### `{name}`", "", f"```python\n{signature}\n```", "", f"{text}{gap}([source]({link}))"]
    if isinstance(tree, ast.ClassDef):
        lines += ["", *_methods(tree)]
    return "\n".join(lines).rstrip() + "\n"


def _about(value: Any) -> str:
    return f"A {type(value).__name__} of the module." if not isinstance(value, type) else inspect.getdoc(value) or ""


def _link(source: Any) -> str:
    path = Path(inspect.getsourcefile(inspect.unwrap(source)) or "").resolve()
    return f"../{path.relative_to(ROOT)}"


def _signature(tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    if isinstance(tree, ast.ClassDef):
        init = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if init is None:
            return "\n".join([f"class {tree.name}:", *(f"    {line}" for line in _fields(tree))])
        return _wrapped(tree.name, _arguments(init)[1:], "")
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns is not None else ""
    arguments = _arguments(tree)
    return _wrapped(tree.name, arguments[1:] if arguments[:1] == ["self"] else arguments, returns)


def _operator_signature(op: Op) -> str:
    """The signature of an operator with what it states of tensors and numbers as comments."""
    arguments, statements = [], op.spec.statements
    for parameter in op.spec.signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*," not in arguments:
            arguments.append("*,")
        argument = parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD)
        comment = f"  # {statements[parameter.name]}" if parameter.name in statements else ""
        arguments.append(f"{argument},{comment}")
    returns = inspect.formatannotation(op.spec.signature.return_annotation)
    comment = f"  # {statements['returns']}" if "returns" in statements else ""
    text = "\n".join([f"{op.name}(", *(f"    {argument}" for argument in arguments), f") -> {returns}{comment}"])
    return text.replace("torch.Tensor", "Tensor").replace("typing.", "")


def _fields(tree: ast.ClassDef) -> Iterator[str]:
    fields = [
        node for node in tree.body if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_")
    ]
    for node in fields:
        value = "" if node.value is None or len(ast.unparse(node.value)) > 40 else f" = {ast.unparse(node.value)}"
        yield f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}{value}"
    if not fields:
        yield "..."


def _arguments(tree: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Each argument as it is written, the markers / and * among them."""
    spec = tree.args
    positional = [*spec.posonlyargs, *spec.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
    out = [_argument(arg, value) for arg, value in zip(positional, missing + list(spec.defaults), strict=True)]
    if spec.posonlyargs:
        out.insert(len(spec.posonlyargs), "/")
    if spec.vararg is not None:
        out.append("*" + _argument(spec.vararg, None))
    elif spec.kwonlyargs:
        out.append("*")
    out += [_argument(arg, value) for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return out + (["**" + _argument(spec.kwarg, None)] if spec.kwarg is not None else [])


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    annotation = "" if arg.annotation is None else f": {ast.unparse(arg.annotation)}"
    equals = " = " if annotation else "="
    return f"{arg.arg}{annotation}" + ("" if default is None else f"{equals}{ast.unparse(default)}")


def _wrapped(name: str, arguments: list[str], returns: str) -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= 110:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])


def _text(tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(tree) or "").strip()


def _methods(tree: ast.ClassDef) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (text := _text(node)):
            is_property = any(ast.unparse(mark) in ("property", "cached_property") for mark in node.decorator_list)
            call = node.name if is_property else f"{node.name}({', '.join(_arguments(node)[1:])})"
            yield f"- `{call}`: {' '.join(text.split())}"


def _anchor(name: str) -> str:
    return name.replace(".", "").lower()
