"""Readers of the forms in which models write tool calls. To add one, add a class, which may extend `JsonCalls` or
`TaggedCalls`, and a line in `FORMS`.
"""

from collections.abc import Collection

from .glm import Glm4Calls
from .json_calls import HermesCalls, LlamaCalls
from .json_calls import JsonCalls as JsonCalls
from .reader import CallPart as CallPart
from .reader import CallReader as CallReader
from .reader import CallWriter as CallWriter
from .reader import ReadStatus as ReadStatus
from .reader import Schemas as Schemas
from .reader import num_held as num_held
from .tagged import DeepSeekV32Calls, Qwen3CoderCalls
from .tagged import TaggedCalls as TaggedCalls

# By name, in the order in which templates are searched: a mark of one form may also occur in later ones.
FORMS: dict[str, type[CallReader]] = {
    "deepseek_v32": DeepSeekV32Calls,
    "qwen3_coder": Qwen3CoderCalls,
    "glm4": Glm4Calls,
    "hermes": HermesCalls,
    "llama3": LlamaCalls,
}
OTHER_NAMES = {"qwen3": "hermes", "qwen3_xml": "qwen3_coder", "llama3_json": "llama3"}
OTHER_NAMES |= {"glm45": "glm4", "glm47": "glm4"}  # of vLLM and of models


def form_named(name: str) -> type[CallReader]:
    """Return the form with this name; ValueError if there is none."""
    if (form := FORMS.get(OTHER_NAMES.get(name, name))) is None:
        has = ", ".join(["auto", *FORMS, *OTHER_NAMES])
        raise ValueError(f"the tool parser {name!r} is not known. Has: {has}")
    return form


def form_of(prompt_format: str | None, templates: Collection[str]) -> type[CallReader]:
    """Return the form that a model was trained on, by its prompt format, else by its templates; default: Hermes."""
    if prompt_format in FORMS:
        return FORMS[prompt_format]
    text = "\n".join(templates)
    return next((form for form in FORMS.values() if any(mark in text for mark in form.marks)), HermesCalls)
