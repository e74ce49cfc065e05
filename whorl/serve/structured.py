"""Request fields that constrain the answer, with vLLM's names: `structured_outputs` and the older `guided_` fields."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from .schema_parts import Strict

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
_KINDS: tuple[Kind, ...] = ("json", "json_object", "regex", "choice", "grammar")
_GUIDED: tuple[Kind, ...] = ("json", "regex", "choice", "grammar")

Schema = dict[str, Any] | str
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True, min_length=1, max_length=4096)]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the answer. param: the field of the request that it is from."""

    kind: Kind
    value: Any
    param: str


def _read_schema(schema: Any) -> Any:
    """Parse a schema that is sent as text."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("the schema is not a JSON object")
    return parsed


class StructuredOutputs(Strict):
    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="Lark as llguidance takes it, or GBNF")

    @field_validator("json_", mode="before")
    @classmethod
    def _schema(cls, schema: Any) -> Any:
        return _read_schema(schema)

    @model_validator(mode="after")
    def _has_one_constraint(self) -> "StructuredOutputs":
        if len(self.constraints()) != 1:
            raise ValueError(f"give exactly one of {', '.join(_KINDS)}, not {len(self.constraints())}")
        return self

    def constraints(self) -> list[Constraint]:
        """Return the constraints of the fields that are set."""
        values: dict[Kind, Any] = {"json": self.json_, "json_object": self.json_object or None, "regex": self.regex}
        values |= {"choice": self.choice, "grammar": self.grammar}
        return [Constraint(kind, value, "structured_outputs") for kind, value in values.items() if value is not None]


class Guided(Strict):
    """The fields for constraints, which all requests that generate have."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = Field(None, description="no effect: there is only one backend")

    @field_validator("guided_json", mode="before")
    @classmethod
    def _schema(cls, schema: Any, info: ValidationInfo) -> Any:
        return _read_schema(schema)

    @model_validator(mode="after")
    def _constraints_exclude_each_other(self) -> "Guided":
        if len(names := [constraint.param for constraint in self._constraints()]) > 1:
            raise ValueError(f"{' and '.join(names)} exclude each other")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The request's constraint; None: it has none."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        constraints = [] if self.structured_outputs is None else self.structured_outputs.constraints()
        for kind in _GUIDED:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                constraints.append(Constraint(kind, value, f"guided_{kind}"))
        return constraints
