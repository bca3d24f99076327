"""Texts of others reach terminals, pages, pictures and spreadsheets as text alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from xml.dom import minidom

import polars as pl
import pytest
from matplotlib.figure import Figure

from moereplay.analysis.figures.drawing import save, styled
from moereplay.analysis.report.page import as_json
from moereplay.analysis.tables import csv, markdown, table
from moereplay.policies.contract import PolicyError
from moereplay.policies.files import register
from moereplay.results.files import csv_text
from moereplay.traces.library import INDEX
from moereplay.traces.schema import Header, Provenance
from moereplay.traces.writer import write_trace
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every
from tests.kit.stored import GEOMETRY, ids_only

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eabc\0\u2028\nforged: 100% hit"
MATHS = "$\\frac{$ $x$"
FORMULA = "=cmd|' /C calc'!A0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of such models, and their replays."""
    folder = tmp_path_factory.mktemp("foreign")
    for name, model in {"esc": ESCAPES, "maths": MATHS, "formula": FORMULA}.items():
        header = Header(geometry=GEOMETRY, provenance=Provenance(model=model, source=model, notes=(model,)))
        write_trace(folder / f"{name}.zarr", header, [ids_only(40, 1), ids_only(40, 2)])
        grid = ("--capacity", "50%,75%", "--eviction", "lru,fifo", "--engine", "reference", "--workers", 1)
        ended = moereplay("replay", f"{name}.zarr", *grid, "--out", name, cwd=folder)
        assert ended.returncode == 0, ended.stderr
    return folder


def _plain(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.slow
@every(
    "words",
    [
        "inspect esc.zarr",
        "curve esc.zarr",
        "replay esc.zarr --capacity 50% --engine reference",
        "replay esc.zarr --capacity 50% --engine reference --csv",
        "replay esc.zarr --capacity 50% --engine reference --markdown",
        "bounds esc.zarr --capacity 50%",
        "traces list .",
        "sweep show esc",
        "sweep show esc --csv",
        "sweep show esc --latex",
        "traces publish esc.zarr --licence MIT --out lib --name x",
    ],
)
def test_no_verb_prints_what_a_terminal_obeys(words: str, folder: Path) -> None:
    ended = moereplay(*words.split(), cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert _plain(ended.stdout) and _plain(ended.stderr)
    assert "\nforged" not in ended.stdout + ended.stderr


def test_a_library_of_others_is_listed_as_text(folder: Path) -> None:
    moereplay("traces", "publish", "maths.zarr", "--licence", "MIT", "--out", "theirs", "--name", "x", cwd=folder)
    file = folder / "theirs" / INDEX
    index = json.loads(file.read_text())
    index["traces"][0] |= {
        "model": ESCAPES,
        "licence": ESCAPES + "\ud800",
        "source": ESCAPES,
        "capabilities": [ESCAPES],
    }
    file.write_text(json.dumps(index))
    for words in (["list", "theirs"], ["list", "theirs", "--json"]):
        ended = moereplay("traces", *words, cwd=folder)
        assert ended.returncode == 0 and _plain(ended.stdout + ended.stderr)
    ended = moereplay("traces", "get", "x", "--from", "theirs", "--out", "y.zarr", cwd=folder)
    assert ended.returncode == 2 and _plain(ended.stderr)
    ended = moereplay("traces", "publish", "esc.zarr", "--licence", "MIT", "--out", "theirs", "--name", "z", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    card = (folder / "theirs" / "README.md").read_text()
    assert _plain(card) and card.startswith("---\nlicense: other\n")


@pytest.mark.long
@every("name", ["esc", "maths"])
def test_pictures_of_such_names_are_drawn_and_well_formed(name: str, folder: Path) -> None:
    ended = moereplay("plot", name, "--out", f"drawn-{name}", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    pictures = list((folder / f"drawn-{name}").glob("*.svg"))
    assert len(pictures) >= 5
    for path in pictures:
        minidom.parse(str(path))


def test_what_does_not_print_is_escaped_in_a_picture_whatever_drew_it(tmp_path: Path) -> None:
    with styled():
        figure = Figure()
        axes = figure.add_subplot()
        axes.plot([1, 10, 200], [1, 2, 3], label=ESCAPES)
        axes.set(title=ESCAPES + MATHS, xscale="log")
        axes.legend()
    _, picture = save(figure, tmp_path / "x")
    minidom.parse(str(picture))
    assert "mathdefault" not in picture.read_text()


def test_data_of_a_page_hold_nothing_that_does_not_print() -> None:
    made = as_json({"model" + ESCAPES: [ESCAPES, {"x": ESCAPES}]})
    assert all(text.isprintable() for text in _texts(json.loads(made)))


def _texts(document: object) -> Iterator[str]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from (key, *_texts(value))
    elif isinstance(document, list):
        for each in document:
            yield from _texts(each)
    elif isinstance(document, str):
        yield document


def test_cells_of_csv_are_no_formulas_and_numbers_stay(folder: Path) -> None:
    rows = [{"model": FORMULA, "gain": -1.5, "text": "-2"}, {"model": "lru", "gain": 2.0, "text": "@x"}]
    expected = [f"'{FORMULA},-1.5,-2", "lru,2.0,'@x"]
    assert csv(rows).splitlines()[1:] == expected
    assert csv_text(pl.DataFrame(rows)).splitlines()[1:] == expected
    assert csv([{FORMULA: 1}]).startswith("'=")
    for name in ("formula", "maths"):
        words = f"replay {name}.zarr --capacity 50% --engine reference --out both"
        assert moereplay(*words.split(), cwd=folder).returncode == 0
    shown = moereplay("sweep", "show", "both", "--csv", cwd=folder).stdout
    assert "'=cmd" in shown and ",=cmd" not in shown


def test_tables_and_markdown_show_one_line_for_each_row() -> None:
    rows = [{"model": ESCAPES, "n": 1}, {"model": "[a](http://b) | <i>", "n": 2}]
    assert _plain(table(rows, width=400)) and "\nforged" not in table(rows, width=400)
    assert len(markdown(rows).splitlines()) == 4
    assert "\\[a\\](http://b) \\| &lt;i>" in markdown(rows)


@every(
    "text, field", product(["a\x1b[2J", "a\u202eb", "x" * 100_000, "a\nb"], ["name", "summary", "source"]), apart=True
)
def test_a_policy_file_of_others_cannot_bring_such_a_text(field: str, text: str, tmp_path: Path) -> None:
    words = {"name": "mine", "summary": "evict any", "source": "none"} | {field: text}
    (tmp_path / "p.py").write_text(
        "from moereplay.contract import Eviction\n\n\ndef key(now, experts, copies, own, y):\n    return y\n\n\n"
        f"POLICY = Eviction(key=key, **{words!r})\n"
    )
    with pytest.raises(PolicyError, match=field):
        register(tmp_path / "p.py")
    ended = moereplay("policies", "mine", "--policy-file", tmp_path / "p.py")
    assert ended.returncode == 2 and _plain(ended.stderr) and len(ended.stderr) < 1500
