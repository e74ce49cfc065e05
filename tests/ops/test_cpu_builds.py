"""The CPU kernels as a program: the same digests from every variant, and nothing for sanitizers to find."""

import shutil
import subprocess
from pathlib import Path

import pytest

from whorl.ops.cpu import build

PROGRAM = Path(__file__).with_name("cpu_digest.cpp")
VARIANTS = ("avx512", "avx2", "neon", "plain")
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def digests(program: Path) -> dict[str, dict[str, str]]:
    """What the program prints: digests by what was computed, for each variant and number of threads."""
    done = subprocess.run([str(program), *VARIANTS], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    by_variant: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        variant, threads, *name, digest = line.split()
        by_variant.setdefault(f"{variant}, {threads} threads", {})[" ".join(name)] = digest
    return by_variant


def test_sanitizers_find_nothing_and_variants_agree(tmp_path: Path) -> None:
    build.build(tmp_path / "digest", flags=SANITIZERS, program=PROGRAM)
    by_variant = digests(tmp_path / "digest")
    plain = by_variant["plain, 1 threads"]
    assert len(plain) > 20
    for name, values in by_variant.items():
        assert values == plain, name


def test_the_digests_show_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain variant's fma is planted to round twice; the others have instructions of their own."""
    folder = shutil.copytree(build.FOLDER, tmp_path / "sources")
    lanes = folder / "lanes.h"
    once, twice = "fmaf(x.v[i], y.v[i], z.v[i])", "x.v[i] * y.v[i] + z.v[i]"
    assert once in lanes.read_text()
    lanes.write_text(lanes.read_text().replace(once, twice))
    monkeypatch.setattr(build, "FOLDER", folder)
    build.build(tmp_path / "digest", program=PROGRAM)
    by_variant = digests(tmp_path / "digest")
    if {name.split(",")[0] for name in by_variant} == {"plain"}:
        pytest.skip("this machine runs the plain variant only")
    assert len({tuple(values.values()) for values in by_variant.values()}) > 1


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no-such-compiler cannot be run.*install a C"):
        build.build(tmp_path / "library.so", compiler=["no-such-compiler"])


def test_a_compilers_message_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        build.build(tmp_path / "library.so", flags=["--no-such-flag"])
    assert not list(tmp_path.iterdir())
