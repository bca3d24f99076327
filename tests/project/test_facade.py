"""`import moereplay`: every public name, imported when it is used; a file of the user's that hides one is named."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import moereplay
from moereplay import commands
from moereplay.policies import contract
from moereplay.traces.schema import Geometry, TraceError
from tests.kit.command import moereplay_here as command_here
from tests.kit.every import every
from tests.project.test_imports import PACKAGES, ROOT, STAGES

SLOW = (
    "numpy",
    "numba",
    "polars",
    "zarr",
    "pydantic",
    "simpy",
    "typer",
    "importlib.metadata",
    *(f"moereplay.{name}" for name in STAGES),
)
GEOMETRY = Geometry(layers=2, experts=8, k=2, expert_bytes=(1000, 1000))


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own in a folder of the user's."""
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def command(cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "moereplay", "platforms"]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


def test_every_name_is_there_and_is_what_its_room_calls_so() -> None:
    assert {name for name in moereplay.__all__ if getattr(moereplay, name, None) is None} == set()
    assert set(moereplay._HOME) == set(moereplay.__all__) - {"__version__", "contract"}
    assert dir(moereplay) == sorted(moereplay.__all__) == moereplay.__all__
    assert moereplay.replay.__module__ == "moereplay.simulator.replay"
    with pytest.raises(AttributeError, match="no attribute 'replays'"):
        moereplay.replays  # noqa: B018


def test_what_a_notebook_prints_is_one_short_line() -> None:
    """Of a whole model's layers and of every row: by default these are lines of 400 to 30,000 characters."""
    trace = moereplay.open_trace("miniature")
    result = moereplay.replay(trace, moereplay.configure(capacity="25%"), log=True)
    model = "16 layers of 64 experts, k = 8, 25.2 MB"
    assert repr(trace) == f"<Trace miniature.zarr: 493 tokens of 6 requests, {model}; ids, logits, lookahead, weights>"
    assert str(trace.geometry) == f"<Geometry: {model} of experts at 16 bits>"
    assert str(trace.request(0)).startswith(
        f"<Request: {trace.request_offsets[1]} tokens, {trace.prompt_lengths[0]} of"
    )
    assert str(result) == (
        f"<Result SIMULATED: miniature, lru at 25%, {result.totals['hits']:,} hits in {result.totals['accesses']:,}>"
    )
    deep = moereplay.known_model("deepseek-v3").geometry
    shown = [trace, trace.geometry, *trace.arrays.values(), trace.request(0), result, deep]
    assert [text for text in map(repr, shown) if "\n" in text or len(text) > 200] == []


def test_a_preset_is_what_the_command_line_has_under_its_name() -> None:
    """Its settings, under those that are given, and an error that names the presets."""
    shown = command_here("replay", "miniature", "--preset", "specmd-1", "--seed", 3, "--capacity", "25%", "--json")
    config = moereplay.configure(preset="specmd-1", seed=3, capacity="25%")
    assert (config.contract, config.miss) == (
        "sequential",
        "fetch:bits=4",
    )  # of the preset; the default is atomic, fetch
    trace = moereplay.open_trace("miniature")
    assert json.loads(shown.stdout)["about"]["identity"] == config.identity(trace)
    assert moereplay.configure(preset="specmd-1", miss="fetch").miss == "fetch"  # the default wins where it is given
    for name, said in {
        "specmd-9": "did you mean specmd-",
        "nothing": "choose from .*specmd-1",
        "a,b": "choose from",
    }.items():
        with pytest.raises(moereplay.ConfigError, match=f"unknown preset '{name}': {said}"):
            moereplay.configure(preset=name)


def test_type_checkers_are_told_of_the_same_names() -> None:
    block = Path(moereplay.__file__).read_text().split("if TYPE_CHECKING:")[1].split("\n\n#:")[0]
    named = set(re.findall(r"\b(\w+)(?=,|\n|:)", re.sub(r"\w+ as ", "", block))) & set(moereplay.__all__)
    assert named == set(moereplay.__all__)


def test_importing_it_imports_nothing_slow(tmp_path: Path) -> None:
    found = python(f"import sys, moereplay; print([name for name in {SLOW} if name in sys.modules])", tmp_path)
    assert found.stdout.strip() == "[]", found


def test_what_a_policy_file_imports_is_the_contract_itself() -> None:
    public = import_module("moereplay.contract")
    assert moereplay.contract is public
    assert all(getattr(public, name) is getattr(contract, name) for name in public.__all__)


@pytest.mark.slow
@every("form", ["{}.py", "{}/__init__.py", "{}/notes.txt"], apart=True)
def test_what_a_user_calls_by_a_name_of_ours_hides_nothing(form: str, tmp_path: Path) -> None:
    for package in PACKAGES:
        file = tmp_path / form.format(package)
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise SystemExit('a file of the user was imported')")
    ran = command(tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "") and "a100-5gbps" in ran.stdout


@every("package", PACKAGES)
def test_no_module_has_two_names(package: str) -> None:
    """The folders lie at the top of a clone, where Python would find them as well."""
    ran = python(f"import {package}", ROOT)
    assert f"import this package as moereplay.{package}" in ran.stderr.splitlines()[-1]


# -- a trace in memory -------------------------------------------------------------------------------------------------


