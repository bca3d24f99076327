"""Rows that people file of their own runs: from a table of runs to the page, blind ones apart; wrong ones refused."""

from __future__ import annotations

import csv
import json
import subprocess
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from evidence import __main__ as command
from evidence import filed
from moereplay.calibration import rows
from moereplay.sweeps import parts
from tests.kit.command import moereplay_here, unfolded
from tests.kit.every import every
from tests.kit.measured_series import law, table

COMMIT = "0123456789abcdef" * 2 + "01234567"
ROW = {
    "id": "mine-1",
    "machine": "RTX 3090, 64 GB",
    "model": "olmoe-1b-7b",
    "engine": "llama.cpp b1",
    "settings": {"cpu_moe_layers": "8"},
    "quantity": "mean time per token, ms",
    "measured": 12.5,
    "predicted": 11.0,
    "predicted_from": "published rates, nothing fitted",
    "role": "preset",
    "basis": "replay of a token",
    "code": {"version": "0.1.0", "commit": COMMIT, "digest": "0123456789abcdef"},
    "predicted_on": "2026-11-29",
    "source": "",
    "public": "2026-11-29",
}


def page_of(monkeypatch: pytest.MonkeyPatch, out: Path, *sources: Path) -> str:
    monkeypatch.setattr("sys.argv", ["evidence", *map(str, sources), "--out", str(out)])
    command.main()
    return (out / "predicted-vs-measured.md").read_text()


@pytest.mark.slow
def test_a_strangers_runs_go_from_a_table_to_the_page_and_blind_ones_are_apart(tmp_path, monkeypatch):
    """Code of yesterday: a new run is blind, one that somebody published the day before yesterday is not."""
    today = datetime.now(UTC).date()
    monkeypatch.setattr("moereplay.commands.calibrate.commit", lambda: COMMIT)
    old = law("told", cpu_moe_layers="35") | {"source": "a post", "date": f"{today - timedelta(days=2)}"}
    file = tmp_path / "rows.jsonl"
    ran = moereplay_here("calibrate", "series", table(tmp_path, old), "--row", file)
    assert ran.returncode == 0 and "appended 10 rows to" in unfolded(ran.stderr)
    found = rows.read_filed(file)
    held = {"desk-30", "desk-20", "desk-10", "told"}  # the slowest and the fastest run are fitted
    assert {row.id for row in found if row.role == "held out"} == held
    assert {row.id for row in found if row.role == "preset"} == held | {"desk-40", "desk-0"}
    assert all(row.settings["ram_bw_gbs"] == "50" and row.predicted_on == today for row in found)
    assert all(row.code == rows.code(COMMIT) for row in found)
    monkeypatch.setattr(filed, "committed", {COMMIT: today - timedelta(days=1)}.get)
    page = page_of(monkeypatch, tmp_path, file)
    blind, others = page.split("### Predicted blind")[1].split("### Not known to be blind")
    assert "| desk-30 | desk, RTX 3090 | a model | llama.cpp b1 | mean time per token, ms |" in blind
    assert "told" not in blind and "| told |" in others and "desk-30 |" not in others
    written = list(csv.DictReader((tmp_path / "predicted-vs-measured.csv").read_text().splitlines()))
    assert {row["id"] for row in written if row["remark"].startswith("blind: by code of")} == {
        row.id for row in found if row.id != "told"
    }
    monkeypatch.setattr(filed, "committed", {COMMIT: today}.get)  # of the same day: it may have known them
    assert "No rows." in page_of(monkeypatch, tmp_path, file).split("### Predicted blind")[1].split("###")[0]


def test_a_stated_error_is_of_the_row_and_its_texts_are_no_markup(tmp_path, monkeypatch):
    hits = {"id": "hits", "quantity": "hits, %", "measured": 40, "predicted": 42.5, "machine": "<b>|x"}
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (ROW, ROW | hits)))
    page = page_of(monkeypatch, tmp_path, tmp_path / "rows.jsonl")
    assert "1 hit rate: median |error| 2.50 points, worst 2.50 points. 1 time: median |error| 12.00 %" in page
    assert "| 11 | 12.5 | -12.00 | 0123456789ab |" in page and "<b>" not in page


@every(
    "change, told",
    [
        ({"measured": -1}, "measured: expected at least 0 (got -1)"),
        ({"measured": 0}, "measured 0: expected a time, more than 0 ms"),
        ({"quantity": "hits, %", "predicted": 101}, "predicted 101: expected 0 to 100"),
        ({"quantity": "watts"}, "quantity: unknown value 'watts'"),
        ({"role": "fit"}, "role: unknown value 'fit'"),
        ({"machine": ""}, "machine: "),
        ({"tok_s": 3}, "tok_s: unknown key"),
        ({"public": "2026-12-01"}, "public 2026-12-01: expected a day until 2026-11-29"),
        ({"code": ROW["code"] | {"commit": "--output=x"}}, "code.commit: "),  # git never sees it
    ],
    apart=True,
)
def test_a_wrong_row_is_a_line_with_its_place(change, told, tmp_path, monkeypatch, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW | change)}\n")
    with pytest.raises(SystemExit) as ended:
        page_of(monkeypatch, tmp_path, file)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"{file}:2: " in said and told in said
    ran = moereplay_here("calibrate", "series", "none.csv", "--row", file)
    assert ran.returncode == 2 and told in unfolded(ran.stderr) and "Traceback" not in ran.stderr


def test_a_row_that_lacks_a_field_and_a_file_of_something_else_are_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    for text, told in (
        (
            json.dumps({name: ROW[name] for name in ROW if name != "engine"}).encode(),
            "engine: missing; expected a row",
        ),
        (b"id,source\n", "expected JSON, found 'id,source'"),
        (b"\xff\xfe", "found bytes that are no text"),
    ):
        file.write_bytes(text)
        with pytest.raises(rows.ConfigError, match=told):
            rows.read_filed(file)


def test_the_day_of_a_commit_is_that_of_this_repository(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        ran = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    git("init", "-q")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-11-05T12:00:00Z")
    git("commit", "-q", "--allow-empty", "-m", "one")
    git("tag", "v0.1.0")
    monkeypatch.setattr(filed, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "CHECKOUT", tmp_path)
    here = parts.commit() or ""
    assert filed.committed(here) == filed.committed("v0.1.0") == date(2026, 11, 5)
    assert filed.committed(f"{here}-dirty") is None and filed.committed(COMMIT) is None
    wheel = rows.Filed.model_validate(ROW | {"code": ROW["code"] | {"commit": ""}})
    assert filed.blind_since(wheel) == date(2026, 11, 5)
    assert filed.blind_since(wheel.model_copy(update={"public": date(2026, 11, 5)})) is None
    assert filed.blind_since(wheel.model_copy(update={"public": None})) is None
