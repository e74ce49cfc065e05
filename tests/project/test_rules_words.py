"""Names say what a thing is: participles that could mean anything are refused as names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFUSED = {"found", "given", "asked", "wanted"}
# `found` is a key of what the doctor prints with --json.
DOCTOR_FIELDS = {f"whorl/doctor/{name}.py" for name in ("report", "rules", "ten_cases")}
FOLDERS = ("whorl", "tests", "examples", "docs/source")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are assigned, bound by a loop or an import, or parameters, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_a_thing_is(path: Path) -> None:
    allowed = {"found"} if str(path.relative_to(ROOT)) in DOCTOR_FIELDS else set()
    seen = names(ast.parse(path.read_text()))
    refused = [f"line {line}: {name}" for name, line in seen if name in REFUSED - allowed]
    assert not refused, f"{path.name}: {', '.join(refused)}: name what it is, see CONTRIBUTING.md, Words"


def test_each_kind_of_name_is_seen() -> None:
    program = "def given(asked):\n    found = 1\n    for wanted in found: self.given = 2\n"
    assert [name for name, _ in names(ast.parse(program))].count("given") == 2
    assert {name for name, _ in names(ast.parse(program))} >= REFUSED
