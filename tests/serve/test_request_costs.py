"""What one request asks for costs itself, not everybody: sizes, biases, penalties, stop strings, broken characters."""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import llguidance
import pytest
import torch
from mock_model import ByteTokenizer, MockModel
from pydantic import ValidationError
from serving import ALPHABET, Served, byte_tokenizer, serving, told, wait_until

from whorl import ops
from whorl.engine import adjust, grammar_masks
from whorl.engine.call import Sample
from whorl.engine.llm import LLM
from whorl.engine.scheduler import Chunk
from whorl.engine.sequence import AllowError, FinishReason, SamplingParams, Sequence, Text
from whorl.serve import grammar, worker
from whorl.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from whorl.serve.validation import validation_error

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
MANY = {f"k{i}": 1 for i in range(20_000)}
WIDE = {"type": "string", "pattern": "^(.*a.{200}b.*c.{300}d)$"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told({"wide": '"' + "abcdabaababbab" * 40})) as running:
        yield running


# ---- what is refused, and how soon


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (ChatRequest, {"messages": MESSAGES, **MANY}, "'k0' is not a parameter that this server knows, nor are many"),
        (ChatRequest, {"messages": MESSAGES, "logit_bias": MANY}, "logit_bias: has 20000 entries; up to 1024"),
        (ChatRequest, {"messages": [MESSAGES[0] | MANY]}, "messages.0: 'k0' is not a parameter"),
        (ChatRequest, {"messages": [{"content": "a"}] * 4000}, "messages.0.role: Field required"),
        (ChatRequest, {"messages": [{"role": "a"}] * 20_000}, "messages: has 20000 messages, parts and calls"),
        (
            ChatRequest,
            {"messages": [{"role": "a", "content": [{"type": "text", "text": ""}] * 9000}] * 2},
            "messages: has 18002 messages, parts and calls; up to 4096",
        ),
        (ChatRequest, {"messages": MESSAGES, "tools": [{}] * 20_000}, "tools.0.type: Field required"),
        (ChatRequest, {"messages": MESSAGES, "modalities": ["x"] * 20_000}, "modalities.0"),
        (ChatRequest, {"messages": MESSAGES, "stop": ["a"] * 20_000}, "stop"),
        (ChatRequest, {"messages": MESSAGES, "stop": "a" * 1025}, "stop: String should have at most 1024 characters"),
        (ChatRequest, {"messages": MESSAGES, "stop_token_ids": ["a"] * 20_000}, "stop_token_ids.0"),
        (CompletionRequest, {"prompt": ["a"] * 20_000}, "prompt: has 20000 entries; up to 4096 are allowed"),
        (CompletionRequest, {"prompt": [[1]] * 20_000}, "prompt: has 20000 entries"),
        (CompletionRequest, {"prompt": [["a"] * 20_000]}, "prompt.0.0: Input should be a valid integer"),
        (CompletionRequest, {"prompt": [1, *(["a"] * 20_000)]}, "prompt.1: Input should be a valid integer"),
        (DetokenizeRequest, {"tokens": ["a"] * 20_000}, "tokens.0"),
        (DetokenizeRequest, {"tokens": [1] * (2**20 + 1)}, "tokens: has 1048577 entries"),
        (TokenizeRequest, {"messages": [{"role": "a"}] * 20_000}, "messages: has 20000"),
    ],
)
def test_of_many_faults_few_are_collected(kind: Any, body: Any, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors = caught.value.errors()
    assert len(errors) < 10
    assert says in validation_error(errors, body).message


def test_text_that_cannot_fit_is_not_encoded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    size = byte_tokenizer().max_token_bytes
    assert size == len("<|endoftext|>")
    for path, body in (
        (COMPLETIONS, {"prompt": "a" * (1024 * size + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 1024 * size}]}),
    ):
        error = served.http.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"bytes; 1024 tokens hold up to {1024 * size}" in error["message"]
    error = served.http.post(COMPLETIONS, json={"prompt": "a" * 1024 * size}).json()["error"]
    assert f"has {1024 * size} tokens" in error["message"]
    assert served.post("/tokenize", prompt="a" * 20_000)["count"] == 20_000  # asks nothing of the model


def test_sequences_are_counted_before_anything_is_encoded(served: Served) -> None:
    response = served.http.post(COMPLETIONS, json={"prompt": ["a" * 10**5] * 9, "n": 128})
    assert "1152 sequences in one request" in response.json()["error"]["message"]


def test_the_default_body_is_a_few_megabytes(served: Served) -> None:
    response = served.http.post(COMPLETIONS, json={"prompt": "a" * (4 << 20)})
    assert response.status_code == 413


# ---- schemas that are given up


def shaped(schema: Any, **others: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "wide"}]
    return {"messages": messages, "response_format": form, "temperature": 0, **others}


class Limited:
    """The library with lower limits: it gives up after a few tokens."""

    grammar_from_json_schema = staticmethod(llguidance.LLMatcher.grammar_from_json_schema)

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return LLMATCHER(*arguments, **options, limits=llguidance.LLParserLimits(max_lexer_states=300))


