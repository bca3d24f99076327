"""Presets: each is a configuration that runs, every value with a source; options of the command line win over them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.presets import ALWAYS, FILES, NAMES, SPECMD, explain, preset, settings
from moereplay.simulator.replay import replay
from tests.commands.test_cli import ROOT, moereplay
from tests.kit.command import moereplay_here
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace, stored_trace

FOLDER = ROOT / "simulator" / "presets"
SMALL = Sizes(layers=4, experts=16, tokens=8, prompt=4, requests=2, depth=2, size=1000)
#: SpecMD's Table 1: prefetch, eviction, miss and routing of its numbered configurations.
TABLE_1 = {
    "specmd-1": ("top_k", "lru", "fetch", "standard"),
    "specmd-2": ("score", "score", "substitute", "standard"),
    "specmd-3": ("top_k", "least_high_precision", "cascade", "standard"),
    "specmd-4": ("none", "lru", "fetch", "cache_prior"),
    "specmd-5": ("score", "least_stale", "fetch", "standard"),
}
#: What their sources are known for.
KNOWN_FOR = {
    "cache-prior-paper": {"routing": "cache_prior", "eviction": "lru", "scope": "per_layer", "reset": "1024"},
    "eliseev": {"prefetch": "side_buffer", "eviction": "lru", "scope": "per_layer"},
    "hobbit": {"prefetch": "adaptive_depth", "eviction": "hobbit", "miss": "hobbit"},
    "smoe": {"prefetch": "confident", "eviction": "shielded_score", "miss": "substitute_band"},
    "moe-infinity": {"prefetch": "activation_matrix", "eviction": "activation_ratio", "miss": "fetch"},
    "fiddler": {"prefetch": "none", "eviction": "static", "miss": "fiddler"},
    "llama.cpp": {"prefetch": "none", "eviction": "class_lru", "miss": "fetch"},
    "bigmoeonedge": {"eviction": "lru", "scope": "global", "contract": "atomic", "passes": "recorded"},
    "imp": {"eviction": "lru", "scope": "per_layer", "contract": "atomic"},
    "warp": {"eviction": "lfru", "scope": "global", "contract": "atomic"},
    "colibri": {"eviction": "pinned", "scope": "per_layer", "contract": "atomic"},
    "llama.cpp-cpu-moe": {"prefetch": "none", "miss": "cpu", "platform": "desktop-ram"},
    "llama.cpp-mmap": {"prefetch": "none", "miss": "cpu", "platform": "desktop-mmap"},
    "ik_llama.cpp": {"prefetch": "none", "miss": "cpu"},
    "ktransformers": {"eviction": "static", "scope": "per_layer", "miss": "cpu"},
    "freetoken": {"eviction": "lru", "scope": "global", "miss": "fetch"},
    "freetoken-cpu": {"eviction": "lru", "scope": "global", "miss": "cpu"},
    "freetoken-hybrid": {"eviction": "lru", "scope": "global", "miss": "split"},
    "crow": {"eviction": "lru", "miss": "fetch", "platform": "desktop-24gb"},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests of eight tokens through four layers of sixteen experts, with everything that policies need."""
    return stored_trace(tmp_path_factory.mktemp("presets") / "small.zarr", SMALL)


def names_in(name: str) -> dict[str, str]:
    """The settings without the parameters of policies."""
    return {setting: text.split(":")[0] for setting, text in preset(name).values().items()}


# -- the files -------------------------------------------------------------------------------------------------------


