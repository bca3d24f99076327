"""`moereplay routing`: statistics of a model's routing, that synthetic routing can be drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moereplay.commands import options
from moereplay.commands.progress import progress
from moereplay.commands.terminal import say, show

if TYPE_CHECKING:
    from moereplay.traces.routing import Error


def routing_list() -> None:
    """List the routing models that ship, with the distance of their hit rates from the real ones."""
    from moereplay.analysis.tables import table
    from moereplay.traces.routing import shipped

    show(
        table(
            [
                {
                    "routing model": name,
                    "layers": model.layers,
                    "experts": model.experts,
                    "k": model.k,
                    "hit rates off by": f"{model.error.hit_points:.1f} points" if model.error else "",
                    "misses off by": f"{100 * model.error.misses:.0f}%" if model.error else "",
                    "two real halves": _halves(model.error),
                }
                for name, model in shipped().items()
            ]
        )
    )
    show(
        "errors are on requests that were not fitted; two real halves: the same error of the fitted requests; "
        "details: moereplay routing show NAME"
    )


def _halves(error: Error | None) -> str:
    if not error or error.halves is None or error.halves_misses is None:
        return ""
    return f"{error.halves:.1f} points, {100 * error.halves_misses:.0f}%"


def routing_show(
    name: Annotated[str, typer.Argument(help="Name of a routing model, or its file NAME.toml.", show_default=False)],
) -> None:
    """Print a routing model as a file."""
    from moereplay.traces.routing import as_toml, named

    print(as_toml(named(name)), end="")


def routing_fit(
    trace: options.TracePath,
    out: Annotated[Path, typer.Option(help="File to write, NAME.toml.", show_default=False)],
    *,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps of the search of each layer.")] = 3,
    summary: Annotated[str, typer.Option(help="What was recorded, in a line.")] = "",
    source: Annotated[str, typer.Option(help="Source of the trace.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
) -> None:
    """Fit a routing model to half of a trace's requests, and judge it on the other half."""
    from moereplay.calibration.routing import fit, units
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.files import write_whole
    from moereplay.traces.routing import as_toml
    from moereplay.traces.store import open_trace

    if out.suffix != ".toml":
        raise ConfigError(f"invalid --out {out}: expected NAME.toml")
    if out.exists():
        raise ConfigError(f"{out} exists; choose another name or remove it")
    opened = open_trace(trace)
    with progress(units(opened.geometry.layers), "parts") as done:
        found = fit(opened, out.stem, steps, seed, done)
    found = found.model_copy(update={"summary": summary, "source": source})
    write_whole(out, as_toml(found).encode())
    off = found.error
    assert off and off.halves is not None and off.halves_misses is not None
    judges = f"{off.requests} requests that were" if off.requests > 1 else "a request, or half of one, that was"
    say(
        f"wrote {out}: hit rates are off by {off.hit_points:.1f} points in the mean and misses by "
        f"{100 * off.misses:.0f}% in the median, on {judges} not fitted; the fitted requests themselves are off by "
        f"{off.halves:.1f} points and {100 * off.halves_misses:.0f}%"
    )
