"""Joules and millijoules per token: a worked example, the same from a result, a frame and what was stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import approx

from moereplay.analysis.metrics import figures_of, measured
from moereplay.analysis.ranking import ranking
from moereplay.results.counters import DECODED, ENERGY, WATTS, nanojoules
from moereplay.results.files import to_frame
from moereplay.results.read import layers
from moereplay.results.result import values_of
from moereplay.results.stored import load
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import as_toml, platform
from moereplay.simulator.replay import replay
from moereplay.sweeps.parts import keep
from tests.kit.policy_runs import Sizes, random_trace

POWER = "[power]\nidle_w = 50\ncompute_w = 200\ncpu_w = 80\nlink_w = 10\n"


def powered(folder: Path, text: str = POWER, name: str = "powered.toml") -> str:
    (folder / name).write_text(f'name = "powered"\nbase = "desktop-ram"\n{text}')
    return str(folder / name)


def test_the_worked_example() -> None:
    # 5,000 ns at 50 W idle; compute 1,000 + 600 + 100 at 200 W; the CPU 900 at 80 W; links 2,500 at 10 W.
    # 250,000 + 340,000 + 72,000 + 25,000 = 687,000 nJ. Decoding: dense 500, experts 200, loading 0 and stall 300 are
    # 1,000 ns at 50 W, 700 of them at 200 W, the CPU 400 at 80 W, links 1,000 at 10 W: 50 + 140 + 32 + 10 thousand nJ
    about = dict(zip(WATTS, (50.0, 200.0, 80.0, 10.0), strict=True))
    names = ("dense_ns", "expert_ns", "loading_ns", "stall_ns", "cpu_ns", "link_busy_ns")
    prompt = dict(zip(names, (500, 400, 100, 3_000, 500, 1_500), strict=True))
    decode = dict(zip(names, (500, 200, 0, 300, 400, 1_000), strict=True))
    totals = {name: prompt[name] + decode[name] for name in names} | {"time_ns": 5_000}
    rows = [{"phase": "prefill", **prompt}, {"phase": "decode", **decode}]
    assert nanojoules(about, totals, rows) == {ENERGY: 687_000, DECODED: 232_000}
    assert nanojoules({}, totals, rows) == {}


@pytest.mark.parametrize("passes", ["recorded", "batch:2"])
def test_a_result_a_frame_and_a_stored_one_have_the_same_energy(passes: str, tmp_path: Path) -> None:
    trace = random_trace(2, Sizes(prompt=4, requests=2))
    config = configure(capacity="40%", miss="split", passes=passes, platform=powered(tmp_path))
    result = replay(trace, config, engine="reference")
    totals, found = result.totals, values_of(result)
    busy = 200 * (totals["dense_ns"] + totals["expert_ns"] + totals["loading_ns"])
    joules = (50 * totals["time_ns"] + busy + 80 * totals["cpu_ns"] + 10 * totals["link_busy_ns"]) / 1e9
    assert found["joules"] == approx(joules)
    assert 0 < (found["mj_per_token"] or 0) < joules * 1000
    figures = figures_of(to_frame([result], [None]))
    list(keep(tmp_path / "out", trace, [config], iter([(result, None)]), "reference"))
    stored = measured(load(tmp_path / "out"))
    for name in ("joules", "mj_per_token"):
        assert figures[name] == approx(found[name]) == approx(stored[name][0])
    assert ranking([result.to_json() | {"bounds": None}])[0]["mj_per_token"] == approx(found["mj_per_token"])


def test_the_phases_are_the_run(tmp_path: Path) -> None:
    """Energy per layer and phase adds up: nothing idles between passes."""
    trace = random_trace(2, Sizes(prompt=4, requests=2))
    result = replay(trace, configure(capacity="40%", miss="cpu", platform=powered(tmp_path)), engine="reference")
    rows = [dict(row) | {"phase": "decode"} for row in result.per_layer]
    found = nanojoules(result.about, result.totals, rows)
    assert found[DECODED] == approx(found[ENERGY])
    assert sum(layers(to_frame([result], [None]))["dense_ns"]) == result.totals["dense_ns"]


def test_watts_change_no_result_and_no_identity(tmp_path: Path) -> None:
    trace = random_trace(2, Sizes())
    with_watts, without = (
        replay(trace, configure(capacity="40%", platform=name), engine="reference")
        for name in (powered(tmp_path), powered(tmp_path, "", "plain.toml"))
    )
    assert with_watts.totals == without.totals
    assert with_watts.about["identity"] == without.about["identity"]
    assert platform(powered(tmp_path)).figures() == platform("desktop-ram").figures()
    assert values_of(without)["joules"] is values_of(without)["mj_per_token"] is None
    assert not {*WATTS} & without.about.keys()
    assert "mj_per_token" not in ranking([without.to_json() | {"bounds": None}])[0]
    frame = to_frame([with_watts, without], [None, None])
    assert [each is None for each in measured(frame)["joules"]] == [False, True]


def test_a_file_gives_the_watts_back(tmp_path: Path) -> None:
    machine = platform(powered(tmp_path))
    (tmp_path / "again.toml").write_text(as_toml(machine))
    assert platform(str(tmp_path / "again.toml")).power == machine.power
    changed = platform(f"{powered(tmp_path)}:power.cpu_w=120").power
    assert changed is not None
    assert (changed.cpu_w, changed.idle_w) == (120, 50)
    given = platform("desktop-ram:power.compute_w=300:power.idle_w=40").power
    assert given is not None
    assert (given.compute_w, given.idle_w, given.link_w) == (300, 40, 0)
    with pytest.raises(ConfigError, match=r"power\.link_w: expected at least 0"):
        platform(powered(tmp_path, "[power]\nlink_w = -1\n"))
    assert "power" not in as_toml(platform("desktop-ram"))
