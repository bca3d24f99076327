"""What configurations, geometries and platforms are: immutable typed data without unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from moereplay.traces.texts import MOST_NAME, hint, settled, shown


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


MOST_NOTES = 1_000


def _notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    left_out = len(notes) - MOST_NOTES + 1
    return notes if left_out <= 1 else (*notes[: MOST_NOTES - 1], f"{left_out:,} more notes")


Name = Annotated[str, AfterValidator(lambda text: settled(text, MOST_NAME))]
Text = Annotated[str, AfterValidator(settled)]
Notes = Annotated[tuple[Text, ...], AfterValidator(_notes)]


# -- Pydantic's validation errors as one line: where, what was expected, what was found.

#: By the type of pydantic's error; braces take its context.
EXPECTED = {
    "missing": "it is missing",
    "extra_forbidden": "nothing is called so here; remove it or correct its name",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "multiple_of": "expected a multiple of {multiple_of}",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "finite_number": "expected a finite number",
    "int": "expected a whole number",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected a text",
    "list": "expected a list",
    "tuple": "expected a list",
    "dict": "expected a table",
    "mapping": "expected a table",
    "model": "expected a table",
    "union_tag_invalid": "kind {tag!r} is unknown: choose from {expected_tags}",
    "union_tag_not_found": "it names no kind",
}
LONGEST = 60  #: characters that are shown of a value


def first_fault(error: ValidationError) -> str:
    """Of a document: the first thing that is wrong with it, after its place in there."""
    fault = error.errors()[0]
    where = ".".join(map(str, fault["loc"]))
    return f"{where}: {words(fault)}" if where else words(fault)


def words(fault: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()` without its place: what was expected, and what was found."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "value_error":  # a validator of ours has said it
        return f"{fault['msg'].removeprefix('Value error, ')}{_got(fault)}"
    if kind == "literal_error":
        options = [option.strip("' ") for option in context["expected"].replace(" or ", ", ").split(", ")]
        return f"{hint(str(fault['input']), options)}{_got(fault)}"
    said = EXPECTED.get(kind) or EXPECTED.get(kind.split("_")[0])
    if said is None:
        return f"{fault['msg']}{_got(fault)}"
    said = said.format(**{name: _shortest(value) for name, value in context.items()})
    return said if kind in ("missing", "extra_forbidden") else f"{said}{_got(fault)}"


def _shortest(value: Any) -> Any:
    """1 for 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _got(fault: Mapping[str, Any]) -> str:
    """The value that was found, cut if it is long; nothing of a whole document."""
    found = fault["input"]
    if not fault["loc"] or isinstance(found, dict):
        return ""
    text = repr(found) if isinstance(found, str) else shown(found, LONGEST + 1)
    return f" (got {text if len(text) <= LONGEST else text[: LONGEST - 3] + '...'})"
