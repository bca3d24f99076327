"""A prefetch policy declares how far it predicts; what it predicts beyond that makes no recall above 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.simulator.config import configure
from moereplay.simulator.replay import ENGINES, replay
from tests.kit.policy_runs import Sizes, random_trace

TWICE = """from moereplay.policies.contract import Prefetch


def suggest(now, step, experts, copies, own, out):
    if now["layer"] + 1 == now["layers"]:
        return 0
    first = (now["layers"] - 1) * now["experts"]
    for e in range(2 * now["experts"]):
        out[e] = first + e // 2
    return 2 * now["experts"]


POLICY = Prefetch(name="twice", summary="the last layer twice", source="a test", suggest=suggest)
"""


def test_a_policy_that_names_twice_and_beyond_its_reach_recalls_no_more_than_everything(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    files.register(tmp_path / "twice.py")
    trace = random_trace(1, Sizes(layers=3, experts=4, tokens=6, requests=1, size=1000))
    seen = [replay(trace, configure(prefetch="twice", capacity="60%"), engine=engine) for engine in ENGINES]
    assert seen[0].per_layer == seen[1].per_layer
    found = [
        (row["layer"], row["predicted_demanded"], row["predictable"] // row["accesses"]) for row in seen[0].per_layer
    ]
    accesses = seen[0].per_layer[-1]["accesses"]
    # one gate is declared to predict each layer; the last is predicted twice at each of the two before it
    assert found == [(0, 0, 0), (1, 0, 1), (2, 4 * accesses, 4)]


def test_a_reach_that_is_no_number_of_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text(TWICE.replace("suggest=suggest)", "suggest=suggest, reach=lambda params: 1.5)"))
    with pytest.raises(PolicyError, match=r"invalid reach or depth 1\.5: expected how many layers ahead"):
        files.register(tmp_path / "near.py")
