"""Studies run from end to end at a tiny size: their figures mean nothing, but they cannot rot."""

import json
from pathlib import Path
from statistics import mean

import pytest

from moereplay import read_results
from moereplay.traces.schema import Request
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.kit.quality_rows import changed, quality_frame, written
from tests.project.test_benchmarks import ROOT, run

BENCHMARKS = ROOT / "benchmarks"
SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The first tokens of the sample."""
    sample = open_trace(SAMPLE)
    whole = sample.request(0)
    rows = slice(0, 32)
    weights, logits = whole.weights, whole.logits
    assert weights is not None
    assert logits is not None
    look = tuple(each[rows] for each in whole.lookahead)
    part = Request(whole.chosen[rows], 16, weights[rows], logits[rows], look)
    write_trace(tmp_path / "short.zarr", sample.header, [part])
    return tmp_path / "short.zarr"


def test_collisions_are_replayed_under_every_reading(short: Path, tmp_path: Path) -> None:
    sweep = ("sweep", "run", BENCHMARKS / "specmd_collisions.toml", "--set", f'traces=["{short}"]', "--workers", 1)
    done = run("-m", "moereplay", *sweep, "--out", tmp_path / "out", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = read_results(tmp_path / "out").to_dicts()
    assert (
        len({(row["platform"], row["contract"], row["miss"], row["prefetch"], row["prefetch_at"]) for row in rows})
        == 24
    )
    assert len(rows) == 24 * 7 and all(0 <= row["collisions"] <= row["misses"] for row in rows)


def test_a_trace_takes_the_place_of_the_models_of_table_2(short: Path, tmp_path: Path) -> None:
    done = run(BENCHMARKS / "specmd_table2.py", "--trace", short, "--out", tmp_path / "table.json")
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert [(row["preset"], row["published ms"]) for row in cells[:2]] == [("specmd-1", 3076.8), ("specmd-2", 2257.2)]


def test_specmd_table_is_laid_beside_its_replay(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    size = ("--requests", 1, "--prompt", 8, "--decode", 4, "--models", "phi-3.5-moe")
    done = run(BENCHMARKS / "specmd_table2.py", *size, "--out", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    for capacity in ("5%@4", "5%@16"):
        cells = [row for row in document["cells"] if row["capacity"] == capacity]
        assert [round(row["published %"], 1) for row in cells] == [14.8, -4.3, 44.1, 24.6]
        for row in cells:
            assert row["faster by %"] == pytest.approx(100 * (1 - row["TTFT ms +ls"] / row["TTFT ms"]))
    constant = [line for line in document["agreement"] if line["who"].endswith("always better")]
    assert [(line["signs that agree"], line["rank correlation"]) for line in constant] == [("3 of 4", None)] * 2


def test_the_closed_form_of_table_2_gives_what_the_page_cites() -> None:
    done = run(BENCHMARKS / "specmd_closed_form.py")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "papers.md").read_text()
    for figure in ("15.2 %", "10.3 %", "reductions: 0.34; of random numbers 0.40", "4 of 16", "3791.1 ms"):
        assert figure in done.stdout
    assert "15.2 %" in page and "10.3 %" in page and "R² = .34" in page and "3791.1 ms" in page


def test_a_ranking_with_and_without_decisions(short: Path) -> None:
    names = ("--platforms", "h100-pcie5", "--capacities", "50%", "--evictions", "lru,lfru", "--prefetches", "none")
    done = run(BENCHMARKS / "decision_cost.py", short, *names)
    assert done.returncode == 0, done.stderr
    assert "of 1 rankings" in done.stdout and "h100-pcie5" in done.stdout


def test_readings_are_scored_over_the_same_cells(tmp_path: Path) -> None:
    size = ("--requests", 1, "--prompt", 4, "--decode", 1, "--models", "phi-3.5-moe")
    done = run(BENCHMARKS / "specmd_readings.py", *size, "--out", tmp_path / "readings.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "readings.json").read_text())
    *ranking, constant = document["ranking"]
    assert len(ranking) == 3 * 2**6 and len(document["cells"]) == 4 * len(ranking)
    assert (constant["LS"], constant["signs"], constant["rank"]) == ("constant", 3, None)
    settings = {name: value for name, value in ranking[0].items() if name not in ("signs", "rank", "off by")}
    own = [row for row in document["cells"] if settings.items() <= row.items()]
    assert ranking[0]["off by"] == pytest.approx(mean(abs(row["faster by %"] - row["published %"]) for row in own))


def test_forecast_study_prints_errors_and_refusals(tmp_path: Path) -> None:
    """Twelve policy sets made by hand, three kinds of policies; two of the sets drop something."""
    changes = {at: changed(0.02 * at, 0.02 * at, 0.01 * (at % 5 == 0), 0.1 * at, 0) for at in range(1, 13)}
    settings = ("cache_prior:lam=0.{:02}1", "cumulative:p=0.{:02}1", "max_rank:m=1{}")
    sets = {f"set {at}": (change, {"routing": settings[at % 3].format(at)}) for at, change in changes.items()}
    losses = {name: lambda change: 0.1 * change.variation**2 for name in ("nll", "kl")}
    folder = written(tmp_path, quality_frame(sets, losses, noise=1e-5))
    done = run(BENCHMARKS / "forecast_study.py", folder, "--new", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "forecast_study.json").read_text())
    assert {name: each["power"] for name, each in document["forecasts"].items()} == {"nll": 2, "kl": 2}
    assert [row["inside"] for row in document["new"]["kl"]] == ["yes"] * 12
    answers = {row["live points have"]: row["answer"] for row in document["refused"]}
    assert answers["none of dropping"].startswith("dropping (mass_dropped / mass) is 0.01, and no live point has any")


@pytest.mark.long
def test_quantisers_are_laid_beside_one_another_by_width(tmp_path: Path) -> None:
    few = ("--experts", 1, "--inner", 64, "--windows", 1, "--names", "affine")
    done = run(BENCHMARKS / "quantisers.py", *few, "--out", tmp_path / "q.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "q.json").read_text())
    for part, error in (("experts", "output normal"), ("miniature", "KL")):
        rows = document[part]
        assert [row["bits"] for row in rows] == [8, 4, 3, 2]
        assert [row[error] for row in rows] == sorted(row[error] for row in rows)
        assert all(row["bits"] < row["bits stored"] <= row["bits"] + 1 for row in rows)


@pytest.mark.longest
def test_quality_at_size_measures_every_set_alone_and_together(tmp_path: Path) -> None:
    """One layer of OLMoE's shape, two texts of six tokens, of which the last is not read."""
    few = ("--layers", 1, "--prompt", 4, "--tokens", 2, "--texts", 2)
    done = run(BENCHMARKS / "quality_at_size.py", *few, "--out", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [(row["set"], row["together"]) for row in rows[:4]] == [
        ("unmodified", 1),
        ("unmodified", 2),
        ("cache_prior", 1),
        ("cache_prior", 2),
    ]
    assert all(row["tokens"] == 10 and row["ms per token"] > 0 and row["most GB"] > 1.2 for row in rows)


@pytest.mark.longest
def test_coverage_study_finds_intervals_right_and_seeds_alike(tmp_path: Path) -> None:
    """Draws are seeded, so that the shares are always the same; two standard errors of 95 % of 200 are 3 points."""
    few = ("--requests", 30, "--trials", 200, "--figures", "hit_rate", "tokens_per_s", "--replayed", 16, "--traces", 16)
    lengths = ("--lengths", "even", "lognormal, rate by length")
    done = run(BENCHMARKS / "coverage_study.py", *few, *lengths, "--out", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "c.json").read_text())
    assert len(document["rows"]) == 4
    for row in document["rows"]:
        assert 0.92 <= row["interval"] <= 0.98 and 0.92 <= row["difference"] <= 0.98, row
    assert sum(row["pairs"] for row in document["seeds"]) == 256
    for figure in ("hit_rate", "collisions_per_miss", "tpot_ms", "tokens_per_s"):
        assert mean(row[figure] for row in document["seeds"]) <= 0.05
