"""The only file that says cuda, npu or cpu: what is here, which backend may run where, how to wait for it."""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HOST = "cpu"
REFERENCE = "torch"  # the backend that every operator has, everywhere
# Why a device's launches are not recorded once and replayed.
NO_GRAPHS = {
    "cpu": "it has no launches to save",
    "npu": "its attention takes the lengths of sequences as integers of the host, and a replay would keep the recorded",
}
# Tokens of a cache block: few, since every sequence leaves half a block empty, unless the attention of the backend that
# is at home wants more. npu_fused_infer_attention_score takes multiples of 128 where a sequence has several queries, as
# prompts and drafts have.
BLOCK_SIZE = 16
BLOCK_SIZES = {"torch_npu": 128}
# Whose attention takes latents and the channels that turn, of a cached token, as two tensors.
TWO_LATENT_CACHES = ("torch_npu",)
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # the library that moves tensors between ranks

# What several ranks run better with, set before the library starts unless the user has. HCCL's and the task queue's
# took Qwen3-235B on 16 Ascend 910 from 12 to 23 tokens a second; without any one of the last three it lost 20 to 40 %.
# NCCL only moves bytes here, as sums are taken in rank order: its in-switch reductions would hold memory for nothing.
COLLECTIVE_SETTINGS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {"NCCL_NVLS_ENABLE": "0"},
    "npu": {
        "HCCL_WHITELIST_DISABLE": "1",
        "HCCL_ALGO": "level0:ring",  # level0:fullmesh garbled the text
        "HCCL_BUFFSIZE": "200",  # MB; 100 and 400 were slower
        "HCCL_OP_EXPANSION_MODE": "AIV",  # vector cores schedule the reductions
        "HCCL_OP_BASE_FFTS_MODE_ENABLE": "1",
        "TASK_QUEUE_ENABLE": "2",
    },
}
# What `whorl bench collectives` tries, one change at a time.
COLLECTIVE_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {},
    "cuda": {
        "NCCL_NVLS_ENABLE": ("1",),
        "NCCL_PROTO": ("LL", "LL128", "Simple"),
        "NCCL_MIN_NCHANNELS": ("8", "16"),
        "NCCL_GRAPH_MIXING_SUPPORT": ("0",),
        "NCCL_CUMEM_ENABLE": ("0",),
    },
    "npu": {
        "HCCL_WHITELIST_DISABLE": ("0",),
        "HCCL_ALGO": ("level0:fullmesh", "level0:doublering"),
        "HCCL_BUFFSIZE": ("100", "400"),
        "HCCL_OP_EXPANSION_MODE": ("HOST",),
        "HCCL_OP_BASE_FFTS_MODE_ENABLE": ("0",),
        "TASK_QUEUE_ENABLE": ("0", "1"),
    },
}


def is_interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter: on any device, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True, slots=True)
class Backend:
    """Where implementations of operators come from, and where they run."""

    home: str  # the type of device that it is written for
    missing: Callable[[], str | None]  # None, or why this machine does not have it
    priority: int = 0  # of several that take a call the highest is chosen, of equals the one registered first


def _from_package(package: str) -> Callable[[], str | None]:
    return lambda: None if is_installed(package) else f"{package} is not installed"


# torch_cuda is torch's own kernels, where they are no reference.
BACKENDS: dict[str, Backend] = {
    "torch_cuda": Backend("cuda", _from_package("torch")),
    "triton": Backend("cuda", _from_package("triton")),
    "torch_npu": Backend("npu", _from_package("torch_npu")),
}


def register_backend(
    name: str,
    *,
    device: str,
    package: str = "",
    missing: Callable[[], str | None] | None = None,
    priority: int = 0,
) -> None:
    """Make a backend known, so that operators take implementations of that name: `rms_norm.impl(name, ...)`.

    device: the type of device that it is at home on, as torch names it. It is here when `package` (default: `name`)
    is installed, or as `missing` says: None, or the reason it is not. priority: whorl's own have 0; a higher one is
    tried before them, a lower one after.
    """
    if not name.isidentifier() or not device.isidentifier():
        raise ValueError(f"backend {name!r} on device {device!r}: both must be plain names, such as 'triton' and 'xpu'")
    if name == REFERENCE or name in BACKENDS:
        known = ", ".join([REFERENCE, *BACKENDS])
        raise ValueError(f"backend {name!r} is registered already; there are {known}: choose another name")
    if package and missing is not None:
        raise ValueError(f"backend {name!r}: give `package` or `missing`, not both")
    BACKENDS[name] = Backend(device, missing or _from_package(package or name), priority)
    default_device.cache_clear()


