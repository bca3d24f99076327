"""Predict measured runs of other people's machines and write the table, its page and a figure (`make evidence`).

    python -m evidence FOLDER|ROWS ... --out studies/pages

A file ROWS has rows that people filed of their own runs (calibration/rows.py), which are predicted already; those that
were predicted blind are apart. Each FOLDER has `cells.csv`, a row per run (docs/logs.md): in the columns of `calibrate
folder`, or of `calibrate series`, where one or two runs of each group are fitted and the others predicted. Otherwise
what is fitted on which runs is in PLANS; every device with runs of several models is also predicted model by model from
those of its other models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from csv import reader
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median

import polars as pl

from evidence.comparison import (
    REFUSED,
    WORDS,
    Plan,
    is_timed,
    leave_one_model_out,
    markdown,
    markdown_table,
    refusals,
    rows_of,
)
from evidence.filed import blind_since, filed_markdown, in_words
from evidence.hybrid_cells import read
from moereplay.analysis.figures.drawing import rendered, save
from moereplay.analysis.figures.real_runs import predicted
from moereplay.analysis.tables import csv
from moereplay.calibration.files import Evidence, read_folder
from moereplay.calibration.rows import CLOSED, PROMPT, Filed, Row, about_series, as_records, read_filed
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.sweeps.recommend.measured import samples
from moereplay.sweeps.recommend.series import HELD_OUT, fitted, groups, predictions
from moereplay.traces.files import write_whole

#: Device, platform that supplies the other figures, patterns of the cells of the fit; no pattern: the preset itself.
PLANS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("oneplus-15r", "phone-ufs4", ("bmoe-07-12-gemma_*", "bmoe-07-14-warmup-*_gemma_k8")),
    ("oneplus-15r", "phone-ufs4", ()),
    ("laptop-x86-2021", "phone-ufs4", ("*-pc-A-*", "*-pc-E-*", "*-pc-I-*")),
    ("laptop-x86-2021", "phone-ufs4", ("*-pc-C-*", "*-pc-G-*")),
    ("macbook-m5pro-64", "mac-nvme", ("warp-kimilinear-512", "warp-kimilinear-8192")),
    ("macbook-m5pro-64", "mac-nvme", ("warp-k3-s12-32G", "warp-k3-s12-52G")),
    ("rtx5090-wsl2", "rtx4090-pcie4", ("imp-1374-5pct", "imp-1365-lru")),
)
HEAD = """# Predicted and measured

This page compares predicted with measured times per token, for every run that a calibration predicts.
[evidence.md](../../docs/evidence.md) says what follows from it. `make evidence RUNS=folder` writes this page,
[its table](predicted-vs-measured.csv) with the source of every run, and the figure. Other people measured the runs,
which are not in this repository.

The time per token is the median of the tokens if a log was published, else the mean. The error is predicted /
measured - 1. The role of a run is *fit* if the figures were fitted on it, *held out* if they were fitted on other runs,
and *preset* if no figure was fitted. Runs that heat or paging slowed down are predicted, but are left out of the
summary.

![Predicted and measured times per token](figures/predicted_vs_measured.png)

