"""One replay's configuration: what is refused, in one line that helps, and what makes two replays the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moereplay.policies.contract import PolicyError, always
from moereplay.results.settings import SETTINGS
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.rates import MOST_NS
from moereplay.simulator.replay import plan, replay
from moereplay.traces.schema import Header, Request, Trace, memory_trace
from tests.kit.cases import ENGINES, Cell, ListSource, Prompted, machine, replay_lists, sizes
from tests.kit.every import every


def recorded(seed: int = 0, lacking: str = "") -> Trace:
    """Two requests of 6 tokens with weights, logits and one layer of look-ahead, but for what is `lacking`."""
    rng = np.random.Generator(np.random.PCG64(seed))
    logits, look = rng.standard_normal((2, 6, 3, 8), np.float32)
    rows = Request(
        chosen=logits.argsort(-1)[..., ::-1][..., :2],
        prompt_length=3,
        weights=None if lacking == "weights" else rng.random((6, 3, 2), np.float32),
        logits=None if lacking == "logits" else logits,
        lookahead=() if lacking == "lookahead" else (look,),
    )
    header = Header(geometry=sizes(3, 8), lookahead_depth=len(rows.lookahead))
    return memory_trace(header, [rows, rows])


def refusal(settings: Mapping[str, object], lacking: str = "") -> str:
    with pytest.raises((ConfigError, PolicyError)) as refused:
        plan(recorded(lacking=lacking), configure(**settings))
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---------------------------------------------------------------- what is refused


@every(
    "settings, said",
    [
        ({"eviction": "lur"}, "unknown eviction policy 'lur': did you mean lru?"),
        ({"miss": "cascade:bits=2/4"}, "falling order"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_fix(settings: dict[str, str], said: str) -> None:
    assert said in refusal(settings)


@every(
    "settings, said",
    [
        ({"contract": "parallel"}, "contract: unknown value 'parallel': choose from sequential, atomic"),
        (
            {"passes": "pairs:2"},
            "unknown passes 'pairs:2': expected recorded, token, chunk:N, decode:N or batch:N, with N of at least 1",
        ),
        ({"passes": "batch:0"}, "with N of at least 1"),
        ({"passes": "chunk:0"}, "with N of at least 1"),
        ({"reset": "0"}, "reset: expected never, request or a number of tokens (got '0')"),
        ({"seed": -1}, "seed: expected at least 0 (got -1)"),
        ({"evictions": "lru"}, "evictions: unknown key"),
        ({"warm": ((0, 8),)}, "warm lists expert 8 of layer 0; the model has 3 layers of 8"),
        ({"warm": ((0, 1), (0, 1))}, "warm lists expert 1 of layer 0 2 times"),
        ({"warm": ((0, 0), (0, 1)), "capacity": "1experts"}, "warm fills pool 0 with 2 bytes, its capacity is 1"),
        ({"platform": "a100-5gb"}, "unknown platform 'a100-5gb': did you mean a100-5gbps?"),
        ({"platform": "h100"}, "unknown platform 'h100': did you mean h100-pcie5?"),
        (
            {"platform": "RTX 3060"},
            "it is a card; write its platform with: moereplay platforms --gpu",
        ),
        ({"capacity": "0.1%"}, "less than one expert of 1; raise it"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_fix(settings: dict[str, object], said: str) -> None:
    assert said in refusal(settings)


@every(
    "lacking, settings, said",
    [
        (
            "weights",
            {"eviction": "score"},
            "eviction score needs weights, which this trace lacks; replay a trace recorded",
        ),
        ("logits", {"routing": "cache_prior"}, "routing cache_prior needs logits, which this trace lacks"),
        ("logits", {"miss": "substitute"}, "miss substitute needs logits"),
        ("logits", {"prefetch": "top_k:source=current_gate"}, "prefetch top_k needs logits"),
        ("lookahead", {"prefetch": "score"}, "prefetch score needs lookahead"),
    ],
)
def test_a_policy_that_needs_what_the_trace_lacks_is_refused(lacking: str, settings: dict[str, str], said: str) -> None:
    assert said in refusal({"capacity": "50%"} | settings, lacking)


def test_looking_further_ahead_than_recorded_is_refused() -> None:
    assert "top_k:depth=2 looks 2 layers ahead; the trace recorded 1" in refusal({"prefetch": "top_k:depth=2"})


def test_belady_is_refused_where_routing_changes_the_future() -> None:
    said = refusal({"eviction": "belady", "routing": "cache_prior"})
    assert "belady reads the future, which routing cache_prior changes; replay it with --routing standard" in said


def test_an_oracle_is_refused_where_routing_changes_the_future() -> None:
    said = refusal({"prefetch": "oracle", "routing": "max_rank"})
    assert "oracle reads the future, which routing max_rank changes" in said


@every("kind", ("miss", "routing"))
def test_any_policy_that_reads_the_future_is_refused_where_routing_changes_it(kind: str) -> None:
    """None that ships does, but for a profile of what was recorded; one of the user's own may."""
    chosen = configure(routing="max_rank").policy_set()
    own = getattr(chosen, kind)
    seer = replace(own, policy=replace(own.policy, name="seer", needs=always("logits", "future")))
    with pytest.raises(PolicyError, match=r"seer reads the future, which routing .* changes; replay it with"):
        replace(chosen, **{kind: seer}).check(recorded().capabilities | {"future"}, 1)


