"""What commands share: how they refuse, and options made of the fields of dataclasses. No torch here."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer

from whorl.fields import Option, aliases, names_of, options

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def stop(message: str) -> NoReturn:
    """Asked wrongly: one line, no traceback."""
    typer.echo(f"whorl: {message}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Around what a command makes of its arguments; errors of its work keep their traceback."""
    try:
        yield
    except ValueError as error:
        stop(str(error))


def need_torch() -> None:
    """Refuse where it is not installed; else a terminal shows that something happens in the seconds of its import."""
    if importlib.util.find_spec("torch") is None:
        stop("this command needs torch: pip install torch")
    if "torch" not in sys.modules and sys.stderr.isatty():
        print("starting", end="", file=sys.stderr, flush=True)
        importlib.import_module("torch")
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def need_engine(command: str) -> None:
    packages = {"tokenizers": "tokenizers", "jinja2": "jinja2", "safetensors": "safetensors", "gguf": "gguf"}
    if missing := [name for name, module in packages.items() if importlib.util.find_spec(module) is None]:
        stop(f"{command} needs {', '.join(missing)}: pip install 'whorl[engine]'")


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A folder, a .gguf file or a Hugging Face id. Default: SmolLM2-135M-Instruct."
    ),
]


# ---- options made of dataclasses


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """What a command takes of a dataclass: `Annotated[EngineSettings, Here(defaults={"max_num_seqs": 1})]`.

    defaults: other than the dataclass's own. without: fields that are no options of this command, and what to say to
    who asks for them.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each dataclass that it takes as options of its own.

    A parameter whose annotation is a dataclass of `whorl.fields.option` fields becomes one parameter for each of them,
    in its place; the command gets the dataclass. What it refuses ends the command with a line. For `whorl.pasted` the
    result has `aliases`, other programs' names of its options, and `refused`, those that a `Here` leaves out.
    """
    parameters, groups = [], {}
    refused: dict[str, str] = {}
    others: dict[str, str] = {}
    for each in inspect.signature(function, eval_str=True).parameters.values():
        kind, here = _dataclass_of(each.annotation)
        if kind is None:
            parameters.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        made = _parameters(kind, here)
        groups[each.name] = kind, here, [parameter.name for parameter in made]
        for left_out, why in _left_out(kind, here):
            refused |= dict.fromkeys(left_out, why)
        for field_, _ in options(kind):
            others |= aliases(field_) if field_.name not in here.without else {}
        parameters += made

    def command(**given: Any) -> None:
        with asking():
            for name, (kind, here, names) in groups.items():
                values = {each: _frozen(given.pop(each)) for each in names}
                given[name] = kind(**{**here.defaults, **values})
        function(**given)

    command.refused, command.aliases = refused, others  # type: ignore[attr-defined]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _dataclass_of(annotation: Any) -> tuple[Any, Here]:
    kind, *more = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return None, Here()
    return kind, next((each for each in more if isinstance(each, Here)), Here())


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parameters(kind: type, here: Here) -> list[inspect.Parameter]:
    """One for each field that the command takes."""
    hints = get_type_hints(kind)
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=here.defaults.get(each.name, each.default),
            annotation=Annotated[_typer_type(hints[each.name]), _typer_option(each, made, hints[each.name])],
        )
        for each, made in options(kind)
        if each.name not in here.without
    ]


def _left_out(kind: type, here: Here) -> Iterator[tuple[list[str], str]]:
    """All names of each field that is no option here, and why."""
    for each, _ in options(kind):
        if each.name in here.without:
            ours = [name for spelled in names_of(each) for name in spelled.split("/")]
            yield [*ours, *aliases(each)], here.without[each.name]


def _typer_type(hint: Any) -> Any:
    return list[str] if hint == tuple[str, ...] else hint


def _typer_option(each: Field[Any], made: Option, hint: Any) -> Any:
    is_number = bool({int, float} & {hint, *get_args(hint)})
    return typer.Option(
        *names_of(each),
        help=made.text,
        min=made.least if made.least is not None else made.above,
        max=made.most,
        metavar=made.metavar or ("N" if is_number else None),
        envvar=made.env,
        rich_help_panel=made.panel,
    )
