"""Traces made of traces hold what the same requests hold when they are written in one go, down to the digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.traces import combine, growing
from moereplay.traces.combine import appended, content_digest, merged, taken
from moereplay.traces.pieces import Piece, pieces
from moereplay.traces.schema import Header, Provenance, Request, RowError, Trace, TraceError, memory_trace
from moereplay.traces.selection import drawn, listed, runs, spaced
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.collecting import case
from tests.kit.stored import BIAS, HEADER, LAYERS, PLAIN, assert_holds, everything, ids_only

TOKENS = (9, 1, 30, 17, 40)
LENGTHS = st.lists(st.integers(1, 40), min_size=2, max_size=7)


def requests_of(lengths: tuple[int, ...] | list[int] = TOKENS) -> list[Request]:
    return [ids_only(tokens, seed) for seed, tokens in enumerate(lengths)]


def stored(path: Path, requests: list[Request], header: Header = PLAIN, bias: np.ndarray | None = None) -> Trace:
    return write_trace(path, header, requests, bias)


def rewritten(path: Path, trace: Trace, requests: list[Request]) -> Trace:
    """Write the same requests under the same header, request by request."""
    return write_trace(path, trace.header, requests, trace.router_bias)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 tokens of ids: most requests are longer than a piece, or end within one."""
    monkeypatch.setattr(growing, "SHARD_TOKENS", 1)
    monkeypatch.setattr(growing, "VALUES_AT_ONCE", 16 * LAYERS * 2)


# pieces


@given(LENGTHS, st.data())
def test_pieces_are_the_rows_of_whole_requests_or_of_one(lengths: list[int], data: st.DataObject) -> None:
    trace = memory_trace(PLAIN, requests_of(lengths))
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    found = list(pieces(trace, first, last, ["chosen"]))
    begin, end = trace.request_offsets[first], trace.request_offsets[last]
    rows = np.concatenate([piece.arrays["chosen"] for piece in found])
    np.testing.assert_array_equal(rows, np.concatenate([each.chosen for each in requests_of(lengths)])[begin:end])
    assert [n for piece in found for n in piece.lengths.tolist()] == lengths[first:last]
    assert max(piece.tokens for piece in found) <= 16
    waiting = 0
    for piece in found:
        waiting += piece.tokens
        assert not len(piece.lengths) or waiting == piece.lengths.sum()
        waiting = 0 if len(piece.lengths) else waiting


#: Lengths of requests, their prompts, the shape of the ids; what is said.
BAD_PIECES = (
    (([9], [3], (10, LAYERS, 2)), "request 0: 10 tokens came for requests of 9"),
    (([10], [11], (10, LAYERS, 2)), "request 0: a prompt is longer than its request"),
    (([10, 0], [0, 0], (10, LAYERS, 2)), "request 0: 2 requests with 2 prompts; each needs a token"),
    (([10], [0, 0], (10, LAYERS, 2)), "request 0: 1 requests with 2 prompts"),
    (([], [], (10, LAYERS, 3)), r"request 0: chosen has shape \(10, 3, 3\), expected \(10, 3, 2\)"),
    (([], [], (0, LAYERS, 2)), "request 0: 0 tokens came for requests of 0"),
)


def test_a_piece_that_does_not_fit_is_refused_and_adds_nothing(tmp_path: Path) -> None:
    good = requests_of()[0]
    with TraceWriter.create(tmp_path / "a.zarr", PLAIN) as writer:
        for (lengths, prompts, shape), said in BAD_PIECES:
            chosen = np.broadcast_to(np.arange(shape[-1], dtype=np.int16), shape)
            piece = Piece({"chosen": chosen}, np.array(lengths, np.int64), np.array(prompts, np.int64))
            with case(lengths, prompts, shape), pytest.raises(RowError, match=said):
                writer.append_piece(piece)
        writer.append(good)
        assert_holds(writer.finish(), [good])


def test_a_request_without_an_end_is_not_committed(tmp_path: Path) -> None:
    begun = Piece({"chosen": requests_of()[2].chosen}, np.zeros(0, np.int64), np.zeros(0, np.int64))
    with pytest.raises(TraceError, match="request 1 is incomplete"):  # noqa: SIM117
        with TraceWriter.create(tmp_path / "a.zarr", PLAIN, shard_tokens=8) as writer:
            writer.append(requests_of()[0])
            writer.append_piece(begun)
            writer.finish()
    assert_holds(open_trace(tmp_path / "a.zarr.partial"), requests_of()[:1])
    assert_holds(write_trace(tmp_path / "a.zarr", PLAIN, requests_of(), resume=True), requests_of())


