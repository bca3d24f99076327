"""Draft tokens, by chance and recorded: which rows a pass has, what they cost, and what counts them."""

from __future__ import annotations

import random
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from moereplay.results.result import Result, values_of
from moereplay.simulator.bounds import bound_of, count
from moereplay.simulator.config import configure
from moereplay.simulator.curves.curve import UNDECIDED, curve
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.limits.limits import limits
from moereplay.simulator.platform import Platform, Roofline
from moereplay.simulator.replay import replay
from moereplay.simulator.source import Pass, Row
from moereplay.simulator.times import Times
from moereplay.traces.drafts import HEADS, Drafts, hash53, parse_drafts
from moereplay.traces.passes import Passes, named_schedule, schedule
from moereplay.traces.schema import LOOKAHEAD, Request, Trace, TraceError, memory_trace
from tests.kit import schedules
from tests.kit.cases import ENGINES, ListSource, Outcome, Prompted, machine, replay_lists, sizes, tokens
from tests.kit.every import every
from tests.kit.parity import drafted, seen
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.scenarios import CONTRACTS, Scenario
from tests.kit.schedules import Guess, laid
from tests.kit.search import searched
from tests.kit.stored import drafted as recorded_drafts

PASSES = ("recorded", "token", "chunk:2", "decode:3", "batch:1", "batch:2", "batch:4")
SIZES = Sizes(layers=3, experts=6, k=2, depth=1, size=100)
LENGTHS = ((3, 9), (0, 2), (5, 6), (1, 8), (2, 2))  #: prompt and all tokens of each request


def crowd(seed: int = 0, lengths: tuple[tuple[int, int], ...] = LENGTHS) -> Trace:
    """Requests of several lengths, with everything recorded."""
    traces = [
        random_trace(seed + i, SIZES._replace(tokens=n, prompt=p, requests=1)) for i, (p, n) in enumerate(lengths)
    ]
    return memory_trace(
        traces[0].header,
        [taken(each, np.arange(each.tokens), prompt=p) for each, (p, _) in zip(traces, lengths, strict=True)],
    )


def taken(trace: Trace, tokens: np.ndarray, prompt: int) -> Request:
    """A request of these tokens of a trace, whose rejected drafts come behind all tokens."""
    names = ("chosen", "weights", "logits", f"{LOOKAHEAD}1")
    chosen, weights, logits, look = (trace.read(name, 0, trace.rows)[tokens] for name in names)
    return Request(chosen, prompt, weights, logits, (look,))


def with_record(trace: Trace, seed: int = 0) -> Trace:
    """The trace with a record of drafts, whose rejected rows have the routing of random tokens."""
    requests = [recorded_drafts(trace.request(number), seed + number) for number in range(trace.requests)]
    return memory_trace(trace.header, requests)


# -- which rows


def rows_of(plan: Passes) -> list[list[tuple[int, ...]]]:
    return [plain(Pass.planned(index, plan).rows) for index in range(len(plan))]


def plain(rows: Any) -> list[tuple[int, ...]]:
    return [(row.request, row.token, row.phase, row.routed, row.draft) for row in rows]


def test_every_schedule_with_drafts_equals_plain_loops() -> None:
    """Rows of drafts by chance and of recorded ones; 0 is a row of a token, 1 a right draft, 2 a wrong one."""
    dice, kinds = random.Random(1), [0, 0, 0]
    for seed in range(60):
        ends = [dice.randint(1, 12) for _ in range(dice.randint(1, 5))]
        lengths = tuple((dice.randint(0, end), end) for end in ends)
        accept = tuple(round(dice.random(), 2) for _ in range(dice.randint(1, 3)))
        bare, chance = crowd(lengths=lengths), (dice.randint(0, 5), accept, dice.choice(("own", "other")))
        by_chance = Guess(*chance, dice.choice((0, 5, 2**63 - 1)))
        tried = [(bare, Drafts(*chance).text, by_chance)]  # pyright: ignore[reportArgumentType]
        recorded = with_record(bare, seed)
        for rejected in ("own", "other", "recorded"):
            guess = Guess(0, (), rejected, seed, recorded.read("drafts").tolist())
            tried.append((recorded, f"recorded:rejected={rejected}", guess))
        for (trace, text, guess), passes in product(tried, PASSES):
            found = rows_of(schedule(trace, named_schedule(passes, text, guess.seed)))
            assert found == list(map(plain, laid(lengths, passes, guess))), (lengths, passes, guess)
            for row in chain(*found):
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


