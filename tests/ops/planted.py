"""Faults planted in a kernel's source, and whether the shared check of an operator notices them."""

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_ops import Values, arguments, check, reason_against

from whorl.ops import OPS, Op
from whorl.ops._impl import Impl


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    module: str
    op: str  # the operator whose cases must notice
    old: str
    new: str
    count: int = 1  # how often `old` stands in the source
    needs_blocks: bool = False  # shows only where a program takes several blocks of the largest case


def one_of_each_quick(faults: Iterable[Fault]) -> list[Any]:
    """The first fault of every operator, and the others slowly."""
    seen: set[str] = set()
    cases = []
    for fault in faults:
        marks = [pytest.mark.slow] if fault.op in seen else []
        cases.append(pytest.param(fault, id=f"{fault.op}: {fault.name}", marks=marks))
        seen.add(fault.op)
    return cases


def plant(module: str, old: str, new: str, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the module with a changed source in place of the real one, for operators to import when next called."""
    real = importlib.import_module(module)  # put back when the test ends
    for op in OPS.values():
        if "triton" in op.impls:  # its users too: one that is first imported with the fault in it would keep it
            assert op.impls["triton"].function
    source = Path(real.__file__).read_text()
    assert source.count(old) == count, f"{old!r} stands {source.count(old)} times in {module}, expected {count}"
    path = folder / "planted.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(module, path)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    forget_users(real, monkeypatch)
    forget(module, monkeypatch)
    sys.modules[module] = planted
    setattr(*place(module), planted)
    for op in [op for op in OPS.values() if "triton" in op.impls]:
        impl = op.impls["triton"]  # anew: the real one may be loaded
        monkeypatch.setitem(op.impls, "triton", Impl("triton", impl.source, impl.accepts))


def forget_users(real: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that hold the real one, or functions of it, are imported anew when they are next called."""
    kernels = {
        name: loaded for name, loaded in sys.modules.items() if name.startswith("whorl.ops") and "triton" in name
    }
    for name, loaded in kernels.items():
        parts = [getattr(value, "fn", value) for value in vars(loaded).values()]  # fn: what a kernel was made of
        is_user = any(part is real or getattr(part, "__module__", None) == real.__name__ for part in parts)
        if is_user and loaded is not real and name in sys.modules:
            forget(name, monkeypatch)
            forget_users(loaded, monkeypatch)


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends; `from package import module` would find the attribute, `import_module` the entry."""
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(*place(name), raising=False)


def place(name: str) -> tuple[ModuleType, str]:
    package, _, short = name.rpartition(".")
    return importlib.import_module(package), short


def first_red(op: Op, cases: list[Values]) -> str | None:
    """What the shared check says of the first case that it rejects."""
    for case in cases:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            values = arguments(op, case, dtype)
            if reason_against(op, "triton", values) is None:
                try:
                    check(op, "triton", values)
                except AssertionError as error:
                    return str(error)
    return None
