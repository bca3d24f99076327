"""Parts of a sweep: the rows of a replay, whole or not at all, the same bytes however the work was cut."""

import json
import os
import shutil
import time
from pathlib import Path

import polars as pl
import pytest

from moereplay.analysis.figures.catalogue import FIGURES, draw_all
from moereplay.analysis.metrics import averaged, grouped, measured, ranked
from moereplay.results.counters import COUNTERS
from moereplay.results.errors import ResultError
from moereplay.results.parts import Part, frame_bytes
from moereplay.results.read import filtered
from moereplay.results.stored import errors, load
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.sweeps.grid import run_grid
from moereplay.sweeps.jobs import Batch, Job, compute, job_of, open_traces
from moereplay.sweeps.parts import keep, merge
from moereplay.sweeps.run import Sweep, estimate, left_to_do, planned
from moereplay.sweeps.store import Folder
from moereplay.traces.files import bundled
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace
from tests.kit.every import every
from tests.kit.sweeping import GRID, experiment, store_trace
from tests.kit.tiny_runs import SMALL, frame_of, small_trace, written_before

ABOUT = {"sweep_version": 1}


def done(out: Path, jobs: list[Job], requests: bool = True) -> None:
    """Run jobs here and now, as one part."""
    Folder(out).store(compute(Batch(0, tuple(jobs), "reference", requests)).part, ABOUT)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Sweep:
    return planned(experiment(tmp_path_factory.mktemp("sweep")))


@pytest.fixture(scope="module")
def whole(sweep, tmp_path_factory) -> Path:
    """Every job of the sweep as one part."""
    out = tmp_path_factory.mktemp("whole")
    done(out, sweep.jobs)
    return out


def test_a_sweep_is_every_combination_and_a_bound_per_capacity(sweep):
    kinds = [job.kind for job in sweep.jobs]
    assert (kinds.count("configuration"), kinds.count("bound")) == (18, 3)
    assert {job.bound for job in sweep.jobs} == {job.identity for job in sweep.jobs if job.kind == "bound"}


def test_rows_hold_what_the_replay_says(sweep, whole):
    """Every counter of the totals, of each layer and phase and of each request, one configuration after the other."""
    read = {
        name: pl.read_parquet(whole / f"part-*/{name}.parquet") for name in ("configurations", "layers", "requests")
    }
    trace = open_trace(sweep.jobs[0].trace)
    for job in sweep.jobs[:4]:
        result = replay(trace, job.config)
        (row,) = read["configurations"].filter(identity=job.identity).to_dicts()
        assert {name: row[counter.heading] for name, counter in COUNTERS.items()} == {
            name: result.totals[name] for name in COUNTERS
        }
        assert row["eviction"] == job.config.eviction
        for table, expected in (("layers", result.per_layer), ("requests", result.per_request)):
            rows = read[table].filter(identity=job.identity).drop("rows_version", "identity")
            assert rows.rename({"capacity_misses": "capacity"}).to_dicts() == expected


@pytest.mark.slow
def test_a_sweep_reads_like_replays(sweep, whole, tmp_path):
    """The same rows as from the folders that `replay --out` writes, and wrote until November 2026."""
    trace, configs = open_trace(sweep.jobs[0].trace), [job.config for job in sweep.jobs if job.kind == "configuration"]
    outcomes = list(keep(tmp_path / "now", trace, configs, run_grid(trace, configs, by_layer=None), "compiled"))
    written_before(tmp_path / "then", *zip(*outcomes, strict=True))
    assert load(tmp_path / "now").equals(load(whole))
    later = "per_request_layer"  # which no folder had
    assert load(tmp_path / "then").drop(later).equals(load(whole).drop(later))
    assert [name for name, _ in draw_all(load(whole)).figures] == list(FIGURES)


