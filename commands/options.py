"""Options of the command line: groups that verbs take as one argument, help by heading, shared options, settings."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer
from pydantic import ValidationError

from moereplay.commands.terminal import say
from moereplay.policies.contract import PolicyError
from moereplay.policies.files import register
from moereplay.results.errors import check_output
from moereplay.results.settings import EXPERTS, LISTED, OF_BOUNDS, OF_CURVES, SETTINGS, TEXT, WHOLE, Setting
from moereplay.simulator.capacity import dense_size, of_layers
from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.grid import expand
from moereplay.traces.dense import check_dense_bits
from moereplay.traces.documents import DocumentError, content, from_json, words
from moereplay.traces.files import bundled
from moereplay.traces.schema import check_bits
from moereplay.traces.weight_formats import bits_of, check_format, is_number

if TYPE_CHECKING:
    from moereplay.traces.geometry import KnownModel

#: Cores of this process: a container may have fewer than the machine.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- groups of options


@dataclass(frozen=True)
class Group:
    """Options that a verb takes as one argument, annotated with `Annotated[..., Group(...)]`."""

    options: Sequence[Parameter]
    build: Callable[[typer.Context, dict[str, Any]], Any]  #: makes the argument from the values of the options by name


def option(name: str, annotation: Any, default: Any = Parameter.empty) -> Parameter:
    """Return an option as a function parameter, which is the form that typer reads."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def is_typed(context: typer.Context, name: str) -> bool:
    """Return True if the user typed the option, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


#: Argument of a verb that has no option: the names of the options that the user typed.
Typed = Annotated[
    frozenset[str],
    Group([], lambda context, _: frozenset(name for name in context.params if is_typed(context, name))),
]


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace each group in a verb's signature by its options. A NamedTuple is the group of its fields."""
    parameters = inspect.signature(verb, eval_str=True).parameters.values()
    groups = {each.name: group for each in parameters if (group := _group(each.annotation))}

    def run(context: typer.Context, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.build(context, {each.name: values.pop(each.name) for each in group.options})
        verb(**values)

    options = [option("context", typer.Context)]
    for each in parameters:
        options += groups[each.name].options if each.name in groups else [each.replace(kind=Parameter.KEYWORD_ONLY)]
    described: Any = run  # typer reads both the signature and the annotations
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


# -- help

#: Verbs with more options than these show them under headings.
MOST_IN_ONE_LIST = 8
#: Options by heading of `--help`; all others are under the last one.
BY_HEADING = {
    "Input": "prompts field text dataset trace window prompt_tokens chat truncate limit shuffle tasks shots batch "
    "format columns where prompt_length chunk shape ids real_experts requests tokens prompt calibration_tokens "
    "first_pass passes_shown",
    "Sampling": "max_new_tokens temperature top_p top_k",
    "Policies": "preset eviction prefetch miss routing policy_file profile sets study top_m top_j mass min_mass_kept",
    "Cache": "capacity divide scope slots contract reset warm resident prefetch_at prefetch_admission memory vram ram "
    "positions kv_bits runtime",
    "Machine": "platform dense dense_bits device slow_tier throttle threads eager decisions base lanes serial layers",
    "Model": "model device_map dtype quantise quantiser revision expert_bytes expert_bits matrices quant k",
    "Trace": "passes draft lookahead look_ahead logits kind reuse exponent recall decode_tokens layer dense_layers",
    "Checks": "every live check_tokens check_prompt check_requests tolerance_hit_rate tolerance_time",
    "Execution": "engine workers executor address nodes slurm shard budget repeat order_seed seed resume",
    "Output": "out verbose as_json as_csv csv markdown as_markdown as_latex by top events record_to licence brief "
    "table errors request_layers",
    "Options": "",
}
HEADINGS = tuple(BY_HEADING)
HEADING = {name: heading for heading, names in BY_HEADING.items() for name in names.split()}


def heading_of(name: str, options: int) -> str:
    """Return the help heading of an option, for a verb with this number of options."""
    return HEADINGS[-1] if options <= MOST_IN_ONE_LIST else HEADING.get(name, HEADINGS[-1])


def with_default(text: str) -> str:
    """Rewrite the end of an option's help, `[default: 2; x>=1]`, as `(default: 2, at least 1)`."""
    found = re.fullmatch(r"(.*?)\.?  \[(.*)\]", text, re.DOTALL)
    if not found:
        return text
    most = re.sub(r"(\S+)<=x<=(\S+)", r"\1 to \2", found[2].replace("; ", ", "))
    return f"{found[1]} ({re.sub(r'x>=', 'at least ', most)})."


# -- shared options


def _bundled(path: Path) -> Path:
    """Replace the name of the bundled trace by its path."""
    return bundled(path)


def _register_policies(paths: list[Path] | None) -> list[Path] | None:
    """Add the policies in these files to the catalogue, before the verb runs. Raises PolicyError or OSError."""
    if paths:
        for path in paths:
            register(path)
    return paths


TracePath = Annotated[
    Path,
    typer.Argument(help="Trace folder, NAME.zarr, or `miniature` (bundled).", show_default=False, callback=_bundled),
]
NewTrace = Annotated[Path, typer.Option(help="Trace to write, NAME.zarr.", show_default=False)]
#: A verb need not read this argument: the callback has registered the policies before the verb runs.
PolicyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--policy-file",
        help="File with a policy of your own (.py), see docs/policies.md (repeatable).",
        callback=_register_policies,
    ),
]
By = Annotated[str, typer.Option(help="Column to rank by, best first: hit_rate, ttft_mean_ms, tpot_ms, gb_moved, ...")]
Engine = Annotated[str, typer.Option(help="compiled (fast) or reference (readable); both give the same results.")]
Workers = Annotated[int, typer.Option(help="Number of parallel replays.")]
Where = Annotated[
    list[str] | None,
    typer.Option(help="Only replays with these values: setting=value,value; a --where for each setting (repeatable)."),
]
Dense = Annotated[str, typer.Option(help="Bytes of all weights except routed experts, as stored: 1816MiB.")]
DenseBits = Annotated[str, typer.Option(help="Instead of --dense: bits per weight of these, or their format: Q8_0.")]
Quant = Annotated[
    str, typer.Option(help="Weight format of the model, if it is named without a file: Q4_K_M, FP8, AWQ.")
]
Matrices = Annotated[
    str,
    typer.Option(
        help="Relative sizes of an expert's matrices in reading order: 2,1 if gate and up are one "
        "(default: the model's)."
    ),
]


