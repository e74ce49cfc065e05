"""Launches of kernels that were compiled before: what Triton would have launched, without asking it."""

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from stub_driver import StubDriver, stub_driver
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from whorl.bench.first_steps import compiled_kernels
from whorl.ops import _launch_triton, swiglu_triton
from whorl.ops._launch_triton import Launched, launched

SCALE = tl.constexpr(2)


def _scaled(x_ptr, y_ptr, stride, n, factor, BLOCK: tl.constexpr, NEGATED: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * stride, mask=at < n)
    tl.store(y_ptr + at, -x if NEGATED else x * factor, mask=at < n)


def _doubled(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, SCALE * tl.load(x_ptr + at))


scaled, doubled = JITFunction(_scaled), JITFunction(_doubled)  # compiled also where Triton interprets what it decorates
loose = JITFunction(_scaled, do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr", "stride"])


@pytest.fixture
def stub() -> Iterator[StubDriver]:
    with stub_driver(scaled, doubled, loose) as found:
        yield found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches that went through Triton."""
    found: list[str] = []
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **kwargs: (found.append(self.__name__), run(self, *args, **kwargs))[1]
    )
    return found


ROW = torch.zeros(64)
AWAY = ROW[1:]  # 4 bytes from a multiple of 16


def arguments(**changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values = {"x": ROW, "y": ROW, "stride": 3, "n": 40, "factor": 0.5, "BLOCK": 32} | changes
    return tuple(values.pop(name) for name in ("x", "y", "stride", "n", "factor")), values


KINDS: list[dict[str, Any]] = [
    {},
    {"x": AWAY},
    {"y": AWAY},
    {"x": ROW.half()},
    {"stride": 1},
    {"stride": 0},
    {"stride": 16},
    {"stride": -3},
    {"stride": 2**31 - 1},
    {"stride": 2**31},
    {"stride": -(2**31) - 1},
    {"n": 48},
    {"n": True},
    {"factor": 2},
    {"factor": 2.0},
    {"factor": 1},
    {"factor": 1.0},
    {"BLOCK": 64},
    {"NEGATED": True},
    {"num_warps": 2},
    {"num_warps": 2, "num_stages": 2},
]


@pytest.mark.slow
def test_every_kind_gets_the_kernel_that_triton_compiles_for_it(stub: StubDriver, asked: list[str]) -> None:
    """In an order in which each kind follows each other."""
    ours = Launched(scaled)
    right = {}
    for i, changes in enumerate(KINDS):
        args, options = arguments(**changes)
        right[i] = scaled[(2,)](*args, **options)
    for i, j in itertools.product(range(len(KINDS)), repeat=2):
        for k in (i, j):
            args, options = arguments(**KINDS[k])
            assert ours[(2,)](*args, **options) is right[k], KINDS[k]
    assert len(asked) <= 2 * len(KINDS)  # once above, at most once by us, and never again
    assert len({id(kernel) for kernel in right.values()}) >= 15


@pytest.mark.parametrize("changes", [{"x": AWAY}, {"stride": 1}, {"factor": 2}, {"num_warps": 2}], ids=str)
def test_another_kind_is_another_kernel(changes: dict[str, Any], stub: StubDriver, asked: list[str]) -> None:
    ours = Launched(scaled)
    for given in ({}, changes, {}, changes):
        args, options = arguments(**given)
        assert ours[(2,)](*args, **options) is scaled[(2,)](*args, **options), given
    assert len(asked) == 4 + 2


LOOSE: list[tuple[dict[str, Any], int]] = [  # a launch, and the number of kernels so far
    ({}, 1),
    ({"n": 48}, 1),
    ({"n": 1}, 1),
    ({"n": 0}, 1),
    ({"n": -5}, 1),
    ({"stride": 16}, 1),
    ({"x": AWAY}, 1),
    ({"n": 2**31}, 2),
    ({"n": 2**31 + 1}, 2),
    ({"stride": 1}, 3),
    ({"y": AWAY}, 4),
]


def test_what_a_kernel_does_not_specialise_on_makes_no_other_kind(stub: StubDriver, asked: list[str]) -> None:
    ours = Launched(loose)
    for changes, num_kernels in LOOSE:
        args, options = arguments(**changes)
        assert ours[(2,)](*args, **options) is loose[(2,)](*args, **options), changes
        assert len(loose.device_caches[0][0]) == num_kernels, changes
    asked.clear()
    for changes, _ in LOOSE:
        args, options = arguments(**changes)
        ours[(2,)](*args, **options)
    assert asked == []


def test_a_launch_is_the_same_without_triton(stub: StubDriver, asked: list[str]) -> None:
    ours = Launched(scaled)
    args, options = arguments(stride=1)  # a constant of the kernel then; launchers get it all the same
    ours[(2,)](*args, **options)
    stub.stream = 8
    for grid in ((3,), (3, 4), (3, 4, 5)):
        ours[grid](*args, **options)
    ours[(6,)](*args[:3], factor=0.25, n=41, **options)
    assert asked == ["_scaled"]
    first, *rest = stub.launches
    assert [one.grid for one in rest] == [(3, 1, 1), (3, 4, 1), (3, 4, 5), (6, 1, 1)]
    assert {one.stream for one in rest} == {8}
    assert all(one.function is first.function for one in rest)
    assert all(one.args == first.args for one in rest[:-1])
    assert rest[-1].args == (*args[:3], 41, 0.25, 32, False)


def test_devices_have_kernels_of_their_own(stub: StubDriver, asked: list[str]) -> None:
    ours = Launched(scaled)
    args, options = arguments()
    kernels = []
    for device in (0, 1, 0, 1):
        stub.device = device
        kernels.append(ours[(1,)](*args, **options))
    assert len(asked) == 2
    assert kernels[0] is kernels[2] is not kernels[1]
    assert kernels[1] is kernels[3]


def test_hooks_of_launches_are_called(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, seen = Launched(scaled), []
    args, options = arguments()
    ours[(1,)](*args, **options)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        ours[(1,)](*args, **options)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert [about.get()["name"] for about in seen] == ["_scaled"]
    ours[(1,)](*args, **options)
    assert len(seen) == 1


def test_a_global_that_has_changed_is_noticed(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Launched(doubled)
    ours[(1,)](ROW, BLOCK=32)
    ours[(1,)](ROW, BLOCK=32)
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(3))
    with pytest.raises(RuntimeError, match="Global variable SCALE has changed"):
        ours[(1,)](ROW, BLOCK=32)


def test_what_triton_refuses_is_refused_after_a_good_launch(stub: StubDriver) -> None:
    ours = Launched(scaled)
    args, options = arguments()
    ours[(1,)](*args, **options)
    with pytest.raises(TypeError, match="n"):
        ours[(1,)](*args[:3], factor=0.5, **options)
    with pytest.raises(KeyError, match="num_wraps"):
        ours[(1,)](*args, **options, num_wraps=4)


def test_a_grid_may_be_a_function(stub: StubDriver) -> None:
    ours = Launched(scaled)
    args, options = arguments()
    for _ in range(2):
        ours[lambda given: (given["n"] // given["BLOCK"],)](*args, **options)
    assert [one.grid for one in stub.launches] == [(1, 1, 1)] * 2


class Labelled(Tensor):
    pass


def test_a_subclass_is_launched_by_triton(stub: StubDriver, asked: list[str]) -> None:
    ours = Launched(scaled)
    args, options = arguments(x=ROW.as_subclass(Labelled))
    for _ in range(2):
        ours[(1,)](*args, **options)
    assert len(asked) == 2
    assert not ours._compiled


def test_no_tensor_is_kept_and_kinds_are_bounded(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch_triton, "MAX_KINDS", 3)
    ours = Launched(scaled)
    for n in range(-20, -10):
        args, options = arguments(n=n)  # negative integers are told apart one by one
        ours[(1,)](*args, **options)
        assert len(ours._compiled) <= 3
    held = [part for key in ours._compiled for part in key]
    assert not any(isinstance(p, Tensor) for part in held for p in (part if isinstance(part, tuple) else (part,)))


def test_launched_kernels_are_counted_by_name(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("whorl.made_up_triton")
    module.kernel, module.other = Launched(scaled), doubled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = compiled_kernels()
    for changes in ({}, {"stride": 1}, {"stride": 1}):
        args, options = arguments(**changes)
        module.kernel[(1,)](*args, **options)
    doubled[(1,)](ROW, BLOCK=32)
    assert compiled_kernels() - before == {"_scaled": 2, "_doubled": 1}


def test_the_interpreter_has_nothing_to_remember() -> None:
    def interpreted() -> None: ...

    assert launched(interpreted) is interpreted
    is_interpreted = not isinstance(swiglu_triton._swiglu_kernel, Launched)
    assert is_interpreted == knobs.runtime.interpret