def test_parts_of_before_a_counter_was_added_are_read_and_merged(whole, tmp_path):
    """Null where it was not counted; beside new parts, too."""
    for part in Folder(whole).parts():
        found = {path.stem: pl.read_parquet(path) for path in part.path.glob("*.parquet")}
        files = {name: frame_bytes(rows.drop("predictable", strict=False)) for name, rows in found.items()}
        own = {name: part.provenance[name] for name in part.provenance.keys() - {"holds", "sha256", "digest"}}
        Folder(tmp_path / "old").store(Part(files, part.provenance["holds"]), own)
    new, old = (measured(load(folder)).sort("identity") for folder in (whole, tmp_path / "old"))
    assert old["predictor_recall"].null_count() == len(old) > new["predictor_recall"].null_count()
    changed = ["predictable", "predictor_recall"]
    assert old.drop(changed).equals(new.drop(changed))
    both = merge([Folder(tmp_path / "old"), Folder(whole)], Folder(tmp_path / "both"))
    assert both.configurations == len(new) == len(load(tmp_path / "both"))
    assert measured(load(tmp_path / "both")).sort("identity").equals(new)  # what counted more stays
    with pytest.raises(ConfigError, match=r"no results in .*misspelt"):
        merge([Folder(whole), Folder(tmp_path / "misspelt")], Folder(tmp_path / "part of it"))


def test_latencies_do_not_need_the_rows_of_requests(sweep, whole, tmp_path):
    done(tmp_path, sweep.jobs, requests=False)
    assert not list(tmp_path.glob("part-*/requests.parquet"))
    names = ["ttft_mean_ms", "ttft_median_ms", "tpot_ms", "tokens_per_s"]
    without, with_rows = (measured(load(folder)).select(names) for folder in (tmp_path, whole))
    assert without.equals(with_rows)
    assert without.null_count().sum_horizontal().item() == 0


def test_equal_work_is_a_part_of_equal_name_and_bytes(sweep, whole, tmp_path):
    done(tmp_path, sweep.jobs)
    done(tmp_path, sweep.jobs)  # the second finds the first and leaves it
    (first,), (second,) = (list(folder.glob("part-*")) for folder in (whole, tmp_path))
    assert first.name == second.name
    for file in first.glob("*.parquet"):
        assert file.read_bytes() == (second / file.name).read_bytes()
    assert not (tmp_path / "tmp").exists()


def test_what_is_stored_is_not_left_to_do(sweep, tmp_path):
    assert left_to_do(sweep, Folder(tmp_path), sweep.jobs) == sweep.jobs
    done(tmp_path, sweep.jobs[:5], requests=False)
    assert left_to_do(sweep, Folder(tmp_path), sweep.jobs) == sweep.jobs[5:]
    wants_requests = sweep._replace(experiment=sweep.experiment.model_copy(update={"requests": True}))
    assert left_to_do(wants_requests, Folder(tmp_path), sweep.jobs) == sweep.jobs  # their rows per request are missing


def test_a_failing_configuration_is_an_error_row_beside_the_others_and_gives_way_to_a_result(sweep, tmp_path):
    trace = tmp_path / "gone.zarr"
    store_trace(trace, seed=5)
    bad = job_of(open_trace(trace), configure(capacity="40%"))
    shutil.rmtree(trace)
    done(tmp_path / "out", [bad, *sweep.jobs[:2]])
    table = errors(tmp_path / "out")
    assert table["identity"].to_list() == [bad.identity]
    assert "gone.zarr does not exist" in table["error"][0]
    assert len(load(tmp_path / "out")) == 2
    assert left_to_do(sweep, Folder(tmp_path / "out"), [bad]) == [bad]  # it is tried again
    store_trace(trace, seed=5)
    done(tmp_path / "out", [bad], requests=False)
    assert errors(tmp_path / "out").is_empty()
    assert merge([Folder(tmp_path / "out")], Folder(tmp_path / "merged"))[1:] == (3, 0)


def test_a_trace_that_changed_is_not_replayed_under_its_old_name(tmp_path):
    store_trace(tmp_path / "t.zarr", seed=6)
    job = job_of(open_trace(tmp_path / "t.zarr"), configure())
    shutil.rmtree(tmp_path / "t.zarr")
    store_trace(tmp_path / "t.zarr", seed=7)
    made = compute(Batch(0, (job,), "reference", False))
    assert "has changed since the sweep began" in (made.headlines[0].error or "")


def test_a_full_disk_leaves_no_part_and_says_what_to_do(sweep, tmp_path, monkeypatch):
    part = compute(Batch(0, tuple(sweep.jobs[:2]), "reference", False)).part

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device; stored results are kept"):
        Folder(tmp_path).store(part, ABOUT)
    assert not list(tmp_path.iterdir())


