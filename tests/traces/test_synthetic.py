"""Synthetic traces: the statistics asked for are the statistics found, measured here independently."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from moereplay.traces.routers import choice_scores, choose, weigh
from moereplay.traces.schema import Geometry, Router, Trace, TraceError
from moereplay.traces.synthetic import Synthetic, _rounded, synthesise
from tests.kit.collecting import case

V3 = Router(family="sigmoid_groups", groups=8, groups_kept=4, renormalise=True, scale=2.5)
V2 = Router(family="softmax_groups", groups=8, groups_kept=3, scale=16.0)
PHI = Router(family="sparsemixer", jitter=0.01)


def geometry(layers: int, experts: int, k: int, router: Router | None = None) -> Geometry:
    sizes = (1000,) * layers
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=sizes, router=router or Router())


def make(shape: Geometry, **settings: Any) -> Trace:
    return synthesise(Synthetic(geometry=shape, **settings))


def hits(truth: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Which ids (..., k) of truth are among those of seen."""
    return (truth[..., :, None] == seen[..., None, :]).any(-1)


def reuse(trace: Trace) -> float:
    """P(used at t + 1 | used at t) within requests."""
    chosen = trace.read("chosen").reshape(trace.requests, -1, *trace.read("chosen").shape[1:])
    return float(hits(chosen[:, :-1], chosen[:, 1:]).mean())


def recall(trace: Trace, depth: int) -> float:
    """Share of a layer's chosen experts that the look-ahead of `depth` layers before ranks among the k best."""
    look = trace.read(f"lookahead/{depth}")[:, :-depth]
    seen = choose(choice_scores(trace.geometry.router, look), trace.geometry.k)
    return float(hits(trace.read("chosen")[:, depth:], seen).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kind", "target"),
    [
        (geometry(16, 64, 8), "markov", 0.31),
        (geometry(16, 64, 8), "markov", 0.6),
        (geometry(32, 8, 2, Router(renormalise=True)), "markov", 0.5),
        (geometry(24, 60, 4), "markov", 0.45),
        (geometry(16, 16, 2, PHI), "markov", 0.9),
        (geometry(8, 256, 8, V3), "markov", 0.4),
        (geometry(6, 160, 6, V2), "phases", 0.5),
    ],
)
def test_the_reuse_asked_for_is_the_reuse_found(shape: Geometry, kind: str, target: float) -> None:
    trace = make(shape, kind=kind, reuse=target, requests=4, decode_tokens=480, logits=False)
    assert reuse(trace) == pytest.approx(target, abs=0.02)


@pytest.mark.parametrize(
    ("shape", "kind", "targets"),
    [
        (geometry(16, 64, 8), "zipf", (0.87, 0.8, 0.75)),
        (geometry(32, 8, 2), "zipf", (0.95, 0.4)),
        (geometry(8, 256, 8, V3), "phases", (0.85,)),
        (geometry(8, 16, 2, PHI), "zipf", (1.0,)),
        (geometry(8, 64, 8), "cyclic", (0.9, 0.5)),
    ],
)
def test_the_recall_asked_for_is_the_recall_found(shape: Geometry, kind: str, targets: tuple[float, ...]) -> None:
    trace = make(shape, kind=kind, recall=targets, decode_tokens=480)
    found = [recall(trace, depth) for depth in range(1, len(targets) + 1)]
    assert found == pytest.approx(targets, abs=0.02)


def test_the_first_choice_follows_the_zipf_law() -> None:
    for kind, target in [("zipf", None), ("markov", 0.5)]:
        # shares 1/r over 8 experts: 1 / (1 + 1/2 + ... + 1/8) = 0.368, 0.184, 0.123, ...
        trace = make(geometry(16, 8, 2), kind=kind, reuse=target, exponent=1.0, decode_tokens=4000, logits=False)
        first = trace.read("chosen")[:, :, 0]
        shares = [np.sort(np.bincount(first[:, layer], minlength=8))[::-1] / len(first) for layer in range(16)]
        law = 1 / np.arange(1, 9)
        assert np.mean(shares, axis=0) == pytest.approx(law / law.sum(), abs=0.015)


