"""What an answer must look like, in vLLM's spelling: `structured_outputs`, and the older `guided_json` and its kin."""

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
    """param: the field of the request that asks for it."""

    kind: Kind
    value: Any
    param: str


def _read_schema(given: Any) -> Any:
    """A schema may come as text."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("the schema is not a JSON object")
    return found


class StructuredOutputs(Strict):
    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="Lark as llguidance takes it, or GBNF")

    @field_validator("json_", mode="before")
    @classmethod
    def _schema(cls, given: Any) -> Any:
        return _read_schema(given)

    @model_validator(mode="after")
    def _is_one(self) -> "StructuredOutputs":
        if len(self.asked()) != 1:
            raise ValueError(f"exactly one of {', '.join(_KINDS)} is given, not {len(self.asked())}")
        return self

    def asked(self) -> list[Constraint]:
        values: dict[Kind, Any] = {"json": self.json_, "json_object": self.json_object or None, "regex": self.regex}
        values |= {"choice": self.choice, "grammar": self.grammar}
        return [Constraint(kind, value, "structured_outputs") for kind, value in values.items() if value is not None]


class Guided(Strict):
    """Fields of requests that generate."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = Field(None, description="no effect: there is one")

    @field_validator("guided_json", mode="before")
    @classmethod
    def _schema(cls, given: Any, info: ValidationInfo) -> Any:
        return _read_schema(given)

    @model_validator(mode="after")
    def _constraints_exclude_each_other(self) -> "Guided":
        if len(names := [each.param for each in self._constraints()]) > 1:
            raise ValueError(f"{' and '.join(names)} exclude each other")
        return self

    @property
    def constraint(self) -> Constraint | None:
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[Constraint]:
        found = [] if self.structured_outputs is None else self.structured_outputs.asked()
        for kind in _GUIDED:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                found.append(Constraint(kind, value, f"guided_{kind}"))
        return found
