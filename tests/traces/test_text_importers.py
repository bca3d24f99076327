"""Importers of text: route traces and the plain formats, and the line that is named when one is wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.traces.geometry import known_models
from moereplay.traces.importers import table
from moereplay.traces.importers.contract import Options
from moereplay.traces.importers.table import Table
from tests.kit.importing import DATA, imported, on_real_data, refusal, written

GENERIC_CSV = "request,token,layer,expert_0,expert_1,weight_0,weight_1,phase\n"
PREAMBLE = """# route_trace v1
# model=/data/m.gguf arch=a n_layer=3 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=9
# layer=1 expert_bytes=100 dense_bytes=9
# layer=2 expert_bytes=200 dense_bytes=9
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""

ROUTED = "0,0,7,1,0,5,0.6,0,100\n0,0,7,1,1,2,0.4,1,0\n0,0,7,2,0,1,0.7,0,200\n0,0,7,2,1,0,0.3,2,0\n"


def test_a_route_trace_carries_sizes_weights_and_residency(tmp_path: Path) -> None:
    trace, (request,) = imported(written(tmp_path / "r.csv", PREAMBLE + ROUTED), Options())
    assert trace.geometry.expert_bytes == (100, 200)  # layer 0 is dense: no rows
    assert request.chosen.tolist() == [[[5, 2], [1, 0]]]
    assert request.residency is not None
    assert request.residency.tolist() == [[[0, 1], [0, 2]]]
    assert trace.header.provenance.model == "m.gguf"


def test_the_users_sizes_win_over_the_files(tmp_path: Path) -> None:
    trace, _ = imported(written(tmp_path / "r.csv", PREAMBLE + ROUTED), Options(expert_bytes=(7, 8)))
    assert trace.geometry.expert_bytes == (7, 8)


def test_cells_without_rows_are_not_routed(tmp_path: Path) -> None:
    prompt = "0,0,6,1,0,5,0.6,1,0\n0,0,6,1,1,-1,nan,-1,0\n"
    _, (request,) = imported(written(tmp_path / "r.csv", PREAMBLE + prompt + ROUTED), Options())
    assert request.chosen[0].tolist() == [[5, -1], [-1, -1]]
    assert request.prompt_length == 2
    assert request.weights is not None
    assert request.weights[0].tolist() == [[0.6, 0.0], [0.0, 0.0]]


def test_each_turn_is_a_request_even_where_positions_run_on(tmp_path: Path) -> None:
    turns = ROUTED + ROUTED.replace("0,0,7", "1,0,8")
    trace, _ = imported(written(tmp_path / "r.csv", PREAMBLE + turns), Options())
    assert trace.request_offsets.tolist() == [0, 1, 2]


def test_weights_that_were_not_seen_are_left_out(tmp_path: Path) -> None:
    trace, _ = imported(written(tmp_path / "r.csv", PREAMBLE + ROUTED.replace("0.6", "nan")), Options())
    assert "weights" not in trace.capabilities
    assert any("weights left out" in note for note in trace.header.provenance.notes)


def test_a_wrong_route_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    for text, expected in [
        (PREAMBLE.replace("v1", "v2") + ROUTED, "line 1: invalid preamble '# route_trace v2'"),
        (PREAMBLE.replace(",expert,", ",id,") + ROUTED, "line 6: missing column expert"),
        (PREAMBLE, "line 6: no rows follow"),
        (PREAMBLE + ROUTED + "0,0,8,1,0,5\n", "line 11: 6 columns: expected 9"),
        (PREAMBLE + ROUTED.replace("7,2,1,0", "7,2,x,0"), "line 10: invalid slot 'x'"),
        (PREAMBLE + ROUTED.replace("7,1,1,2", "7,1,1,2.5"), "line 8: invalid expert 2.5"),
        (PREAMBLE + ROUTED + ROUTED, "line 11: repeats line 7"),
        (PREAMBLE + ROUTED + ROUTED.replace("0,0,7", "0,0,9"), "jumps from token 7 to 9"),
        (PREAMBLE + ROUTED.replace("0,0,7", "0,1,7") + ROUTED.replace("0,0,7", "0,0,8"), "returns to phase 0"),
        (PREAMBLE.replace("used=2", "used=3") + ROUTED, "2 slots per token: expected 3"),
    ]:
        assert expected in refusal(written(tmp_path / "r.csv", text), Options())


