"""The page of `report`: well-formed, self-contained, true to the results, and safe whatever the files are called."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shlex
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest

from moereplay.traces.store import open_trace
from moereplay.traces.texts import settled
from moereplay.traces.writer import write_trace
from tests.commands.test_cli import SAMPLE
from tests.kit.command import moereplay_here as moereplay
from tests.kit.documented import Command, parse
from tests.kit.every import every
from tests.kit.pages import Page

HOSTILE = "</script><script>alert(1)</script><!--\"'><img src=//evil.example/x onerror=alert(2)>&lt;b\u2028"
GRID = ("--passes", "token", "--capacity", "5%,50%", "--eviction", "lru,lfu,belady")


def results(folder: Path, *words: object) -> Path:
    ended = moereplay("replay", *words, "--out", folder)
    assert ended.returncode == 0, ended.stderr
    return folder


def made(folder: Path, out: Path, *words: object) -> Page:
    ended = moereplay("report", folder, "--out", out, *words)
    assert ended.returncode == 0, ended.stderr
    return Page(out.read_text("utf-8"))


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results(tmp_path_factory.mktemp("grid"), "miniature", *GRID)


@pytest.fixture(scope="module")
def page(grid: Path) -> Page:
    return made(grid, grid.with_suffix(".html"))


def check_form(page: Page) -> None:
    """Check the properties of every page."""
    assert page.problems == [] and page.handlers == []
    assert len(page.ids) == len(set(page.ids))
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address[0] == "#"} <= set(page.ids)
    assert page.captions == len(page.tables)
    assert all(head.get("scope") in ("col", "row", "rowgroup") for table in page.tables for head in table)
    assert all(image["alt"] for image in page.images)


def check_scripts(page: Page) -> None:
    """Only ours run, and nothing is loaded."""
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in page.code}
    allowed = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert set(allowed["script-src"].split()) == hashes and len(hashes) == 2
    assert not any("<" in text for _, text in page.scripts if text not in page.code)  # JSON of whatever strings
    assert allowed["default-src"] == "'none'" and allowed["img-src"] == "data:"


@pytest.mark.slow
def test_the_page_is_well_formed_and_loads_nothing(page: Page) -> None:
    check_form(page)
    check_scripts(page)
    assert len(page.images) == 5  # speed, hit rate, TTFT, and collisions of two capacities


def test_one_capacity_gives_bars_in_the_order_of_the_ranking(grid: Path, page: Page, tmp_path: Path) -> None:
    one = made(grid, tmp_path / "one.html", "--where", "capacity=50%")
    check_form(one)
    check_scripts(one)
    drawn, several = (each.script("moereplay-figures") for each in (one, page))
    ranked = sorted(one.script("moereplay-data")["runs"], key=lambda run: -run["figures"]["tokens_per_s"])
    speed, hits = drawn["tokens_per_s-0"]["spec"], drawn["hit_rate-0"]["spec"]
    assert _kinds(speed) >= {"rect", "text"} and "symbol" not in _kinds(speed)
    points = several["tokens_per_s-0"]["spec"], drawn["collisions-0-0"]["spec"]
    assert all("symbol" in _kinds(spec) and "text" not in _kinds(spec) for spec in points)
    named = next(scale["domain"] for scale in speed["scales"] if scale["name"] == "y")
    assert sorted(named) == sorted(run["config"]["eviction"] for run in ranked)
    lengths = {point["series"]: point["y"] for data in speed["data"] for point in data.get("values", ())}
    assert lengths == {run["config"]["eviction"]: run["figures"]["tokens_per_s"] for run in ranked}
    assert [name for name in named if name != "belady"] == [
        run["config"]["eviction"] for run in ranked if run["config"]["eviction"] != "belady"
    ]
    assert any(data.get("values", [{}])[0].get("series", "").startswith("Belady") for data in hits["data"])
    assert "Tokens per second, capacity 50%" in one.text and "against capacity" not in one.text


@pytest.mark.slow
def test_columns_without_a_value_are_left_out(grid: Path, tmp_path: Path) -> None:
    """Without a policy that knows the future there is no upper bound."""
    made(grid, tmp_path / "all.html")
    made(grid, tmp_path / "known.html", "--where", "eviction=lru,lfu")
    every, known = ((tmp_path / name).read_text("utf-8") for name in ("all.html", "known.html"))
    for head in ("reaches", "second", "lead", "how sure"):
        assert f">{head}</th>" in every and f">{head}</th>" in known
    assert ">upper bound</th>" in every and ">upper bound</th>" not in known


@every(
    "figure, name, panel",
    [("hit_rate_by_capacity", "hit_rate-0", ""), ("collisions_by_layer", "collisions-0-0", "capacity 5%")],
)
def test_the_page_and_the_files_of_plot_show_the_same_values(
    grid: Path, page: Page, tmp_path: Path, figure: str, name: str, panel: str
) -> None:
    ended = moereplay("plot", grid, "--figure", figure, "--out", tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = list(csv.DictReader((tmp_path / f"{figure}.csv").read_text().splitlines()))
    rows = [row for row in rows if row["panel"].endswith(panel)]
    plotted = {(row["name"], *(float(row[key] or "nan") for key in ("x", "y", "low"))) for row in rows}
    spec = page.script("moereplay-figures")[name]["spec"]
    drawn = [point for data in spec["data"] for point in data.get("values", ()) if "series" in point]
    shown = {(each["series"], each["x"], each["y"], each.get("low", nan)) for each in drawn}
    assert len(shown) > 6 and {map_nan(row) for row in shown} == {map_nan(row) for row in plotted}
    assert any("low" in each for each in drawn)


def map_nan(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row that equals another one without an interval."""
    return tuple(None if each != each else each for each in row)


