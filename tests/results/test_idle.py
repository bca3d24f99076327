"""Remarks on caches that stay empty and tiers that catch nothing, from replays."""

from moereplay.results.remarks import LEAST, idle
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded

CONFIG = {"miss": "cpu", "platform": "p", "capacity": "5%", "warm": []}
TOTALS = {"bytes_demand": 0, "bytes_prefetch": 0, "bytes_lower": 0, "misses": 9}


def row(config: dict | None = None, **totals: int) -> dict:
    return {"config": CONFIG | (config or {}), "totals": TOTALS | totals}


def test_a_cache_that_nothing_enters_is_named_once_with_what_fills_it():
    (said,) = idle([row(), row()])
    assert said.startswith("miss cpu: nothing is ever loaded") and said.endswith("--warm FILE fills it at the start")
    assert idle([row({"warm": [[0, 1]]})]) == [] and idle([row(bytes_demand=5)]) == [] and idle([row(misses=0)]) == []


def test_a_tier_that_includes_the_one_above_is_named_where_it_catches_next_to_nothing():
    (said,) = idle([row(bytes_demand=2_177, bytes_lower=2_146)])
    assert (
        said.startswith("p at 5%: lower tiers catch 1.4% of the bytes") and "includes the experts of the cache" in said
    )
    assert idle([row(bytes_demand=100, bytes_lower=int(100 * (1 - LEAST)) - 1)]) == []


def test_replay_says_it():
    given = ("--miss", "cpu", "--platform", "rtx4090-pcie4", "--capacity", "25%", "--engine", "reference")
    ended = moereplay("replay", "miniature", "--passes", "token", *given)
    assert ended.returncode == 0 and "miss cpu: nothing is ever loaded" in unfolded(ended.stdout), ended.stderr
