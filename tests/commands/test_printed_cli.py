"""Printed tables fit 80 columns, explain their columns, and never name a winner that cannot be used."""

from __future__ import annotations

import pytest

from moereplay.policies.grammar import foresight
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

REPLAY = ("replay", "miniature", "--workers", 1)
MANY = ("--eviction", "lru,belady", "--prefetch", "none,oracle", "--platform", "phone-ufs4,a100-5gbps")
PRINTED = {
    "many settings": (*REPLAY, "--capacity", "5%,80%", *MANY, "--passes", "decode:64"),
    "side buffers and another demand": (*REPLAY, "--routing", "cache_prior", "--prefetch", "side_buffer"),
    "presets": (*REPLAY, "--preset", "specmd-1,specmd-1+ls"),
    "curve": ("curve", "miniature", "--eviction", "lru"),
    "bounds": ("bounds", "miniature", "--passes", "decode:64", "--capacity", "25%", "--eviction", "lru,static"),
    "inspect": ("inspect", "miniature"),
    "policies": ("policies",),
    "a policy": ("policies", "least_stale"),
    "the presets": ("presets",),
    "a preset": ("presets", "specmd-1"),
    "platforms": ("platforms",),
    "models": ("models",),
}


@pytest.mark.slow
@every("words", PRINTED.values())
def test_no_line_is_wider_than_80_columns(words: tuple[object, ...]) -> None:
    ended = moereplay(*words)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stdout.splitlines() if len(line) > 80] == []


def test_a_refusal_is_folded_to_the_width_that_is_asked_for_and_one_line_in_a_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = moereplay("replay", "no/such/trace.zarr", "--events", "x.txt").stderr
    assert whole.count("\n") == 1
    monkeypatch.setenv("COLUMNS", "40")
    lines = moereplay("replay", "no/such/trace.zarr", "--events", "x.txt").stderr.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40 and lines[1].startswith("  ")
    assert " ".join(map(str.strip, lines)) == whole.strip()


def test_what_knows_the_future_is_named_as_such_and_no_winner() -> None:
    shown = moereplay(*REPLAY, "--capacity", "25%", "--eviction", "lru,belady", "--passes", "token").stdout
    assert "fastest: lru, " in shown and "most hits: lru, " in shown
    assert shown.count("  knows the future (not tested): belady, ") == 2


@every(
    "kind, text, knows",
    [
        ("eviction", "belady", True),
        ("prefetch", "oracle:horizon=2", True),
        ("prefetch", "top_k", False),
        ("eviction", "pinned", True),  # fitted to the demand of the trace that it replays
        ("eviction", "pinned:profile=given", False),
        ("eviction", "mine@0123456789ab", False),  # of a file that is not at hand
    ],
)
def test_what_a_policy_declares_is_what_it_knows(kind: str, text: str, knows: bool) -> None:
    plain = {"routing": "standard", "prefetch": "none", "eviction": "lru", "miss": "fetch"}
    assert foresight()(plain | {kind: text}) is knows


def test_a_warning_of_several_capacities_and_an_estimate_of_several_platforms_are_said_once() -> None:
    shown = moereplay(*REPLAY, "--capacity", "3%,5%,50%", "--platform", "h100-pcie5,a100-5gbps").stdout
    assert "warning for 3%, 5%: capacity below one token cycle, one token's demand" in unfolded(shown)
    assert shown.count("hits nothing") == 1
    assert "seconds of h100-pcie5, a100-5gbps: estimated, not calibrated" in shown
    assert "capacity 50%: 12.6 MB, 32 of 64 experts per layer" in shown


def test_inspect_says_what_its_columns_are() -> None:
    shown = moereplay("inspect", "miniature").stdout
    for column in ("reuse: ", "entropy: ", "busiest/mean: ", "distinct in N: ", "recall +D: "):
        assert column in shown
    assert "0.125 by chance" in shown


def test_rows_that_are_not_shown_are_counted() -> None:
    words = (*REPLAY, "--capacity", "25%,50%", "--eviction", "lru,fifo,least_stale", "--engine", "compiled")
    some, all_of_them = moereplay(*words, "--top", 2), moereplay(*words)
    assert "4 of 6 rows; --top 0 for all" in some.stderr and "of 6 rows" not in all_of_them.stderr
    assert all_of_them.stdout.count("fifo") > some.stdout.count("fifo")
