"""Words of refusals: names get the nearest known one, what pydantic refuses is said plainly, sizes take units."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moereplay import policies
from moereplay.policies.contract import PolicyError
from moereplay.policies.grammar import parse
from moereplay.simulator.capacity import parse_capacity, surplus
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from moereplay.simulator.presets import preset
from moereplay.simulator.replay import replay
from moereplay.traces.documents import first_fault
from moereplay.traces.importers.registry import load as importer
from moereplay.traces.schema import TraceError
from moereplay.traces.store import open_trace
from moereplay.traces.texts import hint
from tests.commands.test_cli import SAMPLE
from tests.kit.cases import sizes
from tests.kit.command import unfolded
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.sweeping import moereplay

# -- names -----------------------------------------------------------------------------------------------------------


@every(
    "refused, meant",
    [
        (lambda: parse("eviction", "LRU"), "did you mean lru?"),
        (lambda: parse("eviction", "Least-Stale"), "did you mean least_stale?"),
        (lambda: parse("eviction", "lfu:COUNT=history"), "did you mean count?"),
        (lambda: parse("prefetch", "TOP_K"), "did you mean top_k?"),
        (lambda: parse("miss", "Fetch"), "did you mean fetch?"),
        (lambda: parse("routing", "Cache-Prior"), "did you mean cache_prior?"),
        (lambda: policies.named("BELADY"), "did you mean belady?"),
        (lambda: platform("A100-5GBPS"), "did you mean a100-5gbps?"),
        (lambda: preset("LLAMA.CPP"), "did you mean llama.cpp?"),
        (lambda: importer("Generic"), "did you mean generic?"),
        (lambda: replay(open_trace(SAMPLE), configure(), engine="Reference"), "did you mean reference?"),
        (lambda: configure(contract="Atomic"), "contract: unknown value 'Atomic': did you mean atomic?"),
        (lambda: configure(scope="per-layer"), "scope: unknown value 'per-layer': did you mean per_layer?"),
    ],
)
def test_a_name_in_another_case_gets_the_one_that_is_meant(refused: Callable[[], object], meant: str) -> None:
    with pytest.raises((PolicyError, ConfigError, TraceError)) as said:
        refused()
    assert meant in str(said.value)
    assert len(str(said.value)) < 100  # the one that is meant, not all


def test_without_a_near_name_all_are_listed_the_nearest_first() -> None:
    assert hint("qqbexlaqqqqqqdy", ("lru", "belady", "lfu")) == "choose from belady, lru, lfu"
    assert hint("zzz", ("lru", "belady"), "it has") == "it has lru, belady"
    listed = hint("crystal", policies.NAMES["eviction"]).removeprefix("choose from ").split(", ")
    assert sorted(listed) == sorted(policies.NAMES["eviction"])


# -- what pydantic refuses -------------------------------------------------------------------------------------------


class Inner(BaseModel):
    rate: float = 1.0


class Example(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: int = Field(default=1, ge=1, lt=100)
    share: float = Field(default=0.5, gt=0, le=1, allow_inf_nan=False)
    on: bool = True
    name: str = ""
    pairs: tuple[tuple[int, int], ...] = ()
    inner: Inner = Inner()


@every(
    "document, said",
    [
        ({"count": "many"}, "count: expected a whole number (got 'many')"),
        ({"count": 1.5}, "count: expected a whole number (got 1.5)"),
        ({"count": 0}, "count: expected at least 1 (got 0)"),
        ({"count": 100}, "count: expected less than 100 (got 100)"),
        ({"share": 0}, "share: expected more than 0 (got 0)"),
        ({"share": 2}, "share: expected at most 1 (got 2)"),
        ({"share": float("nan")}, "share: expected a finite number (got nan)"),
        ({"share": "half"}, "share: expected a number (got 'half')"),
        ({"on": "perhaps"}, "on: expected true or false (got 'perhaps')"),
        ({"name": 3}, "name: expected a text (got 3)"),
        ({"pairs": "ab"}, "pairs: expected a list (got 'ab')"),
        ({"pairs": [[1]]}, "pairs.0.1: missing"),
        ({"inner": 3}, "inner: expected a table (got 3)"),
        ({"inner": {"rate": "fast"}}, "inner.rate: expected a number (got 'fast')"),
        ({"colour": 1}, "colour: unknown key"),
        ({"name": ["x" * 99]}, f"name: expected a text (got ['{'x' * 55}...)"),
    ],
)
def test_what_pydantic_refuses_is_said_in_our_words(document: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Example.model_validate(document)
    assert first_fault(refused.value) == said


PLAIN = (
    ("replay", SAMPLE, "--seed", -1),
    ("replay", SAMPLE, "--contract", "loose"),
    ("replay", SAMPLE, "--warm", "WARM"),
    ("replay", SAMPLE, "--platform", "a100-5gbps:link.bytes_per_s=fast"),
    ("replay", SAMPLE, "--platform", "PLATFORM"),
    ("synthesise", "--out", "new.zarr", "--kind", "Zipf"),
    ("synthesise", "--out", "new.zarr", "--requests", 0),
    ("synthesise", "--out", "new.zarr", "--expert-bits", -1),
    ("synthesise", "--out", "new.zarr", "--seed", -1),
    ("import", "CSV", "--out", "new.zarr", "--expert-bytes", "10 M"),
    ("import", "CSV", "--out", "new.zarr", "--expert-bytes", 1000, "--expert-bits", -1),
    ("import", "CSV", "--out", "new.zarr", "--expert-bytes", 1000, "--prompt-length", -1),
    ("import", "CSV", "--out", "new.zarr", "--expert-bytes", 1000, "--chunk", 0),
    ("sweep", "run", "EXPERIMENT", "--out", "out"),
    ("sweep", "run", "EXPERIMENT", "--out", "out", "--set", "grid.seed=['one']"),
    ("sweep", "run", "EXPERIMENT", "--out", "out", "--set", "grid.seed=[]"),
    ("sweep", "run", "EXPERIMENT", "--out", "out", "--set", "random.n='many'"),
)
PYDANTIC = ("Input should", "Extra inputs", "Field required", "valid integer", "valid number", "unable to parse")


@every("arguments", PLAIN, apart=True)
def test_no_option_ends_in_the_words_of_a_library(
    arguments: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "WARM": '[[0, "first"]]',
        "PLATFORM.toml": 'name = "p"\n[link]\nbytes_per_s = 0\n[compute]\nkind = "measured"\n',
        "CSV.csv": "request,token,layer,expert_0\n0,0,0,1\n",
        "EXPERIMENT.toml": f'traces = ["{SAMPLE}"]\n[base]\nseed = -1\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = {Path(name).stem: tmp_path / name for name in texts}
    monkeypatch.chdir(tmp_path)
    code, out, said = moereplay(*(files.get(str(word), word) for word in arguments))
    assert (code, out, len(said.splitlines())) == (2, "", 1), said
    assert said.startswith("moereplay: ") and not any(words in said for words in PYDANTIC)
    assert not (tmp_path / "new.zarr").exists() and not (tmp_path / "out").exists()


@every(
    "typed, said",
    [
        ("split miniature", "missing --out:"),
        ("traces append a.zarr", "missing argument more:"),
        ("replay miniature --top x", "invalid --top x: expected a whole number"),
        ("traces sample miniature --requests 0 --out b.zarr", "invalid --requests 0: expected at least 1"),
        ("replay miniature --top", "missing value of --top:"),
        ("replay miniature --capacty 5%", "unknown option --capacty: did you mean"),
        ("sweep schema a.toml", "unexpected argument a.toml:"),
        ("sweep shema", "unknown command shema: did you mean schema?"),
    ],
)
def test_a_line_that_cannot_be_parsed_gives_one_line_that_names_the_fault(typed: str, said: str) -> None:
    code, out, error = moereplay(*typed.split())
    assert (code, out) == (2, "") and error.startswith(f"moereplay: {said}")
    assert error.count("\n") == 1 and "--help`" in error


# -- sizes and capacities ----------------------------------------------------------------------------------------------


@every("text, size", [("10MB", 10_000_000), ("1.5 KiB", 1536), ("1000", 1000), ("1KB/2KB", (1000, 2000))], apart=True)
def test_expert_bytes_take_the_units_of_capacities(text: str, size: int | tuple[int, ...], tmp_path: Path) -> None:
    rows = ["request,token,layer,expert_0", "0,0,0,1", "0,0,1,0"]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    code, _, said = moereplay("import", tmp_path / "rows.csv", "--out", tmp_path / "a.zarr", "--expert-bytes", text)
    assert code == 0, said
    assert open_trace(tmp_path / "a.zarr").geometry.expert_bytes == (size if isinstance(size, tuple) else (size, size))


@every("text", ["1e6", "10mb", "-5", "0", "1.5", "1.5B", "", "5%", "2experts", "9" * 5000], apart=True)
def test_what_is_no_size_of_an_expert_is_refused_with_the_forms(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("request,token,layer,expert_0\n0,0,0,1\n")
    code, _, said = moereplay("import", tmp_path / "rows.csv", "--out", tmp_path / "a.zarr", f"--expert-bytes={text}")
    assert code == 2
    assert f"invalid --expert-bytes {text[:40]!r}: " in said
    assert not (tmp_path / "a.zarr").exists()


@every("text, times", [("100%", ""), ("100.1%", "1.001"), ("150%", "1.5"), ("60experts", "3")])
def test_a_capacity_above_everything_is_said(text: str, times: str) -> None:
    geometry = sizes(2, 10, 2, 1000)
    for scope in ("global", "per_layer"):
        found = surplus(parse_capacity(text, geometry, scope, ((1000, 1000),)), geometry, np.full(20, 1000))
        assert (found is not None) == bool(times), scope
        assert found is None or f"capacity is {times} times all 20 experts" in found


def test_everything_is_what_can_be_cached_at_every_precision() -> None:
    """Two precisions of 1,000 and 500 bytes: 30 kB of copies, of which 150 % of the stored bytes is no more."""
    geometry, tiers = sizes(2, 10, 2, 1000), ((1000, 1000), (500, 500))
    both = np.full(20, 1500)
    held = [surplus(parse_capacity(text, geometry, "global", tiers), geometry, both) for text in ("150%", "151%")]
    assert held[0] is None and held[1] is not None


def test_where_everything_is_said_to_fit_nothing_is_evicted() -> None:
    trace = random_trace(1, Sizes(layers=3, experts=8, tokens=12, prompt=4, requests=2, depth=1, size=1000))
    for settings in ({"scope": "per_layer"}, {"miss": "cascade:bits=8/4"}, {"prefetch": "top_k"}):
        result = replay(trace, configure(capacity="200%", **settings), engine="reference")
        assert "nothing is ever evicted" in result.about["warning"]
        assert result.totals["evictions"] == 0


def test_replay_prints_the_warning() -> None:
    code, out, _ = moereplay("replay", SAMPLE, "--capacity", "150%,50%", "--workers", 1)
    said = re.search(r"warning for 150%: capacity is 1\.5 times all [\d,]+ experts: everything fits", unfolded(out))
    assert code == 0 and said and out.count("warning") == 1, out


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_a_grid_that_could_not_be_written_is_not_replayed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    inside = tmp_path / "file" / "e.csv"
    for option, path in (("--out", tmp_path / "file"), ("--events", inside), ("--events", tmp_path)):
        code, out, said = moereplay("replay", tmp_path / "no-trace.zarr", option, path)
        assert (code, out) == (2, "") and f"cannot write {path}" in said
