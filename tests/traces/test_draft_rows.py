"""A record of drafts: stored, read, cut and combined with its trace, and refused where its parts do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.analysis.inspection import render as inspected
from moereplay.traces.combine import appended, merged, taken
from moereplay.traces.drafts import verified_of
from moereplay.traces.library import publish
from moereplay.traces.schema import Request, Trace, TraceError, memory_trace
from moereplay.traces.selection import first_requests, shortened
from moereplay.traces.store import open_trace, verify
from moereplay.traces.summary import summarise
from moereplay.traces.values import verified
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.every import every
from tests.kit.stored import BIAS, HEADER, PLAIN, assert_holds, drafted, everything, ids_only

LENGTHS = (40, 1, 23, 9)


def requests(lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    return [drafted(everything(tokens, tokens), tokens) for tokens in lengths]


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return write_trace(tmp_path / "a.zarr", HEADER, requests(), BIAS)


def passes(request: Request) -> list[tuple[int, int, int]]:
    """Token, accepted and rejected drafts of each pass, by a plain loop."""
    assert request.drafts is not None
    found: list[list[int]] = []
    for token, many in enumerate(request.drafts.tolist()):
        if many < 0:
            found[-1][1] += 1
            found[-1][2] -= 1
        else:
            found.append([token, 0, many])
    return [(token, right, wrong) for token, right, wrong in found]


def test_it_comes_back_and_belongs_to_the_passes_of_a_plain_loop(trace):
    assert_holds(trace, requests())
    verify(trace)
    known, rejected = verified_of(trace), 0
    for number, request in enumerate(requests()):
        begin = int(trace.request_offsets[number])
        for token, right, wrong in passes(request):
            at = begin + token
            assert (known.many[at], known.right[at], known.first[at]) == (right + wrong, right, rejected)
            rejected += wrong
    assert rejected == trace.rejects > 20
    made = [(right, wrong) for request in requests() for _, right, wrong in passes(request) if right + wrong]
    of = f"{len(made)} decode passes verified {np.sum(made)} drafts of which {sum(right for right, _ in made)} were"
    assert any(of in line for line in inspected(trace, summarise(trace), []))
    plain = memory_trace(PLAIN, [ids_only(8)])
    assert "drafts" not in str(inspected(plain, summarise(plain), [])[:4])
    assert trace.rows == trace.tokens + trace.rejects


def test_a_request_is_read_as_it_was_appended(trace):
    for number, request in enumerate(requests()):
        found = trace.request(number).arrays()
        for name, rows in request.arrays().items():
            np.testing.assert_array_equal(found[name], rows)


def test_a_trace_without_a_record_is_the_same_bytes_as_before(tmp_path):
    """The digest was printed by the program before it knew drafts."""
    trace = write_trace(tmp_path / "a.zarr", HEADER, [everything(40), everything(9)], BIAS)
    assert trace.digest == PLAIN_DIGEST
    assert memory_trace(PLAIN, [ids_only(20)]).digest == PLAIN_IN_MEMORY
    assert "rejected" not in (tmp_path / "a.zarr" / "zarr.json").read_text()


PLAIN_DIGEST = "563a3b3b961c1ddbe575dfe5c06ec9b5f0417ef19a6073d99c6592377aa153cd"
PLAIN_IN_MEMORY = "42c554833eb540b1070a7226ccd2f3fc0aff8ab22f2c5b6876c5bb149478973a"


def test_one_row_more_or_other_drafts_are_another_digest(tmp_path):
    first, *others = requests()
    changed = replace(first, rejected={name: rows[::-1] for name, rows in first.rejected.items()})
    digests = set()
    for number, begin in enumerate((first, changed, drafted(first, seed=9))):
        digests.add(write_trace(tmp_path / f"{number}", HEADER, [begin, *others], BIAS).digest)
        digests.add(memory_trace(HEADER, [begin, *others], BIAS).digest)
    assert len(digests) == 6


def test_a_killed_writer_continues_to_the_same_bytes(tmp_path, trace):
    with TraceWriter.create(tmp_path / "b.zarr", HEADER, BIAS) as writer:
        writer.append(requests()[0])
        writer.commit()
    with TraceWriter.resume(tmp_path / "b.zarr", HEADER, BIAS) as writer:
        assert writer.requests_done == 1
        for request in requests()[1:]:
            writer.append(request)
        assert writer.finish().digest == trace.digest


# -- parts and joins


@pytest.mark.slow
def test_parts_keep_their_rows(tmp_path, trace):
    for listed in ([0], [2, 3], [3, 1, 0]):
        part = taken(tmp_path / f"{listed}.zarr", trace, listed, "some")
        assert_holds(part, [requests()[number] for number in listed])
    begin = first_requests(trace, 3)
    assert_holds(begin, requests()[:3])
    assert begin.request(2).drafts is not None
    np.testing.assert_array_equal(begin.request(2).rejected["logits"], requests()[2].rejected["logits"])


def test_a_request_longer_than_a_piece_is_copied_whole(tmp_path, trace, monkeypatch):
    monkeypatch.setattr("moereplay.traces.pieces.tokens_at_once", lambda values: 4)
    assert_holds(taken(tmp_path / "b.zarr", trace, [0, 2], "some"), [requests()[0], requests()[2]])


@pytest.mark.slow
def test_joins_keep_the_record_if_all_have_one_and_else_name_it(tmp_path, trace):
    other = write_trace(tmp_path / "b.zarr", HEADER, requests((5, 30)), BIAS)
    both, left_out = merged(tmp_path / "c.zarr", [trace, other])
    assert_holds(both, [*requests(), *requests((5, 30))])
    assert left_out == []
    grown, _ = appended(tmp_path / "a.zarr", [other])
    assert_holds(grown, [*requests(), *requests((5, 30))])
    verify(grown)
    plain = write_trace(tmp_path / "d.zarr", HEADER, [everything(7)], BIAS)
    mixed, left_out = merged(tmp_path / "e.zarr", [grown, plain])
    assert [text for text in left_out if text.startswith("drafts, which")]
    assert "drafts" not in mixed.arrays
    assert not mixed.rejects
    with pytest.raises(TraceError, match="drafts"):
        appended(tmp_path / "a.zarr", [plain])


def test_what_one_trace_lacks_is_left_out_of_rejected_rows_too(tmp_path, trace):
    bare = [replace(each, weights=None, rejected=without(each, "weights")) for each in requests((8, 12))]
    other = write_trace(tmp_path / "b.zarr", HEADER, bare, BIAS)
    both, left_out = merged(tmp_path / "c.zarr", [trace, other])
    assert len(left_out) == 1
    assert "weights" not in both.rejected
    verify(both)


def without(request: Request, name: str) -> dict[str, np.ndarray]:
    return {each: rows for each, rows in request.rejected.items() if each != name}


def test_a_library_has_the_rows_without_tokens(tmp_path, trace):
    publish(trace, tmp_path / "library", "a", "CC0-1.0")
    made = open_trace(tmp_path / "library" / "a.zarr")
    verify(made)
    assert made.rejected.keys() == trace.rejected.keys() - {"token_ids"}
    publish(trace, tmp_path / "library", "a", "CC0-1.0")  # again: nothing changes


def test_a_cut_request_keeps_whole_passes(trace):
    """Rows of a pass whose end is cut off lose their rejected drafts, and keep what was accepted before the cut."""
    short = shortened(trace, 30 * 3 * 2)
    assert short.tokens < trace.tokens
    found = short.verified
    assert found is not None
    assert 0 < int((found.many - found.right).sum()) == short.rejects


# -- faults


@every(
    "at, value, expected",
    [
        (0, 1, "drafts[0] is 1 (token 0): expected 0 in a prompt"),
        (1, -1, "drafts[1] is -1 (token 1): expected 0 or more where a prompt"),
        (2, 3, "drafts tell of 5 rejected rows: expected 4"),
        (2, 1, "drafts tell of 3 rejected rows: expected 4"),
        (4, 0, "drafts[4] is 0 (token 4): expected as many drafts as the accepted ones that follow"),
        (1, 256, "drafts[1] is 256: expected a whole number from -1 to 255"),
    ],
)
def test_drafts_that_contradict_each_other_are_refused_by_the_writer(at, value, expected, tmp_path):
    request = ids_only(7)
    drafts = np.array([0, 1, 2, 0, 3, -1, -1], np.int16)
    good = replace(request, prompt_length=1, drafts=drafts, rejected={"chosen": request.chosen[:4]})
    assert memory_trace(PLAIN, [good]).rejects == 4
    wrong = drafts.copy()
    wrong[at] = value
    for make in (lambda each: memory_trace(PLAIN, [each]), lambda each: write_trace(tmp_path / "a", PLAIN, [each])):
        with pytest.raises(TraceError) as refused:
            make(replace(good, drafts=wrong))
        assert str(refused.value).startswith(f"request 0: {expected}")


@every(
    "change, expected",
    [
        ({"rejected": {}}, "draft/chosen: expected rows of rejected drafts"),
        ({"drafts": None}, "draft/chosen: expected rows of rejected drafts"),
        ({"drafts": np.zeros(6, np.int16)}, "drafts has shape (6,), expected (7,)"),
        ({"drafts": np.zeros(7)}, "drafts is an array of float64: expected whole numbers"),
        ({"rejected": {"chosen": np.zeros((4, 3, 5), int)}}, "draft/chosen has shape (4, 3, 5), expected (4, 3, 2)"),
        ({"rejected": {"chosen": np.full((4, 3, 2), 8)}}, "draft/chosen[0, 0, 0] is 8 (rejected draft 0, layer 0)"),
        ({"rejected": {"chosen": np.zeros((4, 3, 2), int)}}, "draft/chosen[0, 0] repeats an expert: [0, 0] (rejected"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change: dict[str, Any], expected: str):
    request, drafts = ids_only(7), np.array([0, 1, 2, 0, 3, -1, -1], np.int16)
    good = replace(request, prompt_length=1, drafts=drafts, rejected={"chosen": request.chosen[:4]})
    with pytest.raises(TraceError) as refused:
        memory_trace(PLAIN, [replace(good, **change)])
    assert str(refused.value).startswith(f"request 0: {expected}")


@pytest.mark.parametrize("name", ["chosen", "logits", "lookahead/2", "token_ids"])
def test_flipped_bytes_of_rejected_rows_are_found(name, trace):
    assert trace.path is not None
    (file, *_) = sorted((trace.path / "draft" / name).glob("c.*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 255
    file.write_bytes(bytes(content))
    with pytest.raises(TraceError, match=f"draft/{name}"):
        verify(open_trace(trace.path))


@pytest.mark.parametrize("damage", ["gone", "count", "unlisted", "array"])
def test_a_store_with_a_part_missing_is_refused(damage, trace):
    assert trace.path is not None
    group = trace.path / "zarr.json"
    document = json.loads(group.read_text())
    attributes = document["attributes"]
    if damage == "gone":
        shutil.rmtree(trace.path / "draft" / "logits")
    elif damage == "count":
        attributes["committed"]["rejected"] -= 1
    elif damage == "unlisted":
        del attributes["arrays"]["draft/logits"]
    else:
        del attributes["arrays"]["drafts"]
    group.write_text(json.dumps(document))
    with pytest.raises(TraceError):
        open_trace(trace.path)


def test_a_forged_count_with_a_valid_digest_is_found_where_drafts_are_read(trace):
    """A hostile store: everything hashed again, but the passes tell of another number of rows."""
    from moereplay.traces.stored import metadata_digest

    assert trace.path is not None
    document = json.loads((trace.path / "zarr.json").read_text())
    document["attributes"]["committed"]["rejected"] -= 1
    document["attributes"]["digest"] = metadata_digest(trace.path, document)
    (trace.path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(TraceError, match="drafts tell of"):
        verified_of(open_trace(trace.path))


def test_verified_by_hand():
    """One request of a prompt of 2; token 2 with 3 drafts, of which one is right; token 4 with none."""
    found = verified(np.array([0, 0, 3, -1, 0]), np.array([0, 5]), np.array([2]), 2)
    assert found.many.tolist() == [0, 0, 3, 0, 0]
    assert found.right.tolist() == [0, 0, 1, 0, 0]
    assert found.first.tolist() == [0, 0, 0, -1, 2]
    assert found.span(2, 5)[1] == slice(0, 2)
    drafts, rows = found.span(2, 3)
    assert (drafts.tolist(), rows) == ([0], slice(0, 0))
