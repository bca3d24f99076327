"""Recorded drafts: passes and rejected rows of a replay are those of the record, in both engines."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.bounds import bound_of, count
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.simulator.source import Pass
from moereplay.traces.passes import named_schedule, schedule
from moereplay.traces.schema import LOOKAHEAD, Request, Trace, TraceError, memory_trace
from tests.kit.cases import ENGINES
from tests.kit.every import every
from tests.kit.schedules import Guess, laid
from tests.kit.stored import drafted
from tests.simulator.test_drafts import EVERYTHING, PASSES, crowd, plain, rows_of


def with_record(trace: Trace, seed: int = 0) -> Trace:
    """The trace with a record of drafts, whose rejected rows have the routing of random tokens."""
    requests = [drafted(trace.request(number), seed + number) for number in range(trace.requests)]
    return memory_trace(trace.header, requests)


def test_every_schedule_of_recorded_drafts_equals_plain_loops() -> None:
    dice, kinds = random.Random(2), [0, 0, 0]
    for seed in range(60):
        ends = [dice.randint(1, 12) for _ in range(dice.randint(1, 5))]
        lengths = tuple((dice.randint(0, end), end) for end in ends)
        trace = with_record(crowd(lengths=lengths), seed)
        record = trace.read("drafts").tolist()
        for rejected in ("own", "other", "recorded"):
            guess = Guess(0, (), rejected, seed, record)
            for passes in PASSES:
                name = named_schedule(passes, f"recorded:rejected={rejected}", seed)
                found = rows_of(schedule(trace, name))
                assert found == list(map(plain, laid(lengths, passes, guess))), (lengths, passes, guess)
                for rows in found:
                    for row in rows:
                        kinds[row[4]] += 1
    assert min(kinds) > 1000


def test_a_recorded_layout_is_refused_where_there_is_none() -> None:
    config = configure(draft="recorded", capacity="50%")
    assert config.draft == "recorded:rejected=recorded"
    for engine in ENGINES:
        with pytest.raises(TraceError, match="--draft recorded: this trace has no record of drafts"):
            replay(crowd(), config, engine=engine)
    with pytest.raises(ConfigError, match=r"rejected=recorded.*a draft that was not made"):
        configure(draft="3:rejected=recorded")
    for text in ("recorded:accept=.5", "recorded:rejected=none", "recorded:3"):
        with pytest.raises(ConfigError, match="invalid draft"):
            configure(draft=text)


@every("passes", PASSES)
def test_recorded_rows_are_replayed_as_if_they_were_tokens(passes: str) -> None:
    """A trace with a request per pass, whose prompt are the rows, rejected ones too, has the same demand."""
    trace = with_record(crowd(3), 4)
    how: dict[str, Any] = {"capacity": "40%", "eviction": "belady", "prefetch": "oracle:horizon=1"}
    config = configure(passes=passes, draft="recorded", **how)
    plan = schedule(trace, config.schedule)
    names = ("chosen", "weights", "logits", f"{LOOKAHEAD}1")
    whole = {name: np.concatenate([trace.read(name), trace.rejected[name]]) for name in names}
    requests = []
    for index in range(len(plan)):
        at = np.array([row.routed for row in Pass.planned(index, plan).rows])
        chosen, weights, logits, look = (whole[name][at] for name in names)
        requests.append(Request(chosen, len(at), weights, logits, (look,)))
    laid_out = memory_trace(trace.header, requests)
    ours, theirs = replay(trace, config), replay(laid_out, configure(**how))
    for name in ("accesses", "hits", "late", "misses", "evictions", "prefetch_used", "expert_ns", "time_ns"):
        assert ours.totals[name] == theirs.totals[name] > 0
    drafts = trace.read("drafts")
    assert ours.totals["draft_rejected"] == trace.rejects
    assert ours.totals["draft_rows"] == drafts[drafts > 0].sum()
    bounds = [bound_of(trace, configure(draft="recorded", passes=passes, capacity="40%", eviction="belady"))]
    bounds.append(bound_of(laid_out, configure(capacity="40%", eviction="belady")))
    assert count(trace, bounds[0]) == count(laid_out, bounds[1])  # pyright: ignore[reportArgumentType]


def test_without_the_option_a_record_changes_nothing() -> None:
    """Also where the look-ahead is shuffled, which draws from all tokens."""
    trace = crowd(2)
    for settings in ({}, EVERYTHING["looks ahead"], EVERYTHING["routes"], {"draft": "2:accept=.5"}):
        config = configure(capacity="40%", **settings)
        found, expected = replay(with_record(trace), config), replay(trace, config)
        assert (found.totals, found.per_request) == (expected.totals, expected.per_request)


@pytest.mark.parametrize("settings", EVERYTHING.values(), ids=EVERYTHING)
def test_both_engines_replay_recorded_drafts(settings: dict[str, Any]) -> None:
    """And what belongs to single tokens is that of the tokens: each is kept once."""
    trace = with_record(crowd())
    for passes in PASSES:
        config = configure(capacity="50%", passes=passes, draft="recorded", seed=4, **settings)
        compiled, reference = (replay(trace, config, engine=engine) for engine in ENGINES)
        for part in ("totals", "per_layer", "per_request"):
            assert getattr(compiled, part) == getattr(reference, part), (passes, part)
        without = replay(trace, config.model_copy(update={"draft": "0"}))
        assert 0 < compiled.totals["draft_rejected"] < compiled.totals["draft_rows"]
        for name in ("assignments", "mass"):
            assert compiled.totals[name] == without.totals[name]
        for ours, theirs in zip(compiled.per_request, without.per_request, strict=True):
            for name in ("request", "tokens", "decode_tokens", "assignments", "mass"):
                assert ours[name] == theirs[name]