@every("engine", ENGINES)
def test_a_run_that_would_leave_64_bits_is_refused_alike(engine: str) -> None:
    """300 tokens of sixteen experts of eleven days each are more than 146 years."""
    where, tokens = machine(expert_ns=MOST_NS), [[Cell(list(range(16)))]] * 300
    with pytest.raises(ConfigError, match="the run takes more than 146 years of simulated time"):
        replay_lists(ListSource(sizes(1, 16, 16), [Prompted(tokens)]), 16, where, log=False, engine=engine)


@every("miss", ["split", "cpu", "fiddler", "substitute_band:rest=balance"])
def test_computing_misses_on_a_cpu_needs_one(miss: str) -> None:
    said = refusal({"capacity": "50%", "miss": miss, "platform": "phone-ufs4"})
    assert f"miss {miss.split(':')[0]} requires a CPU; add a table [cpu] to platform phone-ufs4" in said
    plan(recorded(), configure(capacity="50%", miss=miss, platform="h100-pcie5"))


def test_a_policy_that_may_compute_on_the_cpu_but_does_not_needs_none() -> None:
    plan(recorded(), configure(capacity="50%", miss="substitute_band", platform="phone-ufs4"))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown engine 'warp': choose from "):
        replay(recorded(), configure(capacity="50%"), engine="warp")


# ---------------------------------------------------------------- identity

CHANGES = [
    {"capacity": "6%"},
    {"eviction": "lfu"},
    {"eviction": "lfu:count=history"},
    {"prefetch": "top_k"},
    {"prefetch": "top_k:factor=2"},
    {"miss": "drop"},
    {"routing": "cache_prior"},
    {"platform": "mac-nvme"},
    {"passes": "token"},
    {"draft": "1"},
    {"draft": "1:rejected=own"},
    {"passes": "batch:2"},
    {"passes": "batch:2:chunk=3"},
    *({"passes": "batch:2", "arrivals": text} for text in ("every:0.5", "poisson:2", "at:0/1", "at:0/2")),
    {"reset": "request"},
    {"warm": ((0, 1),)},
    {"warm": ((0, 1), (0, 2))},
    {"warm": ((0, 2), (0, 1))},
    {"profile": ((0, 1),)},
    {"profile": ((0, 2), (0, 1))},
    {"resident": ((0, 1),)},
    {"seed": 1},
    {"dense": "1GB"},
    {"dense_bits": "4.5"},
    *({each.name: value} for each in SETTINGS for value in each.values if value != each.default),
]


def test_every_setting_that_matters_changes_the_identity() -> None:
    trace = recorded()
    assert len({configure(**change).identity(trace) for change in [{}, *CHANGES]}) == 1 + len(CHANGES)


def test_every_setting_is_among_those_that_matter() -> None:
    assert {name for change in CHANGES for name in change} == set(ReplayConfig.model_fields)


def test_the_trace_changes_the_identity() -> None:
    assert configure().identity(recorded(0)) != configure().identity(recorded(1))


@every(
    "one, other",
    [
        ({}, {"eviction": "lru"}),
        ({"eviction": "lfu"}, {"eviction": "lfu:count=resident"}),
        ({"prefetch": "top_k"}, {"prefetch": "top_k:depth=1:factor=1.00"}),
    ],
)
def test_writing_a_default_out_changes_nothing(one: dict[str, str], other: dict[str, str]) -> None:
    trace = recorded()
    assert configure(**one).identity(trace) == configure(**other).identity(trace)


def test_the_figures_of_a_platform_file_matter_and_its_name_and_place_do_not(tmp_path: Path) -> None:
    def identity(name: str, launch_ns: int) -> str:
        link, compute = "[link]\nbytes_per_s = 1e9", f'[compute]\nkind = "measured"\nexpert_ns = {launch_ns}'
        (tmp_path / name).write_text(f'name = "{name}"\n{link}\n{compute}\n')
        return configure(platform=str(tmp_path / name)).identity(recorded())

    assert identity("a.toml", 5) == identity("b.toml", 5)
    assert identity("a.toml", 5) != identity("a.toml", 6)


def test_a_result_says_what_it_is_a_result_of() -> None:
    trace, config = recorded(), configure(capacity="50%", eviction="lfu:count=history")
    result = replay(trace, config)
    assert result.about["identity"] == config.identity(trace)
    assert result.about["policies"]["eviction"] == "lfu:count=history"
    assert result.config["eviction"] == "lfu:count=history"
    assert result.about["trace"] == trace.digest


@every(
    "settings, label",
    [
        ({}, "SIMULATED"),
        ({"prefetch": "top_k", "eviction": "belady"}, "SIMULATED"),
        ({"miss": "split"}, "SIMULATED"),
        ({"miss": "drop"}, "SIMULATED, open-loop"),
        ({"miss": "fetch:bits=4"}, "SIMULATED, open-loop"),
        ({"routing": "cache_prior"}, "SIMULATED, open-loop"),
    ],
)
def test_a_result_that_changed_the_output_is_labelled_open_loop(settings: dict[str, str], label: str) -> None:
    assert replay(recorded(), configure(capacity="50%", **settings)).about["label"] == label
