"""How `whorl train` ends: whatever signal it gets, nobody trains on; a folder has one writer; what is said."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import titan_job
import torch
from typer.testing import CliRunner

from whorl.cli import app
from whorl.files import CannotWrite
from whorl.titan import display, ending, train_command
from whorl.titan.folder_lock import FILE, FolderLock, FolderLocked, check_free

ROOT = Path(__file__).parents[2]
PATIENCE = 60  # seconds; what is left behind stays for ever
# In the place of torchrun: one rank in a session of its own. Both hold the pipe open as long as they live.
LAUNCHER = """
import os, signal, subprocess, sys
pipe = open(sys.argv[1], "w")
rank = "import signal, time; from whorl.titan.ending import end_with_parent; end_with_parent(signal.SIGKILL)(); "
rank += f"import os; os.write({pipe.fileno()}, b'ready\\\\n'); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, pass_fds=[pipe.fileno()])
def close(number, frame):
    print("got", signal.Signals(number).name, file=pipe, flush=True)
    if "deaf" not in sys.argv:
        started.send_signal(number)
        started.wait()
        sys.exit(1)
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
        signal.signal(getattr(signal, name), close)
while True:
    signal.pause()
"""
RUN = """
import sys
from pathlib import Path
from whorl.titan.train_command import Job, prepare, run
command = [sys.executable, *sys.argv[1:]]
job = Job(recipe=Path("x"), folder=Path("run"), ranks=1, command=command, locked=[])
prepare(job)
sys.exit(run(job))
"""


def hear_hangups() -> None:
    """The tests themselves may run under nohup, which processes inherit."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Running:
    """`whorl train` around the launcher above."""

    def __init__(self, folder: Path, *more: str, before: Any = hear_hangups) -> None:
        (folder / "launcher.py").write_text(LAUNCHER)
        os.mkfifo(folder / "pipe")
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, "launcher.py", "pipe", *more],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )
        self.pipe: IO[bytes] = (folder / "pipe").open("rb", buffering=0)
        assert self.line() == "ready"

    def line(self) -> str:
        """What launcher and rank say next; "" when both have ended."""
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self.pipe], [], [], PATIENCE)
            assert ready, "a process was left behind"
            read = self.pipe.read(1)
            if not read:
                break
            received += read
        return received.decode().strip()

    def end(self) -> str:
        said = self.process.communicate(timeout=PATIENCE)[1]
        self.pipe.close()
        return said


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_passed_on(name: str, tmp_path: Path) -> None:
    run = Running(tmp_path)
    run.process.send_signal(getattr(signal, name))
    assert run.line() == f"got {name}"
    assert run.line() == ""
    assert "stopped; the same command resumes" in run.end()
    assert run.process.returncode == 1


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    run = Running(tmp_path, "deaf")
    run.process.send_signal(signal.SIGTERM)
    assert run.line() == "got SIGTERM"
    run.process.send_signal(signal.SIGTERM)
    assert run.line() == "", "killed, and its rank with it"
    run.end()
    assert run.process.returncode == 1


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_second_signal_counts_while_the_first_is_passed_on(monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    signals = ending.Signals()
    signals.seen += [signal.SIGTERM] * before
    said: list[Any] = []

    class Deaf:
        pid = 7
        poll = staticmethod(lambda: None)
        wait = staticmethod(lambda: said.append("waited"))

        def send_signal(self, number: int) -> None:
            said.append(number)
            signals.seen.append(signal.SIGTERM)

        def communicate(self, timeout: float) -> None:
            pytest.fail("it waited for a process that is to be killed")

    monkeypatch.setattr(os, "killpg", lambda *args: said.append(args))
    ending.end(Deaf(), signals)  # type: ignore[arg-type]
    assert said == [signal.SIGTERM, (7, signal.SIGKILL), "waited"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel of Linux tells who has lost its parent")
def test_nothing_outlives_a_kill(tmp_path: Path) -> None:
    run = Running(tmp_path)
    run.process.kill()
    assert run.line() == "got SIGTERM"
    assert run.line() == ""
    run.end()


def test_nohup_stays(tmp_path: Path) -> None:
    run = Running(tmp_path, before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGTERM)
    assert run.line() == "got SIGTERM"
    assert run.line() == ""
    run.end()


# ---- one writer


def test_a_folder_is_locked_once(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / "run")
    with pytest.raises(
        FolderLocked, match=rf"another run writes into .*run: process {os.getpid()} on \S+, since 20\d\d-.*kill"
    ):
        FolderLock(tmp_path / "run")
    with pytest.raises(FolderLocked):
        check_free([tmp_path, tmp_path / "run"])
    lock.release()
    check_free([tmp_path / "run"])
    FolderLock(tmp_path / "run").release()
    check_free([tmp_path / "nowhere"])
    assert not (tmp_path / "nowhere").exists(), "asking makes no folder"


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    code = "import sys, pathlib; from whorl.titan.folder_lock import FolderLock; lock = FolderLock(pathlib.Path('.'))"
    code += "; print('locked', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(FolderLocked, match=f"process {holder.pid} on"):
        FolderLock(tmp_path)
    holder.kill()
    holder.communicate()
    assert str(holder.pid) in (tmp_path / FILE).read_text()
    FolderLock(tmp_path).release()


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_a_second_run_is_refused(fresh: tuple[str, ...], tmp_path: Path) -> None:
    """Before ranks are started, and before --fresh takes the folder away from under the first."""
    pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")
    lock = FolderLock(tmp_path / "run" / "checkpoint")
    done = CliRunner().invoke(app, ["train", "tiny", "--job.dump_folder", str(tmp_path / "run"), *fresh])
    lock.release()
    assert done.exit_code == 2, done.output
    assert f"another run writes into {tmp_path}/run/checkpoint: process {os.getpid()} on" in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_rank_locks_what_it_writes(tmp_path: Path) -> None:
    """For those who start TorchTitan themselves, and for two that start at once."""
    pytest.importorskip("torchtitan", reason="pip install -e '.[train]'")
    flags = ["--job.dump_folder", str(tmp_path / "one"), "--checkpoint.folder", str(tmp_path / "shared")]
    lock = FolderLock(tmp_path / "shared")
    assert f"FolderLocked: another run writes into {tmp_path}/shared" in titan_job.refusal(flags)
    lock.release()
    first = titan_job.Job(titan_job.train, [*flags, "--training.steps", "100000"])
    for event in first.events():
        if event[0] == "loss":
            break
    for folder in ("one", "shared"):
        with pytest.raises(FolderLocked, match=f"process {first.processes[0].pid} on"):
            FolderLock(tmp_path / folder)
    first.kill()
    check_free([tmp_path / "one", tmp_path / "shared"])


# ---- what is said at the end


def said_at_the_end(folder: Path, capsys: pytest.CaptureFixture[str], *added: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / display.FILE).write_text("".join(json.dumps(line) + "\n" for line in ({"run": {}}, *added)))
    job = train_command.Job(recipe=folder, folder=folder, ranks=1, command=[], locked=[])
    train_command._print_end(job, display.read(folder))
    return capsys.readouterr().out


def test_the_end_says_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 logged steps are in" in said_at_the_end(
        tmp_path / "a", capsys, {"step": 1}, {"step": 2}, {"end": {"steps": 2}}
    )
    assert "3 steps were trained in" in said_at_the_end(tmp_path / "b", capsys, {"end": {"steps": 3}})
    assert "has already finished its steps" in said_at_the_end(tmp_path / "c", capsys, {"end": {"steps": 0}})


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    made = train_command.build_job("tiny", ["--job.dump_folder", str(tmp_path / "file" / "run")], ranks=1, torchrun="")
    with pytest.raises(CannotWrite, match=rf"^{tmp_path}/file/run.*: cannot be written: Not a directory$"):
        train_command.prepare(made)


def test_the_reason_of_a_failure_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "0" / "stderr.log"
    log.parent.mkdir()
    log.write_text(f"Traceback:\n  ...\n{train_command.REASON}the disk is full\n")
    train_command._print_failure({tmp_path}, "", 1)
    assert capsys.readouterr().err == f"whorl: training failed: the disk is full (log: {log})\n"
    log.write_text("Traceback:\nKeyError: 3\n")
    train_command._print_failure({tmp_path}, "", 1)
    assert capsys.readouterr().err == f"whorl: training failed (torchrun: exit 1)\n--- {log}\nTraceback:\nKeyError: 3\n"


def test_reasons_are_those_written_for_users() -> None:
    """An error of the system or one that our code raises on purpose; one of torch's is a fault, and has its trace."""
    from whorl.titan.data import text_files
    from whorl.titan.worker import reason_of

    def raised(call: Any) -> Exception:
        try:
            call()
        except Exception as error:
            return error
        raise AssertionError("it raises nothing")

    assert "nowhere is neither a file nor a folder" in str(reason_of(raised(lambda: text_files("nowhere", ".txt"))))
    assert "No such file or directory: 'nowhere'" in str(reason_of(raised(lambda: open("nowhere"))))  # noqa: SIM115
    assert reason_of(raised(lambda: torch.zeros(2) @ torch.zeros(3))) is None
    assert reason_of(raised(lambda: json.loads("{"))) is None
