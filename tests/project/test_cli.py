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


WRONG = [
    "serve --port x",
    "serve nowhere",
    "serve --api-key-file nowhere",
    "serve --chat-template nowhere",
    "serve --host 192.0.2.1",
    "serve --speculate x",
    "serve --draft-model nowhere",
    "serve --on ray",
    "serve https://example.com/model",
    "generate",
    "generate -p x nowhere",
    "generate -p x --temperature -1",
    "generate -p x --schema nowhere",
    "generate --prompts nowhere",
    "generate -p x --image x.png",
    "chat nowhere",
    "chat --no-such-option",
    "quantize nowhere out",
    "selftest --jobs 0",
    "bench decode nowhere",
    "bench decode --profile --classify",
    "bench decode --batch x",
    "bench serve nowhere",
    "bench serve --rate 1 --concurrency 1",
    "bench serve --slo x",
    "bench decode --peer x",
    "bench ops --plot x.txt",
    "train nowhere",
    "train tiny --no-such-option 1",
    "train --plan nowhere --cards 8",
    "doctor nowhere",
]


def test_wrong_arguments_are_refused_before_torch_is_imported():
    """Its import takes seconds. All in one process, which ends without it."""
    code = f"""
import contextlib, io, sys
from whorl.cli import app
for words in {WRONG!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app(words.split())
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    if code != 2 or "torch" in sys.modules:
        print(words, code, said.getvalue())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


FREQUENT = ["serve nowhere", "serve --port x", "serve -n 5", "generate", "generate -p x nowhere", "chat nowhere"]


def test_frequent_mistakes_import_no_server_and_no_numpy():
    """Those imports take half a second more."""
    code = f"""
import sys
from whorl.cli import app
for words in {FREQUENT!r}:
    try:
        app(words.split())
    except SystemExit as end:
        assert end.code == 2, words
    assert not {{"numpy", "whorl.serve.openai"}} & {{*sys.modules}}, words
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["", "serve", "train", "bench decode"])
def test_h_is_help(command):
    assert run(*command.split(), "-h").output == run(*command.split(), "--help").output != ""


def test_python_m_whorl():
    result = subprocess.run([sys.executable, "-m", "whorl", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"whorl {__version__}\n")


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


@pytest.mark.parametrize("command", [["ops"], ["selftest"], ["bench", "ops"], ["bench", "train"]], ids=" ".join)
def test_other_commands_say_that_they_need_torch(command, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*command)
    assert (result.exit_code, result.output) == (2, "whorl: this command needs torch: pip install torch\n")


def test_a_terminal_says_that_it_is_starting():
    """torch takes seconds to import; the line is gone when it is done."""
    code = """
from whorl.startup import starting
for _ in range(2):
    with starting():
        import torch
"""
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
    assert seen == [("P", "hf", ["a=1", "b=2"], True, "npu", None, None, True, None, None)]


def test_doctor_passes_both_sides_on(monkeypatch):
    seen = []
    monkeypatch.setattr("whorl.doctor.command.run", lambda *arguments: seen.append(arguments) or 0)
    assert run("doctor", "M", "--trainer", "t.sh", "--rollout", "r.sh").exit_code == 0
    assert run("doctor", "--trainer", "job.sh").exit_code == 0
    assert [arguments[0] for arguments in seen] == ["M", None]
    assert [[str(side) for side in arguments[-2:]] for arguments in seen] == [["t.sh", "r.sh"], ["job.sh", "None"]]


def test_ops_names_every_operator_with_a_reason_for_each_absent_backend(monkeypatch):
    monkeypatch.setattr("whorl.device.default_device", lambda: "cpu")
    document = json.loads(run("ops", "--json").output)
    assert [op["name"] for op in document["operators"]] == list(OPS)
    for op in document["operators"]:
        assert op["backends"]["torch"] == {"available": True, "reason": None}
        for backend, status in op["backends"].items():
            assert status["available"] == (status["reason"] is None), backend
    text = run("ops").output
    rows = [line.split("  ", 1) for line in text.partition("\n\n")[2].splitlines()]  # past what the machine has
    assert [row[0] for row in rows] == ["operator", *OPS], "a name runs into its neighbour"
    assert all(row[1].lstrip().startswith("yes") for row in rows[1:])
    assert "torch_npu" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "ops", "ropes"], "no operator ropes; expected"),
        (["bench", "ops", "--plot", "x.txt"], "ends in one of .png, .svg, .pdf"),
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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name != "matplotlib" else None)
    result = run("bench", "ops", "--plot", "x.png")
    assert result.exit_code == 2
    assert f"--plot needs matplotlib: {how_to_install('bench')}" in result.output
