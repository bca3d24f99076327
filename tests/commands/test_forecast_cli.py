"""`moereplay forecast`, and `sweep show` and `plot` with it: live points made by hand, replays of the sample."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from moereplay.analysis.forecast_fit import Change
from moereplay.results.quality import FILE, UNMODIFIED
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Request
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.commands.test_cli import SAMPLE
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.quality_rows import changed, quality_frame, written
from tests.kit.tiny_runs import written_to

#: Of the sets that are as if they had been run live, four strengths each; none drops anything.
POLICIES = ("cache_prior:lam=0.{}", "cumulative:p=0.{}", "max_rank:m=1{}")
REPLAYED = ({}, {"routing": "cache_prior:lam=0.1"}, {"routing": "cache_prior:lam=0.5"}, {"miss": "drop:keep=6"})


def loss(change: Change) -> float:
    return 0.1 * change.variation


@pytest.fixture(scope="module")
def quality(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of live points of a truth of our choice."""
    changes = [changed(0.06 * at, 0.07 * at, 0, 0.5 * at, 0) for at in range(1, 13)]
    settings = [{"routing": POLICIES[at % 3].format(at // 3 + 1)} for at in range(12)]
    sets = {each["routing"]: (change, each) for change, each in zip(changes, settings, strict=True)}
    return written(tmp_path_factory.mktemp("quality"), quality_frame(sets, {"nll": loss, "kl": loss}, noise=0.0002))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of replays of the first tokens of the sample."""
    sample, folder = open_trace(SAMPLE), tmp_path_factory.mktemp("sweep")
    whole, rows = sample.request(0), slice(0, 24)
    assert whole.weights is not None
    assert whole.logits is not None
    look = tuple(each[rows] for each in whole.lookahead)
    part = Request(whole.chosen[rows], 16, whole.weights[rows], whole.logits[rows], look)
    write_trace(folder / "short.zarr", sample.header, [part])
    trace = open_trace(folder / "short.zarr")
    results = [replay(trace, configure(capacity="25%", **each), engine="reference") for each in REPLAYED]
    written_to(folder / "results", results, [None] * len(results))
    return folder / "results"


def shown(*words: object) -> str:
    ended = moereplay(*words)
    assert ended.returncode == 0, ended.stderr
    return unfolded(ended.stdout)


def refused(*words: object) -> str:
    ended = moereplay(*words)
    assert ended.returncode == 2, ended.stdout
    return unfolded(ended.stderr)


def test_a_forecast_says_what_it_rests_on_and_how_good_it_is(quality: Path):
    out = shown("forecast", quality)
    assert out.startswith("FORECAST: miniature, float32; perplexity:text.txt, nll; from 12 live points of 3 policies")
    for policy in ("cache_prior", "cumulative", "max_rank", "all"):
        assert f"\n{policy} " in out
    assert "intervals of 90%:" in out


def test_a_forecast_as_json_has_every_point(quality: Path):
    document = json.loads(shown("forecast", quality, "--measure", "kl", "--json"))["forecast"]
    assert (document["model"], document["measure"], len(document["points"])) == ("miniature", "kl", 12)
    assert sum(each["share of the loss"] for each in document["figures"]) == pytest.approx(1)
    assert all(each["low"] <= each["forecast"] <= each["high"] for each in document["points"])


def test_a_folder_without_quality_is_refused(sweep: Path):
    assert "no results of `quality` in" in refused("forecast", sweep)


def test_sweep_show_forecasts_every_configuration_that_it_can(sweep: Path, quality: Path):
    lines = shown("sweep", "show", sweep, "--quality", quality, "--by", "tpot_ms", "--json").splitlines()
    rows = {(row["routing"], row["miss"]): row["forecast"] for row in map(json.loads, lines)}
    assert rows["standard", "fetch"] == {"loss": 0, "low": 0, "high": 0}
    assert rows["standard", "drop:keep=6"] == {"loss": None, "low": None, "high": None}
    slight = rows["cache_prior:lam=0.5", "fetch"]
    assert 0 < slight["loss"] < slight["high"]


def test_sweep_show_says_what_is_refused_and_why(sweep: Path, quality: Path):
    out = shown("sweep", "show", sweep, "--quality", quality)
    assert "FORECAST: rise of perplexity from 12 live points of perplexity:text.txt, 90% intervals" in out
    assert "no FORECAST of 1 configuration: no dropping was measured (as here: dropping (mass_dropped / mass)" in out
    assert re.search(r"forecast loss 0.00%; low 0.00%|forecast +low", out)


def test_max_loss_keeps_what_is_within_it_to_the_end_of_its_interval(sweep: Path, quality: Path):
    within = ("sweep", "show", sweep, "--quality", quality, "--by", "tpot_ms", "--json", "--max-loss")
    rows = [json.loads(line) for line in shown(*within, "3%").splitlines()]
    assert len(rows) >= 2
    assert all(row["forecast"]["high"] <= 0.03 for row in rows)
    assert [row["tpot_ms"] for row in rows] == sorted(row["tpot_ms"] for row in rows)
    (alone,) = map(json.loads, shown(*within, "0").splitlines())
    assert alone["forecast"] == {"loss": 0, "low": 0, "high": 0}


def test_a_loss_in_nats_is_one_of_perplexity(sweep: Path, quality: Path):
    asked = ("sweep", "show", sweep, "--quality", quality, "--max-loss")
    assert "within 0.0202, interval included" in shown(*asked, "0.02")
    assert "within 0.02, interval included" in shown(*asked, "2%")


@every(
    "words, message",
    [
        (("--max-loss", "1%"), "--max-loss requires --quality FOLDER"),
        (
            ("--quality", "QUALITY", "--max-loss", "some"),
            "invalid --max-loss 'some': expected a share of perplexity such as 1%",
        ),
        (("--quality", "QUALITY", "--max-loss", "-1%"), "invalid --max-loss '-1%'"),
    ],
)
def test_what_cannot_be_asked_is_refused(sweep: Path, quality: Path, words: tuple[str, ...], message: str):
    typed = [str(quality) if word == "QUALITY" else word for word in words]
    assert message in refused("sweep", "show", sweep, *typed)


def test_nothing_within_the_loss_is_said_with_the_smallest(sweep: Path, quality: Path):
    asked = ("--where", "routing=cache_prior:lam=0.5", "--quality", quality, "--max-loss", "0.001%")
    said = refused("sweep", "show", sweep, *asked)
    assert "no configuration has a FORECAST loss within 0.001%, including its interval: the smallest is 2.586%" in said


def test_means_of_groups_are_of_what_is_within_the_loss(sweep: Path, quality: Path):
    out = shown("sweep", "show", sweep, "--quality", quality, "--max-loss", "3%", "--group-by", "miss", "--csv")
    assert "drop" not in out


def test_fronts_and_live_points_are_drawn(sweep: Path, quality: Path, tmp_path: Path):
    for name, words in {"forecast_by_speed": (sweep, "--quality", quality), "quality_forecast": (quality,)}.items():
        assert moereplay("plot", *words, "--figure", name, "--out", tmp_path).returncode == 0
        assert "<!-- FORECAST" in (tmp_path / f"{name}.svg").read_text("utf-8")  # texts are paths, each after itself


def test_what_has_no_forecast_has_no_front(sweep: Path, quality: Path, tmp_path: Path):
    asked = ("--where", "miss=drop:keep=6", "--quality", quality, "--figure", "forecast_by_speed")
    said = refused("plot", sweep, *asked, "--out", tmp_path)
    assert "no configuration with a FORECAST and tokens/s: no FORECAST of 1 configuration" in said


def test_results_without_the_unmodified_model_are_refused(quality: Path, tmp_path: Path):
    folder = written(tmp_path, pl.read_parquet(quality / FILE).filter(pl.col("set") != UNMODIFIED))
    assert "has no row of 'unmodified' in task" in refused("forecast", folder)
