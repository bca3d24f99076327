"""`moereplay import`: convert another tool's routing trace, or its expert counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from pydantic import ValidationError

from moereplay.commands import options
from moereplay.commands.options import grouped, option_fault
from moereplay.commands.terminal import keeping, left_of, say, say_wrote
from moereplay.results.errors import check_output
from moereplay.simulator.capacity import parse_size
from moereplay.simulator.errors import ConfigError
from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.documents import json_text
from moereplay.traces.files import write_whole
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.columns import COUNTS, columns_named, where_named
from moereplay.traces.importers.contract import ASSUMED, WARNED, Options, Order, dense_line, size_line
from moereplay.traces.profiles import contract as profiles
from moereplay.traces.profiles.contract import NO_ORDER, Form, check_model, ranked
from moereplay.traces.schema import RowError, TraceError
from moereplay.traces.texts import counted, whole
from moereplay.traces.validator import examine
from moereplay.traces.writer import write_trace


class Sizes(NamedTuple):
    """Sizes of experts, for files that do not contain them."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose sizes are used: a known name, config.json, GGUF file, or owner/name of the hub."
        ),
    ] = None
    model_name: Annotated[
        str | None, typer.Option(help="Name of a model whose sizes are not known, for titles and tables.")
    ] = None
    expert_bytes: Annotated[
        str | None,
        typer.Option(
            help="Size of one expert: bytes, 600MB or 1.5GiB; one size per layer, separated by `/`; or FILE.json, a "
            "list of the layers' lists of bytes."
        ),
    ] = None
    expert_bits: Annotated[
        str, typer.Option(help="Precision of the experts: bits such as 4.85, or a format such as Q4_K_M.")
    ] = ""
    dense: options.Dense = ""
    dense_bits: options.DenseBits = ""
    matrices: options.Matrices = ""
    quant: options.Quant = ""


class Reading(NamedTuple):
    """Form of the file."""

    format: Annotated[str | None, typer.Option(help="Name of the importer, for a file that is not recognised.")] = None
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of the file: token=pos,layer=moe_layer,experts=topk,request=id,...; or counts=MODEL."
        ),
    ] = None
    where: Annotated[
        str | None, typer.Option(help="With --columns: read only rows with KEY=VALUE, such as event_type=routing.")
    ] = None
    prompt_length: Annotated[int | None, typer.Option(help="Number of prompt tokens of each request.")] = None
    chunk: Annotated[
        int | None, typer.Option(help="Number of tokens after which the recorder cleared its context.")
    ] = None
    shape: Annotated[
        str | None, typer.Option(help="Layers and experts per token of flat ids (SGLang): LAYERSxK, such as 48x8.")
    ] = None
    ids: Annotated[
        str,
        typer.Option(help="Numbering of experts: layer (from 0 in each layer) or global (layer * experts + expert)."),
    ] = "layer"
    axes: Annotated[
        str | None,
        typer.Option(help="Order of the axes of an array: tokens,layers,k or layers,tokens,k (default: its format's)."),
    ] = None
    real_experts: Annotated[
        int | None, typer.Option(help="Number of experts with weights; higher ids cost nothing (LongCat).")
    ] = None


