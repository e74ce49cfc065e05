"""From what the engine adds, step by step, to OpenAI's objects: chunks of a stream, or one whole answer.

A reply consumes outputs; the whole answer is made of what the stream would have carried, so the two cannot differ.
"""

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from whorl import __version__
from whorl.engine.call_forms import CallPart
from whorl.engine.reply_parser import Parts, ReplyParser
from whorl.engine.sequence import Logprob, Sequence

from .engine_thread import Job, StepOutput
from .logprobs import TokenTexts, for_chat, for_completion
from .prepare import Prepared
from .schemas import ChatRequest, CompletionRequest, Sampling
from .token_details import DetailWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One request on its way through the engine. number: of the request; end_think: the tag's token, where there is."""

    prepared: Prepared
    job: Job
    model: str
    number: str
    texts: TokenTexts
    end_think: int | None


class Reply:
    """What all ways of asking share: one request, its sequences in the order of its choices."""

    kind = chunk_kind = prefix = ""

    def __init__(self, request: Sampling, run: Run) -> None:
        self.prepared, self.job, self.texts, self.num_copies = run.prepared, run.job, run.texts, request.n or 1
        options = request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._has_running_usage = options is not None and options.continuous_usage_stats
        self._head = {
            "id": f"{self.prefix}-{run.number}",
            "created": int(time.time()),
            "model": run.model,
            "system_fingerprint": f"whorl-{__version__}",
        }

    async def whole(self, deadline: float) -> dict[str, Any]:
        async for output in self.job.outputs(deadline):
            self.collect(output)
        choices = [self.choice(index) for index in range(len(self.job.sequences))]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    async def chunks(self, deadline: float) -> AsyncIterator[dict[str, Any]]:
        for choice in self.opening():
            yield self._chunk([choice])
        async for output in self.job.outputs(deadline):
            for choice in self.advance(output):
                yield self._chunk([choice])
        if self._has_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._has_running_usage:
            return chunk | {"usage": self.usage()}
        return chunk | ({"usage": None} if self._has_usage else {})

    def usage(self) -> dict[str, Any]:
        sequences = self.job.sequences
        firsts = sequences[:: self.num_copies]  # copies share a prompt
        num_prompt = sum(seq.prompt_len for seq in firsts)
        num_output = sum(self.num_outputs(seq) for seq in sequences)
        num_drafted, num_accepted = (sum(getattr(s, n) for s in sequences) for n in ("num_drafted", "num_accepted"))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(seq.num_cached for seq in firsts)},
            "completion_tokens_details": {
                "reasoning_tokens": sum(self.num_thought(seq) for seq in sequences),
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_drafted - num_accepted,
            },
        }

    def num_outputs(self, seq: Sequence) -> int:
        return seq.num_outputs

    def num_thought(self, seq: Sequence) -> int:
        return 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """What a stream starts with."""
        raise NotImplementedError

    def advance(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        """What a stream carries of a output."""
        raise NotImplementedError

    def collect(self, output: StepOutput) -> None:
        raise NotImplementedError

    def choice(self, index: int) -> dict[str, Any]:
        """The whole one, of everything collected."""
        raise NotImplementedError


class ParsedReply(Reply):
    """Replies to a conversation: thinking, text and tool calls are told apart."""

    def __init__(self, request: ChatRequest, run: Run, details: DetailWriter | None = None) -> None:
        super().__init__(request, run)
        self._end_think, self._details = run.end_think, details
        count = len(self.job.sequences)
        self._parsers = [
            ReplyParser(
                may_think=self.prepared.may_think,
                is_thinking=self.prepared.is_thinking,
                form=self.prepared.form,
                schemas={tool.function.name: tool.function.parameters or {} for tool in request.tools or ()},
                is_parallel=request.parallel_tool_calls is not False,
            )
            for _ in range(count)
        ]
        self._logprobs: list[list[Logprob]] = [[] for _ in range(count)]  # not sent yet
        self._num_read = [0] * count
        self._num_thought: dict[Sequence, int] = {}  # counted as the tokens come: a stream may ask with each of them

    def num_thought(self, seq: Sequence) -> int:
        return self._num_thought.get(seq, 0)

    def parse(self, output: StepOutput) -> Parts:
        seq = self.job.sequences[output.index]
        if self._details is None:
            self._logprobs[output.index] += output.logprobs
        else:
            self._details.add(output, seq)
        if self._end_think in output.token_ids and seq not in self._num_thought:
            self._num_thought[seq] = self._num_read[output.index] + output.token_ids.index(self._end_think)
        self._num_read[output.index] += len(output.token_ids)
        return self._parsers[output.index].add(output.text, is_last=output.finish_reason is not None)

    def reason(self, output: StepOutput) -> str:
        has_calls = self._parsers[output.index].num_calls > 0 and output.finish_reason == "stop"
        return "tool_calls" if has_calls else str(output.finish_reason)

    def take_logprobs(self, index: int) -> dict[str, Any] | None:
        found, self._logprobs[index] = self._logprobs[index], []
        return for_chat(self.texts, found) if found else None


class ChatReply(ParsedReply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, request: ChatRequest, run: Run, details: DetailWriter | None = None) -> None:
        super().__init__(request, run, details)
        count = len(self.job.sequences)
        self._whole = [Parts() for _ in range(count)]
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
        self._whole[output.index].join(self.parse(output))
        if output.finish_reason is not None:
            self._reasons[output.index] = self.reason(output)

    def choice(self, index: int) -> dict[str, Any]:
        parts = self._whole[index]
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
        self._only_scores = request.max_tokens == 0
        count = len(self.job.sequences)
        self._whole = [""] * count
        self._logprobs: list[list[Logprob | int]] = [[] for _ in range(count)]
        self._offsets = [0] * count  # of the next token that gets logprobs
        self._reasons: list[str | None] = [None] * count
        self._has_begun = [False] * count

    def num_outputs(self, seq: Sequence) -> int:
        return 0 if self._only_scores else seq.num_outputs

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def advance(self, output: StepOutput) -> Iterator[dict[str, Any]]:
        self.collect(output)
        index = output.index
        text, self._whole[index] = self._whole[index], ""
        if text or self._reasons[index] is not None:
            yield self._choice(index, text)

    def collect(self, output: StepOutput) -> None:
        index = output.index
        if self._echo and not self._has_begun[index]:
            self._whole[index] += self.prepared.texts[index // self.num_copies]
            seq = self.job.sequences[index]
            if self._num_top is not None:
                self._logprobs[index] += [seq.token_ids[0], *seq.prompt_logprobs]
        self._has_begun[index] = True
        if not self._only_scores:
            self._whole[index] += output.text
            self._logprobs[index] += output.logprobs
        if output.finish_reason is not None:
            self._reasons[index] = "length" if self._only_scores else str(output.finish_reason)

    def choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, self._whole[index])

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._take(index), "finish_reason": self._reasons[index]}

    def _take(self, index: int) -> dict[str, Any] | None:
        found, self._logprobs[index] = self._logprobs[index], []
        if self._num_top is None:
            return None
        start = self._offsets[index]
        self._offsets[index] += sum(
            len(self.texts.text(one if isinstance(one, int) else one.token_id)) for one in found
        )
        return for_completion(self.texts, found, start=start, num_top=self._num_top)
