"""Build stand-ins for the CANN libraries, so that `import torch_npu` works with neither CANN nor an NPU.

usage: python cann_stub.py TORCH_NPU_PACKAGE OUT        (with the Python that has torch; needs gcc, nm and readelf)

OUT goes on LD_LIBRARY_PATH. Nothing computes: the few calls made while importing and while FakeTensors are built
succeed, every other entry point returns an error code. STUB_NPU_COUNT says how many devices there seem to be.
"""

import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ACL_ERROR = 100000  # ACL_ERROR_INVALID_PARAM: what an entry point without a body below returns

BODIES = {
    "aclrtGetDeviceCount": 'int F(unsigned *n) { char *s = getenv("STUB_NPU_COUNT"); *n = s ? atoi(s) : 0; return 0; }',
    "aclrtGetDevice": "int F(int *id) { *id = 0; return 0; }",
    "aclrtGetCurrentContext": "int F(void **context) { static int only; *context = &only; return 0; }",
    "aclrtGetSocName": 'const char *F(void) { return "Ascend910B1"; }',
    "aclGetRecentErrMsg": 'const char *F(void) { return "CANN stub"; }',
    "aclAppLog": "void F(void) {}",
}
SUCCEED = {
    "aclFinalize",
    "aclInit",
    "aclrtDestroyEvent",
    "aclrtDestroyStream",
    "aclrtResetDevice",
    "aclrtSetCurrentContext",
    "aclrtSetDevice",
    "aclrtSynchronizeStream",
}
NEW_HANDLE = {"aclrtCreateEventExWithFlag", "aclrtCreateStream", "aclrtCreateStreamWithConfig"}


def main(package: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    wheel = [*package.glob("_C*.so"), *package.glob("lib/*.so"), *package.glob("dynamo/torchair/core/*.so")]
    torch_lib = Path(str(importlib.util.find_spec("torch").origin)).parent / "lib"
    python_lib = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    system = _system_libraries([*wheel, Path(sys.executable)])
    present = [*torch_lib.glob("*.so*"), *python_lib.glob("libpython3*.so*"), Path(sys.executable), *wheel, *system]

    missing = _undefined(wheel) - _defined(present)
    source = out / "cann.c"
    source.write_text("\n".join(["#include <stdlib.h>", *(_definition(name) for name in sorted(missing))]) + "\n")
    libraries = sorted(_needed(wheel) - {path.name for path in present})
    # All symbols live in one library, the others only have to exist under their names.
    _compile(source, out / "libascendcl.so")
    empty = out / "empty.c"
    empty.write_text("typedef int empty;\n")
    for name in libraries:
        if name != "libascendcl.so":
            _compile(empty, out / name)
    print(f"{len(missing)} symbols, {len(libraries)} libraries: {' '.join(libraries)}")


def _definition(name: str) -> str:
    if name in BODIES:
        return re.sub(r"\bF\b", name, BODIES[name])
    if name in SUCCEED or name.startswith("Msprof"):
        return f"int {name}(void) {{ return 0; }}"
    if name in NEW_HANDLE:
        return f"int {name}(void **handle) {{ *handle = calloc(1, 64); return 0; }}"
    if name.startswith(("_ZTV", "_ZTI")):
        return f"void *{name}[64];"  # vtables and type information are data
    return f"long {name}(void) {{ return {ACL_ERROR}; }}"


def _undefined(libraries: Iterable[Path]) -> set[str]:
    lines = (line.split() for path in libraries for line in _output("nm", "-D", "--undefined-only", path))
    return {words[-1].split("@")[0] for words in lines if words[-2:-1] == ["U"]}


def _defined(libraries: Iterable[Path]) -> set[str]:
    lines = (line.split() for path in libraries for line in _output("nm", "-D", "--defined-only", path))
    return {words[-1].split("@")[0] for words in lines if words}


def _needed(libraries: Iterable[Path]) -> set[str]:
    text = "\n".join(line for path in libraries for line in _output("readelf", "-d", path))
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def _system_libraries(binaries: Iterable[Path]) -> list[Path]:
    text = "\n".join(line for path in binaries for line in _output("ldd", path))
    return [Path(path) for path in sorted(set(re.findall(r"(/\S+) \(0x", text)))]


def _compile(source: Path, library: Path) -> None:
    soname = f"-Wl,-soname,{library.name}"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, source, soname], check=True)


def _output(*command: object) -> list[str]:
    # nm says so and fails on a file without dynamic symbols: that file then offers none.
    return subprocess.run([str(c) for c in command], capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
