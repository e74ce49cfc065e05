"""pydantic-ai: an agent that calls a function, over chat, responses and Anthropic's interface."""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

ROOT = sys.argv[1]


class Fruit(BaseModel):
    name: str
    count: int


def by_openai(kind=OpenAIChatModel, name: str = "told", key: str = "sk-test"):
    return kind(name, provider=OpenAIProvider(base_url=f"{ROOT}/v1", api_key=key))


def by_anthropic():
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=ROOT, api_key="sk-test", max_retries=0)
    return AnthropicModel("told", provider=AnthropicProvider(anthropic_client=client))


def agent(model, **more) -> Agent:
    made = Agent(model, model_settings={"temperature": 0, "max_tokens": 200}, **more)

    @made.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        return "sunny" if city == "Rome" else "unknown"

    return made


async def streamed(model) -> list[str]:
    async with agent(model).run_stream("hi") as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]


async def error(model) -> str:
    try:
        await agent(model).run("hi")
    except ModelHTTPError as failure:
        return f"{type(failure).__name__} {failure.status_code}"
    return "none"


async def main() -> None:
    pieces = await streamed(by_openai())
    kinds = {"tool": by_openai(), "responses_tool": by_openai(OpenAIResponsesModel), "messages_tool": by_anthropic()}
    answers = {name: (await agent(model).run("call")).output for name, model in kinds.items()}
    answers |= {
        "streamed": "".join(pieces),
        "pieces": len(pieces),
        "messages_streamed": "".join(await streamed(by_anthropic())),
        "responses_streamed": "".join(await streamed(by_openai(OpenAIResponsesModel))),
        "schema": (await Agent(by_openai(), output_type=NativeOutput(Fruit)).run("fruit")).output.model_dump(),
        "bad_key": await error(by_openai(key="wrong")),
        "bad_model": await error(by_openai(name="gpt-9")),
    }
    print(json.dumps(answers))


asyncio.run(main())
