"""Traces as found published: what their writers mark as missing is refused, what they leave out is not made up."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from contrib.importers.tests.catalogue import SAMPLES
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.routers import weigh
from moereplay.traces.schema import Geometry, Router
from tests.kit.importer_formulas import EXPERTS, LAYERS, K
from tests.kit.importing import imported, refusal, written

SIZED = Options(expert_bytes=1000)


# ---------------------------------------------------------------- ONNX Runtime


def event(node: int, rows: int, ids: list[int], **more: object) -> str:
    record = {"node_index": node, "node_name": f"/layers.{node}/qmoe", "num_rows": rows, "top_k": 1, "expert_ids": ids}
    return f"moe_routing {json.dumps(record | more)}"


def log(folder: Path, *lines: str) -> Path:
    return written(folder / "ort.log", "".join(f"{line}\n" for line in lines))


def test_prompts_of_one_token_are_parted_by_their_marks(tmp_path: Path) -> None:
    start = "[qmoe_prompt_runner] {}/2 prompt_start"
    steps = [event(0, 1, [0]), event(1, 1, [1]), event(0, 1, [2]), event(1, 1, [3])]
    file = log(tmp_path, start.format(1), *steps, start.format(2), *steps)
    assert [(len(one.chosen), one.prompt_length) for one in imported(file)[1]] == [(2, 1), (2, 1)]


def test_without_marks_a_prompt_after_decode_steps_begins_a_request(tmp_path: Path) -> None:
    one = [event(0, 2, [0, 1]), event(1, 2, [1, 2]), event(0, 1, [2]), event(1, 1, [3])]
    assert [(len(each.chosen), each.prompt_length) for each in imported(log(tmp_path, *one, *one))[1]] == [(3, 2)] * 2


def test_a_wrong_or_incomplete_log_is_refused_by_its_line(tmp_path: Path) -> None:
    for line, said in [
        ('moe_routing_truncated {"dropped_records":1}', "dropped"),
        ('moe_routing_complete {"routing_records": 7}', "7"),
        (event(0, 2, [1]), "expert_ids"),
        (event(0, 1, ["x"]), "expert_ids"),  # type: ignore[list-item]
        (event(0, 0, []), "num_rows"),
        (event(0, 1, [1], router_weights=[0.5]), "router_weights"),
        ("moe_routing {", "JSON"),
    ]:
        message = refusal(log(tmp_path, event(0, 1, [0]), line))
        assert "line 2" in message
        assert said in message


def test_a_pass_without_a_node_is_refused(tmp_path: Path) -> None:
    assert "layer 1" in refusal(log(tmp_path, event(0, 1, [0]), event(1, 1, [0]), event(0, 1, [0])))


# ---------------------------------------------------------------- a file per layer


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """A copy of the sample."""
    return Path(shutil.copytree(SAMPLES / "layer_files", tmp_path / "layers"))


def test_the_folder_of_the_layers_alone_finds_the_texts_above_it(layers: Path) -> None:
    assert len(imported(layers / "trace")[1]) == 2
    (layers / "meta.json").unlink()
    (one,) = imported(layers / "trace")[1]
    assert (len(one.chosen), one.prompt_length) == (7, 0)


def test_a_layer_without_a_file_is_named(layers: Path) -> None:
    (layers / "trace" / "layer1.npz").rename(layers / "trace" / "layer3.npz")
    notes = importers.read(layers, SIZED).notes
    assert any("no file of layers 1, 2" in note for note in notes)


def test_texts_of_other_lengths_than_the_layers_are_refused(layers: Path) -> None:
    (layers / "meta.json").write_text('{"seqs": [{"n": 3}, {"n": 5}]}')
    assert "meta.json" in refusal(layers)


def test_a_layer_of_other_tokens_is_refused_by_its_file(layers: Path) -> None:
    np.savez(layers / "trace" / "layer1.npz", indices=np.zeros((3, K), np.int16))
    assert "layer1.npz" in refusal(layers)


def test_arrays_of_numpy_by_layer_are_read(tmp_path: Path) -> None:
    for layer in range(3):
        np.save(tmp_path / f"layer_{layer}.npy", np.arange(8).reshape(4, 2) + layer)
    (one,) = imported(tmp_path)[1]
    assert one.chosen.shape == (4, 3, 2)
    assert one.chosen[3, 2].tolist() == [8, 9]


# ---------------------------------------------------------------- JSON documents


def test_rows_are_found_under_any_of_their_names(tmp_path: Path) -> None:
    for key in ["trace", "entries", "data"]:
        rows = [[3, 1, 2], [5, 2, 0], [3, 0, 1], [5, 1]]
        (one,) = imported(written(tmp_path / "a.json", json.dumps({key: rows})))[1]
        assert one.chosen.tolist() == [[[1, 2], [2, 0]], [[0, 1], [1, -1]]]


def test_rows_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    for document, said in [
        ([0, 1, 2, 3, 0, 4, 5, 6], "4 or 8"),
        ([0, 5, 5, 0, 5, 5], "no row width"),
        ({"top_k": 2, "trace": [0, 1, 2, 0]}, "4 numbers"),
        ([[0, 1], [0, "x"]], "row 1"),
        ([[0, 1], [0]], "row 1"),
        ([[0, 1], [1, 2], [0, 2]], "layer 1"),
    ]:
        assert said in refusal(written(tmp_path / "a.json", json.dumps(document)), format="layer_rows")


def atlas(folder: Path, prompts: object, rows: int = 4) -> Path:
    layers = {"3": {"executed_topk": [[at % 3, 3] for at in range(rows)]}}
    return written(folder / "a.json", json.dumps({"layers": layers, "conditional": {"prompts": prompts}}))


def test_prompts_of_an_atlas_are_found_by_their_rows(tmp_path: Path) -> None:
    for prompts, lengths in [
        ([{"row_range": [0, 1]}, {"row_range": [1, 4]}], [1, 3]),
        ([{"start": 0, "end": 3}, {"start": 3, "end": 4}], [3, 1]),
        ([{"prompt_tokens": 2}, {"prompt_tokens": 2}], [2, 2]),
        ([{"somewhere": 2}], [4]),
        ([], [4]),
    ]:
        assert [len(each.chosen) for each in imported(atlas(tmp_path, prompts))[1]] == lengths


def test_prompts_with_gaps_and_layers_of_other_lengths_are_refused(tmp_path: Path) -> None:
    assert "prompts[1]" in refusal(atlas(tmp_path, [{"row_range": [0, 1]}, {"row_range": [2, 4]}]))


def test_scores_of_an_atlas_do_not_become_weights() -> None:
    assert all(each.weights is None for each in imported(SAMPLES / "atlas.json")[1])


# ---------------------------------------------------------------- binaries


def test_a_softmax_is_kept_as_logits_and_weighed_by_the_router_of_the_model() -> None:
    for family in ("softmax_topk", "topk_softmax"):
        router = Router(family=family)
        geometry = Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(9, 9), expert_bits=16, router=router)
        (one,) = imported(SAMPLES / "fitz.rtrace", Options(geometry=geometry))[1]
        assert one.logits is not None
        np.testing.assert_array_equal(one.weights, weigh(router, one.logits, one.chosen))
        np.testing.assert_allclose(np.exp(one.logits[0, 0]).max(), 0.5)


def test_a_softmax_without_a_model_or_a_shape_is_refused_by_what_is_missing() -> None:
    said = refusal(SAMPLES / "fitz.rtrace")
    assert "--model" in said
    assert "--shape" in said


def test_a_wrong_binary_is_refused_by_its_place(tmp_path: Path) -> None:
    for content, said in [
        (struct.pack("<4sii", b"MBLT", 2, 8), "version 2"),
        (struct.pack("<4sii", b"MBLT", 1, 0), "number of experts 0"),
        (struct.pack("<4sii", b"MBLT", 1, 8), "no records"),
        (struct.pack("<4siiiiii", b"MBLT", 1, 8, 0, 1, 1, 9), "id 9"),
        (struct.pack("<4siiiiii", b"MBLT", 1, 8, 0, 1, 1 << 30, 9), "record 0"),
        (struct.pack("<8sii", b"RTRACE01", 2, 1), "version 1"),
        (struct.pack("<8siiiiff", b"RTRACE01", 2, 0, 0, 0, 0.5, 2.0), "record 0"),
        (struct.pack("<8siiiif", b"RTRACE01", 2, 0, 0, 0, 0.5), "truncated"),
        (b"RTRACE01", "truncated"),
    ]:
        (tmp_path / "a.bin").write_bytes(content)
        assert said in refusal(tmp_path / "a.bin", Options(expert_bytes=9, shape=(1, 1)))


# ---------------------------------------------------------------- colibri, moe-policylang


def test_calls_without_lines_are_named_and_a_second_run_is_refused(tmp_path: Path) -> None:
    lines = [f"{call} 0 {3 + call % 2} {call % 4}:0.5000" for call in range(8)]
    gap = [f"{int(line[0]) + 2}{line[1:]}" if at > 3 else line for at, line in enumerate(lines)]
    file = written(tmp_path / "a.txt", "".join(f"{line}\n" for line in gap))
    assert any("2 calls (4, 5)" in note for note in importers.read(file, SIZED).notes)
    assert len(imported(file)[1][0].chosen) == 4
    twice = written(tmp_path / "b.txt", "".join(f"{line}\n" for line in lines + lines))
    assert "line 9" in refusal(twice)


def test_the_line_in_front_says_how_many_experts_there_are_and_scores_may_be_missing(tmp_path: Path) -> None:
    rows = [{"p": 0, "t": t, "l": 0, "e": [t], "s": None} for t in range(3)]
    header = {"model_name": "m", "num_experts": 64}
    file = written(tmp_path / "a.jsonl", "".join(f"{json.dumps(row)}\n" for row in [header, *rows]))
    trace, (one,) = imported(file)
    assert trace.geometry.experts == 64
    assert one.weights is None
