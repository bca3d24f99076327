"""Studies run from end to end at a tiny size: their figures mean nothing, but they cannot rot."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from evidence.draft_runs import RefusedError
from evidence.draft_series import base_of, chances, drafts_of, study, summary
from moereplay import read_results
from moereplay.traces.schema import Request
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.kit.command import moereplay_here
from tests.kit.quality_rows import changed, quality_frame, written
from tests.project.test_benchmarks import ROOT, run

STUDIES = ROOT / "studies"
SAMPLE = ROOT / "traces" / "samples" / "miniature.zarr"


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The first tokens of the sample."""
    sample = open_trace(SAMPLE)
    whole = sample.request(0)
    rows = slice(0, 16)
    weights, logits = whole.weights, whole.logits
    assert weights is not None
    assert logits is not None
    look = tuple(each[rows] for each in whole.lookahead)
    part = Request(whole.chosen[rows], 8, weights[rows], logits[rows], look)
    write_trace(tmp_path / "short.zarr", sample.header, [part])
    return tmp_path / "short.zarr"


@pytest.mark.long
def test_collisions_are_replayed_under_every_reading(short: Path, tmp_path: Path) -> None:
    sweep = ("sweep", "run", STUDIES / "specmd_collisions.toml", "--set", f'traces=["{short}"]', "--workers", 1)
    done = moereplay_here(*sweep, "--out", tmp_path / "out", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = read_results(tmp_path / "out").to_dicts()
    assert (
        len({(row["platform"], row["contract"], row["miss"], row["prefetch"], row["prefetch_at"]) for row in rows})
        == 24
    )
    assert len(rows) == 24 * 7 and all(0 <= row["collisions"] <= row["misses"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("study", "lookahead", "ids"), [("least_stale", 5 * 2 * 5, 5 * 2 * 4), ("score_prefetch", 140, 50)]
)
def test_a_study_of_a_trace_leaves_out_what_the_trace_has_no_data_for(
    study: str, lookahead: int, ids: int, short: Path, tmp_path: Path
) -> None:
    """Five capacities by two policies or links by the predictors; without look-ahead, none and the oracles are left."""
    whole = open_trace(short)
    header = whole.header.model_copy(update={"lookahead_depth": 0})
    write_trace(tmp_path / "ids.zarr", header, [Request(whole.request(0).chosen, 8)])
    for trace, expected in ((short, lookahead), (tmp_path / "ids.zarr", ids)):
        out = tmp_path / f"of-{trace.stem}"
        sweep = ("sweep", "run", STUDIES / f"{study}.toml", "--keep-going", "--set", f'traces=["{trace}"]')
        done = moereplay_here(*sweep, "--workers", 1, "--out", out, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        rows = read_results(out)
        assert len(rows) == expected
        found = {row["prefetch"].split(":")[0] for row in rows.to_dicts()}
        assert found >= {"none", "oracle"} and bool(found & {"top_k", "score"}) == (trace == short)


@pytest.mark.long
def test_a_trace_takes_the_place_of_the_models_of_table_2(short: Path, tmp_path: Path) -> None:
    done = run(STUDIES / "specmd_table2.py", "--trace", short, "--out", tmp_path / "table.json")
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert [(row["preset"], row["published ms"]) for row in cells[:2]] == [("specmd-1", 3076.8), ("specmd-2", 2257.2)]


@pytest.mark.long
def test_specmd_table_is_laid_beside_its_replay(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    size = ("--requests", 1, "--prompt", 8, "--decode", 4, "--models", "phi-3.5-moe")
    done = run(STUDIES / "specmd_table2.py", *size, "--out", out)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    for capacity in ("5%@4", "5%@16"):
        cells = [row for row in document["cells"] if row["capacity"] == capacity]
        assert [round(row["published %"], 1) for row in cells] == [14.8, -4.3, 44.1, 24.6]
        for row in cells:
            assert row["faster by %"] == pytest.approx(100 * (1 - row["TTFT ms +ls"] / row["TTFT ms"]))
    constant = [line for line in document["agreement"] if line["who"].endswith("always better")]
    assert [(line["signs that agree"], line["rank correlation"]) for line in constant] == [("3 of 4", None)] * 2


@pytest.mark.slow
def test_the_closed_form_of_table_2_gives_what_the_page_cites() -> None:
    done = run(STUDIES / "specmd_closed_form.py")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "studies" / "pages" / "papers.md").read_text()
    for figure in ("15.2 %", "10.3 %", "reductions: 0.34; of random numbers 0.40", "4 of 16", "3791.1 ms"):
        assert figure in done.stdout
    assert "15.2 %" in page and "10.3 %" in page and "R² = .34" in page and "3791.1 ms" in page


@pytest.mark.long
def test_a_ranking_with_and_without_decisions(short: Path) -> None:
    names = ("--platforms", "h100-pcie5", "--capacities", "50%", "--evictions", "lru,lfru", "--prefetches", "none")
    done = run(STUDIES / "decision_cost.py", short, *names)
    assert done.returncode == 0, done.stderr
    assert "of 1 rankings" in done.stdout and "h100-pcie5" in done.stdout


@pytest.mark.long
def test_readings_are_scored_over_the_same_cells(tmp_path: Path) -> None:
    size = ("--requests", 1, "--prompt", 4, "--decode", 1, "--models", "phi-3.5-moe")
    done = run(STUDIES / "specmd_table2.py", "--readings", *size, "--out", tmp_path / "readings.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "readings.json").read_text())
    *ranking, constant = document["ranking"]
    assert len(ranking) == 3 * 2**6 and len(document["cells"]) == 4 * len(ranking)
    assert (constant["LS"], constant["signs"], constant["rank"]) == ("constant", 3, None)
    settings = {name: value for name, value in ranking[0].items() if name not in ("signs", "rank", "off by")}
    own = [row for row in document["cells"] if settings.items() <= row.items()]
    assert ranking[0]["off by"] == pytest.approx(mean(abs(row["faster by %"] - row["published %"]) for row in own))


@pytest.mark.slow
def test_forecast_study_prints_errors_and_refusals(tmp_path: Path) -> None:
    """Twelve policy sets made by hand, three kinds of policies; two of the sets drop something."""
    changes = {at: changed(0.02 * at, 0.02 * at, 0.01 * (at % 5 == 0), 0.1 * at, 0) for at in range(1, 13)}
    settings = ("cache_prior:lam=0.{:02}1", "cumulative:p=0.{:02}1", "max_rank:m=1{}")
    sets = {f"set {at}": (change, {"routing": settings[at % 3].format(at)}) for at, change in changes.items()}
    losses = {name: lambda change: 0.1 * change.variation**2 for name in ("nll", "kl")}
    folder = written(tmp_path, quality_frame(sets, losses, noise=1e-5))
    done = run(STUDIES / "forecast_study.py", folder, "--new", folder)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "forecast_study.json").read_text())
    assert {name: each["power"] for name, each in document["forecasts"].items()} == {"nll": 2, "kl": 2}
    assert [row["inside"] for row in document["new"]["kl"]] == ["yes"] * 12
    answers = {row["live points have"]: row["answer"] for row in document["refused"]}
    assert answers["none of dropping"].startswith("dropping (mass_dropped / mass) is 0.01, and no live point has any")


@pytest.mark.long
def test_quantisers_are_laid_beside_one_another_by_width(tmp_path: Path) -> None:
    few = ("--experts", 1, "--inner", 64, "--windows", 1, "--names", "affine")
    done = run(STUDIES / "quantisers.py", *few, "--out", tmp_path / "q.json")
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
    done = run(STUDIES / "quality_at_size.py", *few, "--out", tmp_path / "s.json")
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
    done = run(STUDIES / "coverage_study.py", *few, *lengths, "--out", tmp_path / "c.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "c.json").read_text())
    assert len(document["rows"]) == 4
    for row in document["rows"]:
        assert 0.92 <= row["interval"] <= 0.98 and 0.92 <= row["difference"] <= 0.98, row
    assert sum(row["pairs"] for row in document["seeds"]) == 256
    for figure in ("hit_rate", "collisions_per_miss", "tpot_ms", "tokens_per_s"):
        assert mean(row[figure] for row in document["seeds"]) <= 0.05


#: A CPU that computes every expert at a published rate; other columns are empty.
PLAIN = {"id": "a", "series": "s", "engine": "llama.cpp b1", "model": "a model", "quant": "q", "draft": "none"} | {
    "moe_layers": "4", "experts": "16", "top_k": "2", "expert_mib": "2", "gpu": "RTX 3090", "ram_bw_gbs": "50",
    "ram_bw_kind": "measured", "pcie": "4.0 x16", "placement": "cpu_layers", "cpu_moe_layers": "4", "on_miss": "cpu",
    "concurrency": "1", "decode_tok_s": "500",
}  # fmt: skip


def plain(**said: str) -> defaultdict[str, str]:
    return defaultdict(str, PLAIN | said)


def test_drafts_and_requests_are_predicted_from_the_run_without_them() -> None:
    # Of the 2 ms of a token the CPU takes c for 4 layers of 2 experts of 2 MiB at 50 GB/s, each with 1 us to start; the
    # rest is the step s. A pass of two rows that are both kept, or of two requests, yields two tokens in 2 c + s where
    # rows are computed apart, and in 2 c + 1.1 s where the second adds a tenth.
    rows = [
        plain(),
        plain(id="b", draft="mtp", draft_n="1", accept_pct="100", decode_tok_s="900"),
        plain(id="c", concurrency="2", decode_tok_s="400"),
    ]
    judged, refused = study(rows)
    assert [each.run["id"] for each in judged] == ["b", "c"] and not refused
    c = 4 * 2 * (2 * 2**20 / 50 + 1000)
    s = 2e6 - c
    for each in judged:
        assert each.fit.step == pytest.approx(s, rel=1e-4) and each.fit.factor == 1
        assert each.predicted["rows apart"] == pytest.approx(2 * 2e6 / (2 * c + s), rel=1e-4)
        assert each.predicted["and a tenth"] == pytest.approx(2 * 2e6 / (2 * c + 1.1 * s), rel=1e-4)
        assert each.predicted["rows apart"] < each.predicted["union"] < 2  # rows share some experts, not all
    assert judged[0].measured == 900 / 500
    right = [summary(these, "rows apart")[0] for these in (judged, judged[:1])]
    assert right == ["1 of 2", "1 of 1"]  # both are said to gain, and two requests are slower


def test_an_unpublished_rate_is_fitted_in_place_of_the_step() -> None:
    rows = [plain(ram_bw_gbs=""), plain(id="b", ram_bw_gbs="", draft="mtp", draft_n="1", accept_pct="100")]
    judged, _ = study([rows[0], rows[1] | {"decode_tok_s": "600"}])
    assert judged[0].fit.step is None and judged[0].fit.factor > 1
    assert judged[0].predicted["rows apart"] < 1.3  # nearly all of the time doubles with the rows


def test_acceptance_is_that_of_the_run_or_of_its_source() -> None:
    assert chances("80/60", 2) == (0.8, 0.75)
    (even,) = chances("58.5", 3)
    assert even + even**2 + even**3 == pytest.approx(3 * 0.585, abs=0.01)
    first, drafted = plain(), plain(id="b", draft="mtp", draft_n="2", accept_pct="72")
    blank = plain(id="d", draft="mtp", draft_n="2", engine="another")
    assert drafts_of(drafted, first, [first, drafted]) == ("2:accept=0.8", "the run")
    assert drafts_of(blank, first, [first, drafted, blank]) == ("2:accept=0.8", "its source")
    assert drafts_of(blank | {"model": "Qwen3.6-35B-A3B"}, first, []) == ("2:accept=qwen3.6-mtp", "qwen3.6-mtp")
    for row, why in (
        (blank, "acceptance"),
        (drafted | {"draft_n": "gate 0-3"}, "varies"),
        (blank | {"draft": "lookup"}, "repeats"),
    ):
        with pytest.raises(RefusedError, match=why):
            drafts_of(row, first, [row])
    with pytest.raises(RefusedError, match="no run of the series"):
        base_of(drafted, [drafted])


HYBRID = ROOT.parent / "shared" / "data" / "hybrid"


@pytest.mark.long
@pytest.mark.skipif(not HYBRID.is_dir(), reason="measured runs of others are not in this repository")
def test_a_measured_series_is_predicted() -> None:
    done = run("-m", "evidence.draft_series", HYBRID, "--series", "coli-mtp-cpu", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (
        "| and a tenth | 3 of 3 |" in done.stdout and "coli-mtp-cpu-05 | a number of drafts that varies" in done.stdout
    )
