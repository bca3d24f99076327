"""Drafts and streams that decode together: what the options ask for, and searches by replays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moereplay.simulator.capacity import Memory
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Roofline
from moereplay.simulator.platforms import platform
from moereplay.sweeps.recommend.decoding import Asked, asked
from moereplay.sweeps.recommend.draft_replays import with_drafts
from moereplay.sweeps.recommend.search import Question
from moereplay.traces.drafts import Drafts
from moereplay.traces.recorder import from_arrays
from moereplay.traces.schema import Geometry
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

GB = 10**9


def shape(layers: int = 8, experts: int = 16, k: int = 2, size: int = 100_000_000, dense: int = GB) -> Geometry:
    bits = {"expert_bits": 4.5, "dense_bytes": dense, "kv_bytes": 100_000}
    return Geometry(layers=layers, experts=experts, k=k, expert_bytes=(size,) * layers, **bits)


@every(
    "draft, model, lengths, accept",
    [
        ("auto", "", (0, 1, 2, 3, 4, 5), (0.7,)),
        ("auto", "Qwen3.6-35B-A3B", (0, 1, 2), (0.86, 0.86)),
        ("auto:accept=.9", "Qwen3.6-35B-A3B", (0, 1, 2, 3, 4, 5), (0.9,)),
        ("auto:accept=.9/.5/.1", "", (0, 1, 2, 3), (0.9, 0.5, 0.1)),
        ("auto:accept=deepseek-v4-nextn", "", (0, 1), (0.9,)),
        ("3", "", (0, 3), (0.7,)),
        ("0", "", (0,), (0.7,)),
    ],
)
def test_lengths_are_those_of_the_head(draft: str, model: str, lengths: tuple[int, ...], accept: tuple[float]) -> None:
    found = asked(2, draft, model)
    assert found is not None and found.lengths == lengths and found.drafts.accept == accept
    assert found.streams == found.at(3).streams == 2


def test_one_stream_without_drafts_asks_nothing() -> None:
    assert asked(None, "0", "") is None and asked(1, "0", "") is not None


@every(
    "concurrency, draft, told",
    [
        (0, "0", "invalid --concurrency 0"),
        (65, "0", "from 1 to 64"),
        (1, "auto:accept=2", "invalid --draft 'auto:accept=2'"),
        (1, "17", "at most 16 drafts"),
        (1, "2:head=some", "expected head=layer or head=none"),
        (1, "2:head=layer:head=none", "once"),
        (1, "many", "invalid --draft 'many'"),
    ],
)
def test_wrong_values_are_a_line(concurrency: int, draft: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        asked(concurrency, draft, "")
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_search_by_replays_compares_numbers_of_drafts_and_counts_the_memory_of_streams() -> None:
    told = ("recommend", "miniature", "--platform", "phone-ufs4", "--memory", "512MB", "--json")
    found = moereplay(*told, "--concurrency", "2", "--draft", "auto:accept=.9:head=none")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    known, best = document["decoding"], document["best"]["config"]
    assert [each["drafts"] for each in known["steps"]] == [0, 1, 2, 3, 4, 5] and known["concurrency"] == 2
    assert best["passes"] == "batch:2" and best["draft"].partition(":")[0] == str(known["drafts"])
    assert known["alone"]["drafts"] == 0 and known["alone"]["tokens_per_s"] > known["steps"][0]["tokens_per_s"]
    tokens = [each["tokens_per_pass"] for each in known["steps"]]
    assert tokens == sorted(tokens) and tokens[0] == 1
    for wrong, said in (
        (("--concurrency", "7"), "the trace has 6 requests"),
        (("--concurrency", "2", "--passes", "token"), "--concurrency N cannot be combined with --passes"),
    ):
        refused = moereplay(*told, *wrong)
        assert refused.returncode == 2 and said in unfolded(refused.stderr)


def test_a_head_and_the_caches_of_streams_take_memory_of_a_search() -> None:
    trace = from_arrays(np.tile(np.arange(2), (40, 8, 1)), shape(), lengths=[10] * 4)
    memory = Memory(20 * GB, GB, GB, 0)
    question = Question(trace, memory, {"platform": "desktop-ram"})
    of = Asked(4, 1, 2, Drafts(2, (0.9,)))
    none, two = (with_drafts(question, of, many) for many in (0, 2))
    assert none.memory.cache_bytes == (20 - 1 - 4) * GB
    assert two.memory.cache_bytes == none.memory.cache_bytes - 16 * 100_000_000 - GB // 8
    assert none.base["platform"] == "desktop-ram"
    # a layer's eighth of 1 GB and two experts of 100 MB at the rate of the card, with a launch of each
    named, _, ns = two.base["platform"].partition(":draft.ns_per_token=")
    compute = platform(named).compute
    assert isinstance(compute, Roofline)
    assert int(ns) == pytest.approx((GB / 8 + 2e8) / compute.memory_bytes_per_s * 1e9 + 3 * compute.launch_ns, abs=1)
    with pytest.raises(ConfigError, match="4 streams with 2 drafts leave no room"):
        with_drafts(Question(trace, Memory(6 * GB, GB, GB, 0), question.base), of, 2)
