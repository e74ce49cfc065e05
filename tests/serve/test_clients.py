"""Programs that others wrote against the server, each in an environment of its own: they stream, call a tool where
they can, and meet errors."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_environments import run, use_program
from serving import MODEL, Served, byte_tokenizer, serving, told, wait_until

from whorl.engine.llm import LLM
from whorl.serve.settings import DEFAULT_NAME

pytestmark = pytest.mark.slow

FRUIT: dict[str, object] = {"name": "fig", "count": 3}


def call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "hi": "Hello there!",
    "call": call("weather", {"city": "Rome"}),
    "sunny": "Take a hat.",
    "fruit": json.dumps(FRUIT),
    "call fruit": call("Fruit", FRUIT),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(told(ANSWERS), api_key="sk-test", strict_model_name=True) as running:
        yield running


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    """The default model."""
    llm = LLM(device="cpu", max_model_len=1024, max_num_seqs=32)
    with serving(llm, names=(DEFAULT_NAME,), strict_model_name=True) as running:
        yield running


def test_litellm(served: Served) -> None:
    assert use_program("litellm", served.url) == {
        "streamed": "Hello there!",
        "tool": "weather Rome: Take a hat.",
        "streamed_tool": {"city": "Rome"},
        "messages_streamed": "Hello there!",
        "messages_tool": "weather Rome: Take a hat.",
        "bad_key": "AuthenticationError 401",
        "bad_model": "NotFoundError 404",
        "too_long": "ContextWindowExceededError 400",
    }


def test_langchain_openai(served: Served) -> None:
    answer = use_program("langchain-openai", served.url)
    assert answer.pop("pieces") > 10
    assert answer == {
        "streamed": "Hello there!",
        "tokens": 13,
        "tool": "weather Rome: Take a hat.",
        "streamed_tool": {"city": "Rome"},
        "responses_tool": "weather Rome: Take a hat.",
        "responses_streamed": "Hello there!",
        "schema": FRUIT,
        "bad_key": "OpenAIAuthenticationError 401",
        "bad_model": "OpenAIModelNotFoundError 404",
    }


def test_instructor(served: Served) -> None:
    answer = use_program("instructor", served.url)
    assert answer.pop("pieces") > 5
    assert "401" in answer.pop("bad_key")
    assert "404" in answer.pop("bad_model")
    assert answer == dict.fromkeys(("tool", "schema", "streamed"), FRUIT)


def test_pydantic_ai(served: Served) -> None:
    answer = use_program("pydantic-ai", served.url)
    assert answer.pop("pieces") > 10
    assert answer == {
        **dict.fromkeys(("tool", "responses_tool", "messages_tool"), "Take a hat."),
        **dict.fromkeys(("streamed", "responses_streamed", "messages_streamed"), "Hello there!"),
        "schema": FRUIT,
        "bad_key": "ModelAuthenticationError 401",
        "bad_model": "ModelNotFoundError 404",
    }


def test_llm(served: Served) -> None:
    answer = use_program("llm", served.url)
    assert answer.pop("pieces") > 10
    assert json.loads(answer.pop("schema")) == FRUIT
    assert "Take a hat." in answer.pop("tool")
    for name, said in (("bad_key", "key"), ("bad_model", "gpt-9")):
        code, message = answer.pop(name)
        assert code == 1
        assert said in message
    assert answer == {"streamed": "Hello there!", "command": "Hello there!\n", "whole": "Hello there!\n"}


def test_ollama(served: Served) -> None:
    answer = use_program("ollama", served.url)
    assert answer.pop("pieces") > 10
    assert answer.pop("seconds") > 0
    assert answer == {
        **dict.fromkeys(("chat", "streamed", "generated", "generated_stream"), "Hello there!"),
        "tokens": len("Hello there!") + 1,
        "tool": "weather Rome: Take a hat.",
        "schema": FRUIT,
        "raw": "bcd",
        "models": ["told"],
        "running": [["told", 1024]],
        "capabilities": ["completion", "tools", "thinking"],
        "embed": "ResponseError 400",
        "bad_key": "ResponseError 401",
        "bad_model": "ResponseError 404",
        "error_in_words": "the API key is wrong",
    }


# ---- programs that score, load and search


def test_schemathesis_finds_nothing_that_does_not_conform(served: Served, tmp_path: Path) -> None:
    """No server error, and every answer has a status, a type and a shape that /openapi.json names."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--checks", checks, "--max-examples", "40", "--seed", "1", "--request-timeout", "30"]
    options += ["--header", "Authorization: Bearer sk-test", "--phases", "examples,coverage,fuzzing"]
    done = run("schemathesis", "schemathesis", "run", f"{served.url}/openapi.json", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    wait_until(served.is_idle)


def test_guidellm_loads_the_server(served: Served, tmp_path: Path) -> None:
    """Requests that stream, several at once; and a key that is refused."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(byte_tokenizer().to_json())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))

    def load(key: str) -> Any:
        report = tmp_path / f"{key}.json"
        options = [
            *("--backend", f"kind=openai_http,target={served.url},model={MODEL},api_key={key}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            *("--output", f"kind=json,path={report}", "--disable-progress"),
        ]
        done = run("guidellm", "guidellm", "run", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        return benchmark["requests"]

    good, bad = load("sk-test"), load("wrong")
    assert (len(good["successful"]), len(good["errored"])) == (6, 0)
    assert {each["output_metrics"]["text_tokens"] for each in good["successful"]} == {16}
    assert (len(bad["successful"]), len(bad["errored"])) == (0, 6)
    assert all("401" in json.dumps(each) for each in bad["errored"])
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


def test_lm_eval_scores_as_transformers_does(real: Served, tmp_path: Path) -> None:
    lines = [json.dumps({"question": q, "choices": choices, "answer": a}) for q, choices, a in QUESTIONS]
    (tmp_path / "quiz.jsonl").write_text("\n".join(lines))
    (tmp_path / "quiz.yaml").write_text(TASK.replace("DATA", str(tmp_path / "quiz.jsonl")))

    def score(model: str) -> "subprocess.CompletedProcess[str]":
        where = f"model={model},base_url={real.url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
        options = [
            *("--model", "local-completions", "--model_args", f"{where},max_retries=1", "--tasks", "quiz"),
            *("--batch_size", "2", "--include_path", str(tmp_path), "--output_path", str(tmp_path), "--log_samples"),
        ]
        return run("lm-eval", "lm_eval", *options, HF_DATASETS_CACHE=str(tmp_path / "cache"))

    refused = score("gpt-9")
    assert refused.returncode != 0
    assert "the model 'gpt-9' is not served here" in refused.stdout + refused.stderr
    done = score(DEFAULT_NAME)
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = tmp_path.rglob("samples_quiz_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in rows]
    expected = by_transformers(real)
    assert len(scores) == len(QUESTIONS)
    for ours, theirs in zip(scores, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=0.02)

    def accuracy(of: list[list[float]]) -> float:
        return sum(max(range(3), key=row.__getitem__) == q[2] for row, q in zip(of, QUESTIONS, strict=True)) / len(of)

    assert accuracy(scores) == accuracy(expected) == sum(sample["acc"] for sample in rows) / len(rows)


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
