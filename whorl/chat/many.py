"""Many answers at once: prompts of a file, or several answers to each, as JSON lines."""

import json
import sys
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from whorl.engine.output import shown_progress
from whorl.engine.sequence import FinishReason, SamplingParams, Sequence

from .attachments import Attachment
from .conversation import Conversation
from .terminal import stop_request
from .text_streams import as_text, read_stdin


@dataclass(slots=True)
class Asked:
    """A prompt, what its line says beside it, and its answers; or why there are none."""

    prompt: str
    given: dict[str, Any] = field(default_factory=dict)
    answers: list[Sequence] = field(default_factory=list)
    error: str | None = None


def read_prompts(file: str) -> list[Asked]:
    """Lines with text in them; of a .jsonl file what its JSON holds. ValueError names the line that is wrong."""
    lines = read_stdin() if file == "-" else _text(file)
    is_json = file.endswith(".jsonl")
    numbered = enumerate(lines.split("\n"), 1)  # only line breaks end a line
    found = [
        _asked(line, f"--prompts {file}, line {number}") if is_json else Asked(line.removesuffix("\r"))
        for number, line in numbered
        if line.strip()
    ]
    if not found:
        raise ValueError(f"--prompts {file}: has no prompts")
    return found


def _text(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8", errors="strict")
    except OSError as error:
        raise ValueError(f"--prompts {file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {file}: is not UTF-8 text: {error}") from error


def _asked(line: str, where: str) -> Asked:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    given = found if isinstance(found, dict) else {"prompt": found}
    if not isinstance(given.get("prompt"), str):
        raise ValueError(f"{where}: expected a JSON string, or an object with a string prompt")
    return Asked(as_text(given["prompt"], where), given if isinstance(found, dict) else {})


def queue(
    conversation: Conversation,
    asked: List[Asked],
    params: SamplingParams,
    *,
    fit: bool,
    attached: List[Attachment] = (),
) -> None:
    """Each prompt by itself; one that the engine refuses keeps the reason."""
    for each in asked:
        try:
            each.answers = conversation.queue(each.prompt, params, fit=fit, attached=attached)
        except ValueError as error:
            each.error = str(error)


def run(conversation: Conversation, asked: List[Asked]) -> int:
    """Write the answers in the order of the prompts, each as soon as it and those before it are there.

    Exit code: 0; 1 where a prompt has no answer; 130 after Ctrl-C, behind what was finished.
    """
    llm, out = conversation.llm, sys.stdout  # kept: a progress bar puts itself in its place
    sequences = [seq for each in asked for seq in each.answers]
    rows = _rows(asked)
    waiting = next(rows, None)
    is_shown = sys.stderr.isatty() and not out.isatty()
    try:
        with stop_request() as stop, shown_progress(sequences, is_shown) as update:
            while waiting is not None and not stop.is_set():
                while waiting is not None and _is_over(waiting[1]):
                    _write(out, *waiting)
                    waiting = next(rows, None)
                if waiting is not None:
                    llm.step()
                    update()
    finally:
        for seq in sequences:
            llm.abort(seq)
    while waiting is not None:
        if _is_over(waiting[1]) and _finish(waiting[1]) is not FinishReason.ABORT:
            _write(out, *waiting)
        waiting = next(rows, None)
    if any(seq.finish_reason is FinishReason.ABORT for seq in sequences):
        return 130
    has_failed = any(each.error is not None for each in asked) or any(seq.error is not None for seq in sequences)
    return 1 if has_failed else 0


_Row = tuple[dict[str, Any], "Sequence | str"]


def _rows(asked: List[Asked]) -> Iterator[_Row]:
    """What is known of each answer beforehand, and the answer, or why there is none."""
    for index, each in enumerate(asked):
        about = {**each.given, "index": index, "prompt": each.prompt}
        if each.error is not None:
            yield about, each.error
        for sample, seq in enumerate(each.answers):
            yield (about | {"sample": sample} if len(each.answers) > 1 else about), seq


def _is_over(answer: "Sequence | str") -> bool:
    return isinstance(answer, str) or answer.is_finished


def _finish(answer: "Sequence | str") -> FinishReason | None:
    return None if isinstance(answer, str) else answer.finish_reason


def _write(out: TextIO, about: dict[str, Any], answer: "Sequence | str") -> None:
    if isinstance(answer, str):
        row = about | {"error": answer}
    elif answer.error is not None:
        row = about | {"error": str(answer.error)}
    else:
        row = about | document(answer)
    out.write(f"{json.dumps(row)}\n")
    out.flush()


def document(seq: Sequence) -> dict[str, Any]:
    """What an answer is and took."""
    timings = seq.timings
    return {
        "text": seq.text.value,
        "token_ids": seq.output_ids,
        "finish_reason": str(seq.finish_reason),
        "prompt_tokens": seq.prompt_len,
        "completion_tokens": seq.num_outputs,
        "time_to_first_token": timings.time_to_first_token,
        "tokens_per_second": timings.tokens_per_second,
        "drafted_tokens": seq.num_drafted,
        "accepted_tokens": seq.num_accepted,
    }
