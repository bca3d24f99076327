"""Texts and numbers that others wrote: what headers keep of them, what is refused, and what people get to read."""

from __future__ import annotations

import json
import random
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moereplay.simulator.config import ReplayConfig
from moereplay.simulator.platform import Link, Measured, Platform, Roofline
from moereplay.traces.documents import MOST_NOTES, DocumentError, Frozen, first_fault, from_json, json_text
from moereplay.traces.schema import Geometry, Header, Provenance
from moereplay.traces.store import open_trace, verify
from moereplay.traces.stored import metadata_digest
from moereplay.traces.texts import (
    CUT,
    MOST_NAME,
    MOST_TEXT,
    digits,
    escaped,
    escaped_lines,
    in_csv,
    in_markdown,
    percent,
    points,
    rate,
    settled,
    shown,
    size,
)
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.collecting import case
from tests.kit.command import moereplay_here
from tests.kit.command import moereplay_here as moereplay
from tests.kit.every import every
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


@pytest.mark.slow
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


def test_sizes_and_rates_have_the_unit_that_fits():
    assert [size(each) for each in (0, 28, 999.9, 1536, 5e6, 32.38e9, 2.148e12)] == [
        *("0 B", "28 B", "1 kB", "1.54 kB", "5 MB", "32.4 GB", "2.15 TB"),
    ]
    assert rate(4.2e9) == "4.2 GB/s"
    assert points(0.12) == "12 points" and points(5e-8) == "<0.01 points"


def test_no_number_has_an_exponent_and_each_says_what_it_is_of():
    dice = random.Random(0)
    for _ in range(2000):
        value = dice.choice((-1, 1)) * 10 ** dice.uniform(-15, 15)
        for text in (percent(value), percent(value, True), points(value), size(value)):
            assert "e" not in text.removesuffix("points") and "inf" not in text, (value, text)
        assert float(digits(value, 4).replace(",", "")) == pytest.approx(value, rel=5e-4)


SIZES = {"layers": 1, "experts": 4, "k": 2, "expert_bytes": (8,)}


class Several(Frozen):
    """Fields of each kind."""

    count: int = 0
    rate: float | None = None
    flag: bool = False
    either: bool | int = 0
    pairs: tuple[tuple[int, float], ...] = ()
    by_name: dict[str, float] = {}
    texts: tuple[str, ...] = ()


def test_what_is_no_finite_number_is_refused_by_its_field():
    for said in [
        {"count": True},
        {"rate": False},
        {"pairs": [[True, 1.0]]},
        {"pairs": [[1, "2"]]},
        {"by_name": {"a": True}},
        {"rate": inf},
        {"rate": -inf},
        {"rate": nan},
        {"rate": "1e400"},
        {"pairs": [[1, inf]]},
        {"by_name": {"a": nan}},
    ]:
        with case(said):
            with pytest.raises(ValidationError) as refused:
                Several.model_validate(said)
            assert first_fault(refused.value).startswith(next(iter(said)))


def test_numbers_flags_and_the_texts_of_options_are_taken():
    for said in [
        {"flag": True},
        {"either": True},
        {"count": "7"},
        {"rate": "2.5e9"},
        {"by_name": {"a": "3"}},
        {"texts": ["1"]},
        {"rate": 1},
        {"pairs": [[1, 2]]},
    ]:
        assert Several.model_validate(said) != Several()


