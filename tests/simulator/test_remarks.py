"""Settings that change nothing on a trace are named; whatever changes something is not."""

from __future__ import annotations

from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.policies import files
from moereplay.policies.eviction import fifo
from moereplay.simulator.bounds import without_effect
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.passes import schedule
from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from tests.kit.command import moereplay_here, unfolded
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, stored_trace


def trace_of(*requests: tuple[int, int], layers: int = 2, depth: int = 1) -> Trace:
    """Requests of (prompt, decoded) tokens over 6 experts per layer, with logits and look-ahead."""
    geometry = Geometry(layers=layers, experts=6, k=2, expert_bytes=(1000,) * layers)
    draw, made = np.random.default_rng(3), []
    for prompt, decoded in requests:
        logits = draw.normal(size=(prompt + decoded, layers, 6)).astype("f4")
        chosen = np.argsort(-logits, axis=-1)[..., :2].astype(np.int16)
        looks = tuple(draw.normal(size=logits.shape).astype("f4") for _ in range(depth))
        made.append(Request(chosen, prompt, weights=np.full(chosen.shape, 0.5, "f4"), logits=logits, lookahead=looks))
    return memory_trace(Header(geometry=geometry, lookahead_depth=depth), made)


TWO = trace_of((3, 4), (5, 4))
ONE = trace_of((3, 6))
TEXT = trace_of((9, 0), (9, 0))
NO_PROMPTS = trace_of((0, 5), (0, 4))
FLAT = trace_of((3, 4), (2, 2), layers=1)
TOP = {"prefetch": "top_k"}

#: A trace, settings without effect on it, which of these is named, and a fact of the reason.
IDLE: dict[str, tuple[Trace, dict[str, Any], str, str]] = {
    "chunks without prompts": (NO_PROMPTS, {"passes": "chunk:2"}, "passes", "prompt"),
    "decode without prompts": (NO_PROMPTS, {"passes": "decode:2"}, "passes", "prompt"),
    "chunks as long as prompts": (TWO, {"passes": "chunk:5"}, "passes", "5 tokens"),
    "decode beyond prompts": (TWO, {"passes": "decode:64"}, "passes", "5 tokens"),
    "a batch of one request": (ONE, {"passes": "batch:4"}, "passes", "one request"),
    "one request in pieces as long as prompts": (TWO, {"passes": "batch:1:chunk=5"}, "passes", "recorded"),
    "batches of one": (TWO, {"passes": "batch:1"}, "passes", "recorded"),
    "a reset between requests of one": (ONE, {"reset": "request"}, "reset", "one request"),
    "a reset that no request parts": (TWO, {"reset": "request", "passes": "batch:2"}, "reset", "every pass shares"),
    "a reset beyond the end": (TWO, {"reset": "16"}, "reset", "15 tokens"),
    "a pool per layer of one": (FLAT, {"scope": "per_layer"}, "scope", "one MoE layer"),
    "a prefetch for one layer": (FLAT, {"prefetch": "top_k"}, "prefetch", "one MoE layer"),
    "named after no demand": (TWO, {"prefetch_at": "after_demand"}, "prefetch_at", "nothing is prefetched"),
    "admission of nothing": (TWO, {"prefetch_admission": "free_only"}, "prefetch_admission", "nothing is prefetched"),
    "admission to side buffers": (
        TWO,
        {"prefetch": "side_buffer", "prefetch_admission": "free_only"},
        "prefetch_admission",
        "side buffers",
    ),
    "a control without prefetch": (TWO, {"lookahead": "shuffled_tokens"}, "lookahead", "prefetch none"),
    "a control that prefetch does not read": (
        TWO,
        {"prefetch": "previous_token", "lookahead": "shuffled_experts"},
        "lookahead",
        "previous_token",
    ),
    "a seed that nothing draws from": (TWO, {"seed": 7}, "seed", "draws"),
    "a seed beside a control that nothing reads": (TWO, {"seed": 7, "lookahead": "shuffled_tokens"}, "seed", "draws"),
}  # fmt: skip
BUSY: dict[str, tuple[Trace, dict[str, Any]]] = {
    "chunks": (TWO, {"passes": "chunk:4"}),
    "tokens": (TWO, {"passes": "token"}),
    "decode": (TEXT, {"passes": "decode:8"}),
    "batches": (TWO, {"passes": "batch:2"}),
    "a reset between requests": (TWO, {"reset": "request"}),
    "a reset in the last pass": (TWO, {"reset": "15"}),
    "a reset between batches": (trace_of((0, 3), (0, 3), (0, 3)), {"reset": "request", "passes": "batch:2"}),
    "after the demand": (TWO, TOP | {"prefetch_at": "after_demand"}),
    "free room": (TWO, TOP | {"prefetch_admission": "free_only"}),
    "a control": (TWO, TOP | {"lookahead": "shuffled_tokens", "seed": 3}),
    "a random eviction": (TWO, {"eviction": "random", "seed": 3}),
    "a random routing": (TWO, {"routing": "swap", "seed": 3}),
    "arrivals at random": (TWO, {"passes": "batch:2", "arrivals": "poisson:1000", "seed": 3}),
    "drafts": (TWO, {"draft": "2", "seed": 3}),
    "an imperfect oracle": (TWO, {"prefetch": "oracle:recall=.5", "seed": 3}),
    "a pool per layer": (TWO, {"scope": "per_layer"}),
}


