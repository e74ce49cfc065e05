"""Read a user's files: config.json, launch settings in YAML, JSON or TOML, scripts, requirements files and logs.

The result is one model config and a list of `Setting`s that remember the file and line they come from.
"""

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from whorl.doctor.arguments import read_arguments
from whorl.doctor.settings import BadInput, Kind, Setting, make_setting, parse_value

MODEL_KEYS: Final = ("model_type", "architectures")  # a JSON file with one of these keys is the model config
# Other JSON files of a Hugging Face folder; none of them holds launch settings.
NOT_SETTINGS: Final = re.compile(
    r"(generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|.*processor_config|chat_template|.*\.index"
    r"|quant.*_description)\.json"
)
READ_SUFFIXES: Final = (".json", ".yaml", ".yml", ".toml", ".sh", ".bash", ".slurm", ".args", ".txt", ".env", ".log")
OTHER_TOWERS: Final = ("vision_config", "audio_config")  # configs that are not the language model's
# Keys that --set adds to a model config that lacks them; any other key it only replaces.
ROPE_KEYS: Final = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim")
TRACEBACK: Final = "Traceback (most recent call last)"
PACKAGES: Final = (
    "cann", "deepspeed", "mcore_bridge", "megatron_bridge", "megatron_core", "mindspeed", "mindspeed_llm",
    "mindspeed_mm", "nemo_rl", "prime_rl", "sglang", "slime", "torch_npu", "torchtitan", "transformer_engine",
    "transformers", "triton_ascend", "trl", "verl", "vime", "vllm", "vllm_ascend",
)  # fmt: skip
# The path after `source` or a dot, without the variable or command for the script's own folder in front of it.
SOURCED: Final = re.compile(
    r"""^\s*(?:source|\.)\s+["']?(?:\$\{?\w+\}?/|\$\([^\n]*\)/)?([\w.-][\w./-]*\.(?:sh|bash|env))""", re.MULTILINE
)
LONG_FILE: Final = 20_000_000  # bytes; launch files and logs worth reading are far smaller
MOST_FOLDERS: Final = 8  # of a message
DEEPEST: Final = 3  # levels of folders that are searched for something to read


@dataclass(kw_only=True, slots=True)
class Inputs:
    """What the files hold: the model config, the settings and the logs (name and text), in reading order.

    `model_where` is the name of the model config's file, `read` the names of all files; `bases`: the files that others
    name as their defaults.
    """

    model: dict[str, Any] | None = None
    model_where: str = "no config.json"
    settings: list[Setting] = field(default_factory=list)
    logs: list[tuple[str, str]] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    bases: set[Path] = field(default_factory=set)


def read_inputs(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Inputs:
    """Read a file, or every readable file of a folder, then apply `overrides` (the values of --set).

    Raises BadInput when nothing can be read.
    """
    inputs = Inputs()
    for file in _readable_files(Path(path)) if path is not None else ():
        _read_file(file, inputs)
    if path is not None and inputs.model is None and not inputs.settings and not inputs.logs:
        raise BadInput(
            f"{path}: holds no model config, launch flag or traceback. Known files: {', '.join(READ_SUFFIXES)}"
        )
    for key, value in (overrides or {}).items():
        _override(key, value, inputs)
    return inputs


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse the `key=value` strings of --set; raises BadInput for a malformed one."""
    overrides = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[\w.+-]+", key.strip()):
            raise BadInput(f"--set {pair!r}: write key=value, for example --set position_embedding_type=mrope")
        # A version stays text: parsed as a number, 0.10 would become 0.1.
        overrides[key.strip()] = value.strip() if key.strip() in PACKAGES else parse_value(value.strip())
    return overrides


def _readable_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(
            f"{path}: no such file or folder. Give a model folder, a config.json or a file of launch flags; "
            "a Hugging Face model id is not downloaded"
        )
    if files := [file for file in sorted(path.iterdir()) if _is_readable(file)]:
        return files
    if folders := list(islice(_folders_below(path), MOST_FOLDERS)):
        raise BadInput(
            f"{path}: holds nothing to read itself, and each launch is checked by itself. Give one of the folders in "
            f"it, such as {', '.join(folders)}"
        )
    raise BadInput(f"{path}: holds nothing to read. Expected config.json or files of {', '.join(READ_SUFFIXES)}")


def _folders_below(path: Path) -> Iterator[str]:
    """Yield the folders below `path`, at most DEEPEST levels down, that hold something to read."""
    for folder, below, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        below[:] = sorted(name for name in below if not name.startswith(".")) if depth < DEEPEST else []
        if any(_is_readable(Path(folder) / name) for name in sorted(names)):
            yield folder


def _is_readable(file: Path) -> bool:
    if file.suffix not in READ_SUFFIXES or NOT_SETTINGS.fullmatch(file.name) or not file.is_file():
        return False
    # A tokenizer's merges.txt is text too: a .txt counts only with flags or a traceback, or as a requirements file.
    return file.stat().st_size < LONG_FILE and (file.suffix != ".txt" or _is_requirements(file) or _has_flags(file))


def _read_file(file: Path, inputs: Inputs) -> None:
    if file.resolve() in inputs.bases:
        return  # read already, before the file that builds on it
    text = _read_file_text(file)
    inputs.read.append(file.name)
    suffix = ".json" if not file.suffix and text.lstrip().startswith("{") else file.suffix
    if suffix in PARSERS:
        _add_mapping(_parse(PARSERS[suffix], text, file), file, inputs)
    elif TRACEBACK in text or file.suffix == ".log":
        inputs.logs.append((file.name, text))
    elif _is_requirements(file):
        inputs.settings += _read_requirements(text, file.name)
    else:
        _read_sourced(text, file, inputs)
        inputs.settings += read_arguments(text, file.name, values_may_wrap=file.suffix in (".txt", ".args"))


def _read_sourced(text: str, file: Path, inputs: Inputs) -> None:
    """Read the scripts beside a script that it sources, such as slime's models/qwen3-8B.sh, before its own settings."""
    for name in SOURCED.findall(text):
        script = file.parent / name
        if script.is_file():
            inputs.bases.add(file.resolve())  # so that a circle of files ends
            _read_file(script, inputs)
            inputs.bases.add(script.resolve())


def read_text(file: str | Path) -> str:
    """Return the text of a log, or standard input for "-"; raises BadInput when it cannot be read."""
    return sys.stdin.read() if str(file) == "-" else _read_file_text(Path(file))


def _read_file_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{file}: cannot be read ({error.strerror}). Check the path and its permissions") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: is not UTF-8 text. Give a config, launch flags or a log, not weights") from error


