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
from typing import Any, Final, Literal

Flag = tuple[str, list[str], str]  # name, words after it, file:line
Kind = Literal["config", "argument", "environment", "version", "set"]
MODEL_KEYS: Final = ("model_type", "architectures")
# Other JSON files of a Hugging Face folder; none of them holds launch settings.
NOT_SETTINGS: Final = re.compile(
    r"(generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|.*processor_config|chat_template|.*\.index"
    r"|quant.*_description)\.json"
)
READ_SUFFIXES: Final = (".json", ".yaml", ".yml", ".toml", ".sh", ".bash", ".slurm", ".args", ".txt", ".env", ".log")
OTHER_TOWERS: Final = ("vision_config", "audio_config")
ROPE_KEYS: Final = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim")
COMMANDS: Final = r"vllm(\.entrypoints.*)?|verl\.trainer\S*|torchtitan\S*|(\S*/)?mindspeed_mm/\S+\.py"
# A variable of these names holds flags, so it is not the value of the flag before it.
HOLDS_FLAGS: Final = r"\$\{?\w*(ARGS|OPTS|OPTIONS|FLAGS)\w*.*|\$\{\w+\[[@*]\]\}"
TRACEBACK: Final = "Traceback (most recent call last)"
PACKAGES: Final = (
    "cann", "megatron_bridge", "megatron_core", "mindspeed", "mindspeed_llm", "mindspeed_mm", "torch_npu", "torchtitan",
    "transformers", "triton_ascend", "verl", "vllm", "vllm_ascend",
)  # fmt: skip
LONG_FILE: Final = 20_000_000  # bytes; launch files and logs worth reading are far smaller


class BadInput(ValueError):
    """The question cannot be answered as asked; the message says what to write instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One launch setting. `key` is the last part of `path` in snake case; `where` is file:line or --set."""

    key: str
    path: str
    value: Any
    kind: Kind
    where: str


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


def parse_value(text: str) -> Any:
    """A flag's text as a number, truth value, list or mapping where it is one; else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for parse in (int, float, json.loads):
        try:
            return parse(text)
        except (ValueError, RecursionError):
            continue
    return text


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
        yield _setting(path, value, "environment" if str(name).isupper() else "config", where)


def _setting(path: str, value: Any, kind: Kind, where: str) -> Setting:
    last = path.rsplit(".", 1)[-1].lstrip("+")
    key = last if kind == "environment" else last.replace("-", "_")
    if kind == "argument" and value is False and key.startswith("no_"):
        key = key[3:]
    return Setting(key=KEY_ALIASES.get(key, key), path=path, value=value, kind=kind, where=where)


# One key for one idea; the spelling a user wrote stays in Setting.path.
KEY_ALIASES: Final = {
    "rope_fusion": "apply_rope_fusion",
    "tensor_model_parallel_size": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "tensor_parallel_degree": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "tp": "tensor_parallel",
    "context_parallel_size": "context_parallel",
    "context_parallel_degree": "context_parallel",
    "cp_size": "context_parallel",
    "seq_length": "sequence_length",
    "seq_len": "sequence_length",
    "max_seq_len": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_model_len": "sequence_length",
    "local_batch_size": "micro_batch_size",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "indexer_rope_interleaved": "indexer_rope_interleave",
    "dsa_indexer_rope_interleaved": "indexer_rope_interleave",
    "index_rope_interleave": "indexer_rope_interleave",
}


def read_arguments(text: str, where: str, *, values_may_wrap: bool = False) -> list[Setting]:
    """Flags, Hydra overrides, environment variables and known commands of a shell script or an argument list.

    A flag takes the words after it on the same line (a trailing backslash continues it); with `values_may_wrap` also
    those on the lines below, as in files of one argument per line.
    """
    settings: list[Setting] = []
    variables: dict[str, str] = {}
    flag: Flag | None = None
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{where}:{number}"
        if not (values_may_wrap or continued):
            settings, flag = settings + _finish(flag), None
        continued = line.rstrip().endswith("\\")
        for word in _words(_substitute(line, variables)):
            if re.match(r"-+[A-Za-z]", word):
                settings += _finish(flag)
                name, equals, value = word.lstrip("-").partition("=")
                flag = (name, [value] if equals else [], place)
            elif assignment := re.fullmatch(r"(\+{0,2}[A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
                settings, flag = settings + _finish(flag), None
                settings += _assignment(assignment[1], assignment[2], place, variables)
            elif re.fullmatch(HOLDS_FLAGS, word):
                settings, flag = settings + _finish(flag), None
            elif flag is not None:
                flag[1].append(word)
            if re.fullmatch(COMMANDS, word):
                settings.append(
                    Setting(key="command", path=f"command {word}", value=word, kind="argument", where=place)
                )
    return settings + _finish(flag)


def _assignment(name: str, value: str, place: str, variables: dict[str, str]) -> list[Setting]:
    """NAME=value is an environment variable, a.b=value a Hydra override; a variable may hold flags itself."""
    if "." in name or name.startswith("+"):
        return [_setting(name, parse_value(value), "config", place)]
    variables[name] = value
    if value.lstrip().startswith("--"):
        source, _, number = place.rpartition(":")
        inside = read_arguments(value, source)
        return [Setting(key=s.key, path=s.path, value=s.value, kind=s.kind, where=f"{source}:{number}") for s in inside]
    return [_setting(name, value, "environment", place)] if value and name.isupper() else []


def _finish(flag: Flag | None) -> list[Setting]:
    if flag is None:
        return []
    name, words, place = flag
    if not words:
        negated = re.match(r"no[-_]", name)
        return [_setting(name, not negated, "argument", place)]
    # Several numbers are a list; anything else after the first word is the next positional argument.
    values = [parse_value(word) for word in words]
    is_list = len(values) > 1 and all(isinstance(value, int) for value in values)
    return [_setting(name, values if is_list else values[0], "argument", place)]


def _words(line: str) -> list[str]:
    """The shell words of one line; brackets of arrays and quotes left open by a multi-line string are dropped."""
    line = line.rstrip().removesuffix("\\")
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = shlex.split(re.sub(r"[\"'\\\\]", " ", line), comments=True)
    words = [re.sub(r"^(\w+=)?\((.*)", r"\2", word) for word in words]
    words = [re.sub(r"^([^(]*)\)$", r"\1", word.rstrip(";")) for word in words]
    return [word for word in words if word not in ("", "export")]


def _substitute(line: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        return variables.get(name, default if default is not None else match.group(0))

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, line)


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
    inputs.settings.append(_setting(key, value, kind, "--set"))


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
