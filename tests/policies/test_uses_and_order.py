"""Data on residents that engines keep for policies: the order of entering a pool, and uses since residence began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from moereplay.policies import files
from moereplay.policies.hooks import KINDS
from moereplay.simulator import dry_run
from moereplay.simulator.config import configure
from moereplay.simulator.replay import plan
from tests.kit.cases import Cell, ListSource, Outcome, Prompted, Token, machine, naming, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace

WHERE = machine(dense_ns=20, expert_ns=2)


def victims(outcome: Outcome) -> list[tuple[int, int, int]]:
    """(pass, layer, expert) of what left."""
    return [(event.step_pass, event.layer, event.expert) for event in outcome.events if event.kind == "evict"]


def named(named: int, first: Sequence[int], second: Sequence[int]) -> Token:
    """A token of two layers; the gate of the first names one of the second's four experts."""
    return [Cell(first, look=[naming(4, [named])]), Cell(second, look=[naming(4, [0])])]


def test_fifo_goes_by_the_entry_into_the_cache_and_not_into_a_side_buffer() -> None:
    # Two slots hold 1.1 and 1.2. Pass 0 brings 1.0 into the buffer; its gate demands all three, so there is no room
    # for it in the cache and it is used from the buffer. Pass 1: 0.0 evicts 1.1 and arrives; the gate of layer 1 then
    # moves 1.0 into the cache, over 1.2. Pass 2: of 0.0 and 1.0 it is 0.0 that has been in the cache for longer
    source = ListSource(
        sizes(2, 4, 3), [Prompted([named(0, [-1], [0, 1, 2]), named(0, [0], [0]), named(0, [1], [-1])])]
    )
    outcome = replay_lists(
        source, 2, WHERE, eviction="fifo", prefetch="side_buffer:buffers=1:fetch=1", warm=((1, 1), (1, 2))
    )
    assert [(e.step_pass, e.layer, e.expert) for e in outcome.events if e.kind == "promote"] == [(1, 1, 0)]
    assert victims(outcome) == [(1, 1, 1), (1, 1, 2), (2, 0, 0)]


def test_streaming_leaves_no_uses_behind() -> None:
    # Three slots, 0 is pinned. While 1 and 3 are demanded beside it, 2 would have to push out 0: it is streamed, in
    # five passes. Then 2 and 4 take the places of 1 and 3. 4 is used once more, so 2, used once since it came in, is
    # the least used and is evicted for 1; its streamed uses were none of a resident
    together, third = [[1, 3, 2]], [[2, 4]]
    rows = tokens([[0, 1]], [[1, 3]], *[together] * 5, third, [[0, 4]], [[1]], [[4]])
    source = ListSource(sizes(1, 5, 3), [Prompted(rows)])
    outcome = replay_lists(source, 3, WHERE, eviction="pinned:profile=given:share=.34:rest=lfu", profile=((0, 0),))
    assert outcome["declined"] == 5
    assert victims(outcome) == [(7, 0, 3), (7, 0, 1), (9, 0, 2)]


def test_a_prefetched_second_precision_goes_on_counting_the_experts_uses() -> None:
    # 8 bits are 8 bytes, 4 bits 4; the pool has 28. Of layer 1 passes 0 to 2 demand 1 at 8 bits and, as the lesser half
    # of the demand, 0 at 4 bits. Pass 3 predicts 0 at 8 bits: it arrives beside the other copy, which has been
    # used three times, and its first use is the expert's fourth. Passes 4 to 6 use 2 three times, so the fewest uses
    # are its own when pass 7 wants 3: 0 and 1 have four each
    passes = [
        *[named(1, [-1], [1, 0])] * 3,
        named(0, [-1], [0, 1]),
        *[named(1, [-1], [2])] * 3,
        named(1, [-1], [3]),
    ]
    source = ListSource(sizes(2, 4, 2, 8, expert_bits=8), [Prompted(passes)])
    settings: dict[str, Any] = {"miss": "cascade:bits=8/4:below=.5", "prefetch": "top_k:factor=.5"}
    outcome = replay_lists(source, 28, WHERE, eviction="lfu", **settings)
    assert outcome.counts("prefetch_started", "prefetch_hits") == (2, 2)
    assert victims(outcome) == [(7, 1, 2)]