@grouped
def import_(
    source: Annotated[Path, typer.Argument(help="Trace of another tool: a file or a folder.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(help="Trace to write, NAME.zarr; for counts NAME.json.", show_default=False)],
    sizes: Sizes,
    reading: Reading,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use the first N requests; for counts, the N best experts.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted import.")] = False,
) -> None:
    """Convert another tool's routing trace. Expert counts become a profile, NAME.json."""

    settings = _settings(sizes, reading)
    counts = COUNTS in (settings.columns or {})
    form = None if settings.columns and not counts else profiles.detect(source, reading.format)
    if form and (settings.renumbers or settings.shape):
        raise TraceError(f"{source}: --ids, --real-experts and --shape cannot be combined with counts of experts")
    if form:
        profile_of(form, source, out, settings, limit=limit, resume=resume)
    elif counts:
        raise TraceError(f"{source}: --columns {COUNTS}= requires a file of counts")
    else:
        _trace_of(source, out, settings, reading.format, limit, resume)


def _trace_of(source: Path, out: Path, settings: Options, format: str | None, limit: int | None, resume: bool) -> None:
    """Write the trace, and print assumptions and warnings. Raises TraceError."""
    with keeping(lambda: left_of(out, "imported")):
        foreign = importers.read(source, settings, format, lambda line: say(f"warning: {line}"))
        requests = foreign.requests if limit is None else islice(foreign.requests, min(limit, sys.maxsize))
        try:
            trace = write_trace(out, foreign.header, requests, resume=resume)
        except RowError as error:
            raise TraceError(f"{source}: {error}") from error
    sizes = size_line(trace.geometry), dense_line(trace.geometry, trace.header.provenance.model)
    for note in (*foreign.notes, *sizes):
        say(note if note.startswith((ASSUMED, WARNED)) else f"note: {note}")
    for finding in examine(trace):
        if finding.noted:
            say(f"note: {finding.check}: {finding.text}")
        if finding.level != "ok":
            say(f"warning: {finding.check}: {finding.text}; `moereplay inspect` shows all checks")
    say_wrote(out, trace)


def _settings(sizes: Sizes, reading: Reading) -> Options:
    """Return the options of importers. Raises ConfigError or TraceError."""
    options.refuse_both(model=sizes.model or "", model_name=sizes.model_name or "")
    options.refuse_both(quant=sizes.quant, expert_bits=sizes.expert_bits)
    options.refuse_both(quant=sizes.quant, expert_bytes=sizes.expert_bytes or "")
    if sizes.quant and not sizes.model:
        raise ConfigError("--quant requires --model")
    try:
        named = options.model_named(sizes.model, sizes.quant) if sizes.model else None
    except TraceError as unknown:
        raise TraceError(f"{unknown}; or pass --expert-bytes without --model") from None
    try:
        return Options(
            model=named.name if named else None,
            model_name=sizes.model_name,
            geometry=named.geometry if named else None,
            expert_bytes=_sizes(sizes.expert_bytes),
            **options.stored(sizes.expert_bits, sizes.dense, sizes.dense_bits, sizes.matrices),
            prompt_length=reading.prompt_length,
            chunk=reading.chunk,
            columns=columns_named(reading.columns) if reading.columns is not None else None,
            where=where_named(reading.where) if reading.where is not None else None,
            shape=_shape(reading.shape),
            ids=_ids(reading.ids),
            axes=_axes(reading.axes),
            real_experts=reading.real_experts,
        )
    except ValidationError as error:
        raise ConfigError(option_fault(error)) from None


def _shape(text: str | None) -> tuple[int, int] | None:
    """Parse LAYERSxK. Raises ConfigError."""
    if text is None:
        return None
    layers, _, k = text.partition("x")
    numbers = whole(layers.strip()), whole(k.strip())
    if not (numbers[0] and numbers[1]):
        raise ConfigError(f"invalid --shape {text[:40]!r}: expected LAYERSxK, such as 48x8")
    return numbers[0], numbers[1]


def _ids(text: str) -> Literal["layer", "global"]:
    """Parse the numbering of experts. Raises ConfigError."""
    if text not in ("layer", "global"):
        raise ConfigError(f"invalid --ids {text[:40]!r}: expected layer or global")
    return text


def _axes(text: str | None) -> Order | None:
    """Parse the order of axes. Raises ConfigError."""
    if text not in (None, "tokens,layers,k", "layers,tokens,k"):
        raise ConfigError(f"invalid --axes {text[:40]!r}: expected tokens,layers,k or layers,tokens,k")
    return text


def _sizes(text: str | None) -> int | tuple[int, ...] | tuple[tuple[int, ...], ...] | None:
    """Parse expert sizes: one, one per layer, or a file with those of every expert. Raises ConfigError."""
    if text is None:
        return None
    if text.endswith(SUFFIX):
        rows = options.listed("--expert-bytes", Path(text), "lists of bytes, one per layer")
        if not rows or not isinstance(rows, list) or not all(isinstance(row, list) and row for row in rows):
            raise ConfigError(f"invalid --expert-bytes {text}: expected a JSON list of lists of bytes, one per layer")
        return tuple(map(tuple, rows))
    sizes = tuple(_size(part.strip()) for part in text.split("/"))
    return sizes[0] if len(sizes) == 1 else sizes


def _size(text: str) -> int:
    """Parse bytes, with or without a unit. Raises ConfigError."""
    size = whole(text) or (parse_size(text) if len(text) < 40 else None)
    if not size or size != int(size):
        forms = "whole bytes as 1000000, or a size as 10MB or 1.5MiB, one for all layers or one per layer with /"
        raise ConfigError(f"invalid --expert-bytes {text[:40]!r}: expected {forms}")
    return int(size)


# -- expert counts become a profile, which `--profile` and `--warm` read

SUFFIX = ".json"


def write_profile(path: Path, ranking: Sequence[tuple[int, int]]) -> None:
    """Write a JSON list of [layer, expert], best first. Raises OSError and leaves no partial file."""
    write_whole(path, (json_text(ranking) + "\n").encode())


def profile_of(form: Form, source: Path, out: Path, options: Options, *, limit: int | None, resume: bool) -> None:
    """Write the ranking of expert counts, at most `limit` experts. Raises TraceError or ResultError."""
    _check_options(form, source, out, options, resume)
    counts = form.read(source, _named(options)) if form.named else form.read(source)
    if options.model:
        check_model(source, counts, model_of(options.model))
    ranking = ranked(counts.chosen, counts.layers)[:limit]
    write_profile(out, ranking)
    for note in counts.notes:
        say(f"note: {note}")
    say(f"note: {NO_ORDER}; --profile and --warm of `moereplay replay TRACE` take the list")
    say(f"wrote {out}: {counted(len(ranking), 'expert')}, best first, from {counts}")


def _named(options: Options) -> str | None:
    """Return NAME of `--columns counts=NAME`. Raises TraceError for other columns."""
    asked = options.columns or {}
    if others := [field for field in asked if field != COUNTS]:
        raise TraceError(f"--columns {others[0]}= cannot be combined with counts: pass {COUNTS}=NAME alone")
    return asked.get(COUNTS, (None,))[0]


def _check_options(form: Form, source: Path, out: Path, options: Options, resume: bool) -> None:
    """Raises TraceError for options that counts do not use, and unless the output is a new NAME.json."""
    if out.suffix != SUFFIX:
        raise TraceError(
            f"{source} has expert counts ({form.name}) without token order, not a trace: pass --out NAME{SUFFIX}; "
            "ids of one expert each are an array (tokens, layers, 1)"
        )
    given = [
        "model_name",
        "expert_bytes",
        "expert_bits",
        "prompt_length",
        "chunk",
        *([] if form.named else ["columns"]),
    ]
    wrong = [field for field in given if getattr(options, field) is not None] + ["resume"] * resume
    if wrong:
        option = wrong[0].replace("_", "-")
        raise TraceError(f"{source}: --{option} cannot be combined with expert counts ({form.name})")
    check_output(out)
    if out.exists():
        raise TraceError(f"{out} exists; remove it or choose another --out")
