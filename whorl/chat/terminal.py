"""Shows answers in a terminal: streamed text, reasoning in another style, Ctrl-C, and the statistics of an answer."""

import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from whorl.engine.reply_parser import END_THINK, THINK, Parts, ReplyParser
from whorl.engine.sequence import Sequence

from .blocks import HARMLESS, BlockWriter
from .conversation import Conversation

if TYPE_CHECKING:
    from rich.progress import Progress

    from whorl.engine.llm import LLM
    from whorl.engine.tokenizer import Tokenizer


class Screen:
    """Writes text and flushes it at once; reasoning is dim if the output is a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.is_terminal = self.out.isatty()
        self._use_color = self.is_terminal and "NO_COLOR" not in os.environ
        self.is_line_open = False

    def write(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        self.is_line_open = not text.endswith("\n")
        shown = text.translate(HARMLESS) if self.is_terminal else text
        self.out.write(f"\x1b[2m{shown}\x1b[0m" if dim and self._use_color else shown)
        self.out.flush()

    @property
    def draws(self) -> bool:
        """Whether it can take back lines, and color them."""
        return self._use_color and os.environ.get("TERM") != "dumb"

    def control(self, text: str, *, is_line_open: bool = True) -> None:
        """Write a text of this program that moves the cursor or colors; a model's text never comes here as it is."""
        self.is_line_open = is_line_open
        self.out.write(text)
        self.out.flush()

    def note(self, text: str) -> None:
        """Write a remark of the program on its own line."""
        self.end_line()
        self.write(f"{text}\n", dim=True)

    def end_line(self) -> None:
        if self.is_line_open:
            self.write("\n")


class Answer:
    """Shows a streamed answer on the screen, with reasoning separated from content.

    is_formatted: draw Markdown. folds: show the reasoning as one line, which goes; `reasoning` keeps it.
    """

    def __init__(
        self, screen: Screen, conversation: Conversation, *, is_formatted: bool = False, folds: bool = False
    ) -> None:
        may_think = conversation.tokenizer.token_id(END_THINK) is not None
        is_thinking = may_think and conversation.prompt.rstrip().endswith(THINK)  # some templates write the opening tag
        self._parser = ReplyParser(may_think=may_think, is_thinking=is_thinking)
        self._screen, self._is_after_reasoning = screen, False
        self._blocks = BlockWriter(screen) if is_formatted and screen.draws else None
        self._folds, self.reasoning = folds and screen.draws, ""

    def add(self, text: str) -> None:
        self._show(self._parser.add(text))

    def finish(self) -> None:
        self._show(self._parser.add("", is_last=True))
        if self._folds and self._is_after_reasoning:
            self._unfold()
        if self._blocks is not None:
            self._blocks.finish()
        self._screen.end_line()

    def _show(self, parts: Parts) -> None:
        self.reasoning += parts.reasoning
        self._is_after_reasoning |= bool(parts.reasoning)
        if parts.reasoning and self._folds:
            self._fold()
        else:
            self._screen.write(parts.reasoning, dim=True)
        if parts.content and self._is_after_reasoning:
            self._is_after_reasoning = False
            self._unfold()
        if self._blocks is None:
            self._screen.write(parts.content)
        else:
            self._blocks.add(parts.content)

    def _fold(self) -> None:
        """Show the end of the reasoning in one line."""
        room = max(10, shutil.get_terminal_size().columns - 12)
        words = " ".join(self.reasoning.translate(HARMLESS).split())
        self._screen.control(f"\r\x1b[K\x1b[2mthinking: {fitting(words, room)}\x1b[0m")

    def _unfold(self) -> None:
        """End the reasoning."""
        if self._folds:
            count = len(self.reasoning.split())
            self._screen.control(
                f"\r\x1b[K\x1b[2m[thought: {count} words; /show thoughts]\x1b[0m\n", is_line_open=False
            )
        else:
            self._screen.end_line()
            self._screen.write("\n")


def fitting(text: str, columns: int) -> str:
    """Return the end of a text that fits into so many columns."""
    from rich.cells import cell_len

    text = text[-columns:]
    while cell_len(text) > columns:
        text = text[1:]
    return text


@contextmanager
def stop_request() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, to be checked between steps; a second Ctrl-C raises KeyboardInterrupt at once.

    An exception inside a step would leave the engine in an inconsistent state.
    """
    stop = threading.Event()

    def on_interrupt(signum: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


class PromptProgress:
    """Shows a bar on standard error if the first step does not finish the prompt; it goes when the answer begins."""

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


def stream(llm: "LLM", seq: Sequence, show: Callable[[str], None]) -> None:
    """Run a sequence to its end, or to Ctrl-C, and pass its text to `show` as each step generates it."""
    progress = PromptProgress(seq)
    try:
        with stop_request() as stop:
            while not seq.is_finished:
                deltas = llm.step()
                progress.update()
                for delta in deltas:
                    if delta.sequence is seq:
                        show(delta.text)
                if stop.is_set():
                    llm.abort(seq)
    finally:
        progress.close()
        llm.abort(seq)
    show(seq.text.take(is_finished=True))


def describe(seq: Sequence) -> str:
    """Return the statistics of an answer in one line."""
    timings = seq.timings
    first, speed = timings.time_to_first_token, timings.tokens_per_second
    parts = [
        f"{seq.num_outputs} tokens" + (f" at {speed:.1f} tok/s" if speed else ""),
        f"first after {first:.2f} s" if first is not None else "no token",
        f"prompt of {seq.prompt_len}" + (f", {seq.num_cached} from the cache" if seq.num_cached else ""),
    ]
    if seq.num_drafted:
        share = 100 * seq.num_accepted / seq.num_drafted
        parts.append(f"{seq.num_accepted} of {seq.num_drafted} drafted tokens accepted ({share:.0f}%)")
    return "; ".join(parts)


def describe_limit(llm: "LLM", seq: Sequence) -> str | None:
    """Compare an answer's speed with the roofline, at which each token reads the weights and the KV cache once.

    None when there is no speed or the model's roofline is unknown.
    """
    from whorl.engine import roofline

    model, speed = llm.model, seq.timings.tokens_per_second
    cache: dict[str, Any] = {"context": len(seq.token_ids), "kv_cache_dtype": llm.settings.kv_cache_dtype}
    if not speed or (share := roofline.share(model, speed, **cache)) is None:
        return None
    read = roofline.step_bytes(model, **cache) / 1e6
    return f"{share:.0%} of the roofline: {read:.3g} MB a token at a copy's speed would be {speed / share:.1f} tok/s"


def describe_parting(tokenizer: "Tokenizer", first: Sequence, second: Sequence) -> str:
    """Say where a second answer parts from the first. It has log-probabilities with alternatives."""
    both = min(first.num_outputs, second.num_outputs)
    pairs = enumerate(zip(first.output_ids, second.output_ids, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), both)
    if at == both:
        return f"the same {both} tokens" + ("" if first.num_outputs == second.num_outputs else ", as far as both go")
    ids = first.output_ids[at], second.output_ids[at]
    odds: dict[int, float] = {}
    for entry in second.logprobs[at : at + 1]:
        odds = dict(entry.top) | {entry.token_id: entry.logprob}
    shown = [f"{tokenizer.decode([i])!r} {_odds(odds.get(i))}" for i in ids]
    return f"they part at token {at + 1}: {shown[0]} before, {shown[1]} now"


def _odds(logprob: float | None) -> str:
    return "(not among the likeliest)" if logprob is None else f"({math.exp(logprob):.2%})"
