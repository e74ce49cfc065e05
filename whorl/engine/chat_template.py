"""Chat templates: untrusted Jinja programs, rendered in a sandbox with the names that transformers provides."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


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
