"""Messages from the keyboard: history that stays from run to run, and a paste of several lines as one message."""

import json
import os
import select
import sys
from contextlib import suppress
from pathlib import Path

STATE_FOLDER = "WHORL_STATE_DIR"
_MOST_LINES = 1000  # that are kept


def history_file() -> Path | None:
    """Where messages are kept: in WHORL_STATE_DIR, which may be empty: then nowhere; else in whorl in XDG_STATE_HOME or
    in ~/.local/state."""
    if (named := os.environ.get(STATE_FOLDER)) is not None:
        return Path(named).expanduser() / "chat_history" if named else None
    above = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(above).expanduser() / "whorl" / "chat_history"


class Keyboard:
    """Lines, from a terminal with readline, or from a pipe, without a prompt.

    A message of several lines is one JSON string in the file, as every message is: readline's own files end an entry
    at each line break.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._file = file if self._is_terminal else None
        self._pastes = True
        if self._is_terminal:
            self._prepare()

    def read(self, prompt: str) -> str:
        if not self._is_terminal:
            if not (line := sys.stdin.readline()):
                raise EOFError
            return line.rstrip("\n")
        line = input(prompt)
        if not self._pastes:
            line = "\n".join([line, *_pending()])
        if line.strip():
            self._keep(line)
        return line

    def _prepare(self) -> None:
        import readline

        # Where readline knows the marks that terminals put around a paste, it takes all of it into the line.
        self._pastes = "libedit" not in (readline.__doc__ or "")
        if self._pastes:
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.clear_history()
        for line in self._earlier():
            readline.add_history(line)

    def _earlier(self) -> list[str]:
        """Messages of earlier runs; the file is shortened where it has become long."""
        if self._file is None:
            return []
        try:
            kept = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return []
        if len(kept) > 2 * _MOST_LINES:
            kept = kept[-_MOST_LINES:]
            self._write("".join(f"{line}\n" for line in kept), os.O_TRUNC)
        lines: list[str] = []
        for line in kept[-_MOST_LINES:]:
            with suppress(json.JSONDecodeError):  # a line that was cut off, as by a full disk
                if isinstance(found := json.loads(line), str):
                    lines.append(found)
        return lines

    def _keep(self, line: str) -> None:
        """What cannot be kept is lost with this run, and the chat goes on."""
        with suppress(UnicodeEncodeError):  # bytes that are no text
            line.encode()
            self._write(f"{json.dumps(line)}\n", os.O_APPEND)

    def _write(self, text: str, how: int) -> None:
        """For nobody else to read."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | how, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print(f"whorl: the chat's history is not kept: {self._file}: {error.strerror}", file=sys.stderr)
            self._file = None


def _pending() -> list[str]:
    """Lines that have come together with the last one: a paste, where readline is one that does not tell."""
    lines = []
    while select.select([sys.stdin], [], [], 0.02)[0] and (line := sys.stdin.readline()):
        lines.append(line.rstrip("\n"))
    return lines
