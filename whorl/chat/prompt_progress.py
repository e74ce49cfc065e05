"""The progress bar of a long prompt's prefill in a terminal; it disappears when the answer begins."""

import sys
from typing import TYPE_CHECKING

from whorl.engine.sequence import Sequence

if TYPE_CHECKING:
    from rich.progress import Progress


class PromptProgress:
    """Shows a bar on standard error if the first step does not finish the prompt."""

    def __init__(self, seq: Sequence) -> None:
        self._seq = seq
        self._bar: Progress | None = None

    def update(self) -> None:
        """Show the progress; call it after each step."""
        if self._seq.num_outputs or self._seq.is_finished or not sys.stderr.isatty():
            self.close()
            return
        if self._bar is None:
            self._bar = self._start()
        self._bar.update(self._bar.task_ids[0], completed=self._seq.num_computed, refresh=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
        bar = Progress(
            *columns,
            console=Console(file=sys.stderr),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # the answer is written to stdout directly
            redirect_stderr=False,
        )
        bar.add_task("", total=self._seq.prompt_len)
        bar.start()
        return bar
