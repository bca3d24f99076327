"""The command line: one verb per job. Each verb imports its stage when it runs, so that `--help` is instant."""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import ValidationError

    from simulator.config import ReplayConfig
    from simulator.grid import Outcome
    from traces.schema import Trace

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

TracePath = Annotated[Path, typer.Argument(help="A trace folder, NAME.zarr.", show_default=False)]
Lists = Annotated[str, typer.Option(help="Comma list; `moereplay policies` names them.")]
MARKOV_REUSE = 0.31  #: of a trained miniature with OLMoE's topology
WORKERS = os.cpu_count() or 1


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (anywhere on the line).")] = False,
) -> None:
    """Replay the expert routing of Mixture-of-Experts models against modelled caches, links and policies."""


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="Another tool's trace: a file or a folder.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The trace to write, NAME.zarr.", show_default=False)],
    format: Annotated[str | None, typer.Option(help="Importer name, if the file is not recognised.")] = None,
    model: Annotated[str | None, typer.Option(help="Known model that gives the sizes; see `moereplay models`.")] = None,
    expert_bytes: Annotated[
        str | None, typer.Option(help="Bytes of one expert, or one number per layer with `/`.")
    ] = None,
    expert_bits: Annotated[float | None, typer.Option(help="Precision of those bytes.")] = None,
    prompt_length: Annotated[int | None, typer.Option(help="Prompt tokens of each request.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens after which the recorder cleared its context.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Import the first N requests only.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted import.")] = False,
) -> None:
    """Turn another tool's routing trace into a trace of ours."""
    from pydantic import ValidationError

    from simulator.errors import ConfigError
    from traces import importers
    from traces.geometry import known
    from traces.writer import write_trace

    named = known(model) if model else None
    try:
        settings = importers.Options(
            model=named.name if named else None,
            geometry=named.geometry if named else None,
            expert_bytes=_sizes(expert_bytes),
            expert_bits=expert_bits,
            prompt_length=prompt_length,
            chunk=chunk,
        )
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from None
    foreign = importers.read(source, settings, format)
    trace = write_trace(out, foreign.header, islice(foreign.requests, limit), resume=resume)
    for note in foreign.notes:
        _say(f"note: {note}")
    _say(f"wrote {out}: {trace.requests:,} requests, {trace.tokens:,} tokens, digest {trace.digest[:12]}")


@app.command()
def synthesise(
    out: Annotated[Path, typer.Option(help="The trace to write, NAME.zarr.", show_default=False)],
    model: Annotated[str, typer.Option(help="Known model that gives the geometry.")] = "olmoe-1b-7b",
    expert_bits: Annotated[float, typer.Option(help="Precision at which the experts are stored.")] = 16,
    kind: Annotated[str, typer.Option(help="zipf | markov | phases | cyclic.")] = "markov",
    requests: int = 8,
    prompt_tokens: int = 32,
    decode_tokens: int = 96,
    reuse: Annotated[
        float | None, typer.Option(help="Share of a token's experts that the next uses again; .31 for markov.")
    ] = None,
    exponent: Annotated[float, typer.Option(help="Zipf exponent of the experts' popularity.")] = 0.5,
    recall: Annotated[str, typer.Option(help="Look-ahead recall at k per depth, with `/`; empty for none.")] = "",
    logits: bool = True,
    seed: int = 0,
) -> None:
    """Make a synthetic trace with a known model's geometry and chosen statistics."""
    from pydantic import ValidationError

    from simulator.errors import ConfigError
    from traces.geometry import known
    from traces.synthetic import Synthetic
    from traces.synthetic import synthesise as make
    from traces.writer import write_trace

    try:
        settings = Synthetic.model_validate(
            {
                "kind": kind,
                "geometry": known(model).geometry.stored_at(expert_bits),
                "requests": requests,
                "prompt_tokens": prompt_tokens,
                "decode_tokens": decode_tokens,
                "seed": seed,
                "exponent": exponent,
                "reuse": MARKOV_REUSE if reuse is None and kind == "markov" else reuse,
                "logits": logits,
                "recall": [float(part) for part in recall.split("/") if part],
            }
        )
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from None
    except ValueError:
        raise ConfigError(f"--recall {recall!r}: write one number per depth, as .87/.80") from None
    made = make(settings)
    trace = write_trace(out, made.header, map(made.request, range(made.requests)), made.router_bias)
    _say(f"wrote {out}: {trace.requests:,} requests, {trace.tokens:,} tokens, digest {trace.digest[:12]}")


