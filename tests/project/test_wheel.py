"""The wheel: what is in it, and that it works in an environment that has nothing else of ours."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from package_index import clean_environment, pip

from whorl import __version__

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(folder), ".", cwd=ROOT)
    (path,) = folder.glob("whorl_llm-*-py3-none-linux_*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a new environment with the wheel and its extra for the engine."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    pip(folder / "bin" / "python", "install", f"{wheel}[engine]")
    return folder / "bin"


def run(command: Path, *words: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = clean_environment() | {"HF_HUB_OFFLINE": "1", "HOME": str(cwd)}
    return subprocess.run(
        [str(command), *words], cwd=cwd, env=env, input=stdin, capture_output=True, text=True, timeout=300
    )


def test_it_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        points = archive.read(f"whorl_llm-{__version__}.dist-info/entry_points.txt").decode()
    kept = {".py", ".json", ".toml", ".yaml", ".html", ".typed"}
    files = subprocess.run(["git", "ls-files", "whorl"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {name for name in files.splitlines() if Path(name).suffix in kept}
    assert expected <= packed, f"the wheel lacks {sorted(expected - packed)}"
    assert all(name.startswith(("whorl/", "whorl_llm-")) for name in packed)
    assert "whorl = whorl.__main__:main" in points
    assert any(name.startswith("whorl/ops/cpu/_library") for name in packed) == (shutil.which("c++") is not None)


def test_it_works_without_what_developers_have(installed: Path, tmp_path: Path) -> None:
    for module in ("pytest", "transformers", "fastapi", "ruff"):
        assert run(installed / "python", "-c", f"import {module}", cwd=tmp_path).returncode != 0
    assert run(installed / "whorl", "--version", cwd=tmp_path).stdout == f"whorl {__version__}\n"
    doctor = run(installed / "whorl", "doctor", str(ROOT / "examples" / "qwen3_vl_rope_branch"), cwd=tmp_path)
    assert (doctor.returncode, "rope-branch-mismatch" in doctor.stdout) == (1, True), doctor.stderr
    ops = run(installed / "whorl", "ops", cwd=tmp_path)
    assert (ops.returncode, "rope" in ops.stdout) == (0, True), ops.stderr
    assert ("CPU kernels: none" in ops.stdout) == (shutil.which("c++") is None)


def test_a_chat_needs_no_more(installed: Path, tmp_path: Path) -> None:
    from whorl.engine.weights.hub import resolve

    question = "What is the capital of France?"
    chat = run(installed / "whorl", "generate", str(resolve()), "--chat", "--prompt", question, cwd=tmp_path)
    assert (chat.returncode, "Paris" in chat.stdout) == (0, True), chat.stdout + chat.stderr
    talk = run(
        installed / "whorl",
        "chat",
        str(resolve()),
        "--temperature",
        "0",
        cwd=tmp_path,
        stdin=f"{question}\n/exit\n",
    )
    assert (talk.returncode, "Paris" in talk.stdout) == (0, True), talk.stdout + talk.stderr


def test_a_server_says_what_it_needs(installed: Path, wheel: Path, tmp_path: Path) -> None:
    """Without the extra for the server: the command to install it from the same wheel, not a traceback."""
    serve = run(installed / "whorl", "serve", cwd=tmp_path)
    assert serve.returncode != 0
    assert f"pip install '{wheel}[serve]'" in serve.stderr
    assert "Traceback" not in serve.stderr
