"""The shared library of CPU kernels: which one is loaded, and the structures that describe tensors to it."""

import ctypes
import functools
import os
import platform
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from whorl.device import HOST, register_backend

from .build import FOLDER, NAME, sources_digest

BACKEND = "cpp"
VARIANT = "WHORL_CPU_KERNELS"  # environment variable: the instruction set to use; "none": no library
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class Packing(Structure):
    """How the values of packed weights are stored: see kernels.h."""

    _fields_ = (("bits", c_int32), ("scales", c_int32), ("has_minima", c_int32), ("zero", c_int32))


class Segment(Structure):
    _fields_ = (("data", c_void_p), ("rows", c_int64), ("column", c_int64), ("packing", Packing))


class Matrix(Structure):
    _fields_ = (("segments", POINTER(Segment)), ("count", c_int64), ("columns", c_int64), ("planes", c_int32))


class Plain(Structure):
    _fields_ = (("data", c_void_p), ("rows", c_int64), ("columns", c_int64), ("stride", c_int64), ("type", c_int32))


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_float), ("plus_one", c_int32))


class Rotation(Structure):
    _fields_ = (
        *(("table", c_void_p), ("size", c_int64), ("start", c_int64)),
        *(("reads_pairs", c_int32), ("writes_pairs", c_int32), ("inverse", c_int32)),
    )


class Cache(Structure):
    _fields_ = (
        *(("k", c_void_p), ("v", c_void_p)),
        *((f"{of}{dim}_stride", c_int64) for of in ("", "v_") for dim in ("block", "slot", "head")),
        *(("k_scale", c_void_p), ("v_scale", c_void_p), ("size", c_int64), ("type", c_int32), ("rounding", c_int32)),
    )


class Attention(Structure):
    _fields_ = (
        *(("q", c_void_p), ("q_token_stride", c_int64), ("q_head_stride", c_int64), ("cache", Cache)),
        *((name, c_void_p) for name in ("tables", "starts", "lengths")),
        *((name, c_int64) for name in ("table_stride", "num_sequences", "heads", "kv_heads", "dim", "window")),
        *(("scale", c_float), ("softcap", c_float), ("sinks", c_void_p)),
        *(("is_contiguous", c_int32), ("out", c_void_p), ("lse", c_void_p)),
    )


class Product(Structure):
    _fields_ = (("packed", POINTER(Matrix)), ("plain", POINTER(Plain)), ("bias", c_void_p))


class Stack(Structure):
    """A matrix for each expert: see kernels.h."""

    _fields_ = (("packed", c_void_p), ("first", Plain), ("bytes", c_int64), ("columns", c_int64))


class Routing(Structure):
    _fields_ = (
        *(("bias", c_void_p), ("experts", c_int64), ("choices", c_int64)),
        *(("is_sigmoid", c_int32), ("renormalizes", c_int32), ("scale", c_float)),
    )


class Mixture(Structure):
    _fields_ = (("router", Product), ("gate_up", Stack), ("down", Stack), ("routing", Routing))


class Layer(Structure):
    """A layer of a decoder: see kernels.h."""

    _fields_ = (
        *((f"{name}_norm", Norm) for name in ("attention", "q", "k", "mlp")),
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *(("mixture", POINTER(Mixture)), ("cache", Cache)),
        *((name, c_int64) for name in ("heads", "kv_heads", "dim", "window", "inner")),
        ("scale", c_float),
    )


# Arguments of the functions: p a pointer, i an int64, n an int32, f a float.
_FUNCTIONS = {
    "linear_packed": "ppiipip",
    "norm": "pppfniipppp" + "ip",
    "linear_plain": "ppiipip",
    "unpack": "ppip",
    "rope": "piiiiipp",
    "norm_rope": "piiiiippppipi",
    "write": "piipiiiiipp",
    "attention": "p",
    "glu": "ppiiiinp",
    "experts": "ppipiippp",
    "route": "pippp",
    "log_softmax": "piip",
    "layers": "pipppppiip",
    "pack": "npiip",
    "set_threads": "n",
    "trim": "",
}
_CODES = {"p": c_void_p, "i": c_int64, "n": c_int32, "f": c_float}


def _problem(library: ctypes.CDLL) -> str | None:
    """Return why a library that could be loaded is not used."""
    library.whorl_cpu_sources.restype = ctypes.c_char_p
    if library.whorl_cpu_sources().decode() != sources_digest():
        return "the library was built from other sources"
    name = os.environ.get(VARIANT, "")
    if not library.whorl_cpu_choose(name.encode()):
        return f"{VARIANT} is {name!r}, which this {platform.machine()} does not run"
    return None


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, or why there is none."""
    if os.environ.get(VARIANT) == "none":
        return None, f"switched off by {VARIANT}"
    paths = sorted(FOLDER.glob(f"{NAME}*.so"))
    if not paths:
        return None, "the library is not built"
    try:
        library = ctypes.CDLL(str(paths[-1]))
    except OSError as error:
        return None, f"the library cannot be loaded: {error}"
    if (problem := _problem(library)) is not None:
        return None, problem
    for name, codes in _FUNCTIONS.items():
        function = getattr(library, f"whorl_cpu_{name}")
        function.argtypes, function.restype = [_CODES[code] for code in codes], None
    library.whorl_cpu_variant.restype = ctypes.c_char_p
    library.whorl_cpu_panel_bytes.restype = c_int64
    library.whorl_cpu_panel_bytes.argtypes = [c_int32, c_int32, c_int32, c_int64]
    return library, None


def missing() -> str | None:
    """Return None, or why this machine has no library of CPU kernels."""
    return _loaded()[1]


def kernels_digest() -> str:
    """Return a digest of the kernels that run; "" where torch computes. Variants have the same bits."""
    return sources_digest() if missing() is None else ""


def describe() -> str:
    """Return a line that says which kernels run, or why none do and what to do."""
    if (reason := missing()) is None:
        return f"CPU kernels: {variant()}, {torch.get_num_threads()} threads"
    repair = f"install a C++ compiler, such as g++, and run: python {FOLDER / 'build.py'}"
    return f"CPU kernels: none, so that torch computes, several times as long: {reason}; {repair}"


def variant() -> str | None:
    """Return the instruction set that is used; None without a library."""
    library = _loaded()[0]
    return None if library is None else library.whorl_cpu_variant().decode()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library. Raises RuntimeError where there is none."""
    loaded = _loaded()[0]
    if loaded is None:
        raise RuntimeError(describe())
    return loaded


_threads = 0


def use_threads() -> None:
    """Let the library use as many threads as torch does: OMP_NUM_THREADS, or what `torch.set_num_threads` said."""
    global _threads
    if (count := torch.get_num_threads()) != _threads:
        library().whorl_cpu_set_threads(count)
        _threads = count


def has_kernels(x: Tensor) -> bool:
    """Return whether the library computes with this tensor, outside of training."""
    return x.device.type == HOST and x.dtype == torch.float32 and missing() is None and not torch.is_grad_enabled()


def plain(x: Tensor) -> Tensor:
    """Return x in fp32, with its last dim contiguous."""
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def address(x: Tensor | None) -> int | None:
    """Return where a tensor begins; None: there is no tensor."""
    return None if x is None else x.data_ptr()


register_backend(BACKEND, device=HOST, missing=missing)
