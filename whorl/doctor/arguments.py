"""Read the flags, overrides and environment variables of a launch script as settings."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from whorl.doctor.settings import FlagWords, Setting, make_setting, parse_value

# A word, or two words, that start a framework. `whorl doctor` and the like start none.
COMMANDS: Final = (
    r"vllm(\.entrypoints.*)?|sglang\.launch_server|sglang serve|trl (vllm-serve|grpo|rloo|online_dpo)"
    r"|verl\.trainer\S*|torchtitan\S*|(\S*/)?mindspeed_mm/\S+\.py|(\S*/)?whorl (bench|chat|generate|serve|train)"
)
# A shell variable with such a name holds flags, so it is not the value of the flag before it.
HOLDS_FLAGS: Final = r"\$\{?\w*(ARGS|OPTS|OPTIONS|FLAGS)\w*.*|\$\{\w+\[[@*]\]\}"

# An environment variable inside a JSON text, as in ray's --runtime-env-json.
RUNTIME_ENV: Final = re.compile(r'\\?"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\\?"\s*:\s*\\?"([^"\\]*)\\?"')
RUNS_A_SCRIPT: Final = r"[a-z]?[a-z]?c"  # the flag of a shell whose value is a script: bash -c, bash -lc


def read_arguments(text: str, where: str, *, values_may_wrap: bool = False) -> list[Setting]:
    """Return the flags, Hydra overrides, environment variables and known commands of a script or an argument list.

    A flag's value is the words after it on the same line (a trailing backslash continues the line); with
    `values_may_wrap` also the words on the lines below, as in files with one argument per line.
    """
    settings: list[Setting] = []
    variables: dict[str, str] = {}
    flag: FlagWords | None = None
    continued = False
    last = ""
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{where}:{number}"
        if not (values_may_wrap or continued):
            settings, flag = settings + _flag_settings(flag), None
        continued = line.rstrip().endswith("\\")
        settings += [make_setting(name, value, "environment", place) for name, value in RUNTIME_ENV.findall(line)]
        for word in _shell_words(_substitute(line, variables)):
            if re.match(r"-+[A-Za-z]", word):
                settings += _flag_settings(flag)
                name, equals, value = word.lstrip("-").partition("=")
                flag = (name, [value] if equals else [], place)
            elif assignment := re.fullmatch(r"(\+{0,2}[A-Za-z_][\w.]*)=(.*)", word, re.DOTALL):
                settings, flag = settings + _flag_settings(flag), None
                settings += _assignment_settings(assignment[1], assignment[2], place, variables)
            elif re.fullmatch(HOLDS_FLAGS, word):
                settings, flag = settings + _flag_settings(flag), None
            elif flag is not None:
                flag[1].append(word)
                settings += _read_nested(word, place) if re.fullmatch(RUNS_A_SCRIPT, flag[0]) else []
            settings += [
                Setting(key="command", path=f"command {command}", value=command, kind="argument", where=place)
                for command in (word, f"{last} {word}")
                if re.fullmatch(COMMANDS, command)
            ]
            last = word
    return settings + _flag_settings(flag)


def _assignment_settings(name: str, value: str, place: str, variables: dict[str, str]) -> list[Setting]:
    """Read NAME=value as an environment variable, a.b=value as a Hydra override; a variable may hold flags itself."""
    if "." in name or name.startswith("+"):
        return [make_setting(name, parse_value(value), "config", place)]
    variables[name] = value
    if value.lstrip().startswith("--"):
        return _read_nested(value, place)
    return [make_setting(name, value, "environment", place)] if value and name.isupper() else []


def _read_nested(text: str, place: str) -> list[Setting]:
    """Read a word that holds flags or commands; its settings are at the place of the word."""
    return [replace(setting, where=place) for setting in read_arguments(text, "")]


def _flag_settings(flag: FlagWords | None) -> list[Setting]:
    """Return the setting of a flag whose words have all been read, in a list; an empty list if there is no flag.

    A flag without words is a switch: True, or False for --no-..., whose prefix `make_setting` removes from the key.
    """
    if flag is None:
        return []
    name, words, place = flag
    if not words:
        negated = re.match(r"no[-_]", name)
        return [make_setting(name, not negated, "argument", place)]
    # Several numbers are a list; anything else after the first word is the next positional argument.
    values = [parse_value(word) for word in words]
    is_list = len(values) > 1 and all(isinstance(value, int) for value in values)
    return [make_setting(name, values if is_list else values[0], "argument", place)]


def _shell_words(line: str) -> list[str]:
    """Split one line into shell words; array brackets, and quotes that a multi-line string leaves open, are dropped."""
    line = line.rstrip().removesuffix("\\")
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = shlex.split(re.sub(r"[\"'\\\\]", " ", line), comments=True)
    # ARGS=(--a b) is a bash array: drop "ARGS=(" and ")".
    words = [re.sub(r"^(\w+=)?\((.*)", r"\2", word) for word in words]
    words = [re.sub(r"^([^(]*)\)$", r"\1", word.rstrip(";")) for word in words]
    return [word for word in words if word not in ("", "export")]


def _substitute(line: str, variables: Mapping[str, str]) -> str:
    """Replace $NAME, ${NAME} and ${NAME:-default} by the values assigned in the lines above; unknown ones stay."""

    def value(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        return variables.get(name, default if default is not None else match.group(0))

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, line)
