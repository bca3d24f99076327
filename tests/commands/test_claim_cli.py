"""`moereplay claim`: verdicts on the miniature and on drawn routing, and refusal of invalid claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands.test_cli import ROOT
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every

CLAIM = """
claim = "Belady fetches fewer experts than LRU"
figure = "misses_per_access"
gate = "<= -10%"
variable = "eviction"
base = "lru"
variant = "belady"
traces = ["miniature"]
[settings]
capacity = "25%"
scope = "per_layer"
passes = "token"
"""
SHARE = "95% CI: assumes independent requests; these share a cache"
TWO_TRACES = """
claim = "Half of the experts make fewer misses than a quarter"
figure = "misses_per_access"
gate = "<= -10%"
variable = "capacity"
base = "25%"
variant = "50%"
traces = ["miniature"]
drawn = ["gpt-oss-20b"]
[settings]
scope = "per_layer"
passes = "token"
[draw]
requests = 8
prompt_tokens = 4
decode_tokens = 28
seed = 1
"""


def answered(folder: Path, text: str) -> dict[str, Any]:
    """The document of a claim."""
    path = folder / "claim.toml"
    path.write_text(text)
    ended = moereplay("claim", path, "--json", "--workers", 1)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def changed(old: str, new: str) -> str:
    """The claim with other words."""
    assert old in CLAIM
    return CLAIM.replace(old, new)


@every(
    "gate, answer",
    [("<= -10%", "confirmed"), ("<= -90%", "refuted"), (">= -10%", "refuted"), (">= -90 %", "confirmed")],
)
def test_a_claim_on_the_miniature_is_answered_as_its_counts_say(gate: str, answer: str, tmp_path: Path) -> None:
    found = answered(tmp_path, changed("<= -10%", gate))
    (row,) = found["rows"]
    assert found["answer"] == row["answer"] == answer and row["label"] == "SIMULATED"
    assert row["seconds"] == "estimated, not calibrated"
    replay = ("replay", "miniature", "--capacity", "25%", "--scope", "per_layer", "--passes", "token", "--json")
    totals = [json.loads(moereplay(*replay, "--eviction", name).stdout)["totals"] for name in ("lru", "belady")]
    assert [row["base"], row["variant"]] == [each["misses"] / each["accesses"] for each in totals]
    assert row["change"] == pytest.approx(totals[1]["misses"] / totals[0]["misses"] - 1)
    assert row["low"] < row["change"] < row["high"]
    assert found["remarks"] == ["belady knows the future", SHARE]


def test_a_change_that_the_interval_holds_cannot_be_told(tmp_path: Path) -> None:
    change = answered(tmp_path, CLAIM)["rows"][0]["change"]
    assert answered(tmp_path, changed("-10%", f"{100 * change:.4f}%"))["answer"] == "cannot tell"


def test_requests_that_share_passes_cannot_tell_and_the_reason_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "claim.toml"
    path.write_text(changed('"token"', '"batch:2"').replace("belady", "lfu"))
    ended = moereplay("claim", path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("answer: cannot tell\n") and "none: requests share" in ended.stdout
    assert "SIMULATED: miniature, 6 requests" in ended.stdout


@every(
    "gate, answers, answer",
    [
        ("-45%", ["confirmed", "confirmed"], "confirmed"),
        ("-50%", ["cannot tell", "confirmed"], "cannot tell"),
        ("-55%", ["refuted", "confirmed"], "refuted"),
    ],
)
def test_a_trace_that_refutes_decides_and_drawn_routing_is_named(
    gate: str, answers: list[str], answer: str, tmp_path: Path
) -> None:
    """With half of the experts in place of a quarter, misses change by -49 % and by -62 %."""
    found = answered(tmp_path, TWO_TRACES.replace("-10%", gate))
    recorded, drawn = found["rows"]
    assert (found["answer"], [recorded["answer"], drawn["answer"]]) == (answer, answers)
    assert recorded["synthetic"] == "" and drawn["synthetic"] == "routing model gpt-oss-20b"
    assert any("not about a real model" in line for line in found["remarks"])


@every(
    "old, new, said",
    [
        ('"belady"', '"lru"', "variant: eviction lru is the same configuration as base lru"),
        ('"belady"', '"lru:touch_on_predict=false"', "is the same configuration as base lru"),
        ('"belady"', '"beladi"', "unknown eviction policy 'beladi': did you mean belady?"),
        ('variable = "eviction"', 'variable = "evicton"', "unknown setting 'evicton': did you mean eviction?"),
        ("scope =", "eviction =", "settings.eviction: expected no value, since it is the variable"),
        ("per_layer", "per-layer", "scope: unknown value 'per-layer': did you mean per_layer?"),
        ("<= -10%", "< -10%", "gate: expected a change of more than -100 %, such as <= -5% or >= 10%"),
        ("<= -10%", "<= -100%", "gate: expected a change of more than -100 %"),
        ("misses_per_access", "misses_per_acess", "figure: unknown figure to compare 'misses_per_acess': did you mean"),
        ("misses_per_access", "gb_moved", "figure: unknown figure to compare 'gb_moved': choose from"),
        ('traces = ["miniature"]', "", "missing traces or drawn"),
        ('traces = ["miniature"]', 'drawn = ["miniature"]', "expected both or neither"),
        ("[settings]", "[draw]\nrequests = 1\n[settings]", "draw.prompt_tokens: missing"),
        ("figure =", "figures =", "figure: missing"),
        ("[settings]", "[settings", "expected a claim in TOML"),
    ],
)
def test_what_is_no_claim_is_refused_with_file_and_key(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "claim.toml"
    path.write_text(changed(old, new))
    ended = moereplay("claim", path)
    assert (ended.returncode, ended.stdout) == (2, "")
    line = ended.stderr.splitlines()[-1]
    assert line.startswith(f"moereplay: {path}: ") and said in line


def test_a_draw_without_an_end_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "claim.toml"
    path.write_text(TWO_TRACES.replace("requests = 8", "requests = 1000000000"))
    assert "are too many for memory" in moereplay("claim", path).stderr
    assert "expected a claim in TOML" in moereplay("claim", tmp_path).stderr


@pytest.mark.slow
@every("name, ends", [("lfu", ["+15% to +17%"]), ("lfu-decay", ["-9.9% to -9%", "-4.7% to -4%"])])
def test_the_committed_claims_are_refuted_by_the_intervals_that_the_page_states(name: str, ends: list[str]) -> None:
    ended = moereplay("claim", ROOT / "docs" / "claims" / f"{name}.toml")
    assert ended.stdout.endswith("answer: refuted\n"), ended.stderr
    assert [each for each in ends if each not in ended.stdout] == []
