"""Stored rows are read back, invalid ones are refused, and unfinished stores can be continued."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from moereplay.traces.schema import Geometry, Header, Provenance, Request, TraceError
from moereplay.traces.store import open_trace, verify
from moereplay.traces.writer import TraceWriter, write_trace
from tests.kit.collecting import case
from tests.kit.every import every
from tests.kit.stored import (
    BIAS,
    EXPERTS,
    GEOMETRY,
    HEADER,
    LAYERS,
    PLAIN,
    assert_holds,
    commit_some,
    everything,
    ids_only,
)

ROOT = Path(__file__).resolve().parents[2]


def with_value(request: Request, name: str, at: tuple[int, ...], value: float) -> Request:
    rows = getattr(request, name).copy()
    rows[at] = value
    return replace(request, **{name: rows})


# Round trip


def test_every_array_comes_back_with_header_and_ranges(tmp_path):
    requests = [everything(tokens, tokens) for tokens in (40, 1, 23)]
    trace = write_trace(tmp_path / "a.zarr", HEADER, requests, BIAS)
    assert_holds(trace, requests)
    assert len(trace.arrays) == len(fields(Request)) - 4 + 2  # one each, two depths for lookahead; no drafts
    assert trace.header == HEADER
    assert trace.request_offsets.tolist() == [0, 40, 41, 64]
    assert trace.prompt_lengths.tolist() == [1, 1, 1]
    np.testing.assert_array_equal(trace.router_bias, BIAS)
    assert trace.complete
    verify(trace)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zarr"]


def test_slices_across_shards_read_the_right_rows(tmp_path):
    requests = [ids_only(30, seed) for seed in range(4)]  # 120 tokens in shards of 16
    with TraceWriter.create(tmp_path / "a.zarr", PLAIN, shard_tokens=16) as writer:
        for request in requests:
            writer.append(request)
        trace = writer.finish()
    whole = np.concatenate([request.chosen for request in requests])
    for start, stop in ((0, 120), (15, 17), (47, 48), (119, 500), (60, 60)):
        np.testing.assert_array_equal(trace.read("chosen", start, stop), whole[start:stop])


def test_rows_of_zeros_are_stored_too(tmp_path):
    request = replace(ids_only(20), logits=np.zeros((20, LAYERS, EXPERTS)))
    trace = write_trace(tmp_path / "a.zarr", PLAIN, [request])
    assert not trace.read("logits").any()
    verify(trace)


def test_same_input_gives_identical_files(tmp_path):
    for name in ("a", "b"):
        write_trace(tmp_path / name, HEADER, [everything(40), everything(9)], BIAS)
    first = {file.relative_to(tmp_path / "a"): file.read_bytes() for file in (tmp_path / "a").rglob("*.*")}
    second = {file.relative_to(tmp_path / "b"): file.read_bytes() for file in (tmp_path / "b").rglob("*.*")}
    assert len(first) > 20
    assert first == second


def test_digest_tells_rows_and_headers_apart(tmp_path):
    requests = [ids_only(20)]
    digests = {
        write_trace(tmp_path / "a", PLAIN, requests).digest,
        write_trace(tmp_path / "b", PLAIN, [ids_only(20, seed=1)]).digest,
        write_trace(tmp_path / "c", Header(geometry=GEOMETRY, provenance=Provenance(seed=1)), requests).digest,
        write_trace(tmp_path / "d", PLAIN, requests, BIAS).digest,
        write_trace(tmp_path / "e", PLAIN, [replace(requests[0], prompt_length=3)]).digest,
    }
    assert len(digests) == 5


def test_an_array_that_was_not_recorded_is_named(tmp_path):
    trace = write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)])
    with pytest.raises(TraceError, match=r"has no logits; it holds chosen"):
        trace.read("logits")


def test_a_recorder_may_reuse_its_arrays(tmp_path):
    request = replace(ids_only(20), chosen=ids_only(20).chosen.astype("<i2"))
    expected = request.chosen.copy()
    with TraceWriter.create(tmp_path / "a.zarr", PLAIN) as writer:
        writer.append(request)
        request.chosen[:] = 0
        np.testing.assert_array_equal(writer.finish().read("chosen"), expected)


# Refusals


WRONG_ROWS = {
    "id too high": (lambda r: with_value(r, "chosen", (3, 1, 0), EXPERTS), r"request 1: chosen\[3, 1, 0\] is 8"),
    "id too low": (lambda r: with_value(r, "chosen", (0, 2, 1), -2), r"request 1: chosen\[0, 2, 1\] is -2"),
    "id that wraps in int16": (lambda r: with_value(r, "chosen", (0, 0, 0), 65536), r"chosen\[0, 0, 0\] is 65536"),
    "id of a float": (lambda r: replace(r, chosen=r.chosen.astype(float)), "request 1: chosen is an array of float64"),
    "negative weight": (lambda r: with_value(r, "weights", (2, 1, 0), -0.5), r"request 1: weights\[2, 1, 0\] is -0\.5"),
    "complex": (lambda r: replace(r, weights=r.weights + 0j), "request 1: weights is an array of complex"),
    "boolean": (lambda r: replace(r, weights=r.weights > 0), "request 1: weights is an array of bool"),
    "dates": (lambda r: replace(r, nll=r.nll.astype("M8[s]")), "request 1: nll is an array of datetime64"),
    "residency": (lambda r: with_value(r, "residency", (0, 0, 1), 9), r"residency\[0, 0, 1\] is 9: .* from -1 to 2"),
    "token id": (lambda r: with_value(r, "token_ids", (3,), 2**31), r"token_ids\[3\] is 2147483648: expected a whole"),
    "wide logit": (
        lambda r: with_value(replace(r, logits=r.logits.astype(float)), "logits", (2, 0, 7), 1e39),
        r"request 1: logits\[2, 0, 7\] is 1e\+39: expected a finite number",
    ),
    "repeated id": (lambda r: with_value(r, "chosen", (5, 2), 4), r"request 1: chosen\[5, 2\] repeats .*\[4, 4\]"),
    "nan": (lambda r: with_value(r, "logits", (2, 0, 7), np.nan), r"request 1: logits\[2, 0, 7\] is nan"),
    "infinite": (lambda r: with_value(r, "nll", (4,), np.inf), r"request 1: nll\[4\] is inf"),
    "too few tokens": (lambda r: replace(r, weights=r.weights[1:]), r"request 1: weights has shape \(9, 3, 2\)"),
    "too few layers": (lambda r: replace(r, logits=r.logits[:, 1:]), r"request 1: logits has shape \(10, 2, 8\)"),
    "wrong lookahead": (
        lambda r: replace(r, lookahead=(r.lookahead[0], r.lookahead[1][..., :4])),
        r"request 1: lookahead/2 has shape \(10, 3, 4\), expected \(10, 3, 8\)",
    ),
    "lookahead missing": (lambda r: replace(r, lookahead=r.lookahead[:1]), "request 1: 1 lookahead arrays"),
    "array missing": (lambda r: replace(r, nll=None, logits=None), "request 1: logits, nll must be given"),
    "prompt too long": (lambda r: replace(r, prompt_length=11), "request 1: 11 prompt tokens of 10"),
    "no tokens": (lambda r: Request(chosen=r.chosen[:0], prompt_length=0), "request 1: 0 prompt tokens of 0"),
}


def test_an_invalid_request_is_refused_and_adds_nothing(tmp_path):
    good = [everything(10, 1), everything(10, 2)]
    with TraceWriter.create(tmp_path / "a.zarr", HEADER) as writer:
        writer.append(good[0])
        for what, (spoil, message) in WRONG_ROWS.items():
            with case(what), pytest.raises(TraceError, match=message):
                writer.append(spoil(everything(10, 3)))
        writer.append(good[1])
        assert_holds(writer.finish(), good)


def test_a_geometry_beyond_the_limits_is_refused():
    for changed, message in [
        ({"experts": 32_768}, "32768 experts; a trace holds at most 32,767"),
        ({"layers": 4_097, "expert_bytes": (1,) * 4_097}, "4097 layers; a trace holds at most 4,096"),
        ({"expert_bits": float("nan")}, "finite number"),
        ({"expert_bits": float("inf")}, "finite number"),
        ({"expert_bytes": (1 << 57, 1, 1)}, r"are more than 2\*\*60 for all experts"),
        ({"expert_bytes": (1 << 57, 1, 10**5000)}, "a int too long to show"),
    ]:
        with case(changed, message), pytest.raises(ValidationError, match=message):
            Geometry.model_validate(GEOMETRY.model_dump() | changed)


def test_a_model_is_not_stored_at_what_is_no_precision():
    for bits in [0, -4, float("nan"), float("inf")]:
        with case(bits), pytest.raises(TraceError, match="invalid precision"):
            GEOMETRY.stored_at(bits)


def test_a_wrong_router_bias_is_refused_and_writes_nothing(tmp_path):
    for bias in [BIAS[1:], BIAS * np.nan]:
        with case(bias):
            with pytest.raises(
                TraceError, match=r"router_bias has shape .*, expected finite numbers of shape \(3, 8\)"
            ):
                write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(10)], bias)
            assert not list(tmp_path.iterdir())


def test_an_existing_trace_is_not_overwritten(tmp_path):
    digest = write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(10)]).digest
    for resume in (False, True):
        with pytest.raises(TraceError, match=r"a\.zarr exists; choose another path or remove it"):
            write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)], resume=resume)
    assert open_trace(tmp_path / "a.zarr").digest == digest


def test_an_unfinished_recording_is_not_overwritten(tmp_path):
    commit_some(tmp_path / "a.zarr", [ids_only(10)])
    with pytest.raises(TraceError, match=r"a\.zarr\.partial exists, .* rerun with --resume"):
        write_trace(tmp_path / "a.zarr", PLAIN, [ids_only(20)])


def test_a_trace_without_requests_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(TraceError, match="no request was appended"):
        write_trace(tmp_path / "a.zarr", PLAIN, [])
    assert not list(tmp_path.iterdir())


def test_a_finished_writer_takes_no_more(tmp_path):
    with TraceWriter.create(tmp_path / "a.zarr", PLAIN) as writer:
        writer.append(ids_only(10))
        writer.finish()
        with pytest.raises(TraceError, match="is finished"):
            writer.append(ids_only(10))


WHICH = """
import sys
from moereplay.traces.store import open_trace
trace = open_trace(sys.argv[1])
assert trace.requests == 2
print("zarr" in sys.modules)
trace.read("chosen", 0, 1)
print("zarr" in sys.modules)
"""


@pytest.mark.slow
def test_a_known_trace_is_opened_without_zarr(tmp_path):
    """Which takes as long to import as a short replay."""
    write_trace(tmp_path / "a.zarr", HEADER, [everything(3), everything(4, seed=1)])
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WHICH, str(tmp_path / "a.zarr")]

    def said() -> list[str]:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert [said(), said()] == [["True", "True"], ["False", "True"]]


@pytest.mark.slow
@every("name", ["request_offsets", "prompt_lengths", "router_bias"], apart=True)
def test_a_known_trace_whose_small_arrays_are_damaged_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.zarr"
    write_trace(path, HEADER, [everything(3), everything(4, seed=1)], BIAS)
    truth = open_trace(path)
    (file,) = (path / name).glob("c.*")
    whole = file.read_bytes()
    for position in range(0, len(whole), 5):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 16]) + whole[position + 1 :])
        try:
            opened = open_trace(path)
        except TraceError as refused:
            assert str(refused).startswith(f"{path}: {name} is damaged")
        else:  # a byte that says nothing
            assert np.array_equal(opened.request_offsets, truth.request_offsets)
            assert np.array_equal(opened.prompt_lengths, truth.prompt_lengths)
    file.write_bytes(whole)
    for content in (b"something else", None):
        for copy in (tmp_path / "cache").rglob(f"{name}-*"):
            copy.write_bytes(content or bytes(value ^ 1 for value in copy.read_bytes()))
        again = open_trace(path)
        assert np.array_equal(again.request_offsets, truth.request_offsets)
        assert np.array_equal(again.prompt_lengths, truth.prompt_lengths)
        assert again.router_bias is not None and truth.router_bias is not None
        assert np.array_equal(again.router_bias, truth.router_bias)