def test_the_hash_is_that_of_the_text() -> None:
    numbers = np.array([0, 1, 63, 2**40, 2**63 - 1])
    for seed in (0, 1, 2**63 - 1, 2**63):
        assert hash53(seed, numbers).tolist() == [schedules.hash53(seed, t) for t in numbers.tolist()]
    share = (hash53(3, np.arange(100_000)) / 2**53 < 0.3).mean()
    assert abs(share - 0.3) < 0.005  # three standard deviations


def test_a_draft_whose_number_equals_its_chance_is_rejected() -> None:
    """Prompt 0, then token 1 with the draft of token 2, which is right if u(2) < A: three passes, or two."""
    trace, number = crowd(lengths=((1, 3),)), schedules.hash53(0, 2) / 2**53
    for chance, passes in ((number, 3), (np.nextafter(number, 1), 2)):
        assert len(schedule(trace, named_schedule("recorded", f"1:accept={float(chance)!r}", 0))) == passes


def test_how_many_are_right_on_average() -> None:
    """With chance p each, N drafts give p + p**2 + ... + p**N tokens more than the known one."""
    trace = random_trace(1, Sizes(layers=1, experts=4, k=1, tokens=20_000))
    for many, chance in ((1, 0.7), (3, 0.7), (3, 0.4)):
        passes = len(schedule(trace, named_schedule("recorded", f"{many}:accept={chance}:rejected=other", 0)))
        expected = 1 + sum(chance**j for j in range(1, many + 1))
        assert trace.tokens / passes == pytest.approx(expected, rel=0.02)


@every("text", ["", "x", "-1", "1.5", "3:", "3:accept", "3:accept=", "3:accept=nan", "3:accept=1.5", "3:accept=.5/",
               "recorded:accept=.5", "recorded:rejected=none", "recorded:3"])  # fmt: skip
def test_a_wrong_setting_is_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(
        TraceError, match=r"^invalid draft '.*': expected .*N\[:accept=A1/A2/...\]\[:rejected=other\|own\]"
    ):
        parse_drafts(text)
    with pytest.raises(ConfigError, match="invalid draft"):
        configure(draft=text)


@every("text", ["3:rejected=both", "3:accept=.5:accept=.6", "3:a=1", "3:accept=0_1"])
def test_so_is_a_wrong_part(text: str) -> None:
    with pytest.raises(TraceError, match="invalid draft"):
        parse_drafts(text)


def test_spellings_of_one_setting_are_one_configuration() -> None:
    trace = crowd()
    one, other = configure(draft="2"), configure(draft="2:rejected=other:accept=0.70")
    assert one == other
    assert one.draft == "2:accept=0.7:rejected=other"
    assert configure(draft="0:accept=.3") == configure()
    assert one.identity(trace) != configure().identity(trace) == configure(draft="0").identity(trace)


def test_a_known_head_is_its_conditional_chances() -> None:
    """.77, .55, .40, .29 of all passes: .55 / .77 = .714, .40 / .55 = .727, .29 / .40 = .725."""
    assert configure(draft="4:accept=gemma-4-dense").draft == "4:accept=0.77/0.714/0.727/0.725:rejected=other"
    for head, shares in HEADS.items():
        accept = parse_drafts(f"1:accept={head}").accept
        assert np.cumprod(accept) == pytest.approx(shares, abs=2e-3)
    with pytest.raises(ConfigError, match="known head"):
        configure(draft="2:accept=nobody")


