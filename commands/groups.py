"""Groups of options: a verb takes a group as one argument, the command line has an option for each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer


@dataclass(frozen=True)
class Group:
    """Options that a verb takes as one argument, annotated with `Annotated[..., Group(...)]`."""

    options: Sequence[Parameter]
    made: Callable[[typer.Context, dict[str, Any]], Any]  #: the argument, from the values of the options by name


def option(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    """An option as a parameter of a function, which is how typer wants it."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether the user gave an option, be it at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _all_typed(context: typer.Context, values: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name in context.params if is_typed(context, name))


#: Names of the options that the user typed: an argument of a verb that needs no option of its own.
Typed = Annotated[frozenset[str], Group([], _all_typed)]


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the options of its groups in their places. A NamedTuple is a group of its fields."""
    asked = inspect.signature(verb, eval_str=True).parameters.values()
    groups = {each.name: group for each in asked if (group := _group(each.annotation))}

    def run(context: typer.Context, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.made(context, {each.name: values.pop(each.name) for each in group.options})
        verb(**values)

    options = [option("context", typer.Context)]
    for each in asked:
        options += groups[each.name].options if each.name in groups else [each.replace(kind=Parameter.KEYWORD_ONLY)]
    described: Any = run  # typer reads signature and annotations both
    described.__signature__ = Signature(options)
    described.__annotations__ = {each.name: each.annotation for each in options}
    described.__name__, described.__doc__ = verb.__name__, verb.__doc__
    return described


def _group(annotation: Any) -> Group | None:
    if isinstance(annotation, type) and hasattr(annotation, "_fields"):
        return _of_fields(annotation)
    return next((each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Group)), None)


def _of_fields(fields: Any) -> Group:
    hints = get_type_hints(fields, include_extras=True)
    defaults = fields._field_defaults
    options = [option(name, hints[name], defaults.get(name, Parameter.empty)) for name in fields._fields]
    return Group(options, lambda context, values: fields(**values))
