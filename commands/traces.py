"""`moereplay traces list`: what a library of traces holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands import options
from moereplay.commands.options import NewTrace, TracePath, grouped, option_fault
from moereplay.commands.terminal import keeping, left_of, say, say_made, say_wrote, show, show_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moereplay.traces.schema import Geometry


FIELDS = ("name", "model", "licence", "requests", "tokens", "bytes", "capabilities", "digest", "source")
Library = Annotated[str | None, typer.Argument(help="A folder, or a data set of the hub (owner/name).")]


def traces_list(
    source: Library = None, *, as_json: Annotated[bool, typer.Option("--json", help="As one document.")] = False
) -> None:
    """List the traces of a library; without one, those that come with the program."""
    from moereplay.analysis.tables import table
    from moereplay.traces.library.index import library_of

    library = library_of(source)
    entries = library.index().traces
    if as_json:
        show_json([entry.model_dump(mode="json", include=set(FIELDS)) for entry in entries])
        return
    if not entries:
        show(f"{library.where} holds no traces; add one with: moereplay traces publish TRACE --licence SPDX --out DIR")
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


# -- `moereplay traces get`: take a trace out of a library.


def traces_get(
    name: Annotated[str, typer.Argument(help="As `traces list` names it.", show_default=False)],
    *,
    source: Annotated[
        str | None, typer.Option("--from", help="A folder, or a data set of the hub (owner/name).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The trace to write; else NAME.zarr here.")] = None,
) -> None:
    """Fetch a trace from a library, each file held to the sha256 that was published."""
    from moereplay.traces.library.index import folder_of, library_of
    from moereplay.traces.library.publish import fetch

    library = library_of(source)
    path = out or Path(folder_of(name))
    trace = fetch(library, name, path)
    licence = library.index().entry(name, library.where).licence
    say(f"{name} is licensed {licence}" if licence else f"no licence is stated for {name}")
    say_wrote(path, trace)


# -- `moereplay traces publish`: add a trace to a library.


def traces_publish(
    trace: options.TracePath,
    *,
    licence: Annotated[str, typer.Option(help="SPDX, as Apache-2.0 or CC-BY-4.0.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The library: a folder, new or not.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="In the library; else the trace's.")] = None,
    source: Annotated[str, typer.Option(help="Where the routing comes from, in words.")] = "",
) -> None:
    """Add a trace to a library, without its prompts, with licence, digests and a card."""
    from moereplay.traces.library.publish import publish
    from moereplay.traces.store import open_trace

    entry = publish(open_trace(trace), out, name or trace.name.removesuffix(".zarr"), licence, source)
    if entry.prompts_sha256:
        say("note: token ids are left out, as they spell the prompts; traces.json has a hash of them")
    say(f"wrote {out / entry.name}.zarr, {entry.bytes / 1e6:,.1f} MB, {entry.licence}, digest {entry.digest[:12]}")
    say(f"to share it: hf upload OWNER/NAME {out} --repo-type dataset")


# -- `moereplay traces merge`: the requests of several traces as one trace.


def traces_merge(
    sources: Annotated[list[Path], typer.Argument(help="Traces of one model, NAME.zarr.", show_default=False)],
    *,
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted merge.")] = False,
) -> None:
    """Merge traces of one model: all requests in order, with the arrays that every trace has."""
    from moereplay.traces.combine import merged
    from moereplay.traces.store import open_trace

    with keeping(lambda: left_of(out, "merged")):
        trace, left_out = merged(out, [open_trace(source) for source in sources], resume)
    for array in left_out:
        say(f"left out: {array}")
    say_made(out, trace)


# -- `moereplay traces slice`: some requests of a trace, by their numbers.


def traces_slice(
    trace: TracePath,
    *,
    requests: Annotated[
        str, typer.Option(help="Numbers from 0 on and ranges without their end: 10:50 or 1,5,9.", show_default=False)
    ],
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted copy.")] = False,
) -> None:
    """Copy some requests of a trace, in the order in which they are named."""
    from moereplay.traces.combine import taken
    from moereplay.traces.selection import listed
    from moereplay.traces.store import open_trace

    opened = open_trace(trace)
    numbers = listed(requests, opened.requests)
    with keeping(lambda: left_of(out, "copied")):
        made = taken(out, opened, numbers, f"requests {requests}", resume)
    say_made(out, made)


# -- `moereplay traces sample`: so many requests of a trace, evenly spaced or drawn.


def traces_sample(
    trace: TracePath,
    *,
    requests: Annotated[int, typer.Option(min=1, help="How many.", show_default=False)],
    seed: Annotated[int | None, typer.Option(min=0, help="Draw them; without it they are evenly spaced.")] = None,
    out: NewTrace,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted copy.")] = False,
) -> None:
    """Copy so many requests of a trace, in its order: evenly spaced, or drawn by a seed."""
    from moereplay.traces.combine import taken
    from moereplay.traces.selection import drawn, spaced
    from moereplay.traces.store import open_trace

    opened = open_trace(trace)
    evenly = seed is None
    numbers = spaced(requests, opened.requests) if evenly else drawn(requests, opened.requests, seed)
    said = f"{requests} evenly spaced requests" if evenly else f"{requests} requests drawn with seed {seed}"
    with keeping(lambda: left_of(out, "copied")):
        made = taken(out, opened, numbers, said, resume)
    say_made(out, made)


# -- `moereplay traces append`: more requests for a finished trace.


def traces_append(
    trace: Annotated[Path, typer.Argument(help="The trace that grows, NAME.zarr.", show_default=False)],
    more: Annotated[list[Path], typer.Argument(help="Traces of the same model.", show_default=False)],
) -> None:
    """Append the requests of other traces to a trace, in place: all of them, or after a kill none."""
    from moereplay.traces.combine import appended
    from moereplay.traces.store import open_trace

    with keeping(lambda: f"{trace} is as it was"):
        grown, left_out = appended(trace, [open_trace(source) for source in more])
    for array in left_out:
        say(f"left out: {array}")
    say_made(trace, grown)
    if trace.with_name(f"{trace.name}.derived").exists():
        say(f"note: what replays keep in {trace}.derived is of the shorter trace; it may be removed")


# -- `moereplay inspect`: checks of a trace, and statistics of its routing.


def inspect(
    trace: TracePath,
    full: Annotated[bool, typer.Option("--full", help="Re-read every byte and compare digests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check a trace and summarise its routing: reuse, working set, entropy, look-ahead recall."""
    from moereplay.analysis.inspection import document, render
    from moereplay.traces.store import open_trace, verify
    from moereplay.traces.summary import summarise
    from moereplay.traces.validator import examine

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