def _parse(parse: Any, text: str, file: Path) -> Any:
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


PARSERS: Final = {".json": json.loads, ".yaml": _load_yaml, ".yml": _load_yaml, ".toml": tomllib.loads}


def _add_mapping(data: Any, file: Path, inputs: Inputs) -> None:
    if _is_argument_list(data):
        inputs.settings += read_arguments(shlex.join(data), file.name, values_may_wrap=True)
    elif not isinstance(data, dict):
        raise BadInput(f"{file}: holds a {type(data).__name__}; expected a mapping of settings or a list of arguments")
    elif file.suffix in (".json", "") and any(key in data for key in MODEL_KEYS):
        if inputs.model is not None:
            raise BadInput(f"{file}: is a second model config beside {inputs.model_where}. Keep only one in the folder")
        inputs.model, inputs.model_where = data, file.name
    else:
        _read_base(data.get("defaults"), file, inputs)
        inputs.settings += _flatten(data, file.name)


def _read_base(name: Any, file: Path, inputs: Inputs) -> None:
    """Read the file that a configuration of NeMo-RL builds on (`defaults: ../base.yaml`), before its own settings."""
    base = file.parent / name if isinstance(name, str) and name.endswith((".yaml", ".yml")) else None
    if base is not None and base.is_file():
        inputs.bases.add(file.resolve())  # so that a circle of files ends
        _read_file(base, inputs)
        inputs.bases.add(base.resolve())


def _is_argument_list(value: Any) -> bool:
    texts = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return texts and any(item.startswith("--") for item in value)


def _flatten(data: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[Setting]:
    """Yield a setting for every key of nested mappings, under its dotted path, and those of argument lists in them."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, where, f"{path}.")
        elif _is_argument_list(value):
            yield from read_arguments(shlex.join(value), where, values_may_wrap=True)
        yield make_setting(path, value, "environment" if str(name).isupper() else "config", where)


def _is_requirements(file: Path) -> bool:
    return file.suffix == ".txt" and file.name.startswith("requirements")


def _has_flags(file: Path) -> bool:
    """Return whether a text file has a line that starts with a flag, or a traceback."""
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
    """Apply one --set: change the key in the model config, if the config has it, and add a launch setting."""
    if inputs.model is not None:
        changed = _replace_key(inputs.model, key.split("."), value)
        inputs.model = changed | {key: value} if changed == inputs.model and key in ROPE_KEYS else changed
    kind: Kind = "environment" if key.isupper() else "set"
    inputs.settings.append(make_setting(key, value, kind, "--set"))


def _replace_key(node: dict[str, Any], parts: list[str], value: Any) -> dict[str, Any]:
    """Return a copy of `node` with `value` at the dotted path, which may start at any depth of the text model."""
    new = {}
    for name, child in node.items():
        if name == parts[0] and len(parts) == 1:
            new[name] = value
        elif isinstance(child, dict) and (name == parts[0] or name not in OTHER_TOWERS):
            remaining = parts[1:] if name == parts[0] else parts
            new[name] = _replace_key(child, remaining or parts, value)
        else:
            new[name] = child
    return new
