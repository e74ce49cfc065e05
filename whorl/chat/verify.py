"""`whorl verify`: compute the log-probabilities of a saved answer again, here, and compare them bit for bit."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from whorl.engine.llm import LLM


class Answer(NamedTuple):
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Verdict(NamedTuple):
    """num_different: of the log-probabilities; first: the index of the first one, its saved and its computed value."""

    num_tokens: int
    num_different: int
    first: tuple[int, float, float] | None

    @property
    def is_equal(self) -> bool:
        return self.num_different == 0

    def __str__(self) -> str:
        if self.first is None:
            return f"equal: {self.num_tokens} log-probabilities, bit for bit"
        at, saved, computed = self.first
        return (
            f"not equal: {self.num_different} of {self.num_tokens} log-probabilities differ; token {at} of the answer "
            f"has {saved!r} there and {computed!r} here"
        )


def read_answers(text: str, source: str) -> list[Answer]:
    """Return the answers of a document: of `whorl generate --json`, or of a server's completion.

    Raises ValueError, which begins with `source`, where it has no answer that can be computed again.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{source}: is a {type(document).__name__}, expected an object")
    choices = document.get("choices", [document])
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"{source}: has no choices")
    return [_answer({"prompt_token_ids": document.get("prompt_token_ids")} | choice, source) for choice in choices]


def _answer(choice: dict[str, Any], source: str) -> Answer:
    prompt_ids: Any = choice["prompt_token_ids"]
    token_ids: Any = choice.get("token_ids")
    logprobs: Any = choice.get("logprobs")
    if isinstance(logprobs, dict):  # of chat completions, else of completions
        content = logprobs.get("content")
        is_list = isinstance(content, list) and all(isinstance(each, dict) for each in content)
        logprobs = [each.get("logprob") for each in content] if content and is_list else logprobs.get("token_logprobs")
    lists = prompt_ids, token_ids, logprobs
    if not all(isinstance(each, list) and each for each in lists):
        raise ValueError(
            f"{source}: prompt_token_ids, token_ids or logprobs are missing; save what `whorl generate --json` "
            'prints, or ask a server with "logprobs": true (completions: 0) and "return_token_ids": true'
        )
    if not all(isinstance(token, int) for token in (*prompt_ids, *token_ids)):
        raise ValueError(f"{source}: a token id is not an integer")
    if not all(isinstance(value, int | float) for value in logprobs) or len(logprobs) != len(token_ids):
        raise ValueError(f"{source}: has {len(token_ids)} tokens, and not as many numbers in logprobs")
    return Answer(prompt_ids, token_ids, [float(value) for value in logprobs])


def verify(llm: "LLM", answers: list[Answer], lora: str | None = None) -> Iterator[Verdict]:
    """Yield a verdict for each answer. Raises ValueError for one that this model cannot run."""
    from whorl.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, lora=lora)
    for answer in answers:
        (output,) = llm.generate(answer.prompt_ids + answer.token_ids, params, progress=False)
        computed = [each.logprob for each in output.prompt_logprobs[-len(answer.token_ids) :]]
        pairs = zip(answer.logprobs, computed, strict=True)
        different = [(i, saved, here) for i, (saved, here) in enumerate(pairs) if saved.hex() != here.hex()]
        yield Verdict(len(computed), len(different), different[0] if different else None)
