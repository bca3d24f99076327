"""Replays of miss policies against slow models: every access, every copy moved, what every token ran.

The cache of the models is an LRU over copies of several sizes, in one pool of bytes for all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moereplay.traces.demand import union_of
from moereplay.traces.routers import scores, to_units, weigh
from moereplay.traces.schema import Trace
from tests.kit.every import every
from tests.kit.policy_catalogue import by_policy
from tests.kit.policy_models_miss import (
    CPU,
    DROP,
    AllOnCpu,
    Band,
    Drop,
    DropBelow,
    DropCascade,
    Fiddler,
    Hobbit,
    LowestBit,
    MissModel,
    Split,
    Step,
    Tolerant,
)
from tests.kit.policy_runs import Nanoseconds, Outcome, Sizes, random_trace, replayed
from tests.kit.search import searched

#: A prompt of two tokens demands up to six experts of nine; at 16 bits a copy has 10 bytes, so twelve slots of 5 do.
SIZES = Sizes(layers=2, experts=9, k=3, tokens=14, prompt=2)
SLOTS = 12
seeds = st.integers(0, 2**32)
times = st.builds(Nanoseconds, *[st.integers(1, 7)] * 4, st.just(1.0))
Copy = tuple[int, int]  #: expert x, precision


class CopiesByUse:
    """Copies in a pool of bytes; the one whose expert was used least recently is evicted, then the first by name."""

    def __init__(self, room: int, sizes: list[int]) -> None:
        self.room, self.sizes = room, sizes
        self.copies, self.by_use = set[Copy](), list[int]()

    def free(self) -> int:
        """Bytes."""
        return self.room - sum(self.sizes[tier] for _, tier in self.copies)

    def find(self, x: int, want: int) -> Copy | None:
        """The most precise copy that will do."""
        return min((copy for copy in self.copies if copy[0] == x and copy[1] <= want), default=None)

    def step(self, used: list[Copy], fetched: list[Copy]) -> None:
        """Use these, of which some have to come."""
        for x, _ in used:
            self.by_use = [*(y for y in self.by_use if y != x), x]
        for copy in fetched:
            while self.free() < self.sizes[copy[1]]:
                leaving = self.copies - set(used)
                self.copies.remove(min(leaving, key=lambda copy: (self.by_use.index(copy[0]), copy)))
            self.copies.add(copy)


class ServedByModel:
    """Replays a trace over `CopiesByUse` and keeps what happened."""

    def __init__(self, trace: Trace, bits: tuple[float, ...]) -> None:
        self.trace, self.sizes = trace, [trace.geometry.bytes_at(tier)[0] for tier in bits]
        self.cache = CopiesByUse(SLOTS * trace.geometry.expert_bytes[0], self.sizes)
        self.ran, self.hits, self.moved = [], [], list[tuple[int, int, int]]()
        self.counts = Counter[str]()

    def replay(self, serve: Callable[[int, Step], None]) -> None:
        """Every step of the recorded passes."""
        prompt = SIZES.prompt
        for rows in [range(prompt), *(range(t, t + 1) for t in range(prompt, self.trace.tokens))]:
            for layer in range(SIZES.layers):
                serve(layer, self.step_of(rows, layer))

    def step_of(self, rows: range, layer: int) -> Step:
        """From the trace."""
        logits, chosen, weights = (
            self.trace.read(name, rows.start, rows.stop)[:, layer] for name in ("logits", "chosen", "weights")
        )
        ids, units = chosen.tolist(), to_units(weights).tolist()
        probabilities = to_units(scores(self.trace.geometry.router, logits)).tolist()
        demand, decode = list(union_of(ids, units).expert), rows.start >= SIZES.prompt
        return Step(decode, ids, units, probabilities, logits.tolist(), demand, self.sizes)

    def by(self, model: MissModel, layer: int, step: Step) -> None:
        """Look up, decide, use and fetch."""
        base, wants = layer * SIZES.experts, model.wants(step)
        found = [self.cache.find(base + e, want) for e, want in zip(step.demand, wants, strict=True)]
        self.hits += [copy is not None for copy in found]
        missing = [n for n, copy in enumerate(found) if copy is None]
        verdicts = dict(zip(missing, model.serve(step, missing, self.cache.free()), strict=True))
        fetched = {n: (base + step.demand[n], tier) for n, tier in verdicts.items() if isinstance(tier, int)}
        used = [copy or fetched[n] for n, copy in enumerate(found) if copy or n in fetched]
        self.use(layer, used, list(fetched.values()))
        gone = {step.demand[n] for n, verdict in verdicts.items() if verdict == DROP}
        self.ran.append([[-1 if e in gone else e for e in row] for row in step.ids])
        self.counts["dropped"] += len(gone)
        self.counts["cpu_executed"] += sum(verdict == CPU for verdict in verdicts.values())

    def use(self, layer: int, used: list[Copy], fetched: list[Copy]) -> None:
        """And note what moves."""
        self.cache.step(used, fetched)
        self.moved += [(layer, x - layer * SIZES.experts, tier) for x, tier in fetched]
        self.counts["low_precision"] += sum(tier > 0 for _, tier in used)

    def equals(self, outcome: Outcome, text: str) -> None:
        """Raises AssertionError where the replay differs, with the policy's text."""
        assert outcome.ran == self.ran, text
        assert [access.hit for access in outcome.accesses] == self.hits, text
        transfers = [event for event in outcome.events if event.kind == "transfer"]
        assert [(event.layer, event.expert, event.precision) for event in transfers] == self.moved, text
        assert {name: outcome.totals[name] for name in self.counts} == self.counts, text


