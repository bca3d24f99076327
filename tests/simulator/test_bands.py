"""Seconds carry the known error of their platform: of runs that a preset was tried on, or that a fit held out."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from moereplay.calibration.prediction import Prediction, band_of
from moereplay.results.read import seconds_of
from moereplay.results.remarks import seconds_in_words
from moereplay.simulator.calibration import Band
from moereplay.simulator.config import configure
from moereplay.simulator.platforms import as_toml, platform, presets, sealed
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"
HELD_OUT = """
[calibration]
device = "a desk"
date = "2026-01-02"
cells = 5

[calibration.held_out]
runs = 3
least = 0.9
median = 1.0
most = 1.25
"""


def about(machine: str, **settings: str) -> dict:
    return dict(replay(open_trace(SAMPLE), configure(capacity="25%", platform=machine, **settings)).about)


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    file = tmp_path / "desk.toml"
    plain = platform("mac-nvme")
    file.write_text(as_toml(plain.model_copy(update={"name": "desk"})) + HELD_OUT)
    file.write_text(as_toml(sealed(platform(str(file)))))
    return file


def test_a_preset_that_was_tried_on_runs_has_their_range_with_its_source():
    tried = platform("phone-ufs4").tried
    assert tried is not None and tried.runs == 20 and "BigMoeOnEdge" in tried.source
    assert 1 < tried.least < tried.median < tried.most < 4
    found = about("phone-ufs4")
    assert (found["seconds"], found["band_least"], found["band_most"]) == ("estimated", tried.least, tried.most)
    assert "1.80 to 3.13" in seconds_in_words(found) and "20 runs" in seconds_in_words(found)
    assert seconds_in_words(found).startswith("estimated, not calibrated")
    untried = [machine.name for machine in presets() if machine.tried is None]
    assert untried and "band" not in about(untried[0])


def test_a_range_belongs_to_the_figures_that_it_was_measured_with(tmp_path):
    assert "band" not in about("phone-ufs4:link.depth=2")
    (tmp_path / "mine.toml").write_text('name = "mine"\nbase = "phone-ufs4"\n')
    assert "band" not in about(str(tmp_path / "mine.toml"))


def test_a_calibration_has_the_range_of_its_held_out_runs_until_it_is_edited(calibrated):
    found = about(str(calibrated))
    assert (found["seconds"], found["band_least"], found["band_most"]) == ("calibrated", 0.9, 1.25)
    assert "0.90 to 1.25" in seconds_in_words(found) and "3 runs" in seconds_in_words(found)
    calibrated.write_text(calibrated.read_text().replace("most = 1.25", "most = 1.05"))
    edited = about(str(calibrated))
    assert edited["seconds"] == "estimated" and "band" not in edited


def test_figures_of_one_token_per_pass_are_not_called_calibrated_for_passes_of_several(calibrated):
    def seconds(**settings: str) -> tuple[str, bool]:
        found = about(str(calibrated), **settings)
        return found["seconds"], "band" in found

    assert seconds() == seconds(passes="batch:1") == ("calibrated", True)
    assert seconds(draft="2") == seconds(passes="batch:2") == ("estimated", False)
    found = about(str(calibrated), draft="2")
    assert "not calibrated for drafts: fitted on passes of one decoded token" in seconds_in_words(found)
    plain = platform(str(calibrated))
    compute = plain.compute.model_copy(update={"by_tokens": ((1, 1.0), (4, 2.0))})
    calibrated.write_text(as_toml(sealed(plain.model_copy(update={"compute": compute}))))
    assert seconds(draft="2") == ("calibrated", True)  # what several tokens take was measured


def test_figures_are_not_called_calibrated_for_experts_of_other_bytes(calibrated):
    """The miniature's experts have 24 kB (16 bits); a calibration on runs may state other bytes."""
    assert about(str(calibrated), miss="fetch")["seconds"] == "calibrated"
    found = about(str(calibrated), miss="fetch:bits=2")
    assert found["seconds"] == "estimated" and "band" not in found
    assert "not calibrated for experts of 3.07 kB: fitted with 24.6 kB" in seconds_in_words(found)
    plain = platform(str(calibrated))
    assert plain.calibration is not None
    for sizes, seconds in (((3_000, 25_000), "calibrated"), ((3_000, 20_000), "estimated")):
        stated = plain.calibration.model_copy(update={"expert_bytes": {"any": sizes}})
        calibrated.write_text(as_toml(sealed(plain.model_copy(update={"calibration": stated}))))
        assert about(str(calibrated), miss="fetch")["seconds"] == seconds