@functools.cache
def load_backends() -> None:
    """Call what installed packages offer under the entry point group `whorl.backends`, once: they register backends.

    Called when a device or a backend is chosen, never by an import of whorl.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group="whorl.backends"):
        try:
            entry.load()()
        except Exception as error:
            raise RuntimeError(
                f"the backend {entry.name!r} ({entry.value}) cannot be registered: {error}. Mend its package or "
                "uninstall it"
            ) from error


def unavailable(backend: str, device: str, *, asked: bool = False) -> str | None:
    """None when `backend` can run on tensors of `device`, else the reason it cannot.

    The interpreter is offered only when the backend was asked for by name.
    """
    if backend == REFERENCE:
        return None
    known = BACKENDS[backend]
    reason = known.missing()
    if reason is not None or device == known.home:
        return reason
    if backend == "triton" and is_interpreting():
        return None if asked else "interpreted Triton runs only when asked for"
    return f"runs on {known.home}, got {device}"


def devices() -> tuple[str, ...]:
    """The CPU and every device that a backend is at home on."""
    load_backends()
    return tuple(dict.fromkeys((HOST, *(backend.home for backend in BACKENDS.values()))))


def accelerator(device: str) -> ModuleType | None:
    """torch.cuda or torch.npu, or None for the CPU."""
    return None if device == HOST else getattr(torch, device, None)


@functools.cache
def default_device() -> str:
    """The best device of this machine."""
    for device in devices():
        module = accelerator(device)
        if module is not None and module.is_available():
            return device
    return HOST


def require(device: str) -> str:
    """`device` itself, or a ValueError that says what this machine has."""
    if device not in devices():
        raise ValueError(f"device {device!r} is not one of {', '.join(devices())}")
    module = accelerator(device)
    if device != "cpu" and (module is None or not module.is_available()):
        raise ValueError(f"device {device!r} was asked for; this machine has {default_device()!r} only")
    return device


def device_count(device: str) -> int | None:
    """How many of them this machine has; None for the CPU, which any number of ranks share."""
    module = accelerator(device)
    return None if module is None else int(module.device_count())


def use_device(device: str, index: int) -> None:
    """Make `device` without a number mean this one, in this thread."""
    module = accelerator(device)
    if module is not None:
        module.set_device(index)


def numbered(device: torch.device) -> torch.device:
    """The device with its number: some libraries take "cuda" for the first and not for the current one."""
    module = accelerator(device.type)
    if module is None or device.index is not None:
        return device
    return torch.device(device.type, module.current_device())


def collective_backend(device: str) -> str:
    """For torch.distributed: tensors of the host travel by gloo, those of the device by its own library."""
    host = f"{HOST}:{COLLECTIVES[HOST]}"
    return host if device == HOST else f"{host},{device}:{COLLECTIVES[device]}"


def tune_collectives(device: str) -> dict[str, str]:
    """Set what `device`'s collectives run better with, unless the user has; what was set."""
    missing = {name: value for name, value in COLLECTIVE_SETTINGS[device].items() if name not in os.environ}
    os.environ.update(missing)
    return missing


