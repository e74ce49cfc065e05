"""Code that all commands share: errors of usage, and options made from dataclass fields. It needs no torch."""

import contextlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import typer

from whorl.extras import how_to_install
from whorl.fields import Option, aliases, flag_names, options
from whorl.files import CannotWrite

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"
    npu = "npu"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def stop(message: str, code: int = 2) -> NoReturn:
    """End the command with one line on standard error, and exit code 2 for bad usage."""
    typer.echo(f"whorl: {message}", err=True)
    raise typer.Exit(code)


@contextlib.contextmanager
def exit_on_bad_usage() -> Iterator[None]:
    """Turn a ValueError into `stop`. Used around the reading of arguments; errors in the work keep their traceback.

    An output path that cannot be written ends the command with one line and exit code 1.
    """
    try:
        yield
    except ValueError as error:
        stop(str(error))
    except CannotWrite as error:
        stop(str(error), 1)


def need_torch() -> None:
    """Exit when torch is not installed. It is not imported: options are checked first."""
    if importlib.util.find_spec("torch") is None:
        stop("this command needs torch: pip install torch")


def need_engine(command: str) -> None:
    """Exit when a package that the engine needs is not installed."""
    packages = {"tokenizers": "tokenizers", "jinja2": "jinja2", "safetensors": "safetensors", "gguf": "gguf"}
    if missing := [name for name, module in packages.items() if importlib.util.find_spec(module) is None]:
        stop(f"{command} needs {', '.join(missing)}: {how_to_install('engine')}")


def print_json(document: Any) -> None:
    """Print a document as indented JSON."""
    print(json.dumps(document, indent=2))


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="A folder, a .gguf file or a Hugging Face id. Default: SmolLM2-135M-Instruct."
    ),
]


# ---- options made from dataclasses


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """How a command's options differ from a dataclass: `Annotated[EngineSettings, Overrides(defaults={"tp": 2})]`.

    defaults: values that replace those of the dataclass. without: fields that are not options of this command, each
    with the text to print when a user gives it.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that the fields of its dataclass parameters become command-line options.

    A parameter whose annotation is a dataclass of `whorl.fields.option` fields is replaced, in its place, by one
    parameter for each field; the command receives the dataclass. A ValueError of the dataclass ends the command with
    one line. For `whorl.pasted` the result has two attributes: `aliases`, other programs' names for its options, and
    `refused`, the options that an `Overrides` leaves out.
    """
    parameters, groups = [], {}
    refused: dict[str, str] = {}
    foreign_names: dict[str, str] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        dataclass_type, overrides = _dataclass_of(parameter.annotation)
        if dataclass_type is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        expanded = _parameters(dataclass_type, overrides)
        groups[parameter.name] = dataclass_type, overrides, [new.name for new in expanded]
        for left_out, why in _left_out(dataclass_type, overrides):
            refused |= dict.fromkeys(left_out, why)
        for field_, _ in options(dataclass_type):
            foreign_names |= aliases(field_) if field_.name not in overrides.without else {}
        parameters += expanded

    def command(**arguments: Any) -> None:
        with exit_on_bad_usage():
            for name, (dataclass_type, overrides, names) in groups.items():
                values = {option: _frozen(arguments.pop(option)) for option in names}
                arguments[name] = dataclass_type(**{**overrides.defaults, **values})
        function(**arguments)

    command.refused, command.aliases = refused, foreign_names  # type: ignore[attr-defined]
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _dataclass_of(annotation: Any) -> tuple[Any, Overrides]:
    dataclass_type, *more = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not (isinstance(dataclass_type, type) and is_dataclass(dataclass_type)):
        return None, Overrides()
    return dataclass_type, next((item for item in more if isinstance(item, Overrides)), Overrides())


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _parameters(dataclass_type: type, overrides: Overrides) -> list[inspect.Parameter]:
    """Return one parameter for each field that is an option of the command."""
    hints = get_type_hints(dataclass_type)
    return [
        inspect.Parameter(
            field_.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=overrides.defaults.get(field_.name, field_.default),
            annotation=Annotated[_typer_type(hints[field_.name]), _typer_option(field_, declared, hints[field_.name])],
        )
        for field_, declared in options(dataclass_type)
        if field_.name not in overrides.without
    ]


def _left_out(dataclass_type: type, overrides: Overrides) -> Iterator[tuple[list[str], str]]:
    """Yield all flags of each field that the command leaves out, and the text to print for it."""
    for field_, _ in options(dataclass_type):
        if field_.name in overrides.without:
            ours = [name for spelled in flag_names(field_) for name in spelled.split("/")]
            yield [*ours, *aliases(field_)], overrides.without[field_.name]


def _typer_type(hint: Any) -> Any:
    return list[str] if hint == tuple[str, ...] else hint


def _typer_option(field_: Field[Any], declared: Option, hint: Any) -> Any:
    is_number = bool({int, float} & {hint, *get_args(hint)})
    return typer.Option(
        *flag_names(field_),
        help=declared.text,
        # typer has inclusive bounds only; `whorl.fields.check` refuses a value that equals `above`.
        min=declared.least if declared.least is not None else declared.above,
        max=declared.most,
        metavar=declared.metavar or ("N" if is_number else None),
        envvar=declared.env,
        rich_help_panel=declared.panel,
    )
