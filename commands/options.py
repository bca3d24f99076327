"""Options that several verbs share, typed once, and what turns them into settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import ValidationError

TracePath = Annotated[Path, typer.Argument(help="A trace folder, NAME.zarr.", show_default=False)]
NewTrace = Annotated[Path, typer.Option(help="The trace to write, NAME.zarr.", show_default=False)]

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
Warm = Annotated[Path | None, typer.Option(help="JSON list of [layer, expert] resident at the start.")]
Seed = Annotated[int, typer.Option(help="For policies that draw.")]

GRID = ("capacity", "eviction", "prefetch", "miss", "routing", "platform", "contract", "scope", "passes", "reset")
GRID += ("prefetch_at", "prefetch_admission")


def grid(context: typer.Context) -> dict[str, str]:
    """The comma lists as typed, of those settings that the verb has, ready for `simulator.grid.expand`."""
    return {name: context.params[name] for name in GRID if name in context.params}


def warm_start(path: Path | None) -> Any:
    """What `--warm` names. Raises ConfigError if the file holds no JSON."""
    from simulator.errors import ConfigError

    try:
        return json.loads(path.read_text()) if path else ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--warm {path}: {error}; expected a JSON list of [layer, expert]") from None


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong, by the name of its option."""
    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return option + first["msg"].removeprefix("Value error, ")