def _kinds(spec: dict[str, Any]) -> set[str]:
    """The kinds of marks in a compiled specification."""
    return {mark["type"] for mark in spec["marks"]} | {kind for mark in spec["marks"] for kind in _kinds_within(mark)}


def _kinds_within(mark: dict[str, Any]) -> set[str]:
    return _kinds(mark) if "marks" in mark else set()


def test_its_data_is_that_of_the_results(grid: Path, page: Page) -> None:
    shown = moereplay("sweep", "show", grid, "--json").stdout.splitlines()
    expected = {row["identity"]: row for row in map(json.loads, shown)}
    data = page.script("moereplay-data")
    assert {"question", "answer", "budgets", "best", "interval", "runs", "left_out", "warnings"} == set(data)
    assert {run["identity"] for run in data["runs"]} == expected.keys()
    for run in data["runs"]:
        row = expected[run["identity"]]
        assert all(run["figures"][name] == row[name] for name in ("hit_rate", "tokens_per_s", "gb_moved"))
        assert run["config"]["eviction"] == row["eviction"] and run["config"]["capacity"] == row["capacity"]
        ends = run["interval"]["tokens_per_s"]
        assert ends["low"] <= row["tokens_per_s"] <= ends["high"]


def test_what_knows_the_future_is_a_bound_and_never_best(page: Page) -> None:
    data = page.script("moereplay-data")
    best = next(run for run in data["runs"] if run["identity"] == data["best"]["identity"])
    fastest = max(data["runs"], key=lambda run: run["figures"]["tokens_per_s"])
    assert fastest["config"]["eviction"] == "belady" and best["config"]["eviction"] != "belady"
    assert {run["group"] for run in data["runs"] if run["config"]["eviction"] == "belady"} == {
        "knows the future: cannot be used"
    }
    assert [run["group"] for run in data["runs"]][-2:] == ["knows the future: cannot be used"] * 2
    assert data["interval"] == best["interval"]["tokens_per_s"]
    assert data["answer"][0] in page.text
    futures = [sentence for sentence in data["answer"] if "belady" in sentence]
    # the table has the upper bound of the first figure, a sentence that of the hits
    assert (
        len(futures) == 1
        and all(each["bound"] for each in data["budgets"])
        and all("future" in sentence.partition("belady")[0] for sentence in futures)
    )