def test_tables_rank_and_group(whole):
    frame = load(whole)
    best = ranked(frame, "hit_rate")
    assert best["hit_rate"].to_list() == sorted(best["hit_rate"], reverse=True)
    assert ranked(frame, "tpot_ms")["tpot_ms"].is_sorted()
    groups = grouped(frame, ["capacity"], "hit_rate")
    assert groups["configurations"].to_list() == [6, 6, 6]
    (largest,) = groups.filter(capacity="60%")["hit_rate"]
    assert largest == pytest.approx(best.filter(capacity="60%")["hit_rate"].mean())
    only_lru = filtered(frame, ["eviction=lru", "capacity=20%,60%"])
    assert ranked(only_lru, "hit_rate").height == 4
    for condition in ("lru", "eviction,capacity", "eviction=lru,capacity=20%", "capacity=20%, eviction=lru"):
        two = "expected setting=value, .* --where twice: --where eviction=lru --where capacity=5%"
        with pytest.raises(ResultError, match=f"invalid condition '{condition}': {two}"):
            filtered(frame, [condition])
    assert filtered(only_lru, ["platform=a100-5gbps"]).height == only_lru.height


def test_means_keep_models_apart_and_say_what_they_are_over() -> None:
    """Two sizes under one name, two names, and two traces of one model, whose mean is over both."""
    grid = {"eviction": ["lru", "fifo"], "capacity": ["30%", "60%"]}
    one, more = frame_of(small_trace(), **grid), frame_of(small_trace(requests=3), **grid)
    large = frame_of(small_trace(SMALL.model_copy(update={"layers": 6, "expert_bytes": (1_000_000,) * 6})), **grid)
    named = one.with_columns(pl.col("about").struct.with_fields(pl.lit("another").alias("model")))
    for other, apart, said in (
        (large, "trace", "means over capacity (2)"),
        (named, "model", "means over capacity (2)"),
        (more, "", "means over trace (2), capacity (2)"),
    ):
        both = pl.concat([one, other])
        means = grouped(both, ["eviction"], "hit_rate")
        assert set(means.columns[:2]) == ({apart, "eviction"} if apart else {"eviction", "configurations"})
        assert means["configurations"].to_list() == ([2] * 4 if apart else [4] * 2)
        assert averaged(both, ["eviction"]) == said
    assert averaged(one, ["eviction", "capacity"]) == ""


def test_no_row_names_a_host_or_a_time(whole):
    host = os.uname().nodename.encode()
    for file in whole.glob("part-*/*.parquet"):
        text = json.dumps(pl.read_parquet(file).to_dicts()).encode()
        assert host not in text or len(host) < 4  # a host called "vm" is in many words
        assert str(whole).encode() not in text


def test_an_estimate_is_of_the_size_of_what_is_measured(sweep):
    cost = estimate(sweep.jobs, "reference", 2)
    start = time.perf_counter()
    compute(Batch(0, tuple(sweep.jobs), "reference", False))
    took = time.perf_counter() - start
    assert took / 8 < cost.replay_seconds * len(sweep.jobs) < took * 8
    assert cost.seconds == pytest.approx(cost.replay_seconds * len(sweep.jobs) / 2)
    assert (cost.process_bytes or 0) > 2**20


def test_an_estimate_counts_what_would_only_be_counted(sweep, monkeypatch):
    """A bound is no replay, and takes less."""
    counts = [job for job in sweep.jobs if job.kind == "bound"]
    monkeypatch.setattr("moereplay.sweeps.jobs.replay", None)
    assert counts and estimate(counts, "reference", 1).sampled == len(counts[:5])