def model_named(spec: str, quant: str = "") -> KnownModel:
    """Return the sizes of a model, and say what they assume. Raises TraceError."""
    from moereplay.traces.checkpoints.found import model_of

    found = model_of(spec, quant)
    if found.assumed:
        say(f"note: {found.name}: {found.assumed}")
    return found


def stored(expert_bits: str, dense: str, dense_bits: str, matrices: str = "") -> dict[str, Any]:
    """Return the fields of importers' `Options` about stored weights. Raises ConfigError."""
    if dense and dense_bits:
        raise ConfigError("--dense cannot be combined with --dense-bits")
    from moereplay.traces.geometry import matrices_of  # importers know models; few replays do

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
            "matrices": matrices_of(matrices) if matrices else (),
        }
    except ValueError as wrong:
        option = "" if str(wrong).startswith("invalid --") else "invalid --expert-bits: "
        raise ConfigError(f"{option}{wrong}") from None


def refuse_both(**given: str) -> None:
    """Raises ConfigError if both of two options are given."""
    if all(given.values()):
        first, second = (f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{first} cannot be combined with {second}")


def named_experts(option: str, path: Path | None) -> Any:
    """Read the list of experts that an option names. Raises ConfigError if the file is not JSON."""
    return listed(option, path, "[layer, expert]") if path else ()


def listed(option: str, path: Path, of: str) -> Any:
    """Read the JSON list that an option names. Raises ConfigError if the file is not JSON."""
    try:
        return from_json(content(path))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {path}: {reason}: expected a JSON list of {of}") from None


def check_events(path: Path | None) -> None:
    """Raises ConfigError unless the event log is Parquet or CSV."""
    if path and path.suffix not in (".parquet", ".csv"):
        raise ConfigError(f"invalid --events {path}: expected a name that ends in .parquet or .csv")


def check_platform_file(out: Path) -> None:
    """Raises ConfigError or ResultError for an --out that --platform would not read, or that cannot be written."""
    check_output(out)
    if out.suffix != ".toml":
        raise ConfigError(f"--out {out}: expected a name that ends in .toml, as --platform reads it")


def option_fault(error: ValidationError) -> str:
    """Return the first fault of a validation, with the name of its option."""
    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return option + words(first)


# -- settings of a replay

PRESETS = "Comma list of presets (see `moereplay presets`); other options override them."
#: Type of an option by the kind of its setting; a comma list is a text.
TYPES: dict[str, Any] = {TEXT: str, WHOLE: int, EXPERTS: Path | None}


class Given(NamedTuple):
    """Settings of a replay from a verb's options."""

    values: Mapping[str, Any]  #: by name, defaults included
    typed: frozenset[str]  #: names that the user typed; they override a preset
    preset: str  #: comma list; empty for none

    def lists(self) -> dict[str, str]:
        """Return the comma lists, for `sweeps.grid.expand`."""
        return {name: text for name, text in self.values.items() if name in LISTED}

    def fixed(self) -> dict[str, Any]:
        """Return the other settings, with their files read. Raises ConfigError if a file is not JSON."""
        return {name: _read(name, value) for name, value in self.values.items() if name not in LISTED}

    def of_presets(self, fixed: Mapping[str, object]) -> dict[str, ReplayConfig]:
        """Return a configuration per preset and combination. Settings that the verb lacks are left out."""
        from moereplay.simulator.presets import settings
        from moereplay.sweeps.policy_sets import named_sets

        lists = self.lists()
        own = {name: text for name, text in lists.items() if name in self.typed}
        sets = {
            name: {each: text for each, text in values.items() if each in lists} | own
            for name, values in settings(self.preset)
        }
        return named_sets(sets, fixed)

    def only(self, verb: str) -> ReplayConfig:
        """Return the only configuration. Raises ConfigError for several."""
        config, *others = self.preset_names()
        if others:
            raise ConfigError(f"{verb} requires one configuration; these options expand to {1 + len(others)}")
        return config

    def preset_names(self) -> dict[ReplayConfig, str]:
        """Return each configuration with the names of its presets. Raises ConfigError or PolicyError."""
        fixed = self.fixed()
        if not self.preset:
            return dict.fromkeys(expand(self.lists(), fixed), "")
        preset_names: dict[ReplayConfig, str] = {}
        for name, config in self.of_presets(fixed).items():
            preset = name.partition(" ")[0]  # settings that vary have their own columns
            preset_names[config] = f"{preset_names[config]}, {preset}" if config in preset_names else preset
        return preset_names


def offered(settings: Iterable[Setting], blank: bool = False, preset: bool = True) -> Group:
    """Return an option per setting, with an empty default if `blank`, after one for presets."""
    options = [option("preset", Annotated[str, typer.Option(help=PRESETS)], "")] if preset else []
    return Group([*options, *(_option(each, blank, preset) for each in settings)], _given)


def _read(name: str, value: Any) -> Any:
    if name == "resident" and (str(value) == "all" or str(value or "").startswith("layers:")):
        return of_layers(str(value))
    return named_experts(f"--{name.replace('_', '-')}", value) if KINDS[name] == EXPERTS else value


def _option(setting: Setting, blank: bool, lists: bool) -> Any:
    kind, default = TYPES[setting.kind], setting.default
    if setting.kind == EXPERTS:
        default = None
    elif setting.listed:
        kind, default = str, "" if blank else str(default)
    more = " Comma list." if lists and setting.listed and "omma list" not in setting.help else ""
    return option(setting.name, Annotated[kind, typer.Option(help=setting.help + more)], default)


def _given(context: typer.Context, values: dict[str, Any]) -> Given:
    preset = values.pop("preset", "")
    return Given(values, frozenset(name for name in values if is_typed(context, name)), preset)


KINDS = {each.name: each.kind for each in SETTINGS}
LIVE = [each for each in SETTINGS if not each.of_recording]
Settings = Annotated[Given, offered(SETTINGS)]
LiveSettings = Annotated[Given, offered(LIVE)]
#: For policy sets, which have settings of their own: an option that was not typed is empty.
ListedSettings = Annotated[Given, offered((each for each in LIVE if each.listed), blank=True)]
#: Settings that a recommendation does not choose.
GIVEN = (
    "platform",
    "contract",
    "scope",
    "slots",
    "passes",
    "draft",
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
#: For figures of papers, whose presets have settings of their own: empty unless typed.
OfPaper = Annotated[Given, offered((each for each in SETTINGS if each.name == "passes"), blank=True, preset=False)]
CurveSettings = Annotated[
    Given, offered((each for each in SETTINGS if each.name in (*OF_CURVES, "seed")), preset=False)
]


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix errors that are raised in this block with the name of the policy set."""
    try:
        yield
    except (ConfigError, PolicyError) as error:
        raise ConfigError(f"policy set {name}: {error}") from None
