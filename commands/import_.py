"""`moereplay import`: convert another tool's routing trace, or its counts of experts."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from moereplay.commands import options
from moereplay.commands.groups import grouped
from moereplay.commands.interrupt import keeping, left_of
from moereplay.commands.options import complaint
from moereplay.commands.terminal import say, say_wrote

if TYPE_CHECKING:
    from moereplay.traces.importers.contract import Options


class Sizes(NamedTuple):
    """How large experts are, where the file does not say it."""

    model: Annotated[str | None, typer.Option(help="Known model that gives the sizes; see `moereplay models`.")] = None
    expert_bytes: Annotated[
        str | None, typer.Option(help="Of one expert: bytes, 600MB or 1.5GiB; or one per layer, with `/`.")
    ] = None
    expert_bits: Annotated[str, typer.Option(help="Precision of those bytes: 4.85, or a format, Q4_K_M.")] = ""
    dense: options.Dense = ""
    dense_bits: options.DenseBits = ""


class Reading(NamedTuple):
    """How the file is read."""

    format: Annotated[str | None, typer.Option(help="Importer name, if the file is not recognised.")] = None
    columns: Annotated[
        str | None,
        typer.Option(help="Its own names: token=pos,layer=moe_layer,experts=topk,request=id,...; counts=MODEL."),
    ] = None
    where: Annotated[
        str | None, typer.Option(help="With --columns: only rows with this value, KEY=VALUE (event_type=routing).")
    ] = None
    prompt_length: Annotated[int | None, typer.Option(help="Prompt tokens of each request.")] = None
    chunk: Annotated[int | None, typer.Option(help="Tokens after which the recorder cleared its context.")] = None
    shape: Annotated[
        str | None, typer.Option(help="Layers and experts per token of flat ids (SGLang), such as 48x8.")
    ] = None
    ids: Annotated[
        str, typer.Option(help="`global` where ids count on through the layers: layer * experts + expert.")
    ] = "layer"
    real_experts: Annotated[
        int | None, typer.Option(help="Experts with weights; ids from this number on cost nothing (LongCat).")
    ] = None


@grouped
def import_(
    source: Annotated[Path, typer.Argument(help="Another tool's trace: a file or a folder.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(help="To write: NAME.zarr; of counts NAME.json.", show_default=False)],
    sizes: Sizes,
    reading: Reading,
    limit: Annotated[
        int | None, typer.Option(min=1, help="The first N requests; of counts, the N best experts.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted import.")] = False,
) -> None:
    """Convert another tool's routing trace; counts of experts become a profile, NAME.json."""
    from moereplay.commands.profiles import profile_of
    from moereplay.traces.importers.mapping import COUNTS
    from moereplay.traces.profiles import registry as profiles
    from moereplay.traces.schema import TraceError

    settings = _settings(sizes, reading)
    counts = COUNTS in (settings.columns or {})
    form = None if settings.columns and not counts else profiles.detect(source, reading.format)
    if form and (settings.renumbers or settings.shape):
        raise TraceError(f"{source}: --ids, --real-experts and --shape cannot be combined with counts of experts")
    if form:
        profile_of(form, source, out, settings, limit=limit, resume=resume)
    elif counts:
        raise TraceError(f"{source}: --columns {COUNTS}= means nothing here, it holds no counts; leave it out")
    else:
        _trace_of(source, out, settings, reading.format, limit, resume)


def _trace_of(source: Path, out: Path, settings: Options, format: str | None, limit: int | None, resume: bool) -> None:
    """Write the trace, and say what was assumed. Raises TraceError."""
    from moereplay.traces.importers import registry as importers
    from moereplay.traces.importers.contract import ASSUMED, dense_line, size_line
    from moereplay.traces.schema import RowError, TraceError
    from moereplay.traces.validator import examine
    from moereplay.traces.writer import write_trace

    with keeping(lambda: left_of(out, "imported")):
        foreign = importers.read(source, settings, format)
        requests = foreign.requests if limit is None else islice(foreign.requests, min(limit, sys.maxsize))
        try:
            trace = write_trace(out, foreign.header, requests, resume=resume)
        except RowError as error:
            raise TraceError(f"{source}: {error}") from error
    sizes = size_line(trace.geometry), dense_line(trace.geometry, trace.header.provenance.model)
    for note in (*foreign.notes, *sizes):
        say(note if note.startswith(ASSUMED) else f"note: {note}")
    for finding in examine(trace):
        if finding.level != "ok":
            say(f"warning: {finding.check}: {finding.text}; `moereplay inspect` shows all checks")
    say_wrote(out, trace)


def _settings(sizes: Sizes, reading: Reading) -> Options:
    """What importers are given. Raises ConfigError or TraceError."""
    from pydantic import ValidationError

    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.geometry import known
    from moereplay.traces.importers import mapping
    from moereplay.traces.importers.contract import Options
    from moereplay.traces.schema import TraceError

    try:
        named = known(sizes.model) if sizes.model else None
    except TraceError as unknown:
        raise TraceError(f"{unknown} Or give --expert-bytes without --model") from None
    try:
        return Options(
            model=named.name if named else None,
            geometry=named.geometry if named else None,
            expert_bytes=_sizes(sizes.expert_bytes),
            **options.stored(sizes.expert_bits, sizes.dense, sizes.dense_bits),
            prompt_length=reading.prompt_length,
            chunk=reading.chunk,
            columns=mapping.named(reading.columns) if reading.columns is not None else None,
            where=mapping.where(reading.where) if reading.where is not None else None,
            shape=_shape(reading.shape),
            ids=_ids(reading.ids),
            real_experts=reading.real_experts,
        )
    except ValidationError as error:
        raise ConfigError(complaint(error)) from None


def _shape(text: str | None) -> tuple[int, int] | None:
    """Layers and experts per token as typed, LAYERSxK. Raises ConfigError."""
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.texts import whole

    if text is None:
        return None
    layers, _, k = text.partition("x")
    numbers = whole(layers.strip()), whole(k.strip())
    if not (numbers[0] and numbers[1]):
        raise ConfigError(f"invalid --shape {text[:40]!r}: expected LAYERSxK, such as 48x8")
    return numbers[0], numbers[1]


def _ids(text: str) -> Literal["layer", "global"]:
    """How ids are counted, as typed. Raises ConfigError."""
    from moereplay.simulator.errors import ConfigError

    if text not in ("layer", "global"):
        raise ConfigError(f"invalid --ids {text[:40]!r}: expected layer or global")
    return text


def _sizes(text: str | None) -> int | tuple[int, ...] | None:
    """Expert bytes as typed: one number, or one per layer. Raises ConfigError."""
    if text is None:
        return None
    sizes = tuple(_size(part.strip()) for part in text.split("/"))
    return sizes[0] if len(sizes) == 1 else sizes


def _size(text: str) -> int:
    """Bytes, with a unit as capacities have it or without."""
    from moereplay.simulator.capacity import parse_size
    from moereplay.simulator.errors import ConfigError
    from moereplay.traces.texts import whole

    size = whole(text) or (parse_size(text) if len(text) < 40 else None)
    if not size or size != int(size):
        forms = "whole bytes as 1000000, or a size as 10MB or 1.5MiB, one for all layers or one per layer with /"
        raise ConfigError(f"--expert-bytes {text[:40]!r} is no size of an expert; write {forms}")
    return int(size)
