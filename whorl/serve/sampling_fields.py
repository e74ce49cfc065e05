"""The request fields of sampling parameters: every API that generates has them, under the parameters' own names."""

from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field, create_model

from whorl.engine.sampling_params import PARAMETERS, Parameter

from .schema_parts import Strict

SAMPLING = tuple(name for name, (_, declared) in PARAMETERS.items() if declared.is_in_apis)


def _field(hint: Any, declared: Parameter) -> tuple[Any, Any]:
    """Return the annotation and the default of a parameter's field; null means the model's recommendation."""
    kind = int if int in (hint, *get_args(hint)) else float
    least, most = declared.api_bounds
    bounds: dict[str, Any] = {"ge": least, "gt": declared.above, "le": most}
    bounds = {name: bound for name, bound in bounds.items() if bound is not None}
    return Annotated[kind, Field(**bounds)] | None, Field(None, description=declared.text)


if TYPE_CHECKING:

    class SamplingFields(Strict):
        """Whose fields only the table of parameters knows."""

else:
    fields = {name: _field(*PARAMETERS[name]) for name in SAMPLING}
    SamplingFields = create_model("SamplingFields", __base__=Strict, __module__=__name__, **fields)


def sampling_values(request: SamplingFields) -> dict[str, Any]:
    """Return the fields that a request sets."""
    return {name: value for name in SAMPLING if (value := getattr(request, name)) is not None}
