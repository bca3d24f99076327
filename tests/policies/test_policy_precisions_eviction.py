"""Evictions of experts that are held at several precisions, against a slow model: atomic, cascade, no prefetch."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.policy_catalogue import by_policy
from tests.kit.policy_models import DemandStep, cascade_tier, one_token_steps
from tests.kit.policy_models_eviction import facts_of
from tests.kit.policy_ranks_eviction import Ranked, decayed, frequency_per_age, kth_use, multidimensional, windowed_mass
from tests.kit.policy_runs import Sizes, random_trace, replayed
from tests.kit.search import searched
from tests.policies.test_policy_models_eviction import Maker, pinned, ranked, timestamp

BITS, BELOW = (8, 4, 2), ("0.6", "0.3")
CASCADE = "cascade:bits=8/4/2:below=.6/.3"


def high_uses(m: Ranked, x: int, request_only: bool) -> int:
    uses = m.in_request(x) if request_only else m.uses_of(x)
    return sum(use.high for use in uses)


MODELS: dict[str, Maker] = {
    "lru": ranked(lambda m, x: 0),  # ties alone
    "least_high_precision": ranked(high_uses, True),
    "least_high_precision:span=history": ranked(high_uses, False),
    "hobbit": ranked(multidimensional, (0.25, 0.25, 0.25, 0.25)),
    "hobbit:w_lru=.125:w_lfu=0:w_lhu=1:w_fld=.5": ranked(multidimensional, (0.125, 0, 1, 0.5)),
    "lfu_decay:half_life=5": ranked(decayed, 5),
    "lfru": ranked(frequency_per_age),
    "lru_k": ranked(kth_use, 2),
    "lru_k:history=resident": ranked(kth_use, 2, "resident"),
    "score:over=window:window=4": ranked(windowed_mass, 4),
    "pinned": pinned(0.5, timestamp),
    "pinned:rest=lfu": pinned(0.5, lambda m, x: len(m.uses_here(x))),
}


class Tiered:
    """Copies (expert, precision) in a pool; the expert's history is kept by a model of one precision."""

    def __init__(self, book: Ranked, sizes: Sequence[dict[int, int]]) -> None:
        self.book, self.sizes = book, sizes
        self.copies = list[tuple[int, int]]()
        self.hits, self.low = list[bool](), 0

    def run(self, step: DemandStep) -> None:
        """Look everything up, use it, then fetch what was missing."""
        self.book.begin(step)
        wants = [cascade_tier(n, len(step.demand), BELOW) for n in range(len(step.demand))]
        found = [self.find(x, want) for x, want in zip(step.demand, wants, strict=True)]
        self.hits += [copy is not None for copy in found]
        served = [copy or missing for copy, missing in zip(found, zip(step.demand, wants, strict=True), strict=True)]
        for x, precision in served:
            self.book.high = precision == 0
            self.low += precision > 0
            self.book.use(x)
        for copy, hit in zip(served, found, strict=True):
            if hit is None:
                self.admit(copy, served)

    def find(self, x: int, want: int) -> tuple[int, int] | None:
        """The most precise copy that is good enough."""
        return next(((x, p) for p in range(want + 1) if (x, p) in self.copies), None)

    def bytes_of(self, copy: tuple[int, int]) -> int:
        return self.sizes[copy[1]][copy[0]]

    def admit(self, copy: tuple[int, int], kept: Sequence[tuple[int, int]]) -> None:
        """Smallest leaves, among the copies of an expert the most precise, if all that must leave may."""
        stay, leaving = list(self.copies), list[tuple[int, int]]()
        while sum(map(self.bytes_of, stay)) + self.bytes_of(copy) > self.book.capacity:
            leaving.append(min((c for c in stay if c not in kept), key=self.order))
            stay.remove(leaving[-1])
        if all(self.book.lets_in(copy[0], x) for x, _ in leaving):
            self.copies = stay
            for x in dict.fromkeys(x for x, _ in leaving):
                self._forget(x)
            self.copies.append(copy)
            self.book.arrived(copy[0], False)
        elif self.find(copy[0], len(BITS) - 1) is None:
            self.book.declined(copy[0])

    def _forget(self, x: int) -> None:
        """A copy of it left; others may still be here."""
        if self.find(x, len(BITS) - 1) is None:
            self.book.left(x)

    def order(self, copy: tuple[int, int]) -> tuple:
        return self.book.rank(self.book, copy[0]), self.book.by_timestamp.index(copy[0]), copy


@by_policy(MODELS)
@searched(12)
@given(seed=st.integers(0, 2**32), layers=st.sampled_from([2, 3]), slots=st.integers(5, 9))
def test_evictions_agree_with_their_models_at_three_precisions(
    texts: tuple[str, ...], seed: int, layers: int, slots: int
):
    """Three experts a step at 8, 4 and 2 bits; a better copy will do, and several copies of an expert may be held."""
    trace = random_trace(seed, Sizes(layers, 5, 3, 9, requests=2, size=8))
    geometry = trace.geometry
    each = range(geometry.layers * geometry.experts)
    sizes = [{x: geometry.bytes_at(bits)[x // geometry.experts] for x in each} for bits in BITS]
    for text in texts:
        book = MODELS[text](slots * geometry.expert_bytes[0], sizes[0], facts_of(trace))
        assert isinstance(book, Ranked)
        model = Tiered(book, sizes)
        for step in one_token_steps(trace):
            model.run(step)
        outcome = replayed(trace, slots, eviction=text, miss=CASCADE, passes="token")
        assert [access.hit for access in outcome.accesses] == model.hits, text
        assert outcome.totals["low_precision"] == model.low, text