def test_a_cpu_that_takes_rows_apart_computes_an_expert_for_each() -> None:
    # of weights read once, three rows take as long as one; apart they take three times as long
    geometry = sizes(1, 4, 1, expert_bytes=(8,))
    for apart, spent in ((False, 8), (True, 24)):
        cpu = Roofline(flops=1e18, memory_bytes_per_s=1e9, rows_apart=apart)
        where = machine().model_copy(update={"cpu": cpu})
        assert Times(where, geometry, (geometry.expert_bytes,)).cpu_ns(0, 0, 3) == spent
    with pytest.raises(ValueError, match=r"rows_apart is valid only in \[cpu\]"):
        Platform.model_validate(machine().model_dump() | {"compute": {"kind": "measured", "rows_apart": True}})


# -- times by hand

WHERE = {"bytes_per_ns": 1 / 5, "dense_ns": 3, "expert_ns": 2, "expert_ns_per_token": 1}


def by_hand(rejected: str, seed: int) -> Outcome:
    """One layer, a prompt of expert 0, then tokens of experts 1, 2, 0; the first draft is right, the second wrong."""
    source = ListSource(
        sizes(1, 3, 1),
        [Prompted(tokens([[0]], [[1]], [[2]], [[0]]), 1)],
        "recorded",
        Guess(2, (1.0, 0.0), rejected, seed),
    )
    return replay_lists(source, 3, machine(**WHERE, prices={"draft": {"ns_per_token": 4}}), seed=seed)


def test_a_pass_with_a_right_and_a_wrong_draft() -> None:
    """Dense 3 ns, a draft 4 ns, an expert 2 ns and 1 ns per row, a transfer 5 ns; all three experts fit.

    pass 0, the prompt: gate at 3, 0 arrives at 8 and runs to 11.
    pass 1, token 1 with drafts 2 and 3: two drafts are 8 ns, so the gate is at 11 + 8 + 3 = 22. Token 3 is rejected
    and has its own routing, expert 0, which is there: 22 to 25. 1 arrives at 27 and runs to 30, 2 at 32 and to 35.
    pass 2, token 3 again: no draft is left, gate at 38, 0 is there and runs to 41.

    Three tokens in 24 + 6 ns: 10 ns each. The rejected row does not count: 1 assignment of the prompt and 3 decoded.
    """
    found = by_hand("own", 0)
    assert found.spans("expert") == [(8, 11, 0, 0), (22, 25, 0, 0), (27, 30, 0, 1), (32, 35, 0, 2), (38, 41, 0, 0)]
    (request,) = found.requests
    names = ("ttft_ns", "decode_ns", "decode_passes", "decode_tokens", "tokens")
    assert [request[name] for name in names] == [11, 30, 2, 3, 4]
    assert found.counts("draft_rows", "draft_rejected", "dense_ns", "accesses", "hits") == (2, 1, 17, 5, 2)
    assert found.counts("assignments", "assignments_kept") == (4, 4)


def test_drafts_take_their_time_once_and_not_in_every_layer() -> None:
    """Two layers of one expert, a prompt of one token, then a token with a right draft; times as above.

    pass 0: gates at 3 and 14, arrivals at 8 and 19, ends at 11 and 22. pass 1, two rows: gate at 22 + 4 + 3 = 29, a hit
    runs to 33; gate at 33 + 3 = 36, a hit runs to 40. Dense: 3 + 7 ns at layer 0, 3 + 3 at layer 1.
    """
    source = ListSource(
        sizes(2, 1, 1), [Prompted(tokens(*[[[0], [0]]] * 3), 1)], "recorded", Guess(1, (1.0,), "own", 0)
    )
    found = replay_lists(source, 2, machine(**WHERE, prices={"draft": {"ns_per_token": 4}}))
    assert [event.t1 for event in found.events if event.kind == "expert"] == [11, 22, 33, 40]
    assert [sum(row["dense_ns"] for row in found.layers if row["layer"] == layer) for layer in (0, 1)] == [10, 6]


