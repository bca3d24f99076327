"""`moereplay calibrate series`: a known law is recovered from two runs, and what cannot be expressed is named."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from moereplay.simulator.machine import of_platform
from moereplay.simulator.platforms import platform
from moereplay.sweeps.recommend.answer import replayed
from moereplay.sweeps.recommend.measured import decoded
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.measured_series import FACTOR, STEP, law, table


def answer(*words: object) -> dict:
    ended = moereplay("calibrate", "series", *words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_two_runs_fit_the_law_and_the_others_are_predicted(tmp_path: Path) -> None:
    found = answer(table(tmp_path), "--fit", "desk-40", "--fit", "desk-10")
    (group,) = found["groups"]
    assert group["miss_factor"] == pytest.approx(FACTOR, rel=1e-3) and group["step_ns"] == pytest.approx(STEP, rel=1e-3)
    roles = {run["id"]: (run["role"], run["error"]) for run in group["runs"]}
    assert {name for name, (role, _) in roles.items() if role == "fit"} == {"desk-40", "desk-10"}
    assert all(abs(error) < 1e-4 for _, error in roles.values())
    assert found["held_out"]["runs"] == 3 and found["refused"] == []
    # 50 GB/s measured, divided by 1.7, is the rate that the CPU reaches
    assert found["figures"]["cpu.memory_bytes_per_s"] == pytest.approx(50e9 / FACTOR, rel=1e-3)
    # without --fit the slowest and the fastest are fitted, which say the same
    assert answer(table(tmp_path))["groups"][0]["fit"] == ["desk-40", "desk-0"]


def test_one_run_with_a_known_rate_fits_the_step_alone(tmp_path: Path) -> None:
    (group,) = answer(table(tmp_path), "--fit", "desk-0")["groups"]
    assert (group["miss_factor"], group["step_ns"]) == (1, pytest.approx(STEP, rel=1e-3))
    errors = {run["id"]: run["error"] for run in group["runs"]}
    assert errors["desk-0"] == pytest.approx(0, abs=1e-5)
    assert errors["desk-40"] > errors["desk-20"] > 0.1  # their CPU is slower than its published rate


def test_the_written_platform_takes_the_predicted_time(tmp_path: Path) -> None:
    file, runs = tmp_path / "desk.toml", table(tmp_path)
    moereplay("calibrate", "series", runs, "--fit", "desk-40", "--fit", "desk-10", "--out", file)
    made = platform(str(file))
    assert made.calibrated is not None and made.calibrated.parts == ("cpu",)
    assert made.cpu is not None and not made.tiers and made.slow_tier == "RAM"  # no run waited for the disk
    assert made.band is not None and made.band.runs == 3
    run = decoded(defaultdict(str, law("x", cpu_moe_layers="30")), strict=False).run
    assert run is not None
    on = of_platform(made, "24GB")
    setting = replace(run.setting, machine=on, mode=run.setting.mode.model_copy(update={"layer_us": 65}))
    spent = 1e9 / replayed(run.load, setting, 0).tokens_per_s
    told = decoded(defaultdict(str, law("x", cpu_moe_layers="30")), strict=False).time(FACTOR, STEP)
    assert spent == pytest.approx(told, rel=1e-3)


def test_a_link_that_is_waited_for_is_the_figure_that_is_fitted(tmp_path: Path) -> None:
    fetched = {"engine": "FreeToken", "placement": "slots", "on_miss": "fetch", "policy": "lru", "series": "fetch"}
    runs = [law(f"fetch-{slots}", 2.0, 5e6, slots_per_layer=str(slots), **fetched) for slots in (8, 16, 32)]
    found = answer(table(tmp_path, *runs), "--series", "fetch")
    assert list(found["figures"]) == ["link.bytes_per_s", "fixed_step_ns"]
    assert found["figures"]["link.bytes_per_s"] == pytest.approx(25.1e9 / 2, rel=1e-2)


def test_what_cannot_be_expressed_is_refused_by_its_name(tmp_path: Path) -> None:
    refused = {
        "drafted": ({"draft": "mtp"}, "drafts or several requests"),
        "four": ({"concurrency": "4"}, "drafts or several requests"),
        "odd-card": ({"gpu": "Voodoo 2"}, "unknown card"),
        "no-rate": ({"decode_tok_s": ""}, "no decode rate"),
        "no-shape": ({"expert_mib": ""}, "shape or bytes of the model"),
    }
    rows = [law(name, cpu_moe_layers="20") | said for name, (said, _) in refused.items()]
    runs = table(tmp_path, *rows)
    named = {each["id"]: each["reason"] for each in answer(runs)["refused"]}
    assert named.keys() == refused.keys()
    assert all(why in named[name] for name, (_, why) in refused.items())
    shown = unfolded(moereplay("calibrate", "series", runs).stdout)
    assert all(name in shown for name in refused) and "5 runs can be predicted, 5 cannot" in shown


def test_runs_that_no_machine_explains_give_no_figures(tmp_path: Path) -> None:
    """Tokens/s that rise with the layers on the CPU, a slope alone, and 5 GiB of experts in a card of 4 GiB."""
    odd = [law("up-40", cpu_moe_layers="40"), law("up-20", cpu_moe_layers="20"), law("up-0", cpu_moe_layers="0")]
    odd = [row | {"series": "up", "decode_tok_s": speed} for row, speed in zip(odd, ("30", "20", "10"), strict=True)]
    slope = [law(f"slope-{layers}", 9, -8e6, cpu_moe_layers=str(layers), series="slope") for layers in (40, 30, 20)]
    full = [
        law(f"full-{layers}", cpu_moe_layers=str(layers), series="full", vram_gib="4") for layers in (40, 20, 10, 0)
    ]
    full[3] |= {"decode_tok_s": "1"}  # what spills is slow
    found = {group["series"]: group for group in answer(table(tmp_path, *odd, *slope, *full))["groups"]}
    assert "no rate of misses explains them" in found["up"]["fault"]
    assert "no step explains it" in found["slope"]["fault"]
    assert found["full"]["fit"] == ["full-40", "full-10"] and not found["full"]["fault"]
    assert found["full"]["miss_factor"] == pytest.approx(FACTOR, rel=1e-3) and not found["desk"]["fault"]
    shown = moereplay("calibrate", "series", tmp_path / "runs.csv", "--series", "up")
    assert "up, llama.cpp b1: no figures of the machine: the runs do not" in unfolded(shown.stdout)
    assert "times what" not in shown.stdout and "fixed_step" not in shown.stdout
    for words in (("--series", "up"), ("--fit", "full-0")):
        ended = moereplay("calibrate", "series", tmp_path / "runs.csv", *words, "--out", tmp_path / "x.toml")
        assert ended.returncode == 2 and "cannot fit a platform to" in unfolded(ended.stderr)


@pytest.mark.slow
@every(
    "words, told",
    [
        (("--fit", "desk-41"), "invalid --fit 'desk-41': expected the id of a run: did you mean desk-40"),
        (
            ("--fit", "drafted"),
            "invalid --fit drafted: this run cannot be predicted: drafts or several requests",
        ),
        (
            ("--fit", "desk-0", "--fit", "desk-10", "--fit", "desk-20"),
            "--fit is given 3 times: expected one run, or two",
        ),
        (("--fit", "desk-20", "--fit", "again"), "predicted to take the same time"),
        (("--series", "dusk"), "unknown series 'dusk': did you mean desk"),
        (("--out", "x.toml"), "--out requires one group of runs, and these are 2"),
        (("--fit", "desk-0", "--fit", "other"), "belong to different groups"),
    ],
    apart=True,
)
def test_a_wrong_question_is_a_line(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    more = [
        law("drafted", cpu_moe_layers="20") | {"draft": "mtp"},
        law("again", cpu_moe_layers="20"),
        law("other", cpu_moe_layers="20", series="other"),
    ]
    ended = moereplay("calibrate", "series", table(tmp_path, *more), *words)
    assert ended.returncode == 2 and told in unfolded(ended.stderr)


@every(
    "text, told",
    [
        ("id,engine\na,b\n", "missing column 'model'"),
        ("id,engine,model,gpu,placement\na,b,c,d,e\na,b,c,d,e\n", "line 3: id 'a' repeats line 2"),
        ("id,engine,model,gpu,placement,ram_gib\na,b,c,d,e,nan\n", "invalid ram_gib 'nan': expected a number from 0"),
        ("id,engine,model,gpu,placement\n", "no runs"),
        ("id,engine,model,gpu,placement\na,b,c,d,e\n", "no run can be predicted: a: no decode rate"),
    ],
    apart=True,
)
def test_a_wrong_table_is_a_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "runs.csv").write_text(text)
    ended = moereplay("calibrate", "series", tmp_path / "runs.csv")
    assert ended.returncode == 2 and told in unfolded(ended.stderr)