# merge, slice, sample


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(LENGTHS, st.data())
def test_slices_that_are_merged_are_the_whole(lengths: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1), max_size=3)))
    edges = [0, *cuts, len(lengths)]
    with TemporaryDirectory() as name:
        folder, requests = Path(name), requests_of(lengths)
        whole = stored(folder / "whole.zarr", requests)
        parts = [
            taken(folder / f"{first}.zarr", whole, range(first, last), f"requests {first}:{last}")
            for first, last in pairwise(edges)
        ]
        again, left_out = merged(folder / "again.zarr", parts)
        assert (content_digest(again), left_out) == (content_digest(whole), [])
        assert again.array_digests == whole.array_digests
        assert again.digest == rewritten(folder / "same.zarr", again, requests).digest
        grown, _ = appended(parts[0].path or "", parts[1:]) if len(parts) > 1 else (again, [])
        assert grown.digest == again.digest
        verify(grown)


@pytest.mark.slow
def test_every_array_is_copied_and_the_bias(tmp_path: Path) -> None:
    requests = [everything(tokens, tokens) for tokens in (9, 1, 20, 17, 3)]
    whole = stored(tmp_path / "whole.zarr", requests, HEADER, BIAS)
    some = taken(tmp_path / "some.zarr", whole, [4, 0, 1], "requests 4,0,1")
    assert_holds(some, [requests[at] for at in (4, 0, 1)])
    rest = taken(tmp_path / "rest.zarr", whole, [2, 3], "requests 2:4")
    both, _ = merged(tmp_path / "both.zarr", [some, rest])
    assert_holds(both, [requests[at] for at in (4, 0, 1, 2, 3)])
    np.testing.assert_array_equal(both.router_bias, BIAS)
    assert appended(tmp_path / "some.zarr", [rest])[0].digest == both.digest
    verify(both)


def test_in_steps_or_at_once_gives_the_same_bytes(tmp_path: Path) -> None:
    traces = [stored(tmp_path / f"{at}.zarr", requests_of()[at : at + 1]) for at in range(3)]
    at_once, _ = merged(tmp_path / "abc.zarr", traces)
    first, _ = merged(tmp_path / "ab.zarr", traces[:2])
    in_steps, _ = merged(tmp_path / "ab-c.zarr", [first, traces[2]])
    assert in_steps.digest == at_once.digest
    for trace in traces[1:]:
        appended(tmp_path / "0.zarr", [trace])
    assert open_trace(tmp_path / "0.zarr").digest == at_once.digest


def test_provenance_lists_every_source(tmp_path: Path) -> None:
    headers = [
        PLAIN.model_copy(update={"provenance": Provenance(model="toy", seed=seed, notes=("made up", f"seed {seed}"))})
        for seed in (1, 2)
    ]
    traces = [stored(tmp_path / f"{at}.zarr", requests_of()[:2], header) for at, header in enumerate(headers)]
    both, _ = merged(tmp_path / "both.zarr", traces)
    said = both.header.provenance
    assert (said.model, said.seed, said.importer, said.source) == ("toy", None, "merge", "2 traces")
    assert said.notes[:3] == ("made up", "seed 1", "seed 2")
    assert [note.split()[1].rstrip(":") for note in said.notes[3:]] == [trace.digest for trace in traces]
    part = taken(tmp_path / "part.zarr", both, [0], "requests 0")
    assert part.header.provenance.notes[-1] == f"requests 0 of {both.digest}"
    again, _ = merged(tmp_path / "again.zarr", [part, both])
    assert [note for note in again.header.provenance.notes if note.startswith(f"part {part.digest}")]


def test_a_trace_may_be_merged_with_and_appended_to_itself(tmp_path: Path) -> None:
    trace = stored(tmp_path / "a.zarr", requests_of())
    twice, _ = merged(tmp_path / "twice.zarr", [trace, trace])
    assert_holds(twice, requests_of() * 2)
    assert appended(tmp_path / "a.zarr", [trace])[0].digest == twice.digest


# what differs


