"""Reading results takes memory that hardly grows with the number of configurations, and a page has a bounded number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import polars as pl
import pytest

from moereplay.analysis.metrics import measured
from moereplay.analysis.report.cases import MOST_RUNS, MOST_SERIES
from moereplay.results import parts, stored
from moereplay.results.parts import TABLES, Part, frame_bytes
from moereplay.results.stored import REQUESTS, load, sources
from moereplay.sweeps.grid import expand, run_grid
from moereplay.sweeps.parts import keep, merge
from moereplay.sweeps.store import Folder
from moereplay.traces.files import SAMPLE
from moereplay.traces.store import open_trace
from tests.kit.command import ROOT, moereplay_here
from tests.kit.every import every

PER_PART = 100
FEW, MANY = 800, 2800
#: Bytes that a further configuration may take: a sixth of what one took when all of its rows were objects.
EACH = 24_000


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pl.DataFrame]:
    """The tables of four replays."""
    folder, trace = tmp_path_factory.mktemp("four"), open_trace(SAMPLE)
    configs = expand({"capacity": "10%,25%", "eviction": "lru,fifo"}, {"passes": "token"})
    for _ in keep(folder, trace, configs, run_grid(trace, configs, by_layer=True), "compiled"):
        pass
    merged = merge([Folder(folder)], Folder(folder / "merged")).where
    return {name: pl.read_parquet(f"{merged}/{name}.parquet") for name in TABLES}


def made(folder: Path, tables: dict[str, pl.DataFrame], many: int) -> Path:
    """Write so many configurations, which differ in the seed: the rows of the replays again and again."""
    known = tables["configurations"]["identity"].to_list()
    origin = {"sweep_version": 1, "traces": {tables["configurations"]["trace"][0]: str(SAMPLE)}, "platforms": {}}
    for first in range(0, many, PER_PART):
        numbers = range(first, min(first + PER_PART, many))
        names = pl.DataFrame({"identity": [known[at % len(known)] for at in numbers], "number": numbers})
        names = names.with_columns(pl.Series("new", [sha256(b"%d" % at).hexdigest()[:16] for at in numbers]))
        part = {name: _renamed(table, names) for name, table in tables.items() if name != "bounds"}
        part["configurations"] = part["configurations"].with_columns(pl.col("number").alias("seed"), bound=None)
        files = {name: frame_bytes(table.select(tables[name].columns)) for name, table in part.items()}
        kinds = ("configuration", "requests", "request_layers")
        Folder(folder).store(Part(files, dict.fromkeys(kinds, sorted(names["new"]))), origin)
    return folder


def _renamed(table: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    joined = names.join(table, on="identity", maintain_order="left")
    return joined.with_columns(pl.col("new").alias("identity"))


@pytest.fixture(scope="module")
def folders(tables: dict[str, pl.DataFrame], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {many: made(tmp_path_factory.mktemp("sweep"), tables, many) for many in (FEW, MANY)}


#: A process counts the memory of the one that starts it, which is small here.
MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
print(used.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak(*arguments: object) -> int:
    """Return the largest resident memory of a command, bytes."""
    command = [sys.executable, "-c", MEASURED, sys.executable, "-m", "moereplay", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "POLARS_MAX_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout) * 1024


@pytest.mark.long
@every("verb", [("sweep", "show"), ("sweep", "merge"), ("report",)])
def test_a_further_configuration_takes_little_memory(
    folders: dict[int, Path], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    def spent(many: int) -> int:
        out = {"merge": ("--out", tmp_path / f"merged-{many}"), "report": ("--out", tmp_path / f"{many}.html")}
        return peak(*verb, folders[many], *out.get(verb[-1], ()))

    each = (spent(MANY) - spent(FEW)) / (MANY - FEW)
    assert each < EACH


@pytest.mark.slow
def test_a_page_has_the_first_configurations_and_those_that_figures_draw(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    """It says how many it leaves out; the answer is that of all."""
    page = tmp_path / "page.html"
    assert (ended := moereplay_here("report", folders[FEW], "--out", page)).returncode == 0, ended.stderr
    text = page.read_text("utf-8")
    data = json.loads(text.partition('id="moereplay-data">')[2].partition("</script>")[0])
    assert MOST_RUNS <= len(data["runs"]) <= MOST_RUNS + 2 * MOST_SERIES
    assert data["left_out"] == FEW - len(data["runs"])
    assert f"{data['left_out']} of {FEW} configurations are not on this page" in text
    assert data["best"]["identity"] in {run["identity"] for run in data["runs"]}
    fastest = measured(load(folders[FEW], (), REQUESTS))["tokens_per_s"].max()
    assert data["best"]["value"] == fastest == max(run["figures"]["tokens_per_s"] for run in data["runs"])


def test_a_table_in_slices_is_the_whole_table(
    tables: dict[str, pl.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows, those of equal identities together, once each; merged, they are the same bytes."""
    monkeypatch.setattr(parts, "ROWS_PER_GROUP", 300)
    folder = made(tmp_path / "some", tables, 120)
    whole, once = load(folder), merge([Folder(folder)], Folder(tmp_path / "whole"))
    monkeypatch.setattr(stored, "MOST_VALUES", 20_000)
    frames = list(stored.frames_of(sources(folder), "layers"))
    assert len(frames) == 16 and sum(map(len, frames)) == whole["per_layer"].list.len().sum()
    assert load(folder).equals(whole)
    assert merge([Folder(folder), Folder(folder)], Folder(tmp_path / "slices")).where.endswith(once.where[-21:])
