"""Formats the engine's step outputs as OpenAI's objects: the chunks of a stream, or one complete response.

The complete response is assembled from what the stream would have carried, so that the two cannot differ.
"""

import base64
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from whorl import __version__
from whorl.engine.call_forms import CallPart
from whorl.engine.harmony import HarmonyParser
from whorl.engine.reply_parser import Parts, ReplyParser
from whorl.engine.sequence import Logprob, Sequence

from .engine_thread import Job, StepOutput
from .logprobs import DetailWriter, TokenNumbers, TokenTexts, for_chat, for_completion, for_prompt
from .prepare import Prepared
from .schemas import ChatRequest, CompletionRequest, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One request that the engine runs. end_think: the token id of the closing think tag; None: the model has none."""

    prepared: Prepared
    job: Job
    model: str
    request_id: str
    texts: TokenTexts
    end_think: int | None
    has_versions: bool = False  # answers say which weights have sampled them


class Reply:
    """Formats the answer to one request; the base class of all routes. Sequences are in the order of the choices.

    kind, chunk_kind: the field `object` of a response and of a chunk of a stream. prefix: of the response's id.
    """

    kind = chunk_kind = prefix = ""

    def __init__(self, request: Sampling, run: Run) -> None:
        self.prepared, self.job, self.num_copies = run.prepared, run.job, request.n or 1
        self.texts = TokenNumbers.like(run.texts) if request.return_tokens_as_token_ids else run.texts
        self._has_ids, self._has_scores = request.return_token_ids, request.prompt_logprobs is not None
        self._has_versions, self._routes_start = run.has_versions, request.routed_experts_prompt_start
        self._new_ids: list[list[int]] = [[] for _ in run.job.sequences]  # that no chunk has reported
        options = request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._has_running_usage = options is not None and options.continuous_usage_stats
        self._head = {
            "id": f"{self.prefix}-{run.request_id}",
            "created": int(time.time()),
            "model": run.model,
            "system_fingerprint": f"whorl-{__version__}",
        }

    async def complete(self, deadline: float) -> dict[str, Any]:
        """Wait for all sequences and return the response as one object."""
        async for output in self.job.outputs(deadline):
            self.collect(output)
        indices = range(len(self.job.sequences))
        choices = [self.choice(index) | self.for_trainers(index) | self.at_end(index) for index in indices]
        answer = {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}
        return answer | self.prompt_for_trainers() | self.version()

    # ---- what trainers ask for

    def for_trainers(self, index: int) -> dict[str, Any]:
        """Return the token ids of a choice, if they were asked for."""
        return {"token_ids": self.job.sequences[index].output_ids} if self._has_ids else {}

    def prompt_for_trainers(self) -> dict[str, Any]:
        """Return the token ids and the scores of the prompt, if they were asked for."""
        return self._prompt_fields(0)

    def _prompt_fields(self, index: int) -> dict[str, Any]:
        seq = self.job.sequences[index]
        ids = {"prompt_token_ids": seq.token_ids[: seq.prompt_len]} if self._has_ids else {}
        return ids | ({"prompt_logprobs": self.prompt_logprobs(index)} if self._has_scores else {})

    def prompt_logprobs(self, index: int) -> list[Any] | None:
        """Return the log-probabilities of the prompt of a sequence; None if they were not asked for."""
        return for_prompt(self.texts, self.job.sequences[index].prompt_logprobs) if self._has_scores else None

    def versions(self, index: int) -> dict[str, Any]:
        """Return which weights have sampled which tokens of a choice."""
        if not self._has_versions:
            return {}
        seq = self.job.sequences[index]
        ends = [start for _, start in seq.weight_versions[1:]] + [seq.num_outputs]
        spans = zip(seq.weight_versions, ends, strict=True)
        return {"weight_versions": [{"version": v, "start": start, "end": end} for (v, start), end in spans]}

    def routes(self, index: int) -> dict[str, Any]:
        """Return to which experts each token of a choice was sent, in vLLM's form: a file of numpy in base64."""
        rows = self.job.sequences[index].routed_experts
        if rows is None:
            return {}
        file = io.BytesIO()
        np.save(file, rows[self._routes_start :], allow_pickle=False)
        return {"routed_experts": base64.b64encode(file.getvalue()).decode()}

    def at_end(self, index: int) -> dict[str, Any]:
        """Return what is known of a choice when it has ended."""
        return self.versions(index) | self.routes(index)

    def version(self) -> dict[str, Any]:
        """Return the version of the weights that the last token was sampled with."""
        all_versions = [v for seq in self.job.sequences for v, _ in seq.weight_versions]
        return {"weight_version": all_versions[-1] if all_versions else None} if self._has_versions else {}

    def _with_new_ids(self, choice: dict[str, Any], is_last: bool) -> dict[str, Any]:
        """Add to a choice of a stream the ids of its new tokens, and what `at_end` has."""
        index = choice["index"]
        if self._has_ids:
            choice, self._new_ids[index] = choice | {"token_ids": self._new_ids[index]}, []
        return choice | (self.at_end(index) if is_last else {})

    async def chunks(self, deadline: float) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a streamed response."""
        for choice in self.opening():
            yield self._chunk([choice])
        async for output in self.job.outputs(deadline):
            self._new_ids[output.index] += output.token_ids
            for choice in self.advance(output):
                yield self._chunk([self._with_new_ids(choice, choice["finish_reason"] is not None)])
        if self._has_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._has_running_usage:
            return chunk | {"usage": self.usage()}
        return chunk | ({"usage": None} if self._has_usage else {})

    def usage(self) -> dict[str, Any]:
        """Count the tokens of the request, in OpenAI's form."""
        sequences = self.job.sequences
        firsts = sequences[:: self.num_copies]  # the n sequences of a prompt share it: count it once
        num_prompt = sum(seq.prompt_len for seq in firsts)
        num_output = sum(self.num_outputs(seq) for seq in sequences)
        num_drafted, num_accepted = (sum(getattr(s, n) for s in sequences) for n in ("num_drafted", "num_accepted"))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(seq.num_cached for seq in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(self.num_reasoning(seq) for seq in sequences),
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_drafted - num_accepted,
            },
        }

    def num_outputs(self, seq: Sequence) -> int:
        return seq.num_outputs

    def num_reasoning(self, seq: Sequence) -> int:
        return 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the choices that a stream starts with."""
        raise NotImplementedError

    def advance(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the choices that a stream carries for one step output."""
        raise NotImplementedError

    def collect(self, output: StepOutput) -> None:
        """Add one step output to the choices of a complete response."""
        raise NotImplementedError

    def choice(self, index: int) -> dict[str, Any]:
        """Return one choice of a complete response, from everything collected."""
        raise NotImplementedError


