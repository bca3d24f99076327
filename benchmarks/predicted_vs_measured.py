"""Predict measured runs of other people's machines and write the table, its page and a figure (`make evidence`).

    python -m benchmarks.predicted_vs_measured FOLDER [FOLDER ...] --out docs

Each FOLDER has `cells.csv`, a row per run (docs/logs.md). What is fitted on which runs is in PLANS; every device with
runs of several models is also predicted model by model from the runs of its other models.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import polars as pl

from moereplay.analysis.figures.panels import rendered, save
from moereplay.analysis.figures.real_runs import predicted
from moereplay.analysis.tables import csv
from moereplay.calibration.comparison import Plan, Row, as_records, leave_one_model_out, markdown, rows_of
from moereplay.calibration.files import Evidence, read_folder
from moereplay.simulator.platforms import platform
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

Every run of the evidence that a calibration predicts, beside what was measured; [evidence.md](evidence.md) says what
follows from it. `make evidence RUNS=folder` writes this page, [its table](predicted-vs-measured.csv) with the source of
every run, and the figure. The runs are other people's and not in this repository.

A time per token is that of the median token where a log was published, else the mean. The error is predicted /
measured - 1. *fit*: the figures were fitted on this run; *held out*: they were not; *preset*: no figure was fitted. A
run whose time is not the machine's (throttled, paging) is predicted and does not count.

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


def write(rows: list[Row], out: Path) -> None:
    """Write CSV, page and figure."""
    write_whole(out / "predicted-vs-measured.csv", f"{csv(as_records(rows))}\n".encode())
    write_whole(out / "predicted-vs-measured.md", (HEAD + markdown(rows)).encode())
    timed = [row for row in rows if row.timed and row.role in ("fit", "held out")]
    frame = pl.DataFrame([(row.machine, row.role, row.predicted, row.measured) for row in timed], _SCHEMA, orient="row")
    save(rendered(predicted(frame)), out / "figures" / "predicted_vs_measured", ("png",))


_SCHEMA = {"machine": pl.String, "role": pl.String, "predicted": pl.Float64, "measured": pl.Float64}


def main() -> None:
    """Read the folders and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="folders with cells.csv")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder to write to (default: docs)")
    given = parser.parse_args()
    rows = []
    for folder in given.folders:
        evidence = read_folder(folder)
        rows += map(in_short, rows_of(evidence, plans_of(evidence)))
    write(rows, given.out)
    print(f"{len(rows)} rows in {given.out / 'predicted-vs-measured.csv'}")


if __name__ == "__main__":
    main()
