"""The table of generation parameters as fields of pydantic models."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Annotated, Any

from pydantic import BaseModel, GetPydanticSchema, create_model
from pydantic_core import PydanticCustomError, core_schema

from foretell.core.parameters import PARAMETERS, Parameter
from foretell.utils.validation import PREDICATE

_JSON_TYPES = {float: "number", int: "integer", bool: "boolean", str: "string"}


def checked(name: str, **changes: Any) -> GetPydanticSchema:
    """What makes a field of the parameter of this name, whatever the field is called: `Annotated[int, checked(name)]`.
    `changes`: attributes that differ from the table's.

    The field holds the value as `Parameter.read` gives it. Its errors are sentences that begin with the field's name.
    """
    parameter = replace(PARAMETERS[name], **changes)

    def validate(value: Any) -> Any:
        if problem := parameter.problem(value):
            raise PydanticCustomError(PREDICATE, "{problem}", {"problem": problem})
        return parameter.read(value)

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_plain_validator_function(validate),
        lambda schema, handler: _json_schema(parameter),
    )


def parameter_model(name: str, base: type[BaseModel], fields: Mapping[str, Parameter]) -> type[BaseModel]:
    """A model with a field for each of these parameters by the field's name, None where it is not given."""
    made: dict[str, Any] = {
        field: (Annotated[parameter.kind, checked(parameter.name)] | None, None) for field, parameter in fields.items()
    }
    return create_model(name, __base__=base, __module__=base.__module__, **made)


def _json_schema(parameter: Parameter) -> dict[str, Any]:
    """The JSON schema of its values."""
    kind = _JSON_TYPES[parameter.kind]
    if parameter.many:
        return {"type": "array", "items": {"type": kind} | ({"minimum": 0} if parameter.kind is int else {})}
    lower = {"exclusiveMinimum" if parameter.above else "minimum": parameter.low} if parameter.low > -inf else {}
    return {"type": kind} | lower | ({"maximum": parameter.high} if parameter.high < inf else {})
