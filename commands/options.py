"""Options that several verbs share, typed once; those of settings are in `commands/settings.py`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer

from moereplay.results.settings import EXPERTS, LISTED, OF_BOUNDS, OF_CURVES, SETTINGS, TEXT, WHOLE, Setting

if TYPE_CHECKING:
    from pydantic import ValidationError

    from moereplay.simulator.config import ReplayConfig


def _bundled(path: Path) -> Path:
    """The trace that comes with the program, if its name alone is given."""
    from moereplay.traces.installation import bundled

    return bundled(path)


TracePath = Annotated[
    Path,
    typer.Argument(help="A trace folder, NAME.zarr, or `miniature` (bundled).", show_default=False, callback=_bundled),
]
NewTrace = Annotated[Path, typer.Option(help="The trace to write, NAME.zarr.", show_default=False)]


def _take_policies(paths: list[Path] | None) -> list[Path] | None:
    """Add the policies of these files to the catalogue, before the verb runs. Raises PolicyError or OSError."""
    if paths:
        from moereplay.policies.files import register

        for path in paths:
            register(path)
    return paths


# Verbs only name this one: it has done its work before they run.
PolicyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--policy-file",
        help="Your own policy (.py), see docs/policies.md; may be given again.",
        callback=_take_policies,
    ),
]
Engine = Annotated[str, typer.Option(help="compiled, reference: the same results, one fast, one readable.")]


Dense = Annotated[str, typer.Option(help="Bytes of all weights that are no routed expert, as stored: 1816MiB.")]
DenseBits = Annotated[str, typer.Option(help="Instead of --dense: bits per weight of these, or their format: Q8_0.")]


def stored(expert_bits: str, dense: str, dense_bits: str) -> dict[str, Any]:
    """Return the fields of importers' `Options` for how weights are stored. Raises ConfigError."""
    from moereplay.simulator.capacity import dense_size
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.dense import check_dense_bits
    from moereplay.traces.schema import check_bits
    from moereplay.traces.weight_formats import bits_of, check_format, is_number

    if dense and dense_bits:
        raise ConfigError("--dense cannot be combined with --dense-bits")
    try:
        if dense_bits:
            check_dense_bits(dense_bits)
        named = bool(expert_bits) and not is_number(expert_bits)
        if expert_bits:
            check_bits(bits_of(expert_bits))
        return {
            "expert_bits": float(expert_bits) if expert_bits and not named else None,
            "weight_format": check_format(expert_bits) if named else "",
            "dense_bytes": dense_size(dense) if dense else None,
            "dense_bits": dense_bits,
        }
    except ValueError as wrong:
        option = "" if str(wrong).startswith("invalid --dense") else "invalid --expert-bits: "
        raise ConfigError(f"{option}{wrong}") from None


def named_experts(option: str, path: Path | None) -> Any:
    """What `--warm` or `--profile` names. Raises ConfigError if the file holds no JSON."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.documents import DocumentError, content, from_json

    try:
        return from_json(content(path)) if path else ()
    except (OSError, DocumentError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {path}: {said}; expected a JSON list of [layer, expert]") from None


def check_events(path: Path | None) -> None:
    """Raises ConfigError for an event log of neither format."""
    from moereplay.simulator.errors import ConfigError

    if path and path.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"--events {path}: an event log is Parquet or CSV; give it a name in .parquet or .csv")


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, by the name of its option."""
    from moereplay.traces.frozen import words

    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return option + words(first)


# -- Groups of options: a verb takes a group as one argument, the command line has an option for each of its fields.


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


# -- How many cores this process may use: in a container fewer than the machine has.

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- Options for the settings of a replay, made from `results/settings.py`, and what was given for them.

PRESETS = "Comma list; `moereplay presets` names them; options beside it win."
#: What an option takes, by how its setting is stored; a comma list is a text.
TYPES: dict[str, Any] = {TEXT: str, WHOLE: int, EXPERTS: Path | None}


