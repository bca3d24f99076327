"""`moereplay export`: write a trace or a placement in the format of another tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import ValidationError

from moereplay.analysis.tables import table
from moereplay.commands import options
from moereplay.commands.options import grouped
from moereplay.commands.terminal import keeping, say, show, show_json
from moereplay.results.remarks import assumptions
from moereplay.simulator.capacity import CONTEXT, divided, memory_of, parse_capacity
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.traces.exporters import contract
from moereplay.traces.exporters.contract import Export, Options, exporters
from moereplay.traces.schema import Trace
from moereplay.traces.selection import first_requests
from moereplay.traces.store import open_trace
from moereplay.traces.summary import synthetic


class Placement(NamedTuple):
    """Experts in fast memory, for formats that place experts."""

    capacity: Annotated[str, typer.Option(help="Size of the experts in fast memory: 25%, 8GB, 32/layer.")] = ""
    vram: Annotated[
        str,
        typer.Option(help="Total GPU memory instead of --capacity, as it is sold: 24GB, divided as in `recommend`."),
    ] = ""
    platform: Annotated[str, typer.Option(help="With --vram: platform of the GPU.")] = ""
    dense: options.Dense = ""
    dense_bits: options.DenseBits = ""
    profile: Annotated[
        Path | None, typer.Option(help="JSON list of [layer, expert], best first (default: by use).")
    ] = None
    dense_layers: Annotated[
        int | None, typer.Option(min=0, help="Number of dense layers before the first MoE layer.")
    ] = None


class Stream(NamedTuple):
    """Accesses, for formats that list them."""

    layer: Annotated[int | None, typer.Option(min=0, help="Write only this MoE layer.")] = None
    passes: Annotated[str, typer.Option(help="Tokens per forward pass, as in `replay`.")] = ""


@grouped
def export(
    source: Annotated[
        Path | None, typer.Argument(help="Trace folder, NAME.zarr, or `miniature` (bundled).", show_default=False)
    ] = None,
    *,
    format: Annotated[str, typer.Option(help="Format to write; --list has the names.")] = "",
    out: Annotated[Path | None, typer.Option(help="File or folder to write.")] = None,
    placement: Placement,
    stream: Stream,
    licence: Annotated[str, typer.Option(help="Licence of a data set: apache-2.0, cc-by-4.0.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the formats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a trace, or an expert placement derived from it, in the format of another tool."""
    if listed:
        _list(as_json)
        return
    if source is None or out is None or not format:
        raise ConfigError(
            "missing trace, --format or --out: pass all three; `moereplay export --list` lists the formats"
        )
    exporter = contract.load(format)
    opened = open_trace(source)
    taken = opened if limit is None else first_requests(opened, limit)
    with keeping(lambda: "nothing was written"):
        made = contract.export(taken, exporter, _options(taken, placement, stream, licence), out)
    if as_json:
        show_json(made.document() | {"trace": opened.digest, "requests": taken.requests})
    else:
        _report(made, assumptions([synthetic(opened.header.provenance)]))


def _list(as_json: bool) -> None:
    found = [
        {"format": one.name, "writes": one.writes, "options": contract.options(one), "what": one.summary}
        for one in exporters()
    ]
    if as_json:
        show_json(found)
        return
    show(table([{name: row[name] for name in ("format", "writes", "options")} for row in found]))
    show(*(f"{row['format']}: {row['what']}" for row in found))


def _options(trace: Trace, placement: Placement, stream: Stream, licence: str) -> Options:
    """Return the options of exporters. Raises ConfigError or TraceError."""
    try:
        return Options(
            cache_bytes=_cache_bytes(trace, placement),
            ranking=options.named_experts("--profile", placement.profile),
            dense_layers=placement.dense_layers,
            layer=stream.layer,
            passes=stream.passes,
            licence=licence,
        )
    except ValidationError as error:
        raise ConfigError(options.option_fault(error)) from None


def _cache_bytes(trace: Trace, placement: Placement) -> int | None:
    """Return the bytes for experts, from --capacity or --vram. Raises ConfigError."""
    if placement.capacity and placement.vram:
        raise ConfigError("--capacity cannot be combined with --vram")
    if placement.platform and not placement.vram:
        raise ConfigError("--platform requires --vram")
    if placement.vram:
        platform(placement.platform or configure().platform)  # raises ConfigError for an unknown one
        stored = (placement.dense, placement.dense_bits)
        configure(dense=placement.dense, dense_bits=placement.dense_bits)
        return divided(trace, memory_of(placement.vram, "vram"), CONTEXT, "", *stored).cache_bytes
    if placement.dense or placement.dense_bits:
        raise ConfigError("--dense and --dense-bits require --vram")
    if not placement.capacity:
        return None
    sizes = trace.geometry.expert_bytes
    return parse_capacity(placement.capacity, trace.geometry, "global", (sizes,)).total


def _report(made: Export, routing: Sequence[str]) -> None:
    """Print assumptions, notes, fields that the format lacks, and the command to run next."""
    for line in routing:
        say(line)
    for note in made.answer.notes:
        say(note if note.startswith("assumed: ") else f"note: {note}")
    if made.dropped_fields:
        say(f"not in {made.format}: {', '.join(made.dropped_fields)}")
    total = sum(file.bytes for file in made.files)
    what = made.files[0].path if len(made.files) == 1 else f"{len(made.files)} files"
    say(f"wrote {what}: {total:,} bytes")
    print(made.answer.typed)  # in one line, so that it can be pasted
