"""Real routing streams: exact hits that two independent scripts agree on, and a phone's own record of its cache."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest

from moereplay.results.result import Row
from moereplay.simulator.bounds import FORCED, RELAXED, Bound, count
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import curve
from moereplay.simulator.replay import replay
from moereplay.traces.geometry import known
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Trace, memory_trace
from tests.kit.cases import ENGINES
from tests.kit.every import every
from tests.kit.recordings import FOLDER, needs_recording

of_scripts = needs_recording("gpt-oss-20b", "qwen3-30b-a3b", claim="scripts")

RUNS, RUN_TOKENS = 12, 511
DOMAINS = ("code", "general", "math", "medical")

#: Experts per layer -> hits under LRU, Belady with forced admission, Belady that may bypass.
HITS = {
    "gpt-oss-20b": {8: (381952, 453035, 469509), 16: (523320, 553898, 555998), 24: (571074, 577064, 577329)},
    "qwen3-30b-a3b": {32: (613051, 692897, 696674), 64: (740656, 759080, 759367), 96: (766396, 767580, 767591)},
}
ACCESSES = {"gpt-oss-20b": 588672, "qwen3-30b-a3b": 786432}


def cases(column: int) -> list:
    """(model, experts per layer, hits, engine) for one column of HITS; the reference, being slow, has the first row."""
    every = [(model, slots, row[column], "compiled") for model, rows in HITS.items() for slots, row in rows.items()]
    firsts = {model: (model, slots, hits, "reference") for model, slots, hits, _ in reversed(every)}
    return [*every, *(pytest.param(*first, marks=pytest.mark.longest) for first in firsts.values())]


@cache
def requests(model: str) -> list[Trace]:
    """gpt-oss: the first 12 decode runs of 511 tokens. Qwen3: the first 512 tokens of each domain's text. A trace each.

    Ids alone, so demand goes in the recorded rank order, as in the scripts: gpt-oss' 16-bit weights have ties.
    """
    options = Options(geometry=known(model).geometry)
    if model == "gpt-oss-20b":
        whole = importers.read(FOLDER / model, options)
        of_length = (request for request in whole.requests if len(request.chosen) == RUN_TOKENS)
        return [memory_trace(whole.header, [replace(run, weights=None)]) for run in islice(of_length, RUNS)]
    texts = [importers.read(FOLDER / model / f"{domain}.npz", options) for domain in DOMAINS]
    return [memory_trace(text.header, [next(text.requests)]) for text in texts]


@cache
def stream(model: str) -> Trace:
    """All requests, end to end."""
    alone = requests(model)
    return memory_trace(alone[0].header, [trace.request(0) for trace in alone])


def totals(trace: Trace, slots: int, eviction: str, engine: str) -> Row:
    """A cache per layer, cold for every request, one token per pass."""
    settings = {"capacity": f"{slots}/layer", "scope": "per_layer", "passes": "token", "reset": "request"}
    return replay(trace, configure(eviction=eviction, **settings), engine=engine).totals


@pytest.mark.slow
@of_scripts
@pytest.mark.parametrize(("model", "slots", "hits", "engine"), cases(0))
def test_lru_hits_as_often_as_two_scripts_agree(model: str, slots: int, hits: int, engine: str) -> None:
    found = totals(stream(model), slots, "lru", engine)
    assert (found["accesses"], found["hits"]) == (ACCESSES[model], hits)


@of_scripts
@pytest.mark.parametrize(("model", "slots", "hits", "engine"), cases(1))
def test_belady_hits_as_often_as_two_scripts_agree(model: str, slots: int, hits: int, engine: str) -> None:
    found = totals(stream(model), slots, "belady", engine)
    assert (found["accesses"], found["hits"]) == (ACCESSES[model], hits)


@of_scripts
@pytest.mark.parametrize(("model", "slots", "hits", "engine"), cases(2))
def test_belady_that_bypasses_hits_as_often_as_two_scripts_agree(
    model: str, slots: int, hits: int, engine: str
) -> None:
    # the scripts decline at equality too, and their future ends with the request: an expert that is never demanded
    # again does not replace another such one, which would pin it for the rest of the step
    assert sum(totals(trace, slots, "belady:bypass=ties", engine)["hits"] for trace in requests(model)) == hits


#: Experts per layer -> hits of the bounds by forced admission and relaxed, on the first of Qwen3's texts alone, and on
#: all runs of gpt-oss: two scripts agree on the relaxed, two on the forced ones.
BOUNDS = {
    "qwen3-30b-a3b": (196608, {32: (173305, 174665), 64: (189582, 189694), 96: (191658, 191667)}),
    "gpt-oss-20b": (588672, {8: (0.7696, 0.8058), 16: (0.9409, 0.9455), 24: (0.9803, 0.9808)}),
}


@of_scripts
@pytest.mark.parametrize(("model", "slots"), [(model, slots) for model, (_, rows) in BOUNDS.items() for slots in rows])
def test_both_bounds_hit_as_often_as_two_scripts_agree(model: str, slots: int) -> None:
    trace = requests(model)[0] if model == "qwen3-30b-a3b" else stream(model)
    accesses, rows = BOUNDS[model]
    for admission, expected in zip((FORCED, RELAXED), rows[slots], strict=True):
        pools = (slots,) * trace.geometry.layers
        found = count(trace, Bound(admission, "token", "request", "per_layer", "atomic", pools, ()))
        hits = found["belady_hits"] or 0
        assert found["accesses"] == accesses
        assert (hits if expected > 1 else round(hits / accesses, 4)) == expected


@of_scripts
@pytest.mark.parametrize("model", list(HITS))
def test_declining_one_by_one_is_worth_less_than_the_relaxed_bound(model: str) -> None:
    relaxed = curve(stream(model), "relaxed_belady", scope="per_layer", passes="token", reset="request")
    for slots, (_, forced, bypassed) in HITS[model].items():
        assert forced < bypassed < relaxed.accesses - relaxed.misses[slots - 1]


#: Rows (token, MoE layer, expert) whose residency the phone recorded otherwise: 13 of 28,260, soon after the prompt of
#: 29 tokens.
DIFFERENT = {
    *((29, 9, expert) for expert in (14, 56, 63, 85, 103)),
    *((30, 11, expert) for expert in (17, 69)),
    *((32, 14, expert) for expert in (49, 64)),
    *((40, 22, expert) for expert in (38, 93, 116)),
    (41, 24, 23),
}


@cache
def phone() -> Trace:
    foreign = importers.read(FOLDER / "gemma-4-26b-a4b" / "gemma.route.csv", Options())
    return memory_trace(foreign.header, list(foreign.requests))


def hit_rows(trace: Trace, engine: str) -> set[tuple[int, int, int]]:
    """(pass, layer, expert) of every hit of a global LRU of 4000 MiB, the phone's own budget."""
    result = replay(trace, configure(capacity="4000MiB"), log=True, engine=engine)
    return {(event.step_pass, event.layer, event.expert) for event in result.events if event.kind == "hits"}


@pytest.mark.slow
@needs_recording("gemma-4-26b-a4b", claim="phone")
@every("engine", ENGINES)
def test_a_phones_recorded_residency_is_that_of_a_global_lru(engine: str) -> None:
    trace = phone()
    chosen, recorded, hits = trace.read("chosen"), trace.read("residency"), hit_rows(trace, engine)
    prompt = int(trace.prompt_lengths[0])
    rows = [(int(t), int(layer), int(chosen[t, layer, j])) for t, layer, j in np.argwhere(chosen >= 0)]
    simulated = [(max(0, t - prompt + 1), layer, expert) in hits for t, layer, expert in rows]
    differing = {
        row for row, ours, theirs in zip(rows, simulated, recorded[chosen >= 0] == 1, strict=True) if ours != theirs
    }
    assert len(rows) == 28260
    assert differing == DIFFERENT
    assert len(differing) <= len(rows) // 1000