def test_contention_does_not_change_what_drafts_take() -> None:
    """Everything is left out and prefetched after its pass; a transfer takes 50 ns, beside which dense takes twice 3.

    pass 0: gate at 3, and the prefetch of 0 crosses from 3 on. pass 1 began before the links were woken: a draft and
    dense, 3 + 4 + 3 = 10. pass 2, beside the transfer: 10 + 4 + 6 = 20.
    """
    source = ListSource(
        sizes(1, 2, 1),
        [Prompted(tokens([[0]], *[[[1]]] * 4), 1)],
        "recorded",
        Guess(1, (1.0,), "own", 0),
    )
    prices = {"draft": {"ns_per_token": 4}, "contention": {"compute": 0.5}}
    where = machine(bytes_per_ns=1 / 50, dense_ns=3, expert_ns=2, prices=prices)
    how: dict[str, Any] = {"miss": "drop:keep=0", "prefetch": "missed:of=dropped", "prefetch_at": "after_demand"}
    found = replay_lists(source, 2, where, **how)
    assert [(event.t0, event.t1) for event in found.events if event.kind == "dense"] == [(0, 3), (3, 10), (10, 20)]


def test_a_wrong_draft_is_routed_as_another_token() -> None:
    """The rejected draft, j = 2 of token i = 1, has the routing of token hash53(seed + 1, 1 * 64 + 2) mod 4.

    With that of token 1, pass 1 runs expert 1 for two rows: it arrives at 27 and runs 2 + 2 ns, 2 arrives at 32.
    """
    reads = {schedules.hash53(seed + 1, 66) % 4: seed for seed in range(40)}
    found = by_hand("other", reads[1])
    assert found.spans("expert")[1:] == [(27, 31, 0, 1), (32, 35, 0, 2), (38, 41, 0, 0)]
    assert by_hand("other", reads[3]).spans("expert") == by_hand("own", 0).spans("expert")
    assert by_hand("other", reads[0]).spans("expert") == by_hand("own", 0).spans("expert")


# -- engines


@pytest.mark.parametrize("contract", CONTRACTS)
@searched(70)
@given(drafted())
def test_the_engines_agree_with_drafts(contract: str, scenario: Scenario) -> None:
    scenario.settings.update(contract=contract)
    assert seen(scenario, "compiled") == seen(scenario, "reference")


