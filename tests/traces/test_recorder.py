"""Routing that servers report, by calls or by lines: of many requests at once, in any order, killed or not."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.recorder import Recorder
from moereplay.traces.importers.contract import Options
from moereplay.traces.recorder import Gathering
from moereplay.traces.schema import Geometry, Request, Trace, TraceError
from moereplay.traces.store import open_trace, verify
from tests.kit.collecting import case
from tests.kit.importing import imported
from tests.kit.kills import killed_at

ROOT = Path(__file__).resolve().parents[2]
SMALL = Geometry(layers=3, experts=8, k=2, expert_bytes=(100,) * 3)
Cell = tuple[int, int]


def router(request: int, token: int, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, weights and logits that follow from their place."""
    logits = np.random.default_rng([request, token, layer]).normal(size=SMALL.experts).astype(np.float32)
    ids = np.argsort(-logits)[: SMALL.k]
    weights = np.exp(logits[ids])
    return ids, weights / weights.sum(), logits


def routed(request: int, tokens: int, prompt: int) -> Request:
    """A whole request, a cell after the other."""
    cells = [[router(request, token, layer) for layer in range(SMALL.layers)] for token in range(tokens)]
    ids, weights, logits = (np.array([[cell[at] for cell in row] for row in cells]) for at in range(3))
    return Request(ids, prompt, weights.astype(np.float32), logits)


def assert_holds(trace: Trace, expected: dict[int, Request]) -> None:
    """Its requests are these, in whatever order."""
    verify(trace)
    found = {trace.request(at).chosen.tobytes(): trace.request(at) for at in range(trace.requests)}
    assert len(found) == trace.requests == len(expected)
    for wanted in expected.values():
        request = found[wanted.arrays()["chosen"].tobytes()]
        assert request.prompt_length == wanted.prompt_length
        for name, rows in wanted.arrays().items():
            np.testing.assert_array_equal(request.arrays()[name], rows)


# ---------------------------------------------------------------- a server that answers many at once


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[ThreadingHTTPServer, Recorder]]:
    """GET /REQUEST/PROMPT/TOKENS computes as many tokens, in a thread of its own."""
    recorder = Recorder(tmp_path / "served.zarr", SMALL, source="a server")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request, prompt, tokens = map(int, self.path.strip("/").split("/"))
            for token, layer in product(range(tokens), range(SMALL.layers)):
                recorder.append(token, layer, *router(request, token, layer), request=request)
            recorder.end(request, prompt_length=prompt)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running, recorder
    running.shutdown()
    running.server_close()


def test_a_server_of_many_threads_is_recorded(server: tuple[ThreadingHTTPServer, Recorder], tmp_path: Path) -> None:
    running, recorder = server
    asked = {request: (request % 3, 5 + request) for request in range(12)}
    statuses = []

    def ask(request: int) -> None:
        connection = HTTPConnection("127.0.0.1", running.server_port)
        connection.request("GET", f"/{request}/{asked[request][0]}/{asked[request][1]}")
        statuses.append(connection.getresponse().status)

    clients = [threading.Thread(target=ask, args=[request]) for request in asked]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert statuses == [200] * len(asked)
    trace = recorder.close()
    assert trace.path == tmp_path / "served.zarr"
    assert_holds(trace, {request: routed(request, tokens, prompt) for request, (prompt, tokens) in asked.items()})


#: Any program: it knows nothing of us, and logs among its own lines.
PRINTER = """
import logging, sys
import numpy as np
logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
logging.info("listening on 8080")
for token in range(7):
    for request in (4, 5):
        if token == 0:
            print(f"@moe-begin r{request} 2")
        for layer in range(3):
            logits = np.random.default_rng([request, token, layer]).normal(size=8).astype(np.float32)
            ids = np.argsort(-logits)[:2]
            gates = np.exp(logits[ids]) / np.exp(logits[ids]).sum()
            logging.info("@moe r%d %d %d %d,%d %.9g,%.9g", request, token, layer * 2 + 1, *ids, *gates)
    logging.info("step %d took 3 ms", token)
print("@moe-end r4")
"""