# ---------------------------------------------------------------- the plain formats

CSV_ROWS = "0,0,0,5,1,.6,.4,0\n0,0,1,2,3,.7,.3,0\n0,1,0,4,1,.6,.4,1\n0,1,1,2,0,.9,.1,1\n"
SIZES = json.dumps({"moereplay": {"model": "mine", "layers": 2, "experts": 8, "k": 2, "expert_bytes": [10, 20]}})


def json_row(**changes: object) -> str:
    return json.dumps({"request": 0, "token": 0, "layer": 0, "experts": [1, 0]} | changes) + "\n"


def test_a_plain_csv_in_any_order_becomes_requests(tmp_path: Path) -> None:
    shuffled = "".join(reversed(CSV_ROWS.splitlines(keepends=True)))
    trace, (request,) = imported(written(tmp_path / "a.csv", GENERIC_CSV + shuffled))
    assert request.chosen.tolist() == [[[5, 1], [2, 3]], [[4, 1], [2, 0]]]
    assert request.prompt_length == 1
    assert trace.read("weights")[1, 1] == pytest.approx([0.9, 0.1])


def test_a_plain_csv_may_carry_its_sizes(tmp_path: Path) -> None:
    for prefix in ["# " + SIZES + "\n", "\ufeff# " + SIZES + "\n"]:
        trace, _ = imported(written(tmp_path / "a.csv", prefix + GENERIC_CSV + CSV_ROWS), Options())
        assert (trace.geometry.experts, trace.geometry.expert_bytes) == (8, (10, 20))
        assert trace.header.provenance.model == "mine"


def test_without_phases_every_token_counts_as_decoded_and_the_user_may_say_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", "".join(json_row(token=token) for token in range(5)))
    assert imported(path)[0].prompt_lengths.tolist() == [0]
    assert imported(path, Options(expert_bytes=1, prompt_length=3))[0].prompt_lengths.tolist() == [3]


def test_a_wrong_plain_csv_is_refused_with_its_line(tmp_path: Path) -> None:
    for text, expected in [
        ("request,token,expert_0\n0,0,1\n", "line 1: missing column layer"),
        ("request,token,layer\n0,0,1\n", "line 1: missing column expert_0"),
        ("request,token,layer,expert_0,note\n0,0,0,1,2\n", "line 1: unknown column note"),
        ("request,token,layer,expert_0,expert_0\n0,0,0,1,2\n", "line 1: column expert_0"),
        ("request,token,layer,expert_0\n", "line 1: no rows follow"),
        ("request,token,layer,expert_0\n0,0,0,1\n\n0,1,0,1\n", "line 3: 1 columns: expected 4"),
        ("request,token,layer,expert_0\n0,0,0,1\n0,1,0,one\n", "line 3: invalid expert_0 'one'"),
        ("request,token,layer,expert_0\n0,0,-1,1\n", "line 2: invalid layer -1"),
        ("request,token,layer,expert_0\n0,0,0,1\n0,0,2,1\n", "rows for layer 2 but none for 1"),
        (
            "request,token,layer,expert_0,phase\n0,0,0,1,2\n",
            "line 2: invalid phase 2",
        ),
        ("request,token,layer,expert_0,weight_0\n0,0,0,1,nan\n", "line 2: invalid weight_0 nan"),
        ('# {"moereplay": {"layers": 2}}\n', "line 1: experts: missing"),
    ]:
        assert expected in refusal(written(tmp_path / "a.csv", text))