def test_layers_favour_experts_of_their_own() -> None:
    chosen = make(geometry(8, 64, 4), exponent=1.0, decode_tokens=2000, logits=False).read("chosen")
    assert len({int(np.bincount(chosen[:, layer].ravel()).argmax()) for layer in range(8)}) > 4


def test_popularity_moves_with_the_phase_and_only_then() -> None:
    trace = make(geometry(1, 64, 8), kind="phases", phase_tokens=1000, prompt_tokens=0, decode_tokens=2000)
    chosen = trace.read("chosen")
    quarters = [np.bincount(chosen[start : start + 500].ravel(), minlength=64) for start in (0, 500, 1000, 1500)]
    likeness = np.asarray(np.corrcoef(quarters))
    assert likeness[0, 1] > 0.8 and likeness[2, 3] > 0.8
    assert abs(likeness[1, 2]) < 0.5


def test_noise_starts_anew_with_each_request() -> None:
    trace = make(geometry(4, 64, 8), kind="markov", reuse=0.9, requests=100, prompt_tokens=0, decode_tokens=10)
    chosen = trace.read("chosen")
    # across a boundary only popularity is shared: 0.16 at exponent 0.5
    assert hits(chosen[9:-1:10], chosen[10::10]).mean() == pytest.approx(0.16, abs=0.03)