@functools.cache
def overlaps_kernels(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended: NVIDIA's from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def synchronize(device: str) -> None:
    module = accelerator(device)
    if module is not None:
        module.synchronize()


def empty_cache(device: str) -> None:
    """Give memory that nobody uses back to the driver."""
    module = accelerator(device)
    if module is not None:
        module.empty_cache()


def fp64_home(device: str) -> str:
    """Where fp64 arithmetic is done for tensors of `device`: Ascend leaves most of it to the host."""
    return HOST if device == "npu" else device


def timing_event(device: str) -> Any:
    """An event to record in the stream of an accelerator; two of them give the milliseconds between."""
    module = accelerator(device)
    assert module is not None, "the CPU has no streams"
    return module.Event(enable_timing=True)


def block_size(device: str) -> int:
    """Tokens of a cache block on `device`, where nobody asks for another number."""
    at_home = (size for backend, size in BLOCK_SIZES.items() if unavailable(backend, device) is None)
    return next(at_home, BLOCK_SIZE)


def has_two_latent_caches(device: str) -> bool:
    """Whether the cache of latent attention on `device` has the channels that turn in a tensor of their own."""
    return any(unavailable(backend, device) is None for backend in TWO_LATENT_CACHES)


def use_graphs(device: str, asked: bool | None) -> bool:
    """Whether launches on `device` are to be recorded as graphs and replayed; None: where they can be."""
    reason = NO_GRAPHS.get(device)
    if asked and reason is not None:
        raise ValueError(f"use_graphs was asked for: {device} records no graphs: {reason}. Leave use_graphs out")
    return asked is not False and reason is None


def record_graph(device: str, function: Callable[[], Any], *, pool: Any = None) -> Callable[[], None] | None:
    """The replay of everything `function` launches, or None where the device records no graphs (`use_graphs`).

    pool: memory that several graphs share (`graph_pool`); what one of them returned holds until the next is replayed.
    """
    module = accelerator(device)
    if module is None or device in NO_GRAPHS:
        return None
    graph = module.CUDAGraph()
    with module.graph(graph, pool=pool):
        function()
    return graph.replay  # type: ignore[no-any-return]


_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """A step whose kernels may read ahead of those before them: none of them writes weights, and what the step says of
    its sequences is written before its first layer."""
    token = _is_ahead.set(True)
    try:
        yield
    finally:
        _is_ahead.reset(token)


def is_ahead() -> bool:
    """Whether the kernels launched now are such a step's."""
    return _is_ahead.get()


def is_recording(device: str) -> bool:
    """Whether launches are being recorded as a graph: the host must not wait for a result now."""
    module = accelerator(device)
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def graph_pool(device: str) -> Any:
    module = accelerator(device)
    return None if module is None or device in NO_GRAPHS else module.graph_pool_handle()


def event(device: str) -> Callable[[], None]:
    """A mark in the device's stream: the function returns when everything launched before it is done."""
    module = accelerator(device)
    if module is None:
        return lambda: None
    mark = module.Event()
    mark.record()
    return mark.synchronize


class Reached:
    """The mark of work that is done already."""

    def synchronize(self) -> None: ...


class Lane:
    """Work that a device does in order, beside its other lanes: a stream; on the CPU `run` returns when it is done.

    beside: a lane of its own; else the one that the caller works in.
    """

    def __init__(self, device: str, *, beside: bool = True) -> None:
        self.module = accelerator(device)
        self.stream = self.module.Stream() if self.module is not None and beside else None

    def run(self, work: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        """Do `work` after the marks of other lanes; the mark of its end, whose `synchronize` makes the host wait."""
        if self.module is None:
            work()
            return Reached()
        stream = self.stream or self.module.current_stream()
        for mark in after:
            if not isinstance(mark, Reached):
                stream.wait_event(mark)
        with self.module.stream(stream):
            work()
        mark = self.module.Event()
        mark.record(stream)
        return mark

    def uses(self, x: torch.Tensor) -> None:
        """Memory of `x`, which another lane allocated, is not used again before this lane is done with it."""
        if self.stream is not None:
            x.record_stream(self.stream)


def host_buffer(num_bytes: int, device: str) -> torch.Tensor:
    """Bytes on the host that copies to and from an accelerator need not wait for."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=HOST, pin_memory=accelerator(device) is not None)


def lasting(x: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of the host that may be dropped as soon as a copy of it to `device` has been started.

    CUDA copies memory that is not pinned aside before it returns. torch_npu's queue reads it later, and keeps pinned
    memory for as long.
    """
    return x.pin_memory() if device == "npu" else x


def device_name(device: str) -> str:
    module = accelerator(device)
    return platform.processor() or platform.machine() if module is None else str(module.get_device_name())


# Variables that make a library choose other kernels.
_STEERING = (
    *("ATEN_", "CUBLAS", "DISABLE_ADDMM", "DNNL_", "MKL_", "NVIDIA_TF32", "ONEDNN_", "OPENBLAS_", "PYTORCH_TUNABLEOP"),
    *("TORCH_ALLOW_TF32", "TORCH_BLAS", "TRITON_DEFAULT", "TRITON_INTERPRET", "TRITON_OVERRIDE"),
)
CACHE_FOLDER = "WHORL_CACHE_DIR"


def cache_folder() -> Path | None:
    """Where whorl keeps what it would otherwise find out at every start; None: nowhere.

    WHORL_CACHE_DIR, which may be empty: then nothing is kept; else whorl in XDG_CACHE_HOME or in ~/.cache.
    """
    if (given := os.environ.get(CACHE_FOLDER)) is not None:
        return Path(given).expanduser() if given else None
    above = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(above) if above else Path.home() / ".cache") / "whorl"
    except RuntimeError:  # a user without a home
        return None


def arithmetic_of(device: str) -> dict[str, str] | None:
    """All that decides which kernel a library takes for a product, and its bits; None where that is not known."""
    found = {
        "device": _cpu_name() if device == HOST else device_name(device),
        "torch": torch.__version__,
        "built": hashlib.sha256(torch.__config__.show().encode()).hexdigest(),
        "precision": torch.get_float32_matmul_precision(),
        "environment": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_STEERING)),
    }
    if device == HOST:
        found["capability"] = torch.backends.cpu.get_cpu_capability()
    else:
        found |= {"libraries": _libraries(), "driver": _driver(device)}
    return found if found["device"] else None


def _cpu_name() -> str:
    """With its instructions; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    names = [fields.get(name, "") for name in ("vendor_id", "model name", "cpu family", "model", "stepping")]
    features = fields.get("flags", fields.get("Features", ""))
    return f"{' '.join(names)} {hashlib.sha256(features.encode()).hexdigest()[:16]}" if features else ""


def _libraries() -> str:
    """Of products and kernels, with their versions, where they come as packages."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in ("nvidia-cublas", *(f"nvidia-cublas-cu{n}" for n in (11, 12, 13)), "triton", "torch-npu"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name}={version(name)}")
    return " ".join(found)


def _driver(device: str) -> str:
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    return f"{driver} {getattr(torch.version, device, None)}"


def versions() -> dict[str, str]:
    """Versions that matter in a bug report."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "triton", "torch_npu", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, counted in multiprocessors or vector cores; 4 where there is no such thing."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's number for a generation of chips, (9, 0) being Hopper; (0, 0) where there is no such thing."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
