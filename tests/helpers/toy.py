"""examples/seeing_toy.py as a module: a tokenizer with the tokens of pictures, a template, drawn pictures, training."""

import importlib.util
import io
import random
import sys
from typing import Any

from folders import ROOT
from media_files import data_uri

PRETRAINED = ROOT / "tests" / "models" / "seeing_toy"


def _load() -> Any:
    name = "seeing_toy_example"
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "seeing_toy.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOY = _load()


def picture(number: str, colour: str, seed: int) -> bytes:
    buffer = io.BytesIO()
    TOY.draw(number, colour, random.Random(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}
