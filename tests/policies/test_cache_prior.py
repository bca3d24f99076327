"""Cache-prior on a recorded model: no lift is no change, to the last bit, and a larger lift misses less."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

from moereplay.results.result import Result
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Request, Trace, memory_trace
from moereplay.traces.store import open_trace
from tests.kit.every import every

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"
READINGS = ("running_range", "token_range", "ema_range", "running_mean")
#: What a weight off by its last bit, or another order of the same experts, would show in.
SENSITIVE = (
    {"eviction": "score"},
    {"miss": "cascade"},
    {"eviction": "arc", "contract": "sequential", "prefetch": "top_k"},
    {"miss": "substitute:tolerance=.02"},
    {"miss": "drop_below", "eviction": "hobbit", "scope": "per_layer"},
)


@cache
def miniature(tokens: int, weights: bool = True) -> Trace:
    """The first tokens of the sample, half of them as a prompt; perhaps without the gate weights that were recorded."""
    stored = open_trace(SAMPLE)
    request = stored.request(0)
    part = Request(
        chosen=request.chosen[:tokens],
        prompt_length=tokens // 2,
        weights=request.weights[:tokens] if weights and request.weights is not None else None,
        logits=None if request.logits is None else request.logits[:tokens],
        lookahead=tuple(each[:tokens] for each in request.lookahead),
    )
    return memory_trace(stored.header, [part], stored.router_bias)


@cache
def outcome(routing: str, settings: tuple[tuple[str, str], ...], weights: bool = True) -> Result:
    """A replay of 24 tokens with a fifth of the experts."""
    return replay(miniature(24, weights), configure(capacity="20%", routing=routing, **dict(settings)), log=True)


@every("delta", READINGS)
@every("settings", SENSITIVE)
def test_without_lift_it_is_standard_bit_for_bit(settings: dict[str, str], delta: str) -> None:
    """Recorded weights, not the same ones worked out again from recorded logits, which round otherwise."""
    given = tuple(settings.items())
    unchanged, prior = outcome("standard", given), outcome(f"cache_prior:lam=0:delta={delta}", given)
    assert prior.events == unchanged.events
    assert prior.totals == unchanged.totals
    assert prior.per_layer == unchanged.per_layer
    assert prior.per_request == unchanged.per_request


def test_without_lift_and_without_weights_demand_stays_in_rank_order() -> None:
    """What was not recorded is not worked out where nothing changes."""
    assert outcome("standard", (), weights=False).events == outcome("cache_prior:lam=0", (), weights=False).events


@every("top_j", [1, 2])
def test_misses_fall_with_the_lift(top_j: int) -> None:
    """The authors' setting: LRU, half of each layer's experts. What is protected keeps the rate above zero."""
    trace, rates = miniature(48), []
    for lam in ("0", ".1", ".3", ".8"):
        config = configure(capacity="50%", scope="per_layer", routing=f"cache_prior:lam={lam}:top_j={top_j}")
        totals = replay(trace, config).totals
        rates.append((totals["late"] + totals["misses"]) / totals["accesses"])
    assert all(less < more for more, less in pairwise(rates))
    assert rates[-1] > 0
