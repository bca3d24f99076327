"""Policies of installed packages: found by name in every verb and process, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay import policies
from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.policies.grammar import parse
from moereplay.simulator.config import configure
from moereplay.simulator.replay import replay
from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here
from tests.kit.every import every, forget_policies
from tests.kit.installed import Installed
from tests.policies.test_own_policies import NEWEST, small  # noqa: F401  a fixture

GROUP = "moereplay.policies"


@pytest.fixture
def newest(installed: Installed) -> Installed:
    installed(GROUP, {"eviction.newest": "strangers.newest:POLICY"}, {"strangers/newest.py": NEWEST})
    return installed


@pytest.mark.usefixtures("newest")
def test_its_replay_is_that_of_the_same_policy_as_a_file_in_both_engines(small: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = {"capacity": "30%", "eviction": "newest"}
    trace, label = open_trace(small), parse("eviction", "newest").policy.label
    installed = [replay(trace, configure(**settings), engine=engine).totals for engine in ("reference", "compiled")]
    forget_policies()
    (tmp_path / "newest.py").write_text(NEWEST)
    assert files.register(tmp_path / "newest.py").label == label
    assert [replay(trace, configure(**settings)).totals] * 2 == installed


@pytest.mark.usefixtures("newest")
def test_it_is_listed_explained_and_meant_by_a_similar_name() -> None:
    assert [policy.name for policy in policies.catalogue() if policy.version] == ["newest"]
    forget_policies()
    assert "newest" in moereplay_here("policies").stdout
    assert "--eviction newest" in moereplay_here("policies", "newest").stdout
    forget_policies()
    with pytest.raises(PolicyError, match=r"did you mean newest\?"):
        parse("eviction", "newst")


@pytest.mark.usefixtures("newest")
def test_worker_processes_take_it_along(small: Path, tmp_path: Path) -> None:  # noqa: F811
    grid = ("--capacity", "30%", "--eviction", "lru,newest", "--workers", 2, "--out", tmp_path / "out")
    ran = moereplay_here("replay", small, *grid)
    assert ran.returncode == 0, ran.stderr
    assert files.registered()[0][1] == NEWEST.encode()


def test_names_that_are_built_in_or_registered_are_found_without_a_look_at_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looked(group: str) -> dict:
        raise AssertionError(group)

    monkeypatch.setattr(policies, "plugins", looked)
    assert parse("eviction", "lru").policy.name == "lru"


@every(
    "points, text, reason",
    [
        ({"eviction.newest": "strangers.newest:POLICY"}, "import no_such_library", "No module named 'no_such_library'"),
        ({"eviction.newest": "strangers.newest:POLICY"}, "raise SystemExit(3)", "SystemExit: 3"),
        ({"eviction.newest": "strangers.newest:POLICY"}, NEWEST.replace('"newest"', '"other"'), "policy 'other'"),
        ({"eviction.newest": "strangers.newest:OTHER"}, NEWEST, "expected package.module:POLICY"),
        ({"eviction.newest": "strangers.none:POLICY"}, NEWEST, "expected package.module:POLICY"),
        ({"eviction.newest": "no_such_package.none:POLICY"}, NEWEST, "No module named 'no_such_package'"),
    ],
    apart=True,
)
def test_a_broken_one_is_a_line_that_names_its_distribution_and_the_others_are_listed(
    points: dict[str, str], text: str, reason: str, installed: Installed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    installed(GROUP, points, {"strangers/newest.py": text})
    with pytest.raises(
        PolicyError, match=r"^plug-in eviction\.newest of strangers-plugin 1\.5 cannot be used"
    ) as error:
        parse("eviction", "newest")
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert len(policies.catalogue()) == sum(map(len, policies.NAMES.values()))
    assert caplog.messages == [str(error.value)]
    assert policies.REGISTERED["eviction"] == {}
