"""Ctrl-C while a command starts: exit code 130, and not a line. Output that nobody can take: one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Before the line the interpreter starts, which no program can make quiet. A busy machine takes longer than a delay.
PROGRAM = "from whorl.__main__ import end_at_once, main; end_at_once(); print(flush=True); main()"


def interrupted(delay: float, *words: str) -> tuple[int, str]:
    """Press Ctrl-C so many seconds after the command began: its exit code and all that its processes printed."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, *words], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes in the foreground
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed.decode()


@pytest.mark.parametrize("delay", [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0])
def test_ctrl_c_while_it_imports(delay: float) -> None:
    assert interrupted(delay, "generate", "--device", "cpu", "-p", "x") == (130, "")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("delay", [0.3, 1.3, 1.8, 2.3, 2.8, 3.3, 3.8, 4.8, 6.3])
def test_ctrl_c_while_a_server_starts(delay: float, ranks: str) -> None:
    """Once it serves, it ends as it does at any time: with 0. Ranks that import do not print a traceback either."""
    code, printed = interrupted(delay, "serve", "--device", "cpu", "--port", "0", "--tp", ranks)
    assert code == (0 if "ready: serving" in printed else 130), printed
    assert "Traceback" not in printed


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in the background of a script."""
    program = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {PROGRAM}"
    command = [sys.executable, "-c", program, "doctor", "nowhere"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 2


# ---- output


@pytest.mark.parametrize("words", ["--help", "doctor examples/qwen3_vl_rope_branch --json"])
def test_output_to_a_full_disk_is_one_line(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "whorl", *words.split()], stdout=full, stderr=subprocess.PIPE)
    line = "whorl: standard output: cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr.decode()) == (1, line)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m whorl doctor examples/qwen3_vl_rope_branch --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_an_output_path_that_cannot_be_made_is_one_line_before_the_work(tmp_path: Path) -> None:
    for words in ("bench ops --plot {}.png", "bench vision --out {}.json", "bench serve --records {}.jsonl"):
        file = words.split()[-1].format(tmp_path / "absent" / "file")
        command = [sys.executable, "-m", "whorl", *words.split()[:-1], file]
        done = subprocess.run(command, capture_output=True, text=True)
        line = f"whorl: {file}: cannot be written: No such file or directory\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