def test_every_file_is_listed_by_one_word() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(FILES)
    assert [tomllib.loads((FOLDER / f"{name}.toml").read_text())["name"] for name in FILES] == list(FILES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_names_all_with_a_source_each_and_runs(name: str) -> None:
    """On a trace with look-ahead of two layers, logits and weights; engines agree on every policy elsewhere."""
    chosen = preset(name)
    assert chosen.name == name
    assert set(ALWAYS) <= chosen.settings.keys() <= set(ReplayConfig.model_fields)
    said = [chosen.summary, chosen.source, *(setting.source for setting in chosen.settings.values())]
    assert all(text.strip() and "\n" not in text for text in said)
    assert all("\n" not in setting.assumed for setting in chosen.settings.values())
    trace = random_trace(1, SMALL)
    result = replay(trace, configure(**chosen.values()), engine="reference")
    assert result.totals["accesses"] > 0
    assert result.totals["bytes_demand"] + result.totals["cpu_executed"] > 0


@every("name", TABLE_1)
def test_specmd_presets_are_its_table_1(name: str) -> None:
    found = names_in(name)
    assert tuple(found[kind] for kind in ("prefetch", "eviction", "miss", "routing")) == TABLE_1[name]
    assert (found["capacity"], found["platform"]) == ("5%@16", "a100-5gbps")


def test_the_baseline_is_8_bit_top_k_lru_fetch() -> None:
    values = preset("specmd-baseline").values()
    assert (values["miss"], values["prefetch"], values["eviction"]) == ("fetch:bits=8", "top_k", "lru")


@every("name", SPECMD)
def test_with_ls_only_the_eviction_is_replaced(name: str) -> None:
    plain, changed = preset(name).settings, preset(f"{name}+ls").settings
    assert changed["eviction"].value == "least_stale"
    assert {key: each for key, each in plain.items() if key != "eviction"} == {
        key: each for key, each in changed.items() if key != "eviction"
    }


@every("name", KNOWN_FOR)
def test_the_other_presets_are_what_their_sources_are_known_for(name: str) -> None:
    assert names_in(name).items() >= KNOWN_FOR[name].items()


@pytest.mark.long
def test_cache_prior_holds_half_of_each_layer() -> None:
    trace = random_trace(1, Sizes(layers=3, experts=16, tokens=8))
    about = replay(trace, configure(**preset("cache-prior-paper").values())).about
    assert "8 of 16 experts per layer" in about["capacity_forms"]


@every(
    "name, overlap, lanes",
    [
        ("bigmoeonedge", "arrival", 4),
        ("imp", "none", 1),
        ("warp", "none", 8),
        ("colibri", "none", 1),
        ("llama.cpp-cpu-moe", "none", 1),
        ("ktransformers", "arrival", 1),
        ("freetoken-hybrid", "arrival", 1),
    ],
)
def test_an_engines_preset_has_its_overlap_and_its_lanes(name: str, overlap: str, lanes: int) -> None:
    machine = platform(preset(name).values()["platform"])
    assert (machine.overlap, machine.links[0].depth) == (overlap, lanes)


def test_what_was_assumed_is_said() -> None:
    """HOBBIT's weights, SMoE's window and SpecMD's tolerance are unpublished."""
    for name, setting in (("hobbit", "eviction"), ("smoe", "eviction"), ("specmd-2", "miss")):
        assert "unpublished" in preset(name).settings[setting].assumed
        assert ("", f"  assumed: {preset(name).settings[setting].assumed}") in explain(preset(name))


@every("asked, meant", [("specmd1", "specmd-1"), ("hobit", "hobbit"), ("specmd-3-ls", "specmd-3+ls")])
def test_an_unknown_preset_names_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown preset '{asked}': did you mean {meant.replace('+', '.')}"):
        list(settings(asked))


# -- the command line ------------------------------------------------------------------------------------------------


def test_presets_are_listed_and_explained() -> None:
    listed = moereplay_here("presets").stdout
    assert all(name in listed for name in NAMES)
    explained = moereplay_here("presets", "specmd-4").stdout
    assert "cache_prior:lam=0.3" in explained and "source: SpecMD eq. 1" in explained and "assumed: " in explained


@pytest.mark.slow
def test_options_on_the_command_line_override_a_preset(small: Path) -> None:
    arguments = ("replay", small, "--preset", "specmd-5", "--json")
    plain = json.loads(moereplay_here(*arguments).stdout)["config"]
    changed = json.loads(moereplay_here(*arguments, "--prefetch", "none", "--capacity", "30%", "--seed", 3).stdout)[
        "config"
    ]
    assert plain["contract"] == "sequential" and plain["eviction"] == "least_stale"
    assert changed == plain | {"prefetch": "none", "capacity": "30%", "seed": 3}


def test_an_option_typed_as_its_default_overrides_too(small: Path) -> None:
    arguments = ("replay", small, "--preset", "specmd-5", "--contract", "atomic", "--json")
    assert json.loads(moereplay_here(*arguments).stdout)["config"]["contract"] == "atomic"


def test_several_presets_are_rows_side_by_side(small: Path) -> None:
    shown = moereplay("replay", small, "--preset", "specmd-1,specmd-5,specmd-5+ls", "--capacity", "20%,40%")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.partition("\nfastest")[0].splitlines()
    rows = [line.split() for line in lines if line.lstrip().startswith("specmd-")]
    names = [" ".join(row[: next(at for at, cell in enumerate(row) if cell.endswith("%"))]) for row in rows]
    assert sorted(names) == ["specmd-1", "specmd-1", "specmd-5, specmd-5+ls", "specmd-5, specmd-5+ls"]


def test_a_preset_that_does_not_exist_is_one_line(small: Path) -> None:
    for arguments in (("presets", "specmd-6"), ("replay", small, "--preset", "lru,specmd-1")):
        refused = moereplay_here(*arguments)
        assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
        assert "unknown preset" in refused.stderr
