"""A virtual environment for each program that whorl is tried with: their requirements contradict each other's."""

import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from package_index import clean_environment, pip

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "clients"
FOLDER = ROOT / ".cache" / "clients"
REQUIREMENTS = {
    "litellm": ("litellm==1.99.4",),
    "langchain-openai": ("langchain-openai==1.7.3",),
    "instructor": ("instructor==1.17.0",),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]==2.66.0",),
    "llm": ("llm==0.36",),
    "ollama": ("ollama==0.6.3",),
    "llama-cpp": ("xllamacpp==2026.10.11549",),
    "lm-eval": ("lm-eval[api]==0.4.13",),
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),
    "schemathesis": ("schemathesis==4.32.5",),
    "mcp": ("mcp>=2,<3",),  # of 2026-07-28, and older
    "mcp-sessions": ("mcp>=1.10,<2",),
    "axe": ("--no-deps", "axe-playwright-python==0.1.5"),  # for its axe.min.js
}
# Programs ask nobody but the server, and report to nobody.
_ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGCHAIN_TRACING_V2": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def environment(name: str) -> Path:
    """The folder of a program's commands, among them python. It is made once, and again where its requirements change;
    the test is skipped where nothing can be downloaded."""
    folder = FOLDER / name
    made(folder, (REQUIREMENTS[name],))
    return folder / "bin"


def made(folder: Path, steps: tuple[tuple[str, ...], ...], finish: Callable[[], None] = lambda: None) -> None:
    """Make an environment where it is not made yet. steps: what pip installs, one after the other; finish: at the end.

    Requirements that contradict each other are installed alone, in a step with --no-deps."""
    stamp = folder / "requirements.json"
    requirements = json.dumps([sys.version.split()[0], *(word for step in steps for word in step)])
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if stamp.exists() and stamp.read_text() == requirements:
            return
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for step in steps:
            pip(folder / "bin" / "python", "install", "--retries", "2", *step)
        finish()
        stamp.write_text(requirements)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Tests run in several processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def run(name: str, *command: str, seconds: float = 900, **more: Any) -> "subprocess.CompletedProcess[str]":
    """A command of the program, in its environment. more: variables of the process's environment."""
    folder = environment(name)
    variables = clean_environment() | _ALONE
    cwd = more.pop("cwd", None)
    first, *rest = command
    return subprocess.run(
        [str(folder / first), *rest],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=variables | more,
        timeout=seconds,
        check=False,
    )


def use_program(name: str, url: str, **more: Any) -> dict[str, Any]:
    """Run a program's script in `clients` against a server; return the JSON in the last line that it prints."""
    done = run(name, "python", str(PROGRAMS / f"use_{name.replace('-', '_')}.py"), url, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
