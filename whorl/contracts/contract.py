"""A `Contract` describes one vendor operator: parameters, results, gradient and versions, read from its schema."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

REQUIRED: Final = "<required>"
Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a signature; `since` is the first supported torch_npu release that has it."""

    name: str
    type: str
    default: object = REQUIRED
    keyword_only: bool = False
    since: str = "2.9"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contract:
    """The signature of one vendor operator and what it promises.

    `gradient`: "yes", "raises", "silently lost" (the result has no grad_fn), or "partial"; `in_place`: parameters it
    overwrites; `namespace`: its torch.ops namespace, None where it is not a torch operator; `since`: the first
    supported release that has it; `changes`: the defaults that later releases changed (the parameters they added are in
    `Parameter.since`); `library`: the Python package that has it; `note`: what else a caller must know.
    """

    name: str
    parameters: tuple[Parameter, ...]
    returns: tuple[str, ...]
    gradient: Literal["yes", "raises", "silently lost", "partial"]
    in_place: tuple[str, ...] = ()
    namespace: str | None = "npu"
    library: str = "torch_npu"
    since: str = "2.9"
    changes: tuple[tuple[str, str], ...] = ()
    note: str = ""


def parse_schema(schema: str, since: Mapping[str, str] | None = None) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Return the parameters and result types of a schema; alias marks such as (a!) are dropped.

    since: by parameter, the release that added it. Example: parse_schema("(Tensor x, *, int dim=-1) -> Tensor")
    """
    inputs, outputs = re.sub(r"\([a-z]!\)", "", schema).split(" -> ")
    parameters, keyword_only = [], False
    for part in inputs[inputs.index("(") + 1 : -1].split(", "):
        if part == "*":
            keyword_only = True
            continue
        declared, _, default = part.partition("=")
        kind, name = declared.split()
        value = ast.literal_eval(default) if default else REQUIRED
        parameters.append(Parameter(name, kind, value, keyword_only, (since or {}).get(name, "2.9")))
    return tuple(parameters), tuple(part for part in outputs.strip("()").split(", ") if part)


def from_schema(
    name: str, schema: str, *, first: str = "2.9", added: Mapping[str, str] | None = None, **facts: Any
) -> Contract:
    """Build the Contract of an operator from its schema.

    first: the first release that has the operator; added: by later release, the parameters it added, separated by
    spaces; facts: the other fields of Contract. Raises ValueError for an added parameter that the schema lacks.
    """
    since = {parameter: release for release, names in (added or {}).items() for parameter in names.split()}
    parameters, returns = parse_schema(schema, since)
    if unknown := since.keys() - {parameter.name for parameter in parameters}:
        raise ValueError(f"{name}: {', '.join(sorted(unknown))} added later, but not in its schema {schema}")
    return Contract(name=name, parameters=parameters, returns=returns, since=first, **facts)
