"""litellm, which sends messages back with fields of its own."""

import json
import sys

import litellm

ROOT = sys.argv[1]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def ask(text: str, messages: list | None = None, *, model: str = "openai/told", key: str = "sk-test", **more):
    base = ROOT if model.startswith("anthropic/") else f"{ROOT}/v1"
    conversation = messages or [{"role": "user", "content": text}]
    return litellm.completion(
        model=model, api_base=base, api_key=key, messages=conversation, temperature=0, timeout=60, **more
    )


def streamed(text: str, **more) -> object:
    return litellm.stream_chunk_builder(list(ask(text, stream=True, **more)))


def conversation(**more) -> str:
    """A call, its result, and the answer: the reply goes back whole, with provider_specific_fields and nulls."""
    message = ask("call", tools=TOOLS, **more).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "sunny"}
    history = [{"role": "user", "content": "call"}, message.model_dump(), result]
    said = ask("", history, tools=TOOLS, **more).choices[0].message.content
    return f"{call.function.name} {json.loads(call.function.arguments)['city']}: {said}"


def error(**more) -> str:
    try:
        ask("hi", **more)
    except litellm.exceptions.APIError as failure:
        return f"{type(failure).__name__} {failure.status_code}"
    except Exception as failure:
        return f"{type(failure).__name__} {getattr(failure, 'status_code', None)}"
    return "none"


call = streamed("call", tools=TOOLS).choices[0].message.tool_calls[0]
print(
    json.dumps(
        {
            "streamed": streamed("hi").choices[0].message.content,
            "tool": conversation(),
            "streamed_tool": json.loads(call.function.arguments),
            "messages_streamed": streamed("hi", model="anthropic/told", max_tokens=200).choices[0].message.content,
            "messages_tool": conversation(model="anthropic/told", max_tokens=200),
            "bad_key": error(key="wrong"),
            "bad_model": error(model="openai/gpt-9"),
            "too_long": error(max_tokens=2000),
        }
    )
)