def test_figures_are_not_called_calibrated_for_parts_that_no_run_waited_for(calibrated):
    """On mac-nvme a miss crosses the link. Older calibrations state no parts and are not judged by them."""
    plain = platform(str(calibrated))
    assert plain.calibration is not None
    refused = ((("cpu",), "misses that the CPU computes"), ((), "the accelerator alone"))
    for parts, why in ((None, None), (("link",), None), *refused):
        stated = plain.calibration.model_copy(update={"parts": parts})
        calibrated.write_text(as_toml(sealed(plain.model_copy(update={"calibration": stated}))))
        found = about(str(calibrated))
        assert found["seconds"] == ("calibrated" if why is None else "estimated")
        assert ("band" in found) is (why is None)
        if why:
            assert "not calibrated for transfers into the fast tier" in found["uncalibrated"]
            assert why in found["uncalibrated"]


def test_figures_of_one_token_are_called_calibrated_for_decoded_tokens_only_where_there_are_prompts(calibrated):
    assert about(str(calibrated))["calibration"].endswith("decoded tokens only")
    plain = platform(str(calibrated))
    compute = plain.compute.model_copy(update={"by_tokens": ((1, 1.0), (4, 2.0))})
    calibrated.write_text(as_toml(sealed(plain.model_copy(update={"compute": compute}))))
    assert "decoded tokens" not in about(str(calibrated))["calibration"]


def test_a_range_changes_no_time_and_no_identity(calibrated):
    plain = replay(open_trace(SAMPLE), configure(capacity="25%", platform="mac-nvme"))
    banded = replay(open_trace(SAMPLE), configure(capacity="25%", platform=str(calibrated)))
    assert banded.totals == plain.totals and banded.about["identity"] == plain.about["identity"]


def test_seconds_of_a_sweep_name_every_range_once():
    facts = {"calibration": None, "uncalibrated": None}
    rows = [facts | {"band": text} for text in ("measured 1.80 to 3.13", "measured 1.80 to 3.13", None)]
    assert seconds_of(pl.DataFrame({"about": rows})) == "estimated, not calibrated; measured 1.80 to 3.13"
    assert seconds_of(pl.DataFrame({"about": [facts]})) == "estimated, not calibrated"


def test_seconds_of_a_sweep_name_the_platforms_of_a_range_that_is_not_everyones():
    facts = {"calibration": None, "uncalibrated": None}
    rows = [
        {"about": facts | {"band": text}, "config": {"platform": name}}
        for name, text in zip("abab", "xyxy", strict=True)
    ]
    assert seconds_of(pl.DataFrame(rows)) == "estimated, not calibrated; a x; b y"
    rows[0]["about"]["band"] = None  # drafts, for which a calibration does not hold
    assert seconds_of(pl.DataFrame(rows[:3])) == "estimated, not calibrated; a x; b y"
    assert seconds_of(pl.DataFrame([rows[0], rows[2]])) == "estimated, not calibrated; a x"
    assert seconds_of(pl.DataFrame(rows[2:3])) == "estimated, not calibrated; x"


def test_a_band_is_measured_over_predicted_of_what_is_compared():
    times = [({"tpot_ms": 100.0}, {"tpot_ms": ms}) for ms in (80.0, 100.0, 150.0)]
    found = [Prediction("a", "d", "held_out", predicted=p, measured=m) for p, m in times]
    found.append(
        Prediction("b", "d", "held_out", predicted={"tpot_ms": 1.0}, measured={"tpot_ms": 9.0}, compared=False)
    )
    band = band_of(found)
    assert band is not None and band.runs == 3
    assert (band.least, band.median, band.most) == pytest.approx((0.8, 1.0, 1.5))
    assert band_of(found[3:]) is None and "1 run" in Band(runs=1, least=1, median=1, most=1).in_words()