def lru_hits(chosen: np.ndarray, capacity: int) -> int:
    """Hits of one layer's ids (T, k) in a plain LRU cache, one access at a time."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for expert in chosen.ravel().tolist():
        found += expert in cache
        cache[expert] = None
        cache.move_to_end(expert)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return found


def test_a_cycle_defeats_lru_until_every_expert_fits() -> None:
    for experts, k, router in [(64, 8, None), (60, 4, None), (10, 3, None), (256, 8, V3)]:
        with case(experts, k, router):
            trace = make(geometry(2, experts, k, router), kind="cyclic", requests=3, prompt_tokens=8, decode_tokens=92)
            for layer in range(2):
                chosen = trace.read("chosen")[:, layer]
                assert lru_hits(chosen, experts - 1) == 0
                assert lru_hits(chosen, experts) == 300 * k - experts


def test_a_cycle_is_demanded_in_its_order() -> None:
    # demand is ordered by descending gate weight, so weights must fall with rank for LRU to see the cycle
    trace = make(geometry(2, 10, 3), kind="cyclic")
    assert (np.diff(trace.read("weights"), axis=-1) < 0).all()


@pytest.mark.slow
def test_ids_and_weights_follow_from_the_recorded_logits() -> None:
    for kind in ["zipf", "markov", "phases", "cyclic"]:
        for router in [Router(), Router(family="topk_softmax"), PHI, V2, V3]:
            with case(kind, router):
                reuse = 0.5 if kind == "markov" else None
                trace = make(geometry(4, 64, 6, router), kind=kind, reuse=reuse, decode_tokens=60)
                logits, chosen = trace.read("logits"), trace.read("chosen")
                assert np.array_equal(choose(choice_scores(router, logits), 6), chosen)
                assert np.array_equal(weigh(router, logits, chosen), trace.read("weights"))


def test_rounded_logits_tie_and_the_lowest_id_wins() -> None:
    trace = make(geometry(4, 256, 8), decode_tokens=1000)
    logits, chosen = trace.read("logits"), trace.read("chosen")
    picked = np.take_along_axis(logits, chosen.astype(np.intp), -1)
    tied = picked[..., 1:] == picked[..., :-1]
    assert tied.sum() > 100
    assert (np.diff(chosen, axis=-1)[tied] > 0).all()


def test_bf16_leaves_the_low_half_of_every_float_empty() -> None:
    for bf16 in (True, False):
        trace = make(geometry(2, 16, 2), recall=(0.8,), bf16=bf16)
        low = [np.any(trace.read(name).view(np.uint32) & 0xFFFF) for name in ("logits", "lookahead/1")]
        assert low == [not bf16] * 2


def test_bf16_rounds_to_the_nearest() -> None:
    rounded, exact = (make(geometry(2, 16, 2), bf16=bf16).read("logits") for bf16 in (True, False))
    # 8 significant bits: half a unit in the last place is at most 2**-8 of the value
    assert (np.abs(rounded - exact) <= np.abs(exact) * 2**-8).all()


def test_what_lies_halfway_is_rounded_to_the_even_neighbour() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    rounded = _rounded(Synthetic(geometry=geometry(2, 16, 2)), halfway)
    assert rounded.view(np.uint32).tolist() == [0x3F800000, 0x3F820000]


def test_look_ahead_past_the_last_layer_is_zero() -> None:
    trace = make(geometry(4, 16, 2), recall=(0.9, 0.8))
    filled = trace.read("lookahead/2").any(axis=(0, 2))
    assert filled.tolist() == [True, True, False, False]


def test_the_same_configuration_gives_the_same_bytes() -> None:
    settings = {"kind": "markov", "reuse": 0.5, "recall": (0.8,), "requests": 2}
    first, second = make(geometry(4, 16, 2), **settings), make(geometry(4, 16, 2), **settings)
    assert first.digest == second.digest
    assert first.digest != make(geometry(4, 16, 2), **settings, seed=1).digest


def test_look_ahead_leaves_the_logits_as_they_were() -> None:
    plain, looking = make(geometry(4, 16, 2)), make(geometry(4, 16, 2), recall=(0.8,))
    assert np.array_equal(plain.read("logits"), looking.read("logits"))


def test_without_logits_the_ids_stay() -> None:
    full, lean = make(geometry(4, 16, 2), recall=(0.8,)), make(geometry(4, 16, 2), logits=False)
    assert full.capabilities == {"ids", "weights", "logits", "lookahead"}
    assert lean.capabilities == {"ids", "weights"}
    assert np.array_equal(full.read("chosen"), lean.read("chosen"))
    with pytest.raises(ValueError, match="--recall cannot be combined with --no-logits"):
        make(geometry(4, 16, 2), recall=(0.8,), logits=False)


def test_requests_have_the_lengths_asked_for() -> None:
    trace = make(geometry(2, 8, 2), requests=3, prompt_tokens=5, decode_tokens=7)
    assert trace.request_offsets.tolist() == [0, 12, 24, 36]
    assert trace.prompt_lengths.tolist() == [5, 5, 5]
    assert trace.header.provenance.seed == 0


def test_a_reuse_below_that_of_popularity_is_refused() -> None:
    with pytest.raises(TraceError, match=r"reuse 0.05 with Zipf exponent 1.0 is out of reach .*: expected 0.3\d\d to"):
        make(geometry(4, 64, 8), kind="markov", reuse=0.05, exponent=1.0)


def test_a_recall_below_chance_is_refused() -> None:
    # chance is k / E = 0.5
    with pytest.raises(TraceError, match=r"look-ahead recall 0.2 is out of reach .*: expected 0.[45]\d\d to 1.000"):
        make(geometry(4, 8, 4), recall=(0.2,))


def test_a_group_limit_that_breaks_the_cycle_is_refused() -> None:
    # 3 experts in turn reach over two groups of 2, but only one group is kept
    with pytest.raises(TraceError, match="cyclic: the router keeps too few groups"):
        make(geometry(1, 8, 3, Router(family="softmax_groups", groups=4, groups_kept=1)), kind="cyclic")


def test_contradictory_settings_are_refused() -> None:
    for settings, message in [
        ({"kind": "markov"}, "markov requires it"),
        ({"kind": "zipf", "reuse": 0.5}, "cannot be combined with kind zipf"),
        ({"prompt_tokens": 0, "decode_tokens": 0}, "a request needs a token"),
        ({"recall": (0.9, 0.8)}, "2 look-ahead depths need more than 2 layers"),
        ({"kind": "random"}, "Input should be 'zipf'"),
        ({"zipf": 1.0}, "Extra inputs are not permitted"),
    ]:
        with case(settings, message), pytest.raises(ValidationError, match=message):
            Synthetic(geometry=geometry(2, 8, 2), **settings)
