"""Show and plot a run from its DUMP_FOLDER/metrics.jsonl, while it grows. This module does not import torch."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from whorl.files import output_file

FILE = "metrics.jsonl"
Line = dict[str, Any]
# Title, key in metrics.jsonl, and format of each column.
COLUMNS = [
    ("loss", "loss", "{:.4f}"),
    ("indexer KL", "indexer_kl", "{:.4f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("MFU", "mfu", "{:.1f} %"),
    ("memory", "memory_gib", "{:.2f} GiB"),
    ("lr", "lr", "{:.2e}"),
]
PLOTTED = [("loss", "loss"), ("gradient norm", "grad_norm"), ("indexer KL", "indexer_kl")]
BARS = "_.-~^"  # characters of a chart, from the lowest value to the highest


@dataclass
class Tail:
    """Reads the complete lines that were added to a file since the last call."""

    path: Path
    offset: int = 0  # bytes that have been read

    def read(self) -> list[Line]:
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


@dataclass
class History:
    """The logged steps of a run.

    A resumed run repeats steps: a repeated step replaces the earlier one and all steps after it.
    """

    run: Line = field(default_factory=dict)  # the description of the run
    steps: list[Line] = field(default_factory=list)
    end: Line = field(default_factory=dict)  # how many steps it trained, logged or not; written when it ends well

    def add(self, lines: list[Line]) -> list[Line]:
        """Add lines of metrics.jsonl, and return those that are steps.

        A line with a validation loss has the number of the step before it and does not replace that step.
        """
        step_lines = []
        for line in lines:
            if "run" in line or "end" in line:
                self.run, self.end = line.get("run", self.run), line.get("end", {})
                continue
            while self.steps and self.steps[-1]["step"] >= line["step"] and "validation_loss" not in line:
                self.steps.pop()
            self.steps.append(line)
            step_lines.append(line)
        return step_lines


def read(folder: Path) -> History:
    """Return the history of a finished or running job.

    folder: the folder of the run or its metrics.jsonl. Raises ValueError when there is no such file or it is not JSON.
    """
    history = History()
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the folder of a run, which --job.dump_folder sets")
    try:
        history.add(Tail(path).read())
    except ValueError as error:
        raise ValueError(f"{path} is not a metrics file: {error}") from error
    return history


def number(line: Line, key: str) -> float | None:
    """Return a value of a line as a number, or None if the line does not have it."""
    value = line.get(key)
    return None if value is None else float(value)


def cell(line: Line, key: str, template: str) -> str:
    """Return a value of a line as text, or `-` if the line does not have it."""
    value = number(line, key)
    return "-" if value is None else template.format(value)


def as_text(line: Line) -> str:
    """Return a logged step as one line of text."""
    shown = [
        f"{title} {cell(line, key, template)}" for title, key, template in COLUMNS if number(line, key) is not None
    ]
    return f"step {line['step']}  " + "  ".join(shown)


def sparkline(values: list[float], width: int = 40) -> str:
    """Return a small chart of the last values in ASCII characters."""
    recent = [v for v in values if math.isfinite(v)][-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0
    return "".join(BARS[round((v - low) * scale)] for v in recent)


class Display:
    """Shows a run: a live table in a terminal, otherwise one line for each step."""

    def __init__(self, folder: Path, console: Console | None = None) -> None:
        self.console = console or Console()
        self.history = History()
        # What an earlier run in the same folder has written is not shown.
        self._tail = Tail(folder / FILE, (folder / FILE).stat().st_size if (folder / FILE).is_file() else 0)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task: TaskID | None = None
        self._live = Live(self._render(), console=self.console, refresh_per_second=4)

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        if self.console.is_terminal:
            self._live.stop()

    def update(self) -> None:
        """Show what the run has written since the last call."""
        for line in self.history.add(self._tail.read()):
            if not self.console.is_terminal:
                self.console.print(as_text(line), highlight=False, soft_wrap=True)
        if self.console.is_terminal:
            self._live.update(self._render())

    def _render(self) -> RenderableType:
        run, steps = self.history.run, self.history.steps
        if not run:
            return Text("starting ...")
        if self._task is None:
            name = f"{run['model']} {run['flavor']}, {run['ranks']} x {run['device']}"
            self._task = self._progress.add_task(name, total=run["steps"])
        if not steps:
            return Group(self._progress, Text("first step ..."))
        self._progress.update(self._task, completed=steps[-1]["step"], total=run["steps"])
        table = Table(*(title for title, _, _ in COLUMNS), box=None, padding=(0, 2))
        table.add_row(*(cell(steps[-1], key, template) for _, key, template in COLUMNS))
        losses = [loss for line in steps if (loss := number(line, "loss")) is not None]
        return Group(self._progress, table, Text(f"loss {sparkline(losses)}"))


def plot(folders: list[Path], output: Path) -> None:
    """Plot loss, gradient norm and indexer KL over the steps into an image, one curve for each run.

    Raises ValueError when a folder has no metrics file or no logged step, and CannotWrite when the image cannot be.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {folder: read(folder) for folder in folders}
    if empty := [str(folder) for folder, history in runs.items() if not history.steps]:
        raise ValueError(f"train --plot: no step is logged in {', '.join(empty)}")
    figure, axes = pyplot.subplots(1, len(PLOTTED), figsize=(5 * len(PLOTTED), 3.6))
    for axis, (title, key) in zip(axes, PLOTTED, strict=True):
        for folder, history in runs.items():
            points = [(line["step"], value) for line in history.steps if (value := number(line, key)) is not None]
            axis.plot([p[0] for p in points], [p[1] for p in points], label=folder.name)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        axes[0].legend()
    figure.tight_layout()
    with output_file(output) as path:
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
