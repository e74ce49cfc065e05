"""The operator of CONTRIBUTING.md, added to a copy of the package as the page says: one file and one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "relu_squared"
FILES = (f"whorl/ops/{NAME}.py", f"whorl/ops/{NAME}_triton.py")


def blocks() -> list[str]:
    """The operator, its kernel, and what names the kernel."""
    return re.findall("```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


def line() -> str:
    match = re.search(r"the line in `whorl/ops/__init__.py`: `(.*?)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert match is not None
    return match[1]


def contribute(folder: Path, *, kernel: bool) -> None:
    """A copy of the package, its tests and its settings, and in it what the page tells to write."""
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in ("whorl", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    operator, kernels, named = blocks()
    if kernel:
        operator = operator.replace('"triton": "torch.compile fuses it with its neighbours", ', "")
        before, after = operator.split("_CASES:")
        operator = f"{before}{named}\n\n_CASES:{after}"
        (folder / FILES[1]).write_text(kernels)
    (folder / FILES[0]).write_text(operator)
    init = folder / "whorl" / "ops" / "__init__.py"
    text = init.read_text()
    init.write_text(text.replace("from .rms_norm import", f"{line()}\nfrom .rms_norm import", 1))


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


CHECKED = """
import json, sys
import pytest
import whorl
from whorl import selftest
from whorl.ops import OPS, availability

assert whorl.__file__.startswith(sys.argv[1]), whorl.__file__
names = [name for name in OPS if name.startswith("relu_squared")]
report = selftest.run("cpu", {name: OPS[name] for name in names})
rows = [line.split() for line in availability.as_table().splitlines()]
wanted = "relu_squared or test_public_names or test_operators or test_exceptions"
names_of_tests = ("project/test_rules", "ops/test_ops", "ops/test_ops_contracts", "ops/test_backends")
files = [f"tests/{name}.py" for name in names_of_tests]
code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-k", wanted])
listed = {row[0]: row[1] for row in rows if row and row[0] in names}
print(json.dumps({"names": names, "passed": report.passed, "listed": listed, "code": int(code)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [False, True], ids=["one file and one line", "with a kernel"])
def test_the_example_is_taken(kernel: bool, tmp_path: Path) -> None:
    """By the rules, the tests of operators, `whorl selftest` and `whorl ops`, with nothing else to edit."""
    contribute(tmp_path, kernel=kernel)
    files = FILES[: 1 + kernel]
    done = run(tmp_path, str(Path(sys.executable).with_name("ruff")), "check", *files, "whorl/ops/__init__.py")
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, str(Path(sys.executable).with_name("ruff")), "format", "--check", *files)
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, sys.executable, "-c", CHECKED, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [NAME, f"{NAME}_backward"]
    expected = {"names": names, "passed": True, "listed": dict.fromkeys(names, "yes"), "code": 0}
    assert json.loads(done.stdout.splitlines()[-1]) == expected, done.stdout


@pytest.mark.slow
def test_the_example_is_typed(tmp_path: Path) -> None:
    contribute(tmp_path, kernel=True)
    done = run(tmp_path, sys.executable, "-m", "mypy", *FILES)
    assert done.returncode == 0, done.stdout
    (tmp_path / FILES[0]).write_text(
        (tmp_path / FILES[0]).read_text().replace('(x: Annotated[Tensor, "[...] float"])', "(x)")
    )
    done = run(tmp_path, sys.executable, "-m", "mypy", *FILES)
    assert "Function is missing a type annotation" in done.stdout
