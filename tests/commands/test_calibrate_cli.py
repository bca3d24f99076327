"""`moereplay calibrate` and `moereplay evidence`: documents, tables, files, and errors of one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moereplay.calibration.report import warning_lines
from moereplay.traces.store import open_trace
from moereplay.traces.writer import write_trace
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.evidence_folder import made, route, row
from tests.kit.recordings import FOLDER

FIT = ("--fit", "made-off*", "--fit", "made-half*", "--fit", "made-two-lanes")
PUBLISHED = FOLDER.parent / "evidence"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("evidence") / "made", 0.02)


def document(*words: object) -> dict:
    ended = moereplay(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_folder_is_calibrated_and_the_platform_predicts_it(folder, tmp_path):
    out = tmp_path / "new" / "desk.toml"
    printed = document("calibrate", "folder", folder, *FIT, "--base", "phone-ufs4", "--out", out)
    keys = {"method", "device", "platform", "figures", "fit", "misses", "held_out", "warnings", "residuals", "left_out"}
    assert printed.keys() == keys
    assert (printed["device"], printed["fit"]["cells"], printed["held_out"]["cells"]) == ("desk", 5, 2)
    assert all(figure.keys() == {"value", "spread", "n"} for figure in printed["figures"].values())
    assert abs(printed["held_out"]["worst"]) < 0.03
    again = document("evidence", folder, "--calibration", out)
    assert again["summary"]["over"] == "held_out"
    assert again["summary"]["mape"] == pytest.approx(printed["held_out"]["mape"], rel=1e-3)


def test_a_calibrated_platform_marks_what_is_replayed_on_it(folder, tmp_path):
    out = tmp_path / "desk.toml"
    document("calibrate", "folder", folder, *FIT, "--out", out)
    about = document("replay", "miniature", "--capacity", "25%", "--platform", out)["about"]
    assert about["seconds"] == "estimated"  # it was fitted to another model
    assert "not calibrated for this model" in json.dumps(about)
    plain = document("replay", "miniature", "--capacity", "25%")["about"]
    assert (plain["seconds"], plain["calibration"]) == ("estimated", None)
    shown = moereplay("replay", "miniature", "--capacity", "25%", "--platform", f"{out},phone-ufs4").stdout
    assert f"seconds of {out}: estimated, not calibrated for this model" in unfolded(shown)
    assert "seconds of phone-ufs4: estimated, not calibrated" in shown


@pytest.mark.slow
def test_tables_name_every_cell_and_every_refusal(folder):
    shown = moereplay("calibrate", "folder", folder, *FIT).stdout
    assert "memory_bytes_per_s" in shown and "made-tenth-ov" in shown and "held out  2 runs" in shown
    assert "warning: all runs read experts of one size" in shown
    shown = moereplay("evidence", folder, "--fit", "made-off*", "--fit", "made-half").stdout
    assert "made-two-lanes" in shown and "held out  4 runs" in shown


def test_predicted_cells_are_a_table_of_80_columns(folder):
    shown = moereplay("calibrate", "folder", folder, *FIT).stdout
    assert max(len(line) for line in shown.splitlines() if not line.startswith("  moereplay")) <= 80
    row = next(line.split() for line in shown.splitlines() if line.startswith("made-two-lanes "))
    assert row[1] == "fit" and row[2].count("/") == 1 and row[3].endswith("%")
    start = next(line.split() for line in shown.splitlines() if line.startswith("start_time_per_mib "))
    assert start[3] == "us/MiB"  # not start_ns_per_mib


def test_warnings_that_end_alike_are_said_below_their_end():
    said = ["a: halves differ; not quiet", "b: halves differ by more; not quiet", "c is alone"]
    assert warning_lines(said) == [
        "warning: not quiet:",
        "  a: halves differ",
        "  b: halves differ by more",
        "warning: c is alone",
    ]


def test_logs_of_times_and_bytes_alone_are_a_line(tmp_path):
    """Tokens of 30 ms and their bytes at 1 GB/s, in three logs: what a log must have, and nothing more.

    Such logs do not say that nothing overlaps, and the engine that is assumed computes while it reads.
    """
    for name, mb in (("a", 10), ("b", 40), ("c", 90)):
        rows = "".join(f"{30 + mb + at % 2 * 0.001},{mb * 10**6}\n" for at in range(40))
        (tmp_path / f"{name}.csv").write_text("wall_ms,read_bytes\n" + rows)
    logs = (tmp_path / f"{name}.csv" for name in "abc")
    found = document("calibrate", "logs", *logs, "--model", "olmoe-1b-7b", "--memory", "1GiB", "--dense", "500MiB")
    assert found["figures"]["bytes_per_s"]["value"] == pytest.approx(1e9, rel=0.15)
    assert found["fit"]["mape"] < 0.02 and found["held_out"]["mape"] < 0.02


def test_logs_are_calibrated_on_their_first_tokens(folder):
    log = folder / "tokens" / "made-fifth-ov.csv"
    about = ("--model", "olmoe-1b-7b", "--memory", "100MiB", "--k", 4, "--dense", "500MiB", "--device", "mine")
    printed = document("calibrate", "logs", log, *about, "--hold-out", 0.25)
    assert (printed["device"], printed["fit"]["cells"], printed["held_out"]["cells"]) == ("mine", 1, 1)
    assert printed["figures"]["ns_per_mib"]["value"] == pytest.approx(120_000, rel=0.01)
    assert printed["figures"]["bytes_per_s"]["spread"] is None
    assert abs(printed["held_out"]["worst"]) < 0.03
    assert printed["method"].endswith("the last 25% of tokens held out")


def test_logs_of_one_name_are_told_apart_by_their_paths(folder, tmp_path):
    logs = [tmp_path / name / "run.csv" for name in ("la", "lb")]
    for log, run in zip(logs, ("made-half", "made-fifth-ov"), strict=True):
        log.parent.mkdir()
        log.write_text((folder / "tokens" / f"{run}.csv").read_text())
    found = document("calibrate", "logs", *logs, *LOGGED)
    assert found["fit"]["names"] == [str(log) for log in logs]
    assert (found["fit"]["cells"], found["held_out"]["cells"]) == (2, 2)


LOGGED = ("--model", "olmoe", "--memory", "100MiB", "--k", 4)
#: What is typed, and facts that the one line of the error has.
ERRORS = {
    "calibrate folder {folder} --fit nothing*": ("--fit 'nothing*'", "cells.csv"),
    "calibrate folder {log} --fit x": ("made-half.csv", "moereplay calibrate logs"),
    "calibrate folder {folder} --fit made* --base phone": ("'phone'",),
    "calibrate folder {folder} --fit made* --out {folder}": ("folder",),
    "calibrate folder {folder} --fit made* --out {folder}/desk.json": ("--out", "desk.json", "ends in .toml"),
    "calibrate logs {folder}": ("moereplay calibrate folder",),
    "calibrate logs {log}": ("--model",),
    "calibrate logs {log} --model olmoe": ("--memory",),
    "calibrate logs {log} --model olmoe --memory much": ("--memory 'much'", "4000MiB"),
    "calibrate logs {log} --model olmoe --memory 9999999999999TB": ("--memory '9999999999999TB'",),
    "calibrate logs {log} --model olmoe --memory 1GiB --memory 1GiB": ("--memory", "2 times", "1 log"),
    "calibrate logs {log} --model olmoe --memory 0 --lanes 99999": ("a whole number from 1 to",),
    "calibrate logs {log} --model olmo --memory 0": ("'olmo'", "olmoe-1b-7b"),
    "calibrate logs {log} --model olmoe --memory 0 --quant Q9": ("'Q9'",),
    "calibrate logs {folder}/cells.csv --model olmoe --memory 0": ("cells.csv line 1", "'wall_ms'"),
    "calibrate logs {folder}/none.csv --model olmoe --memory 0": ("none.csv: No such file or directory",),
    "calibrate logs {log} {log} --model olmoe --memory 0 --trace x": ("--trace",),
    "calibrate logs {log} {logged} --serial --trace {prompts}": ("prompts.csv", "decoded token"),
    "calibrate logs {log} {log} {logged}": ("made-half.csv", "2 times"),
    "calibrate logs {cached} {logged}": ("compute_ms", "several memory budgets"),
    "evidence {log}": ("--calibration FILE",),
    "evidence {log} --fit made*": ("--fit", "logs"),
    "evidence {log} --calibration phone-ufs4": ("phone-ufs4", "[calibration]"),
    "evidence {log} --calibration {desk}": ("--model",),
    "evidence {log} --calibration {desk} --model olmoe": ("--memory",),
    "evidence {log} --calibration {desk} --model olmoe --memory 1GiB --trace none.csv": (
        "--trace none.csv: No such file",
    ),
    "evidence {log} --calibration {desk} --model olmoe --memory 1GiB --trace miniature.x": (
        "--trace miniature.x: No such",
    ),
    "evidence {log} --calibration {desk} --model olmoe --memory 1GiB --k 4 --trace {prompts}": ("decoded token",),
    "evidence {folder} --calibration {desk} --memory 1GiB": ("--memory", "folder"),
    "evidence {folder} {log} --calibration {desk}": ("made-half.csv", "one folder"),
    "evidence none.csv --calibration {desk}": ("cannot read none.csv: No such file",),
    "evidence {folder}": ("--calibration FILE", "--fit PATTERN"),
    "evidence {folder} --calibration phone-ufs4": ("phone-ufs4", "[calibration]"),
    "evidence {folder}/tokens --fit made*": ("no cells.csv",),
    "evidence {folder} --fit made* --calibration {desk}": ("--calibration FILE", "--fit PATTERN"),
}


def words_of(command: str, folder: Path, place: Path) -> list[str]:
    """The words of a command, with files in place of their names."""
    (place / "cached.csv").write_text("wall_ms,read_bytes,compute_ms,stall_ms\n" + "31,0,30,1\n" * 40)
    (place / "desk.toml").write_text('name = "desk"\nbase = "phone-ufs4"\n[calibration]\ndevice = "desk"\n')
    files = {"folder": folder, "log": folder / "tokens" / "made-half.csv", "desk": place / "desk.toml"}
    files |= {"cached": place / "cached.csv", "prompts": route(place / "prompts.csv", 16, "")}
    return command.format(**files, logged=" ".join(map(str, LOGGED))).split()


@every("command, facts", ERRORS.items(), apart=True)
def test_what_is_wrong_is_said_in_one_line(folder, tmp_path, command, facts):
    ended = moereplay(*words_of(command, folder, tmp_path))
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("compiling ")]
    assert (ended.returncode, ended.stdout, len(lines)) == (2, "", 1), ended.stderr
    assert all(fact in lines[0] for fact in facts), lines


@every(
    "command, fact",
    [
        ("calibrate folder {folder}", "missing --fit"),
        ("calibrate folder {folder} --fit made* --memory 1GiB", "--memory"),
        ("calibrate folder {folder} --fit made* --device x", "--device"),
        ("calibrate logs {log} --layers 4", "--layers"),
        ("calibrate machine --slow-tier pinned", "missing --model"),
        ("calibrate machine --slow-tier pinned --model olmoe-1b-7b --base phone-ufs4", "--base"),
    ],
    apart=True,
)
def test_each_source_has_its_own_options(folder, tmp_path, command, fact):
    ended = moereplay(*words_of(command, folder, tmp_path))
    assert ended.returncode == 2 and fact in unfolded(ended.stderr)


@pytest.mark.slow
def test_the_spelling_without_a_subcommand_is_understood(folder):
    log = folder / "tokens" / "made-fifth-ov.csv"
    for use, words in {"folder": (folder, *FIT), "logs": (log, *LOGGED)}.items():
        older, newer = moereplay("calibrate", *words), moereplay("calibrate", use, *words)
        assert older.stdout == newer.stdout and older.returncode == newer.returncode == 0
        assert f"moereplay calibrate {use}" in unfolded(older.stderr)
    machine = moereplay("calibrate", "--slow-tier", "tape", "--model", "olmoe-1b-7b")
    assert machine.returncode == 2 and "'tape'" in machine.stderr


# ---------------------------------------------------------------- one run beside its prediction


@pytest.fixture(scope="module")
def mine(folder, tmp_path_factory) -> dict[str, Path]:
    """A calibration, a trace of 12 decoded tokens of OLMoE, and two logs that read what a replay of it reads."""
    place = tmp_path_factory.mktemp("mine")
    document("calibrate", "folder", folder, *FIT, "--out", place / "desk.toml")
    made = ("--model", "olmoe-1b-7b", "--requests", 1, "--prompt-tokens", 0, "--decode-tokens", 12)
    assert moereplay("synthesise", *made, "--out", place / "t.zarr").returncode == 0
    (place / "a.csv").write_text("wall_ms,read_bytes\n" + "400,200000000\n" * 12)
    (place / "b.csv").write_text("wall_ms,read_bytes\n" + "300,100000000\n" * 12)
    return {"desk": place / "desk.toml", "trace": place / "t.zarr", "a": place / "a.csv", "b": place / "b.csv"}


@pytest.mark.slow
def test_a_log_is_predicted_by_the_replay_of_its_routing(mine):
    about = ("--calibration", mine["desk"], "--model", "olmoe-1b-7b", "--trace", mine["trace"], "--dense", "500MiB")
    found = document("evidence", mine["a"], mine["b"], *about, "--memory", "400MiB", "--memory", "1500MiB")
    small, large = found["cells"]
    assert small["basis"] == large["basis"] == "replay" and small["device"] == "desk"
    assert small["measured"]["tpot_ms"] == 400 and large["measured"]["read_mib_per_token"] == pytest.approx(
        95.4, rel=0.01
    )
    assert small["predicted"]["hit_pct"] < large["predicted"]["hit_pct"]  # each has its own memory
    assert small["error"]["tpot_ms"] == pytest.approx(small["predicted"]["tpot_ms"] / 400 - 1, rel=1e-3)
    shown = moereplay("evidence", mine["a"], *about, "--memory", "400MiB").stdout
    for words in ("time per token, mean", "hits, %", "read per token, MiB", "predicted", "measured", "points"):
        assert words in unfolded(shown)


def test_a_traces_header_says_which_model_its_log_is_of(mine, tmp_path):
    """The calibration is of another model, which no table knows."""
    trace, file = open_trace(mine["trace"]), tmp_path / "t.zarr"
    named = trace.header.provenance.model_copy(update={"model": "OLMoE-1B-7B-0924-Q4_K_M.gguf"})
    write_trace(file, trace.header.model_copy(update={"provenance": named}), [trace.request(0)])
    about = ("--calibration", mine["desk"], "--trace", file, "--dense", "500MiB", "--memory", "400MiB")
    named = document("evidence", mine["a"], *about, "--model", "olmoe-1b-7b")
    assert document("evidence", mine["a"], *about) == named


def test_another_k_than_the_traces_is_refused_with_both_numbers(mine):
    about = (
        "--calibration",
        mine["desk"],
        "--trace",
        mine["trace"],
        "--memory",
        "400MiB",
        "--k",
        6,
        "--model",
        "olmoe",
    )
    ended = moereplay("evidence", mine["a"], *about)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "k = 8" in ended.stderr and "k = 6" in ended.stderr and "--k 8" in ended.stderr


def test_without_its_routing_the_time_of_a_log_is_predicted_from_its_bytes(mine):
    about = ("--calibration", mine["desk"], "--model", "olmoe-1b-7b", "--memory", "1GiB", "--dense", "500MiB")
    found = document("evidence", mine["a"], *about)["cells"][0]
    assert found["basis"] == "published" and "hit_pct" not in found["predicted"]
    assert "--trace" in unfolded(moereplay("evidence", mine["a"], *about).stdout)


def test_logs_of_several_budgets_are_calibrated_together(mine, tmp_path):
    about = ("--model", "olmoe-1b-7b", "--dense", "500MiB", "--memory", "400MiB", "--memory", "1500MiB")
    printed = document(
        "calibrate", "logs", mine["a"], mine["b"], *about, "--hold-out", 0, "--out", tmp_path / "two.toml"
    )
    assert "2 logs of olmoe-1b-7b at 400MiB, 1500MiB" in printed["method"]


def test_a_calibration_that_was_edited_is_named_and_not_called_calibrated(mine, folder, tmp_path):
    text, edited = mine["desk"].read_text(), tmp_path / "edited.toml"
    assert "digest = " in text
    edited.write_text(re.sub(r"(?m)^ns_per_mib = \d+", "ns_per_mib = 7", text))
    ended = moereplay("evidence", folder, "--calibration", edited)
    assert ended.returncode == 0 and "was edited after its calibration" in unfolded(ended.stderr)
    about = document("replay", "miniature", "--capacity", "25%", "--platform", edited)["about"]
    assert (about["seconds"], about["calibration"]) == ("estimated", None)
    assert "edited after the calibration of desk" in about["warning"]


ABSURD = {"experts": "1e308", "k": "9" * 20, "moe_layers": "1e-308", "tpot_median_ms": "1e-308", "lanes": "2.5"}


@every("column, value", ABSURD.items(), apart=True)
def test_absurd_numbers_in_a_row_are_refused_by_both(mine, tmp_path, column, value):
    folder = made(tmp_path / "made", more=[row("absurd", tpot_ms=9, hit_pct=50, **{column: value})])
    for words in (("calibrate", "folder", folder, *FIT), ("evidence", folder, "--calibration", mine["desk"], "--json")):
        ended = moereplay(*words)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
        assert f"invalid {column} {value!r}: expected a " in ended.stderr and "cells.csv line 9" in ended.stderr


def test_figures_that_no_machine_has_are_no_platform(tmp_path):
    """In range each, and together a rate beyond any: nothing is written."""
    (tmp_path / "log.csv").write_text("wall_ms,read_bytes,compute_ms,stall_ms\n" + "1,4e18,1e-9,1e-9\n" * 12)
    out = tmp_path / "out.toml"
    ended = moereplay("calibrate", "logs", tmp_path / "log.csv", *LOGGED, "--out", out)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not (PUBLISHED / "cells.csv").exists(), reason="other people's measured runs are not here")
def test_a_phones_other_runs_are_predicted_from_one_models():
    """Fitted on one model's first sessions; others' budgets, lanes and models, as studies/pages/calibrations.md has."""
    fit = ("--fit", "bmoe-07-12-gemma_*", "--fit", "bmoe-07-14-warmup-*_gemma_k8")
    cells = {each["cell"]: each for each in document("evidence", PUBLISHED, *fit)["cells"]}
    held = ("14-w-gemma_k6", "17-gpt_k2", "20-cache-replay-lanes4_k2", "20-cache-replay-lanes8_k2", "21-101543")
    held += ("20-sidecar-cell-a1", "20-sidecar-cell-a2", "20-sidecar-cell-b1", "21-103724")
    errors = sorted(abs(cells[f"bmoe-07-{name}"]["error"]["tpot_median_ms"]) for name in held)
    assert errors[len(errors) // 2] <= 0.07
    waits = {"21-101543": "stall_ms", "21-103724": "stall_ms", "20-sidecar-cell-a1": "io_ms"}  # of other models
    assert all(abs(cells[f"bmoe-07-{name}"]["error"][column]) <= 0.1 for name, column in waits.items())
    replayed = cells["bmoe-07-15-route-gemma"]
    assert replayed["basis"] == "replay"
    assert abs(replayed["error"]["read_mib_per_token"]) < 0.001
    assert replayed["per_token"]["read_r"] > 0.999
