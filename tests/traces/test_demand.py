"""Derived arrays: equal to slow plain Python on random schedules, and derived anew where the kept files are damaged."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.source import Pass
from moereplay.traces import demand as demand_module
from moereplay.traces import derived as sharing
from moereplay.traces import growing, routers
from moereplay.traces.demand import Demand, Union, demand_of, next_passes, union_of
from moereplay.traces.derived import PLACE
from moereplay.traces.passes import schedule
from moereplay.traces.routers import to_units
from moereplay.traces.schema import Geometry, Header, Request, Router, Trace, memory_trace
from moereplay.traces.token_arrays import predicted
from moereplay.traces.units import NEVER
from moereplay.traces.writer import write_trace
from tests.kit.schedules import laid
from tests.kit.search import searched

LAYERS, EXPERTS, K = 2, 6, 3
SCHEDULES = ["recorded", "token", "chunk:2", "decode:2", "batch:1", "batch:2", "batch:3"]
HEADER = Header(geometry=Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(1, 1)), lookahead_depth=1)


def request(seed: int, prompt: int, decoded: int, weighted: bool) -> Request:
    """Distinct experts per cell, one in five not routed; weights are quarters, so that they tie."""
    rng = np.random.Generator(np.random.PCG64(seed))
    shape = (prompt + decoded, LAYERS, EXPERTS)
    chosen = np.where(rng.random((*shape[:2], 1)) < 0.2, -1, rng.random(shape).argsort(-1)[..., :K])
    weights = np.where(chosen < 0, 0, rng.integers(1, 5, chosen.shape) / 4) if weighted else None
    return Request(chosen, prompt, weights, lookahead=(rng.integers(0, 3, shape).astype(np.float32),))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    weighted, seed = draw(st.booleans()), draw(st.integers(0, 2**32))
    lengths = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4))
    rows = [request(seed + i, *pair, weighted) for i, pair in enumerate(lengths) if any(pair)]
    return memory_trace(HEADER, rows or [request(seed, 1, 1, weighted)])


def by_hand(trace: Trace, passes: str) -> list[Union]:
    """Every step's union, one pass and one layer after the other."""
    chosen = trace.read("chosen")
    mass = to_units(trace.read("weights")) if "weights" in trace.arrays else None
    unions = []
    for rows in laid(lengths_of(trace), passes):
        tokens = [row.token for row in rows]
        for layer in range(LAYERS):
            weights = () if mass is None else mass[tokens, layer].tolist()
            unions.append(union_of(chosen[tokens, layer].tolist(), weights))
    return unions


def lengths_of(trace: Trace) -> list[tuple[int, int]]:
    """(prompt tokens, tokens) of each request."""
    return list(zip(trace.prompt_lengths.tolist(), np.diff(trace.request_offsets).tolist(), strict=True))


# ---------------------------------------------------------------- the union


def test_demand_goes_by_largest_weight_and_ties_by_lowest_id() -> None:
    # 3 and 5 both reach .5 (over two tokens), 1 only .25
    union = union_of([[5, 1], [3, 5]], [[8, 4], [8, 2]])
    assert (union.expert, union.mass, union.mass_sum, union.tokens) == ([3, 5, 1], [8, 8, 4], [8, 10, 4], [1, 2, 1])


def test_without_weights_demand_goes_by_best_rank_then_token_count_then_id() -> None:
    # 2, 4 and 0 are first somewhere; 4 for two tokens; 1 is second twice, 3 once
    union = union_of([[2, 1, 5], [4, 1, 0], [4, 3, -1], [0, -1, -1]], ())
    assert union.expert == [0, 4, 2, 1, 3, 5]
    assert (union.rank, union.tokens) == ([0, 0, 0, 1, 1, 2], [2, 2, 1, 2, 1, 1])


def test_a_step_that_routes_nothing_demands_nothing() -> None:
    assert union_of([[-1, -1]], ()).expert == []


def test_weights_become_integers_half_to_even() -> None:
    assert to_units(np.array([0.5, 1.5, 2.5]) / 2**24).tolist() == [0, 2, 2]


# ---------------------------------------------------------------- schedules


@searched(60)
@given(traces(), st.sampled_from(SCHEDULES))
def test_a_schedule_has_the_rows_of_plain_loops(trace: Trace, passes: str) -> None:
    plan, rows = schedule(trace, passes), laid(lengths_of(trace), passes)
    found = [[row._replace(reads=row.routed) for row in Pass.planned(index, plan).rows] for index in range(len(plan))]
    assert found == [[row._replace(reads=row.token) for row in each] for each in rows]
    requests = [{row.request for row in each} for each in rows]
    assert plan.apart().tolist() == [False, *(not mine & before for before, mine in pairwise(requests))]


