"""The only file that names cuda, npu or cpu: the devices and backends of this machine, their streams and events."""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HOST = "cpu"
REFERENCE = "torch"  # the backend that every operator has on every device
# Devices that record no graphs of launches, with the reason.
NO_GRAPHS = {
    "cpu": "it has no launches to save",
    "npu": "its attention takes the lengths of sequences as host integers, and a replay would reuse the recorded ones",
}
# Tokens in a block of the KV cache. It is small, since every sequence leaves half a block empty on average, unless the
# attention of the device's backend needs more: npu_fused_infer_attention_score takes multiples of 128 where a sequence
# has several queries, as in prompts and drafts.
BLOCK_SIZE = 16
BLOCK_SIZES = {"torch_npu": 128}
# Backends whose attention takes the latent and the rotary channels of a cached token as two tensors.
TWO_LATENT_CACHES = ("torch_npu",)
COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # the library of collectives

# Environment variables that make several ranks faster. They are set before the library starts, unless the user has set
# them. Users report that those of HCCL and the task queue took Qwen3-235B on 16 Ascend 910 from 12 to 23 tokens a
# second; nobody has measured that with whorl. NCCL only moves bytes here, since whorl sums in rank order: its in-switch
# reductions (NVLS) would reserve memory for nothing.
COLLECTIVE_SETTINGS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {"NCCL_NVLS_ENABLE": "0"},
    "npu": {
        "HCCL_WHITELIST_DISABLE": "1",
        "HCCL_ALGO": "level0:ring",  # with level0:fullmesh the generated text was garbage
        "HCCL_BUFFSIZE": "200",  # MB; 100 and 400 were slower
        "HCCL_OP_EXPANSION_MODE": "AIV",  # vector cores run the reductions
        "HCCL_OP_BASE_FFTS_MODE_ENABLE": "1",
        "TASK_QUEUE_ENABLE": "2",
    },
}
# Values that `python -m bench.collectives` tries, one change at a time.
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
    """Return whether Triton kernels run in Triton's interpreter, which is slow and runs on any device, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True, slots=True)
class Backend:
    """A source of operator implementations, and the device they run on."""

    home: str  # the device type that its kernels are written for
    missing: Callable[[], str | None]  # returns None, or why this machine does not have the backend
    priority: int = 0  # among backends that accept a call the highest wins, among equals the first registered


def _from_package(package: str) -> Callable[[], str | None]:
    return lambda: None if is_installed(package) else f"{package} is not installed"


# torch_cuda: kernels of torch that an operator uses as an implementation, not as its reference.
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
    """Register a backend, so that operators accept implementations under its name.

    device: the torch device type that its kernels run on. The backend is available when `package` (default: `name`) is
    installed, or when `missing()` returns None; otherwise `missing()` returns the reason. priority: whorl's backends
    have 0; higher ones are tried before them, lower ones after. Raises ValueError when the name is taken or not an
    identifier, or when both `package` and `missing` are given. Example::

        register_backend("ember", device="xpu", package="ember_kernels")
        rms_norm.impl("ember", "ember_kernels.norms:rms_norm")  # imported when it is first chosen
        glu.impl("ember")(ember_glu)  # a function
    """
    if not name.isidentifier() or not device.isidentifier():
        raise ValueError(f"backend {name!r} on device {device!r}: both must be identifiers, such as 'triton' and 'xpu'")
    if name == REFERENCE or name in BACKENDS:
        known = ", ".join([REFERENCE, *BACKENDS])
        raise ValueError(f"backend {name!r} is registered already, as are {known}; choose another name")
    if package and missing is not None:
        raise ValueError(f"backend {name!r}: give only one of `package` and `missing`")
    BACKENDS[name] = Backend(device, missing or _from_package(package or name), priority)
    default_device.cache_clear()


@functools.cache
def load_backends() -> None:
    """Let installed packages register their backends: call each entry point of the group `whorl.backends`, once.

    This runs when a device or a backend is chosen, never on import of whorl.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group="whorl.backends"):
        try:
            entry.load()()
        except Exception as error:
            raise RuntimeError(
                f"the backend {entry.name!r} ({entry.value}) cannot be registered: {error}. Repair its package or "
                "uninstall it"
            ) from error


def unavailable(backend: str, device: str, *, by_name: bool = False) -> str | None:
    """Return None when `backend` can run on tensors of `device`, else the reason it cannot.

    by_name: the caller named this backend. Only then may Triton's interpreter run.
    """
    if backend == REFERENCE:
        return None
    known = BACKENDS[backend]
    reason = known.missing()
    if reason is not None or device == known.home:
        return reason
    if backend == "triton" and is_interpreting():
        return None if by_name else "interpreted Triton runs only when the backend is named"
    return f"runs on {known.home}, got {device}"


