"""Backends: how one is chosen for a block of code, named and imported, and added by a package outside of whorl."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward import CALLS, twice, twice_backward
from kernels import without_cpu_kernels
from torch import Tensor

from whorl import device as devices
from whorl import ops
from whorl.device import BACKENDS
from whorl.ops import OPS, Op, availability
from whorl.ops._op import operator

# ---- forced for a block


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    CALLS.clear()


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def test_a_block_forces_its_own_thread_alone(device: str) -> None:
    x = torch.ones(4, device=device)
    with twice.using("triton"):
        in_thread(lambda: twice(x, backend=""))
        assert CALLS[-1] == ("triton" if device == "cuda" else "torch")  # what a thread chooses by itself
        twice(x)
        assert CALLS[-1] == "triton"

    def inner() -> None:
        with twice.using("triton"):
            started.set()
            assert ended.wait(60)

    started, ended = threading.Event(), threading.Event()
    other = threading.Thread(target=inner)
    other.start()
    assert started.wait(60)
    with torch.inference_mode():
        assert twice._forced.get() == ""
        twice.unchecked(x)
    ended.set()
    other.join(60)
    assert CALLS[-1] == ("triton" if device == "cuda" else "torch")


def test_a_block_forces_its_own_task_alone() -> None:
    seen: dict[str, str] = {}

    async def forced(entered: asyncio.Event, looked: asyncio.Event) -> None:
        with twice.using("triton"):
            entered.set()
            await looked.wait()
            seen["forced"] = twice._forced.get()

    async def free(entered: asyncio.Event, looked: asyncio.Event) -> None:
        await entered.wait()
        seen["free"] = twice._forced.get()
        looked.set()

    async def both() -> None:
        entered, looked = asyncio.Event(), asyncio.Event()
        await asyncio.gather(forced(entered, looked), free(entered, looked))

    asyncio.run(both())
    assert seen == {"free": "", "forced": "triton"}


def test_compiled_code_is_forced_in_its_own_thread_alone() -> None:
    x = torch.ones(4)
    torch._dynamo.reset()
    call = torch.compile(lambda x: twice(x), backend="eager", fullgraph=True)
    with twice.using("triton"):
        call(x)
        CALLS.clear()
        in_thread(lambda: call(x))
        assert "triton" not in CALLS
        CALLS.clear()
        call(x)
        assert "triton" in CALLS


def test_backward_in_another_thread_keeps_the_backend_of_its_forward(device: str) -> None:
    """As on a GPU, where autograd has a thread of its own."""
    x = torch.ones(4, device=device, requires_grad=True)
    with twice.using("triton"):
        out = twice(x)
    CALLS.clear()
    with twice_backward.using("torch"):  # of this thread, which does not run it
        in_thread(lambda: out.sum().backward())
    assert CALLS[-1] == "triton backward"


# ---- named, and imported when first chosen


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_named_implementation_is_there(op: Op) -> None:
    """And takes the arguments of its reference, which is looked at when it is loaded."""
    for impl in op.impls.values():
        assert callable(impl.function)


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that says when it is imported."""
    (tmp_path / "slow_to_import").mkdir()
    text = "IMPORTS = []\nIMPORTS.append(1)\n\ndef doubled(x):\n    return x + x\n\ndef wrong(y):\n    return y\n"
    (tmp_path / "slow_to_import" / "kernels.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "slow_to_import.kernels"
    for name in [name for name in sys.modules if name.startswith("slow_to_import")]:
        del sys.modules[name]


@operator()
def doubled(x: Tensor) -> Tensor:
    """x: [N]"""
    return 2 * x


del OPS["doubled"]  # not for the tests that walk the registry


@pytest.fixture
def bare() -> Iterator[Op]:
    """An operator without backends."""
    doubled.impls = {}
    yield doubled
    doubled.impls = {}


def test_a_name_is_imported_when_it_is_first_chosen(kernels: str, bare: Op) -> None:
    bare.impl("triton", f"{kernels}:doubled")
    assert kernels not in sys.modules
    bare.choose(torch.ones(2))
    assert kernels not in sys.modules  # passed over: interpreted Triton runs only when the backend is named
    assert torch.equal(bare(torch.ones(2), backend="triton"), torch.full((2,), 2.0))
    function = bare.impls["triton"].function
    assert function is sys.modules[kernels].doubled
    del sys.modules[kernels]
    assert bare.choose(torch.ones(2), backend="triton").function is function, "it was looked up again"


def test_a_wrong_name_says_what_is_there(kernels: str, bare: Op) -> None:
    bare.impl("triton", f"{kernels}:tripled")
    with pytest.raises(TypeError, match=f"doubled/triton is '{kernels}:tripled': {kernels} has no 'tripled'"):
        bare(torch.ones(2), backend="triton")


def test_a_named_function_takes_the_arguments_of_the_reference(kernels: str, bare: Op) -> None:
    bare.impl("triton", f"{kernels}:wrong")
    with pytest.raises(TypeError, match=r"doubled/triton takes \['y'\], the reference \['x'\]"):
        bare(torch.ones(2), backend="triton")


def test_a_keyword_of_the_backends_own_has_a_default(bare: Op) -> None:
    bare.impl("triton")(lambda x, *, tiles=4: x + x)
    with pytest.raises(TypeError, match="doubled/torch_npu takes"):
        bare.impl("torch_npu")(lambda x, *, tiles: x + x)


# ---- from outside

PLATFORM = '''"""A platform that whorl does not know: a chip, found or not, and its own kernels for one operator."""

import os

from whorl import ops


def missing():
    return None if os.environ.get("EMBER_CHIP") == "1" else "no Ember chip in this machine"


def accepts(x=None, **_):
    return "takes rows of 8 channels" if x is not None and x.shape[-1] != 8 else None


def register():
    ops.register_backend("ember", device="cpu", missing=missing, priority=10)
    ops.rms_norm.impl("ember", "ember_platform.kernels:forward", accepts=accepts)
    backward = ops.OPS["rms_norm_backward"]
    backward.impl("ember", "ember_platform.kernels:backward", accepts=accepts)
'''
KERNELS = """from whorl.ops import OPS

CALLS = []


def forward(x, weight, eps, plus_one):
    CALLS.append("forward")
    return OPS["rms_norm"].reference(x, weight, eps, plus_one=plus_one)


def backward(**given):
    CALLS.append("backward")
    return OPS["rms_norm_backward"].reference(**given)
"""


def write_package(folder: Path, *, register: str = "ember_platform:register") -> None:
    """As pip leaves it: the package, and what it offers."""
    (folder / "ember_platform").mkdir()
    (folder / "ember_platform" / "__init__.py").write_text(PLATFORM)
    (folder / "ember_platform" / "kernels.py").write_text(KERNELS)
    info = folder / "ember_platform-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ember-platform\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[whorl.backends]\nember = {register}\n")


