"""Compare replays with measured runs of machines that use VRAM, RAM and SSD at once.

    python -m evidence.hybrid_cells FOLDER [--out studies/pages/hybrid.md]    # FOLDER holds cells.csv, a row per run

Each run without drafts is a setting of an engine on a machine (sweeps/recommend/measured.py). Prints, or writes as a
page: measured over predicted times with nothing fitted; for every series the sign of each change and its ratio, after
two of its runs fit a factor on the rate of misses and a fixed step, and the level of every run after one run; the same
by question; how many runs cannot be expressed, and why.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from moereplay.calibration.files import read_runs
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.recommend.measured import Row, Sample, samples
from moereplay.sweeps.recommend.series import Group, fit_one, fitted, groups
from moereplay.traces.files import write_whole

ADDED = Path(__file__).with_name("hybrid_rows.toml")  #: columns that the published table lacks
NOISE = 0.03  #: smaller measured changes have no sign
NOTED = 0.003  #: smaller predicted changes have none
HEAD = """# Machines that use VRAM, RAM and SSD at once: replays and measured runs

`make study-estimates` (CELLS=folder with `cells.csv`, OUT=page) writes this page. It compares replays with runs
that other people measured; the runs are not in this repository. A *series* is a set of runs by one person on one
machine in which one thing changes. The predicted time of a token is a replay
as in [`recommend`](../../docs/recommend.md), with two fitted figures. The *step* is an added constant (dense weights of
unknown size, launches, attention). The *factor* multiplies the cost of misses (the unknown rate of CPU, link or disk).
A prompt streams, per batch, the experts that the batch uses.

**Changes.** Two runs fit both figures: the slowest and the fastest by prediction. One run fits if there are only two
runs, or if they do not differ. Each engine of a series is a separate group. Signs and ratios are taken over all pairs
of runs in a group, except the fitted pair. A measured change below 3 % has no sign.

**Levels.** The middle run alone fits one figure, and the other runs are predicted. The figure is the step if the
rates of everything that the run waits for are published (RAM's for the CPU, the link's for fetches), otherwise the
factor. For each question, the table has the median over groups of the median error within a group. `moereplay
calibrate series` does the same with [your own runs](../../docs/logs.md#runs-of-a-machine-with-vram-ram-and-a-disk).
[predicted-vs-measured](predicted-vs-measured.md) lists every run with its prediction.

**What these figures are not.** This is not a blind test: groups, the fitted runs and the refused runs were chosen
with the results in view (`evidence/hybrid_rows.toml` has what the table leaves to remarks, with reasons). So were
these corrections of November 2026 (medians were 13.2 % and 18.5 % before):

- ktransformers places experts uniformly by default, not by use. It keeps 3.6 GB of each card for prompts, and takes
  16,384 tokens of a prompt at once. All three are from its tutorials.
- A token reads the filled positions of the KV cache, not all allocated ones.
- A process's memory limit also includes its runtime. Without a GPU, what does not fit into RAM comes from the disk
  (it was counted against RAM twice).
- A measured rate of the link replaces the rate of its PCIe generation. If a rate for cold slices is published, that
  one is used.
- One run fits unpublished figures if the RAM rate gives no information about a disk.

None of these was fitted to a number in a row, but each was sought where errors were large. Where the fitted figures
cannot be those of a machine, their columns say *none*: no rate of misses explains the runs, or a token takes less time
without its misses than its bytes do. With few runs per group, small errors mean little. Six of the groups are pairs of
runs from one document, so the last line of the second table counts each series once.
"""


class Judged(NamedTuple):
    """Predictions for one group of runs that differ in one setting."""

    series: str
    question: str
    runs: int
    fitted: tuple[float, float] | None  #: factor and step, None if they are not those of a machine
    changes: list[tuple[float, float]]  #: measured and predicted ratio of neighbours
    levels: list[float]  #: errors after one run
    held: list[float]  #: errors of the other runs after two


def main() -> None:
    """Print the comparison, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="page to write (.md)")
    asked = parser.parse_args()
    try:
        rows = read(asked.folder / "cells.csv")
    except ConfigError as wrong:
        parser.error(str(wrong))
    alone, _ = samples(rows, strict=True)
    found, refused = samples(rows, strict=False)
    page = "\n".join([HEAD, *_page(judged(found), found, alone, refused, len(rows))]) + "\n"
    if asked.out:
        write_whole(asked.out, page.encode())
    else:
        print(page)


def read(file: Path) -> list[Row]:
    """Return the runs of a table, with the columns that hybrid_rows.toml adds. Raises ConfigError."""
    rows = read_runs(file)
    for change in tomllib.loads(ADDED.read_text("utf-8"))["rows"]:
        columns = {name: value for name, value in change.items() if name not in ("runs", "why")}
        for at, row in enumerate(rows):
            if any(fnmatchcase(row["id"], run) for run in change["runs"]):
                rows[at] = defaultdict(str, {**row, **columns})
    return rows


