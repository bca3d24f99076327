"""`moereplay bounds` as a user meets it: the numbers of replays and bounds, and reasons where there is none."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from moereplay.analysis.gap import COMPLETE
from moereplay.simulator.config import configure
from moereplay.simulator.limits.limits import limits
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.commands.test_curve_cli import stored
from tests.kit.cases import sizes
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.tiny_runs import small_trace

GRID = ("--capacity", "25%,50%", "--eviction", "lru,static", "--workers", 1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(small_trace(), tmp_path_factory.mktemp("bounds") / "small.zarr")


def made(tmp_path: Path, **drawn: object) -> Path:
    """Two layers of six experts without logits, as those of most published recordings."""
    whole: Trace = synthesise(
        Synthetic.model_validate({"decode_tokens": 20, "logits": False, "prompt_tokens": 0, **drawn})
    )
    return stored(whole, tmp_path / "made.zarr")


@pytest.mark.slow
def test_json_has_the_limits_and_the_policies_with_parts_that_add_up(trace: Path) -> None:
    shown = moereplay("bounds", trace, *GRID, "--json")
    assert shown.returncode == 0, shown.stderr
    first, second = json.loads(shown.stdout)["bounds"]
    config = configure(capacity="25%")
    found = limits(open_trace(trace), config)
    assert (first["limits"]["relaxed"], first["limits"]["forced"]) == (found.relaxed, found.forced)
    assert first["limits"]["routed"]["freedom"] == "any of the best 4"
    assert first["limits"]["routed"]["at_least"] <= first["limits"]["routed"]["at_most"] <= first["limits"]["relaxed"]
    assert second["config"]["capacity"] == "50%"
    lru, static = first["policies"]
    assert found.complete is not None
    assert lru["complete_steps"] <= first["limits"]["complete_steps"] == found.complete.at_most
    assert lru["misses"] == replay(open_trace(trace), config).totals["misses"]
    parts = ("compulsory", "capacity", "admission", "victim")
    assert sum(lru["gap"][name] for name in parts) == lru["misses"]
    assert static["gap"]["admission"] is None and static["gap"]["admission_share"] is None
    assert first["limits"]["time_ns"] <= min(lru["time_ns"], static["time_ns"])


def test_the_table_and_the_csv_have_a_row_for_every_limit_and_policy(trace: Path) -> None:
    shown = moereplay("bounds", trace, *GRID)
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    printed = unfolded(shown.stdout)
    assert printed.count("\nseconds of a100-5gbps: estimated, not calibrated") == 2
    assert printed.count("\nany prefetch ") == 2 and "lru: " in printed and "potential after " in printed
    rows = list(csv.DictReader(moereplay("bounds", trace, *GRID, "--csv").stdout.splitlines()))
    assert len(rows) == 2 * 12 and {row["capacity"] for row in rows} == {"25%", "50%"}
    assert [row["what"] for row in rows][:3] == ["compulsory", "relaxed belady", "forced belady"]
    assert [row["what"] for row in rows][8:12] == ["lru", "static", *COMPLETE]
    complete = [int(row["complete_steps"]) for row in rows[8:12]]
    assert max(complete) == complete[3] and printed.count("\ncomplete steps, without a miss: lru ") == 2


def test_the_same_question_has_the_same_bytes_as_answer(trace: Path) -> None:
    one, other = (moereplay("bounds", trace, *GRID, "--json", "--mass", 0.8).stdout for _ in range(2))
    assert one == other and json.loads(one)["bounds"][0]["limits"]["routed"]["freedom"].startswith("any that keep 0.8")


@every(
    "options, said",
    [
        (("--miss", "drop:keep=0"), "no least time where a miss may be dropped, substituted or computed on the CPU"),
        (("--miss", "cascade:bits=4/2"), "no belady where a pool holds experts at several precisions"),
        (("--passes", "token"), ""),
    ],
)
def test_where_a_premise_fails_there_is_a_dash_and_a_reason(trace: Path, options: tuple[str, ...], said: str) -> None:
    shown = moereplay("bounds", trace, "--capacity", "25%", "--workers", 1, *options)
    assert shown.returncode == 0, shown.stderr
    assert said in unfolded(shown.stdout)
    dashed = next(line for line in shown.stdout.splitlines() if line.startswith("any prefetch")).split()[2:]
    assert (dashed[2] == "-") is bool(said)


@pytest.mark.slow
def test_unequal_bytes_in_one_pool_have_limits_and_a_way_that_comes_near_them(tmp_path: Path) -> None:
    path = made(tmp_path, geometry=sizes(2, 6, 2, [30, 20]))
    for scope, known in (("global", False), ("per_layer", True)):
        shown = moereplay("bounds", path, "--capacity", "50%", "--scope", scope, "--json", "--workers", 1)
        (document,) = json.loads(shown.stdout)["bounds"]
        found, (lru,) = document["limits"], document["policies"]
        assert found["compulsory"] <= found["relaxed"] <= found["forced"] <= lru["misses"]
        assert sum(lru["gap"][name] for name in ("compulsory", "capacity", "admission", "victim")) == lru["misses"]
        assert found["time_ns"] <= lru["time_ns"] and found["fixed_loaded_once"] <= document["accesses"]
        for name in ("relaxed", "forced"):
            reached = found[f"{name}_reached"]
            assert (reached is None) is known and (known or reached >= found[name])
    printed = moereplay("bounds", path, "--capacity", "50%", "--workers", 1)
    assert "\nrelaxed, reached " in printed.stdout and "forced belady: upper bound on hits, feasible" in printed.stdout


def test_with_logits_unequal_bytes_have_no_bound_for_other_routing_and_a_line_says_so(tmp_path: Path) -> None:
    path = made(tmp_path, geometry=sizes(2, 6, 2, [30, 20]), logits=True)
    shown = moereplay("bounds", path, "--capacity", "50%", "--workers", 1)
    assert shown.returncode == 0 and "no bound for other routing where experts" in unfolded(shown.stdout)


@pytest.mark.slow
def test_what_kind_of_number_a_bound_is_stands_wherever_it_is_printed(tmp_path: Path) -> None:
    path, kind = made(tmp_path, geometry=sizes(2, 6, 2, [30, 20])), "belady: upper bound where experts of a pool differ"
    how = ("--capacity", "50%", "--workers", 1)
    assert kind in unfolded(moereplay("replay", path, *how, "--out", tmp_path / "out").stdout)
    assert kind in unfolded(moereplay("sweep", "show", tmp_path / "out").stdout)
    document = json.loads(moereplay("replay", path, *how, "--json").stdout)
    assert any(line.startswith(kind) for line in document["remarks"])
    metrics = document["metrics"]
    assert max(metrics["hit_rate"], metrics["feasible_hit_rate"]) <= metrics["belady_hit_rate"]
    assert kind not in moereplay("replay", path, *how, "--scope", "per_layer").stdout
    page = tmp_path / "page.html"
    assert moereplay("report", tmp_path / "out", "--out", page).returncode == 0
    assert kind in page.read_text()


def test_without_logits_other_routing_is_refused_if_it_is_asked_for_and_left_out_if_not(tmp_path: Path) -> None:
    path = made(tmp_path, geometry=sizes(2, 6, 2, 30))
    plain = moereplay("bounds", path, "--capacity", "50%", "--workers", 1)
    assert plain.returncode == 0 and "routing, at least" not in plain.stdout
    assert "the trace has no router logits" in unfolded(plain.stderr)
    for option in (("--top-m", "2k"), ("--mass", 0.9), ("--top-j", 1)):
        refused = moereplay("bounds", path, *option)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "require router logits, which this trace lacks" in refused.stderr


@every(
    "options, said",
    [
        (("--json", "--csv"), "--json and --csv"),
        (("--top-m", "1"), "expected M of at least"),
        (("--top-m", "2k", "--mass", 0.5), "mutually exclusive"),
        (("--capacity", "much"), "invalid capacity 'much'"),
        (("--eviction", "lruu"), "did you mean lru?"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_before_anything_is_counted(
    trace: Path, options: tuple[object, ...], said: str
) -> None:
    refused = moereplay("bounds", trace, *options)
    assert (refused.returncode, refused.stdout) == (2, "") and said in refused.stderr
    assert refused.stderr.count("\n") == 1
