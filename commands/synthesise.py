"""`moereplay synthesise`: a synthetic trace of chosen statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands import options
from moereplay.commands.groups import grouped
from moereplay.commands.interrupt import keeping
from moereplay.commands.options import NewTrace, complaint
from moereplay.commands.terminal import say, say_wrote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moereplay.traces.schema import Geometry

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
        raise ConfigError(complaint(error)) from None
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
