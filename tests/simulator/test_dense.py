"""Dense weights in replays: settings that win over the trace, seconds that are calibrated for one model, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.simulator.capacity import cliff, divided, parse_capacity
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Geometry, Header, Provenance, Request, Trace, memory_trace
from tests.kit.every import every

MACHINE = """
name = "mine"
[link]
bytes_per_s = 1e9
[compute]
kind = "roofline"
flops = 1e18
memory_bytes_per_s = 1e9
"""
MODEL: dict[str, Any] = {"dense_params": 300, "head_params": 400}


def trace_of(model: str = "unknown", **more: Any) -> Trace:
    geometry = Geometry(layers=2, experts=4, k=2, expert_bytes=(1000, 1000), **more)
    header = Header(geometry=geometry, provenance=Provenance(model=model, importer="test"))
    return memory_trace(header, [Request(np.array([[[0, 1], [2, 3]]] * 3, np.int16), prompt_length=0)])


def machine(folder: Path, calibration: str = "") -> str:
    path = folder / "mine.toml"
    path.write_text(MACHINE + calibration)
    return str(path)


def ran(trace: Trace, platform: str, **settings: Any) -> Any:
    return replay(trace, configure(capacity="100%", platform=platform, **settings), engine="reference")


def test_dense_time_is_what_a_token_reads_of_the_bytes_that_are_said(tmp_path: Path) -> None:
    where = machine(tmp_path)

    def dense_ns(more: dict[str, Any], **settings: Any) -> int:
        return ran(trace_of(**more), where, **settings).totals["dense_ns"] // 3

    assert dense_ns(MODEL) == 2000
    assert dense_ns(MODEL, dense="1000B") == 1000 == dense_ns({}, dense="1000")
    assert dense_ns(MODEL, dense_bits="8") == 1000
    assert dense_ns(MODEL | {"dense_bytes": 500}) == 500
    assert dense_ns(MODEL | {"dense_bytes": 500}, dense="1kB".upper()) == 1000


def test_settings_of_dense_weights_are_part_of_an_identity_only_where_they_are_given(tmp_path: Path) -> None:
    where, trace = machine(tmp_path), trace_of(**MODEL)
    plain = configure(platform=where)
    named = {configure(platform=where, **said).identity(trace) for said in ({"dense": "1MB"}, {"dense_bits": "8"})}
    assert len(named | {plain.identity(trace)}) == 3
    assert plain.identity(trace) == configure(platform=where, dense="").identity(trace)


@every("said", [{"dense": "much"}, {"dense": "0"}, {"dense_bits": "Q9"}, {"dense": "1GB", "dense_bits": "4"}])
def test_settings_that_cannot_be_are_refused_by_name(said: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--dense"):
        configure(**said)


def test_the_assumption_is_in_about_and_goes_with_either_option(tmp_path: Path) -> None:
    where = machine(tmp_path)
    assert "--dense" in ran(trace_of(**MODEL), where).about["assumed"]
    for said in ({"dense": "1000B"}, {"dense_bits": "16"}):
        assert ran(trace_of(**MODEL), where, **said).about["assumed"] is None


@every(
    "model, settings, calibrated, facts",
    [
        ("other", {}, False, ("other", "fitted")),
        ("unknown", {}, True, ()),
        ("fitted", {"dense": "2080B"}, True, ()),
        ("fitted", {"dense": "1880B"}, False, ("1.88e-06 GB", "2e-06 GB")),
        ("unknown", {"dense": "4000B"}, False, ("4e-06 GB", "2e-06 GB")),
    ],
)
def test_a_calibration_is_of_its_models_and_their_dense_bytes(
    tmp_path: Path, model: str, settings: dict[str, str], calibrated: bool, facts: tuple[str, ...]
) -> None:
    where = machine(tmp_path, '[calibration]\ndevice = "desk"\n[calibration.models]\nfitted = 2000\n')
    about = ran(trace_of(model, **MODEL), where, **settings).about
    assert about["seconds"] == ("calibrated" if calibrated else "estimated")
    assert bool(about["calibration"]) is calibrated and (about["uncalibrated"] is None) is calibrated
    assert all(fact in about["uncalibrated"] for fact in facts)


def test_calibrations_without_models_are_of_any(tmp_path: Path) -> None:
    where = machine(tmp_path, '[calibration]\ndevice = "desk"\n')
    assert ran(trace_of("other", **MODEL), where).about["seconds"] == "calibrated"


def test_memory_counts_what_is_said_and_a_refusal_names_the_options() -> None:
    trace = trace_of(dense_params=10**9, head_params=0)
    with pytest.raises(ConfigError, match="--dense or --dense-bits"):
        divided(trace, 2 * 10**9, 0, "1MB")
    assert divided(trace, 2 * 10**9, 0, "1MB", dense="1GB").dense_bytes == 10**9
    assert divided(trace, 2 * 10**9, 0, "1MB", dense_bits="4").dense_bytes == 10**9


def test_token_cycles_and_the_cliff_count_the_experts_of_each_layer() -> None:
    geometry = Geometry(layers=4, experts=8, k=8, expert_bytes=(10,) * 4)
    tiers = (geometry.expert_bytes,)
    whole = parse_capacity("16experts", geometry, "global", tiers)
    found = parse_capacity("16experts", geometry, "global", tiers, 0, (8.0, 2.0, 2.0, 2.0))
    assert (whole.token_cycles, found.token_cycles) == (16 / 32, 16 / 14)
    assert "hits nothing" in str(cliff(whole, geometry, tiers[0]))
    assert cliff(found, geometry, tiers[0], (8.0, 2.0, 2.0, 2.0)) is None
    small = parse_capacity("6experts", geometry, "global", tiers, 0, (8.0, 2.0, 2.0, 2.0))
    assert "hits nothing" in str(cliff(small, geometry, tiers[0], (8.0, 2.0, 2.0, 2.0)))