@pytest.fixture
def registry() -> Iterator[None]:
    """Backends and implementations as they were; packages installed by a test are not looked for."""
    devices.load_backends()
    backends, impls = dict(BACKENDS), {op: (op.impls, op._is_plain_on_host) for op in OPS.values()}
    yield
    BACKENDS.clear()
    BACKENDS.update(backends)
    for op, (implementations, is_plain) in impls.items():
        op.impls, op._is_plain_on_host = implementations, is_plain
    devices.default_device.cache_clear()


@pytest.fixture
def ember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None) -> Iterator[Any]:
    write_package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EMBER_CHIP", "1")
    import ember_platform

    ember_platform.register()
    from ember_platform import kernels

    yield kernels
    del sys.modules["ember_platform"], sys.modules["ember_platform.kernels"]


def test_a_package_outside_adds_a_backend(ember: Any) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert ops.rms_norm.choose(x, weight).backend == "ember"
    expected = ops.rms_norm(x, weight, backend="torch")
    assert ember.CALLS == []
    assert torch.equal(ops.rms_norm(x, weight), expected)
    with torch.inference_mode():
        assert torch.equal(ops.rms_norm.unchecked(x, weight), expected)
    ops.rms_norm(x.requires_grad_(), weight).sum().backward()
    assert ember.CALLS == ["forward", "forward", "forward", "backward"]
    assert ops.glu.choose(torch.randn(2, 8)).backend in ("cpp", "torch")


def test_it_is_in_reasons_and_errors(ember: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 6), torch.randn(6)
    assert ops.rms_norm.choose(x, weight).reasons["ember"] == "takes rows of 8 channels"
    message = (
        r"rms_norm: backend 'ember' was requested but cannot run: takes rows of 8 channels\. "
        r"Backends: torch, ember, cpp, triton, torch_npu"
    )
    with pytest.raises(RuntimeError, match=message):
        ops.rms_norm(x, weight, backend="ember")
    with pytest.raises(RuntimeError, match=r"glu: backend 'ember' .*: the operator has no such backend"):
        ops.glu(torch.randn(2, 8), backend="ember")
    monkeypatch.delenv("EMBER_CHIP")
    with without_cpu_kernels():
        choice = ops.rms_norm.choose(torch.randn(3, 8), torch.randn(8))
    assert (choice.backend, choice.reasons["ember"]) == ("torch", "no Ember chip in this machine")


