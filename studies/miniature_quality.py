"""Measure the error of open-loop replays: Cache-Prior's misses and perplexity, live on the bundled miniature.

Last changed in commit 0a7c2f56. How wrong is an open-loop replay of Cache-Prior?
Answer: at most 1.5 % of the misses: docs/evidence.md.

Teacher-forced on the held-out excerpts, one token per pass, per-layer LRU (as in arXiv 2412.00099, section 4). A table
per capacity: misses against perplexity, live, and the misses predicted by replaying the unmodified recording.
`make study-quality` runs it, then `quality --study` for ranks and precisions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moereplay.analysis.tables import console, table
from moereplay.results.result import Row
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import replay
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.folder import MINIATURE
from moereplay.tracegen.live.run import LiveRequest, run
from moereplay.traces.documents import json_text
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace

WINDOW = 256  #: tokens of a request
CAPACITIES = ("32/layer", "16/layer")  #: E/2 and E/4
LAMBDAS = (0.1, 0.25, 0.5, 1.0)


def main() -> None:
    """Run, print, and keep every finished live run in --out, so that an interrupted study goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/study-quality"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    loaded = load("miniature", dtype="float32")
    windows = heldout(loaded, options.windows, WINDOW)
    show = console().print
    for capacity in CAPACITIES:
        rows = list(_cache_prior(loaded, windows, capacity, options.out))
        show(table(rows, title=f"cache_prior, LRU, {capacity}: live, and open loop (replay of the lam=0 recording)"))


def _cache_prior(loaded: Loaded, windows: Tensor, capacity: str, out: Path) -> Iterator[dict[str, object]]:
    to_run = [LiveRequest(tuple(window.tolist()), 0) for window in windows]
    base = _base(loaded, to_run, capacity, out)
    for routing in ("standard", *(f"cache_prior:lam={lam}:top_j={j}" for j in (2, 0) for lam in LAMBDAS)):
        config = _config(capacity, routing)
        live = _live(loaded, to_run, config, out)
        open_loop = _miss_rate(replay(base, config).totals)
        yield {
            "routing": routing,
            "miss rate": live["miss_rate"],
            "misses divided by": _miss_rate(replay(base, _config(capacity, "standard")).totals) / live["miss_rate"],
            "perplexity": _perplexity(live["nll"]),
            "change": _change(live["nll"], _live(loaded, to_run, _config(capacity, "standard"), out)["nll"]),
            "open-loop miss rate": open_loop,
            "open-loop error": f"{open_loop / live['miss_rate'] - 1:+.1%}",
        }


def _config(capacity: str, routing: str) -> ReplayConfig:
    return configure(capacity=capacity, scope="per_layer", routing=routing)


def _base(loaded: Loaded, to_run: list[LiveRequest], capacity: str, out: Path):
    """Return the recording of the unmodified model, token by token."""
    path = out / f"base-{len(to_run)}.zarr"
    if not path.exists():
        recorded = run(loaded, to_run, _config(capacity, "standard"), quality=False)
        write_trace(path, recorded.header, recorded.requests, recorded.router_bias)
    return open_trace(path)


def _live(loaded: Loaded, to_run: list[LiveRequest], config: ReplayConfig, out: Path) -> dict:
    """Return miss rate and nll (requests, tokens) of a live run, from the folder if stored."""
    name = f"{len(to_run)}-{config.capacity}-{config.routing}".replace("/", "per").replace(":", "-")
    path = out / f"{name}.json"
    if not path.exists():
        live = run(loaded, to_run, config, quality=False)
        losses = [request.nll[1:].tolist() for request in live.requests if request.nll is not None]
        path.write_text(json_text({"miss_rate": _miss_rate(live.result.totals), "nll": losses}))
    return json.loads(path.read_text())


def _miss_rate(totals: Row) -> float:
    return totals["misses"] / totals["accesses"]


def heldout(loaded: Loaded, count: int, length: int) -> Tensor:
    """Return (count, length) tokens: windows spread evenly over the held-out excerpts."""
    text = (MINIATURE / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(loaded.tokenizer(text, verbose=False).input_ids)
    starts = torch.linspace(0, len(ids) - length, count).long()
    return torch.stack([ids[start : start + length] for start in starts])


def _perplexity(losses: list[list[float]]) -> float:
    return float(np.exp(np.mean(losses)))


def _change(losses: list[list[float]], base: list[list[float]]) -> str:
    """Return the relative change of the perplexity, and its paired standard error over windows."""
    per_window = np.mean(losses, 1) - np.mean(base, 1)
    error = per_window.std(ddof=1) / np.sqrt(len(per_window))
    return f"{np.expm1(per_window.mean()):+.2%} ± {error:.2%}"


if __name__ == "__main__":
    main()