MODELS: dict[str, Callable[[], MissModel]] = {
    "lowest_bit": partial(LowestBit, 8, 4, 2),
    "lowest_bit:bits=16/3": partial(LowestBit, 16, 3),
    "hobbit": partial(Hobbit, "0.6", "0.9", 16, 4),
    "hobbit:bits=8/2:t1=0.25:t2=0.5": partial(Hobbit, "0.25", "0.5", 8, 2),
    "hobbit:t1=0:t2=0": partial(Hobbit, "0", "0", 16, 4),
    "cpu": AllOnCpu,
}
for bits, below, keep in product(((8, 4), (16, 8, 4)), (("0.6", "0.3"), ("0.75",)), (0, 2)):
    spelled = f"bits={'/'.join(map(str, bits))}:below={'/'.join(below)}:keep={keep}"
    MODELS[f"drop_cascade:{spelled}"] = partial(DropCascade, bits, below, keep)
for keep in (0, 1):
    MODELS[f"drop_cascade:when=pressure:bits=16/8/3:keep={keep}"] = partial(DropCascade, (16, 8, 3), (), keep, True)
MODELS["cascade"] = partial(DropCascade, (8, 4, 2), ("0.6", "0.3"), SIZES.k)  # no rank is dropped
MODELS["cascade:when=pressure:bits=16/8/3"] = partial(DropCascade, (16, 8, 3), (), SIZES.k, True)
MODELS |= {f"drop:keep={keep}": partial(Drop, keep) for keep in (0, 1, 2)}
MODELS |= {f"split:q={q}": partial(Split, q) for q in ("0", "0.5", "0.75")}
for f, share in product(("0.5", "1", "1.25"), (False, True)):
    MODELS[f"drop_below:f={f}:of={'share' if share else 'weight'}"] = partial(DropBelow, f, share)
for ratio, goal, decode in product(("1.5", "2", "3"), ("sum", "max"), ("cpu", "cost")):
    text = f"fiddler:ratio={ratio}:goal={goal}:decode={decode}"
    MODELS[text] = partial(Fiddler, ratio, goal == "max", decode == "cpu")


@by_policy(MODELS)
@searched(12)
@given(seed=seeds, times=times)
def test_misses_are_served_as_by_their_models(texts: tuple[str, ...], seed: int, times: Nanoseconds):
    """Both slots and bytes are short; no decision depends on how long anything takes."""
    trace = random_trace(seed, SIZES)
    for text in texts:
        model = MODELS[text]()
        served = ServedByModel(trace, model.bits)
        served.replay(partial(served.by, model))
        served.equals(replayed(trace, SLOTS, times, miss=text), text)


