"""Build the shared library of CPU kernels: one object file for each instruction set, none of which is required.

It needs no torch and no header but the compiler's own. setup.py runs it when whorl is installed;
`python whorl/ops/cpu/build.py` builds the library in place, with the compiler that CXX names.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
NAME = "_library"  # of the built file, before the ending of the platform
# -ffp-contract=off: an fma is written where one is meant, or variants would not give the same bits.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno"]
FLAGS.append("-fno-trapping-math")
GCC_FLAGS = ["-fno-tree-reassoc"]  # else GCC reorders the integer additions of a block and runs out of registers
AVX2 = "-mavx2 -mfma -mf16c"
# By machine: the name of each variant and its flags. `plain` runs anywhere.
VARIANTS = {
    "x86_64": {
        "avx512": f"-DWHORL_AVX512 {AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni",
        "avx2": f"-DWHORL_AVX2 {AVX2}",
    },
    "aarch64": {"neon": "-DWHORL_NEON -march=armv8.2-a+dotprod+fp16"},
}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


def sources_digest() -> str:
    """Return a digest of the sources: a library that was built from others is not loaded."""
    digest = hashlib.sha256()
    for path in sorted((*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    target: Path,
    *,
    machine: str = "",
    compiler: Sequence[str] = (),
    flags: Sequence[str] = (),
    program: Path | None = None,
) -> None:
    """Compile the sources and link them to `target`.

    machine: what to build for, by default this one. compiler: its command; default: CXX, else c++. flags: more of them,
    such as sanitizers. program: a source file with a main function, which makes `target` a program.
    Raises RuntimeError with the compiler's message.
    """
    machine = machine or platform.machine()
    command = list(compiler) or shlex.split(os.environ.get("CXX", "c++"))
    own = GCC_FLAGS if "Free Software Foundation" in _run([*command, "--version"]) else []
    define = f'-DWHORL_SOURCES="{sources_digest()}"'
    units = {name: f"{name}.cpp" for name in ("library", "interleave", "pool")} | {"plain": "kernels.cpp"}
    units |= {} if program is None else {"program": str(program)}
    own_flags = {"library": [define], "plain": ["-DWHORL_VARIANT=plain"]}
    for name, variant in VARIANTS.get(MACHINES.get(machine, machine), {}).items():
        units[name], own_flags[name] = "kernels.cpp", [*variant.split(), f"-DWHORL_VARIANT={name}"]
    with tempfile.TemporaryDirectory() as folder:

        def compile_unit(name: str) -> str:
            out = str(Path(folder, f"{name}.o"))
            paths = "-I", str(FOLDER), "-c", str(FOLDER / units[name]), "-o", out
            _run([*command, *FLAGS, *own, *own_flags.get(name, []), *flags, *paths])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, units))
        linked = Path(folder, "linked")
        _run([*command, *(["-shared"] if program is None else []), *flags, *objects, "-o", str(linked), "-pthread"])
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file in place of the old one: processes that have loaded that one keep it.
        unfinished = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copy(linked, unfinished)
        unfinished.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}; install a C++ compiler, such as g++") from error
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        build(FOLDER / f"{NAME}.so")
    except RuntimeError as error:
        sys.exit(str(error))