EVERYTHING: dict[str, dict[str, Any]] = {
    "lru": {},
    "belady": {"eviction": "belady"},
    "looks ahead": {"prefetch": "top_k", "eviction": "least_stale", "lookahead": "shuffled_tokens"},
    "reads scores": {"eviction": "shielded_score:n=1", "prefetch": "top_k:source=current_gate", "reset": "request"},
    "routes": {"routing": "cache_prior:lam=1:top_j=0", "miss": "drop:keep=1", "reset": "7"},
    "substitutes": {"miss": "substitute:tolerance=.5", "contract": "sequential"},
    "precisions": {"miss": "cascade", "prefetch": "oracle"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", EVERYTHING.values(), ids=EVERYTHING)
@every("draft", ["3:accept=.6", "recorded"])
def test_both_engines_replay_a_trace_with_drafts(draft: str, settings: dict[str, Any]) -> None:
    """And what belongs to single tokens is that of the tokens: each is kept once. A record alone changes nothing."""
    bare = crowd()
    trace = with_record(bare) if draft == "recorded" else bare
    for passes in PASSES:
        config = configure(capacity="50%", passes=passes, draft=draft, seed=4, **settings)
        compiled, reference = (replay(trace, config, engine=engine) for engine in ENGINES)
        for part in ("totals", "per_layer", "per_request"):
            assert getattr(compiled, part) == getattr(reference, part), (passes, part)
        without, plainly = (replay(each, config.model_copy(update={"draft": "0"})) for each in (trace, bare))
        assert (without.totals, without.per_request) == (plainly.totals, plainly.per_request)
        assert 0 < compiled.totals["draft_rejected"] < compiled.totals["draft_rows"]
        for name in ("assignments", "mass"):
            assert compiled.totals[name] == without.totals[name]
        for ours, theirs in zip(compiled.per_request, without.per_request, strict=True):
            for name in ("request", "tokens", "decode_tokens", "assignments", "mass"):
                assert ours[name] == theirs[name]


@every("passes, draft", product(PASSES, ("2:accept=.5", "recorded")))
def test_a_replay_with_drafts_is_that_of_its_rows(passes: str, draft: str) -> None:
    """A trace with a request per pass, whose prompt are the rows, rejected ones too, has the same demand.

    So do its bound and its curve, which brute force has tried without drafts.
    """
    trace = with_record(crowd(3), 4) if draft == "recorded" else crowd(3)
    bare: dict[str, Any] = {"capacity": "40%", "eviction": "belady"}
    how, drafts = bare | {"prefetch": "oracle:horizon=1"}, {"passes": passes, "draft": draft, "seed": 9}
    plan = schedule(trace, configure(**drafts).schedule)
    rows = [np.array([row.routed for row in Pass.planned(index, plan).rows]) for index in range(len(plan))]
    laid_out = memory_trace(trace.header, [taken(trace, each, len(each)) for each in rows])
    ours, theirs = replay(trace, configure(**how, **drafts)), replay(laid_out, configure(**how))
    for name in ("accesses", "hits", "late", "misses", "evictions", "prefetch_used", "expert_ns", "time_ns"):
        assert ours.totals[name] == theirs.totals[name] > 0
    bounds = [bound_of(trace, configure(**bare, **drafts)), bound_of(laid_out, configure(**bare))]
    assert None not in bounds
    assert count(trace, bounds[0]) == count(laid_out, bounds[1])  # pyright: ignore[reportArgumentType]
    if draft == "recorded":
        record = trace.read("drafts")
        assert ours.totals["draft_rejected"] == trace.rejects
        assert ours.totals["draft_rows"] == record[record > 0].sum()


@every("passes, contract", [(passes, contract) for passes in ("recorded", "batch:2") for contract in CONTRACTS])
def test_bounds_and_curves_serve_drafts(passes: str, contract: str) -> None:
    trace = crowd(5)
    settings: dict[str, Any] = {"passes": passes, "contract": contract, "draft": "3:accept=.6", "seed": 4}
    belady = check_bounds_and_curves(trace, "90%", settings)
    least = limits(trace, configure(capacity="90%", eviction="belady", **settings)).least
    assert least is not None
    assert least.time_ns <= belady.totals["time_ns"]
    assert least.decode_tokens == sum(row["decode_tokens"] for row in belady.per_request)


def check_bounds_and_curves(trace: Trace, capacity: str, settings: dict[str, Any]) -> Result:
    """Where every step fits, Belady's replay hits as the bound says; a curve is what replays count at each capacity."""
    config = configure(capacity=capacity, eviction="belady", **settings)
    bound = bound_of(trace, config)
    assert bound is not None
    counted, belady = count(trace, bound), replay(trace, config)
    assert [belady.totals[name] for name in ("hits", "accesses")] == [counted["belady_hits"], counted["accesses"]]
    found = curve(trace, "lru", "global", **settings)
    for size, misses in zip(found.capacity_bytes.tolist(), found.misses.tolist(), strict=True):
        if misses != UNDECIDED:
            assert replay(trace, configure(capacity=f"{size}B", **settings)).totals["misses"] == misses
    return belady


def test_speed_is_by_token_and_not_by_pass() -> None:
    result = replay(crowd(), configure(capacity="50%", draft="3:accept=1"))
    spent, many = (sum(row[name] for row in result.per_request) for name in ("decode_ns", "decode_tokens"))
    assert many == sum(end - prompt for prompt, end in LENGTHS)
    assert sum(row["decode_passes"] for row in result.per_request) == 2 + 1 + 1 + 2  # of 6, 2, 1 and 7 tokens
    found = values_of(result)
    assert found["tpot_ms"] == pytest.approx(spent / many / 1e6)
    assert found["tokens_per_s"] == pytest.approx(1e9 * many / spent)
    assert result.totals["draft_rejected"] == 0


def test_a_row_says_whose_routing_it_has() -> None:
    assert (Row(0, 5, 1).routed, Row(0, 5, 1, 3, 2).routed) == (5, 3)
    assert (Row(0, 5, 1).kept, Row(0, 5, 1, 5, 1).kept, Row(0, 5, 1, 3, 2).kept) == (True, True, False)
