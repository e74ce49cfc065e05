"""Reads messages from the keyboard: with a history that persists, and with pasted lines as one message."""

import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

STATE_FOLDER = "WHORL_STATE_DIR"
_MOST_LINES = 1000  # of the history


def history_file() -> Path | None:
    """Return the file of the history; None: there is no history.

    It is in WHORL_STATE_DIR; an empty WHORL_STATE_DIR means no history. If that is not set, it is in the folder whorl
    of XDG_STATE_HOME or of ~/.local/state.
    """
    if (folder := os.environ.get(STATE_FOLDER)) is not None:
        return Path(folder).expanduser() / "chat_history" if folder else None
    parent = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(parent).expanduser() / "whorl" / "chat_history"


class Keyboard:
    """Reads lines from a terminal with readline, or from a pipe, without a prompt.

    Every message is one JSON string in the history file, so that it may have several lines: readline's own files end
    an entry at each line break.
    """

    def __init__(self, file: Path | None = None, completions: Callable[[str], list[str]] | None = None) -> None:
        """completions: returns what the last word of a line may become, for the key Tab."""
        self._completions = completions
        self._is_terminal = sys.stdin.isatty()
        self._file = file if self._is_terminal else None
        self._has_bracketed_paste = True
        if self._is_terminal:
            self._set_up_readline()

    def read(self, prompt: str) -> str:
        """Show the prompt and return the next message, pasted lines as one; raise EOFError at the end of the input."""
        if not self._is_terminal:
            if not (line := sys.stdin.readline()):
                raise EOFError
            return line.rstrip("\n")
        line = input(prompt)
        if not self._has_bracketed_paste:
            line = "\n".join([line, *_pending_lines()])
        if line.strip():
            self._add_to_history(line)
        return line

    def _set_up_readline(self) -> None:
        import readline

        # With bracketed paste, readline puts all pasted lines into one. libedit does not have it.
        self._has_bracketed_paste = "libedit" not in (readline.__doc__ or "")
        if self._has_bracketed_paste:
            readline.parse_and_bind("set enable-bracketed-paste on")
        if self._completions is not None:
            is_libedit = not self._has_bracketed_paste
            readline.set_completer_delims(" ")
            readline.set_completer(self._complete)
            readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        readline.clear_history()
        for line in self._earlier():
            readline.add_history(line)

    def _complete(self, word: str, state: int) -> str | None:
        """Return one of the words that a word may become; None after the last one."""
        import readline

        assert self._completions is not None
        options = self._completions(readline.get_line_buffer()[: readline.get_endidx()])
        return options[state] if state < len(options) else None

    def _earlier(self) -> list[str]:
        """Return the messages of earlier runs, and shorten the file if it is long."""
        if self._file is None:
            return []
        try:
            entries = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return []
        if len(entries) > 2 * _MOST_LINES:
            entries = entries[-_MOST_LINES:]
            self._write("".join(f"{line}\n" for line in entries), os.O_TRUNC)
        lines: list[str] = []
        for line in entries[-_MOST_LINES:]:
            with suppress(json.JSONDecodeError):  # a line may be incomplete, for example after a full disk
                if isinstance(message := json.loads(line), str):
                    lines.append(message)
        return lines

    def _add_to_history(self, line: str) -> None:
        """Append a message to the file; one that is not valid text is left out."""
        with suppress(UnicodeEncodeError):
            line.encode()
            self._write(f"{json.dumps(line)}\n", os.O_APPEND)

    def _write(self, text: str, mode: int) -> None:
        """Write to a file that only the user can read; if that fails, print a warning and keep no history."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | mode, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            print(f"whorl: the chat's history is not saved: {self._file}: {error.strerror}", file=sys.stderr)
            self._file = None


def _pending_lines() -> list[str]:
    """Read the lines that arrived together with the last one: a paste, if readline has no bracketed paste."""
    lines = []
    while select.select([sys.stdin], [], [], 0.02)[0] and (line := sys.stdin.readline()):
        lines.append(line.rstrip("\n"))
    return lines
