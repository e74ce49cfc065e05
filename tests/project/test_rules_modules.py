"""The modules of whorl: none imports itself through others."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from test_rules import PACKAGE, ROOT, SOURCES, imported, imports


def when_run(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs at some time, functions included: not what only type checkers see."""
    yield node
    is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in node.orelse if is_typing else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from when_run(child)


def import_graph(sources: dict[str, tuple[Path, str]]) -> dict[str, set[str]]:
    """By module, those of `sources` that it imports; each is a path and its text."""
    graph: dict[str, set[str]] = {}
    for module, (path, text) in sources.items():
        named = [name for node in when_run(ast.parse(text)) for name in imported(node, path)]
        # `from whorl.ops import rope` names a module or something in one: the longest that there is.
        parts = [name.split(".") for name in named]
        prefixes = [[".".join(p[:n]) for n in range(len(p), 0, -1)] for p in parts]
        graph[module] = {owner for tries in prefixes if (owner := next((t for t in tries if t in sources), module))}
        graph[module].discard(module)
    return graph


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules of which each leads to every other: who reaches me, and whom I reach."""
    reach = {module: reachable(graph, module) for module in graph}
    groups = {frozenset({a, *(b for b in reach[a] if a in reach[b])}) for a in graph}
    return {group for group in groups if len(group) > 1}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    todo = [start]
    while todo:
        more = graph[todo.pop()] - reached
        reached |= more
        todo.extend(more)
    return reached


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph({module_name(path): (path, path.read_text()) for path in SOURCES})
    assert not circles(graph), "take the circle apart: what both need goes into a module below both"


def test_the_rule_sees_circles_through_functions_and_not_those_of_types() -> None:
    texts = {
        "whorl.a": "from . import b",
        "whorl.b": "def late():\n    from whorl.c.inner import name",
        "whorl.c": "",
        "whorl.c.inner": "from ..a import name",
        "whorl.d": "if TYPE_CHECKING:\n    from .e import E",
        "whorl.e": "from .d import D",
    }
    paths = {m: ROOT / (m.replace(".", "/") + ("/__init__.py" if m == "whorl.c" else ".py")) for m in texts}
    actual = circles(import_graph({m: (paths[m], text) for m, text in texts.items()}))
    assert actual == {frozenset({"whorl.a", "whorl.b", "whorl.c.inner"})}


def test_the_rule_sees_relative_imports() -> None:
    actual = list(imports(PACKAGE / "ops" / "rope" / "x.py", ast.parse("from .._op import Op\nfrom . import cases")))
    assert actual == ["whorl.ops._op.Op", "whorl.ops.rope.cases"]


def test_type_checkers_of_others_read_our_types() -> None:
    assert (PACKAGE / "py.typed").read_text() == ""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["whorl"] == ["py.typed"], "an installed package has the file, too"