def test_arrays_that_not_all_have_are_left_out_and_said(tmp_path: Path) -> None:
    rich, poor = everything(20), replace(everything(9), logits=None, lookahead=(), nll=None)
    flat = HEADER.model_copy(update={"lookahead_depth": 0})
    traces = [stored(tmp_path / "rich.zarr", [rich], HEADER), stored(tmp_path / "poor.zarr", [poor], flat)]
    both, left_out = merged(tmp_path / "both.zarr", traces)
    lacks = f"which {tmp_path}/poor.zarr lacks"
    assert left_out == [f"{name}, {lacks}" for name in ("logits", "lookahead/1", "lookahead/2", "nll")]
    stripped = [replace(each, logits=None, lookahead=(), nll=None) for each in (rich, poor)]
    assert_holds(both, stripped)
    assert appended(tmp_path / "poor.zarr", [traces[0]])[1] == left_out
    before = traces[0].digest
    with pytest.raises(
        TraceError, match=r"rich.zarr has logits, which .*poor.zarr lacks; use `moereplay traces merge`"
    ):
        appended(tmp_path / "rich.zarr", [traces[1]])
    assert open_trace(tmp_path / "rich.zarr").digest == before


def test_look_ahead_of_another_kind_is_left_out(tmp_path: Path) -> None:
    other = HEADER.model_copy(update={"lookahead_input": "gate_input"})
    traces = [stored(tmp_path / f"{at}.zarr", [everything(5)], header) for at, header in enumerate((HEADER, other))]
    both, left_out = merged(tmp_path / "both.zarr", traces)
    assert both.header.lookahead_depth == 0
    assert left_out[0] == f"lookahead/1, which {tmp_path}/1.zarr (gate_input) lacks"


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    for at, (changed, said) in enumerate(
        [
            ({"experts": 16}, "geometry.experts is 16, that of"),
            ({"expert_bytes": (7,) * 3}, "geometry.expert_bytes is 7 in every layer, that of"),
            ({"expert_bytes": (1, 2, 3)}, r"geometry.expert_bytes is \[1, 2, 3\]"),
            ({"router": {"family": "topk_softmax"}}, r"geometry.router is .*topk_softmax"),
        ]
    ):
        folder = tmp_path / str(at)
        folder.mkdir()
        with case(changed, said):
            geometry = PLAIN.geometry.model_validate(PLAIN.geometry.model_dump() | changed)
            ours = stored(folder / "ours.zarr", requests_of())
            theirs = stored(folder / "theirs.zarr", requests_of(), Header(geometry=geometry))
            with pytest.raises(TraceError, match=rf"theirs.zarr: {said}"):
                merged(folder / "out.zarr", [ours, theirs])
            with pytest.raises(TraceError, match=rf"theirs.zarr: {said}"):
                appended(ours.path or "", [theirs])
            assert {path.name for path in folder.iterdir()} == {"ours.zarr", "theirs.zarr"}


def test_another_bias_is_refused(tmp_path: Path) -> None:
    ours, theirs = (stored(tmp_path / f"{n}.zarr", requests_of(), PLAIN, bias) for n, bias in enumerate((BIAS, None)))
    with pytest.raises(TraceError, match=r"1.zarr: router_bias differs from that of .*0.zarr"):
        merged(tmp_path / "out.zarr", [ours, theirs])


# faults


def damage(path: Path) -> None:
    """A flipped byte in the last file of the ids."""
    file = max((path / "chosen").glob("c.*"), key=lambda found: int(found.name.split(".")[1]))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0x40
    file.write_bytes(content)


def long_ones(folder: Path, name: str, seed: int) -> Trace:
    """Several shards."""
    return stored(folder / name, [ids_only(300, seed + at) for at in range(6)])


def test_of_a_damaged_source_nothing_is_made(tmp_path: Path) -> None:
    good, bad = long_ones(tmp_path, "good.zarr", 0), long_ones(tmp_path, "bad.zarr", 10)
    damage(tmp_path / "bad.zarr")
    for make in (lambda: merged(tmp_path / "out.zarr", [good, bad]), lambda: taken(tmp_path / "o.zarr", bad, [5], "5")):
        with pytest.raises(TraceError, match=r"bad.zarr: chosen rows .* are damaged"):
            make()
        assert {path.name for path in tmp_path.iterdir()} == {"good.zarr", "bad.zarr"}


