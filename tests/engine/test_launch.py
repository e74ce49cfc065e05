"""Launches of kernels that were compiled before: what Triton would have launched, without asking it."""

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from stub_driver import StubDriver, stub_driver
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from bench.first_steps import compiled_kernels
from whorl.ops import _launch_triton, glu_triton
from whorl.ops._launch_triton import Launched, launched, prepare
from whorl.ops._rows import contiguous_strides, row_strides, row_view

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
    with stub_driver(scaled, doubled, loose) as driver:
        yield driver


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches that went through Triton."""
    names: list[str] = []
    run = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **kwargs: (names.append(self.__name__), run(self, *args, **kwargs))[1]
    )
    return names


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
def test_every_kind_gets_the_kernel_that_triton_compiles_for_it(stub: StubDriver, by_triton: list[str]) -> None:
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
    assert len(by_triton) <= 2 * len(KINDS)  # once above, at most once by us, and never again
    assert len({id(kernel) for kernel in right.values()}) >= 15


@pytest.mark.parametrize("changes", [{"x": AWAY}, {"stride": 1}, {"factor": 2}, {"num_warps": 2}], ids=str)
def test_another_kind_is_another_kernel(changes: dict[str, Any], stub: StubDriver, by_triton: list[str]) -> None:
    ours = Launched(scaled)
    for chosen in ({}, changes, {}, changes):
        args, options = arguments(**chosen)
        assert ours[(2,)](*args, **options) is scaled[(2,)](*args, **options), chosen
    assert len(by_triton) == 4 + 2


def test_matrices_of_the_copy_engine_are_told_apart_by_their_boxes() -> None:
    def kind(x: Tensor, box: list[int], swizzle: int = 128) -> Any:
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=2)
        args, options = arguments(x=TensorDescriptor.from_tensor(x, box, layout))
        return Launched(scaled)._describe(*args, **options)[0]

    x = torch.zeros(32, 64, dtype=torch.bfloat16)
    assert kind(x, [8, 64]) == kind(torch.ones(48, 128, dtype=torch.bfloat16), [8, 64])
    others = [kind(x, [16, 64]), kind(x.half(), [8, 64]), kind(x, [8, 32], 64), kind(x, [8, 64], 64)]
    assert len({kind(x, [8, 64]), *others}) == 5


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


def test_what_a_kernel_does_not_specialise_on_makes_no_other_kind(stub: StubDriver, by_triton: list[str]) -> None:
    ours = Launched(loose)
    for changes, num_kernels in LOOSE:
        args, options = arguments(**changes)
        assert ours[(2,)](*args, **options) is loose[(2,)](*args, **options), changes
        assert len(loose.device_caches[0][0]) == num_kernels, changes
    by_triton.clear()
    for changes, _ in LOOSE:
        args, options = arguments(**changes)
        ours[(2,)](*args, **options)
    assert by_triton == []


def test_a_launch_is_the_same_without_triton(stub: StubDriver, by_triton: list[str]) -> None:
    ours = Launched(scaled)
    args, options = arguments(stride=1)  # a constant of the kernel then; launchers get it all the same
    ours[(2,)](*args, **options)
    stub.stream = 8
    for grid in ((3,), (3, 4), (3, 4, 5)):
        ours[grid](*args, **options)
    ours[(6,)](*args[:3], factor=0.25, n=41, **options)
    assert by_triton == ["_scaled"]
    first, *rest = stub.launches
    assert [one.grid for one in rest] == [(3, 1, 1), (3, 4, 1), (3, 4, 5), (6, 1, 1)]
    assert {one.stream for one in rest} == {8}
    assert all(one.function is first.function for one in rest)
    assert all(one.args == first.args for one in rest[:-1])
    assert rest[-1].args == (*args[:3], 41, 0.25, 32, False)


def test_devices_have_kernels_of_their_own(stub: StubDriver, by_triton: list[str]) -> None:
    ours = Launched(scaled)
    args, options = arguments()
    kernels = []
    for device in (0, 1, 0, 1):
        stub.device = device
        kernels.append(ours[(1,)](*args, **options))
    assert len(by_triton) == 2
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
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(2))  # another object of the same value
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
        ours[lambda meta: (meta["n"] // meta["BLOCK"],)](*args, **options)
    assert [one.grid for one in stub.launches] == [(1, 1, 1)] * 2


class Labelled(Tensor):
    pass


def test_a_subclass_is_launched_by_triton(stub: StubDriver, by_triton: list[str]) -> None:
    ours = Launched(scaled)
    args, options = arguments(x=ROW.as_subclass(Labelled))
    for _ in range(2):
        ours[(1,)](*args, **options)
    assert len(by_triton) == 2
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


# ---- launches in which everything but the tensors is fixed


OPTIONS: dict[str, Any] = {"BLOCK": 32, "num_warps": 2}


def test_a_prepared_launch_is_the_same_without_triton(stub: StubDriver, by_triton: list[str]) -> None:
    ours = Launched(scaled)
    launch = prepare(ours, (3, 4), 3, 40, 0.5, **OPTIONS)
    launch(ROW, ROW)
    stub.stream = 8
    ours._compiled.clear()  # it would have to ask Triton again
    launch(ROW, ROW)
    first, second = stub.launches
    assert by_triton == ["_scaled"]
    assert first.grid == (3, 4, 1)
    assert second == first._replace(stream=8)


def test_tensors_of_every_kind_get_the_kernel_that_triton_compiles_for_them(stub: StubDriver) -> None:
    """In an order in which each kind follows each other."""
    launch = prepare(Launched(scaled), (2,), 3, 40, 0.5, **OPTIONS)
    kinds = [(ROW, ROW), (AWAY, ROW), (ROW, AWAY), (ROW.half(), ROW), (ROW, ROW.half())]
    right = [scaled[(2,)](*tensors, 3, 40, 0.5, **OPTIONS).function for tensors in kinds]
    assert len(set(map(id, right))) == len(kinds)
    for pair in itertools.product(range(len(kinds)), repeat=2):
        for i in pair:
            launch(*kinds[i])
            assert stub.launches[-1].function is right[i], i


def test_prepared_launches_of_devices_are_their_own(stub: StubDriver, by_triton: list[str]) -> None:
    launch = prepare(Launched(scaled), (1,), 3, 40, 0.5, **OPTIONS)
    for device in (0, 1, 0, 1):
        stub.device = device
        launch(ROW, ROW)
    functions = [one.function for one in stub.launches]
    assert len(by_triton) == 2
    assert functions[0] is functions[2] is not functions[1]
    assert functions[1] is functions[3]


def test_a_prepared_launch_notices_hooks_globals_and_subclasses(
    stub: StubDriver, by_triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, seen = prepare(Launched(doubled), (1,), BLOCK=32), []
    for _ in range(2):
        launch(ROW)
    assert len(by_triton) == 1
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        launch(ROW)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1
    launch(ROW.as_subclass(Labelled))
    assert len(by_triton) == 3
    launch(ROW)
    assert len(by_triton) == 3
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(3))
    with pytest.raises(RuntimeError, match="Global variable SCALE has changed"):
        launch(ROW)


def test_a_prepared_launch_keeps_no_tensor(stub: StubDriver) -> None:
    launch, x = prepare(Launched(scaled), (1,), 3, 40, 0.5, **OPTIONS), torch.zeros(64)
    alive = weakref.ref(x)
    for _ in range(2):
        launch(x, x)
    stub.launches.clear()
    del x
    gc.collect()
    assert alive() is None


CUBE = torch.arange(2.0 * 3 * 4 * 10).view(2, 3, 4, 10)
ROWS = [
    CUBE[0, 0, 0],
    CUBE[0, 0],
    CUBE[0],
    CUBE,
    CUBE[..., :5],
    CUBE[0, 0, :, :5],
    CUBE[:, :, 1],
    CUBE[:, 1:, 1:, 1:],  # its first dims do not merge
    CUBE.transpose(0, 2),
    CUBE.transpose(1, 3),
    CUBE[0, 0].t(),
    CUBE[:1].expand(2, 3, 4, 10),
]


@pytest.mark.parametrize("x", ROWS, ids=lambda x: f"{list(x.shape)} {x.stride()}")
def test_rows_are_where_their_strides_say(x: Tensor) -> None:
    for view in (row_view(x), row_view(x, row_view(x.contiguous())), row_view(x.contiguous(), row_view(x))):
        outer, inner, *strides = row_strides(view.shape, view.stride())
        read = view.as_strided((outer, inner, x.shape[-1]), (*strides, 1))
        assert torch.equal(read.reshape(x.shape), x)
    assert contiguous_strides(x.shape) == x.contiguous().stride()


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
    is_interpreted = not isinstance(glu_triton._glu_kernel, Launched)
    assert is_interpreted == knobs.runtime.interpret
