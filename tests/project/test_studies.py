"""Studies run from end to end at a tiny size: their figures mean nothing, but they cannot rot."""

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.project.test_benchmarks import ROOT, run
from traces.schema import Request
from traces.store import open_trace
from traces.writer import write_trace

BENCHMARKS = ROOT / "benchmarks"
SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"
#: SpecMD (arXiv 2602.03921), Table 2, the percentages as printed.
TABLE_2 = {
    "olmoe-1b-7b": [10.7, 34.7, 17.7, 13.8],
    "mixtral-8x7b": [17.8, 9.8, 25.7, 17.5],
    "phi-3.5-moe": [14.8, -4.3, 44.1, 24.6],
    "qwen1.5-moe-a2.7b": [7.8, 4.3, 18.4, 23.0],
}


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


def test_cache_prior_study_finds_where_it_beats_belady(short: Path, tmp_path: Path) -> None:
    out = tmp_path / "prior.json"
    done = run(BENCHMARKS / "cache_prior_study.py", short, "--step", 20, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["short"]
    assert len(found["crossings"]) == 8
    for row in found["crossings"]:
        assert row["lambda = 0 is standard"] == "yes"
        assert row["Belady"] < row["LRU"]
        assert (row["beats Belady from lambda"] is not None) == (row["lowest with cache_prior"] < row["Belady"])
    lines = [row for row in found["rates"]["E/2"] if row["routing"] == "cache_prior, LRU"]
    assert [row["lambda"] for row in lines if round(100 * row["lambda"]) % 20 == 0] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert lines[0]["J = 2"] == found["crossings"][0]["LRU"]


def test_specmd_table_is_laid_beside_its_replay(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    size = ("--requests", 1, "--prompt", 8, "--decode", 4, "--models", "phi-3.5-moe")
    done = run(BENCHMARKS / "specmd_table2.py", *size, "--out", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    for capacity in ("5%@4", "5%@16"):
        cells = [row for row in document["cells"] if row["capacity"] == capacity]
        assert [round(row["published %"], 1) for row in cells] == TABLE_2["phi-3.5-moe"]
        for row in cells:
            assert row["faster by %"] == pytest.approx(100 * (1 - row["TTFT ms +ls"] / row["TTFT ms"]))
    constant = [line for line in document["agreement"] if line["who"].endswith("always better")]
    assert [(line["signs that agree"], line["rank correlation"]) for line in constant] == [("3 of 4", None)] * 2


def test_published_times_give_the_published_percentages() -> None:
    """The table prints both; one copied wrongly would differ."""
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import specmd_table2 as study\n"
        "print(json.dumps({m: [study._faster(*c) for c in cells] for m, cells in study.PUBLISHED.items()}))"
    )
    done = run("-c", script, BENCHMARKS)
    assert done.returncode == 0, done.stderr
    found = {model: [round(value, 1) for value in values] for model, values in json.loads(done.stdout).items()}
    assert found == TABLE_2


@pytest.mark.long
def test_fidelity_study_sets_counters_beside_quality(tmp_path: Path) -> None:
    """Of eight experts, a swapped rank leaves seven and a pruned token five; without a policy nothing differs."""
    policies = ("--routing", "swap:rank=2,prune:keep=5", "--miss", "drop:keep=2,lowest_bit:bits=16/2")
    done = run(BENCHMARKS / "fidelity_study.py", "--windows", 1, "--tokens", 6, *policies, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "fidelity_study.json").read_text())
    standard, swapped, pruned, dropped, low = document["rows"]
    assert (standard["choice kept"], standard["KL"], standard["perplexity"]) == (1, 0, 0)
    assert (swapped["choice kept"], pruned["choice kept"]) == (7 / 8, 5 / 8)
    assert dropped["dropped"] > 0
    assert low["low precision"] == 1
    assert all(row["KL"] > 0 for row in (swapped, pruned, dropped, low))
    kept = document["correlations"][0]
    assert kept["counter"] == "choice kept"
    assert all(-1 <= value <= 1 for name, value in kept.items() if name != "counter" and value is not None)


@pytest.mark.long
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
