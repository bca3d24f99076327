"""`moereplay synthesise`: a synthetic trace of chosen statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from commands.groups import grouped
from commands.interrupt import keeping
from commands.options import NewTrace, complaint
from commands.terminal import say_wrote

if TYPE_CHECKING:
    from traces.schema import Geometry

MARKOV_REUSE = 0.31  #: of a trained miniature with OLMoE's topology


class Length(NamedTuple):
    """How much there is of it."""

    requests: int = 8
    prompt_tokens: int = 32
    decode_tokens: int = 96


@grouped
def synthesise(
    *,
    out: NewTrace,
    model: Annotated[str, typer.Option(help="Known model that gives the geometry.")] = "olmoe-1b-7b",
    expert_bits: Annotated[
        float | None, typer.Option(help="Precision at which the experts are stored; as published unsaid.")
    ] = None,
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

    from simulator.errors import ConfigError
    from traces.geometry import as_known, known
    from traces.synthetic import Synthetic
    from traces.synthetic import synthesise as make
    from traces.writer import write_trace

    try:
        settings = Synthetic.model_validate(
            {
                "kind": kind,
                "geometry": as_known(_stored(known(model).geometry, expert_bits), model),
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
    say_wrote(out, trace)


def _stored(geometry: Geometry, bits: float | None) -> Geometry:
    return geometry if bits is None else geometry.stored_at(bits)
