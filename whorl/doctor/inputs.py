"""Reading what a user has: config.json, YAML / JSON / TOML of launch flags, shell scripts and argument lists,
requirements files, logs. Everything becomes one model config and a list of `Setting`s that remember their origin.
"""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from whorl.doctor.arguments import read_arguments
from whorl.doctor.settings import BadInput, Kind, Setting, parse_value, setting_of

MODEL_KEYS: Final = ("model_type", "architectures")
# Other JSON files of a Hugging Face folder; none of them holds launch settings.
NOT_SETTINGS: Final = re.compile(
    r"(generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|.*processor_config|chat_template|.*\.index"
    r"|quant.*_description)\.json"
)
READ_SUFFIXES: Final = (".json", ".yaml", ".yml", ".toml", ".sh", ".bash", ".slurm", ".args", ".txt", ".env", ".log")
OTHER_TOWERS: Final = ("vision_config", "audio_config")
ROPE_KEYS: Final = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim")
TRACEBACK: Final = "Traceback (most recent call last)"
PACKAGES: Final = (
    "cann", "megatron_bridge", "megatron_core", "mindspeed", "mindspeed_llm", "mindspeed_mm", "torch_npu", "torchtitan",
    "transformers", "triton_ascend", "verl", "vllm", "vllm_ascend",
)  # fmt: skip
LONG_FILE: Final = 20_000_000  # bytes; launch files and logs worth reading are far smaller


@dataclass(kw_only=True, slots=True)
class Inputs:
    """What was read, in reading order."""

    model: dict[str, Any] | None = None
    model_where: str = "no config.json"
    settings: list[Setting] = field(default_factory=list)
    logs: list[tuple[str, str]] = field(default_factory=list)
    read: list[str] = field(default_factory=list)


def read_inputs(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Inputs:
    """Read a file or every readable file of a folder, then apply `overrides` (what --set gave)."""
    inputs = Inputs()
    for file in _files(Path(path)) if path is not None else ():
        _read_file(file, inputs)
    if path is not None and inputs.model is None and not inputs.settings and not inputs.logs:
        raise BadInput(
            f"{path}: holds no model config, launch flag or traceback. Known files: {', '.join(READ_SUFFIXES)}"
        )
    for key, value in (overrides or {}).items():
        _override(key, value, inputs)
    return inputs


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` strings as given to --set."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", key.strip()):
            raise BadInput(f"--set {pair!r}: write key=value, for example --set position_embedding_type=mrope")
        # A version is text: 0.10 is not 0.1.
        overrides[key.strip()] = value.strip() if key.strip() in PACKAGES else parse_value(value.strip())
    return overrides


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(
            f"{path}: no such file or folder. Give a model folder, a config.json or a file of launch flags; "
            "a Hugging Face id is not looked up"
        )
    found = [file for file in sorted(path.iterdir()) if file.suffix in READ_SUFFIXES and file.is_file()]
    found = [file for file in found if not NOT_SETTINGS.fullmatch(file.name) and file.stat().st_size < LONG_FILE]
    # merges.txt and the like are text too: a .txt must hold a flag or a pinned version to count.
    found = [file for file in found if file.suffix != ".txt" or _is_requirements(file) or _has_flags(file)]
    if not found:
        raise BadInput(f"{path}: holds nothing to read. Looked for config.json and {', '.join(READ_SUFFIXES)}")
    return found


def _read_file(file: Path, inputs: Inputs) -> None:
    text = _text(file)
    inputs.read.append(file.name)
    if file.suffix == ".json" or (not file.suffix and text.lstrip().startswith("{")):
        _take_mapping(_parsed(json.loads, text, file), file, inputs)
    elif file.suffix in (".yaml", ".yml"):
        _take_mapping(_parsed(_load_yaml, text, file), file, inputs)
    elif file.suffix == ".toml":
        _take_mapping(_parsed(tomllib.loads, text, file), file, inputs)
    elif TRACEBACK in text or file.suffix == ".log":
        inputs.logs.append((file.name, text))
    elif _is_requirements(file):
        inputs.settings += _read_requirements(text, file.name)
    else:
        inputs.settings += read_arguments(text, file.name, values_may_wrap=file.suffix in (".txt", ".args"))


def read_text(file: str | Path) -> str:
    """A log's text, of standard input for "-"; BadInput where it cannot be read."""
    return sys.stdin.read() if str(file) == "-" else _text(Path(file))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}). Check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: is not UTF-8 text. Give a config, launch flags or a log, not weights") from error


def _parsed(parse: Any, text: str, file: Path) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise BadInput(f"{file}: is not valid {file.suffix[1:].upper() or 'JSON'}: {error}") from error


def _load_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f": line {mark.line + 1} column {mark.column + 1}"
        raise ValueError(f"{error.problem}{place}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _take_mapping(data: Any, file: Path, inputs: Inputs) -> None:
    if _is_argument_list(data):
        inputs.settings += read_arguments(shlex.join(data), file.name, values_may_wrap=True)
    elif not isinstance(data, dict):
        raise BadInput(f"{file}: holds a {type(data).__name__}; expected a mapping of settings or a list of arguments")
    elif file.suffix in (".json", "") and any(key in data for key in MODEL_KEYS):
        if inputs.model is not None:
            raise BadInput(f"{file}: a second model config beside {inputs.model_where}. Keep one in the folder")
        inputs.model, inputs.model_where = data, file.name
    else:
        inputs.settings += _flatten(data, file.name)


def _is_argument_list(value: Any) -> bool:
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return texts and any(item.startswith("--") for item in value)


def _flatten(data: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[Setting]:
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, where, f"{path}.")
        elif _is_argument_list(value):
            yield from read_arguments(shlex.join(value), where, values_may_wrap=True)
        yield setting_of(path, value, "environment" if str(name).isupper() else "config", where)


def _is_requirements(file: Path) -> bool:
    return file.suffix == ".txt" and file.name.startswith("requirements")


def _has_flags(file: Path) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace")
    return TRACEBACK in text or re.search(r"^\s*--[a-z]", text, re.MULTILINE) is not None


def _read_requirements(text: str, where: str) -> list[Setting]:
    settings = []
    for number, line in enumerate(text.splitlines(), 1):
        if pinned := re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:==|@|~=|>=)?\s*([\w.+-]*)", line.split("#")[0]):
            name = pinned.group(1).lower().replace("-", "_").replace(".", "_")
            settings.append(
                Setting(key=name, path=name, value=pinned.group(2), kind="version", where=f"{where}:{number}")
            )
    return settings


def _override(key: str, value: Any, inputs: Inputs) -> None:
    """--set changes the model config where it has that key, and always counts as a launch setting."""
    if inputs.model is not None:
        changed = _replaced(inputs.model, key.split("."), value)
        inputs.model = changed | {key: value} if changed == inputs.model and key in ROPE_KEYS else changed
    kind: Kind = "environment" if key.isupper() else "set"
    inputs.settings.append(setting_of(key, value, kind, "--set"))


def _replaced(node: dict[str, Any], parts: list[str], value: Any) -> dict[str, Any]:
    """A copy of `node` with `value` wherever the dotted path ends; a path may start at any depth of the text model."""
    new = {}
    for name, child in node.items():
        if name == parts[0] and len(parts) == 1:
            new[name] = value
        elif isinstance(child, dict) and (name == parts[0] or name not in OTHER_TOWERS):
            rest = parts[1:] if name == parts[0] else parts
            new[name] = _replaced(child, rest or parts, value)
        else:
            new[name] = child
    return new