def arguments_of(text: str) -> dict[str, Any]:
    """Parse a call's arguments; text that is no JSON object goes under INVALID_JSON, as Anthropic's docs say."""
    try:
        parsed = json.loads(text) if text.strip() else {}
        # Python reads NaN, infinities and half a surrogate pair, which no answer can have.
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": text}


def _parser(request: ChatRequest, prepared: Prepared) -> ReplyParser | HarmonyParser:
    is_parallel = request.parallel_tool_calls is not False
    if prepared.is_harmony:
        return HarmonyParser(may_think=prepared.may_think, has_tools=prepared.form is not None, is_parallel=is_parallel)
    return ReplyParser(
        may_think=prepared.may_think,
        is_thinking=prepared.is_thinking,
        form=prepared.form,
        schemas={tool.function.name: tool.function.parameters or {} for tool in request.tools or ()},
        is_parallel=is_parallel,
    )


class ParsedReply(Reply):
    """A reply to a conversation: separates reasoning, text and tool calls."""

    def __init__(self, request: ChatRequest, run: Run, details: DetailWriter | None = None) -> None:
        super().__init__(request, run)
        self._end_think, self._details = run.end_think, details
        count = len(self.job.sequences)
        self._parsers = [_parser(request, self.prepared) for _ in range(count)]
        self._logprobs: list[list[Logprob]] = [[] for _ in range(count)]  # not sent yet
        self._num_read = [0] * count  # tokens of each sequence so far
        self._num_reasoning: dict[Sequence, int] = {}  # kept up to date, as a stream may report usage in every chunk

    def num_reasoning(self, seq: Sequence) -> int:
        return self._num_reasoning.get(seq, 0)

    def parse(self, output: StepOutput) -> Parts:
        """Split one step output into reasoning, content and tool calls."""
        seq = self.job.sequences[output.index]
        if self._details is None:
            self._logprobs[output.index] += output.logprobs
        else:
            self._details.add(output, seq)
        if self._end_think in output.token_ids and seq not in self._num_reasoning:
            self._num_reasoning[seq] = self._num_read[output.index] + output.token_ids.index(self._end_think)
        self._num_read[output.index] += len(output.token_ids)
        return self._parsers[output.index].add(output.text, is_last=output.finish_reason is not None)

    def reason(self, output: StepOutput) -> str:
        """Return OpenAI's finish reason of a sequence's last output."""
        has_calls = self._parsers[output.index].num_calls > 0 and output.finish_reason == "stop"
        return "tool_calls" if has_calls else str(output.finish_reason)

    def take_logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the log-probabilities since the last call, in OpenAI's form."""
        logprobs, self._logprobs[index] = self._logprobs[index], []
        return for_chat(self.texts, logprobs) if logprobs else None


