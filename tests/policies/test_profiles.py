"""Profiles: what a fitted policy prefers, by the trace's own demand or by a list, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moereplay.policies.contract import NEVER, PolicyError
from moereplay.policies.grammar import parse
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.interface import CopyLayout, Oracle, ranking
from moereplay.simulator.reference.state import Tables
from moereplay.simulator.replay import plan, replay
from moereplay.simulator.source import TraceSource
from tests.kit.cases import ListSource, Prompted, sizes, tokens
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, geometry_of, random_trace, trace_of
from tests.kit.tiny_runs import small_trace

#: Two layers; of layer 0 expert 1 comes three times, 0 once; of layer 1 experts 2, 2, 0, 1 come in this order.
TRACE = trace_of([[[1], [2]], [[1], [2]], [[0], [0]], [[1], [1]]], 3)


def ranked(eviction: str, **settings: object) -> list[int]:
    config = configure(eviction=eviction, **settings)
    source = TraceSource(TRACE, "token", parse("prefetch", "none"), frozenset())
    return ranking(source, config, config.policy_set().eviction)


def test_the_traces_own_demand_ranks_by_count_then_id():
    assert ranked("static") == [1, 5, 0, 3, 4]


def test_the_first_tokens_alone_may_rank():
    assert ranked("static:tokens=2") == [1, 5]
    assert ranked("static:tokens=3") == [1, 5, 0, 3]
    assert ranked("pinned:tokens=400") == ranked("pinned")


def test_a_given_profile_is_taken_as_it_stands():
    assert ranked("static:profile=given", profile=((1, 0), (0, 2))) == [3, 2]


def test_policies_that_are_not_fitted_have_no_profile():
    assert ranked("lru", profile=((1, 0),)) == []


def test_places_are_bytes_of_what_ranks_before_in_the_same_pool():
    layout = CopyLayout(geometry_of(Sizes(2, 3, 1)), ((5, 7),))
    of_all, of_layers = (
        [row["profile"] for row in Tables(layout, pool_of, Oracle((), (), [1, 5, 0, 3]), 0).experts]
        for pool_of in ((0,) * 6, (0, 0, 0, 1, 1, 1))
    )
    assert of_all == [12, 0, NEVER, 17, NEVER, 5]
    assert of_layers == [5, 0, NEVER, 7, NEVER, 0]


def test_counts_and_passes_of_a_trace_are_those_of_a_list():
    """Two requests of prefill and decode over two layers, read in pieces and all at once."""
    trace = random_trace(3, Sizes(layers=2, experts=4, k=2, tokens=5, prompt=2, requests=2))
    rows = trace.read("chosen").tolist()
    listed = ListSource(sizes(2, 4), [Prompted(tokens(*rows[:5]), 2), Prompted(tokens(*rows[5:]), 2)])
    source = TraceSource(trace, "recorded", parse("prefetch", "none"), frozenset())
    for first in (0, 1, 7, 99):
        assert source.popularity(first) == listed.popularity(first)
    demands = sum(len(source.gate(step, layer).demand.expert) for step in source.passes() for layer in (0, 1))
    positions = [*range(demands), NEVER]
    assert [source.pass_of(at) for at in positions] == [listed.pass_of(at) for at in positions]
    assert source.pass_of(demands - 1) == 7


def test_static_placement_never_loses_what_it_was_warmed_with():
    trace = small_trace()
    best = ranking(
        TraceSource(trace, "recorded", parse("prefetch", "none"), frozenset()),
        configure(),
        parse("eviction", "static"),
    )[:8]
    warm = tuple(divmod(x, trace.geometry.experts) for x in best)
    totals = replay(trace, configure(capacity="8experts", eviction="static", warm=warm)).totals
    assert (totals["evictions"], totals["insertions"]) == (0, 0)
    assert totals["declined"] == totals["misses"] > 0


@every(
    "settings, said",
    [
        ({"eviction": "static:profile=given"}, "static:profile=given requires --profile"),
        ({"routing": "keep:profile=given"}, "routing keep:profile=given requires --profile"),
        (
            {"eviction": "pinned:profile=given", "routing": "keep", "profile": ((0, 1),)},
            "routing keep and eviction pinned:profile=given are fitted to different profiles",
        ),
        ({"profile": ((0, 8),)}, "profile lists expert 8 of layer 0; the model has 4 layers of 8"),
        ({"profile": ((0, 1), (0, 1))}, "profile lists expert 1 of layer 0 2 times"),
        (
            {"eviction": "static", "routing": "cache_prior"},
            "static reads the future, which routing cache_prior changes",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], said: str):
    with pytest.raises((ConfigError, PolicyError)) as refused:
        plan(small_trace(), configure(capacity="50%", **settings))
    assert said in str(refused.value)


def test_a_given_profile_does_not_read_the_future():
    given = {"eviction": "pinned:profile=given", "routing": "cache_prior", "profile": ((0, 1),)}
    assert replay(small_trace(), configure(capacity="50%", **given)).totals["hits"] > 0


def test_the_file_of_a_profile_is_json(tmp_path: Path):
    from moereplay.commands.options import named_experts

    (tmp_path / "good.json").write_text(json.dumps([[0, 1]]))
    assert named_experts("--profile", tmp_path / "good.json") == [[0, 1]]
    (tmp_path / "bad.json").write_text("[[0, 1")
    with pytest.raises(ConfigError, match=r"--profile .*bad.json: .*expected a JSON list of \[layer, expert\]"):
        named_experts("--profile", tmp_path / "bad.json")