def test_appending_a_damaged_trace_leaves_the_first_as_it_was(tmp_path: Path) -> None:
    good, bad = long_ones(tmp_path, "good.zarr", 0), long_ones(tmp_path, "bad.zarr", 10)
    files = {path.relative_to(tmp_path) for path in (tmp_path / "good.zarr").rglob("*")}
    damage(tmp_path / "bad.zarr")
    with pytest.raises(TraceError, match=r"bad.zarr: chosen rows .* are damaged"):
        appended(tmp_path / "good.zarr", [bad])
    assert {path.relative_to(tmp_path) for path in (tmp_path / "good.zarr").rglob("*")} == files
    verify(open_trace(tmp_path / "good.zarr"))
    assert open_trace(tmp_path / "good.zarr").digest == good.digest


def test_a_damaged_trace_is_not_appended_to(tmp_path: Path) -> None:
    good = long_ones(tmp_path, "good.zarr", 0)
    long_ones(tmp_path, "bad.zarr", 10)
    damage(tmp_path / "bad.zarr")
    with pytest.raises(TraceError, match=r"bad.zarr: chosen rows .* are damaged"):
        appended(tmp_path / "bad.zarr", [good])
    assert not list(tmp_path.glob("*.lock"))


def test_a_trace_that_is_being_written_is_not_appended_to(tmp_path: Path) -> None:
    trace = stored(tmp_path / "a.zarr", requests_of())
    with (
        TraceWriter.reopen(tmp_path / "a.zarr", trace.header, trace.digest),
        pytest.raises(TraceError, match="is being written by process"),
    ):
        appended(tmp_path / "a.zarr", [trace])
    with pytest.raises(TraceError, match="changed by another process"):
        TraceWriter.reopen(tmp_path / "a.zarr", trace.header, "another")


# selections


def test_requests_are_named_by_number_and_range() -> None:
    assert listed("1,5,9", 10) == [1, 5, 9]
    assert listed("10:13", 20) == [10, 11, 12]
    assert listed(":2, 7:,4", 9) == [0, 1, 7, 8, 4]


def test_other_texts_are_refused() -> None:
    for text, said in [
        ("", "expected a list of requests"),
        ("a", "expected a list of requests"),
        ("1:2:3", "expected a list of requests"),
        ("-1", "expected a list of requests"),
        ("٣", "expected a list of requests"),
        ("9" * 40, "expected a list of requests"),
        ("10", "has requests 0 to 9"),
        ("3:3", "has requests 0 to 9"),
        ("0:11", "has requests 0 to 9"),
        ("1,0:3", "request 1 twice"),
    ]:
        with case(text, said), pytest.raises(TraceError, match=said):
            listed(text, 10)


def test_a_merge_that_was_cut_off_goes_on_after_the_requests_that_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [write_trace(tmp_path / f"{name}.zarr", PLAIN, [ids_only(9, seed)]) for seed, name in enumerate("ab")]
    whole, _ = merged(tmp_path / "whole.zarr", sources)

    def cut_off(trace: Trace, first: int, last: int, names: Sequence[str]) -> Iterator[Piece]:
        if trace.path != sources[0].path:
            raise KeyboardInterrupt
        yield from pieces(trace, first, last, names)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(combine, "begun", lambda *given: TraceWriter.create(*given[:3], shard_tokens=8))
        patch.setattr(combine, "pieces", cut_off)
        merged(tmp_path / "out.zarr", sources, resume=True)
    assert open_trace(tmp_path / "out.zarr.partial").requests == 1
    done, _ = merged(tmp_path / "out.zarr", sources, resume=True)
    assert content_digest(done) == content_digest(whole)


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 3))
def test_samples_have_so_many_requests_in_order(count: int, requests: int, seed: int) -> None:
    if count > requests:
        with pytest.raises(TraceError, match=f"expected 1 to {requests}"):
            spaced(count, requests)
        return
    even, random = spaced(count, requests), drawn(count, requests, seed)
    assert random == drawn(count, requests, seed)
    for found in (even, random):
        assert len(set(found)) == count and found == sorted(found) and found[0] >= 0 and found[-1] < requests
    assert set(np.diff([*even, requests])) <= {requests // count, -(-requests // count)}


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_runs_are_the_numbers(numbers: list[int]) -> None:
    found = list(runs(numbers))
    assert [number for first, last in found for number in range(first, last)] == numbers
    assert all(last != first for (_, last), (first, _) in pairwise(found))
