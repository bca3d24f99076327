"""Which configurations of a sweep are checked, and that every check which was complete is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import polars as pl
import pytest

from moereplay.analysis.checks import (
    COLUMN,
    Candidate,
    caption,
    check_columns,
    error_of,
    in_short,
    ringed,
    summary,
    with_checks,
)
from moereplay.results.checks import Check, How, Side, load, path_of, side_of, write
from moereplay.results.errors import ResultError
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.sweeps.checks import Checks, Run, chosen
from moereplay.sweeps.jobs import Job
from moereplay.sweeps.run import planned
from moereplay.traces.schema import Trace
from tests.kit.every import every
from tests.kit.sweeping import experiment

HOW = How(way="measured", device="desk", slow_tier="pinned", layers=2, prompt=0, tokens=4)


def side(tpot_ms: float | None, hit_rate: float = 0.5, ttft_ms: float | None = None) -> Side:
    return Side(hit_rate=hit_rate, ttft_ms=ttft_ms, tpot_ms=tpot_ms, stall_ms=0.0, bytes_per_token=1.0)


class Counting:
    """A checker that refuses some evictions, and notes what it runs."""

    def __init__(self, refused: Sequence[str] = (), fails_at: int = 99) -> None:
        self.refused, self.fails_at, self.ran, self.opened_with = refused, fails_at, [], []

    def how(self, trace: Trace) -> How:
        return HOW

    def refusal(self, trace: Trace, config: ReplayConfig) -> str | None:
        return f"no {config.eviction} here" if config.eviction in self.refused else None

    @contextmanager
    def opened(self, trace: Trace, configs: Sequence[ReplayConfig]) -> Iterator[Run]:
        self.opened_with += configs
        yield self._run

    def _run(self, config: ReplayConfig) -> tuple[Side, Side]:
        if len(self.ran) == self.fails_at:
            raise ConfigError("the slow tier failed")
        self.ran.append(config)
        return side(2.0), side(2.1)


def test_errors_are_those_of_the_replay_and_later_versions_are_refused(tmp_path):
    about = {"identity": "a", "trace": "b", "config": {}, "how": HOW, "load": 0.0}
    check = Check(**about, checked=side(2.0, 0.5), replayed=side(3.0, 0.75))
    assert (check.error, check.hit_rate_error) == (0.5, 0.25)
    write(tmp_path, check.model_copy(update={"checks_version": 2}))
    with pytest.raises(ResultError, match="version 2; upgrade moereplay"):
        load(tmp_path)


def test_a_side_has_stalls_and_all_bytes_per_token(sweep):
    result = replay(sweep.traces[0], configure(capacity="50%", prefetch="top_k"), engine="reference")
    stall, *moved = (result.totals[name] for name in ("stall_ns", "bytes_demand", "bytes_prefetch"))
    assert stall and all(moved)
    found = side_of(result, 8)
    assert (found.stall_ms, found.bytes_per_token) == (stall / 8e6, sum(moved) / 8)


@pytest.fixture
def sweep(tmp_path):
    return planned(experiment(tmp_path))


@pytest.fixture
def jobs(sweep) -> list[Job]:
    return [job for job in sweep.jobs if job.kind == "configuration"]


def named(jobs: Sequence[Job]) -> list[str]:
    return [job.identity for job in jobs]


@every("every, count", [(1, 18), (5, 4), (18, 1), (100, 1)])
def test_of_every_n_one_is_checked_and_the_choice_is_the_same_each_time(jobs, every, count):
    found = named(chosen(jobs, every, lambda job: None).jobs)
    assert len(set(found)) == len(found) == count
    assert named(chosen(jobs[::-1], every, lambda job: None).jobs) == found  # whatever the order of the axes
    assert named(chosen(jobs, 1, lambda job: None).jobs)[:count] == found  # a smaller N adds to it


def jobs_of(**axes: Sequence[str]) -> list[Job]:
    """Every combination, as jobs of one trace, the last axis fastest."""
    configs = [configure(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    return [
        Job("configuration", f"{at:016x}", None, Path("t.zarr"), "f" * 64, config, 1)
        for at, config in enumerate(configs)
    ]


GRIDS = [
    {"routing": ["standard", "cache_prior"], "eviction": ["lru", "lfu", "fifo"], "capacity": ["25%", "50%"]},
    {"capacity": ["25%", "50%"], "routing": ["standard", "cache_prior"], "eviction": ["lru", "lfu"]},
    {
        "eviction": ["lru", "lfu", "fifo", "sieve"],
        "miss": ["fetch", "substitute"],
        "contract": ["atomic", "sequential"],
    },
    {"eviction": ["lru", "lfu"], "scope": ["global", "per_layer"], "capacity": ["10%", "20%", "30%", "40%", "50%"]},
]


@every("every, axes", product([2, 3, 4, 6], GRIDS))
def test_every_value_of_every_axis_is_checked_in_proportion(axes, every):
    """Also where N divides the inner axes of the grid, whose first configuration would be the same each time."""
    jobs = jobs_of(**axes)
    found = chosen(jobs, every, lambda job: None).jobs
    for name, values in axes.items():
        counts = [sum(getattr(job.config, name) == value for job in found) for value in values]
        assert max(counts) - min(counts) <= 1, (name, counts)


@every("axes", GRIDS[:3])
def test_open_loop_sets_are_checked_first(axes):
    jobs = jobs_of(**axes)
    (first,) = chosen(jobs, len(jobs), lambda job: None).jobs
    assert first.config.policy_set().open_loop


def test_one_that_cannot_be_checked_is_skipped_and_another_is_taken(jobs):
    found = chosen(jobs, 6, lambda job: "no" if job.config.eviction != "least_stale" else None)
    assert len(found.jobs) == 3 and all(job.config.eviction == "least_stale" for job in found.jobs)
    assert all(reason == "no" and job.config.eviction != "least_stale" for job, reason in found.skipped)
    nothing = chosen(jobs, 6, lambda job: "no")
    assert (nothing.jobs, len(nothing.skipped)) == ([], 18)


def test_a_search_checks_its_pareto_set_first_and_then_others(sweep, jobs, tmp_path):
    kept = Checks(Counting(), sweep.traces, tmp_path)
    front = [jobs[7], jobs[2]]
    others = [job for job in jobs if job not in front]
    found = kept.chosen_of_search(front, jobs, 4)
    assert named(found.jobs) == named([*chosen(front, 1, lambda job: None).jobs, *kept.chosen(others, 4).jobs])
    assert {*named(found.jobs)[:2]} == {*named(front)} and len(found.jobs) == 6


def test_what_is_checked_is_not_run_again(sweep, jobs, tmp_path):
    first, again = Counting(), Counting()
    kept = Checks(first, sweep.traces, tmp_path)
    kept.run(kept.chosen(jobs, 6).jobs)
    assert len(first.ran) == 3 and len(load(tmp_path)) == 3
    once_more = Checks(again, sweep.traces, tmp_path)
    once_more.run(once_more.chosen(jobs, 6).jobs)
    assert (again.ran, again.opened_with) == ([], [])
    once_more.run(once_more.chosen(jobs, 3).jobs)
    assert len(again.ran) == 3 and len(load(tmp_path)) == 6


def test_a_failure_half_way_keeps_the_checks_before_it(sweep, jobs, tmp_path):
    kept = Checks(Counting(fails_at=2), sweep.traces, tmp_path)
    with pytest.raises(ConfigError, match="the slow tier failed"):
        kept.run(kept.chosen(jobs, 3).jobs)
    assert [path.suffix for path in (tmp_path / "checks").iterdir()] == [".json"] * 2
    rest = Counting()
    resumed = Checks(rest, sweep.traces, tmp_path)
    resumed.run(resumed.chosen(jobs, 3).jobs)
    assert len(rest.ran) == 4 and len(load(tmp_path)) == 6


def test_a_stop_ends_between_two_checks(sweep, jobs, tmp_path):
    checker = Counting()
    kept = Checks(checker, sweep.traces, tmp_path)
    kept.run(jobs, stopping=lambda: len(checker.ran) == 4)
    assert len(load(tmp_path)) == 4


def test_checks_of_other_jobs_are_not_these_ones(sweep, jobs, tmp_path):
    kept = Checks(Counting(), sweep.traces, tmp_path)
    kept.run(jobs[:4])
    assert {check.identity for check in kept.found(jobs[2:9])} == set(named(jobs[2:4]))


# ---------------------------------------------------------------- the file


def a_check(job: Job, checked: Side, replayed: Side, how: How = HOW) -> Check:
    config = job.config.model_dump(mode="json")
    about = {"identity": job.identity, "trace": job.digest, "config": config, "how": how, "load": 0.5}
    return Check.model_validate(about | {"checked": checked, "replayed": replayed})


def test_a_check_is_read_as_it_was_written(jobs, tmp_path):
    check = a_check(jobs[0], side(2.0), side(None))
    write(tmp_path, check)
    assert load(tmp_path) == [check]


DAMAGES = {
    "changed": lambda text: text.replace('"tpot_ms": 2.0', '"tpot_ms": 3.0'),
    "cut off": lambda text: text[:50],
    "no document": lambda text: "[]",
    "no digest": lambda text: json.dumps({name: each for name, each in json.loads(text).items() if name != "sha256"}),
}


@every("damage", DAMAGES, apart=True)
def test_a_damaged_check_is_refused_by_name(jobs, tmp_path, damage):
    write(tmp_path, a_check(jobs[0], side(2.0), side(2.1)))
    path = path_of(tmp_path, jobs[0].identity, HOW)
    path.write_text(DAMAGES[damage](path.read_text()))
    with pytest.raises(ResultError, match=rf"{path.name} .*: expected a file written by a check"):
        load(tmp_path)


def test_checks_in_other_ways_lie_beside_each_other(jobs, tmp_path):
    others = [HOW, HOW.model_copy(update={"tokens": 8}), HOW.model_copy(update={"throttle_bytes_per_s": 1e6})]
    for how in others:
        write(tmp_path, a_check(jobs[0], side(2.0), side(2.1), how))
    assert len(load(tmp_path)) == 3


# ---------------------------------------------------------------- what is said of them


def test_the_summary_has_mean_worst_and_hit_rates(jobs):
    checks = [a_check(jobs[0], side(2.0, 0.5), side(2.2, 0.5)), a_check(jobs[5], side(2.0, 0.5), side(1.6, 0.53))]
    line, covered, *_ = summary(checks, candidates(jobs))
    assert covered.startswith("checked of each value: ") and f"{jobs[0].config.eviction} " in covered
    assert line.startswith("checked: 2 of 18 configurations measured on desk (pinned; 4 tokens of 2 layers each): ")
    assert "replayed TPOT -5.0% (mean), mean |error| 15.0%, worst -20.0% (" in line
    assert f"eviction {jobs[5].config.eviction}" in line and "hit rate off by 3.0 points at most" in line
    live = HOW.model_copy(update={"way": "live", "model": "tiny"})
    prompts = a_check(jobs[1], side(None, ttft_ms=4.0), side(None, ttft_ms=5.0), live)
    lines = summary([*checks, prompts], candidates(jobs))
    assert "run live, tiny on desk, time emulated" in lines[1] and "replayed TTFT +25.0% (mean)" in lines[1]
    assert summary([], candidates(jobs)) == []


def candidates(jobs: Sequence[Job]) -> list[Candidate]:
    return [
        Candidate(
            job.identity,
            {"eviction": job.config.eviction, "capacity": job.config.capacity},
            job.config.policy_set().open_loop,
        )
        for job in jobs
    ]


def test_an_error_of_closed_loop_sets_does_not_stand_for_open_loop_ones():
    jobs = jobs_of(routing=["standard", "cache_prior"], eviction=["lru", "lfu"])
    standard, other = jobs[0], jobs[2]
    known = [each._replace(settings={**each.settings, "routing": job.config.routing}) for each, job in
             zip(candidates(jobs), jobs, strict=True)]  # fmt: skip
    closed = a_check(standard, side(2.0), side(2.0))
    line, covered, missing = summary([closed], known)
    assert "closed-loop, 1 of 2: replayed TPOT +0.0%" in line
    assert "open-loop, none of 2" in line
    assert "routing cache_prior 0 of 2, standard 1 of 2" in covered
    assert missing == "not checked: no configuration with eviction=lfu, routing=cache_prior"
    both, *_ = summary([closed, a_check(other, side(2.0), side(3.0))], known)
    assert "closed-loop, 1 of 2: replayed TPOT +0.0%" in both and "open-loop, 1 of 2: replayed TPOT +50.0%" in both


def test_columns_are_null_where_nothing_was_checked(jobs):
    ranking = pl.DataFrame({"identity": named(jobs[:3])})
    table = check_columns(ranking, [a_check(jobs[1], side(2.0), side(2.2))])
    assert table["check"].to_list() == [None, "measured", None]
    assert table["check_tpot_ms"].to_list() == [None, 2.0, None]
    assert table["check_error"][1] == pytest.approx(0.1)
    assert [row["error"] for row in in_short(table.to_dicts())] == [None, "+10.0%", None]
    assert in_short(table.head(1).to_dicts()) == [{"identity": jobs[0].identity}]
    assert check_columns(ranking, [a_check(jobs[9], side(2.0), side(2.2))]).columns == ["identity"]


def test_a_measured_check_of_more_tokens_is_the_one_that_is_shown(jobs):
    live, long = (HOW.model_copy(update=said) for said in ({"way": "live", "tokens": 90}, {"tokens": 8}))
    checks = [a_check(jobs[0], side(1.0 * at), side(1.0), how) for at, how in enumerate((HOW, long, live), 1)]
    assert check_columns(pl.DataFrame({"identity": named(jobs[:1])}), checks)["check_tpot_ms"].to_list() == [2.0]


def test_frames_have_a_column_of_checks_only_where_some_are(jobs):
    frame = pl.DataFrame([{"about": {"identity": name}} for name in named(jobs[:3])])
    assert COLUMN not in with_checks(frame, []).columns
    assert caption(frame, "tpot_ms") == error_of(frame, "tpot_ms") == ""
    known = with_checks(frame, [a_check(jobs[1], side(2.0), side(2.2))])
    assert ringed(known, "tpot_ms") == [jobs[1].identity] and ringed(known, "ttft_ms") == ringed(frame, "tpot_ms") == []
    assert caption(known, "tpot_ms") == (
        "Ringed: 1 of 3 configurations, which were measured on a part of the trace, "
        "where the replayed TPOT is off by 10.0% (mean |error|; worst +10.0%)."
    )
    assert caption(known, "ttft_ms") == "" and "hit rate is off by 0.0 points at most" in caption(known, "hit_rate")


def test_a_trace_without_such_jobs_is_not_opened(sweep, jobs, tmp_path):
    checker = Counting()
    Checks(checker, sweep.traces, tmp_path).run([])
    assert checker.opened_with == [] and not Path(tmp_path / "checks").exists()