def test_it_is_listed(ember: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heading, *rows = [line.split() for line in availability.as_table().partition("\n\n")[2].splitlines()]
    assert heading == ["operator", "torch", "torch_cuda", "triton", "torch_npu", "cpp", "ember"]
    said = {row[0]: row[-1] for row in rows}
    is_here = devices.default_device() == "cpu"
    assert {name for name, last in said.items() if last == "yes"} == (
        {"rms_norm", "rms_norm_backward"} if is_here else set()
    )
    monkeypatch.delenv("EMBER_CHIP")
    backends = {row["name"]: row["backends"] for row in json.loads(availability.as_json())["operators"]}
    assert backends["rms_norm"]["ember"] == {"available": False, "reason": "no Ember chip in this machine"}
    assert "ember" not in backends["glu"]


def test_a_lower_priority_comes_after_whorls_own(registry: None) -> None:
    ops.register_backend("fallback", device="cuda", package="torch", priority=-1)
    ops.register_backend("beside", device="cuda", package="torch")
    for name in ("fallback", "beside"):
        ops.glu.impl(name)(lambda x, activation, interleaved: x)
    assert list(ops.glu.impls) == ["cpp", "triton", "torch_npu", "beside", "fallback"]


def test_a_device_of_its_own(registry: None) -> None:
    ops.register_backend("ember", device="ember", package="torch")
    assert devices.devices() == ("cpu", "cuda", "npu", "ember")
    with pytest.raises(ValueError, match="device 'nowhere' is not one of cpu, cuda, npu, ember"):
        devices.require("nowhere")
    with pytest.raises(ValueError, match="device 'ember' is not available; this machine has only"):
        devices.require("ember")


def test_what_is_refused(registry: None) -> None:
    with pytest.raises(ValueError, match="'triton' is registered already, as are torch, torch_cuda, triton"):
        ops.register_backend("triton", device="cuda")
    with pytest.raises(ValueError, match="'torch' is registered already"):
        ops.register_backend("torch", device="cpu")
    with pytest.raises(ValueError, match="both must be identifiers"):
        ops.register_backend("my backend", device="cpu")
    with pytest.raises(ValueError, match="give only one of `package` and `missing`"):
        ops.register_backend("ember", device="cpu", package="ember", missing=lambda: None)
    with pytest.raises(ValueError, match="rms_norm: backend is 'ember', expected one of torch_cuda, triton"):
        ops.rms_norm.impl("ember", "ember.kernels:forward")
    wrong = (
        r"rms_norm: impl\('triton', <function .*\): expected 'module:function'; .* rms_norm.impl\('triton'\)\(mine\)"
    )

    def mine(x: Any, weight: Any, eps: float, plus_one: bool) -> Any: ...

    with pytest.raises(TypeError, match=wrong):
        ops.rms_norm.impl("triton", mine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected 'module:function'"):
        ops.rms_norm.impl("triton", "ember.kernels")
    with pytest.raises(ValueError, match="rms_norm: backend 'triton' has an implementation already"):
        ops.rms_norm.impl("triton", "ember.kernels:forward")


FOUND = """
import json, sys
import whorl, whorl.ops, whorl.cli
quiet = "ember_platform" not in sys.modules
import torch
x = torch.ones(2, 8)
try:
    asked = whorl.ops.rms_norm.choose(x, x[0]).backend
    from whorl.ops import availability
    print(json.dumps([quiet, asked, "ember" in availability.as_table()]))
except RuntimeError as error:
    print(json.dumps([quiet, str(error)]))
"""


@pytest.mark.parametrize("register", ["ember_platform:register", "ember_platform:no_such_function"])
def test_an_installed_package_is_found_when_a_backend_is_chosen(register: str, tmp_path: Path) -> None:
    """And not by an import of whorl."""
    write_package(tmp_path, register=register)
    path = os.pathsep.join([str(tmp_path), str(Path(devices.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "EMBER_CHIP": "1"}
    done = subprocess.run([sys.executable, "-c", FOUND], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    if register.endswith(":register"):
        assert answers == [True, "ember", True]
    else:
        assert answers[0] is True
        assert "the backend 'ember' (ember_platform:no_such_function) cannot be registered: " in answers[1]
