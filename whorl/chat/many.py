"""Batched generation: many prompts from a file, or several answers to each prompt, printed as JSON lines."""

import json
import sys
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from whorl.engine.output import shown_progress
from whorl.engine.sequence import FinishReason, SamplingParams, Sequence

from .attachments import Attachment
from .conversation import Conversation
from .terminal import stop_request
from .text_streams import as_text, read_file, read_stdin


@dataclass(slots=True)
class PromptAnswers:
    """A prompt, the other fields of its line, and its answers; or the error, if it was refused."""

    prompt: str
    fields: dict[str, Any] = field(default_factory=dict)
    answers: list[Sequence] = field(default_factory=list)
    error: str | None = None


def read_prompts(file: str) -> list[PromptAnswers]:
    """Read a prompt from each line that is not blank; the lines of a .jsonl file are JSON.

    file: `-` is standard input. Raises ValueError, which names the invalid line.
    """
    lines = read_stdin() if file == "-" else read_file(file, f"--prompts {file}")
    is_json = file.endswith(".jsonl")
    numbered = enumerate(lines.split("\n"), 1)  # not splitlines(), which splits at other characters too
    prompts = [
        _parse_line(line, f"--prompts {file}, line {number}") if is_json else PromptAnswers(line.removesuffix("\r"))
        for number, line in numbered
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"--prompts {file}: has no prompts")
    return prompts


def _parse_line(line: str, where: str) -> PromptAnswers:
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None
    fields = parsed if isinstance(parsed, dict) else {"prompt": parsed}
    if not isinstance(fields.get("prompt"), str):
        raise ValueError(f"{where}: expected a JSON string, or an object with a string prompt")
    return PromptAnswers(as_text(fields["prompt"], where), fields if isinstance(parsed, dict) else {})


def queue(
    conversation: Conversation,
    prompts: abc.Sequence[PromptAnswers],
    params: SamplingParams,
    *,
    fit: bool,
    attached: abc.Sequence[Attachment] = (),
) -> None:
    """Queue each prompt by itself; a prompt that the engine refuses keeps the error."""
    for prompt in prompts:
        try:
            prompt.answers = conversation.queue(prompt.prompt, params, fit=fit, attached=attached)
        except ValueError as error:
            prompt.error = str(error)


def run(conversation: Conversation, prompts: abc.Sequence[PromptAnswers]) -> int:
    """Write the answers in the order of the prompts, each as soon as it and those before it are finished.

    Returns the exit code: 0; 1 if a prompt has no answer; 130 after Ctrl-C, when the finished answers are written.
    """
    llm, out = conversation.llm, sys.stdout  # saved here, as the progress bar replaces sys.stdout
    sequences = [seq for prompt in prompts for seq in prompt.answers]
    rows = _rows(prompts)
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
        if _is_over(waiting[1]) and _finish_reason(waiting[1]) is not FinishReason.ABORT:
            _write(out, *waiting)
        waiting = next(rows, None)
    if any(seq.finish_reason is FinishReason.ABORT for seq in sequences):
        return 130
    errors = [*(prompt.error for prompt in prompts), *(seq.error for seq in sequences)]
    return 1 if any(error is not None for error in errors) else 0


_Row = tuple[dict[str, Any], "Sequence | str"]


def _rows(prompts: abc.Sequence[PromptAnswers]) -> Iterator[_Row]:
    """Yield a pair for each line of the output: the fields of its prompt, and its sequence or the error."""
    for index, prompt in enumerate(prompts):
        fields = {**prompt.fields, "index": index, "prompt": prompt.prompt}
        if prompt.error is not None:
            yield fields, prompt.error
        for sample, seq in enumerate(prompt.answers):
            yield (fields | {"sample": sample} if len(prompt.answers) > 1 else fields), seq


def _is_over(answer: "Sequence | str") -> bool:
    """Return whether a line can be written: its sequence is finished, or its prompt was refused."""
    return isinstance(answer, str) or answer.is_finished


def _finish_reason(answer: "Sequence | str") -> FinishReason | None:
    return None if isinstance(answer, str) else answer.finish_reason


def _write(out: TextIO, fields: dict[str, Any], answer: "Sequence | str") -> None:
    if isinstance(answer, str):
        row = fields | {"error": answer}
    elif answer.error is not None:
        row = fields | {"error": str(answer.error)}
    else:
        row = fields | document(answer)
    out.write(f"{json.dumps(row)}\n")
    out.flush()


def document(seq: Sequence) -> dict[str, Any]:
    """Return an answer and its statistics as a JSON object, from which `whorl verify` computes it again."""
    timings = seq.timings
    return {
        "text": seq.text.value,
        "prompt_token_ids": seq.token_ids[: seq.prompt_len],
        "token_ids": seq.output_ids,
        "logprobs": [each.logprob for each in seq.logprobs],
        "finish_reason": str(seq.finish_reason),
        "prompt_tokens": seq.prompt_len,
        "completion_tokens": seq.num_outputs,
        "time_to_first_token": timings.time_to_first_token,
        "tokens_per_second": timings.tokens_per_second,
        "drafted_tokens": seq.num_drafted,
        "accepted_tokens": seq.num_accepted,
    }
