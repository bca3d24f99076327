"""Check batch.patch: both engines replay the schedule alike, and its passes are the documented ones."""

from __future__ import annotations

from moereplay.simulator.bounds import bound_of, count
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.simulator.source import Pass
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise

PASSES = "pair"
PREFILL_AND_DECODED = 4  #: passes of each request


def main() -> None:
    """Raise AssertionError if engines differ, or a pass holds other requests than the next two."""
    geometry = Geometry(layers=3, experts=6, k=2, expert_bytes=(1_000,) * 3)
    trace = synthesise(Synthetic(kind="zipf", geometry=geometry, requests=3, prompt_tokens=2, decode_tokens=3))
    plan = schedule(trace, PASSES)
    together = [{row.request for row in Pass.planned(index, plan).rows} for index in range(len(plan))]
    assert together == [{0, 1}] * PREFILL_AND_DECODED + [{2}] * PREFILL_AND_DECODED
    for settings in ({}, {"eviction": "belady"}, {"eviction": "lfu", "prefetch": "previous_token", "miss": "drop"}):
        config = configure(capacity="60%", passes=PASSES, **settings)
        results = [replay(trace, config, engine=engine) for engine in ("reference", "compiled")]
        assert results[0].to_json() == results[1].to_json()
        assert [row["decode_passes"] for row in results[0].per_request] == [3, 3, 3]
    bound = bound_of(trace, configure(capacity="60%", passes=PASSES))
    assert (
        bound
        and count(trace, bound)["accesses"]
        == replay(trace, configure(capacity="60%", passes=PASSES)).totals["accesses"]
    )


if __name__ == "__main__":
    main()
