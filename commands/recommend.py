"""`moereplay recommend`: which policies, how much memory, how fast, and how sure, from one trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from commands import options
from commands.cores import CORES
from commands.groups import grouped
from commands.settings import OfRecommendation
from commands.terminal import say_when_compiling, show, show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from simulator.memory import Memory
    from traces.schema import Trace

POSITIONS = "Positions in the KV cache; default 4096, assumed."


class Given(NamedTuple):
    """The memory that experts share with everything else."""

    memory: Annotated[str, typer.Option(help="All of the memory that experts are cached in: 4GB, 7.5GiB.")] = ""
    vram: Annotated[str, typer.Option(help="The same, where it is a GPU's.")] = ""
    ram: Annotated[str, typer.Option(help="Memory that holds every expert behind --vram; checked.")] = ""
    positions: Annotated[int | None, typer.Option("--context", min=0, help=POSITIONS, show_default=False)] = None
    runtime: Annotated[str, typer.Option(help="What the engine itself takes; default 500MB, assumed.")] = ""


@grouped
def recommend(
    trace: options.TracePath,
    *,
    settings: OfRecommendation,
    given: Given,
    target_tokens_per_s: Annotated[float | None, typer.Option(min=0, help="The smallest memory for this.")] = None,
    min_mass_kept: Annotated[float, typer.Option(min=0, max=1, help="Of sets that may change the output.")] = 0.99,
    workers: Annotated[int, typer.Option(help="Replays at once.")] = CORES,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Say which lossless policies to use in a memory, how fast that is, and what more of it would buy. SIMULATED."""
    from analysis.recommendation import lines, with_intervals
    from commands.progress_bar import progress
    from sweeps.recommend import Question, most_replays, search
    from sweeps.recommendation import document
    from traces.bundled import name_of
    from traces.store import open_trace

    opened = open_trace(trace)
    base = {name: value for name, value in settings.values.items() if name != "scope" or name in settings.typed}
    base["platform"] = _machine(str(base["platform"]), given)
    divided = _divided(opened, base, given)
    question = Question(opened, divided, base, target_tokens_per_s, min_mass_kept)
    with progress(most_replays(question), "replays, at most") as advance:
        say_when_compiling()
        answer = search(question, workers, advance)
    rows = {each.result.about["identity"]: each.result.per_request for each in (answer.best, answer.second) if each}
    said = with_intervals(document(question, answer, name_of(trace)), rows) | {"assumed": _assumed(given)}
    if as_json:
        show_json(said)
        return
    show(*lines(said))


def _assumed(given: Given) -> dict[str, int]:
    """What nobody said of the memory."""
    from simulator.memory import CONTEXT, RUNTIME

    context = {"context": CONTEXT} if given.positions is None else {}
    return context | ({} if given.runtime else {"runtime_bytes": RUNTIME})


def _machine(name: str, given: Given) -> str:
    """The platform, its upper lower tier as large as --ram says, where it has one. Raises ConfigError for several."""
    from simulator.errors import ConfigError
    from simulator.memory import size_of
    from simulator.platform_files import platform

    if "," in name:
        raise ConfigError(f"--platform {name}: recommend takes one machine; run it once for each")
    if not given.ram or not platform(name).tiers:
        return name
    return f"{name}:tiers.0.capacity={size_of(given.ram, 'ram')}B"


def _divided(trace: Trace, base: Mapping[str, Any], given: Given) -> Memory:
    """The fast memory, divided. Raises ConfigError unless one of both is given, and where --ram holds too little."""
    from simulator.errors import ConfigError
    from simulator.memory import CONTEXT, divided, size_of
    from simulator.platform_files import platform
    from sweeps.recommend import everything

    if bool(given.memory) == bool(given.vram):
        raise ConfigError("give the memory that experts are cached in: --memory 4GB, or --vram 24GB --ram 64GB")
    described, needed = platform(base["platform"]), everything(trace.geometry)
    if given.ram and not described.tiers and size_of(given.ram, "ram") < needed:
        raise ConfigError(
            f"--ram {given.ram} does not hold all experts, {needed / 1e9:.4g} GB; describe a machine with a disk below "
            "it (docs/platforms.md, [[tiers]])"
        )
    context = CONTEXT if given.positions is None else given.positions
    total = given.memory or given.vram
    return divided(trace, total, context, given.runtime, base["dense"], base["dense_bits"])