class Given(NamedTuple):
    """What the options of a verb say of a replay's settings."""

    values: Mapping[str, Any]  #: by name, defaults included
    typed: frozenset[str]  #: names of those that the user typed, which win over a preset
    preset: str  #: comma list; empty for none

    def lists(self) -> dict[str, str]:
        """The comma lists, as `sweeps.grid.expand` takes them."""
        return {name: text for name, text in self.values.items() if name in LISTED}

    def fixed(self) -> dict[str, Any]:
        """The other settings, their files read. Raises ConfigError if one holds no JSON."""
        return {name: _read(name, value) for name, value in self.values.items() if name not in LISTED}

    def of_presets(self, fixed: Mapping[str, object]) -> dict[str, ReplayConfig]:
        """Every preset by its name and what varies, without settings that the verb lacks. Raises ConfigError."""
        from moereplay.simulator.presets import settings
        from moereplay.sweeps.policy_sets import named_sets

        lists = self.lists()
        own = {name: text for name, text in lists.items() if name in self.typed}
        sets = {
            name: {each: text for each, text in values.items() if each in lists} | own
            for name, values in settings(self.preset)
        }
        return named_sets(sets, fixed)

    def called(self) -> dict[ReplayConfig, str]:
        """Every configuration, with the names of the presets that ask for it. Raises ConfigError or PolicyError."""
        from moereplay.sweeps.grid import expand

        fixed = self.fixed()
        if not self.preset:
            return dict.fromkeys(expand(self.lists(), fixed), "")
        called: dict[ReplayConfig, str] = {}
        for name, config in self.of_presets(fixed).items():
            preset = name.partition(" ")[0]  # what varies has columns of its own
            called[config] = f"{called[config]}, {preset}" if config in called else preset
        return called


def offered(settings: Iterable[Setting], blank: bool = False, preset: bool = True) -> Group:
    """An option for each of these settings, empty unless given if `blank`, and one for presets before them."""
    options = [option("preset", Annotated[str, typer.Option(help=PRESETS)], "")] if preset else []
    return Group([*options, *(_option(each, blank) for each in settings)], _given)


def _read(name: str, value: Any) -> Any:
    return named_experts(f"--{name.replace('_', '-')}", value) if KINDS[name] == EXPERTS else value


def _option(setting: Setting, blank: bool) -> Any:
    kind, default = TYPES[setting.kind], setting.default
    if setting.kind == EXPERTS:
        default = None
    elif setting.listed:
        kind, default = str, "" if blank else str(default)
    return option(setting.name, Annotated[kind, typer.Option(help=setting.help)], default)


def _given(context: typer.Context, values: dict[str, Any]) -> Given:
    preset = values.pop("preset", "")
    return Given(values, frozenset(name for name in values if is_typed(context, name)), preset)


KINDS = {each.name: each.kind for each in SETTINGS}
LIVE = [each for each in SETTINGS if not each.of_recording]
Settings = Annotated[Given, offered(SETTINGS)]
LiveSettings = Annotated[Given, offered(LIVE)]
#: Of policy sets, which have settings of their own: what is not typed is empty.
ListedSettings = Annotated[Given, offered((each for each in LIVE if each.listed), blank=True)]
#: What a recommendation does not choose.
GIVEN = (
    "platform",
    "contract",
    "scope",
    "passes",
    "reset",
    "prefetch_at",
    "prefetch_admission",
    "lookahead",
    "dense",
    "dense_bits",
    "seed",
)
OfRecommendation = Annotated[Given, offered((each for each in SETTINGS if each.name in GIVEN), preset=False)]
OfBounds = Annotated[Given, offered((each for each in SETTINGS if each.name in OF_BOUNDS), preset=False)]
CurveSettings = Annotated[Given, offered((each for each in SETTINGS if each.name in OF_CURVES), preset=False)]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix errors that are raised in this block with the name of the policy set."""
    from moereplay.policies.contract import PolicyError
    from moereplay.simulator.errors import ConfigError

    try:
        yield
    except (ConfigError, PolicyError) as error:
        raise ConfigError(f"policy set {name}: {error}") from None