@app.command()
def inspect(
    trace: TracePath,
    full: Annotated[bool, typer.Option("--full", help="Re-read every byte and compare digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check a trace and summarise its routing: reuse, working set, entropy, look-ahead recall."""
    from analysis.inspection import document, render
    from traces.doctor import examine
    from traces.store import open_trace, verify
    from traces.summary import summarise

    opened = open_trace(trace)
    if full:
        verify(opened)
    findings, summary = examine(opened), summarise(opened)
    if as_json:
        print(json.dumps(document(opened, summary, findings), indent=1))
    else:
        _show(*render(opened, summary, findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


@app.command()
def replay(
    trace: TracePath,
    capacity: Annotated[str, typer.Option(help="Comma list of 5%, 5%@16, 600MB, 1.5GiB, 51experts, 32/layer.")] = "5%",
    eviction: Lists = "lru",
    prefetch: Lists = "none",
    miss: Lists = "fetch",
    routing: Lists = "standard",
    platform: Annotated[
        str, typer.Option(help="Comma list of presets or .toml files; `moereplay platforms`.")
    ] = "a100-5gbps",
    contract: Annotated[str, typer.Option(help="atomic, sequential.")] = "atomic",
    scope: Annotated[str, typer.Option(help="global, per_layer.")] = "global",
    passes: Annotated[str, typer.Option(help="recorded, token, chunk:N.")] = "recorded",
    reset: Annotated[str, typer.Option(help="never, request, or a number of tokens.")] = "never",
    prefetch_at: Annotated[str, typer.Option(help="gate, after_demand.")] = "gate",
    prefetch_admission: Annotated[str, typer.Option(help="evict, free_only.")] = "evict",
    warm: Annotated[Path | None, typer.Option(help="JSON list of [layer, expert] resident at the start.")] = None,
    seed: Annotated[int, typer.Option(help="For policies that draw.")] = 0,
    engine: Annotated[str, typer.Option(help="reference.")] = "reference",
    workers: Annotated[int, typer.Option(help="Processes.")] = WORKERS,
    as_json: Annotated[bool, typer.Option("--json", help="One configuration as one JSON document.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for one Parquet part per configuration.")] = None,
    events: Annotated[Path | None, typer.Option(help="Event log of one configuration (.parquet or .csv).")] = None,
) -> None:
    """Replay a trace: every combination of the comma lists, one table, Belady beside each hit rate. SIMULATED."""
    from simulator.grid import expand, run_grid
    from simulator.replay import check_engine
    from simulator.rows import write_events
    from traces.store import open_trace

    check_engine(engine)
    opened = open_trace(trace)
    lists = {
        "capacity": capacity,
        "eviction": eviction,
        "prefetch": prefetch,
        "miss": miss,
        "routing": routing,
        "platform": platform,
        "contract": contract,
        "scope": scope,
        "passes": passes,
        "reset": reset,
        "prefetch_at": prefetch_at,
        "prefetch_admission": prefetch_admission,
    }
    configs = expand(lists, {"seed": seed, "warm": _warm(warm)})
    _one_only(configs, as_json, events)
    with _progress(configs) as advance:
        outcomes = run_grid(opened, configs, workers, bool(events), bounded=not as_json, done=advance)
        outcomes = list(_kept(outcomes, out))
    if events:
        write_events(events, outcomes[0][0].events)
    if as_json:
        print(json.dumps(outcomes[0][0].to_json(), indent=1))
        return
    _report(opened, outcomes)
    for path in filter(None, (out and out / "part-*.parquet", events)):
        _say(f"wrote {path}")


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="Folder written by `moereplay replay --out`.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder for the figures; default RESULTS/figures.")] = None,
    figure: Annotated[
        str | None, typer.Option(help="Comma list of figures; default all that the results can feed.")
    ] = None,
) -> None:
    """Draw figures from results, PNG and SVG: collisions by layer, misses, hit rate against capacity."""
    from analysis.figures import draw_all, save
    from analysis.results import load

    frame = load(results)
    folder = out or results / "figures"
    for name, drawn in draw_all(frame, figure.split(",") if figure else None):
        for path in save(drawn, folder / name):
            _say(f"wrote {path}")


@app.command()
def policies(name: Annotated[str | None, typer.Argument(help="Explain one policy.")] = None) -> None:
    """List the policies of all four kinds, or explain one."""
    from analysis.tables import table
    from policies import named
    from policies.table import explain, rows

    if name is None:
        _show(table(rows()))
        return
    for policy in named(name):
        width = max(len(heading) for heading, _ in explain(policy))
        _show(*(f"{heading:{width}}  {text}" for heading, text in explain(policy)), "")


@app.command()
def platforms(
    name: Annotated[str | None, typer.Argument(help="Show one platform's figures and sources.")] = None,
) -> None:
    """List the platform presets, or show one."""
    from analysis.tables import table
    from simulator.platform import platform, presets

    if name:
        print(platform(name).model_dump_json(indent=1))
        return
    _show(table([preset.row() for preset in presets()]))


@app.command()
def models(name: Annotated[str | None, typer.Argument(help="Show one model's geometry and sources.")] = None) -> None:
    """List the models whose geometry is known, or show one."""
    from analysis.tables import table
    from traces.geometry import MODELS, known

    if name:
        print(known(name).model_dump_json(indent=1))
        return
    _show(table([model.row() for model in MODELS.values()]))


def _complaint(error: ValidationError) -> str:
    """The first thing that is wrong, by the name of its option."""
    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    return option + first["msg"].removeprefix("Value error, ")


def _sizes(text: str | None) -> Any:
    """Expert bytes as typed; the importers check them."""
    if text is None:
        return None
    sizes = [part.strip() for part in text.split("/")]
    return sizes[0] if len(sizes) == 1 else tuple(sizes)


def _warm(path: Path | None) -> Any:
    from simulator.errors import ConfigError

    try:
        return json.loads(path.read_text()) if path else ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--warm {path}: {error}; expected a JSON list of [layer, expert]") from None


def _one_only(configs: list[ReplayConfig], as_json: bool, events: Path | None) -> None:
    from simulator.errors import ConfigError

    if len(configs) > 1 and (as_json or events):
        option = "--json" if as_json else "--events"
        raise ConfigError(f"{option} takes one configuration, these lists make {len(configs)}; use --out DIR for many")


def _progress(configs: list[ReplayConfig]) -> Any:
    from analysis.progress import progress
    from simulator.grid import replays_needed

    return progress(replays_needed(configs), "replays")


def _kept(outcomes: Iterator[Outcome], out: Path | None) -> Iterator[Outcome]:
    """Every outcome, written as soon as it is there: an interrupted grid keeps what it has."""
    from simulator.rows import write_part

    for outcome in outcomes:
        if out:
            write_part(out, *outcome)
        yield outcome


def _report(trace: Trace, outcomes: list[Outcome]) -> None:
    from analysis.metrics import ranking
    from analysis.tables import table
    from simulator.report import heading
    from simulator.rows import to_frame

    results, bounds = zip(*outcomes, strict=True)
    _show(*heading(trace, results))
    _show(table(ranking(to_frame(results, bounds)).to_dicts()))


def _show(*parts: Any) -> None:
    from analysis.tables import console

    out = console()
    for part in parts:
        out.print(part)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors that a user can cause; imported only once one has been raised."""
    from analysis.results import AnalysisError
    from policies.contract import PolicyError
    from simulator.errors import ConfigError
    from traces.schema import TraceError

    return TraceError, PolicyError, ConfigError, AnalysisError


def _unexpected(kind: type[BaseException], error: BaseException, _: object) -> None:
    _say(f"moereplay: unexpected {kind.__name__}: {error}; this is a bug: run again with --debug and report it")


def main() -> None:
    """Run a verb. Exit code 2 and one line for anything that the user can mend; tracebacks only with --debug."""
    command = typer.main.get_command(app)  # app() would install an excepthook of its own
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        command()
    sys.excepthook = _unexpected
    try:
        command()
    except SystemExit:  # typer has said what there was to say
        raise
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except _user_errors() as error:
        _say(f"moereplay: {error}")
        sys.exit(2)
    except OSError as error:  # a file that may not be read or written
        _say(f"moereplay: {error.filename or 'a file'}: {error.strerror or error}; check the path and its permissions")
        sys.exit(2)


if __name__ == "__main__":
    main()
