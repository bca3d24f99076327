"""SpecMD Fig. 4, replayed: collisions per miss of every eviction policy at 5 % and 5 %@16, global, next-gate prefetch.

Published (arXiv 2602.03921, 5 %): Least-Stale 1.6-1.9 %, LRU 4.5-12.6 %, score-based 42.6-60.9 %, farthest layer
slightly below LRU. Not tuned to agree: synthetic routing with the statistics of a trained MoE (reuse .31, look-ahead
recall .87), experts at 4 bits so that the two readings of "5 %" differ. `make study-collisions` runs it.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from analysis.ranking import ranking
from analysis.tables import console, table
from sweeps.grid import expand, run_grid
from traces.geometry import known
from traces.synthetic import Synthetic, synthesise
from traces.writer import write_trace

EVICTIONS = "lru,farthest_layer:distance=cyclic,farthest_layer:distance=absolute,score,least_stale:order=a,"
EVICTIONS += "least_stale:order=b,least_stale:order=c"
#: The same machine with a link that is never the bottleneck: what the policies do when prefetches always arrive.
FAST_LINK = """name = "a100-no-wait"
[link]
bytes_per_s = inf
[compute]
kind = "measured"
dense_ns = 1000
expert_ns = 1000
"""


def main() -> None:
    """Make the trace, replay, print one table per link."""
    geometry = known("olmoe-1b-7b").geometry.stored_at(4)
    made = synthesise(
        Synthetic(
            kind="markov",
            geometry=geometry,
            requests=8,
            prompt_tokens=32,
            decode_tokens=128,
            reuse=0.31,
            recall=(0.87,),
        )
    )
    with TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "olmoe.zarr", made.header, map(made.request, range(made.requests)))
        fast = Path(folder) / "fast.toml"
        fast.write_text(FAST_LINK)
        for platform in ("a100-5gbps", str(fast)):
            lists = {"capacity": "5%,5%@16", "prefetch": "none,top_k", "eviction": EVICTIONS, "platform": platform}
            outcomes = run_grid(trace, expand(lists, {}), os.cpu_count() or 1)
            rows = [result.to_json() | {"bounds": bound} for result, bound in outcomes]
            console().print(table(ranking(rows), title=Path(platform).stem))


if __name__ == "__main__":
    main()
