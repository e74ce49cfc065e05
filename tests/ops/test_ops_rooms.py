"""Who imports whom among the operators: no circles, be it inside functions or by the name of an implementation."""

import ast
from collections.abc import Iterator
from pathlib import Path

from test_rules import PACKAGE, ROOT, imported

Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def named(node: ast.AST, package: str) -> Iterator[str]:
    """The module in `op.impl("triton", "module:function")`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "impl":
        for argument in node.args[1:2]:
            if isinstance(argument, ast.Constant) and ":" in str(argument.value):
                module = str(argument.value).partition(":")[0]
                yield module if module.startswith("whorl.") else f"{package}.{module}"


def graph(sources: dict[Path, str]) -> Graph:
    """What each module imports of the others, anywhere in it."""
    modules = {module_name(path): path for path in sources}
    edges: Graph = {}
    for name, path in modules.items():
        names: list[str] = []
        package = module_name(path.parent / "__init__.py")
        for node in ast.walk(ast.parse(sources[path])):
            names += [*imported(node, path), *named(node, package)]
        edges[name] = {owner for full in names if (owner := owner_of(full, modules)) not in (None, name)}
    return edges


def owner_of(full: str, modules: dict[str, Path]) -> str | None:
    """The module that holds a name: itself, or its package where it is a name in a module."""
    while full and full not in modules:
        full = full.rpartition(".")[0]
    return full or None


def circle(edges: Graph) -> list[str]:
    """The modules of one circle, or nothing."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if cycle := walk(other, [*way, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in edges if (cycle := walk(name, []))), [])


def test_operators_import_each_other_in_one_direction() -> None:
    sources = {path: path.read_text() for path in (PACKAGE / "ops").rglob("*.py")}
    edges = graph(sources)
    assert "whorl.ops.moe.route_triton" in edges["whorl.ops.moe.route"], "the named are not seen"
    assert circle(edges) == []


def test_a_circle_is_seen() -> None:
    ops = PACKAGE / "ops"
    kernel = "def forward(x):\n    from .one import SIZE\n"
    sources = {ops / "one.py": 'op.impl("triton", "one_triton:forward")\n', ops / "one_triton.py": kernel}
    assert circle(graph(sources)) == ["whorl.ops.one", "whorl.ops.one_triton", "whorl.ops.one"]
    assert circle(graph({**sources, ops / "one_triton.py": "from .two import SIZE\n", ops / "two.py": ""})) == []
