"""Fits on made-up runs find the prices that made them, and say what they cannot know."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moereplay.calibration.evidence import fit_of, from_files, from_fits, globs_of, predictions, runs_of
from moereplay.calibration.files import read_folder
from moereplay.calibration.fitting import Fitted
from moereplay.calibration.prediction import as_run
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import as_toml, platform
from moereplay.simulator.replay import plan
from moereplay.traces.store import open_trace
from tests.kit.every import every
from tests.kit.evidence_folder import LANE, LINK, NS_PER_MIB, RATE, START_PER_MIB, made, row

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"
BASE = "phone-ufs4:compute.launch_ns=0"
FIT = ["made-off*", "made-half*", "made-two-lanes"]


def fitted(folder: Path, globs: list[str]):
    evidence = read_folder(folder)
    runs, _ = runs_of(evidence, evidence.chosen(globs))
    return fit_of(runs, globs, platform(BASE), evidence)


@pytest.fixture(scope="module")
def known_fit(tmp_path_factory) -> Callable[[float], Fitted]:
    """The fit of a folder with so much noise, made once: it takes seconds."""

    @cache
    def of(noise: float) -> Fitted:
        return fitted(made(tmp_path_factory.mktemp("noisy") / "made", noise), FIT)

    return of


@pytest.mark.parametrize(("noise", "off"), [(0.0, 0.01), pytest.param(0.05, 0.08, marks=pytest.mark.long)])
def test_the_prices_that_made_a_folder_are_found_again(known_fit, noise, off):
    found = known_fit(noise).figures
    known = {"memory_bytes_per_s": RATE, "ns_per_mib": NS_PER_MIB, "bytes_per_s": LINK, "lane_bytes_per_s": LANE}
    for name, value in known.items():
        assert found[name].value == pytest.approx(value, rel=off), name
    assert found["start_ns_per_mib"].value == pytest.approx(START_PER_MIB, rel=4 * off)
    assert [figure.n for figure in found.values()] == [5, 5, 5, 5, 3]


def test_one_demand_gives_one_rate_and_says_so_or_two_in_a_ratio_that_the_base_states(tmp_path, known_fit):
    """Of 660 MiB that a token reads 160 are experts: read at .6 of the rate of the others, they count as 266.7."""
    assert "expert_bytes_per_s" not in known_fit(0.0).figures
    assert any("single rate" in line for line in known_fit(0.0).warnings)
    evidence = read_folder(made(tmp_path / "made"))
    runs, _ = runs_of(evidence, evidence.chosen(FIT))
    base = platform("phone-ufs4")
    assert base.tried is not None
    stated = base.tried.model_copy(update={"expert_rate": 0.6})
    plain = platform(BASE).compute  # without launches
    found = fit_of(runs, FIT, base.model_copy(update={"compute": plain, "tried": stated}), evidence)
    dense, experts = (found.figures[name].value for name in ("memory_bytes_per_s", "expert_bytes_per_s"))
    assert dense == pytest.approx(RATE * (500 + 160 / 0.6) / 660, rel=0.001)
    assert experts == pytest.approx(0.6 * dense)
    assert any("0.6" in line and "phone-ufs4" in line for line in found.warnings)
    assert found.platform.tried is None


def test_two_demands_identify_two_rates(tmp_path):
    """Compute of 500 MiB of dense weights at 20 GB/s, and of 160 or 480 MiB of experts at 12."""
    ms = {k: (500 / 20e9 + 40 * k / 12e9) * 2**20 * 1e3 for k in (4, 12)}
    more = [row(f"two-{k}", k=k, compute_ms=each, stall_ms=40, hit_pct=50, tpot_ms=each + 40) for k, each in ms.items()]
    found = fitted(made(tmp_path / "more", more=[each | {"overlap": "yes", "lanes": 4} for each in more]), ["two-*"])
    assert found.figures["memory_bytes_per_s"].value == pytest.approx(20e9, rel=0.001)
    assert found.figures["expert_bytes_per_s"].value == pytest.approx(12e9, rel=0.001)
    assert not any("one demand" in line for line in found.warnings)


def test_runs_without_overlap_may_read_at_a_rate_of_their_own(tmp_path, known_fit):
    """The waits of the serial runs are 1.25 times as long, as if their link moved 1.92 GB/s and started later."""
    assert "serial_bytes_per_s" not in known_fit(0.0).figures
    folder = made(tmp_path / "made")
    for name in ("made-off", "made-half"):
        log = folder / "tokens" / f"{name}.csv"
        header, *lines = log.read_text().splitlines()
        at = header.split(",").index("io_ms")
        rows = [line.split(",") for line in lines]
        for cell in rows:
            cell[at] = str(float(cell[at]) * 1.25)
        log.write_text("\n".join([header, *(",".join(cell) for cell in rows)]) + "\n")
    found = fitted(folder, ["made-off", "made-half", "made-off-ov", "made-half-ov"])
    rates = [found.figures[name].value for name in ("serial_bytes_per_s", "bytes_per_s")]
    assert rates[0] / rates[1] == pytest.approx(1 / 1.25, rel=0.08)
    about = found.platform.calibration
    assert about is not None and about.serial_bytes_per_s == pytest.approx(rates[0])
    run = found.runs[0]
    assert run.serial and as_run(found.platform, run).links[0].bytes_per_s == about.serial_bytes_per_s


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.05, marks=pytest.mark.long)])
def test_the_same_runs_give_the_same_figures(tmp_path, known_fit, noise):
    assert fitted(made(tmp_path / "made", noise), FIT).figures == known_fit(noise).figures


@pytest.mark.long
def test_runs_held_out_are_predicted(tmp_path):
    evidence = read_folder(made(tmp_path / "made", 0.02))
    machines = from_fits(evidence, FIT, platform(BASE))
    found = {each.cell: each for each in predictions(evidence, machines)}
    assert {name for name, each in found.items() if each.role == "held_out"} == {"made-fifth-ov", "made-tenth-ov"}
    for each in found.values():
        assert each.time_error == pytest.approx(0, abs=0.02)


def test_a_calibration_remembers_what_it_was_fitted_on(tmp_path, known_fit):
    evidence = read_folder(made(tmp_path / "made"))
    file = tmp_path / "desk.toml"
    file.write_text(as_toml(known_fit(0.0).platform))
    machines = from_files([str(file)])
    roles = {each.cell: each.role for each in predictions(evidence, machines)}
    assert sorted(name for name, role in roles.items() if role == "held_out") == ["made-fifth-ov", "made-tenth-ov"]
    about = machines.platforms["desk"].calibration
    assert about is not None and globs_of(about.method) == FIT
    assert globs_of("an unclosed ' quote") == []


def test_management_inside_compute_is_taken_out(tmp_path):
    """Without its column what loading took is in compute, as early builds of one engine log it."""
    folder = made(tmp_path / "made")
    for log in (folder / "tokens").glob("made-half*.csv"):
        header, *lines = log.read_text().splitlines()
        cells = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
        for cell in cells:
            cell["compute_ms"] = str(float(cell["compute_ms"]) + float(cell["mgmt_ms"]))
            cell["mgmt_ms"] = ""
        log.write_text("\n".join([header, *(",".join(cell.values()) for cell in cells)]) + "\n")
    found = fitted(folder, [*FIT, "made-fifth-ov"])
    assert found.figures["memory_bytes_per_s"].value == pytest.approx(RATE, rel=0.001)
    assert found.figures["memory_bytes_per_s"].n == 4
    inside = [line for line in found.warnings if "inside compute" in line]
    assert inside and "imply" not in inside[0] and "implies 20.0 to 20.0 GB/s, the others 20.0" in inside[0]


def test_the_price_of_a_page_fault_is_found_and_said_where_memory_is_short(tmp_path):
    folder = made(tmp_path / "made")
    draw = np.random.default_rng(5)
    for name in ("made-half", "made-half-ov"):
        log = folder / "tokens" / f"{name}.csv"
        header, *lines = log.read_text().splitlines()
        at, faults = header.split(",").index("compute_ms"), draw.integers(20, 400, len(lines))
        rows = [line.split(",") for line in lines]
        for cell, each in zip(rows, faults.tolist(), strict=True):
            cell[at] = str(float(cell[at]) + each * 0.08)
        cells = [",".join([*cell, str(each)]) for cell, each in zip(rows, faults.tolist(), strict=True)]
        log.write_text("\n".join([f"{header},majflt", *cells]) + "\n")
    found = fitted(folder, FIT)
    assert found.figures["fault_ns"].value == pytest.approx(80_000, rel=0.01)
    assert found.figures["fault_ns"].n == 2
    file = tmp_path / "desk.toml"
    file.write_text(as_toml(found.platform))
    assert platform(str(file)).fault_ns == found.platform.fault_ns
    small = configure(capacity="50%", platform=f"{file}:memory_bytes=5")
    said = plan(open_trace(SAMPLE), small).warning
    assert said is not None and "a real machine would fault pages, which cost 80 us each here" in said


def test_a_run_that_reads_nothing_says_nothing_of_the_link(tmp_path, known_fit):
    """All experts are cached; what it waited is not for bytes. Alone such runs are refused."""
    waits = {"compute_ms": 30, "tpot_ms": 31, "lanes": 4}
    kept = [row("all-hit", hit_pct=100, overlap="yes", stall_ms=1, **waits)]
    kept.append(row("no-read", read_mib_per_token=0, hit_pct=50, overlap="no", io_ms=1, **waits))
    folder = made(tmp_path / "made", more=kept)
    found, plain = fitted(folder, [*FIT, "all-hit", "no-read"]).figures, known_fit(0.0).figures
    for name in ("bytes_per_s", "start_ns_per_mib", "lane_bytes_per_s"):
        assert found[name] == plain[name], name
    with pytest.raises(ConfigError, match="several memory budgets"):
        fitted(folder, ["all-hit", "no-read"])


def test_outliers_among_tokens_are_said_in_plain_words(tmp_path):
    folder = made(tmp_path / "made")
    log = folder / "tokens" / "made-half.csv"
    header, first, *others = log.read_text().splitlines()
    cells = first.split(",")
    cells[header.split(",").index("wall_ms")] = "9000"
    log.write_text("\n".join([header, ",".join(cells), *others]) + "\n")
    said = next(line for line in fitted(folder, ["made-off", "made-half"]).warnings if line.startswith("made-half: "))
    assert said.endswith(" times the median one; such outliers are not modelled")


def test_one_lane_count_tells_no_ceiling_of_lanes(tmp_path):
    found = fitted(made(tmp_path / "made"), ["made-off", "made-half", "made-fifth-ov"]).figures
    assert "lane_bytes_per_s" not in found
    assert found["bytes_per_s"].value == pytest.approx(LINK, rel=0.01)


def test_runs_that_publish_a_time_and_hits_alone_give_a_line(tmp_path):
    """A token without misses takes 100 ms; 80 experts of 2 MiB that all miss take 40 more."""
    times = {"line-none": (100, 100.0), "line-half": (50, 120.0), "line-all": (0, 140.0)}
    more = [row(name, device="far", hit_pct=hits, tpot_ms=ms) for name, (hits, ms) in times.items()]
    evidence = read_folder(made(tmp_path / "made", more=more))
    machines = from_fits(evidence, ["line-none", "line-all"], platform(BASE))
    found = {each.cell: each for each in predictions(evidence, machines) if each.device == "far"}
    assert found["line-half"].predicted["tpot_ms"] == pytest.approx(120, rel=0.01)
    assert machines.platforms["far"].links[0].bytes_per_s == pytest.approx(80 * 2**21 / 0.04, rel=0.02)


@every(
    "globs, said",
    [
        (["made-offf"], "--fit 'made-offf' matches no cell of .*cells.csv: did you mean made-off"),
        (["made-off", "else"], "desk, else-where"),
        (["same*"], "several memory budgets"),
    ],
    apart=True,
)
def test_what_cannot_be_fitted_is_refused_by_name(tmp_path, globs, said):
    more = [
        row("else", device="else-where", hit_pct=50, tpot_ms=9),
        *(row(f"same{at}", hit_pct=50, tpot_ms=9) for at in "ab"),
    ]
    folder = made(tmp_path / "made", more=more)
    with pytest.raises(ConfigError, match=said):
        fitted(folder, globs)
