"""`moereplay recommend`: which policies, how much memory, how fast, and how sure, from one trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands import options
from moereplay.commands.options import CORES, OfRecommendation, grouped
from moereplay.commands.terminal import say, say_when_compiling, show, show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moereplay.simulator.capacity import Memory
    from moereplay.traces.schema import Trace

POSITIONS = "Positions in the KV cache; default 4096, assumed."


class Given(NamedTuple):
    """The memory that experts share with everything else."""

    memory: Annotated[str, typer.Option(help="All of the memory that experts are cached in: 4GB, 7.5GiB.")] = ""
    vram: Annotated[str, typer.Option(help="The same, where it is a GPU's.")] = ""
    ram: Annotated[str, typer.Option(help="Memory that holds every expert behind --vram; checked.")] = ""
    positions: Annotated[int | None, typer.Option("--context", min=0, help=POSITIONS, show_default=False)] = None
    runtime: Annotated[str, typer.Option(help="What the engine itself takes; default 500MB, assumed.")] = ""


class Search(NamedTuple):
    """How long the search takes, and where its sets go."""

    budget: Annotated[str, typer.Option(help="Time to search: 60s, 5m; none searches all.")] = "60s"
    workers: Annotated[int, typer.Option(help="Replays at once.")] = CORES
    out: Annotated[Path | None, typer.Option(help="New folder for the lists of experts that the answer names.")] = None


@grouped
def recommend(
    trace: options.TracePath,
    *,
    settings: OfRecommendation,
    given: Given,
    target_tokens_per_s: Annotated[float | None, typer.Option(min=0, help="The smallest memory for this.")] = None,
    min_mass_kept: Annotated[float, typer.Option(min=0, max=1, help="Of sets that may change the output.")] = 0.99,
    search: Search,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Say which lossless policies to use in a memory, how fast that is, and what more of it would buy. SIMULATED."""
    from moereplay.analysis.recommendation import lines, with_intervals
    from moereplay.commands.progress import searching
    from moereplay.commands.terminal import INTERRUPTED, interruptible
    from moereplay.sweeps.recommend.document import document
    from moereplay.sweeps.recommend.runner import Budget
    from moereplay.sweeps.recommend.search import Question, most_replays
    from moereplay.sweeps.recommend.search import search as find
    from moereplay.traces.installation import name_of
    from moereplay.traces.store import open_trace

    seconds = _seconds(search.budget)
    _check_new(search.out)
    opened = open_trace(trace)
    base = {name: value for name, value in settings.values.items() if name != "scope" or name in settings.typed}
    base["platform"] = _machine(str(base["platform"]), given)
    divided = _divided(opened, base, given)
    question = Question(opened, divided, base, target_tokens_per_s, min_mass_kept)
    most = most_replays(question)
    with interruptible() as interrupted, searching(most, seconds) as advance:
        say_when_compiling()
        answer = find(question, search.workers, advance, Budget(seconds, interrupted))
        stopped = interrupted()
    rows = {each.result.about["identity"]: each.result.per_request for each in (answer.best, answer.second) if each}
    said = with_intervals(document(question, answer, name_of(trace)), rows) | {"assumed": _assumed(given)}
    if as_json:
        show_json(said)
    else:
        show(*lines(said))
    _write_lists(search.out, answer.best.config.model_dump(mode="json"))
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _seconds(text: str) -> float | None:
    """Seconds of `90`, `60s` or `5m`, None for `none`. Raises ConfigError."""
    from moereplay.simulator.errors import ConfigError

    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(s|m|min|h|)", text)
    seconds = float(found[1]) * {"m": 60, "min": 60, "h": 3600}.get(found[2], 1) if found else 0.0
    if not seconds:
        raise ConfigError(f"invalid --budget {text[:40]!r}: expected a time such as 60s or 5m, or none")
    return seconds


def _check_new(out: Path | None) -> None:
    """Raises ConfigError before anything is replayed where the folder is there already."""
    from moereplay.simulator.errors import ConfigError

    if out is not None and (out.exists() or out.is_symlink()):
        raise ConfigError(f"{out} exists; choose another --out or remove it")


def _write_lists(out: Path | None, config: Mapping[str, Any]) -> None:
    """The lists of experts that the command of the best set reads. Raises ConfigError where the disk refuses."""
    from moereplay.results.settings import expert_lists
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.documents import json_text

    lists = expert_lists(config)
    if out is None:
        if lists:
            say(f"--out FOLDER writes {' and '.join(lists)}, which that command reads")
        return
    try:
        out.mkdir(parents=True)
        for name, pairs in lists.items():
            (out / name).write_text(json_text(pairs))
    except OSError as refused:
        raise ConfigError(f"cannot write {out}: {refused.strerror or refused}; choose another --out") from None
    say(f"wrote {', '.join(str(out / name) for name in lists) or f'{out}: the answer needs no list of experts'}")


def _assumed(given: Given) -> dict[str, int]:
    """What nobody said of the memory."""
    from moereplay.simulator.capacity import CONTEXT, RUNTIME

    context = {"context": CONTEXT} if given.positions is None else {}
    return context | ({} if given.runtime else {"runtime_bytes": RUNTIME})


def _machine(name: str, given: Given) -> str:
    """The platform, its upper lower tier as large as --ram says, where it has one. Raises ConfigError for several."""
    from moereplay.simulator.capacity import size_of
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import platform

    if "," in name:
        raise ConfigError(f"--platform {name}: recommend takes one machine; run it once for each")
    if not given.ram or not platform(name).tiers:
        return name
    return f"{name}:tiers.0.capacity={size_of(given.ram, 'ram')}B"


def _divided(trace: Trace, base: Mapping[str, Any], given: Given) -> Memory:
    """The fast memory, divided. Raises ConfigError unless one of both is given, and where --ram holds too little."""
    from moereplay.simulator.capacity import CONTEXT, divided, size_of
    from moereplay.simulator.errors import ConfigError
    from moereplay.simulator.platforms import platform
    from moereplay.sweeps.recommend.search import everything

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
