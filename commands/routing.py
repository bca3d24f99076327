"""`moereplay routing`: statistics of a model's routing, that synthetic routing can be drawn from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereplay.commands import options
from moereplay.commands.progress import progress
from moereplay.commands.terminal import say, show


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
                    "off by": _off(model.error and (model.error.hit_points, model.error.misses)),
                    "two halves": _off(model.error and (model.error.halves, model.error.halves_misses)),
                    "recall": ", ".join(f"{each:.2f}" for each in model.recall or ()) or "-",
                }
                for name, model in shipped().items()
            ]
        )
    )
    show(
        "off by: points of hit rate and share of misses, on requests that were not fitted; two halves: the same of the "
        "requests that were fitted, themselves; recall: of look-ahead by depth, where it was recorded; the source of "
        "one: moereplay routing show NAME"
    )
    show(
        "for any other model these stand in, at its shape, and their range is no bound; that is so for gpt-oss-120b "
        "too, whose published recording has 65 tokens with k = 2, too few to fit (docs/routing.md)"
    )


def _off(error: tuple[float | None, float | None] | None) -> str:
    if not error or error[0] is None or error[1] is None:
        return ""
    return f"{error[0]:.1f}, {100 * error[1]:.0f}%"


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
