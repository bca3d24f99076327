"""Options that several verbs share, typed once, and what turns them into settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError

    from simulator.config import ReplayConfig

#: The trace that comes with the program goes by this name, where no folder does.
SAMPLE = "miniature"


def _bundled(path: Path) -> Path:
    """The trace that comes with the program, if its name is given."""
    if path != Path(SAMPLE) or path.exists():
        return path
    import traces

    return Path(traces.__file__).with_name("samples") / f"{SAMPLE}.zarr"


TracePath = Annotated[
    Path,
    typer.Argument(help="A trace folder, NAME.zarr, or `miniature` (bundled).", show_default=False, callback=_bundled),
]
NewTrace = Annotated[Path, typer.Option(help="The trace to write, NAME.zarr.", show_default=False)]


def _take_policies(paths: list[Path] | None) -> list[Path] | None:
    """Add the policies of these files to the catalogue, before the verb runs. Raises PolicyError or OSError."""
    if paths:
        from policies.files import register

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
Presets = Annotated[
    str, typer.Option("--preset", help="Comma list; `moereplay presets` names them; options beside it win.")
]

# What to replay a trace against: the fields of simulator.config.ReplayConfig that take a comma list.
Lists = Annotated[str, typer.Option(help="Comma list; `moereplay policies` names them.")]
Capacity = Annotated[str, typer.Option(help="Comma list of 5%, 5%@16, 600MB, 1.5GiB, 51experts, 32/layer.")]
Platform = Annotated[str, typer.Option(help="Comma list of presets or .toml files; `moereplay platforms`.")]
Contract = Annotated[str, typer.Option(help="atomic, sequential.")]
Scope = Annotated[str, typer.Option(help="global, per_layer.")]
Passes = Annotated[str, typer.Option(help="recorded, token, chunk:N.")]
Reset = Annotated[str, typer.Option(help="never, request, or a number of tokens.")]
PrefetchAt = Annotated[str, typer.Option(help="gate, after_demand.")]
PrefetchAdmission = Annotated[str, typer.Option(help="evict, free_only.")]
Lookahead = Annotated[str, typer.Option(help="recorded, or a control: shuffled_tokens, shuffled_experts.")]
Warm = Annotated[Path | None, typer.Option(help="JSON list of [layer, expert] resident at the start.")]
Engine = Annotated[str, typer.Option(help="compiled, reference: the same results, one fast, one readable.")]
Profile = Annotated[Path | None, typer.Option(help="JSON list of [layer, expert], best first, for profile=given.")]
Seed = Annotated[int, typer.Option(help="For policies that draw.")]

GRID = ("capacity", "eviction", "prefetch", "miss", "routing", "platform", "contract", "scope", "passes", "reset")
GRID += ("prefetch_at", "prefetch_admission", "lookahead")


def grid(context: typer.Context) -> dict[str, str]:
    """The comma lists as typed, of those settings that the verb has, ready for `sweeps.grid.expand`."""
    return {name: context.params[name] for name in GRID if name in context.params}


def typed(context: typer.Context) -> dict[str, str]:
    """Of `grid`, what the user typed: it wins over a preset."""
    return {name: text for name, text in grid(context).items() if _is_typed(context, name)}


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def preset_configs(context: typer.Context, names: str, fixed: Mapping[str, object]) -> dict[str, ReplayConfig]:
    """Every preset named, by its name and what varies, without settings that the verb lacks. Raises ConfigError."""
    from simulator.preset import settings
    from sweeps.policy_sets import named_sets

    own, has = typed(context), grid(context)
    return named_sets(
        {name: {each: text for each, text in values.items() if each in has} | own for name, values in settings(names)},
        fixed,
    )


def named_experts(option: str, path: Path | None) -> Any:
    """What `--warm` or `--profile` names. Raises ConfigError if the file holds no JSON."""
    from simulator.errors import ConfigError
    from traces.documents import DocumentError, content, from_json

    try:
        return from_json(content(path)) if path else ()
    except (OSError, DocumentError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{option} {path}: {said}; expected a JSON list of [layer, expert]") from None


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, by the name of its option."""
    from traces.faults import words

    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return option + words(first)
