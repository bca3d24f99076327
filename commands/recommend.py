"""`moereplay recommend`: how fast a model runs on a machine, with which settings, and which upgrades make it faster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from moereplay.analysis.answer import document, lines
from moereplay.commands import options
from moereplay.commands.catalogue import Parts
from moereplay.commands.options import CORES, OfRecommendation, grouped
from moereplay.commands.terminal import INTERRUPTED, interruptible, say, say_when_compiling, searching, show, show_json
from moereplay.results.errors import check_output
from moereplay.results.settings import expert_lists
from moereplay.simulator.capacity import CONTEXT, Memory, divided, memory_of
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.here import here
from moereplay.simulator.machine import Machine, assembled, of_platform, without_disk
from moereplay.simulator.platforms import platform
from moereplay.sweeps import extra
from moereplay.sweeps.recommend.answer import Answer, answer, keep_answer, none_smaller, prompt_of, surface
from moereplay.sweeps.recommend.decoding import asked
from moereplay.sweeps.recommend.draft_replays import asked_of, most_with_drafts, search_with_drafts
from moereplay.sweeps.recommend.load import KV_FORMATS, Options, assumed_parts, model_load, smaller_loads, trace_load
from moereplay.sweeps.recommend.prompts import MOST_PROMPT
from moereplay.sweeps.recommend.runner import QUICK, THOROUGH, Budget
from moereplay.sweeps.recommend.search import Question, everything, judged, most_replays
from moereplay.sweeps.recommend.search import search as find
from moereplay.sweeps.recommend.searched import KNOWN, Searched
from moereplay.traces.documents import json_text
from moereplay.traces.files import SAMPLE, bundled, name_of, whole_folder
from moereplay.traces.geometry import by_spelling
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.texts import nearest

OF_LOADS = frozenset({"platform", "dense", "dense_bits", "draft"})  #: settings that an answer about engines reads
OF_BOTH = frozenset({"out"})
OF_ENGINES = frozenset({"cores", "disk", "figures", "kv_bits", "link", "prompt", "ram_rate"})  #: that a search ignores
POSITIONS = "Positions in the KV cache (default: 4096, assumed)."
STREAMS = "Requests that decode together, each with --context positions (default: 1)."


class Given(NamedTuple):
    """This machine, and memory that experts share with everything else."""

    here: Annotated[bool, typer.Option("--here", help="This machine: detected, its RAM and disk measured.")] = False
    memory: Annotated[
        str, typer.Option(help="Total memory as it is sold, with the expert cache: 4GB, which is 4GiB.")
    ] = ""
    positions: Annotated[int | None, typer.Option("--context", min=0, help=POSITIONS, show_default=False)] = None
    kv_bits: Annotated[str, typer.Option(help="Bits of a number in the KV cache: 16, 8 or 4.")] = "16"
    runtime: Annotated[str, typer.Option(help="Memory reserved for the runtime (default: 500MB, assumed).")] = ""
    prompt: Annotated[
        int, typer.Option(min=0, max=MOST_PROMPT, help="Also the seconds to the first token of a prompt of N tokens.")
    ] = 0
    concurrency: Annotated[int | None, typer.Option(help=STREAMS, show_default=False)] = None


class Search(NamedTuple):
    """Aim, length and output of a search by replays."""

    thorough: Annotated[
        bool, typer.Option("--thorough", help="Search a trace for minutes, and replay the best sets on all of it.")
    ] = False
    budget: Annotated[
        str | None,
        typer.Option(
            help="Wall time of a thorough search: 60s, 5m, or none for all of it (default: 500 million accesses).",
            show_default=False,
        ),
    ] = None
    workers: Annotated[int, typer.Option(help="Number of parallel replays.")] = CORES
    target_tokens_per_s: Annotated[
        float | None, typer.Option(min=0, help="Also find the smallest memory that reaches this speed.")
    ] = None
    min_mass_kept: Annotated[
        float,
        typer.Option(min=0, max=1, help="Minimum share of gate weight kept, for policies that change the output."),
    ] = 0.99
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for results, and for what the printed commands read: traces, platforms, lists."),
    ] = None


class Printed(NamedTuple):
    """What is printed and drawn."""

    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for figures: tokens/s by VRAM and RAM, by drafts, and a token's time."),
    ] = None
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also the tables: every engine, upgrades, uses of VRAM, steps.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@grouped
def recommend(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_TRACE",
            help="Model (a known name, a Hugging Face id, a folder, config.json, GGUF, URL), or trace NAME.zarr.",
            show_default=False,
        ),
    ],
    *,
    settings: OfRecommendation,
    given: Given,
    parts: Parts,
    engine: Annotated[str, typer.Option("--engine", help="Only settings of this engine: llama.cpp, ...")] = "",
    quant: options.Quant = "",
    search: Search,
    printed: Printed,
    typed: options.Typed,
) -> None:
    """Recommend settings for a model on a machine, with their speed and the gain from upgrades. SIMULATED.

    Every number is that of a replay. A model is replayed with drawn routing under the settings of engines. With a trace
    and --platform, all policies are searched.
    With --draft auto, the answer includes whether to draft, and how many tokens.
    """
    trace = _trace_of(subject)
    if trace is None or "platform" not in settings.typed or engine or given.here or parts.gpu:
        for name in sorted((typed & set(Search._fields) - OF_BOTH) | (settings.typed - OF_LOADS)):
            raise ConfigError(
                f"--{name.replace('_', '-')} requires a trace and --platform, which select a search by replays"
            )
        _answered(subject, trace, settings, given, parts, engine, quant, printed, search.out)
        return
    for name in sorted(typed & OF_ENGINES):
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} requires settings of engines: omit --platform, or pass --engine")
    if quant:
        raise ConfigError("--quant requires a model: a trace states how its experts are stored")
    _searched(trace, settings, given, parts, search, printed)


def _searched(
    trace: Path,
    settings: options.Given,
    given: Given,
    parts: Parts,
    search: Search,
    printed: Printed,
) -> None:
    """Search by replays."""
    thorough = search.thorough or search.budget is not None
    seconds = None if search.budget is None else _seconds(search.budget)
    if search.out is not None and (search.out.exists() or search.out.is_symlink()):
        raise ConfigError(f"{search.out} exists; remove it or choose another --out")
    opened = open_trace(trace)
    base = {name: value for name, value in settings.values.items() if name != "scope" or name in settings.typed}
    base["platform"] = _machine(str(base["platform"]), parts)
    drafts = asked(given.concurrency, str(base["draft"]), opened.header.provenance.model)
    base |= asked_of(drafts, opened, "passes" in settings.typed) if drafts else {}
    divided = _divided(opened, base, given, parts)
    pace = THOROUGH if thorough else QUICK
    question = Question(opened, divided, base, search.target_tokens_per_s, search.min_mass_kept, pace)
    question = judged(question if drafts is None else replace(question, least=2 * drafts.streams))
    most = most_with_drafts(question, drafts) if drafts else most_replays(question)
    with interruptible() as interrupted, searching(most, seconds) as advance:
        say_when_compiling()
        budget, found = Budget(seconds, interrupted, None if search.budget else pace.work), None
        if drafts:
            question, answer, found = search_with_drafts(question, drafts, search.workers, advance, budget)
        else:
            answer = find(question, search.workers, advance, budget)
        stopped = interrupted()
    at = f"{search.out}{os.sep}" if search.out else ""
    told = (*assumed_parts(given.positions, given.runtime), *filter(None, [answer.best.result.about["assumed"]]))
    _tell(Searched(question, answer, name_of(trace), opened, most, told, at, found), printed)
    configs = {"": answer.best.config} | ({KNOWN: answer.known.config} if answer.known else {})
    _write_lists(search.out, {before: config.model_dump(mode="json") for before, config in configs.items()})
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _trace_of(subject: str) -> Path | None:
    """Return the folder of a trace, None for a model. `miniature` is the bundled trace unless a model is required."""
    path = Path(subject)
    if subject == SAMPLE or path.suffix == ".zarr" or (path / "zarr.json").is_file():
        return bundled(path)
    if nearest(subject, (*by_spelling(), SAMPLE)) == SAMPLE and not path.exists():
        raise ConfigError(f"unknown model or trace {subject!r}: did you mean {SAMPLE}?")
    return None


def _answered(
    subject: str,
    trace: Path | None,
    settings: options.Given,
    given: Given,
    parts: Parts,
    engine: str,
    quant: str,
    printed: Printed,
    out: Path | None,
) -> None:
    """Answer with the settings of engines."""
    if out is not None:
        extra("plot", "matplotlib")
        check_output(out)
    machine = _machine_of(settings, given, parts)
    base = settings.values
    dense, dense_bits, draft = (str(base.get(name, "")) for name in ("dense", "dense_bits", "draft"))
    kv_bits = _kv_bits(given.kv_bits)
    asked = Options(given.positions, given.runtime, dense, dense_bits, quant, kv_bits, given.concurrency, draft)
    say_when_compiling()
    load = trace_load(trace, asked) if trace else model_load(subject, asked)
    of = answer(load, machine, engine, none_smaller if trace else partial(smaller_loads, subject, asked))
    if given.prompt:
        of = replace(of, prompt=prompt_of(of, given.prompt))
    _tell(of, printed)
    if out is not None:
        for line in keep_answer(of, out):
            say(line)
    if printed.figures:
        _draw(of, printed.figures)


def _tell(of: Answer | Searched, printed: Printed) -> None:
    """Print an answer."""
    if printed.as_json:
        show_json(document(of))
    else:
        show(*lines(of, printed.verbose))


def _kv_bits(text: str) -> int:
    if text not in map(str, KV_FORMATS):
        raise ConfigError(f"invalid --kv-bits {text[:40]!r}: expected {', '.join(map(str, KV_FORMATS))}")
    return int(text)


def _draw(of: Answer, folder: Path) -> None:
    """Write the figures with their numbers. Raises ResultError if they cannot be written."""
    from moereplay.analysis.figures.drawing import rendered, save, save_numbers
    from moereplay.analysis.figures.machines import speed_by_drafts, speed_by_memory, token_time

    charts, points = {"token_time": token_time(of)}, surface(of)
    if points:
        charts["speed_by_memory"] = speed_by_memory(of, points)
    if len(of.steps) > 1:
        charts["speed_by_drafts"] = speed_by_drafts(of)
    for name, chart in charts.items():
        picture = rendered(chart)
        paths = [*save(picture, folder / name), save_numbers(picture, folder / name)]
        say(f"wrote {', '.join(map(str, paths))}")


def _machine_of(settings: options.Given, given: Given, parts: Parts) -> Machine:
    """Return the machine that the options describe: a platform, parts, or this one. Raises ConfigError."""
    for option, text in (("memory", given.memory), ("vram", parts.vram)):
        if text:
            memory_of(text, option)  # named as it was typed, also where it is a machine's RAM
    named = "platform" in settings.typed
    if named + given.here + bool(parts.gpu) > 1:
        raise ConfigError("--platform, --here and --gpu cannot be combined: each describes the machine")
    if named:
        for name in ("ram_rate", "link", "cores", "headless"):
            if getattr(parts, name):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} cannot be combined with --platform, which has that value")
        fast = given.memory or parts.vram
        return of_platform(platform(str(settings.values["platform"])), fast, parts.ram, parts.disk)
    if given.memory and (parts.ram or parts.vram or parts.gpu):
        raise ConfigError("--memory cannot be combined with --gpu, --vram and --ram: pass --vram, --ram or both")
    parts = parts._replace(ram=parts.ram or given.memory)
    if any(parts) and not given.here:
        return _with_parts(parts, assembled)
    if not given.here:
        say("no machine is named: this one is used (--gpu, --vram and --ram, or --platform name another)")
    return _with_parts(parts, _here)


def _here(**said: Any) -> Machine:
    return here(said=said)


def _with_parts(parts: Parts, made: Callable[..., Machine]) -> Machine:
    """Return the machine that is made with the parts, of which the disk may be none."""
    if parts.disk.strip().lower() != "none":
        return made(**parts._asdict())
    return without_disk(made(**parts._replace(disk="")._asdict()))


def _seconds(text: str) -> float | None:
    """Parse `90`, `60s` or `5m` into seconds, `none` into None. Raises ConfigError."""
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(s|m|min|h|)", text)
    seconds = float(found[1]) * {"m": 60, "min": 60, "h": 3600}.get(found[2], 1) if found else 0.0
    if not seconds:
        raise ConfigError(f"invalid --budget {text[:40]!r}: expected a time such as 60s or 5m, or none")
    return seconds


def _write_lists(out: Path | None, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the lists of experts that commands read, by the beginning of their names. Raises ConfigError."""
    lists = {f"{before}{name}": pairs for before, each in configs.items() for name, pairs in expert_lists(each).items()}
    if out is None:
        if read := expert_lists(configs[""]):
            say(f"--out FOLDER writes {' and '.join(read)}, which that command reads")
        return
    try:
        with whole_folder(out) as scratch:
            for name, pairs in lists.items():
                (scratch / name).write_text(json_text(pairs))
    except OSError as refused:
        raise ConfigError(f"cannot write {out}: {refused.strerror or refused}; choose another --out") from None
    say(f"wrote {', '.join(str(out / name) for name in lists) or f'{out}: the command reads no list of experts'}")