def test_wrong_json_lines_are_refused_with_their_line(tmp_path: Path) -> None:
    for text, expected in [
        (json_row() + '{"request": 0', "line 2: not JSON"),
        (json_row() + "[]\n", "line 2: not a JSON object"),
        (json_row(weigths=[1, 2]), "line 1: unknown key weigths"),
        (json_row() + json_row(token=1, weights=[0.5, 0.5]), "line 2: keys request, token, layer, experts, weights"),
        (
            json_row() + json_row(token=1, experts=[1]),
            "line 2: invalid experts [1]: expected 2 numbers, each",
        ),
        (json_row(experts=[1, "2"]), "line 1: invalid experts[1] '2': expected a whole number"),
        (json_row(token=True), "line 1: invalid token True: expected a whole number"),
        (json_row(weights=[float("nan"), 1]), "line 1: invalid weights[0] nan: expected a number from 0"),
        (json_row(experts=[[1], [2]]), "line 1: invalid experts[0] [1]: expected"),
    ]:
        assert expected in refusal(written(tmp_path / "a.jsonl", text))


def test_a_layer_with_fewer_tokens_is_refused_by_layer_and_request(tmp_path: Path) -> None:
    rows = CSV_ROWS.replace("0,1,1,2,0,.9,.1,1\n", "")
    message = refusal(written(tmp_path / "a.csv", GENERIC_CSV + rows))
    assert "request 0: layer 1 has 1 tokens of 2 (token 1 is missing)" in message


@on_real_data
def test_the_real_route_trace_has_157_tokens_and_its_own_sizes() -> None:
    trace, _ = imported(DATA / "gemma-4-26b-a4b" / "gemma.route.csv", Options())
    assert trace.read("chosen").size == 28_260 == 157 * 30 * 6
    assert trace.prompt_lengths.tolist() == [29]
    assert set(trace.geometry.expert_bytes) == {4_336_640, 3_593_216}


@on_real_data
def test_the_real_route_trace_takes_the_rest_from_its_model() -> None:
    model = Options(model="gemma-4-26b-a4b", geometry=known_models()["gemma-4-26b-a4b"].geometry)
    trace, _ = imported(DATA / "gemma-4-26b-a4b" / "gemma.route.csv", model)
    assert (trace.geometry.k, trace.geometry.expert_bits) == (6, 4)
    assert any("default is 8" in note for note in trace.header.provenance.notes)


@on_real_data
def test_a_route_trace_of_28_thousand_lines_is_read_in_two_seconds() -> None:
    start = time.perf_counter()
    imported(DATA / "gemma-4-26b-a4b" / "gemma.route.csv", Options())
    assert time.perf_counter() - start < 2


CELL = st.one_of(
    st.integers(-3, 2**54).map(str),
    st.floats(width=32).map(str),
    st.text("01.,;\"'-+einfa []\t#\ufeff", max_size=6),
    st.lists(st.integers(0, 99), max_size=3).map(lambda ids: f'"{ids}"'),
)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.lists(CELL, min_size=1, max_size=3), min_size=1, max_size=4), st.sampled_from(",\t"))
def test_polars_reads_cells_as_csv_does_or_is_not_asked(rows: list[list[str]], delimiter: str) -> None:
    lines = [delimiter.join(row) for row in rows]
    names = [f"c{at}" for at in range(len(rows[0]))]
    columns = table._at_once(lines, delimiter, names, names)
    if columns is None:
        return
    cells = [row for _, row in table._text_rows(Path("a.csv"), delimiter, names, 1, lines)]
    for at, name in enumerate(names):
        found, plain = columns[name], [row[at] for row in cells]
        same = Table(Path("a.csv"), "line", range(len(cells)), {name: plain})
        if isinstance(found, np.ndarray):
            np.testing.assert_array_equal(found, same.numeric(name))
        else:
            assert found == plain