def test_a_slot_takes_the_next_request_when_its_own_has_ended() -> None:
    # prompt and decoded tokens: 2 + 1, 1 + 3, 0 + 2, 1 + 0. The first ends with pass 1, so the third begins in pass 2
    # in slot 0; that and the second end with pass 3, and the fourth takes the lower slot
    trace = memory_trace(
        HEADER, [request(seed, *pair, True) for seed, pair in enumerate(((2, 1), (1, 3), (0, 2), (1, 0)))]
    )
    plan = schedule(trace, "batch:2")
    assert plan.rows is not None
    passes = [slice(*span) for span in zip(plan.start.tolist(), plan.stop.tolist(), strict=True)]
    assert [plan.rows.token[span].tolist() for span in passes] == [[0, 1, 3], [2, 4], [7, 5], [8, 6], [9]]
    assert [plan.rows.request[span].tolist() for span in passes] == [[0, 0, 1], [0, 1], [2, 1], [2, 1], [3]]
    assert [plan.rows.phase[span].tolist() for span in passes] == [[0, 0, 0], [1, 1], [1, 1], [1, 1], [0]]


def test_one_slot_is_the_schedule_as_recorded() -> None:
    trace = memory_trace(HEADER, [request(seed, 3, 2, weighted=True) for seed in range(3)])
    one, recorded = vars(schedule(trace, "batch:1")), vars(schedule(trace, "recorded"))
    assert one.pop("rows") is recorded.pop("rows") is None
    for name in recorded:
        np.testing.assert_array_equal(one[name], recorded[name])


# ---------------------------------------------------------------- vectorised


@searched(60)
@given(traces(), st.sampled_from(SCHEDULES))
def test_the_derived_demand_equals_the_plain_union_of_every_step(trace: Trace, passes: str) -> None:
    demand = demand_of(trace, passes)
    plain = by_hand(trace, passes)
    assert [demand.step(index)._replace(next_use=[]) for index in range(len(plain))] == plain


