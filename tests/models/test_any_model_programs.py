"""Models that run through transformers' code, behind the server and the chat: what clients do, adapters and tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import transformers
from lora_files import write_adapter
from pydantic import BaseModel
from serving import TEMPLATE, Served, byte_tokenizer, prepared
from test_any_model import WIDE, config_of, load
from test_models import hf_greedy, save
from typer.testing import CliRunner

from whorl.cli import app
from whorl.engine.settings import EngineSettings
from whorl.models.any_model import AnyModel

QUESTION = "A question that is longer than two blocks of the cache"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
NAMES = ["granite", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "olmo3", "mixtral"))]


# A token is a byte, and a random model may write all white space that a grammar allows: the longest answers have 36 and
# 162 tokens. It would begin with a thought and not end it.
LONGEST, LONGEST_CALL = 40, 180
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


class Answer(BaseModel):
    is_so: bool


@pytest.fixture(scope="module", params=NAMES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tokenizer and a template, and an adapter beside it."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "eos_token_id": tokenizer.eos_ids[0]}
    save(folder / "model", config_of(request.param, WIDE) | sizes)
    tokenizer._backend.save(str(folder / "model" / "tokenizer.json"))
    values = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(values))
    write_adapter(folder / "adapter", load(folder / "model"), ("o_proj", "q_proj", "qkv_proj"))
    return folder


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Served]:
    adapters = (f"tuned={place / 'adapter'}",)
    with prepared(place / "model", EngineSettings(device="cpu", block_size=8, num_blocks=256, lora=adapters)) as server:
        assert isinstance(server.llm.model, AnyModel)
        yield server


@pytest.fixture
def create(served: Served) -> Any:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(text: str = QUESTION, **options: Any) -> Any:
        method = client.chat.completions.parse if "response_format" in options else client.chat.completions.create
        messages: Any = [{"role": "user", "content": text}]
        return method(**{"model": "model", "messages": messages, "temperature": 0, "max_tokens": 24} | options)  # type: ignore[call-overload]

    return ask


def content(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_the_client_gets_what_transformers_generates(served: Served, place: Path) -> None:
    hf = transformers.AutoModelForCausalLM.from_pretrained(place / "model", attn_implementation="eager")
    prompt = served.llm.tokenizer.encode(QUESTION)  # type: ignore[union-attr]
    _, expected = hf_greedy(hf, prompt, 16)
    reply = served.complete(QUESTION, max_tokens=16, ignore_eos=True, return_token_ids=True)
    assert reply["choices"][0]["token_ids"] == expected


def test_streams_and_logprobs(create: Any) -> None:
    whole = create(logprobs=True, top_logprobs=2)
    chunks = list(create(logprobs=True, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content(whole)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs is not None]
    pieces = [each for choice in choices for each in choice.logprobs.content]
    expected = whole.choices[0].logprobs.content
    assert [each.logprob for each in pieces] == [each.logprob for each in expected]
    assert {len(each.top_logprobs) for each in expected} == {2}


def test_several_choices_and_the_prefix_cache(create: Any) -> None:
    several = create(n=3, temperature=1.0, seed=5, extra_body={"ignore_eos": True})
    assert len({choice.message.content for choice in several.choices}) == 3
    again = create(n=3, temperature=1.0, seed=5, extra_body={"ignore_eos": True})
    assert again.usage.prompt_tokens_details.cached_tokens >= 16
    assert [each.message.content for each in again.choices] == [each.message.content for each in several.choices]


def test_schemas_and_grammars(create: Any) -> None:
    answer = create(response_format=Answer, max_tokens=LONGEST, extra_body=NO_THOUGHT)
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert content(create(extra_body={"structured_outputs": {"regex": "(yes|no){3}"}, **NO_THOUGHT})) in {
        a + b + c for a in ("yes", "no") for b in ("yes", "no") for c in ("yes", "no")
    }


def test_a_tool_is_called_when_it_must_be(create: Any) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = create(**options, max_tokens=LONGEST_CALL, extra_body=NO_THOUGHT).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    assert create(tools=TOOLS, tool_choice="none").choices[0].message.tool_calls is None


def test_an_adapter_is_a_model_of_its_own_name(create: Any) -> None:
    plain, tuned = create(extra_body={"ignore_eos": True}), create(model="tuned", extra_body={"ignore_eos": True})
    assert content(plain) != content(tuned)


def test_the_programs_of_the_command_line(place: Path) -> None:
    model = str(place / "model")
    sizes = ["--device", "cpu", "--temperature", "0", "--max-tokens", "8"]
    done = CliRunner().invoke(app, ["generate", model, "--chat", "--prompt", QUESTION, "--json", *sizes])
    assert done.exit_code == 0, done.output
    text = json.loads(done.stdout)["text"]
    chat = CliRunner().invoke(app, ["chat", model, *sizes], input=f"{QUESTION}\n")
    assert chat.exit_code == 0, chat.output
    assert text.strip() in chat.stdout
    refused = CliRunner().invoke(app, ["generate", model, "--prompt", "a", "--backend", "native", *sizes])
    assert refused.exit_code != 0
