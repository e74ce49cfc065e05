"""The command line: what each command prints, its exit code, and what it does not import."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from whorl import __version__
from whorl.cli import app
from whorl.extras import how_to_install
from whorl.ops import OPS

HEAVY = ("torch", "numpy", "triton", "transformers")


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def in_fresh_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_names_every_command_and_exits_0():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("doctor", "ops", "bench", "selftest", "--version"):
        assert command in result.output


def test_version():
    assert run("--version").output == f"whorl {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["bench", "ops", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments):
    code = f"""
import sys
from whorl.cli import app
from whorl.extras import how_to_install
try:
    app({arguments!r})
except SystemExit as stop:
    assert not stop.code, stop.code
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    result = in_fresh_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[]"


def test_doctor_runs_where_torch_is_not_installed():
    """None in sys.modules makes an import fail as if the package were absent."""
    code = """
import sys
sys.modules["torch"] = None
from whorl.cli import app
from whorl.extras import how_to_install
app(["doctor", "examples/qwen3_vl_rope_branch", "--json"])
"""
    result = in_fresh_python(code)
    assert result.returncode == 1, result.stderr
    assert "rope-branch-mismatch" in result.stdout
    json.loads(result.stdout)


@pytest.mark.parametrize("command", [["ops"], ["selftest"], ["bench", "ops"], ["bench", "positions"]], ids=" ".join)
def test_other_commands_say_that_they_need_torch(command, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*command)
    assert (result.exit_code, result.output) == (2, "whorl: this command needs torch: pip install torch\n")


def test_a_terminal_says_that_it_is_starting():
    """torch takes seconds to import; the line is gone when it is done."""
    code = "from whorl.options import need_torch; need_torch(); need_torch()"
    lead, terminal = os.openpty()
    with os.fdopen(lead, "rb") as shown:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, timeout=120)
        os.close(terminal)
        assert shown.read1() == b"starting\r\x1b[K"
    assert in_fresh_python(code).stderr == ""


def test_doctor_without_anything_to_look_at():
    result = run("doctor")
    assert result.exit_code == 2
    assert "give a PATH" in result.output


def test_doctor_passes_everything_on(monkeypatch):
    seen = []
    monkeypatch.setattr("whorl.doctor.command.run", lambda *arguments: seen.append(arguments) or 1)
    result = run(
        "doctor", "P", "--framework", "hf", "--set", "a=1", "--set", "b=2", "--train", "--device", "npu", "--json"
    )
    assert result.exit_code == 1
    assert seen == [("P", "hf", ["a=1", "b=2"], True, "npu", None, None, True)]


def test_ops_names_every_operator_with_a_reason_for_each_absent_backend(monkeypatch):
    monkeypatch.setattr("whorl.device.default_device", lambda: "cpu")
    document = json.loads(run("ops", "--json").output)
    assert [op["name"] for op in document["operators"]] == list(OPS)
    for op in document["operators"]:
        assert op["backends"]["torch"] == {"available": True, "reason": None}
        for backend, status in op["backends"].items():
            assert status["available"] == (status["reason"] is None), backend
    text = run("ops").output
    rows = [line.split("  ", 1) for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["operator", *OPS], "a name runs into its neighbour"
    assert all(row[1].lstrip().startswith("yes") for row in rows[1:])
    assert "torch_npu" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "ops", "ropes"], "no operator ropes; expected"),
        (["bench", "ops", "--plot", "x.txt"], "ends in one of .png, .svg, .pdf"),
        (["bench", "ops", "--plot", "nowhere/x.png"], "there is no folder nowhere"),
        (["selftest", "--device", "npu"], "device 'npu' is not available; this machine has only"),
        (["selftest", "--device", "tpu"], "tpu"),
        (["bench", "decode", "no-such-model"], "no-such-model: no such file or folder"),
        (["bench"], "Usage"),
        (["nonsense"], "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_asked_wrongly_exits_2_with_one_clear_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr("whorl.device.is_installed", lambda package: package != "matplotlib")
    result = run("bench", "ops", "--plot", "x.png")
    assert result.exit_code == 2
    assert f"--plot needs matplotlib: {how_to_install('bench')}" in result.output
