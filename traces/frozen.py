"""What configurations, geometries and platforms are: immutable typed data without unknown keys."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from moereplay.traces.faults import first_fault


class Frozen(BaseModel):
    """Immutable, and no unknown keys: a misspelt setting is an error, not a silence. Numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: object, info: ValidationInfo) -> object:
        """`true` is no number, and in a list neither is a text; pydantic would read 1 and the text's digits."""
        if info.field_name is not None and _holds_numbers(cls, info.field_name):
            _refuse_others(value)
        return value


@cache
def _holds_numbers(model: type[BaseModel], field: str) -> bool:
    """Whether a field is a number, or lists or tables of nothing but numbers."""
    return _leaves(model.model_fields[field].annotation) - {type(None)} in ({int}, {float}, {int, float})


def _leaves(annotation: Any) -> set[Any]:
    """The types in an annotation, without lists, unions and the keys of tables."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is None or not inner:
        return {annotation}
    inner = inner[:1] if origin is Annotated else inner[1:] if origin is dict else inner
    return set[Any]().union(*(_leaves(each) for each in inner if each is not Ellipsis))


def _refuse_others(value: object, listed: bool = False) -> None:
    """Raises ValueError for `true` and `false`, and for texts within lists: an option's own text is a number."""
    if isinstance(value, bool) or (listed and isinstance(value, str)):
        raise ValueError("expected a number" if not listed else f"expected numbers, not {value!r}")
    if isinstance(value, dict):
        for each in value.values():
            _refuse_others(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _refuse_others(each, True)


class Sparse(Frozen):
    """What has figures that came later: those are left out of its document where they have their defaults.

    So documents of before, and their hashes, stay what they were.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _said(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = {name: type(self).model_fields[name] for name in self.later}
        defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        unsaid = {name for name, default in defaults.items() if getattr(self, name) == default}
        return {name: value for name, value in whole(self).items() if name not in unsaid}


class _OneLine(type(BaseModel)):
    """Classes whose constructor raises one of our errors; what is validated inside other models raises pydantic's."""

    refused_as: type[Exception]

    def __call__(cls, *given: Any, **named: Any) -> Any:
        try:
            return super().__call__(*given, **named)
        except ValidationError as wrong:
            raise cls.refused_as(f"{cls.__name__}: {first_fault(wrong)}") from None


#: Unpacked, so that type checkers go on reading the constructor's arguments from the fields.
_METACLASS: dict[str, Any] = {"metaclass": _OneLine}


class Public(Sparse, **_METACLASS):
    """A model that users construct: a wrong value is the error `refused_as`, in one line."""

    refused_as: ClassVar[type[Exception]] = ValueError
