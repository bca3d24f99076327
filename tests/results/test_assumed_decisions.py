"""An assumed price of decisions: which policies it concerns, when an order turns, and which commands say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay import policies
from moereplay.policies.grammar import deciding, parse
from moereplay.results.remarks import Ranked, turned
from tests.kit.command import moereplay_here, unfolded

SAMPLE = Path(__file__).resolve().parents[2] / "traces" / "samples" / "miniature.zarr"
PLAIN = {"routing": "standard", "prefetch": "none", "eviction": "lru", "miss": "fetch"}


def test_a_policy_that_predicts_or_scores_is_known_by_its_declarations() -> None:
    def those(kind: str) -> set[str]:
        chosen = (parse(kind, name) for name in policies.NAMES[kind])
        return {each.policy.name for each in chosen if each.policy.decides(each.params)}

    assert those("prefetch") == {*policies.NAMES["prefetch"]} - {"none"}
    assert those("routing") == {*policies.NAMES["routing"]} - {"standard"}
    assert {"score", "shielded_score", "hobbit", "lfru"} <= those("eviction")
    assert not {"lru", "fifo", "lfu", "clock", "sieve", "arc"} & those("eviction")
    assert "fetch" not in those("miss") and {"split", "cascade"} <= those("miss")


def test_the_policies_of_a_configuration_that_decide_are_counted() -> None:
    count = deciding()
    assert count(PLAIN) == 0
    assert count(PLAIN | {"prefetch": "top_k:depth=2", "eviction": "score"}) == 2
    assert count(PLAIN | {"prefetch": "not_at_hand@12345678"}) == 0


def test_an_order_turns_if_what_decides_leads_by_less_than_its_decisions_take() -> None:
    # 40 layers: .4 ms for a token of 10 ms. 100 tokens/s become 1000 / 10.4 = 96.15
    scored, plain = Ranked("score", 100.0, 1), Ranked("lru", 96.0, 0)
    assert scored.slowed(40) == pytest.approx(1000 / 10.4)
    assert turned(scored, plain, 40) is None
    found = turned(scored, plain._replace(tokens_per_s=97.0), 40)
    assert found and "lru would be faster than score" in found and "97 against 96.15 tokens/s" in found
    assert turned(scored, plain._replace(tokens_per_s=97.0, deciding=1), 40) is None
    assert turned(plain, plain._replace(tokens_per_s=95.9), 40) is None


@pytest.mark.slow
def test_a_comparison_of_stored_results_says_that_decisions_would_turn_it(tmp_path: Path) -> None:
    # the miniature has 16 layers and takes 4 ms per token: .16 ms is 4 %. Its two sets are 2 % apart here
    words = ("--passes", "token", "--capacity", "25%", "--eviction", "lru,least_stale")
    made = moereplay_here("replay", SAMPLE, *words, "--out", tmp_path / "out")
    assert made.returncode == 0, made.stderr
    said = unfolded(moereplay_here("sweep", "compare", tmp_path / "out", "lru", "--by", "tokens_per_s").stdout)
    assert "lru would be faster than least_stale" in said and "10 us per layer" in said
    hits = unfolded(moereplay_here("sweep", "compare", tmp_path / "out", "lru", "--by", "hit_rate").stdout)
    assert "10 us" not in hits
