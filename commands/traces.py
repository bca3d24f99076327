"""Verbs on traces: check, split, synthesise, merge, slice, sample, append, and share them in a library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import ValidationError

from moereplay.analysis.inspection import document, render
from moereplay.analysis.tables import table
from moereplay.commands import options
from moereplay.commands.import_ import write_profile
from moereplay.commands.options import NewTrace, TracePath, grouped, option_fault
from moereplay.commands.terminal import keeping, left_of, say, say_made, say_wrote, show, show_json
from moereplay.results.errors import check_output
from moereplay.simulator.errors import ConfigError
from moereplay.traces import selection
from moereplay.traces.combine import appended, merged, taken
from moereplay.traces.dense import with_stored
from moereplay.traces.geometry import as_known
from moereplay.traces.importers.contract import dense_line
from moereplay.traces.library import fetch, folder_of, library_of, publish
from moereplay.traces.routing import RoutingModel, named
from moereplay.traces.schema import Geometry
from moereplay.traces.selection import drawn, listed, profile, spaced
from moereplay.traces.store import open_trace, verify
from moereplay.traces.summary import summarise
from moereplay.traces.synthetic import Synthetic
from moereplay.traces.synthetic import synthesise as make
from moereplay.traces.validator import examine
from moereplay.traces.weight_formats import BITS_PER_WEIGHT
from moereplay.traces.writer import write_trace

FIELDS = ("name", "model", "licence", "requests", "tokens", "bytes", "capabilities", "digest", "source")
Library = Annotated[
    str | None, typer.Argument(help="Library: a folder, or a data set of the Hugging Face hub (owner/name).")
]


def traces_list(
    source: Library = None, *, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False
) -> None:
    """List the traces of a library, or the bundled ones."""
    library = library_of(source)
    entries = library.index().traces
    if as_json:
        show_json([entry.model_dump(mode="json", include=set(FIELDS)) for entry in entries])
        return
    if not entries:
        show(f"{library.where} has no traces; add one with: moereplay traces publish TRACE --licence SPDX --out DIR")
        return
    rows = [
        {
            "name": entry.name,
            "model": entry.model,
            "licence": entry.licence or "not stated",
            "requests": entry.requests,
            "tokens": entry.tokens,
            "MB": f"{entry.bytes / 1e6:,.1f}",
            "holds": ", ".join(entry.capabilities),
        }
        for entry in entries
    ]
    show(table(rows))


# -- traces get


def traces_get(
    name: Annotated[str, typer.Argument(help="Trace name as printed by `traces list`.", show_default=False)],
    *,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Library: a folder, or a data set of the Hugging Face hub (owner/name)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Trace to write (default: NAME.zarr).")] = None,
) -> None:
    """Copy a trace from a library and check every file against its published sha256."""
    library = library_of(source)
    path = out or Path(folder_of(name))
    trace = fetch(library, name, path)
    licence = library.index().entry(name, library.where).licence
    say(f"{name} is licensed {licence}" if licence else f"no licence is stated for {name}")
    say_wrote(path, trace)


# -- traces publish


def traces_publish(
    trace: options.TracePath,
    *,
    licence: Annotated[str, typer.Option(help="SPDX identifier, such as Apache-2.0 or CC-BY-4.0.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the library; created if it does not exist.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name in the library (default: the trace's).")] = None,
    source: Annotated[str, typer.Option(help="Source of the routing, in words.")] = "",
) -> None:
    """Add a trace to a library with licence, digests and a card. Prompts are left out."""
    entry = publish(open_trace(trace), out, name or trace.name.removesuffix(".zarr"), licence, source)
    if entry.prompts_sha256:
        say("note: token ids are left out because they reveal the prompts; traces.json has their hash")
    say(f"wrote {out / entry.name}.zarr, {entry.bytes / 1e6:,.1f} MB, {entry.licence}, digest {entry.digest[:12]}")
    say(f"to share it: hf upload OWNER/NAME {out} --repo-type dataset")


# -- traces merge


def traces_merge(
    sources: Annotated[list[Path], typer.Argument(help="Traces of one model, NAME.zarr.", show_default=False)],
    *,
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted merge.")] = False,
) -> None:
    """Join traces of one model: all requests in order, with the arrays that every trace has."""
    with keeping(lambda: left_of(out, "merged")):
        trace, left_out = merged(out, [open_trace(source) for source in sources], resume)
    for array in left_out:
        say(f"left out: {array}")
    say_made(out, trace)


# -- traces slice


def traces_slice(
    trace: TracePath,
    *,
    requests: Annotated[
        str,
        typer.Option(
            help="Request numbers from 0, or ranges that exclude their end: 1,5,9 or 10:50.", show_default=False
        ),
    ],
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted copy.")] = False,
) -> None:
    """Copy some requests of a trace in the given order."""
    opened = open_trace(trace)
    numbers = listed(requests, opened.requests)
    with keeping(lambda: left_of(out, "copied")):
        made = taken(out, opened, numbers, f"requests {requests}", resume)
    say_made(out, made)


# -- traces sample


def traces_sample(
    trace: TracePath,
    *,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests to draw.", show_default=False)],
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of a random sample (default: evenly spaced requests).")
    ] = None,
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted copy.")] = False,
) -> None:
    """Copy a number of requests of a trace in its order: evenly spaced, or drawn with a seed."""
    opened = open_trace(trace)
    numbers = spaced(requests, opened.requests) if seed is None else drawn(requests, opened.requests, seed)
    drawn_by = "" if seed is None else f" drawn with seed {seed}"
    chosen = f"{requests} {'' if drawn_by else 'evenly spaced '}request{'s'[: requests > 1]}{drawn_by}"
    with keeping(lambda: left_of(out, "copied")):
        made = taken(out, opened, numbers, chosen, resume)
    say_made(out, made)


# -- traces append


def traces_append(
    trace: Annotated[Path, typer.Argument(help="Trace to extend, NAME.zarr.", show_default=False)],
    more: Annotated[list[Path], typer.Argument(help="Traces of the same model.", show_default=False)],
) -> None:
    """Append the requests of other traces to a trace in place: all of them, or none if the process is killed."""
    with keeping(lambda: f"{trace} is unchanged"):
        grown, left_out = appended(trace, [open_trace(source) for source in more])
    for array in left_out:
        say(f"left out: {array}")
    say_made(trace, grown)


# -- inspect


def inspect(
    trace: TracePath,
    full: Annotated[bool, typer.Option("--full", help="Read every byte and compare digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check a trace and summarise its routing: reuse, working set, entropy, look-ahead recall."""
    opened = open_trace(trace)
    if full:
        verify(opened)
    findings, summary = examine(opened), summarise(opened)
    if as_json:
        show_json(document(opened, summary, findings))
    else:
        show(*render(opened, summary, findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


# -- split


def split(
    trace: options.TracePath,
    out: Annotated[
        Path, typer.Option(help="Folder to write: train.zarr, test.zarr, profile.json.", show_default=False)
    ],
    share: Annotated[float, typer.Option(help="Share of requests in train.zarr.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split.")] = 0,
) -> None:
    """Split a trace by requests, to fit a policy to one part and test it on the other."""
    opened = open_trace(trace)
    parts = selection.split(opened.requests, share, seed)
    for name in ("train.zarr", "test.zarr", "profile.json"):
        check_output(out / name)
    made = []
    for name, requests in zip(("train", "test"), parts, strict=True):
        path = out / f"{name}.zarr"
        rows = map(opened.request, requests)
        made.append(write_trace(path, opened.header, rows, opened.router_bias, resumable=False))
        say_wrote(path, made[-1])
    write_profile(out / "profile.json", profile(made[0]))


# -- synthesise

DEFAULT_MODEL = "olmoe-1b-7b"
MARKOV_REUSE = 0.31  #: measured on a trained miniature with OLMoE's topology


class Sizes(NamedTuple):
    """Model and storage of its weights."""

    model: Annotated[
        str,
        typer.Option(
            help="Model whose sizes are used: a known name, config.json, GGUF file, or owner/name of the hub "
            "(default: olmoe-1b-7b, or the routing model's).",
        ),
    ] = ""
    expert_bits: Annotated[
        str,
        typer.Option(
            help="Precision of the experts: bits such as 4.85, or a format such as Q4_K_M (default: as published)."
        ),
    ] = ""
    dense: options.Dense = ""
    dense_bits: options.DenseBits = ""
    matrices: options.Matrices = ""
    quant: options.Quant = ""


class Length(NamedTuple):
    """Length of the trace."""

    requests: Annotated[int, typer.Option(help="Number of requests.")] = 8
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens per request.")] = 32
    decode_tokens: Annotated[int, typer.Option(help="Decoded tokens per request.")] = 96


@grouped
def synthesise(
    *,
    out: NewTrace,
    sizes: Sizes,
    like: Annotated[
        str, typer.Option(help="Routing model: a name that `moereplay routing list` prints, or NAME.toml.")
    ] = "",
    kind: Annotated[
        str, typer.Option(help="Routing process: zipf, markov, phases or cyclic (without --like).")
    ] = "markov",
    length: Length,
    reuse: Annotated[
        float | None,
        typer.Option(help="Share of a token's experts that the next token reuses (default for markov: .31)."),
    ] = None,
    exponent: Annotated[float, typer.Option(help="Zipf exponent of expert popularity.")] = 0.5,
    recall: Annotated[
        str, typer.Option(help="Look-ahead recall at k per depth, separated by `/`, or none (default: that of --like).")
    ] = "",
    logits: Annotated[bool, typer.Option(help="Store router logits.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the routing.")] = 0,
) -> None:
    """Make a synthetic trace with a known model's geometry and chosen statistics."""
    model = _like(like, kind, reuse)
    geometry = _stored(name := sizes.model or _model_of(model, like), sizes)
    recall = recall or _recorded(model, geometry, logits)
    try:
        settings = Synthetic.model_validate(
            {
                "kind": "fitted" if model else kind,
                "like": model,
                "bf16": model is None,
                "geometry": geometry,
                **length._asdict(),
                "seed": seed,
                "exponent": exponent,
                "reuse": MARKOV_REUSE if reuse is None and kind == "markov" and not model else reuse,
                "logits": logits,
                "recall": [float(part) for part in recall.removeprefix("none").split("/") if part],
            }
        )
    except ValidationError as error:
        raise ConfigError(option_fault(error)) from None
    except ValueError:
        raise ConfigError(f"invalid --recall {recall!r}: expected one number per depth, such as .87/.80") from None
    with keeping(lambda: "nothing was written"):
        made = make(settings)
        trace = write_trace(
            out, made.header, map(made.request, range(made.requests)), made.router_bias, resumable=False
        )
    say(f"note: {dense_line(trace.geometry, name)}")
    say_wrote(out, trace)


def _like(name: str, kind: str, reuse: float | None) -> RoutingModel | None:
    """Return the routing model, None without one. Raises TraceError; ConfigError for options of other processes."""
    if not name:
        return None
    if kind != "markov" or reuse is not None:
        raise ConfigError("--like cannot be combined with --kind or --reuse: the routing model has its own statistics")
    return named(name)


def _model_of(model: RoutingModel | None, like: str) -> str:
    """Return the known model that a routing model is of, the default one without it. Raises ConfigError."""
    if model and not model.model:
        raise ConfigError(f"missing --model: routing model {like} does not belong to a known model")
    return model.model if model else DEFAULT_MODEL


def _recorded(model: RoutingModel | None, geometry: Geometry, logits: bool) -> str:
    """Return the look-ahead recall of a routing model as --recall takes it, and say what it is; none without one."""
    found = model.scaled(geometry.layers, geometry.experts, geometry.k).recall if model and logits else None
    if found:
        say(f"note: look-ahead recall {', '.join(map(str, found))}, as recorded (--recall states another)")
    elif model and logits:
        known = "is known of the recorded shape alone" if model.recall else "was not recorded"
        say(f"note: no look-ahead, whose recall {known}; --recall states one")
    return "/".join(map(str, found or ())) or "none"


def _stored(model: str, sizes: Sizes) -> Geometry:
    """Return the geometry of a known model with the weight formats of the options. Raises TraceError."""
    stored = options.stored(*sizes[1:5])
    options.refuse_both(quant=sizes.quant, expert_bits=sizes.expert_bits)
    geometry, named = options.model_named(model, sizes.quant).geometry, stored["weight_format"]
    if bits := stored["expert_bits"] or BITS_PER_WEIGHT.get(named):
        geometry = geometry.stored_at(bits)
    if named:
        geometry = geometry.model_copy(update={"weight_format": named})
    if stored["matrices"]:
        geometry = geometry.model_copy(update={"matrices": stored["matrices"]})
    return with_stored(as_known(geometry, model), model, stored["dense_bytes"], stored["dense_bits"], named)