LLMATCHER = llguidance.LLMatcher


@pytest.mark.parametrize("fault", ["limit", "time"])
def test_a_schema_that_is_given_up_ends_with_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "limit":
        monkeypatch.setattr(llguidance, "LLMatcher", Limited)
    else:
        monkeypatch.setattr(grammar_masks, "_FREE_SECONDS", 0.0)
        monkeypatch.setattr(grammar_masks, "_TOKEN_SECONDS", 0.0)
    response = served.http.post(CHAT, json=shaped(WIDE, n=2))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "schema_limit"
    assert ("too many states" if fault == "limit" else "too long to follow") in error["message"]
    *pieces, last, done = served.events(CHAT, **shaped(WIDE))
    assert (last["error"]["code"], done) == ("schema_limit", "[DONE]")
    assert not any(choice["finish_reason"] for piece in pieces for choice in piece["choices"])
    wait_until(served.is_idle)
    assert served.complete("a", max_tokens=2)["choices"][0]["text"] == "bc"


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "#"}, "cannot be followed: no text is valid"),
        ({"enum": ["x" * 300_000]}, "characters; up to 262144 are allowed"),
    ],
)
def test_a_schema_that_is_refused_at_once(served: Served, schema: Any, says: str) -> None:
    response = served.http.post(CHAT, json=shaped(schema))
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_a_schema_whose_first_tokens_take_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    jobs = worker.Jobs(tokenizer, len(tokenizer))
    text = grammar.Grammars(tokenizer, len(tokenizer)).json_schema(WIDE)
    jobs.prove(text.text, text.label)
    monkeypatch.setattr(worker, "_PROOF_SECONDS", 0.0)
    with pytest.raises(worker.RequestRefused, match="takes too long to follow"):
        jobs.prove(text.text, text.label)


def test_a_grammar_decides_itself_when_the_text_ends(served: Served) -> None:
    response = served.http.post(CHAT, json=shaped({"type": "integer"}, ignore_eos=True))
    assert "ignore_eos and a grammar exclude each other" in response.json()["error"]["message"]


def engine(**options: Any) -> LLM:
    return LLM(model=MockModel(), tokenizer=ByteTokenizer(), device="cpu", num_blocks=64, **options)


def test_a_mask_that_fails_ends_its_own_sequence() -> None:
    def allow(output: list[int]) -> None:
        if len(output) == 3:
            raise AllowError("no more")

    llm = engine()
    (bad,) = llm.add([1, 2], SamplingParams(max_tokens=8, ignore_eos=True, allow=allow))
    (good,) = llm.add([1, 2], SamplingParams(max_tokens=8, ignore_eos=True))
    while llm.has_work:
        llm.step()
    assert (bad.finish_reason, bad.num_outputs, str(bad.error)) == (FinishReason.ERROR, 3, "no more")
    assert (good.finish_reason, good.num_outputs) == (FinishReason.LENGTH, 8)
    assert llm.pool.num_used == 0
    with pytest.raises(AllowError, match="no more"):
        llm.generate([1, 2], SamplingParams(max_tokens=8, ignore_eos=True, allow=allow), progress=False)


# ---- biases and penalties


class Watched(dict[int, float]):
    num_read = 0

    def values(self) -> Any:
        self.num_read += 1
        return super().values()

    def __iter__(self) -> Any:
        self.num_read += 1
        return super().__iter__()


def test_biases_are_read_once_for_all_copies_and_steps() -> None:
    counts = []
    for num_tokens in (2, 20):
        biases = Watched(dict.fromkeys(range(200), 1.0))
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logit_bias=biases, n=4)
        engine().generate([1, 2], params, progress=False)
        counts.append(biases.num_read)
    assert counts[0] == counts[1]


def naive(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """As it is defined, token by token."""
    seq, params = sample.chunk.sequence, sample.chunk.sequence.params
    counts = dict.fromkeys(seq.token_ids[: seq.prompt_len], 0) if params.has_penalties else {}
    if params.has_penalties:
        counts |= Counter(seq.output_ids + sample.chunk.draft[: sample.num_drafted])
    bias = dict(params.logit_bias)
    if sample.output_index < params.min_tokens:
        bias |= dict.fromkeys(seq.stop_ids, -torch.inf)
    rows = [(t, counts.get(t, -1), bias.get(t, 0.0)) for t in counts | bias if t < len(logits)]
    tokens, times, biases = (torch.tensor([[row[part] for row in rows]]) for part in range(3))
    rates = {n: torch.tensor([getattr(params, f"{n}_penalty")]) for n in ("repetition", "presence", "frequency")}
    return ops.penalize(logits[None], tokens.long(), times.long(), bias=biases, **rates)[0]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_kept_from_step_to_step_is_what_is_asked(seed: int) -> None:
    rng, size = random.Random(seed), 40
    cases: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.5},
        {"frequency_penalty": 0.75, "logit_bias": {3: 1.0, 39: -2.0, 41: 5.0}, "min_tokens": 3},
        {"logit_bias": {7: 100.0}},
        {"min_tokens": 6},
        {},
    ]
    sequences = [
        Sequence([rng.randrange(45) for _ in range(9)], SamplingParams(**params), max_len=99, eos_ids=[5, 44])
        for params in cases
    ]
    kept = adjust.Adjuster(size)
    for step in range(8):
        draft = [rng.randrange(45) for _ in range(3)]
        chunks = [Chunk(seq, 1) for seq in sequences]
        for chunk in chunks:
            chunk.draft = draft
        samples = [Sample(chunk, k, step + k) for chunk in chunks for k in range(4)]
        logits = torch.randn(len(samples), 45, generator=torch.Generator().manual_seed(step))
        actual = kept.adjust(logits, samples)
        expected = torch.stack([naive(row[:size], sample) for row, sample in zip(logits, samples, strict=True)])
        assert torch.equal(actual, expected)
        for seq in sequences:
            kept_length = rng.randint(max(seq.prompt_len, len(seq.token_ids) - 3), len(seq.token_ids))
            if seq.counts is not None:  # as a draft model does with what was not taken
                seq.counts.cut(kept_length)
            del seq.token_ids[kept_length:]
            seq.token_ids += rng.sample(range(size), rng.randint(1, 3))


