"""Ollama's own client: chat and generate, whole and streamed, a tool, a schema, what is served, errors."""

import json
import sys

import ollama

FRUIT = {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}}
GREEDY = {"temperature": 0}


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return "sunny"


def client(key: str = "sk-test") -> ollama.Client:
    return ollama.Client(host=sys.argv[1], headers={"Authorization": f"Bearer {key}"})


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def refusal(work) -> ollama.ResponseError:
    try:
        work()
    except ollama.ResponseError as error:
        return error
    raise AssertionError("nothing was refused")


def named(error: ollama.ResponseError) -> str:
    return f"{type(error).__name__} {error.status_code}"


mine = client()
whole = mine.chat("told:latest", user("hi"), options=GREEDY)
pieces = [part.message.content for part in mine.chat("told", user("hi"), options=GREEDY, stream=True)]
(call,) = mine.chat("told", user("call"), tools=[weather], options=GREEDY).message.tool_calls
streamed = list(mine.chat("told", user("call"), tools=[weather], options=GREEDY, stream=True))
assert [part.message.tool_calls[0].function for part in streamed if part.message.tool_calls] == [call.function]
assert streamed[-1].done
assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
result = {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
told = mine.chat("told", [*user("call"), assistant, result], options=GREEDY).message.content
wrong_key = refusal(lambda: client("wrong").chat("told", user("hi")))
print(
    json.dumps(
        {
            "chat": whole.message.content,
            "tokens": whole.eval_count,
            "seconds": whole.total_duration,
            "streamed": "".join(pieces),
            "pieces": len(pieces),
            "generated": mine.generate("told", "hi", options=GREEDY).response,
            "generated_stream": "".join(part.response for part in mine.generate("told", "hi", stream=True)),
            "raw": mine.generate("told", "a", raw=True, options={**GREEDY, "num_predict": 3}).response,
            "tool": f"{call.function.name} {call.function.arguments['city']}: {told}",
            "schema": json.loads(mine.chat("told", user("fruit"), format=FRUIT, options=GREEDY).message.content),
            "models": [model.model for model in mine.list().models],
            "running": [[model.name, model.context_length] for model in mine.ps().models],
            "capabilities": mine.show("told").capabilities,
            "embed": named(refusal(lambda: mine.embed("told", "a text"))),
            "bad_key": named(wrong_key),
            "bad_model": named(refusal(lambda: mine.chat("gpt-9", user("hi")))),
            "error_in_words": wrong_key.error,
        }
    )
)
