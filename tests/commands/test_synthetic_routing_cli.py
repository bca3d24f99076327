"""Synthetic routing: wherever its figures are shown it is named, and no interval of its generator is given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moereplay.results.read import label_of, routing_of
from moereplay.results.remarks import synthetic_of
from moereplay.results.stored import load
from moereplay.traces.schema import Provenance
from moereplay.traces.store import open_trace
from moereplay.traces.summary import synthetic, synthetic_parts
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded

SAID = "routing is synthetic (markov, reuse 0.4): hit rates are an assumption"
LENGTH = ("--requests", "12", "--prompt-tokens", "2", "--decode-tokens", "6")


def said(*arguments: object) -> str:
    ended = moereplay(*map(str, arguments))
    assert ended.returncode == 0, ended.stderr
    return unfolded(ended.stdout)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "s.zarr"
    said("synthesise", "--reuse", "0.4", "--no-logits", *LENGTH, "--out", path)
    return path


@pytest.fixture(scope="module")
def results(trace: Path) -> Path:
    folder = trace.parent / "out"
    grid = ("--eviction", "lru,fifo", "--capacity", "25%", "--passes", "token", "--engine", "reference", "--workers", 1)
    shown = said("replay", trace, *grid, "--out", folder)
    assert SAID in shown and "±" not in shown and "(95" not in shown
    return folder


@pytest.mark.slow
def test_a_trace_made_of_synthetic_ones_is_still_synthetic(trace: Path, tmp_path: Path):
    said("export", trace, "--format", "csv", "--out", tmp_path / "s.csv")
    said("export", trace, "--format", "hf", "--licence", "mit", "--out", tmp_path / "hf")
    said("import", tmp_path / "s.csv", "--model", "olmoe-1b-7b", "--out", tmp_path / "csv.zarr")
    said("import", tmp_path / "hf", "--out", tmp_path / "hf.zarr")
    said("traces", "slice", trace, "--requests", "0:2", "--out", tmp_path / "part.zarr")
    said("traces", "merge", trace, tmp_path / "part.zarr", "--out", tmp_path / "both.zarr")
    said("traces", "append", tmp_path / "both.zarr", tmp_path / "part.zarr")
    said("traces", "slice", tmp_path / "both.zarr", "--requests", "0:2", "--out", tmp_path / "again.zarr")
    for path in (trace, *sorted(tmp_path.glob("*.zarr"))):
        assert synthetic(open_trace(path).header.provenance) == "markov, reuse 0.4", path
    assert SAID in said("inspect", tmp_path / "csv.zarr")


def test_parts_are_named_alike_however_traces_are_merged():
    made = [Provenance(synthetic=text) for text in ("zipf, exponent 1", "markov, reuse 0.3")]
    mixed = [*made, Provenance(model="real")]
    in_steps = [Provenance(synthetic=synthetic_parts(mixed[:2])), mixed[2]]
    assert synthetic_parts(mixed) == synthetic_parts(in_steps) == "markov, reuse 0.3; zipf, exponent 1; recorded"
    assert synthetic_parts([Provenance(model="real"), Provenance()]) == ""


@pytest.mark.slow
def test_every_table_says_it_and_has_no_interval(trace: Path, results: Path):
    for shown in (said("sweep", "show", results), said("sweep", "compare", results, "lru")):
        assert SAID in shown and re.search(r"± ?\d", shown) is None
    (row,) = [json.loads(line) for line in said("sweep", "compare", results, "lru", "--json").splitlines()]
    assert row["half_width"] is None and row["better"] == "can't tell" and row["difference"]
    for verb in (("curve", trace, "--eviction", "lru"), ("bounds", trace, "--capacity", "25%", "--workers", 1)):
        assert SAID in said(*verb)


@pytest.mark.slow
def test_a_report_says_it_and_has_no_interval(results: Path):
    said("report", results, "--out", results / "page.html")
    page = (results / "page.html").read_text()
    assert SAID in page and '"interval":null' in page and '"low":' not in page


@pytest.mark.slow
def test_results_of_earlier_versions_say_it_by_the_name_of_the_model(results: Path):
    assert synthetic_of({"model": "synthetic-zipf"}) == "zipf"
    assert synthetic_of({"model": "olmoe-1b-7b", "synthetic": None}) == ""
    frame = load(results)
    assert label_of(frame) == "SIMULATED, synthetic routing" and routing_of(frame) == [SAID]
