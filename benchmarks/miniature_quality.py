"""What policies that change the mixture cost in quality, live on the bundled miniature: `make study-quality`.

Teacher-forced on the held-out excerpts, one token per pass, per-layer LRU (as in arXiv 2412.00099, section 4). Four
tables: Cache-Prior's misses against perplexity, live; the same misses predicted by replaying the unmodified recording
(open loop); how much each rank of the mixture matters; how much the experts' precision matters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import heldout
import numpy as np
import torch
from torch import Tensor, nn

from moereplay.analysis.tables import console, table
from moereplay.results.result import Row
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.replay import replay
from moereplay.tracegen.capture import Reading, watching
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.decoding import nll
from moereplay.tracegen.live.run import LiveRequest, run
from moereplay.tracegen.modules import MoeModules, discover
from moereplay.tracegen.precision.affine import rounded
from moereplay.traces.documents import json_text
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace

WINDOW = 256  #: tokens of a request
CAPACITIES = ("32/layer", "16/layer")  #: E/2 and E/4
LAMBDAS = (0.1, 0.25, 0.5, 1.0)
BITS = (8, 4, 3, 2)


def main() -> None:
    """Run, print, and keep every finished live run in --out, so that an interrupted study goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/study-quality"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    loaded = load("miniature", dtype="float32")
    windows = heldout.windows(loaded, options.windows, WINDOW)
    show = console().print
    show(table(list(_ranks(loaded, windows)), title="rank k replaced by a random other expert, weight kept"))
    show(table(list(_precisions(loaded, windows)), title="all experts rounded to nearest, groups of 64"))
    for capacity in CAPACITIES:
        rows = list(_cache_prior(loaded, windows, capacity, options.out))
        show(table(rows, title=f"cache_prior, LRU, {capacity}: live, and open loop (replay of the lam=0 recording)"))


# Cache-Prior


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
    """The recording of the unmodified model, token by token."""
    path = out / f"base-{len(to_run)}.zarr"
    if not path.exists():
        recorded = run(loaded, to_run, _config(capacity, "standard"), quality=False)
        write_trace(path, recorded.header, recorded.requests, recorded.router_bias)
    return open_trace(path)


def _live(loaded: Loaded, to_run: list[LiveRequest], config: ReplayConfig, out: Path) -> dict:
    """Miss rate and nll (requests, tokens) of a live run, from the folder if it is there."""
    name = f"{len(to_run)}-{config.capacity}-{config.routing}".replace("/", "per").replace(":", "-")
    path = out / f"{name}.json"
    if not path.exists():
        live = run(loaded, to_run, config, quality=False)
        losses = [request.nll[1:].tolist() for request in live.requests if request.nll is not None]
        path.write_text(json_text({"miss_rate": _miss_rate(live.result.totals), "nll": losses}))
    return json.loads(path.read_text())


def _miss_rate(totals: Row) -> float:
    return totals["misses"] / totals["accesses"]


# ranks and precisions, in one pass per window: no cache is involved


@torch.inference_mode()
def _losses(loaded: Loaded, windows: Tensor) -> list[list[float]]:
    return [nll(loaded.model(window[None]).logits[0, :-1], window[1:]).tolist() for window in windows]


def _ranks(loaded: Loaded, windows: Tensor) -> Iterator[dict[str, object]]:
    modules, base = discover(loaded.model), _losses(loaded, windows)
    yield {"rank": "none", "perplexity": _perplexity(base), "change": ""}
    for rank in range(modules.geometry.k):
        with watching(modules, 0, _swapping(modules, rank)):
            swapped = _losses(loaded, windows)
        yield {"rank": rank + 1, "perplexity": _perplexity(swapped), "change": _change(swapped, base)}


def _swapping(modules: MoeModules, rank: int) -> Callable[[int, Reading], tuple[Tensor, Tensor]]:
    """Puts a random expert that is not in the mixture in the place of one rank, everywhere."""
    drawn = torch.Generator().manual_seed(rank)

    def on_gate(site: int, reading: Reading) -> tuple[Tensor, Tensor]:
        chance = torch.rand(reading.logits.shape, generator=drawn).scatter_(-1, reading.ids, -1.0)
        ids = reading.ids.clone()
        ids[:, rank] = chance.argmax(-1)
        return ids, reading.weights

    return on_gate


def _precisions(loaded: Loaded, windows: Tensor) -> Iterator[dict[str, object]]:
    """The experts' matrices are restored after each."""
    base = _losses(loaded, windows)
    matrices = [each for site in discover(loaded.model).sites for each in site.experts.parameters()]
    kept = [matrix.data.clone() for matrix in matrices]
    for bits in BITS:
        _round(matrices, kept, bits)
        low = _losses(loaded, windows)
        yield {"bits": bits, "perplexity": _perplexity(low), "change": _change(low, base)}
    _round(matrices, kept, None)


def _round(matrices: list[nn.Parameter], kept: list[Tensor], bits: int | None) -> None:
    for matrix, original in zip(matrices, kept, strict=True):
        matrix.data = original.clone() if bits is None else torch.stack([rounded(each, bits) for each in original])


def _perplexity(losses: list[list[float]]) -> float:
    return float(np.exp(np.mean(losses)))


def _change(losses: list[list[float]], base: list[list[float]]) -> str:
    """Relative change of the perplexity, and its standard error over windows, paired."""
    per_window = np.mean(losses, 1) - np.mean(base, 1)
    error = per_window.std(ddof=1) / np.sqrt(len(per_window))
    return f"{np.expm1(per_window.mean()):+.2%} ± {error:.2%}"


if __name__ == "__main__":
    main()
