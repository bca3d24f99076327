"""The closed form of passes with several rows beside replays: `python -m studies.drafts_form TRACE [--share .5]`.

Last changed in commit bb8bebef. How far is the closed form of passes with several rows from replays?
Answer: docs/recommend.md.

Each replay is LRU in one pool, misses fetched, on a machine with everything else in main memory; the form has the hits
that `recommend` expects of the same tokens ("expected"), or the replay's own ("same hits"). Ratios are tokens/s of the
form over those of the replay. Prompts count as decoded tokens.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from moereplay.analysis.tables import markdown
from moereplay.results.result import values_of
from moereplay.simulator.config import configure
from moereplay.simulator.machine import of_platform
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.sweeps.recommend.hits import GLOBAL_LRU, Decoding, Hits, of_trace_at
from moereplay.sweeps.recommend.placements import Scheme
from moereplay.sweeps.recommend.token_time import prices, token
from moereplay.traces.drafts import Drafts
from moereplay.traces.files import bundled
from moereplay.traces.recorder import from_arrays
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace

MODE = Scheme(GLOBAL_LRU, "fetch").mode.model_copy(update={"layer_us": 0, "step_us": 0})


def main(
    traces: list[Path],
    share: Annotated[float, typer.Option(help="Of the experts, in fast memory.")] = 0.5,
    machine: Annotated[str, typer.Option(help="Platform.")] = "desktop-ram",
    streams: str = "1,2,4,8",
    drafts: str = "0,1,2,3,4",
    tokens: Annotated[int, typer.Option(help="Tokens of each of at most 16 requests.")] = 256,
) -> None:
    """Print a Markdown table with a row per trace, number of streams and number of drafts."""
    rows = []
    for path in traces:
        trace = _decoded(open_trace(bundled(path)), tokens)
        for many in map(int, streams.split(",")):
            ways = [Decoding(many, Drafts(each), head=False) for each in map(int, drafts.split(","))]
            ways = [way for way in ways if many <= trace.requests]
            plain = 0.0
            for way, hits in zip(ways, of_trace_at(trace, ways) if ways else (), strict=True):
                row, speed = _compared(trace, way, hits, share, machine, plain)
                plain = plain or speed
                rows.append({"trace": trace.header.provenance.model or path.stem} | row)
    print(markdown(rows))


def _decoded(trace: Trace, most: int) -> Trace:
    """Return the first tokens of at most 16 requests, in memory, all decoded."""
    ids, offsets = np.asarray(trace.read("chosen")), np.asarray(trace.request_offsets)
    pieces = [ids[begin : min(end, begin + most)] for begin, end in pairwise(offsets.tolist())][:16]
    made = from_arrays(np.concatenate(pieces), trace.geometry, lengths=[len(each) for each in pieces])
    return replace(made, header=made.header.model_copy(update={"provenance": trace.header.provenance}))


def _compared(
    trace: Trace, way: Decoding, hits: Hits, share: float, machine: str, plain: float
) -> tuple[dict[str, object], float]:
    """Return the row of one way to decode, and the replay's tokens/s of all streams."""
    config = configure(
        platform=machine, capacity=f"{100 * share}%", eviction="lru", passes=way.passes, draft=way.drafts.text
    )
    result = replay(trace, config)
    speed = way.streams * (values_of(result)["tokens_per_s"] or 0.0)
    found = result.totals["hits"] / result.totals["accesses"]
    price = prices(of_platform(platform(machine)), trace.geometry, 0, way, hits.work)

    def told(hit: float) -> float:
        spent = token(price, MODE, hit, 1 - max(0.0, hit) ** price.k, 1).total - price.launches
        return way.tokens * 1e9 / spent

    expected = hits.at(GLOBAL_LRU, share)
    row: dict[str, object] = {"streams": way.streams, "drafts": way.drafts.many}
    row |= {"experts": f"{price.k:.1f}", "hit, replay": f"{found:.1%}", "hit, expected": f"{expected:.1%}"}
    row |= {"tokens/s, replay": f"{speed:.4g}", "drafts gain": f"{speed / plain - 1:+.0%}" if plain else ""}
    return row | {"expected": f"{told(expected) / speed:.2f}", "same hits": f"{told(found) / speed:.2f}"}, speed


if __name__ == "__main__":
    typer.run(main)