# -- substitution in a band -------------------------------------------------------------------------------------------


class ServedInBand(ServedByModel):
    """Substitutes are decided expert by expert in demand order, token by token."""

    def by_band(self, band: Band, layer: int, step: Step) -> None:
        """Look up, stand in, take the union again, use and fetch."""
        base, rows = layer * SIZES.experts, [list(row) for row in step.ids]
        resident = {x - base for x, _ in self.cache.copies if base <= x < base + SIZES.experts}
        self.hits += [e in resident for e in step.demand]
        missing = [e for e in step.demand if e not in resident]
        substitutable = step.decode or band.prefill_too
        for gone in missing if substitutable else ():
            self._stand_in(band, step, gone, rows, resident)
        waiting = [e for e in missing if any(e in row for row in rows)]
        alone = len(rows) == 1 or not substitutable
        on_cpu = band.split(waiting, step) if alone else []
        demand = step.demand if rows == step.ids else self._union(rows, step)
        self.use(
            layer,
            [(base + e, 0) for e in demand if e not in on_cpu],
            [(base + e, 0) for e in demand if e in waiting and e not in on_cpu],
        )
        self.ran.append(rows)
        self.counts["cpu_executed"] += len(on_cpu)

    def _stand_in(self, band: Band, step: Step, gone: int, rows: list[list[int]], resident: set[int]) -> None:
        for t, row in enumerate(rows):
            other = band.stand_in(step, t, gone, row, resident) if gone in row else None
            if other is not None:
                row[row.index(gone)] = other
                self.counts["substituted"] += 1

    def _union(self, rows: list[list[int]], step: Step) -> list[int]:
        logits = np.array(step.logits, np.float32)
        return list(union_of(rows, to_units(weigh(self.trace.geometry.router, logits, np.array(rows))).tolist()).expert)


@every("phase", ["decode", "any"])
@every("ratio", [None, "0.5", "1", "2.5"])
@searched(12)
@given(seed=seeds, alpha=st.sampled_from(["0", "0.125", "0.5", "0.875"]), times=times)
def test_substitution_in_a_band_runs_as_its_model(
    phase: str, ratio: str | None, seed: int, alpha: str, times: Nanoseconds
):
    """Experts without a substitute are loaded, or shared between link and CPU from both ends."""
    trace, band = random_trace(seed, SIZES), Band(alpha, phase == "any", ratio)
    served = ServedInBand(trace, (8,))
    served.replay(partial(served.by_band, band))
    rest = "" if ratio is None else f":rest=balance:ratio={ratio}"
    text = f"substitute_band:alpha={alpha}:phase={phase}{rest}"
    served.equals(replayed(trace, SLOTS, times, miss=text), text)


@searched(12)
@given(seed=seeds, tolerance=st.sampled_from(["0", "0.0625", "0.125", "0.25", "1"]), times=times)
def test_substitution_runs_as_its_model(seed: int, tolerance: str, times: Nanoseconds):
    """Each token finds a stand-in of its own, or the expert is fetched."""
    trace = random_trace(seed, SIZES)
    served = ServedInBand(trace, (8,))
    served.replay(partial(served.by_band, Tolerant(tolerance)))
    text = f"substitute:tolerance={tolerance}"
    served.equals(replayed(trace, SLOTS, times, miss=text), text)


def test_the_scenarios_above_exercise_every_verdict():
    """Substitutes, CPU, drops, low precision and evictions all happen, or the models prove nothing."""
    totals = [
        replayed(random_trace(4, SIZES), SLOTS, miss=miss).totals
        for miss in ("substitute_band:alpha=0.5:rest=balance:ratio=1", "hobbit:bits=8/2:t1=0.25:t2=0.5")
    ]
    band, hobbit = totals
    assert min(band["substituted"], band["cpu_executed"], band["evictions"]) > 0
    assert min(hobbit["dropped"], hobbit["low_precision"], hobbit["evictions"]) > 0