"""


#: Words in a row's reason why its time is not the machine's, and what the page calls it; the first one found counts.
REASONS = (
    ("another day", "another state of the machine"),
    ("thrash", "page faults of dense weights"),
    ("throttled", "throttled by heat"),
    ("hot", "slowed by heat"),
    ("pag", "paging"),
)
NOT_COMPARED = "its time is not compared: "


def in_short(row: Row) -> Row:
    """Return the row with its reason in a few words, not in those of the source."""
    if not row.remark.startswith(NOT_COMPARED):
        return row
    said = next((short for words, short in REASONS if words in row.remark), "marked by its source")
    return replace(row, remark=NOT_COMPARED + said)


def plans_of(evidence: Evidence) -> list[Plan]:
    """Return the plans whose device and cells are in the folder."""
    found = []
    for device, base, globs in PLANS:
        own = [cell.text("cell") for cell in evidence.cells if cell.text("device") == device]
        cells = [name for name in own if any(fnmatchcase(name, glob) for glob in globs)]
        if own and (cells or not globs):
            found.append(Plan(device, platform(base), cells))
        if globs and (device, base, globs) == next(each for each in PLANS if each[0] == device):
            found += leave_one_model_out(evidence, device, platform(base))
    return found


# -- series of runs of machines with VRAM, RAM and a disk

SERIES = "## Machines with VRAM, RAM and a disk"
ABOUT_SERIES = """\
Runs of [hybrid machines](hybrid.md), by replays as in [`recommend`](../../docs/recommend.md). In each group (a
series of one engine) one run or two fit the rate of misses and a fixed step, as `moereplay calibrate series` does; the
others are held out. Groups were chosen with the results in view."""


def series_rows(table: Path) -> list[Row]:
    """Predict the runs of a table in series, and refuse the others with the reason."""
    found, refused = samples(read(table), strict=False)
    rows = []
    for group in groups(found):
        by = fitted(group)
        source = f"{' and '.join(run.row['id'] for run in by.runs)}"
        for each in predictions(group, by):
            quantity = PROMPT if by.runs[0].steps > 1 else WORDS["tpot_ms"]
            times = each.predicted / 1e6, each.measured / 1e6
            about = (*about_series(each.row), quantity, source, each.role, CLOSED)
            rows.append(Row(*about, *times, len(group.runs) > 1, ""))
    rows += [
        Row(*about_series(row), WORDS["tpot_ms"], "", REFUSED, CLOSED, None, None, False, why) for row, why in refused
    ]
    return sorted(rows, key=lambda row: (row.role == REFUSED, row.id))


def series_markdown(rows: Sequence[Row]) -> str:
    """Return the section of series: errors by role, every run, and every refusal by name."""
    timed = [row for row in rows if row.error is not None]
    held = sorted(abs(row.error or 0) for row in timed if row.role == HELD_OUT)
    near = [sum(error <= bound for error in held) / len(held) for bound in (0.1, 0.25)]
    told = [
        f"{len(held)} runs are held out: median |error| {median(held):.1%}, {near[0]:.0%} within 10 %, {near[1]:.0%} "
        f"within 25 %. {len(timed) - len(held)} fitted the figures, {len(rows) - len(timed)} are "
        "not predicted; the last table gives the reasons.",
    ]
    lines = [
        [
            row.id,
            row.model,
            row.predicted_from,
            row.role,
            f"{row.predicted:.3g}",
            f"{row.measured:.3g}",
            f"{row.error:+.1%}",
        ]
        for row in timed
    ]
    heads = ("run", "model", "from", "role", "predicted ms", "measured ms", "error")
    parts = [SERIES, ABOUT_SERIES, *told, markdown_table(heads, lines)]
    return "\n\n".join([*parts, "### Refused", refusals(rows)]) + "\n"


def write(rows: list[Row], filed: Sequence[Filed], out: Path) -> None:
    """Write CSV, page and figure."""
    dated = [(each, blind_since(each)) for each in filed]
    table = [*rows, *(each.row(in_words(day)) for each, day in dated)]
    write_whole(out / "predicted-vs-measured.csv", f"{csv(as_records(table))}\n".encode())
    series, others = ([row for row in rows if (row.basis == CLOSED) == of] for of in (True, False))
    page = HEAD + (markdown(others) if others else "") + ("\n" + series_markdown(series) if series else "")
    page += "\n" + filed_markdown(dated) if filed else ""
    write_whole(out / "predicted-vs-measured.md", page.encode())
    timed = [row for row in rows if is_timed(row) and row.role in ("fit", "held out")]
    drawn = [("hybrid machines" if row.basis == CLOSED else row.machine, row) for row in timed]
    points = [(machine, row.role, row.predicted, row.measured) for machine, row in drawn]
    if not points:
        return
    frame = pl.DataFrame(points, _SCHEMA, orient="row")
    save(rendered(predicted(frame)), out / "figures" / "predicted_vs_measured", ("png",))


_SCHEMA = {"machine": pl.String, "role": pl.String, "predicted": pl.Float64, "measured": pl.Float64}


def is_of_series(file: Path) -> bool:
    """Return whether a table has the columns of `calibrate series`."""
    with file.open(newline="") as stream:
        return {"id", "placement"} <= set(next(reader(stream), ()))


def main() -> None:
    """Read the folders and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="folders with cells.csv, and files of rows")
    parser.add_argument("--out", type=Path, default=Path("studies/pages"), help="folder (default: studies/pages)")
    given = parser.parse_args()
    try:
        filed = [row for source in given.sources if not source.is_dir() for row in read_filed(source)]
        rows = [row for source in given.sources if source.is_dir() for row in rows_of_folder(source)]
    except ConfigError as wrong:
        parser.error(str(wrong))
    write(rows, filed, given.out)
    print(f"{len(rows) + len(filed)} rows in {given.out / 'predicted-vs-measured.csv'}")


def rows_of_folder(folder: Path) -> list[Row]:
    """Predict the runs of a folder. Raises ConfigError for an invalid file."""
    if is_of_series(folder / "cells.csv"):
        return series_rows(folder / "cells.csv")
    evidence = read_folder(folder)
    return [in_short(row) for row in rows_of(evidence, plans_of(evidence))]


if __name__ == "__main__":
    main()