# -- `moereplay split`: requests to fit a policy to, the others to try it on, and the profile of the first.


def split(
    trace: options.TracePath,
    out: Annotated[Path, typer.Option(help="A new folder: train.zarr, test.zarr, profile.json.", show_default=False)],
    share: Annotated[float, typer.Option(help="Of the requests, those to fit to.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Which requests.")] = 0,
) -> None:
    """Split a trace by requests: what is fitted to some of them is tried on the others."""
    from moereplay.commands.import_ import write_profile
    from moereplay.results.outputs import check_output
    from moereplay.traces.selection import profile
    from moereplay.traces.selection import split as drawn
    from moereplay.traces.store import open_trace
    from moereplay.traces.writer import write_trace

    opened = open_trace(trace)
    parts = drawn(opened.requests, share, seed)
    for name in ("train.zarr", "test.zarr", "profile.json"):
        check_output(out / name)
    made = []
    for name, requests in zip(("train", "test"), parts, strict=True):
        path = out / f"{name}.zarr"
        rows = map(opened.request, requests)
        made.append(write_trace(path, opened.header, rows, opened.router_bias, resumable=False))
        say_wrote(path, made[-1])
    write_profile(out / "profile.json", profile(made[0]))


# -- `moereplay synthesise`: a synthetic trace of chosen statistics.

MARKOV_REUSE = 0.31  #: of a trained miniature with OLMoE's topology


class Sizes(NamedTuple):
    """The model, and how its weights are stored."""

    model: Annotated[str, typer.Option(help="Known model that gives the geometry.")] = "olmoe-1b-7b"
    expert_bits: Annotated[
        str, typer.Option(help="Precision of the experts: 4.85, or a format, Q4_K_M; default: as published.")
    ] = ""
    dense: options.Dense = ""
    dense_bits: options.DenseBits = ""


class Length(NamedTuple):
    """How much there is of it."""

    requests: int = 8
    prompt_tokens: int = 32
    decode_tokens: int = 96


@grouped
def synthesise(
    *,
    out: NewTrace,
    sizes: Sizes,
    kind: Annotated[str, typer.Option(help="zipf | markov | phases | cyclic.")] = "markov",
    length: Length,
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

    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.importers.contract import dense_line
    from moereplay.traces.synthetic import Synthetic
    from moereplay.traces.synthetic import synthesise as make
    from moereplay.traces.writer import write_trace

    geometry = _stored(sizes.model, options.stored(*sizes[1:]))
    try:
        settings = Synthetic.model_validate(
            {
                "kind": kind,
                "geometry": geometry,
                **length._asdict(),
                "seed": seed,
                "exponent": exponent,
                "reuse": MARKOV_REUSE if reuse is None and kind == "markov" else reuse,
                "logits": logits,
                "recall": [float(part) for part in recall.split("/") if part],
            }
        )
    except ValidationError as error:
        raise ConfigError(option_fault(error)) from None
    except ValueError:
        raise ConfigError(f"--recall {recall!r}: write one number per depth, as .87/.80") from None
    with keeping(lambda: "nothing was written"):
        made = make(settings)
        requests = map(made.request, range(made.requests))
        trace = write_trace(out, made.header, requests, made.router_bias, resumable=False)
    say(f"note: {dense_line(trace.geometry, sizes.model)}")
    say_wrote(out, trace)


def _stored(model: str, stored: Mapping[str, Any]) -> Geometry:
    """The geometry of a known model with its weights stored as options say. Raises TraceError."""
    from moereplay.traces.dense import with_stored
    from moereplay.traces.geometry import as_known, known
    from moereplay.traces.weight_formats import BITS_PER_WEIGHT

    geometry, named = known(model).geometry, stored["weight_format"]
    if bits := stored["expert_bits"] or BITS_PER_WEIGHT.get(named):
        geometry = geometry.stored_at(bits)
    if named:
        geometry = geometry.model_copy(update={"weight_format": named})
    return with_stored(as_known(geometry, model), model, stored["dense_bytes"], stored["dense_bits"], named)
