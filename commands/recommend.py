"""`moereplay recommend`: which policies, how much memory, how fast, and how sure, from one trace."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from commands import options
from commands.groups import grouped
from commands.settings import OfRecommendation
from commands.terminal import say_when_compiling, show

if TYPE_CHECKING:
    from simulator.memory import Memory
    from traces.schema import Trace

WORKERS = os.cpu_count() or 1
CONTEXT = 4096


class Given(NamedTuple):
    """The memory that experts share with everything else."""

    memory: Annotated[str, typer.Option(help="All of the memory that experts are cached in: 4GB, 7.5GiB.")] = ""
    vram: Annotated[str, typer.Option(help="The same, where it is a GPU's.")] = ""
    ram: Annotated[str, typer.Option(help="Memory that holds every expert behind --vram; checked.")] = ""
    positions: Annotated[int, typer.Option("--context", min=0, help="Positions in the KV cache.")] = CONTEXT
    runtime: Annotated[str, typer.Option(help="What the engine itself takes; default 500MB, assumed.")] = ""


@grouped
def recommend(
    trace: options.TracePath,
    *,
    settings: OfRecommendation,
    given: Given,
    target_tokens_per_s: Annotated[float | None, typer.Option(min=0, help="The smallest memory for this.")] = None,
    min_mass_kept: Annotated[float, typer.Option(min=0, max=1, help="Of sets that may change the output.")] = 0.99,
    workers: Annotated[int, typer.Option(help="Replays at once.")] = WORKERS,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Say which lossless policies to use in a memory, how fast that is, and what more of it would buy. SIMULATED."""
    from analysis.recommendation import lines, with_intervals
    from commands.progress_bar import progress
    from sweeps.recommend import Question, most_replays, search
    from sweeps.recommendation import document
    from traces.bundled import name_of
    from traces.store import open_trace

    opened, base = open_trace(trace), dict(settings.values)
    divided = _divided(opened, str(base["platform"]), given)
    question = Question(opened, divided, base, target_tokens_per_s, min_mass_kept)
    with progress(most_replays(question), "replays, at most") as advance:
        say_when_compiling()
        answer = search(question, workers, advance)
    rows = {each.result.about["identity"]: each.result.per_request for each in (answer.best, answer.second) if each}
    said = with_intervals(document(question, answer, name_of(trace)), rows)
    if as_json:
        print(json.dumps(said, indent=1))
        return
    show(*lines(said))


def _divided(trace: Trace, machine: str, given: Given) -> Memory:
    """The fast memory, divided. Raises ConfigError unless one of both is given, and where --ram holds too little."""
    from simulator.errors import ConfigError
    from simulator.memory import divided, size_of
    from simulator.platform_files import platform

    if bool(given.memory) == bool(given.vram):
        raise ConfigError("give the memory that experts are cached in: --memory 4GB, or --vram 24GB --ram 64GB")
    geometry = trace.geometry
    everything = geometry.experts * sum(geometry.expert_bytes)
    if given.ram and size_of(given.ram, "ram") < everything:
        raise ConfigError(
            f"--ram {given.ram} does not hold all experts, {everything / 1e9:.4g} GB; describe a machine with a disk "
            "below (docs/platforms.md, [[tiers]]) and give --memory"
        )
    return divided(trace, platform(machine), given.memory or given.vram, given.positions, given.runtime)