def routing(tokens: int) -> np.ndarray:
    """(T, 2, 2) ids: token t uses experts t and t + 1 of 8."""
    return np.stack([np.arange(tokens) % 8, (np.arange(tokens) + 1) % 8], axis=-1)[:, None, :].repeat(2, axis=1)


def test_arrays_become_the_requests_that_they_hold() -> None:
    chosen, weights = routing(10), np.full((10, 2, 2), 0.5)
    logits, look = np.zeros((10, 2, 8)), np.ones((10, 2, 8))
    trace = moereplay.from_arrays(
        chosen, GEOMETRY, lengths=[6, 4], prompt_lengths=[2, 1], weights=weights, logits=logits, lookahead=[look]
    )
    assert (trace.requests, trace.tokens, trace.capabilities) == (2, 10, {"ids", "weights", "logits", "lookahead"})
    second = trace.request(1)
    assert np.array_equal(second.chosen, chosen[6:]) and second.prompt_length == 1
    assert second.lookahead[0].shape == (4, 2, 8) and second.weights is not None and second.weights.dtype == np.float32


def test_a_known_model_gives_sizes_and_router_and_the_arrays_their_k() -> None:
    chosen = np.zeros((3, 16, 4), np.int64) + np.arange(4)
    trace = moereplay.from_arrays(chosen, "olmoe-1b-7b")
    assert (trace.geometry.k, trace.geometry.experts, trace.header.provenance.model) == (4, 64, "olmoe-1b-7b")
    assert trace.geometry.expert_bytes == moereplay.known_model("olmoe-1b-7b").geometry.expert_bytes


def test_it_replays_as_the_same_rows_on_disk_do(tmp_path: Path) -> None:
    trace = moereplay.from_arrays(routing(20), GEOMETRY, lengths=[12, 8], prompt_lengths=[4, 4])
    stored = moereplay.write_trace(tmp_path / "a.zarr", trace.header, map(trace.request, range(2)))
    config = moereplay.configure(capacity="50%", eviction="belady")
    totals = [moereplay.replay(each, config, engine="reference").totals for each in (trace, stored)]
    assert totals[0] == totals[1] and totals[0]["misses"] > 0


@every(
    "wrong, said",
    [
        ({"chosen": routing(5)[:, 0]}, "chosen has shape (5, 2): expected (tokens, layers, k)"),
        ({"chosen": routing(5)[:, :1]}, "request 0: chosen has shape (5, 1, 2), expected (5, 2, 2)"),
        ({"chosen": routing(5) + 3}, "chosen[4, 0, 1] is 8 (token 4, layer 0): ids are 0 to 7, or -1 for not routed"),
        ({"lengths": [2, 2]}, "chosen has 5 tokens: expected 4"),
        ({"lengths": [2, 3], "prompt_lengths": [1]}, "prompt_lengths has 1 numbers for 2 requests"),
        ({"prompt_lengths": [6]}, "request 0: 6 prompt tokens of 5: expected 0 to 5"),
        ({"lengths": [5, 0]}, "request 1: invalid length 0"),
        ({"weights": np.ones((4, 2, 2))}, "weights has 4 tokens: expected 5"),
        ({"weights": np.full((5, 2, 2), np.nan)}, "weights[0, 0, 0] is nan: expected a number from 0 to 65536"),
        ({"lookahead": [np.ones((5, 2, 7))]}, "lookahead/1 has shape (5, 2, 7), expected (5, 2, 8)"),
        ({"router_bias": np.ones(8)}, "router_bias has shape (8,), expected finite numbers of shape (2, 8)"),
        ({"geometry": "olmoe-1b-8b"}, "unknown model 'olmoe-1b-8b'; nearest names, which are other models: olmoe-1b"),
    ],
)
def test_arrays_that_are_no_trace_are_refused_by_name(wrong: dict[str, object], said: str) -> None:
    given = {"chosen": routing(5), "geometry": GEOMETRY} | wrong
    with pytest.raises(TraceError) as refused:
        moereplay.from_arrays(**given)  # type: ignore[arg-type]
    assert said in str(refused.value)


# -- stored results ----------------------------------------------------------------------------------------------------


def test_stored_results_are_read_whoever_wrote_them() -> None:
    before = ROOT / "tests" / "results" / "before"
    for folder in (before / "replays", before / "sweep"):
        runs, layers = moereplay.read_results(folder), moereplay.read_results(str(folder), "layers")
        assert runs["accesses"].sum() == layers["accesses"].sum() > 0
        assert {"capacity", "eviction", "time_ns", "hits"} <= set(runs.columns)
    with pytest.raises(moereplay.ResultError, match="unknown table 'layer': did you mean layers"):
        moereplay.read_results(before / "sweep", "layer")
    with pytest.raises(moereplay.ResultError, match="no results in"):
        moereplay.read_results(ROOT / "docs")


def test_help_lists_every_verb_under_a_heading_and_cuts_none() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "moereplay", "--help"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {name: line for lines in commands.listed().values() for name, line in lines}
    verbs = {name.split("_")[0] for name in commands.NAMES}
    assert set(listed) == verbs
    assert all(re.search(rf"^  {name} +{re.escape(line)}$", ran.stdout, re.M) for name, line in listed.items())