def _machine(name: str, parts: Parts) -> str:
    """Return the platform, with --ram as the size of its first lower tier. Raises ConfigError for several."""
    if "," in name:
        raise ConfigError(f"invalid --platform {name}: expected one platform; run once per platform")
    if not parts.ram or not platform(name).tiers:
        return name
    return f"{name}:tiers.0.capacity={memory_of(parts.ram, 'ram')}B"


def _divided(trace: Trace, base: Mapping[str, Any], given: Given, parts: Parts) -> Memory:
    """Divide the fast memory. Raises ConfigError unless exactly one size is given, or if --ram is too small."""
    if bool(given.memory) == bool(parts.vram):
        raise ConfigError("missing memory: pass exactly one of --memory 4GB and --vram 24GB (with --ram 64GB)")
    described, needed = platform(base["platform"]), everything(trace.geometry)
    if parts.ram and not described.tiers and memory_of(parts.ram, "ram") < needed:
        raise ConfigError(
            f"invalid --ram {parts.ram}: expected at least {needed / 1e9:.4g} GB, the size of all experts; for a "
            "machine with a disk, pass a platform with [[tiers]] (docs/platforms.md)"
        )
    context = CONTEXT if given.positions is None else given.positions
    total = memory_of(given.memory, "memory") if given.memory else memory_of(parts.vram, "vram")
    return divided(trace, total, context, given.runtime, base["dense"], base["dense_bits"])
