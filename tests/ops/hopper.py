"""Compile every Triton kernel for Hopper, without a GPU, exactly as the launchers launch it.

Run as a program without TRITON_INTERPRET. Launches are recorded instead of run: each operator is called with its
benchmark cases on the meta device, and what its launcher passes is compiled for sm_90. Prints one JSON row a kernel.
Names as arguments build those operators alone; --once builds each kernel once, not for every way it is launched.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from whorl.ops import _hopper, _overlap_triton

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
IN_FP32 = ("linear",)  # operators that models call in fp32, too
DESCRIBED = "tensordesc<{}{},{!r}>"  # how the JIT names the type of a block that the copy engine fetches
# Kernels with a constant that makes another kernel of them.
TWO_KERNELS = {"_write_kv_kernel": ("LARGEST", "of codes"), "_paged_scores_kernel": ("DECODES", "that decodes")}
TWO_KERNELS |= dict.fromkeys(("_decode_kernel", "_prompt_kernel"), ("CAPPED", "with a softcap"))
WIDE_HEADS = ("_masked_forward_kernel", "_masked_dq_kernel", "_masked_dkv_kernel")  # their tiles depend on channels
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "enable_fp_fusion", "maxnreg")


def record(launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]) -> None:
    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    JITFunction.run = run  # this process only records
    _overlap_triton.overlaps_kernels = lambda device: True  # as a Hopper GPU does


def name_of(kernel: JITFunction, kwargs: dict[str, Any]) -> str:
    if kernel.__name__ in WIDE_HEADS and kwargs["DV"] > 192:
        return f"{kernel.__name__} of wide heads"
    constant, which = TWO_KERNELS.get(kernel.__name__, ("", ""))
    return f"{kernel.__name__} {which}" if kwargs.get(constant) else kernel.__name__


def build(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_quick: bool = False
) -> dict[str, Any]:
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        parameter = kernel.params[i]
        value = values.get(name, parameter.default)
        if parameter.is_constexpr:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[name] = DESCRIBED.format(POINTERS[value.base.dtype][1:], value.block_shape, value.layout)
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[(i,)] = "constexpr", value  # as the JIT makes constants of these
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
            is_free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if isinstance(value, int) and value % 16 == 0 and not is_free:
                attributes[(i,)] = [["tt.divisibility", 16]]
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, signature, constants, attributes)
    options = {k: kwargs[k] for k in OPTIONS if k in kwargs}
    return inspect(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), is_quick=is_quick)


WIDE = r"(?:\.\w+)*\.(?:v2\.\w64|v4\.\w32|v8\.\w16)\b"  # 16 bytes in PTX
WIDE_LOADS = rf"\bld\.global{WIDE}|\bcp\.async\.c[ag]\.shared\.global .*0x10\b|\bcp\.async\.bulk\.tensor\b"


def permuted_products(ttgir: str) -> int:
    """Return how many products of a warp's instructions (mma.sync) take the columns of K in an order of their own.

    An instruction takes 32 bits of each operand next to each other: kWidth is 2 for 16-bit numbers. The compiler makes
    it larger where an operand comes from narrower codes, and then one instruction adds columns that are not next to
    each other.
    """
    operands = re.findall(r"x(bf16|f16), #ttg\.dot_op<\{opIdx = \d+, parent = #\w+, kWidth = (\d+)\}>", ttgir)
    return sum(width != "2" for _, width in operands) if "tt.dot " in ttgir else 0


def inspect(compiled: Any, *, is_quick: bool = False) -> dict[str, Any]:
    """What a kernel uses. Its machine code takes a second to read: where PTX says it all, quick tests do not ask."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, ptx = _dump("--dump-resource-usage", file.name), compiled.asm["ptx"]
        numbers = dict(part.split(":", 1) for part in usage.split() if part.count(":") == 1)
        row = {
            "registers": int(numbers["REG"]),
            "stack": int(numbers["STACK"]),
            "spills": 0,  # without a stack there is none
            "wide_loads": len(re.findall(WIDE_LOADS, ptx)),
            "wide_stores": len(re.findall(rf"\bst\.global{WIDE}", ptx)),
            "tensor_core_products": ptx.count("wgmma.mma_async"),
            "warp_products": ptx.count("mma.sync"),
            "permuted": permuted_products(compiled.asm["ttgir"]),
            "shared": compiled.metadata.shared,
        }
        if is_quick and not row["stack"] and row["wide_loads"] and row["wide_stores"]:
            return row
        sass = _dump("--dump-sass", file.name)
    return row | {
        "spills": sass.count("LDL") + sass.count("STL"),
        # .EF, .BYPASS: hints; UTMALDG: the copy engine
        "wide_loads": len(re.findall(r"\bLDG(?:STS)?\.E(?:\.\w+)*\.128\b|\bUTMALDG\b", sass)),
        "wide_stores": len(re.findall(r"\bSTG\.E(?:\.\w+)*\.128\b", sass)),
        "tensor_core_products": len(re.findall(r"\b[HIQ]GMMA\b", sass)),
    }


def _dump(what: str, name: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, name], capture_output=True, text=True, check=True).stdout


def update_moments() -> None:
    """Launch the optimizer's kernel, which is no operator, on a parameter of a layer."""
    from whorl.titan import moments_triton
    from whorl.titan.moments import FORMATS
    from whorl.titan.swap_update import Piece

    size = 1 << 25
    x = torch.empty(size, dtype=torch.bfloat16, device="meta")
    parts = [[torch.empty(size // n, dtype=d, device="meta") for d, n in f.parts(x.dtype)] for f in FORMATS["int8"]]
    step = torch.empty((), device="meta")
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    moments_triton.update(group, [Piece(x, x, step, parts, 0)], 1, 0)


def main() -> None:
    from whorl.ops import OPS

    launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []
    record(launches)
    rows, seen = [], set()
    is_once = "--once" in sys.argv
    operators = [OPS[name] for name in sys.argv[1:] if name != "--once"] or list(OPS.values())
    for op, chip in itertools.product(operators, ((0, 0), _hopper.HOPPER)):  # plain kernels, and those of one chip
        _hopper.compute_capability = lambda device, chip=chip: chip
        dtypes = (torch.bfloat16, torch.float32) if op.name in IN_FP32 else (torch.bfloat16,)
        for case, dtype in itertools.product(op.bench_cases if "triton" in op.impls else (), dtypes):
            values = op._bind((), op.make(**case, dtype=dtype, device="meta"))
            launches.clear()
            op.impls["triton"].function(**values)
            for kernel, args, kwargs in launches:
                ones = [i for i, value in enumerate(args) if isinstance(value, int) and value == 1]
                # Two that are as good as kernels of their own.
                codes = [value.dtype for value in args if isinstance(value, torch.Tensor) and value.itemsize == 1]
                once = (name_of(kernel, kwargs), kwargs.get("HAS_LSE"), str(codes))
                key = once if is_once else (name_of(kernel, kwargs), str(kwargs), str(ones), str(codes))
                if key not in seen:  # operators and sizes share kernels
                    seen.add(key)
                    built = build(kernel, args, kwargs, is_quick=is_once)
                    rows.append({"op": op.name, "case": str(case), "kernel": key[0], **built})
    if len(operators) == len(OPS):
        launches.clear()
        update_moments()
        rows += [{"op": "adamw", "case": "", "kernel": k.__name__, **build(k, a, b)} for k, a, b in launches]
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
