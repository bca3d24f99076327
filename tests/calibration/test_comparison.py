"""The table of predictions against measurements: a row per run and source, at full size, and its summary."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evidence import __main__ as command
from evidence.comparison import Plan, leave_one_model_out, markdown, rows_of, summaries
from moereplay.calibration.files import read_folder
from moereplay.calibration.rows import Row
from moereplay.simulator.platforms import platform
from tests.kit.evidence_folder import made, row
from tests.kit.measured_series import law
from tests.kit.measured_series import table as table_of_series

BASE = "phone-ufs4:compute.launch_ns=0"
FIT = ["made-off", "made-off-ov", "made-half", "made-half-ov", "made-two-lanes"]


def found(errors: list[float], machine: str = "desk", role: str = "held out", compared: bool = True) -> list[Row]:
    about = ("id", "", machine, "m", "mean time per token, ms", "1 run of m", role, "published")
    return [Row(*about, 100 * (1 + error), 100, compared, "") for error in errors]


def test_a_summary_has_median_shares_and_the_worst_of_what_counts():
    rows = [*found([0.02, -0.1, 0.2, -0.5]), *found([9.0], compared=False), *found([0.01], role="fit")]
    held, fit = summaries(rows)
    assert (held.rows, held.within, fit.rows) == (4, (0.5, 0.75), 1)
    assert held.median == pytest.approx(0.15) and held.worst == pytest.approx(-0.5)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> tuple[Path, list[Row]]:
    """Rows of a made-up folder: a fit, a preset, a run that pages, another machine."""
    paging = row("paging", tpot_ms=9000, hit_pct=50, overlap="yes", lanes=4, clean="paging", source="someone#1")
    far = row("far", device="far", tpot_ms=50, hit_pct=50)
    folder = made(tmp_path_factory.mktemp("table") / "made", more=[paging, far])
    base = platform(BASE)
    return folder, rows_of(read_folder(folder), [Plan("desk", base, FIT), Plan("desk", base)])


def test_every_run_has_a_row_for_each_source_and_misses_are_not_cut(table):
    _, rows = table
    roles = {(each.id, each.role): each for each in rows}
    assert {name for name, role in roles if role == "fit"} == set(FIT)
    assert {name for name, role in roles if role == "held out"} == {"made-fifth-ov", "made-tenth-ov", "paging"}
    assert {name for name, role in roles if role == "preset"} == {*FIT, "made-fifth-ov", "made-tenth-ov", "paging"}
    assert roles["far", "refused"].predicted is None and "machine" in roles["far", "refused"].remark
    paging = roles["paging", "held out"]
    assert paging.error is not None and paging.error < -0.9 and not paging.compared and "paging" in paging.remark
    assert paging.source == "someone#1" and paging.predicted_from == "5 runs of Made-Up"
    assert abs(roles["made-fifth-ov", "held out"].error or 1) < 0.02
    held = next(each for each in summaries(rows) if each.role == "held out")
    assert (held.rows, held.within) == (2, (1.0, 1.0))


def test_each_model_is_predicted_from_the_others(tmp_path):
    """Two models of one machine: whichever is left out is predicted, and nothing of it was fitted."""
    more = [row(f"b{at}", model="B", tpot_ms=80, hit_pct=at, overlap="yes", lanes=4, clean="") for at in (20, 80)]
    more.append(row("dark", model="Dark", dense_mib="", tpot_ms=80, hit_pct=50))
    evidence = read_folder(made(tmp_path / "made", more=more))
    plans = leave_one_model_out(evidence, "desk", platform(BASE))
    assert [plan.only for plan in plans] == [["B"], ["Made-Up"]]
    assert all(name.startswith("made") for name in plans[0].cells) and list(plans[1].cells) == ["b20", "b80"]
    assert {each.id for each in rows_of(evidence, plans[:1]) if each.role == "held out"} == {"b20", "b80"}


def test_the_command_writes_table_page_and_figure(table, tmp_path, monkeypatch):
    folder, rows = table
    monkeypatch.setattr(command, "PLANS", (("desk", BASE, tuple(FIT)),))
    monkeypatch.setattr("sys.argv", ["predicted_vs_measured", str(folder), "--out", str(tmp_path)])
    command.main()
    written = list(csv.DictReader((tmp_path / "predicted-vs-measured.csv").read_text().splitlines()))
    assert len(written) == len([each for each in rows if each.role != "preset"])
    cell = next(each for each in written if each["id"] == "paging")
    assert (cell["source"], cell["compared"]) == ("someone#1", "no") and float(cell["error"]) < -0.9
    page = (tmp_path / "predicted-vs-measured.md").read_text()
    assert page.endswith(markdown([each for each in rows if each.role != "preset"]))
    assert (tmp_path / "figures" / "predicted_vs_measured.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_series_of_runs_are_a_section_of_the_page_with_every_refusal(tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    folder.mkdir()
    table_of_series(folder, law("drafted", cpu_moe_layers="20") | {"draft": "mtp"}).rename(folder / "cells.csv")
    monkeypatch.setattr("sys.argv", ["predicted_vs_measured", str(folder), "--out", str(tmp_path)])
    command.main()
    written = {
        row["id"]: row for row in csv.DictReader((tmp_path / "predicted-vs-measured.csv").read_text().splitlines())
    }
    assert written["drafted"]["role"] == "refused" and written["drafted"]["remark"] == "drafts or several requests"
    told = written["desk-20"]
    assert (told["role"], told["basis"], told["predicted_from"]) == (
        "held out",
        "replay of a token",
        "desk-40 and desk-0",
    )
    assert abs(float(told["error"])) < 1e-3 and float(told["measured"]) > 12  # a step of 12 ms
    page = (tmp_path / "predicted-vs-measured.md").read_text()
    assert "3 runs are held out: median |error| 0.0%" in page
    assert "| 1 | drafts or several requests | drafted |" in page