@every("case", IDLE)
def test_a_setting_without_effect_is_named_with_the_reason(case: str) -> None:
    trace, settings, name, reason = IDLE[case]
    config = configure(capacity="60%", **settings)
    said = [line for line in without_effect(trace, [config]) if line.startswith(f"{name} ")]
    assert len(said) == 1 and str(settings[name]) in said[0] and reason in said[0]


@every("case", IDLE)
def test_what_is_said_to_have_no_effect_has_none(case: str) -> None:
    trace, settings, name, _ = IDLE[case]
    of = [configure(capacity="60%", **each) for each in (settings, {k: v for k, v in settings.items() if k != name})]
    ran = [replay(trace, config, engine="reference") for config in of]
    assert ran[0].totals == ran[1].totals and ran[0].per_request == ran[1].per_request


@every("case", BUSY)
def test_a_setting_with_an_effect_is_not_named(case: str) -> None:
    trace, settings = BUSY[case]
    assert without_effect(trace, [configure(capacity="60%", **settings)]) == []


@every("case", ["a reset in the last pass", "decode", "a reset between batches"])
def test_settings_at_the_edge_change_something(case: str) -> None:
    trace, settings = BUSY[case]
    ran = [replay(trace, configure(capacity="60%", **each), engine="reference") for each in (settings, {})]
    assert ran[0].totals != ran[1].totals


def test_a_policy_of_the_users_may_read_the_seed_where_nobody_sees_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(getsource(fifo).replace('"fifo"', '"mine"'))
    files.register(tmp_path / "mine.py")
    assert without_effect(TWO, [configure(capacity="60%", eviction="mine", seed=3)]) == []


def test_a_value_that_has_an_effect_somewhere_in_a_grid_is_not_named() -> None:
    grid = [configure(capacity="60%", lookahead="shuffled_tokens", prefetch=each) for each in ("none", "top_k")]
    assert without_effect(TWO, grid) == []
    assert len(without_effect(TWO, grid[:1])) == 1


def test_defaults_are_never_named() -> None:
    assert without_effect(NO_PROMPTS, [configure(capacity="60%")]) == []


@every("trace", [NO_PROMPTS, ONE, trace_of((1, 4), (1, 2))])
def test_one_token_a_pass_is_what_token_asks_for_and_what_it_gives(trace: Trace) -> None:
    config = configure(capacity="60%", passes="token")
    assert without_effect(trace, [config]) == []
    plan = schedule(trace, config.passes)
    assert np.all(plan.stop - plan.start == 1)


def test_replay_prints_it_and_its_document_has_it(tmp_path: Path) -> None:
    small = stored_trace(tmp_path / "small.zarr", Sizes(prompt=4))
    options = ("replay", small, "--capacity", "20%", "--passes", "decode:5000", "--engine", "reference")
    said = moereplay_here(*options, "--seed", 9)
    assert said.returncode == 0
    assert "passes decode:5000 has no effect" in unfolded(said.stdout)
    assert "seed 9 has no effect" in unfolded(said.stdout)
    assert "passes decode:5000 has no effect" in moereplay_here(*options, "--json").stdout
