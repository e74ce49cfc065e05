"""llm: its command, with a model of its extra-openai-models.yaml, and its Python interface."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """
- model_id: told
  model_name: told
  api_base: URL
  api_key_name: told
  supports_tools: true
  supports_schema: true
- model_id: other
  model_name: gpt-9
  api_base: URL
  api_key_name: told
"""
WEATHER = "def weather(city: str) -> str:\n    'The weather in a city.'\n    return 'sunny'\n"
FRUIT = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}}})


def llm(*arguments: str, key: str = "sk-test") -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).parent / "llm"), "prompt", "--key", key, "-o", "temperature", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    (Path(folder) / "extra-openai-models.yaml").write_text(MODELS.replace("URL", f"{sys.argv[1]}/v1"))
    import llm as library

    model = library.get_model("told")
    pieces = list(model.prompt("hi", key="sk-test", temperature=0))
    bad_key, bad_model = llm("-m", "told", "hi", key="wrong"), llm("-m", "other", "hi")
    tool = llm("-m", "told", "--functions", WEATHER, "call")
    print(
        json.dumps(
            {
                "streamed": "".join(pieces),
                "pieces": len(pieces),
                "command": llm("-m", "told", "hi").stdout,
                "whole": llm("-m", "told", "--no-stream", "hi").stdout,
                "tool": tool.stdout + tool.stderr,
                "schema": llm("-m", "told", "--schema", FRUIT, "fruit").stdout,
                "bad_key": [bad_key.returncode, bad_key.stderr],
                "bad_model": [bad_model.returncode, bad_model.stderr],
            }
        )
    )