def test_machines_settings_and_models_hold_to_it():
    for model, said, field in [
        (Link, {"bytes_per_s": True}, "bytes_per_s"),
        (Link, {"bytes_per_s": 1e9, "latency_ns": True}, "latency_ns"),
        (Link, {"bytes_per_s": inf}, "bytes_per_s"),
        (Link, {"bytes_per_s": 1e300}, "bytes_per_s"),
        (Link, {"bytes_per_s": 1e9, "by_size": [[True, 1e9]]}, "by_size"),
        (Roofline, {"flops": inf, "memory_bytes_per_s": 1e9}, "flops"),
        (Roofline, {"flops": 1e9, "memory_bytes_per_s": 1e9, "formats": {"Q4_K": True}}, "formats"),
        (Measured, {"expert_by_size": [[1, 1e300]]}, "expert_by_size"),
        (Platform, {"name": "m", "links": [{"bytes_per_s": 1}], "compute": Measured(), "memory_bytes": 1e300}, "memo"),
        (ReplayConfig, {"warm": [["0", "1"]]}, "warm"),
        (ReplayConfig, {"warm": [[True, False]]}, "warm"),
        (ReplayConfig, {"seed": True}, "seed"),
        (Geometry, {**SIZES, "experts": True}, "experts"),
        (Geometry, {**SIZES, "expert_bytes": ["8"]}, "expert_bytes"),
    ]:
        with case(model, said, field):
            with pytest.raises(ValidationError) as refused:
                model.model_validate(said)
            assert field in first_fault(refused.value)


def test_json_has_null_for_what_it_lacks():
    document = {"a": [1, inf, (nan, 2.5)], "b": {"c": -inf}, "d": "Infinity"}
    assert json.loads(json_text(document)) == {"a": [1, None, [None, 2.5]], "b": {"c": None}, "d": "Infinity"}
    assert json_text({"b": 1, "a": 2}, sort_keys=True, separators=(",", ":")) == '{"a":2,"b":1}'


def test_json_with_numbers_that_json_lacks_is_refused():
    for text in ['{"a": Infinity}', "[NaN]", "[-Infinity]", "[1e400]", '{"a": [[-1e999]]}']:
        with case(text), pytest.raises(DocumentError, match="finite"):
            from_json(text)


def test_what_is_no_json_from_its_beginning_on_is_quoted():
    for text, found in {" <html>log in": "'<html>log in'", "": "''"}.items():
        with case(text), pytest.raises(DocumentError, match=f"^expected JSON, found {found}$"):
            from_json(text)
    with pytest.raises(DocumentError, match="char 6"):  # a fault within a document keeps its place
        from_json('{"a": }')


def test_an_option_that_is_no_finite_number_is_named():
    for typed in [
        "calibrate logs log.csv --hold-out nan",
        "recommend miniature --target-tokens-per-s inf",
        "bounds miniature --mass nan",
        "validate miniature --tolerance-time inf",
        "split miniature --out x.zarr --share inf",
    ]:
        ended = moereplay_here(*typed.split())
        assert (ended.returncode, ended.stdout) == (2, "") and typed.split()[-2] in ended.stderr


@every(
    "address, said",
    [
        ("s3://KEY:SEC/RET+x@bucket/runs", "s3://***@bucket/runs"),  # a key of S3 may have slashes
        ("https://token@host/a?b=1", "https://***@host/a?b=1"),
        ("see https://u:p@h/a; or ray://u:p@h:1", "see https://***@h/a; or ray://***@h:1"),
        (
            "https://h/x?X-Amz-Signature=1&X-Amz-Credential=A%2F&y=2",
            "https://h/x?X-Amz-Signature=***&X-Amz-Credential=***&y=2",
        ),
        ("az://a/b?sv=1&sig=z'", "az://a/b?sv=1&sig=***'"),
        ("https://h/x#access_token=1", "https://h/x#access_token=***"),
        ("https://h:80/a@b?tab=x", "https://h:80/a@b?tab=x"),  # a port, and no password
        ("a:b@c?token=1", "a:b@c?token=1"),  # no address
    ],
)
def test_no_text_that_is_shown_or_kept_has_a_password(address: str, said: str) -> None:
    assert [escaped(address), shown(address, 200), settled(address), escaped_lines(f"{address}\n")] == [said] * 3 + [
        f"{said}\n"
    ]
    assert "RET" not in shown("s3://KEY:SEC/RET@bucket/" + "x" * 100, 14)