def test_an_estimate_leaves_out_what_a_sweep_does_once_and_what_jobs_share(monkeypatch, tmp_path):
    """A first replay compiles for 100 s, a second one takes 1 s, and the same on another platform none: 18 s of 36."""
    now, replayed = [0.0], [""]

    def slow(trace, config, **given):
        decisions = config.model_dump_json(exclude={"platform"})
        now[0] += 0 if decisions == replayed[-1] else 1 if decisions in replayed else 100
        replayed.append(decisions)
        return replay(trace, config, **given)

    monkeypatch.setattr("moereplay.sweeps.jobs.replay", slow)
    monkeypatch.setattr("moereplay.sweeps.jobs.time.perf_counter", lambda: now[0])
    made = planned(experiment(tmp_path, GRID + 'platform = ["phone-ufs4", "a100-5gbps"]\n'))
    jobs = [job for job in made.jobs if job.kind == "configuration"]
    cost = estimate(jobs, "reference", 2)
    assert len(jobs) == 36 and cost.sampled == 5
    assert cost.replay_seconds * 36 == pytest.approx(18, rel=0.1) and cost.seconds == pytest.approx(9, rel=0.1)


REFUSALS = {
    "missing trace": (GRID.replace("tiny", "nope"), "traces: ", "nope.zarr does not exist"),
    "glob": (GRID.replace("tiny.zarr", "*.nope"), "traces: ", "nothing matches '*.nope'"),
    "small pool": (GRID.replace("20%", "1%"), "6 of 18 cannot run, first ", "less than one expert of 1,000"),
    "impossible": (
        GRID.replace('"fifo"', '"belady"') + 'routing = ["cache_prior"]',
        "6 of 18 cannot run",
        "belady reads the future",
    ),
}


@every("name", REFUSALS, apart=True)
def test_what_cannot_run_is_refused_before_the_first_replay(name, tmp_path):
    text, *said = REFUSALS[name]
    with pytest.raises((ConfigError, TraceError)) as refused:
        planned(experiment(tmp_path, text))
    assert "\n" not in str(refused.value)
    assert all(words in str(refused.value) for words in ("experiment.toml: ", *said))


def test_a_policy_that_needs_logits_is_refused_on_a_trace_without(tmp_path):
    store_trace(tmp_path / "tiny.zarr", logits=False, recall=())
    with pytest.raises(ConfigError, match=r"9 of 18 cannot run.*prefetch=top_k.*needs lookahead.*\[\[exclude\]\]"):
        planned(experiment(tmp_path))


def test_to_keep_going_makes_error_rows_of_impossible_combinations(tmp_path):
    text = GRID.replace('"fifo"', '"belady"') + 'routing = ["cache_prior"]'
    sweep = planned(experiment(tmp_path, text), keep_going=True)
    assert len(sweep.refusals) == 6
    done(tmp_path / "out", sweep.jobs, requests=False)
    assert set(errors(tmp_path / "out")["eviction"]) == {"belady"}
    assert len(load(tmp_path / "out")) == 12


def test_the_same_trace_under_two_names_is_replayed_once(tmp_path):
    file = experiment(tmp_path, GRID.replace('["tiny.zarr"]', '["tiny.zarr", "*.zarr"]'))
    shutil.copytree(tmp_path / "tiny.zarr", tmp_path / "copy.zarr")
    assert len(planned(file).traces) == 1


def test_settings_of_a_platform_change_times_and_nothing_else(tmp_path):
    text = GRID + '"platform.link.bytes_per_s" = [1e6, 1e7]'
    sweep = planned(experiment(tmp_path, text))
    done(tmp_path / "out", sweep.jobs, requests=False)
    pairs = pl.read_parquet(tmp_path / "out" / "part-*" / "configurations.parquet").filter(prefetch="none")
    both = pairs.group_by("eviction", "capacity").agg(pl.col("hits", "time_ns").n_unique())
    assert both["hits"].to_list() == [1] * 9
    assert both["time_ns"].to_list() == [2] * 9


def test_the_bundled_trace_goes_by_its_name(tmp_path):
    (trace,) = open_traces(["miniature"], tmp_path, tmp_path / "e.toml")
    assert trace.digest == open_trace(bundled(Path("miniature"))).digest
    with pytest.raises(TraceError, match="elsewhere/miniature"):
        open_traces(["elsewhere/miniature"], tmp_path, tmp_path / "e.toml")
    shutil.copytree(trace.path or Path(), tmp_path / "miniature")
    assert open_traces(["miniature"], tmp_path, tmp_path / "e.toml")[0].path == (tmp_path / "miniature").resolve()
