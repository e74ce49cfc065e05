"""A `Contract` describes one vendor operator: parameters, results, gradient and versions, read from its schema."""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

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


@dataclass(frozen=True)
class Contract:
    """The schema of one vendor operator, and what the operator promises; the schema is parsed when it is first needed.

    `added`: by later release, the parameters it added, separated by spaces; `gradient`: "yes", "raises", "silently
    lost" (the result has no grad_fn), or "partial"; `in_place`: parameters it overwrites; `namespace`: its torch.ops
    namespace, None where it is not a torch operator; `library`: the Python package that has it; `since`: the first
    supported release that has it; `changes`: the defaults that later releases changed; `renamed`: by parameter, the
    release that renamed it, and its name before; `note`: what else a caller must
    know.
    """

    schema: str
    _: KW_ONLY
    added: Mapping[str, str] = field(default_factory=dict)
    gradient: Literal["yes", "raises", "silently lost", "partial"] = "silently lost"
    in_place: tuple[str, ...] = ()
    namespace: str | None = "npu"
    library: str = "torch_npu"
    since: str = "2.9"
    changes: tuple[tuple[str, str], ...] = ()
    renamed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters with the releases that added them; ValueError for an added one that the schema lacks."""
        since = {parameter: release for release, names in self.added.items() for parameter in names.split()}
        parameters = parse_schema(self.schema)[0]
        if unknown := since.keys() - {parameter.name for parameter in parameters}:
            raise ValueError(f"{', '.join(sorted(unknown))} added later, but not in the schema {self.schema}")
        return tuple(replace(parameter, since=since.get(parameter.name, "2.9")) for parameter in parameters)

    @cached_property
    def returns(self) -> tuple[str, ...]:
        """The types of the results."""
        return parse_schema(self.schema)[1]


def parse_schema(schema: str) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """Return the parameters and result types of a schema; alias marks such as (a!) are dropped.

    Example: parse_schema("(Tensor x, *, int dim=-1) -> Tensor")
    """
    inputs, outputs = re.sub(r"\([a-z]!\)", "", schema).split(" -> ")
    parameters, keyword_only = [], False
    for part in inputs[inputs.index("(") + 1 : -1].split(", "):
        if part == "*":
            keyword_only = True
            continue
        declared, _, default = part.partition("=")
        kind, name = declared.split()
        parameters.append(Parameter(name, kind, ast.literal_eval(default) if default else REQUIRED, keyword_only))
    return tuple(parameters), tuple(part for part in outputs.strip("()").split(", ") if part)