class ChatReply(ParsedReply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: ChatRequest, run: Run, details: DetailWriter | None = None) -> None:
        super().__init__(request, run, details)
        count = len(self.job.sequences)
        self._parts = [Parts() for _ in range(count)]
        self._reasons: list[str | None] = [None] * count

    def opening(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self._parsers)):
            yield self._delta(index, {"role": "assistant", "content": ""})

    def advance(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        for delta in _deltas(self.parse(output)):
            yield self._delta(output.index, delta)
        if output.finish_reason is not None:
            yield self._delta(output.index, {}, self.reason(output))

    def collect(self, output: StepOutput) -> None:
        self._parts[output.index].join(self.parse(output))
        if output.finish_reason is not None:
            self._reasons[output.index] = self.reason(output)

    def choice(self, index: int) -> dict[str, Any]:
        parts = self._parts[index]
        has_content = bool(parts.content) or not parts.calls
        message: dict[str, Any] = {"role": "assistant", "content": parts.content if has_content else None}
        message["refusal"] = None
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            calls = parts.whole_calls()
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in calls]
        logprobs = self.take_logprobs(index)
        choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._reasons[index]}
        return choice | self._take_details(index)

    def _take_details(self, index: int) -> dict[str, Any]:
        return {} if self._details is None else {"token_details": self._details.take(index)}

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        is_opening = "role" in delta
        logprobs = None if is_opening else self.take_logprobs(index)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return choice if is_opening else choice | self._take_details(index)


def _deltas(parts: Parts) -> Iterator[dict[str, Any]]:
    if parts.reasoning:
        yield {"reasoning_content": parts.reasoning}
    if parts.content:
        yield {"content": parts.content}
    for part in parts.calls:
        yield from _call_deltas(part)


def _call_deltas(part: CallPart) -> Iterator[dict[str, Any]]:
    if part.id is not None and part.name is not None:
        yield {"tool_calls": [{"index": part.index} | _call(part.id, part.name, "")]}
    if part.arguments:
        yield {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class CompletionReply(Reply):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, request: CompletionRequest, run: Run) -> None:
        super().__init__(request, run)
        self._num_top, self._echo = request.logprobs, request.echo
        self._only_scores = request.max_tokens == 0  # the engine generates one token, which is not reported
        count = len(self.job.sequences)
        self._pending_text = [""] * count
        self._logprobs: list[list[Logprob | int]] = [[] for _ in range(count)]  # as `for_completion` takes them
        self._offsets = [0] * count  # where in the text the next token with logprobs starts
        self._reasons: list[str | None] = [None] * count
        self._has_begun = [False] * count

    def for_trainers(self, index: int) -> dict[str, Any]:
        return super().for_trainers(index) | self._prompt_fields(index)

    def prompt_for_trainers(self) -> dict[str, Any]:
        return {}  # each choice has those of its own prompt

    def num_outputs(self, seq: Sequence) -> int:
        return 0 if self._only_scores else seq.num_outputs

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def advance(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        self.collect(output)
        index = output.index
        text, self._pending_text[index] = self._pending_text[index], ""
        if text or self._has_ids or self._reasons[index] is not None:
            yield self._choice(index, text)

    def collect(self, output: StepOutput) -> None:
        index = output.index
        if self._echo and not self._has_begun[index]:
            self._pending_text[index] += self.prepared.texts[index // self.num_copies]
            seq = self.job.sequences[index]
            if self._num_top is not None:
                self._logprobs[index] += [seq.token_ids[0], *seq.prompt_logprobs]
        self._has_begun[index] = True
        if not self._only_scores:
            self._pending_text[index] += output.text
            self._logprobs[index] += output.logprobs
        if output.finish_reason is not None:
            self._reasons[index] = "length" if self._only_scores else str(output.finish_reason)

    def choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, self._pending_text[index])

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._take_logprobs(index),
            "finish_reason": self._reasons[index],
        }

    def _take_logprobs(self, index: int) -> dict[str, Any] | None:
        logprobs, self._logprobs[index] = self._logprobs[index], []
        if self._num_top is None:
            return None
        start = self._offsets[index]
        self._offsets[index] += sum(
            len(self.texts.text(entry if isinstance(entry, int) else entry.token_id)) for entry in logprobs
        )
        return for_completion(self.texts, logprobs, start=start, num_top=self._num_top)
