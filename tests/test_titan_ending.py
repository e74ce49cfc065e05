"""How `whorl train` ends: whatever signal it gets, nobody trains on; and a folder has one writer."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import titan_job
from typer.testing import CliRunner

from whorl.cli import app
from whorl.titan import ending
from whorl.titan.folder_lock import FILE, FolderLock, FolderLocked, check_free

ROOT = Path(__file__).parents[1]
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
from whorl.titan.train_command import Job, run
command = [sys.executable, *sys.argv[1:]]
sys.exit(run(Job(recipe=Path("x"), folder=Path("run"), ranks=1, command=command, locked=[])))
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