# ---------------------------------------------------------------- uses on the CPU


@every(
    "eviction",
    ["lfu_decay", "lfu:count=history", "lfru", "hobbit", "least_high_precision", "least_high_precision:span=history"],
)
def test_what_the_cpu_computes_is_used(eviction: str) -> None:
    # Two slots; 0 is there and hits in pass 0. The CPU runs 1 in passes 1 to 3 and its third miss brings it; then 2 in
    # passes 4 to 6, which brings it in the place of 0, used once, and not of 1, used three times
    source = ListSource(sizes(1, 3, 1), [Prompted(tokens(*[[[e]] for e in (0, 1, 1, 1, 2, 2, 2, 1)]))])
    outcome = replay_lists(
        source, 2, WHERE, eviction=eviction, miss="cpu", prefetch="missed:after=3", warm=((0, 0),), log=True
    )
    assert victims(outcome) == [(6, 0, 0)]
    assert outcome.counts("hits", "cpu_executed") == (2, 6)


def test_a_ghost_that_the_cpu_ran_comes_in_as_one_that_was_used_again() -> None:
    # Two slots of ARC. 0 is used twice and is in T2; 1 is uploaded to T1, evicted for 2 and a ghost. The CPU runs 1
    # again, a hit of T1's ghost: T1 may keep one copy, and 1 is uploaded to T2 in the place of 0, the oldest there.
    # Then the CPU runs 0, a hit of T2's ghost: T1 may keep none, and 2 leaves
    source = ListSource(sizes(1, 3, 1), [Prompted(tokens(*[[[e]] for e in (0, 0, 1, 2, 1, 0)]))])
    outcome = replay_lists(source, 2, WHERE, eviction="arc", miss="cpu", prefetch="missed", warm=((0, 0),))
    assert victims(outcome) == [(3, 0, 1), (4, 0, 0), (5, 0, 2)]


COUNTING = """from moereplay.policies.contract import Eviction, Memory


def on_use(now, experts, copies, own, y):
    own.rows[y - y % now["precisions"]][0] += 1


def key(now, experts, copies, own, y):
    return experts[y // now["precisions"]]["uses_ever"]


POLICY = Eviction(name="counting", summary="counts", source="this test", key=key, on_use=on_use, memory=Memory(rows=1))
"""


@pytest.mark.slow
@every("miss", ["fetch", "cpu", "split", "cpu:below=3", "drop:keep=1", "substitute:tolerance=.5", "cascade"])
@every("contract", ["atomic", "sequential"])
def test_uses_are_what_the_log_says_that_ran(contract: str, miss: str) -> None:
    """`on_use` counts, for every expert, the experts that the accelerator or the CPU ran, substitutes among them."""
    trace = random_trace(1, Sizes(layers=3, experts=6, k=2, tokens=40, prompt=5, requests=2, size=1000))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "counting.py"
        file.write_text(COUNTING)
        files.register(file)
        setting = {"eviction": "counting", "miss": miss, "prefetch": "missed", "platform": "desktop-ram"}
        ready = plan(trace, configure(capacity="40%", contract=contract, **setting))
        expected, found = dry_run.end_states(trace, ready.spec(log=True))
    assert dry_run.difference(expected, found) == ""
    ran = Counter((e.layer, e.expert) for e in expected.ran.events if e.kind in ("expert", "cpu"))
    precisions = ready.layout.precisions
    rows, _, _ = expected.memories[KINDS.index("eviction")]
    assert [row[0] for row in rows[::precisions]] == [ran[divmod(x, 6)] for x in range(18)]
