"""`Body`, the base class of the JSON objects in requests, and annotations of their fields."""

from functools import cache
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# Prefix of the parts of an error's path that are types of records, not fields.
TAG = "type="
# Max unknown fields of an object that are ignored; more would only cost time.
MAX_UNKNOWN = 100


class Unsupported:
    """An annotation of an unsupported field: it may only be null or one of `values`."""

    def __init__(self, *values: Any, code: str = "unsupported_parameter"):
        self.values, self.code = values, code

    def _check(self, value: Any) -> Any:
        # 1 and 1.0 are the same number in JSON, but 0 and False differ.
        if any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in self.values):
            return value
        raise PydanticCustomError(self.code, "is not supported by this server; leave it out")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": [None, *self.values]}


class ByType:
    """An annotation of a union of classes: the field `type` of a JSON object selects the class.

    `default`: the type of an object without that field.
    """

    def __init__(self, default: str | None = None):
        self.default = default

    def _tag(self, value: Any) -> str:
        return TAG + str((value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or self.default)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {
            TAG + name: handler.generate_schema(record)
            for record in get_args(source) or (source,)
            for name in get_args(record.model_fields["type"].annotation)
            if name
        }
        return core_schema.tagged_union_schema(choices, self._tag)


class Body(BaseModel):
    """A JSON object of a request; null is the same as leaving a field out.

    Unknown fields are an error, unless the validation context is a set: then they are ignored, and
    their names are added to the set.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )
    # Descriptions of the values of fields, for error messages.
    expected: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the object without null fields and without unknown fields.

        Without a validation context, the first unknown field stays, so that Pydantic reports it.
        """
        if not isinstance(value, dict):
            return value
        known = cls._names()
        if known.issuperset(value) and None not in value.values():
            return value
        given = {name: each for name, each in value.items() if each is not None}
        unknown = [name for name in given if name not in known]
        reported = unknown[:1]
        if info.context is not None and cls.model_config["extra"] == "forbid":
            if len(unknown) > MAX_UNKNOWN:
                limits = {"count": len(unknown), "limit": MAX_UNKNOWN}
                raise PydanticCustomError("too_many", "has {count} unknown fields; send at most {limit}", limits)
            info.context.update(unknown)
            reported = []
        return {name: each for name, each in given.items() if name in known or name in reported}

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        """Return the names of the fields in JSON."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())
