"""Check link.patch: replays use the second link, engines agree, and each link has its own bandwidth."""

from __future__ import annotations

from moereplay.results.result import Row
from moereplay.simulator.config import configure
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Geometry
from moereplay.traces.synthetic import Synthetic, synthesise

NAME = "mac-nvme"
GEOMETRY = Geometry(layers=3, experts=8, k=2, expert_bytes=(7_000_000,) * 3)
#: An expert takes 1 ms on the first link and 2 on the second; latency comes on top.
TIMES = (1_000_000 + 80_000, 2_000_000 + 80_000)


def totals(spelled: str) -> Row:
    """Return the totals of both engines without evictions: every demanded expert crosses its link once."""
    trace = synthesise(Synthetic(kind="zipf", geometry=GEOMETRY, requests=1, prompt_tokens=0, decode_tokens=40))
    config = configure(capacity="100%", platform=spelled)
    by_engine = [replay(trace, config, engine=engine) for engine in ("reference", "compiled")]
    assert by_engine[0].to_json() == by_engine[1].to_json()
    return by_engine[0].totals


def main() -> None:
    """Raise AssertionError if the second link is missing or unused."""
    assert len(platform(NAME).links) == 2
    both, misses = totals(NAME), totals(NAME)["misses"]
    on_second = both["link_busy_ns"] - misses * TIMES[0]
    assert on_second % (TIMES[1] - TIMES[0]) == 0 and 0 < on_second // (TIMES[1] - TIMES[0]) < misses
    assert totals(f"{NAME}:links.1.bytes_per_s=1e9")["time_ns"] > both["time_ns"]


if __name__ == "__main__":
    main()
