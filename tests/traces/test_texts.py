"""Text that others wrote: what headers keep of it, and what terminals, spreadsheets and Markdown get."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.traces.frozen import MOST_NOTES
from moereplay.traces.metadata import metadata_digest
from moereplay.traces.schema import Header, Provenance
from moereplay.traces.store import open_trace, verify
from moereplay.traces.texts import (
    CUT,
    MOST_NAME,
    MOST_TEXT,
    digits,
    duration,
    escaped,
    in_csv,
    in_markdown,
    percent,
    points,
    rate,
    settled,
    size,
)
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.command import moereplay_here as moereplay
from tests.kit.stored import GEOMETRY, PLAIN, ids_only

#: Escape sequences, a bell, C1 and bidirectional controls, NUL, line breaks, a surrogate, what is no character.
ODD = "\x1b[2J\x07\x9b31m\u202eabc\0\r\nforged: 100% hit\u2028\ud800\uffff\t"
LONG = "x" * 5_000_000


@given(st.text(alphabet=st.characters(), max_size=40))
def test_settled_text_is_printable_utf_8_and_stays_as_it_is(text: str) -> None:
    once = settled(text, 50)
    assert once.isprintable() and len(once.encode("utf-8", "strict")) >= len(once) <= 50
    assert settled(once, 50) == once
    if text.isprintable():
        assert once == text


def test_every_text_of_a_header_is_settled_however_it_is_made(tmp_path: Path) -> None:
    texts = {name: ODD + LONG for name, field in Provenance.model_fields.items() if field.annotation is str}
    made = Provenance.model_validate({**texts, "notes": [ODD, LONG], "versions": {ODD: LONG}})
    copied = made.model_copy(update={"model": ODD, "notes": (ODD,) * 2_000})  # copies are not validated
    written = write_trace(tmp_path / "a.zarr", Header(geometry=GEOMETRY, provenance=copied), [ids_only(20)])
    for provenance in (made, written.header.provenance):
        for value in _texts(provenance.model_dump()):
            assert value.isprintable() and value.encode() and len(value) <= MOST_TEXT
        assert len(provenance.model) <= MOST_NAME
    assert len(written.header.provenance.notes) == MOST_NOTES
    assert len(texts) >= 8
    with TraceWriter.create(tmp_path / "b.zarr", written.header.model_copy(update={"provenance": copied})) as writer:
        writer.append(ids_only(20))
    with TraceWriter.resume(tmp_path / "b.zarr", Header(geometry=GEOMETRY, provenance=copied)) as writer:
        assert writer.finish().header == written.header


def _texts(document: object) -> list[str]:
    if isinstance(document, dict):
        return [text for pair in document.items() for each in pair for text in _texts(each)]
    if isinstance(document, list | tuple):
        return [text for each in document for text in _texts(each)]
    return [document] if isinstance(document, str) else []


def test_a_trace_of_an_older_version_with_such_texts_still_opens(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)])
    file = tmp_path / "a.zarr" / "zarr.json"
    group = json.loads(file.read_text())
    group["attributes"]["header"]["provenance"] |= {"model": ODD, "source": "y" * 10_000, "notes": [ODD]}
    group["attributes"]["digest"] = metadata_digest(tmp_path / "a.zarr", group)
    file.write_text(json.dumps(group))
    opened = open_trace(tmp_path / "a.zarr")
    verify(opened)
    assert opened.digest == group["attributes"]["digest"] != trace.digest
    assert opened.header.provenance.model == settled(ODD, MOST_NAME)
    assert opened.header.provenance.source == "y" * (MOST_TEXT - len(CUT)) + CUT


CSV = '# {{"moereplay": {{"model": {}, "layers": 1, "experts": 2, "k": 1, "expert_bytes": [1000000]}}}}\n'
ROWS = "request,token,layer,expert_0,phase\n" + "".join(f"0,{t},0,{t % 2},1\n" for t in range(8))


@pytest.mark.parametrize("model", [ODD, LONG, "a\ud800b"], ids=["controls", "long", "surrogate"])
def test_an_import_keeps_a_settled_name_and_says_so(model: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV.format(json.dumps(model)) + ROWS)
    ended = moereplay("import", "a.csv", "--out", "a.zarr", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "note: the model of the file is kept as" in ended.stderr
    assert all(line.isprintable() and len(line) < 1000 for line in ended.stderr.splitlines())
    assert open_trace(tmp_path / "a.zarr").header.provenance.model == settled(model, MOST_NAME)


def test_a_spreadsheet_takes_no_cell_for_a_formula() -> None:
    for text in ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"]:
        assert in_csv(text) == f"'{escaped(text)}"


def test_numbers_and_names_stay_as_they_are() -> None:
    for text in ["-5", "+5", "-1.5e-07", "1,000", "-12.5%", "-", "lru", "a=b", "", "-inf"]:
        assert in_csv(text) == text


def test_markdown_has_no_link_table_or_html_of_others() -> None:
    assert in_markdown("a|b [x](http://y) <img> `c` *d*\n") == r"a\|b \[x\](http://y) &lt;img> \`c\` \*d\*\\n"


# -- Numbers in sentences have sensible digits whatever their size, and never an exponent.


def test_percent():
    for share, text in [
        (2.3, "230%"),
        (23.456, "2,346%"),
        (0.128, "13%"),
        (0.0994, "9.9%"),
        (0.0996, "10%"),
        (0.0664, "6.6%"),
        (0.0041, "0.41%"),
        (0.0001, "0.01%"),
        (5.7e-7, "<0.01%"),
        (0.0, "0%"),
        (-0.2, "-20%"),
    ]:
        assert percent(share) == text


def test_a_change_in_percent_has_its_sign_and_what_is_nothing_has_none():
    for share, text in [(0.5, "+50%"), (-0.031, "-3.1%"), (1e-9, "0%"), (-1e-9, "0%")]:
        assert percent(share, signed=True) == text


def test_sizes_rates_and_times_have_the_unit_that_fits():
    assert [size(each) for each in (0, 28, 999.9, 1536, 5e6, 32.38e9, 2.148e12)] == [
        *("0 B", "28 B", "1 kB", "1.54 kB", "5 MB", "32.4 GB", "2.15 TB"),
    ]
    assert rate(4.2e9) == "4.2 GB/s"
    assert [duration(each) for each in (0.4, 12, 45_600, 187_000_000, 4.5e9)] == [
        *("0.4 ns", "12 ns", "45.6 us", "187 ms", "4.5 s"),
    ]
    assert points(0.12) == "12 points" and points(5e-8) == "<0.01 points"


def test_no_number_has_an_exponent_and_each_says_what_it_is_of():
    dice = random.Random(0)
    for _ in range(2000):
        value = dice.choice((-1, 1)) * 10 ** dice.uniform(-15, 15)
        for text in (percent(value), percent(value, True), points(value), size(value), duration(value)):
            assert "e" not in text.removesuffix("points") and "inf" not in text, (value, text)
        assert float(digits(value, 4).replace(",", "")) == pytest.approx(value, rel=5e-4)
