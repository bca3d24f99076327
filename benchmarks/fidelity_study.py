"""Do the fidelity counters foretell quality? Every policy that changes the output, live on the bundled miniature.

The counters (share of the router's choice kept; gate mass kept, substituted, dropped, at low precision; displacement in
ranks; variation of the mixture) come for free with every replay. Perplexity and KL against the unmodified model need
the model. The first table puts them side by side, the second correlates each counter with both, by rank (Spearman): +1
or -1 means that the counter orders the policies as quality does. Counters know no errors of rounding, so they are also
correlated without the policies that lower precision, and within the routing policies.

LIVE, emulated: held-out windows, teacher-forced, one token per pass, LRU, half of each layer's experts, no prefetch.
One small model and a few windows: read the order, not the digits, and KL before perplexity, whose change is lost in
the noise of a few hundred tokens unless a policy does great damage. `make study-fidelity` runs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import heldout

from moereplay.analysis.metrics import measured
from moereplay.analysis.statistics import spearman
from moereplay.analysis.tables import console, table
from moereplay.results.files import to_frame
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.tracegen.checkpoint import Loaded, load
from moereplay.tracegen.live.run import LiveRequest, proven, run
from moereplay.tracegen.modules import MoeModules
from moereplay.traces.documents import json_text

ROUTING = (
    "cache_prior:lam=0.1",
    "cache_prior:lam=0.3",
    "cache_prior:lam=1",
    "max_rank:m=12",
    "max_rank:m=24",
    "cumulative:p=0.5",
    "cumulative:p=0.9",
    "reuse_distance",
    "prune:keep=6",
    "prune:keep=3",
    "swap:rank=8",
    "swap:rank=2",
)
MISS = (
    "drop:keep=6",
    "drop:keep=2",
    "drop_below:f=0.5",
    "drop_below:f=1",
    "substitute:tolerance=0.01",
    "substitute:tolerance=0.05",
    "substitute_band:alpha=0.1",
    "substitute_band:alpha=0.35",
    "lowest_bit:bits=16/4",
    "lowest_bit:bits=16/2",
    "cascade:bits=8/4/2",
    "cascade:bits=4/2:below=0.6",
    "hobbit:bits=16/4",
    "hobbit:bits=8/2",
    "drop_cascade:bits=8/4",
    "drop_cascade:bits=4/2:below=0.6/0.3",
)
#: Ratios of `analysis.metrics`, which documents them.
COUNTERS = {
    "choice_kept": "choice kept",
    "mass_share_kept": "mass kept",
    "mass_share_substituted": "substituted",
    "mass_share_dropped": "dropped",
    "mass_share_low_precision": "low precision",
    "mean_displacement": "displacement",
    "mean_variation": "variation",
}
CHANGE, KL = "perplexity", "KL"
Row = dict[str, str | float | None]


class Subject(NamedTuple):
    """The model, checked once, and what it reads."""

    loaded: Loaded
    modules: MoeModules
    to_run: list[LiveRequest]


def main() -> None:
    """Run, print, and keep every finished run in --out, so that an interrupted study goes on."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    subject = _subject(options)
    named = [("routing", text) for text in options.routing] + [("miss", text) for text in options.miss]
    rows = [_row(subject, kind, text, options) for kind, text in [("routing", "standard"), *named]]
    related = correlations(rows[1:])
    size = f"{options.windows} windows of {options.tokens} tokens, {options.capacity}"
    console().print(table([_signed(row) for row in rows], title=f"LIVE, emulated: {size}; shares of the router's own"))
    console().print(table(related, title="rank correlation with the rise of perplexity and with KL, policies compared"))
    (options.out / "fidelity_study.json").write_text(json_text({"rows": rows, "correlations": related}, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--capacity", default="32/layer")
    parser.add_argument("--routing", type=_listed, default=ROUTING, help="comma list")
    parser.add_argument("--miss", type=_listed, default=MISS, help="comma list")
    parser.add_argument("--out", type=Path, default=Path("runs/study-fidelity"))
    return parser.parse_args()


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _subject(options: argparse.Namespace) -> Subject:
    loaded = load("miniature", dtype="float32")
    read = heldout.windows(loaded, options.windows, options.tokens)
    return Subject(loaded, proven(loaded), [LiveRequest(tuple(window.tolist()), 0) for window in read])


def _row(subject: Subject, kind: str, text: str, options: argparse.Namespace) -> Row:
    """One policy's counters beside its quality, from the folder if it is there."""
    size = f"{options.windows}x{options.tokens}-{options.capacity}"
    path = options.out / (f"{kind}-{text}-{size}".replace("/", "-").replace(":", "-") + ".json")
    if not path.exists():
        config = configure(capacity=options.capacity, scope="per_layer", **{kind: text})
        path.write_text(json_text(_measure(subject, config)))
    return {"kind": kind, "policy": text} | json.loads(path.read_text())


def _measure(subject: Subject, config: ReplayConfig) -> Row:
    live = run(subject.loaded, subject.to_run, config, modules=subject.modules)
    assert live.quality
    total, seen = live.quality.total, measured(to_frame([live.result], [None])).row(0, named=True)
    assert total.perplexity and total.perplexity_base and total.mean_kl is not None
    shares = {heading: seen[name] for name, heading in COUNTERS.items()}
    change = total.perplexity / total.perplexity_base - 1
    return {"hit rate": seen["hit_rate"]} | shares | {CHANGE: change, KL: total.mean_kl}


def _signed(row: Row) -> Row:
    """For reading: the change of perplexity in percent."""
    return row | {CHANGE: f"{row[CHANGE]:+.2%}"}


def correlations(rows: Sequence[Row]) -> list[Row]:
    """A line per counter, a column per kind of quality and group of policies; None where a counter is constant."""
    groups: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "full precision": lambda row: row["low precision"] == 0,
        "routing": lambda row: row["kind"] == "routing",
    }
    lines: list[Row] = [{"counter": heading} for heading in COUNTERS.values()]
    for group, belongs in groups.items():
        members = [row for row in rows if belongs(row)]
        for line in lines:
            for quality in (CHANGE, KL):
                ours, theirs = ([float(row[name] or 0) for row in members] for name in (str(line["counter"]), quality))
                line[f"{quality}, {group} ({len(members)})"] = spearman(ours, theirs)
    return lines


if __name__ == "__main__":
    main()
