"""Precision ladders: none begins above the precision that a trace stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moereplay.policies import catalogue
from moereplay.policies.contract import Numbers, PolicyError
from moereplay.policies.grammar import at_most, note, parse, scaled
from moereplay.simulator.bounds import remarks
from moereplay.simulator.config import configure
from moereplay.simulator.replay import plan, replay
from moereplay.traces.schema import Geometry, Header, Request, Trace, memory_trace
from tests.kit.command import moereplay_here, unfolded
from tests.kit.every import every

#: Their default bits, and what these become at 8, 4.25, 4 and 2 stored bits.
LADDERS = {
    "lowest_bit": ((8, 4, 2), (8, 4, 2), (4.25, 2), (4, 2), (2,)),
    "cascade": ((8, 4, 2), (8, 4, 2), (4.25, 2), (4, 2), (2,)),
    "drop_cascade": ((8, 4), (8, 4), (4.25, 2), (4, 2), (2,)),
    "hobbit": ((16, 4), (8, 2), (4.25, 2), (4, 2), (2,)),
}
STORED = (8, 4.25, 4, 2)


def stored_at(bits: float, layers: int = 2) -> Trace:
    """One request of 6 tokens over 4 experts of 1000 bytes per layer, with gate weights."""
    geometry = Geometry(layers=layers, experts=4, k=2, expert_bytes=(1000,) * layers, expert_bits=bits)
    chosen = np.array([[[t % 4, (t + 1) % 4]] * layers for t in range(6)], np.int16)
    return memory_trace(Header(geometry=geometry), [Request(chosen, 2, weights=np.full(chosen.shape, 0.5, "f4"))])


@every("name", LADDERS)
def test_a_default_ladder_begins_at_the_stored_precision(name: str) -> None:
    default, *fitted = LADDERS[name]
    asked = parse("miss", name)
    assert asked.params["bits"] == default
    assert at_most(asked, 16) is asked
    for bits, ladder in zip(STORED, fitted, strict=True):
        assert at_most(asked, bits).params["bits"] == ladder


def test_every_policy_with_a_list_of_bits_is_among_these() -> None:
    policies = [policy for policy in catalogue() if policy.kind == "miss"]
    lists = {policy.name: param for policy in policies for param in policy.params if param.name == "bits"}
    assert {name for name, param in lists.items() if isinstance(param, Numbers)} == set(LADDERS)


@every(
    "bits, stored, ladder",
    [((8, 4, 2), 6, (6, 3, 2)), ((8, 4, 2), 5, (5, 2)), ((8, 4, 2), 3, (3, 2)), ((16, 8, 3), 4, (4, 2)),
     ((8, 4), 1.58, (1.58,)), ((32, 16, 8), 16, (16, 8, 4))],
)  # fmt: skip
def test_steps_keep_their_share_in_whole_bits_of_at_least_two(
    bits: tuple[float, ...], stored: float, ladder: tuple[float, ...]
) -> None:
    assert scaled(bits, stored) == ladder


@every(
    "miss, facts",
    [
        ("cascade:bits=8/4/2", ("cascade", "bits=8/4/2", "4 bits", "write bits=4/2")),
        ("lowest_bit:bits=8", ("lowest_bit", "bits=8", "write bits=4")),
        ("hobbit:bits=16/4", ("hobbit", "bits=16/4", "write bits=4/2")),
        ("drop_cascade:bits=5/4", ("drop_cascade", "bits=5/4", "write bits=4/3")),
        ("fetch:bits=8", ("fetch", "bits=8", "leave bits out", "--expert-bits 8")),
        ("substitute:bits=4.5", ("substitute", "bits=4.5", "leave bits out")),
    ],
)
def test_bits_that_are_written_and_not_stored_are_refused_by_name(miss: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(PolicyError) as refused:
        plan(stored_at(4), configure(capacity="50%", miss=miss))
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def test_the_order_of_bits_is_checked_before_their_height() -> None:
    with pytest.raises(PolicyError, match="falling order"):
        plan(stored_at(4), configure(capacity="50%", miss="cascade:bits=2/8"))


@every("name", LADDERS)
def test_no_copy_is_larger_than_the_stored_one(name: str) -> None:
    # before, 8/4/2 on a model of 4 bits moved copies of 2000 bytes where the stored expert has 1000
    trace = stored_at(4)
    ready = plan(trace, configure(capacity="50%", miss=name))
    assert ready.layout.tiers == ((1000, 1000), (500, 500))
    assert ready.chosen.miss.params["bits"] == (4, 2)
    totals = replay(trace, configure(capacity="50%", miss=name), engine="reference").totals
    plain = replay(trace, configure(capacity="50%"), engine="reference").totals
    assert totals["bytes_demand"] <= plain["bytes_demand"]


def test_a_result_names_the_bits_that_were_used_and_has_their_identity() -> None:
    trace = stored_at(4)
    result = replay(trace, configure(capacity="50%", miss="cascade"), engine="reference")
    assert result.config["miss"] == "cascade:bits=4/2"
    assert "bits=4/2" in result.about["policies"]["miss"]
    named = configure(capacity="50%", miss="cascade:bits=4/2")
    assert (
        result.about["identity"] == named.identity(trace) == configure(capacity="50%", miss="cascade").identity(trace)
    )
    assert configure(miss="cascade").identity(stored_at(16)) == configure(miss="cascade:bits=8/4/2").identity(
        stored_at(16)
    )


def test_a_ladder_that_was_scaled_is_said_once() -> None:
    configs = [configure(capacity=capacity, miss=miss) for capacity in ("50%", "60%") for miss in ("cascade", "fetch")]
    said = [line for line in remarks(stored_at(4), configs) if "bits" in line]
    assert len(said) == 1
    assert all(fact in said[0] for fact in ("cascade", "bits=4/2", "8/4/2", "4 bits"))
    assert note(parse("miss", "cascade"), parse("miss", "cascade"), 16) is None
    assert [line for line in remarks(stored_at(16), configs) if "in place of" in line] == []


OWN = """from moereplay.contract import Miss, Number

def resolve(now, step, experts, copies, own, missing, free, verdict):
    for m in range(len(missing)):
        verdict[m] = 0

POLICY = Miss(
    name="eight", summary="s", source="x", resolve=resolve, bits=lambda params: (8.0,), changes_output=True,
)
"""


def test_a_users_policy_is_held_to_the_stored_bits(tmp_path: Path) -> None:
    (tmp_path / "eight.py").write_text(OWN)
    four = tmp_path / "four.zarr"
    make = ("synthesise", "--out", four, "--model", "olmoe-1b-7b", "--expert-bits", 4, "--requests", 1)
    assert moereplay_here(*make, "--prompt-tokens", 2, "--decode-tokens", 2).returncode == 0
    ended = moereplay_here(
        "replay", four, "--capacity", "50%", "--policy-file", tmp_path / "eight.py", "--miss", "eight"
    )
    assert ended.returncode == 2
    said = unfolded(ended.stderr)
    assert "eight" in said and "8" in said and "4 bits" in said