def test_lines_among_those_of_a_log_give_the_same(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("w") as out:
        subprocess.run([sys.executable, "-c", PRINTER], stdout=out, check=True, cwd=tmp_path)
    foreign, requests = imported(log, Options(geometry=SMALL))
    assert foreign.header.provenance.importer == "route_lines"
    assert len(requests) == 2
    for request, number in zip(requests, (4, 5), strict=True):
        wanted = routed(number, 7, 2)
        np.testing.assert_array_equal(request.chosen, wanted.chosen)
        np.testing.assert_array_equal(request.weights, wanted.weights)
        assert request.prompt_length == 2


# ---------------------------------------------------------------- any order, said again, cut


@st.composite
def reports(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Token, layer and ids of every cell of some tokens, in any order, some of them more than once."""
    first, tokens = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    cells = list(product(range(first, first + tokens), range(SMALL.layers)))
    again = draw(st.lists(st.sampled_from(cells), max_size=6))
    order = draw(st.permutations([*cells, *again]))
    ids = st.lists(st.integers(0, SMALL.experts - 1), min_size=1, max_size=SMALL.k, unique=True)
    return [(token, layer, draw(ids)) for token, layer in order]


@given(reports())
@settings(max_examples=60)
def test_the_last_that_is_said_of_a_token_at_a_layer_counts(said: list[tuple[int, int, list[int]]]) -> None:
    gathering, last = Gathering(SMALL), dict[Cell, list[int]]()
    for token, layer, ids in said:
        gathering.put(token, layer, {"chosen": np.array(ids)})
        last[token, layer] = ids
    tokens = sorted({token for token, _ in last})
    padded = [[(last[t, layer] + [-1] * SMALL.k)[: SMALL.k] for layer in range(SMALL.layers)] for t in tokens]
    assert gathering.request().chosen.tolist() == padded
    assert gathering.complete_tokens() == len(tokens)


def test_a_draft_that_was_rejected_last_is_cut_off(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.zarr", SMALL) as recorder:
        for token, layer in product(range(9), range(SMALL.layers)):
            recorder.append(token, layer, *router(1, token, layer))
        recorder.end(tokens=6)
    assert_holds(open_trace(tmp_path / "a.zarr"), {1: routed(1, 6, 0)})


def test_a_server_that_stops_inside_a_token_loses_that_token(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.zarr", SMALL) as recorder:
        for cell, (token, layer) in enumerate(product(range(9), range(SMALL.layers))):
            if cell < 20:
                recorder.append(token, layer, *router(1, token, layer))
    assert_holds(open_trace(tmp_path / "a.zarr"), {1: routed(1, 6, 0)})


def test_an_open_request_with_a_hole_costs_no_other(tmp_path: Path) -> None:
    """Its name is said when the recording is closed; what has ended, and what is open and whole, is in the trace."""
    recorder = Recorder(tmp_path / "a.zarr", SMALL)
    for request, tokens in {"ended": (0, 1), "holed": (0, 2), "open": (0,)}.items():
        for token, layer in product(tokens, range(SMALL.layers)):
            recorder.append(token, layer, [token, 7], request=request)
    recorder.end("ended")
    with pytest.raises(TraceError, match=r"'holed': missing token 1.*missing in .*a\.zarr, which has 2 requests"):
        recorder.close()
    assert open_trace(tmp_path / "a.zarr").tokens == 3


def test_a_name_is_used_again(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.zarr", SMALL) as recorder:
        for number in (1, 2):
            for token, layer in product(range(4), range(SMALL.layers)):
                recorder.append(token, layer, *router(number, token, layer), request="slot 0")
            recorder.end("slot 0", prompt_length=1)
    assert_holds(open_trace(tmp_path / "a.zarr"), {number: routed(number, 4, 1) for number in (1, 2)})


# ---------------------------------------------------------------- what is refused


BAD_ROWS: list[tuple[tuple[Any, ...], str]] = [
    ((0, 3, [1]), "invalid layer 3: expected 0 to 2"),
    ((-1, 0, [1]), "invalid token -1: expected its position"),
    ((0, 0, [1, 2, 3]), r"chosen has shape \(3,\): expected \(2,\)"),
    ((0, 0, [40_000]), "expected a whole number from -1 to 32766"),
    ((0, 0, [0.5]), "expected whole numbers"),
    ((0, 0, [[1], [2, 3]]), "cannot be read as an array"),
    ((0, 0, [1], [0.1]), "weights of token 0 at layer 0: give it for every row or for none"),
    ((0, 0, [1], None, [1.0, 2.0]), r"logits has shape \(2,\): expected \(8,\)"),
    ((0, 0, []), "expected whole numbers|expected \\(2,\\)"),
]


def test_a_row_that_does_not_fit_is_named_and_the_recording_goes_on(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.zarr", SMALL) as recorder:
        recorder.append(1, 0, [4, 5])
        for row, said in BAD_ROWS:
            with case(row, said), pytest.raises(TraceError, match=said):
                recorder.append(*row)
        for layer in (1, 2):
            recorder.append(1, layer, [4, 5])
    assert open_trace(tmp_path / "a.zarr").read("chosen").tolist() == [[[4, 5]] * 3]


def test_a_request_with_a_hole_is_given_up(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.zarr", SMALL) as recorder:
        for token, layer in product((0, 1, 3), range(3)):
            recorder.append(token, layer, [token, 7], request="holed")
        for layer in (0, 2):
            recorder.append(0, layer, [1, 2], request="silent")
        for layer in range(3):
            recorder.append(0, layer, [1, 1 + layer], request="twice")
            recorder.append(0, layer, [1, 2], request="whole")
        with pytest.raises(TraceError, match="'holed': missing token 2 between 0 and 3"):
            recorder.end("holed")
        with pytest.raises(TraceError, match="'silent': token 0 has no row at layer 1"):
            recorder.end("silent")
        with pytest.raises(TraceError, match="'twice': request 0: chosen"):
            recorder.end("twice")
        with pytest.raises(TraceError, match="'nobody' has no row to end"):
            recorder.end("nobody")
        recorder.end("whole")
    assert open_trace(tmp_path / "a.zarr").requests == 1


def test_what_exists_and_what_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there.zarr").mkdir()
    with pytest.raises(TraceError, match="exists; choose another"):
        Recorder(tmp_path / "there.zarr", SMALL)
    with pytest.raises(TraceError, match="no request was appended"):
        Recorder(tmp_path / "empty.zarr", SMALL).close()
    assert not list(tmp_path.glob("empty*.partial"))


BAD_LINES = {
    "@moe 1 0 0": "expected @moe REQUEST TOKEN LAYER",
    "@moe 1 0 0 1,": "expected @moe REQUEST TOKEN LAYER",
    "@moe 1 0 0 1,1": "an expert is repeated",
    "@moe 1 0 0 1,2 .5": "1 weights for 2 experts",
    "@moe 1 0 5000 1,2": "invalid layer 5000: expected 0 to 4095",
    "@moe 1 0 0 99999": "expected a whole number from -1 to 32766",
    "@moe 1 0 0 1,2 .5,9e99": "expected a number from 0 to 65536",
    "@moe-end 9": "request 9 ends without a row",
    "@moe-begin 9": "expected @moe REQUEST",
    "@moe-end 9 x": "expected @moe REQUEST",
}


def test_a_line_that_cannot_be_read_is_named_by_its_number(tmp_path: Path) -> None:
    for line in BAD_LINES:
        with case(line):
            log = tmp_path / "a.log"
            log.write_text(f"hello\n@moe 0 0 0 1,2\n{line}\n@moe 0 1 0 1,2\n")
            with pytest.raises(TraceError, match=BAD_LINES[line]) as refused:
                imported(log, Options(expert_bytes=1))
            assert f"{log} line 3: " in str(refused.value)


def test_weights_on_some_lines_and_a_silent_layer_are_refused(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("@moe 0 0 0 1,2\n@moe 0 0 1 1,2 .5,.5\n")
    with pytest.raises(TraceError, match="line 2: weights on some lines only"):
        imported(log, Options(expert_bytes=1))
    log.write_text("@moe 0 0 0 1,2\n@moe 0 1 1 1,2\n@moe 0 1 0 1,2\n@moe-end 0\n")
    with pytest.raises(TraceError, match="request 0: token 0 has no row at layer 1"):
        imported(log, Options(expert_bytes=1))


# ---------------------------------------------------------------- killed

REQUESTS = 60


def test_a_killed_recording_goes_on_from_what_had_ended(tmp_path: Path) -> None:
    out, step = tmp_path / "a.zarr", 0

    def serve() -> None:
        recorder = Recorder(out, SMALL, resume=out.with_name("a.zarr.partial").exists())
        for request in range(recorder.requests_done, REQUESTS):
            for token, layer in product(range(20), range(SMALL.layers)):
                recorder.append(token, layer, *router(request, token, layer), request=request)
            recorder.end(request, prompt_length=3)
        recorder.close()

    while killed_at(step, tmp_path, serve):
        step += 11
    assert step > 60
    assert_holds(open_trace(out), {request: routed(request, 20, 3) for request in range(REQUESTS)})