def judged(found: Sequence[Sample]) -> list[Judged]:
    """Return what is predicted of every group of two runs or more whose predicted times differ."""
    return [_judge(group) for group in groups(found) if len(group.runs) > 1]


def _judge(group: Group) -> Judged:
    """Judge runs of one group: changes after the fit of two, levels after that of the middle one."""
    order, middle = group.runs, len(group.runs) // 2
    by, one = fitted(group), fit_one(group.runs[middle])
    told, true = [1 / run.told(by.factor, by.step) for run in order], [1 / run.each for run in order]
    fixed = {order.index(run) for run in by.runs}
    pairs = [pair for pair in combinations(range(len(order)), 2) if not set(pair) <= fixed]
    changes = [(true[b] / true[a], told[b] / told[a]) for a, b in pairs]
    levels = [run.told(*one) / run.each - 1 for at, run in enumerate(order) if at != middle]
    held = [true[at] / told[at] - 1 for at in range(len(order)) if at not in fixed] if len(by.runs) > 1 else []
    figures = None if by.fault else (by.factor, by.step)
    return Judged(group.series, group.question, len(order), figures, changes, levels, held)


def _page(
    every: Sequence[Judged],
    found: Sequence[Sample],
    alone: Sequence[Sample],
    refused: Sequence[tuple[object, str]],
    rows: int,
) -> Iterator[str]:
    yield f"\n{len(found)} of {rows} runs can be predicted, {len(alone)} of them without any fit:\n"
    yield from _table("placement,runs,least,median,most,within 25 %", _alone(alone))
    yield "\nThe table has measured / predicted time. By question:\n"
    head = "groups,changes,signs right,median error of ratios,median error of levels after one run,after two runs"
    yield from _table(f"question,{head}", _questions(every))
    yield "\nBy series:\n"
    yield from _table(f"series,question,runs,factor,step ms,{head.partition(',')[2]}", map(_series, every))
    yield "\n## Runs that cannot be predicted\n"
    counted = Counter(why[:100] for _, why in refused)
    yield from _table("runs,reason", ([str(count), why] for why, count in counted.most_common()))


def _alone(alone: Sequence[Sample]) -> Iterator[list[str]]:
    groups = defaultdict(list)
    for run in alone:
        groups[f"{run.row['engine'].split()[0]}, {run.row['placement']}"].append(run.measured / run.time(1, 0))
    groups["all"] = [each for ratios in list(groups.values()) for each in ratios]
    for name, ratios in sorted(groups.items()):
        near = sum(abs(ratio - 1) <= 0.25 for ratio in ratios)
        yield [
            name,
            str(len(ratios)),
            *(f"{each:.2f}" for each in (min(ratios), median(ratios), max(ratios))),
            str(near),
        ]


def _questions(every: Sequence[Judged]) -> Iterator[list[str]]:
    for question in sorted({each.question for each in every}):
        yield [question, *_summary([each for each in every if each.question == question])]
    yield ["all", *_summary(every)]
    yield ["all, each series once", *_summary(list(_merged(every)))]


def _summary(these: Sequence[Judged]) -> list[str]:
    changes = [pair for each in these for pair in each.changes]
    moved = [(true, told) for true, told in changes if abs(true - 1) > NOISE]
    right = sum((true > 1) == (told > 1) and abs(told - 1) > NOTED for true, told in moved)
    ratios = [median(abs(told / true - 1) for true, told in each.changes) for each in these if each.changes]
    levels = [median(map(abs, each.levels)) for each in these if each.levels]
    held = [median(map(abs, each.held)) for each in these if each.held]
    middles = (f"{median(of):.1%}" if of else "" for of in (ratios, levels, held))
    return [str(len(these)), str(len(changes)), f"{right} of {len(moved)}", *middles]


def _merged(every: Sequence[Judged]) -> Iterator[Judged]:
    """Yield each series as one group, so that a document with many pairs counts once."""
    by_series: dict[str, list[Judged]] = defaultdict(list)
    for each in every:
        by_series[each.series].append(each)
    for name, parts in by_series.items():
        joined = ([pair for part in parts for pair in getattr(part, of)] for of in ("changes", "levels", "held"))
        yield Judged(name, "", sum(part.runs for part in parts), None, *joined)


def _series(each: Judged) -> list[str]:
    figures = (f"{each.fitted[0]:.3g}", f"{each.fitted[1] / 1e6:+.3g}") if each.fitted else ("none", "none")
    return [each.series, each.question, str(each.runs), *figures, *_summary([each])[1:]]


def _table(head: str, rows: Iterator[list[str]]) -> Iterator[str]:
    names = head.split(",")
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * len(names)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
