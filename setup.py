"""Build the library of CPU kernels with the package; everything else is in pyproject.toml.

Without a compiler the package is installed all the same: `whorl ops` says what is missing.
"""

import importlib.util
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Path(__file__).parent / "whorl" / "ops" / "cpu"


def _builder() -> Any:
    """Import build.py by its path: importing whorl would need torch."""
    spec = importlib.util.spec_from_file_location("build_kernels", KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Compiles each instruction set's kernels with flags of their own, which an Extension cannot state."""

    def build_extension(self, ext: Extension) -> None:
        try:
            _builder().build(Path(self.get_ext_fullpath(ext.name)))
        except RuntimeError as error:
            raise CompileError(str(error)) from error


class OfPlatform(bdist_wheel):
    """The library is loaded by ctypes: a wheel is for a platform, and for every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


sources = [str(path.relative_to(Path(__file__).parent)) for path in sorted(KERNELS.glob("*.cpp"))]
setup(
    ext_modules=[Extension("whorl.ops.cpu._library", sources, optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": OfPlatform},
)