def devices() -> tuple[str, ...]:
    """Return the CPU and the device type of every backend."""
    load_backends()
    return tuple(dict.fromkeys((HOST, *(backend.home for backend in BACKENDS.values()))))


def accelerator(device: str) -> ModuleType | None:
    """Return torch.cuda or torch.npu; None for the CPU."""
    return None if device == HOST else getattr(torch, device, None)


@functools.cache
def default_device() -> str:
    """Return the best device type of this machine: an accelerator where there is one."""
    for device in devices():
        module = accelerator(device)
        if module is not None and module.is_available():
            return device
    return HOST


def require(device: str) -> str:
    """Return `device`; raises ValueError when this machine does not have it."""
    if device not in devices():
        raise ValueError(f"device {device!r} is not one of {', '.join(devices())}")
    module = accelerator(device)
    if device != "cpu" and (module is None or not module.is_available()):
        raise ValueError(f"device {device!r} is not available; this machine has only {default_device()!r}")
    return device


def device_count(device: str) -> int | None:
    """Return the number of these devices on this machine; None for the CPU, which any number of ranks share."""
    module = accelerator(device)
    return None if module is None else int(module.device_count())


def use_device(device: str, index: int) -> None:
    """Make the device with this index the current one of this thread."""
    module = accelerator(device)
    if module is not None:
        module.set_device(index)


def numbered(device: torch.device) -> torch.device:
    """Return the device with its index: some libraries read "cuda" as the first device, not the current one."""
    module = accelerator(device.type)
    if module is None or device.index is not None:
        return device
    return torch.device(device.type, module.current_device())


def collective_backend(device: str) -> str:
    """Return the backend string for torch.distributed: gloo for host tensors, NCCL or HCCL for those of the device."""
    host = f"{HOST}:{COLLECTIVES[HOST]}"
    return host if device == HOST else f"{host},{device}:{COLLECTIVES[device]}"


def tune_collectives(device: str) -> dict[str, str]:
    """Set the `COLLECTIVE_SETTINGS` of `device` that the user has not set; returns those that were set."""
    missing = {name: value for name, value in COLLECTIVE_SETTINGS[device].items() if name not in os.environ}
    os.environ.update(missing)
    return missing


