"""What writes a model's chat prompts: its template or, if it ships none, built-in code for its format.

Templates are untrusted Jinja programs, rendered in a sandbox with the names that transformers provides.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeAlias

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .deepseek_v32_prompt import DeepSeekV32Prompt, Message

# Built-in prompt formats by the model_type of config.json. To add one, add a file with a `render` like that of
# `ChatTemplate`, and a line here.
_FORMATS = {"deepseek_v32": DeepSeekV32Prompt}


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text to train on; it has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Unfolded(CodeGenerator):
    """Disables constant folding: `'a' * 10**10` must not be computed at parsing, where nothing limits its memory."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """The chat templates of one model, by name: `default`, and in some models `tool_use`.

    variables: names for the templates, such as the special tokens. Raises ValueError if one cannot be parsed.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
        )
        environment.code_generator_class = _Unfolded
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.sources = dict(sources)
        self.variables = dict(variables)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except (TemplateError, RecursionError) as error:
            raise ValueError(f"chat template: cannot be parsed: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the prompt; ValueError if there is no template or it fails on these messages."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            has = sorted(self._templates) or "none: is this a base model? Prompt it with plain text"
            raise ValueError(f"chat template: no {name!r} template. Has: {has}")
        names = {"messages": messages, "tools": tools, "documents": None, **self.variables, **variables}
        try:
            return self._templates[name].render(add_generation_prompt=add_generation_prompt, **names)
        except MemoryError:
            raise ValueError("chat template: takes more memory than there is") from None
        except Exception as error:  # an untrusted program may fail in any way
            raise ValueError(f"chat template: refuses these messages: {error}") from error


# What writes prompts. sources: templates by name, empty if there are none. variables: the special tokens by role.
PromptWriter: TypeAlias = ChatTemplate | DeepSeekV32Prompt


def format_of(config: Mapping[str, Any], templates: Mapping[str, str]) -> str | None:
    """Return the built-in format of a model without a template, by its config.json; None if it has a template or no
    format is known."""
    kind = config.get("model_type")
    return kind if not templates and kind in _FORMATS else None


def prompt_writer(templates: Mapping[str, str], roles: Mapping[str, str], format: str | None) -> PromptWriter:
    """Return the built-in format of this name, or for None the model's templates."""
    return ChatTemplate(templates, roles) if format is None else _FORMATS[format](roles)


def write_open(
    writer: PromptWriter,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Return a prompt that ends where the text of the last message ends, for the model to continue it.

    Raises ValueError if the writer refuses the messages or leaves that end out.
    """
    mark = secrets.token_hex(16)  # in no text; behind white space, which a template might strip
    last, content = messages[-1], messages[-1]["content"]
    if isinstance(content, str):
        content += mark
    else:
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    messages = [*messages[:-1], {**last, "content": content}]
    text = writer.render(messages, tools, add_generation_prompt=False, **variables)
    if mark not in text:
        raise ValueError("the template leaves out the end of the last message, which therefore cannot be continued")
    return text[: text.rindex(mark)]