# ---- stop strings and characters that never become whole


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The earliest to end; of those that end in one piece the earliest to begin."""
    for end in range(1, len(text) + 1):
        matches = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return min(matches)
    return None


def test_stop_strings_in_every_text_of_two_letters() -> None:
    for size in range(8):
        for letters in itertools.product("ab", repeat=size):
            text = "".join(letters)
            for stops in (("aab",), ("abab", "bb"), ("aaa", "b"), ("abaab", "aa")):
                out, sent = Text(ByteTokenizer().detokenizer(), stops), ""
                for letter in text:
                    is_stopped = out.add(ord(letter))
                    sent += out.take(is_finished=is_stopped)
                    if is_stopped:
                        break
                match = first_stop(text, stops)
                assert out.match == (match and match[1])
                held = text[: match[0]] if match else text
                assert out.value == held
                assert held.startswith(sent)
                tails = [n for n in range(len(held) + 1) if any(s.startswith(held[n:]) for s in stops)]
                assert match or sent == held[: min(tails)]


def test_long_stop_strings_take_no_longer_than_the_text() -> None:
    text = Text(ByteTokenizer().detokenizer(), tuple("a" * 1000 + chr(98 + i) for i in range(16)))
    started = time.monotonic()
    for _ in range(5000):
        assert not text.add(97)
        text.take(is_finished=False)
    assert time.monotonic() - started < 20  # used to be minutes


@pytest.mark.parametrize("ids", [[0x80] * 300, [0xF0, 0x9F] * 150, [0x80] * 100 + [0xC3, 0xA9] * 3 + [97, 0xE2, 0x82]])
def test_bytes_that_make_no_character_are_not_decoded_again_and_again(ids: list[int]) -> None:
    tokenizer = byte_tokenizer()
    letters = {byte: i for i, byte in ((i, _byte(tokenizer, i)) for i in range(256)) if byte is not None}
    tokens = [letters[byte] for byte in ids]
    detokenizer = tokenizer.detokenizer()
    pieces = []
    for token in tokens:
        pieces += [detokenizer.add(token), detokenizer.add(tokenizer.eos_ids[0])]
        assert len(detokenizer._window) <= 65
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(tokens)


def _byte(tokenizer: Any, token_id: int) -> int | None:
    from whorl.serve.logprobs import _byte_letters

    return _byte_letters().get(tokenizer.token(token_id))


def test_thinking_is_counted_as_it_comes(served: Served) -> None:
    with serving(told({"think": "<think>\nhm, well\n</think>\n\nYes."})) as thinking:
        body = {"messages": [{"role": "user", "content": "think"}], "temperature": 0}
        usage = thinking.post(CHAT, **body)["usage"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = thinking.events(CHAT, **body, stream_options=options)
        counts = [e["usage"]["completion_tokens_details"]["reasoning_tokens"] for e in events[:-1]]
        assert counts[-1] == usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>\nhm, well\n") - 6
        assert counts == sorted(counts)


def test_answers_are_what_they_were(served: Served) -> None:
    choice = served.complete("a", max_tokens=25, stop=["xyz", "opq"], logprobs=2, logit_bias={"0": -100})["choices"][0]
    assert choice["text"] == ALPHABET[1 : ALPHABET.index("o")]
    assert json.dumps(choice["logprobs"])


def test_limits_are_in_the_interface(served: Served) -> None:
    parts = served.http.get("/openapi.json").json()["components"]["schemas"]
    chat, completion = parts["ChatRequest"]["properties"], parts["CompletionRequest"]["properties"]
    assert chat["messages"]["items"] == {"$ref": "#/components/schemas/ChatMessage"}
    assert next(kind["maxProperties"] for kind in chat["logit_bias"]["anyOf"] if kind["type"] == "object") == 1024
    assert sorted(kind["type"] for kind in completion["prompt"]["oneOf"]) == ["array", "array", "array", "string"]
