"""Where results come from: the same document beside the parts of `replay --out` and those of a sweep."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import polars as pl
import pytest

from moereplay.policies import files
from moereplay.results.stored import load
from moereplay.simulator.platforms import platform
from moereplay.sweeps import parts as origins
from moereplay.sweeps.experiment.expand import platforms
from moereplay.sweeps.experiment.file import read
from moereplay.sweeps.parts import provenance, sweep_provenance
from moereplay.traces.store import open_trace
from tests.kit.command import moereplay_here
from tests.kit.sweeping import experiment, store_trace
from tests.policies.test_own_policies import NEWEST


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_trace(tmp_path_factory.mktemp("provenance") / "tiny.zarr")


def command(*arguments: object) -> list[str]:
    """Run the command line to its end; return it as it was typed."""
    ended = moereplay_here(*arguments)
    assert ended.returncode == 0, ended.stderr
    return list(ended.args)


def test_replay_keeps_where_its_parts_come_from(trace: Path, tmp_path: Path) -> None:
    mine = tmp_path / "newest.py"
    mine.write_text(NEWEST)
    out, machine = tmp_path / "out", "a100-5gbps:link.bytes_per_s=25e9"
    options = ("--policy-file", mine, "--eviction", "lru,newest", "--platform", f"{machine},phone-ufs4")
    line = command(
        "replay", trace, *options, "--capacity", "50%", "--engine", "reference", "--workers", 1, "--out", out
    )
    parts = sorted(out.glob("part-*"))
    assert len(parts) == 4
    for part in parts:
        about = json.loads((part / "provenance.json").read_text())
        (identity,) = pl.read_parquet(part / "configurations.parquet")["identity"]
        assert about["holds"]["configuration"] == about["holds"]["requests"] == [identity]
        assert about["sha256"] == {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in part.glob("*.parquet")
        }
        assert about["traces"] == {open_trace(trace).digest: str(trace)}
        assert about["platforms"] == {name: platform(name).figures() for name in ("a100-5gbps", "phone-ufs4")}
        assert (about["command"], about["engine"], about["semantics"]) == (line, "reference", 1)
        assert about["policy_files"][0]["source"] == NEWEST
        assert about["versions"]["moereplay"] and about["commit"] == origins.commit()


def test_a_replay_again_into_the_same_folder_adds_no_part(trace: Path, tmp_path: Path) -> None:
    for options in (("--eviction", "lru"), ("--eviction", "lru,fifo")):
        command(
            "replay", trace, *options, "--capacity", "50%", "--engine", "reference", "--workers", 1, "--out", tmp_path
        )
    assert len(list(tmp_path.glob("part-*"))) == len(load(tmp_path)) == 2


@pytest.mark.slow
def test_a_sweep_leaves_out_what_a_replay_has_stored(trace: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "e.toml"
    command("replay", trace, "--capacity", "50%", "--engine", "reference", "--workers", 1, "--out", out)
    file.write_text(f'traces = ["{trace}"]\n[grid]\ncapacity = ["50%"]\neviction = ["lru", "fifo"]\n')
    ended = moereplay_here("sweep", "run", file, "--out", out, "--engine", "reference", "--workers", 1)
    assert "2 configurations and 1 bound on 1 trace, 2 already stored" in ended.stderr


def test_a_sweep_says_the_same_and_its_experiment(trace: Path) -> None:
    given = ([open_trace(trace)], "reference", ["mac-nvme"], ["moereplay", "sweep", "run", "e.toml"])
    ours, theirs = sweep_provenance("e.toml", *given), provenance(*given)
    kept = sweep_provenance("traces = ['s3://K:S@b/x']", *given[:3], ["sweep", "--out", "s3://K:S@b/x"])
    assert [kept["experiment"], kept["command"][-1]] == ["traces = ['s3://***@b/x']", "s3://***@b/x"]
    assert ours == theirs | {"experiment": "e.toml", "started": ours["started"]}


def test_a_search_names_every_machine_that_it_may_come_to(tmp_path: Path) -> None:
    text = 'traces = ["tiny.zarr"]\n[grid]\npreset = ["hobbit"]\n"platform.link.bytes_per_s" = [5e9, 6e9]\n'
    described = read(experiment(tmp_path, text + '[[zip]]\nplatform = ["mac-nvme"]\nseed = [1]\n'))
    assert platforms(described) == {"a100-5gbps", "mac-nvme", platform_of("hobbit")}


def platform_of(preset: str) -> str:
    from moereplay.simulator.presets import preset as named

    return named(preset).values()["platform"]


def test_the_commit_is_that_of_the_program_not_of_whoever_installed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "repository" / ".venv" / "packages"
    installed.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir()
    monkeypatch.setattr(origins, "CHECKOUT", installed)
    assert origins.commit() is None


def test_a_source_that_is_no_utf_8_can_be_written_back(tmp_path: Path) -> None:
    content = "# coding: latin-1\n# \xe4\n".encode("latin-1") + NEWEST.encode()
    (tmp_path / "newest.py").write_bytes(content)
    files.register(tmp_path / "newest.py")
    (about,) = json.loads(json.dumps(provenance([], "reference", [])))["policy_files"]
    assert about["source"].encode("utf-8", "surrogateescape") == content
