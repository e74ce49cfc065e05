"""instructor: objects of a class, by a forced call, by a schema, and in pieces."""

import json
import sys

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel


class Fruit(BaseModel):
    name: str
    count: int


def ask(text: str, mode: instructor.Mode, *, key: str = "sk-test", model: str = "told", partial: bool = False):
    raw = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key=key, max_retries=0, timeout=60)
    completions = instructor.from_openai(raw, mode=mode).chat.completions
    create = completions.create_partial if partial else completions.create
    messages = [{"role": "user", "content": text}]
    return create(model=model, messages=messages, response_model=Fruit, temperature=0, max_retries=0)


def error(**more) -> str:
    try:
        ask("fruit", instructor.Mode.TOOLS, **more)
    except InstructorRetryException as failure:
        cause = failure.__cause__
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return str(failure)
    except openai.APIStatusError as failure:
        return f"{type(failure).__name__} {failure.status_code}"
    return "none"


partial = list(ask("fruit", instructor.Mode.JSON_SCHEMA, partial=True))
print(
    json.dumps(
        {
            "tool": ask("call fruit", instructor.Mode.TOOLS).model_dump(),
            "schema": ask("fruit", instructor.Mode.JSON_SCHEMA).model_dump(),
            "streamed": partial[-1].model_dump(),
            "pieces": len(partial),
            "bad_key": error(key="wrong"),
            "bad_model": error(model="gpt-9"),
        }
    )
)