@functools.cache
def overlaps_kernels(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one has ended (PDL): on NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def synchronize(device: str) -> None:
    """Wait until all work on `device` is done."""
    if (module := accelerator(device)) is not None:
        module.synchronize()


def empty_cache(device: str) -> None:
    """Return cached memory that is not in use to the driver."""
    if (module := accelerator(device)) is not None:
        module.empty_cache()


def fp64_home(device: str) -> str:
    """Return the device for fp64 arithmetic on tensors of `device`: the host for Ascend, which lacks most of it."""
    return HOST if device == "npu" else device


def timing_event(device: str) -> Any:
    """Return a timing event of an accelerator; two recorded ones give the milliseconds between them."""
    module = accelerator(device)
    assert module is not None, "the CPU has no streams"
    return module.Event(enable_timing=True)


def block_size(device: str) -> int:
    """Return the default number of tokens in a cache block on `device`."""
    sizes = (size for backend, size in BLOCK_SIZES.items() if unavailable(backend, device) is None)
    return next(sizes, BLOCK_SIZE)


def has_two_latent_caches(device: str) -> bool:
    """Return whether the cache of latent attention on `device` stores the rotary channels in a separate tensor."""
    return any(unavailable(backend, device) is None for backend in TWO_LATENT_CACHES)


def has_one_arithmetic(device: str) -> bool:
    """Return whether the bits of a row do not depend on the rows beside it. Ascend's operators do not promise it."""
    return not device.startswith("npu")


def use_graphs(device: str, requested: bool | None) -> bool:
    """Return whether to record launches on `device` as graphs and replay them.

    requested: True, False, or None to do so where the device can. Raises ValueError when True is not possible.
    """
    reason = NO_GRAPHS.get(device)
    if requested and reason is not None:
        raise ValueError(f"use_graphs is True, but {device} records no graphs: {reason}. Leave use_graphs out")
    return requested is not False and reason is None


def record_graph(device: str, function: Callable[[], Any], *, pool: Any = None) -> Callable[[], None] | None:
    """Record everything that `function` launches and return the replay; None where the device records no graphs.

    pool: memory that several graphs share (`graph_pool`); the outputs of one are valid until the next is replayed.
    """
    module = accelerator(device)
    if module is None or device in NO_GRAPHS:
        return None
    graph, stream = module.CUDAGraph(), module.current_stream()
    # On the current stream, if it can be recorded (see streams.py): else the module takes another one.
    with module.graph(graph, pool=pool, stream=None if stream == module.default_stream() else stream):
        function()
    return graph.replay  # type: ignore[no-any-return]


_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Let kernels launched inside load their inputs before the previous kernel has ended (PDL).

    The engine records decode steps in it. This is safe because no kernel of a step writes weights, and the inputs that
    describe its sequences (block tables, lengths) are written before its first layer.
    """
    token = _is_ahead.set(True)
    try:
        yield
    finally:
        _is_ahead.reset(token)


def is_ahead() -> bool:
    """Return whether the kernels launched now belong to a step inside `ahead`."""
    return _is_ahead.get()


def is_recording(device: str) -> bool:
    """Return whether launches are being recorded as a graph, when the host must not wait for a result."""
    module = accelerator(device)
    is_capturing = getattr(module, "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())


def graph_pool(device: str) -> Any:
    """Return a memory pool that graphs can share; None where the device records no graphs."""
    module = accelerator(device)
    return None if module is None or device in NO_GRAPHS else module.graph_pool_handle()


def host_buffer(num_bytes: int, device: str) -> torch.Tensor:
    """Return zeroed host bytes, pinned so that copies to and from an accelerator are asynchronous."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=HOST, pin_memory=accelerator(device) is not None)


def lasting(x: torch.Tensor, device: str) -> torch.Tensor:
    """Return a host tensor that may be freed as soon as an asynchronous copy of it to `device` has been started.

    CUDA stages pageable memory before the copy call returns. torch_npu's queue reads it later, but keeps pinned memory
    alive until then, so there the tensor is pinned.
    """
    return x.pin_memory() if device == "npu" else x


def device_name(device: str) -> str:
    """Return the name of the device, such as that of the GPU."""
    module = accelerator(device)
    return platform.processor() or platform.machine() if module is None else str(module.get_device_name())


# Prefixes of environment variables that make a library choose other kernels.
_STEERING = (
    *("ATEN_", "CUBLAS", "DISABLE_ADDMM", "DNNL_", "MKL_", "NVIDIA_TF32", "ONEDNN_", "OPENBLAS_", "PYTORCH_TUNABLEOP"),
    *("TORCH_ALLOW_TF32", "TORCH_BLAS", "TRITON_DEFAULT", "TRITON_INTERPRET", "TRITON_OVERRIDE"),
)
CACHE_FOLDER = "WHORL_CACHE_DIR"


def cache_folder() -> Path | None:
    """Return the folder for results that whorl would otherwise compute at every start; None to store nothing.

    It is WHORL_CACHE_DIR, where an empty value means None; by default `whorl` in XDG_CACHE_HOME or in ~/.cache.
    """
    if (folder := os.environ.get(CACHE_FOLDER)) is not None:
        return Path(folder).expanduser() if folder else None
    above = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(above) if above else Path.home() / ".cache") / "whorl"
    except RuntimeError:  # the user has no home directory
        return None


def arithmetic_of(device: str) -> dict[str, str] | None:
    """Return everything that decides which kernel a library picks for a matrix product, and so its bits.

    Trials that were stored by an earlier process are valid only where all of it is equal. None where the device cannot
    be identified: then nothing is stored.
    """
    identity = {
        "device": _cpu_name() if device == HOST else device_name(device),
        "torch": torch.__version__,
        "built": hashlib.sha256(torch.__config__.show().encode()).hexdigest(),
        "precision": torch.get_float32_matmul_precision(),
        "environment": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_STEERING)),
    }
    if device == HOST:
        identity["capability"] = torch.backends.cpu.get_cpu_capability()
    else:
        identity |= {"libraries": _libraries(), "driver": _driver(device)}
    return identity if identity["device"] else None


def _cpu_name() -> str:
    """Return the CPU model with a hash of its instruction sets; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    names = [fields.get(name, "") for name in ("vendor_id", "model name", "cpu family", "model", "stepping")]
    features = fields.get("flags", fields.get("Features", ""))
    return f"{' '.join(names)} {hashlib.sha256(features.encode()).hexdigest()[:16]}" if features else ""


def _libraries() -> str:
    """Return the versions of the installed packages that provide matrix products and kernels."""
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for name in ("nvidia-cublas", *(f"nvidia-cublas-cu{n}" for n in (11, 12, 13)), "triton", "torch-npu"):
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name}={version(name)}")
    return " ".join(versions)


def _driver(device: str) -> str:
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    return f"{driver} {getattr(torch.version, device, None)}"


def versions() -> dict[str, str]:
    """Return the versions that matter in a bug report."""
    from importlib.metadata import PackageNotFoundError, version

    installed = {"python": platform.python_version()}
    for package in ("torch", "triton", "torch_npu", "transformers"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of an NVIDIA GPU; 4 for other devices, as in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the CUDA compute capability, (9, 0) for Hopper; (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