def test_every_command_is_one_and_repeats_its_run(page: Page, tmp_path: Path) -> None:
    runs = page.script("moereplay-data")["runs"]
    for run in runs:
        words = shlex.split(run["command"])
        parse(Command(run["command"], words), tmp_path)
        assert run["command"] in page.text
    again = json.loads(moereplay(*shlex.split(runs[0]["command"])[1:], "--json", cwd=tmp_path).stdout)
    assert again["about"]["identity"] == runs[0]["identity"]


def test_it_warns_and_says_how_it_was_made(page: Page) -> None:
    warnings = " ".join(page.script("moereplay-data")["warnings"])
    for words in ("capacity below one token cycle", "not calibrated", "share a cache"):
        assert words in warnings and words in page.text
    for words in ("look-ahead recall", "link.bytes_per_s", "semantics version", "exact sign-flip test"):
        assert words in page.text


def test_the_same_results_give_the_same_bytes(grid: Path, page: Page, tmp_path: Path) -> None:
    made(grid, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == grid.with_suffix(".html").read_bytes()


def test_names_of_files_can_neither_end_a_script_nor_begin_an_element(tmp_path: Path) -> None:
    trace = open_trace(SAMPLE)
    provenance = trace.header.provenance.model_copy(update={"model": HOSTILE, "notes": (HOSTILE,)})
    path = tmp_path / "<script>alert(3)<!--.zarr"
    header = trace.header.model_copy(update={"provenance": provenance})
    write_trace(path, header, [trace.request(0), trace.request(1)], trace.router_bias)
    folder = results(tmp_path / "results", path, "--capacity", "25%")
    page = made(folder, tmp_path / "page.html", "--trace", path)
    check_form(page)
    check_scripts(page)
    data = page.script("moereplay-data")
    assert data["runs"][0]["about"]["model"] == settled(HOSTILE) and HOSTILE.split("\u2028")[0] in page.text
    assert str(tmp_path) not in (tmp_path / "page.html").read_text("utf-8")  # folders are nobody else's business


def test_curves_alone_have_a_page(tmp_path: Path) -> None:
    assert moereplay("curve", "miniature", "--eviction", "lru", "--out", tmp_path).returncode == 0
    page = made(tmp_path, tmp_path / "page.html")
    check_form(page)
    data = page.script("moereplay-data")
    assert (data["best"], data["interval"], data["runs"]) == (None, None, []) and "none is fastest" in page.text


def curves_behind(folder: Path, out: Path) -> set[str]:
    """The series of curves in the figure of hit rates."""
    text = {attrs.get("id"): text for attrs, text in made(folder, out).scripts}["moereplay-figures"]
    return set(re.findall(r"lru at every capacity[^\"]*", text))


@pytest.mark.slow
def test_curves_stand_behind_the_replays_that_they_hold_for_each_by_its_own_name(tmp_path: Path) -> None:
    """A curve fetches every miss; those of two scopes are two lines."""
    for name, options in {"drop": ("--miss", "drop:keep=2"), "fetch": ("--scope", "global,per_layer")}.items():
        results(tmp_path / name, "miniature", "--capacity", "25%,50%", *options)
        for scope in ("global", "per_layer"):
            curve = ("curve", "miniature", "--eviction", "lru", "--scope", scope, "--out", tmp_path / name)
            assert moereplay(*curve).returncode == 0
    assert curves_behind(tmp_path / "drop", tmp_path / "drop.html") == set()
    two = {f"lru at every capacity, scope {scope}" for scope in ("global", "per_layer")}
    assert curves_behind(tmp_path / "fetch", tmp_path / "fetch.html") == two


@every(
    "words, said",
    [
        (("{empty}", "--out", "a.html"), "no results in"),
        (("{grid}", "--out", "{empty}"), "it is a folder"),
        (("{grid}", "--out", "-"), "standard output"),
        (("{grid}", "--out", "a.html", "--where", "eviction=fifo"), "no result has eviction = fifo"),
        (("{grid}", "--out", "a.html", "--trace", "{grid}"), "has no zarr.json"),
    ],
    apart=True,
)
def test_what_cannot_be_done_is_said_in_a_line(words: tuple[str, ...], said: str, grid: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = moereplay("report", *(word.format(grid=grid, empty=tmp_path / "empty") for word in words), cwd=tmp_path)
    assert ended.returncode == 2 and said in ended.stderr and len(ended.stderr.split("Error: ")[-1].splitlines()) == 1
    assert not (tmp_path / "a.html").exists()


@every(
    "words, package",
    [
        (("report", "{grid}", "--out", "{out}/a.html"), "vl_convert"),
        (("plot", "{grid}", "--out", "{out}"), "matplotlib"),
        (("recommend", "olmoe-1b-7b", "--gpu", "RTX 3090", "--ram", "64GB", "--out", "{out}"), "matplotlib"),
        (("paper", "specmd", "miniature", "--out", "{out}"), "matplotlib"),
    ],
    apart=True,
)
def test_a_missing_package_is_named(
    words: tuple[str, ...], package: str, grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    ended = moereplay(*(word.format(grid=grid, out=tmp_path) for word in words))
    extra = "report" if package == "vl_convert" else "plot"
    assert ended.returncode == 2 and f"missing package {package}: pip install " in ended.stderr
    assert f"[{extra}]" in ended.stderr and not list(tmp_path.iterdir())


OWN = '''"""Most recently used: the newest last use leaves."""

from moereplay.policies.contract import Eviction, expert_of


def key(now, experts, copies, own, y):
    return -experts[expert_of(now, y)]["last_use"]


POLICY = Eviction(name="newest_{name}", summary="evict the newest", source="a test", key=key, reads=frozenset())
'''


@pytest.mark.slow
def test_the_command_of_a_users_policy_and_of_lists_repeats_its_run(tmp_path: Path) -> None:
    name = tmp_path.name.replace("-", "_")
    (tmp_path / "mine.py").write_text(OWN.replace("{name}", name))
    (tmp_path / "start.json").write_text("[[0, 1], [3, 2]]")
    words = ("--eviction", f"newest_{name}", "--policy-file", tmp_path / "mine.py", "--warm", tmp_path / "start.json")
    page = made(results(tmp_path / "results", "miniature", "--capacity", "25%", *words), tmp_path / "page.html")
    run = page.script("moereplay-data")["runs"][0]
    for file, held in run["files"].items():
        (tmp_path / file).write_text(json.dumps(held))
    again = moereplay(*shlex.split(run["command"])[1:], "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["about"]["identity"] == run["identity"]


@pytest.mark.slow
def test_a_trace_that_is_gone_is_named_and_how_to_give_it(tmp_path: Path) -> None:
    trace, path = open_trace(SAMPLE), tmp_path / "gone.zarr"
    write_trace(path, trace.header, [trace.request(0)], trace.router_bias)
    folder = results(tmp_path / "results", path, "--capacity", "25%,50%")
    path.rename(tmp_path / "moved.zarr")
    said = "not at the path of its replay; pass --trace"
    assert said in made(folder, tmp_path / "page.html").text
    found = made(folder, tmp_path / "page.html", "--trace", tmp_path / "moved.zarr")
    assert said not in found.text and "reuse by the next token" in found.text
    assert "no confidence interval: one request" in found.text
    foreign = moereplay("report", folder, "--out", tmp_path / "b.html", "--trace", SAMPLE)
    assert foreign.returncode == 2 and "--trace" in foreign.stderr
