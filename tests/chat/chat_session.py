"""`whorl chat` in a pseudo-terminal of its own."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path


class Session:
    """state: the folder of its history."""

    def __init__(self, *python: str, state: Path) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", "WHORL_STATE_DIR": str(state)}
        root = Path(__file__).parents[2]
        arguments = [sys.executable, *python, "chat", "--temperature", "0", "--max-tokens", "60"]
        self.process = subprocess.Popen(arguments, cwd=root, env=environment, preexec_fn=lambda: os.login_tty(slave))
        os.close(slave)
        self.shown = ""

    def until(self, text: str, seconds: float = 90) -> str:
        """What is shown up to and with `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert select.select([self._master], [], [], max(0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self._master, 4096).decode(errors="replace")
        before, mark, self.shown = self.shown.partition(text)
        return before + mark

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
