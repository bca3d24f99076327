"""Jobs that share decisions: the same bytes as jobs alone, whatever fails, dies or runs elsewhere."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.sweeps import grid
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.jobs import Batch, Headline, Job, compute, shard
from moereplay.sweeps.run import MOST_JOBS, Sweep, planned
from moereplay.sweeps.store import Folder
from moereplay.traces.store import open_trace
from tests.kit.sweeping import experiment, merged, moereplay, start
from tests.sweeps.test_dispatch import Pretended, job, run

#: 5 platforms, of which one has a lower tier; the last capacity is below the demand of a prompt.
GRID = """
traces = ["tiny.zarr"]
[grid]
platform = ["rtx4090-pcie4", "phone-ufs4", "desktop-ram", "desktop-24gb", "h100-pcie5"]
capacity = ["60%", "40%", "1000B"]
eviction = ["lru", "least_stale"]
prefetch = ["none", "top_k"]
routing = ["standard", "cache_prior"]
"""
PLAIN = 4  #: of the platforms


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Sweep:
    return planned(experiment(tmp_path_factory.mktemp("shared"), GRID))


def stored(out: Path, *parts: list[Job]) -> list[Headline]:
    """Run batches of jobs here and now; return all headlines."""
    headlines = []
    for number, jobs in enumerate(parts):
        made = compute(Batch(number, tuple(jobs), "compiled", True))
        Folder(out).store(made.part, {"sweep_version": 1})
        headlines += made.headlines
    return headlines


@pytest.mark.slow
def test_shared_decisions_give_the_bytes_of_jobs_alone(sweep, tmp_path):
    """Three of four plain platforms take over the decisions of the first, at capacities that hold every demand.

    With prefetch those of another do so on which transfers land in the same order.
    """
    grouped = sorted(sweep.jobs, key=lambda job: job.shares)
    together = stored(tmp_path / "together", grouped)
    alone = stored(tmp_path / "alone", *([job] for job in sweep.jobs))
    assert merged(tmp_path / "a", tmp_path / "together") == merged(tmp_path / "b", tmp_path / "alone")
    assert not any(headline.shared for headline in alone)
    took = {headline.key for headline in together if headline.shared}
    jobs, following = (
        [job for job in sweep.jobs if job.key in took and job.config.prefetch == name] for name in ("none", "top_k")
    )
    assert {job.config.capacity for job in jobs} == {"60%", "40%"} and len(jobs) == (PLAIN - 1) * 2 * 2 * 2
    assert 0 < len(following) < (PLAIN - 1) * 3 * 2 * 2


def test_a_failing_job_does_not_lose_those_that_share_with_it(sweep, tmp_path, monkeypatch):
    """Neither the first of its group, whose decisions the others would have taken over, nor another."""
    group = [job for job in sweep.jobs if job.shares and job.shares == sweep.jobs[0].shares]
    stored(tmp_path / "alone", *([job] for job in group))
    of_all = merged(tmp_path / "a", tmp_path / "alone")
    for failing in (group[0], group[1]):
        out = tmp_path / failing.identity
        with monkeypatch.context() as patch:
            real = replay

            def fails(trace, config, failing=failing, real=real, **more):
                if config == failing.config:
                    raise ConfigError("no such thing")
                return real(trace, config, **more)

            patch.setattr("moereplay.sweeps.jobs.replay", fails)
            headlines = stored(out, group)
        assert [headline.key for headline in headlines if headline.error] == [failing.key]
        assert sum(headline.shared for headline in headlines) == PLAIN - 2
        stored(out, [failing])  # a resumed sweep runs it again, alone
        assert merged(tmp_path / f"m-{failing.identity}", out) == of_all


def test_a_grid_yields_what_precedes_a_failure_in_its_order(sweep, monkeypatch):
    trace = open_trace(sweep.jobs[0].trace)
    configs = [job.config for job in sweep.jobs if job.kind == "configuration" and job.config.prefetch == "none"][:24]
    alone = [outcome for config in configs for outcome in run_grid(trace, [config])]
    taken: list[int] = []
    assert list(run_grid(trace, configs, workers=2, took=taken.append)) == alone and sum(taken) > 0
    real = grid.replay

    def fails(trace, config, *more, **others):
        if config == configs[5]:
            raise ConfigError("no such thing")
        return real(trace, config, *more, **others)

    monkeypatch.setattr(grid, "replay", fails)
    outcomes = run_grid(trace, configs)
    assert [next(outcomes) for _ in range(5)] == alone[:5]
    with pytest.raises(ConfigError, match="no such thing"):
        next(outcomes)


def of_group(number: int, group: str) -> Job:
    found = job(number)
    return Job(
        *(getattr(found, name) for name in ("kind", "identity", "bound", "trace", "digest", "config", "work")),
        shares=group,
    )


def test_jobs_that_share_are_in_one_batch_and_one_shard():
    """Groups in turns, as a grid lists them; a group of more than a batch holds is cut."""
    jobs = [of_group(number, f"{number % 5:x}") for number in range(50)]
    executor = Pretended()
    assert run(jobs, executor).done == 50
    groups = [{job.shares for job in batch.jobs} for batch in executor.batches]
    assert sum(map(len, groups)) == 5
    large = [of_group(number, "a") for number in range(MOST_JOBS + 1)]
    executor = Pretended()
    assert run(large, executor).done == len(large)
    assert [len(batch.jobs) for batch in executor.batches] == [MOST_JOBS, 1]
    for number in range(5):
        (where,) = [at for at in (1, 2, 3) if jobs[number] in shard(jobs, (at, 3))]
        assert all(each in shard(jobs, (where, 3)) for each in jobs[number::5])


def test_jobs_with_prefetch_share_only_as_long_as_others_are_left_for_idle_workers(sweep):
    """They may decide differently, so that the second waits for the first in vain."""
    executor = Pretended(slots=2)
    alike = [replace(of_group(number, "a"), config=configure(prefetch="top_k", seed=number)) for number in range(8)]
    assert run(alike, executor).done == 8
    assert [len(batch.jobs) for batch in executor.batches] == [7, 1]
    executor, trace = Pretended(slots=8), open_trace(sweep.jobs[0].trace)
    assert run(alike, executor).done == 8
    assert [len(batch.jobs) for batch in executor.batches] == [1] * 8
    for prefetch, workers, many in (("top_k", 1, 1), ("top_k", 2, 3), ("none", 2, 1)):
        configs = [configure(prefetch=prefetch, platform=of) for of in ("rtx4090-pcie4", "phone-ufs4", "h100-pcie5")]
        assert len(grid._groups(grid.Run(trace, False, "compiled"), configs, workers)) == many


@pytest.mark.long
def test_a_sweep_that_is_killed_with_shared_jobs_resumes_to_the_same_bytes(tmp_path):
    file = experiment(tmp_path, GRID)
    code, _, said = moereplay("sweep", "run", file, "--out", tmp_path / "whole", "--workers", 2)
    assert code == 0 and "only times were computed" in said
    process = start("sweep", "run", file, "--out", tmp_path / "killed", "--workers", 2)
    while not any((tmp_path / "killed").glob("part-*")) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert moereplay("sweep", "run", file, "--out", tmp_path / "killed", "--workers", 2)[0] == 0
    assert merged(tmp_path / "a", tmp_path / "killed") == merged(tmp_path / "b", tmp_path / "whole")
