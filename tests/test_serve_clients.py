"""Programs that others wrote against the server: the openai client, lm-eval and schemathesis; and the real model."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import ALPHABET, MODEL, Served, own_process, serving, stopped_in_a_stream, told, wait_until

from whorl.engine.llm import LLM
from whorl.serve.settings import DEFAULT_NAME

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWERS = {"hi": "Hello there!", "call": CALL, "fruit": '{"name": "fig", "count": 3}'}
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Fruit(BaseModel):
    name: str
    count: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS), api_key="sk-test") as running:
        yield running


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """The default model."""
    with serving(LLM(device="cpu", max_model_len=1024, max_num_seqs=32), names=(DEFAULT_NAME,)) as running:
        yield running


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="sk-test", max_retries=0, timeout=60)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


# ---- openai


def test_chat(served: Served) -> None:
    answer = client(served).chat.completions.create(model=MODEL, messages=user("hi"), temperature=0)
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 13
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert [model.id for model in client(served).models.list()] == [MODEL]
    assert client(served).models.retrieve(MODEL).id == MODEL


def test_streams(served: Served) -> None:
    options: Any = {"include_usage": True}
    create = client(served).chat.completions.create
    chunks = list(create(model=MODEL, messages=user("hi"), temperature=0, stream=True, stream_options=options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there!"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13
    with client(served).chat.completions.stream(model=MODEL, messages=user("hi"), temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == "Hello there!"
    texts = client(served).completions.create(model=MODEL, prompt="a", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "bcdef"


def test_tools(served: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    ask: Any = {"model": MODEL, "messages": user("call"), "tools": tools, "temperature": 0}
    message = client(served).chat.completions.create(**ask).choices[0].message
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rome"}
    # The answer goes back as the client has it, with the tool's result.
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history: Any = [*user("call"), message, result]
    assert client(served).chat.completions.create(model=MODEL, messages=history, tools=tools).choices
    with client(served).chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.name == "weather"


def test_logprobs(served: Served) -> None:
    create = client(served).chat.completions.create
    choice = create(model=MODEL, messages=user("hi"), temperature=0, logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(one.token for one in choice.logprobs.content[:-1]) == "Hello there!"
    assert {len(one.top_logprobs) for one in choice.logprobs.content} == {2}
    text = client(served).completions.create(
        model=MODEL, prompt="a", echo=True, logprobs=2, max_tokens=2, temperature=0
    )
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]


def test_json_schema(served: Served) -> None:
    parse = client(served).chat.completions.parse
    answer = parse(model=MODEL, messages=user("fruit"), response_format=Fruit, temperature=0)
    assert answer.choices[0].message.parsed == Fruit(name="fig", count=3)
    with pytest.raises(openai.LengthFinishReasonError):
        parse(model=MODEL, messages=user("hi"), response_format=Fruit, temperature=0, max_tokens=20)


def test_errors_are_the_clients_own(served: Served) -> None:
    create = client(served).chat.completions.create
    with pytest.raises(openai.NotFoundError, match="not here"):
        create(model="gpt-9", messages=user("hi"))
    with pytest.raises(openai.BadRequestError, match="2000 more") as caught:
        create(model=MODEL, messages=user("hi"), max_tokens=2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong").models.list()


def test_an_error_in_a_stream_reaches_the_client() -> None:
    with serving(told(delay=0.02), timeout=0.3, api_key="sk-test") as served:
        stream = client(served).completions.create(model=MODEL, prompt="a", max_tokens=500, stream=True)
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(stream)


# ---- the process


def test_sigterm_lets_running_requests_finish() -> None:
    with own_process("llm=told(delay=0.05)") as (process, url):
        body = {"prompt": "a", "max_tokens": 25, "temperature": 0}
        text = stopped_in_a_stream(process, url, signal.SIGTERM, body)
        assert text[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in text[:-1]) == ALPHABET[1:]
        assert process.wait(30) == 0  # stopped as asked


# ---- the real model


def test_the_default_model_answers(real: Served) -> None:
    create = client(real).chat.completions.create
    answer = create(model=DEFAULT_NAME, messages=PARIS, temperature=0, max_tokens=8)
    assert "Paris" in (answer.choices[0].message.content or "")
    stream = create(model=DEFAULT_NAME, messages=PARIS, temperature=0, max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


@pytest.mark.slow
def test_the_default_model_keeps_to_a_schema(real: Served) -> None:
    parse = client(real).chat.completions.parse
    question = user("Describe a bowl of apples in JSON, with name and count.")
    answer = parse(model=DEFAULT_NAME, messages=question, response_format=Fruit, temperature=0, max_tokens=80)
    assert isinstance(answer.choices[0].message.parsed, Fruit)
    tools: Any = [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "maxLength": 20}},
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        }
    ]
    forced: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    ask = user("What is the weather in Paris?")
    message = client(real).chat.completions.create(model=DEFAULT_NAME, messages=ask, temperature=0, **forced)
    (call,) = message.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments).keys() == {"city"}


@pytest.mark.slow
def test_two_hundred_streams_some_of_which_leave(real: Served) -> None:
    """Every request ends as it should, and nothing of it stays."""
    rng, ends = random.Random(0), []

    async def one(http: httpx.AsyncClient) -> None:
        await asyncio.sleep(rng.random() * 10)
        leaves_after = rng.choice([None, rng.uniform(0, 10)])
        body = {"prompt": f"The number {rng.randint(0, 50)} is", "max_tokens": rng.randint(1, 12), "stream": True}
        started = time.monotonic()
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if leaves_after is not None and time.monotonic() - started > leaves_after:
                    ends.append("left")
                    return
                if line == "data: [DONE]":
                    ends.append("done")
                    return
                assert not line.startswith('data: {"error"'), line
        raise AssertionError("the stream broke off")

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=real.url, timeout=500, limits=limits) as http:
            await asyncio.gather(*(one(http) for _ in range(200)))

    asyncio.run(everybody())
    wait_until(real.is_idle)
    assert len(ends) == 200
    assert ends.count("done") > 20
    assert real.http.get("/health").status_code == 200


# ---- lm-eval and schemathesis


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    command = [
        *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{served.url}/openapi.json"),
        *("--checks", "not_a_server_error", "--max-examples", "40", "--seed", "1", "--header"),
        *("Authorization: Bearer sk-test", "--request-timeout", "30", "--phases", "examples,coverage,fuzzing"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    wait_until(served.is_idle)


QUESTIONS = [
    ("The capital of France is", ["London", "Paris", "Rome"], 1),
    ("Two plus two is", ["four", "seven", "blue"], 0),
    ("Water freezes into", ["stone", "fire", "ice"], 2),
    ("The opposite of hot is", ["warm", "cold", "tall"], 1),
    ("The sun rises in the", ["east", "kitchen", "north"], 0),
    ("A baby dog is called a", ["kitten", "calf", "puppy"], 2),
]
TASK = """
task: quiz
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
def test_lm_eval_scores_as_transformers_does(real: Served, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # transformers reads GGUF files by it
    lines = [json.dumps({"question": q, "choices": choices, "answer": a}) for q, choices, a in QUESTIONS]
    (tmp_path / "quiz.jsonl").write_text("\n".join(lines))
    (tmp_path / "quiz.yaml").write_text(TASK.replace("DATA", str(tmp_path / "quiz.jsonl")))
    where = f"model={DEFAULT_NAME},base_url={real.url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "quiz", "--batch_size", "2"),
        *("--include_path", str(tmp_path), "--model_args", where, "--output_path", str(tmp_path), "--log_samples"),
    ]
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = tmp_path.rglob("samples_quiz_*.jsonl")
    found = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in found]
    expected = by_transformers(real)
    assert len(scores) == len(QUESTIONS)
    for ours, theirs in zip(scores, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)

    def accuracy(of: list[list[float]]) -> float:
        return sum(max(range(3), key=row.__getitem__) == q[2] for row, q in zip(of, QUESTIONS, strict=True)) / len(of)

    assert accuracy(scores) == accuracy(expected) == sum(sample["acc"] for sample in found) / len(found)


def by_transformers(real: Served) -> list[list[float]]:
    """Log-probabilities of each question's choices."""
    import torch
    from transformers import AutoModelForCausalLM

    from whorl.engine.weights import resolve

    file = Path(resolve(None))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = real.llm.tokenizer
    assert tokenizer is not None

    def score(question: str, choice: str) -> float:
        start, ids = len(tokenizer.encode(question)), tokenizer.encode(f"{question} {choice}")
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))

    return [[score(question, choice) for choice in choices] for question, choices, _ in QUESTIONS]
