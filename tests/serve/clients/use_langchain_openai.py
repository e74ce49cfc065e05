"""langchain-openai's ChatOpenAI."""

import json
import sys

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = f"{sys.argv[1]}/v1"


class Fruit(BaseModel):
    """A fruit."""

    name: str
    count: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


def chat(model: str = "told", key: str = "sk-test", **more) -> ChatOpenAI:
    return ChatOpenAI(model=model, base_url=URL, api_key=key, temperature=0, max_retries=0, timeout=60, **more)


def error(model: ChatOpenAI) -> str:
    try:
        model.invoke("hi")
    except openai.APIStatusError as failure:
        return f"{type(failure).__name__} {failure.status_code}"
    return "none"


def conversation(model: ChatOpenAI) -> str:
    """A call, its result, and the answer; messages go back as the library has them."""
    with_tools = model.bind_tools([weather])
    question = [HumanMessage("call")]
    first = with_tools.invoke(question)
    (call,) = first.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    return f"{call['name']} {call['args']['city']}: {with_tools.invoke([*question, first, result]).text}"


whole = None
pieces = 0
for piece in chat(stream_usage=True).stream("hi"):
    whole, pieces = piece if whole is None else whole + piece, pieces + 1
streamed_call = None
for piece in chat().bind_tools([weather]).stream("call"):
    streamed_call = piece if streamed_call is None else streamed_call + piece
print(
    json.dumps(
        {
            "streamed": whole.text,
            "pieces": pieces,
            "tokens": whole.usage_metadata["output_tokens"],
            "tool": conversation(chat()),
            "streamed_tool": streamed_call.tool_calls[0]["args"],
            "responses_tool": conversation(chat(use_responses_api=True)),
            "responses_streamed": "".join(piece.text for piece in chat(use_responses_api=True).stream("hi")),
            "schema": chat().with_structured_output(Fruit, method="json_schema").invoke("fruit").model_dump(),
            "bad_key": error(chat(key="wrong")),
            "bad_model": error(chat(model="gpt-9")),
        }
    )
)