@searched(60)
@given(traces(), st.sampled_from(SCHEDULES))
def test_the_next_use_is_where_the_expert_is_demanded_again(trace: Trace, passes: str) -> None:
    demand = demand_of(trace, passes)
    stream = [(index % LAYERS, e) for index, union in enumerate(by_hand(trace, passes)) for e in union.expert]
    later = [
        stream[at + 1 :].index(expert) + at + 1 if expert in stream[at + 1 :] else NEVER
        for at, expert in enumerate(stream)
    ]
    first = [
        stream.index((x // EXPERTS, x % EXPERTS)) if (x // EXPERTS, x % EXPERTS) in stream else NEVER for x in range(12)
    ]
    assert (demand.next_use.tolist(), demand.first_use.tolist()) == (later, first)
    of_entry = [index // LAYERS for index, union in enumerate(by_hand(trace, passes)) for _ in union.expert]
    assert next_passes(trace, passes).tolist() == [NEVER if at == NEVER else of_entry[at] for at in later]


def test_blocks_of_tokens_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = memory_trace(HEADER, [request(seed, 5, 9, weighted=True) for seed in range(4)])
    whole, slots = demand_of(trace, "recorded"), demand_of(trace, "batch:3")
    coming, seen = next_passes(trace, "token"), predicted(trace, 1)
    monkeypatch.setattr(growing, "SHARD_TOKENS", 1)
    for values in (7, 40):  # less than a pass has, and some passes
        monkeypatch.setattr(growing, "VALUES_AT_ONCE", values)
        monkeypatch.setattr(demand_module, "VALUES_AT_ONCE", values)
        assert_same(demand_of(trace, "recorded"), whole)
        assert_same(demand_of(trace, "batch:3"), slots)
        np.testing.assert_array_equal(next_passes(trace, "token"), coming)
        for ours, theirs in zip(predicted(trace, 1), seen, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_trace_that_routes_nothing_derives_to_nothing() -> None:
    demand = demand_of(memory_trace(HEADER, [Request(np.full((3, LAYERS, K), -1), 1)]), "token")
    assert (len(demand.expert), demand.offsets.tolist()) == (0, [0] * 7)


def assert_same(ours: Demand, theirs: Demand) -> None:
    for name, array in vars(theirs).items():
        np.testing.assert_array_equal(getattr(ours, name), array, name)


# ---------------------------------------------------------------- look-ahead


def test_predictions_rank_the_target_layers_probabilities_ties_to_the_lowest_id() -> None:
    logits = np.array([[[1, 3, 3, 0, 2, 3], [9, 9, 9, 9, 9, 9]]], np.float32)
    trace = memory_trace(
        HEADER, [Request(np.zeros((1, LAYERS, 1), int).repeat(K, 2) + np.arange(K), 1, lookahead=(logits,))]
    )
    order, score = predicted(trace, 1)
    assert order[0, 0].tolist() == [1, 2, 5, 4, 0, 3]
    np.testing.assert_array_equal(score[0, 0], to_units(routers.scores(Router(), logits[0, 0])))


def test_the_last_layer_has_no_layer_to_predict() -> None:
    order, score = predicted(memory_trace(HEADER, [request(0, 2, 2, weighted=False)]), 1)
    assert not score[:, -1].any()
    assert order.shape == (4, LAYERS, EXPERTS)


# ---------------------------------------------------------------- kept on disk


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setenv(PLACE, str(tmp_path / "derived"))
    return write_trace(tmp_path / "a.zarr", HEADER, [request(1, 3, 4, weighted=True)])


def in_memory(trace: Trace, passes: str) -> Demand:
    """Derived without a file."""
    return demand_of(replace(trace, path=None), passes)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npy"))


def test_derived_arrays_lie_in_one_place_and_are_memory_mapped(stored: Trace, tmp_path: Path) -> None:
    demand = demand_of(stored, "recorded")
    assert isinstance(demand.expert, np.memmap)
    assert len(files_of(tmp_path / "derived")) == len(files_of(tmp_path)) == len(vars(demand))


def test_without_a_choice_they_lie_in_the_users_cache(
    stored: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PLACE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert isinstance(demand_of(stored, "recorded").expert, np.memmap)
    assert files_of(tmp_path / "cache" / "moereplay" / "derived") == files_of(tmp_path)


def test_what_was_derived_once_is_not_derived_again(stored: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demand_of(stored, "recorded")
    monkeypatch.setattr(demand_module, "_derive", None)
    assert_same(demand_of(stored, "recorded"), first)


def test_schedules_are_kept_apart(stored: Trace) -> None:
    assert len(demand_of(stored, "recorded").offsets) < len(demand_of(stored, "token").offsets)


def test_another_trace_of_the_same_name_is_derived_anew(stored: Trace, tmp_path: Path) -> None:
    before = demand_of(stored, "token")
    (tmp_path / "a.zarr").rename(tmp_path / "old.zarr")
    other = write_trace(tmp_path / "a.zarr", HEADER, [request(2, 3, 9, weighted=True)])
    assert len(demand_of(other, "token").offsets) > len(before.offsets)


def test_a_damaged_file_is_derived_anew(stored: Trace, tmp_path: Path) -> None:
    for damage in [b"", b"\x93NUMPY\x01", b"not an array at all"]:
        good = {name: np.array(array) for name, array in vars(demand_of(stored, "recorded")).items()}
        for file in files_of(tmp_path / "derived"):
            file.write_bytes(damage)
        assert_same(demand_of(stored, "recorded"), Demand(**good))


def test_a_truncated_file_is_derived_anew(stored: Trace, tmp_path: Path) -> None:
    good = {name: np.array(array) for name, array in vars(demand_of(stored, "recorded")).items()}
    file = next(file for file in files_of(tmp_path / "derived") if file.stem == "next_use")
    file.write_bytes(file.read_bytes()[:-8])
    assert_same(demand_of(stored, "recorded"), Demand(**good))


def test_a_file_of_pickled_objects_is_derived_anew(stored: Trace, tmp_path: Path) -> None:
    good = {name: np.array(array) for name, array in vars(demand_of(stored, "recorded")).items()}
    np.save(files_of(tmp_path / "derived")[0], np.array([{}], object))
    assert_same(demand_of(stored, "recorded"), Demand(**good))


def test_in_a_read_only_home_they_lie_in_the_temporary_folder(
    stored: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").write_text("in the way")  # a superuser can write to any folder
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(PLACE)
    assert isinstance(demand_of(stored, "recorded").expert, np.memmap)
    assert files_of(tmp_path / "tmp" / f"moereplay-{os.getuid()}") == files_of(tmp_path)


def test_where_nothing_can_be_written_arrays_are_derived_in_memory(
    stored: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sharing, "place", nowhere)
    found = demand_of(stored, "recorded")
    assert not isinstance(found.expert, np.memmap)
    assert_same(found, in_memory(stored, "recorded"))


def test_a_disk_that_fills_up_leaves_no_half_written_folder(
    stored: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(growing.InFile, "put", full)
    assert_same(demand_of(stored, "recorded"), in_memory(stored, "recorded"))
    assert not any((tmp_path / "derived" / "moereplay" / "derived").iterdir())
