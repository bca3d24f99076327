"""Splits are whole, drawn by a seed, and refuse to leave a side empty; a profile is what fitted policies count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.policies.grammar import parse
from moereplay.simulator.config import configure
from moereplay.simulator.interface import ranking
from moereplay.simulator.source import TraceSource
from moereplay.traces.schema import Geometry, Trace, TraceError
from moereplay.traces.selection import accesses_of, profile, sampled, split
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from tests.kit.collecting import case
from tests.kit.sweeping import moereplay, store_trace
from tests.kit.tiny_runs import small_trace


@given(st.integers(2, 60), st.floats(0.01, 0.99), st.integers(0, 1 << 30))
def test_every_request_is_on_one_side_and_neither_is_empty(requests: int, share: float, seed: int) -> None:
    fitted, others = split(requests, share, seed)
    assert sorted(fitted + others) == list(range(requests))
    assert fitted and others and (fitted, others) == (sorted(fitted), sorted(others))
    assert (fitted, others) == split(requests, share, seed)
    assert abs(len(fitted) - share * requests) <= 1


def test_another_seed_draws_others() -> None:
    assert len({tuple(split(12, 0.5, seed)[0]) for seed in range(20)}) > 10


def test_a_side_without_requests_is_refused() -> None:
    for requests, share in [(1, 0.5), (9, 0.0), (9, 1.0), (9, float("nan"))]:
        with case(requests, share), pytest.raises(TraceError, match="invalid --share"):
            split(requests, share)


def test_the_profile_is_that_of_policies_that_are_fitted_to_the_trace() -> None:
    trace = small_trace()
    config = configure(eviction="static", passes="token")
    source = TraceSource(trace, "token", parse("prefetch", "none"), frozenset())
    ranked = ranking(source, config, config.policy_set().eviction)
    assert [layer * trace.geometry.experts + expert for layer, expert in profile(trace)] == ranked


def test_the_verb_writes_both_traces_and_the_profile_of_the_first(tmp_path: Path) -> None:
    whole = open_trace(store_trace(tmp_path / "five.zarr", requests=5))
    out = tmp_path / "halves"
    assert moereplay("split", whole.path, "--share", ".6", "--seed", "3", "--out", out)[0] == 0
    train, test = open_trace(out / "train.zarr"), open_trace(out / "test.zarr")
    for part, requests in zip((train, test), split(5, 0.6, 3), strict=True):
        assert part.requests == len(requests)
        for at, request in enumerate(requests):
            assert (part.request(at).chosen == whole.request(request).chosen).all()
    assert [tuple(pair) for pair in json.loads((out / "profile.json").read_text())] == profile(train)
    fitted = ("--eviction", "static:profile=given", "--profile", out / "profile.json", "--engine", "reference")
    assert moereplay("replay", out / "test.zarr", "--capacity", "60%", *fitted)[0] == 0
    assert "it is a folder" in moereplay("split", whole.path, "--out", out)[2]


# -- A sample of a trace: whole requests, evenly spaced, or the trace itself.


@pytest.fixture(scope="module")
def ten() -> Trace:
    """Ten requests of 6 tokens, each of which chooses 2 experts in 3 layers: 36 accesses a request."""
    geometry = Geometry(layers=3, experts=8, k=2, expert_bytes=(1,) * 3)
    lengths = {"requests": 10, "prompt_tokens": 2, "decode_tokens": 4}
    made = {"kind": "markov", "geometry": geometry, "reuse": 0.5, "recall": (0.8,), **lengths}
    return synthesise(Synthetic.model_validate(made))


def test_every_nth_request_is_taken_whole(ten: Trace):
    assert accesses_of(ten) == 360
    few = sampled(ten, 150)
    assert few.requests == 4 and accesses_of(few) == 144
    for at, of in enumerate((0, 3, 6, 9)):
        ours, theirs = few.request(at), ten.request(of)
        assert ours.prompt_length == theirs.prompt_length == 2
        assert np.array_equal(ours.chosen, theirs.chosen) and np.array_equal(ours.lookahead[0], theirs.lookahead[0])
    assert few.capabilities == ten.capabilities


def test_at_least_one_request_and_at_most_all_of_them(ten: Trace):
    assert sampled(ten, 1).requests == 1
    assert sampled(ten, 360) is ten
    one = sampled(ten, 1)
    assert sampled(one, 1) is one, "a request is not cut"
