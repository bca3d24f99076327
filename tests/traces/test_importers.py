"""Importers: each format's rows, what the user must add, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from moereplay.traces.geometry import known_models
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry
from tests.kit.importing import DATA, imported, on_real_data, refusal, written


def gptoss_file(path: Path, offsets: list[int], rows: int = 5) -> Path:
    ids = np.tile(np.array([[3, 1], [0, 2]], np.uint8), (rows, 1, 1))
    np.savez(path, ids=ids, probs=np.full(ids.shape, 0.5, np.float16), offsets=np.array(offsets))
    return path


def run_entry(position: int, ids: list[int]) -> dict[str, object]:
    layer = {"selected_experts": ids, "selected_probs": [0.75, 0.25]}
    return {f"token_{position}": {"layer_0": layer, "layer_1": layer}}


# ---------------------------------------------------------------- the list of formats


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "request,token,layer,expert_0")
    assert "did you mean route_trace?" in refusal(path, format="route-trace")


def test_a_file_that_nobody_recognises_is_described(tmp_path: Path) -> None:
    message = refusal(written(tmp_path / "notes.txt", "hello"))
    assert "notes.txt" in message
    assert "hello" in message
    assert "request,token,layer,expert_0" in message


# ---------------------------------------------------------------- what nothing can read


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "absent.npz")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for name in ["a.csv", "a.jsonl", "a.npz", "a.json"]:
        assert "empty" in refusal(written(tmp_path / name, ""))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert "the folder is empty" in refusal(tmp_path)


def test_a_truncated_npz_is_refused(tmp_path: Path) -> None:
    for keep in [0.3, 0.7, 0.99]:
        path = gptoss_file(tmp_path / "cut.npz", [0, 5])
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        assert "truncated" in refusal(path)


def test_an_npz_with_a_broken_directory_is_refused(tmp_path: Path) -> None:
    path = gptoss_file(tmp_path / "bad.npz", [0, 5])
    path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03"))
    assert "truncated or not an npz" in refusal(path)


def test_a_torch_file_is_refused_by_name_and_by_content(tmp_path: Path) -> None:
    assert "pickled data" in refusal(written(tmp_path / "routing.pt", "anything"))
    (tmp_path / "routing.csv").write_bytes(b"\x80\x04\x95")
    assert "pickled data" in refusal(tmp_path / "routing.csv")


# ---------------------------------------------------------------- sizes: the file's, the model's, the user's


def test_without_sizes_the_nearest_model_is_named(tmp_path: Path) -> None:
    # 24 layers, 4 of 32: the shape of gpt-oss-20b
    np.save(tmp_path / "a.npy", np.tile(np.array([31, 0, 1, 2], np.int16), (3, 24, 1)))
    assert "gpt-oss-20b" in refusal(tmp_path / "a.npy", Options())


def test_a_model_of_unknown_sizes_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.array([[[0, 1], [1, 2]]] * 4))
    trace, _ = imported(path, Options(expert_bytes=100, model_name="mine-7b"))
    assert trace.header.provenance.model == "mine-7b" and trace.geometry.expert_bytes == (100, 100)
    assert imported(path, Options(expert_bytes=100))[0].header.provenance.model == "unknown"


def test_a_model_that_contradicts_the_file_is_refused_with_both_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[[0], [3]]] * 3))
    olmoe = Options(model="olmoe-1b-7b", geometry=known_models()["olmoe-1b-7b"].geometry)
    message = refusal(tmp_path / "a.npy", olmoe)
    assert "2 layers, 1 of at least 4 experts" in message
    assert "olmoe-1b-7b has 16 layers, 8 of 64" in message


def test_an_id_beyond_the_models_experts_is_a_contradiction(tmp_path: Path) -> None:
    path = gptoss_file(tmp_path / "a.npz", [0, 5])
    small = Geometry(layers=2, experts=3, k=2, expert_bytes=(1, 1))
    assert "at least 4" in refusal(path, Options(geometry=small))


def test_another_k_than_the_models_is_taken_and_noted(tmp_path: Path) -> None:
    path = gptoss_file(tmp_path / "a.npz", [0, 5])
    trace, _ = imported(path, Options(geometry=Geometry(layers=2, experts=8, k=4, expert_bytes=(7, 7))))
    assert (trace.geometry.k, trace.geometry.experts) == (2, 8)
    assert any("default is 4" in note for note in trace.header.provenance.notes)


def test_expert_bits_choose_the_models_bytes(tmp_path: Path) -> None:
    model = Geometry(layers=2, experts=8, k=2, expert_bytes=(160, 160), bytes_by_bits={4: (45, 50)})
    trace, _ = imported(gptoss_file(tmp_path / "a.npz", [0, 5]), Options(geometry=model, expert_bits=4))
    assert (trace.geometry.expert_bytes, trace.geometry.expert_bits) == ((45, 50), 4)


def test_precision_follows_from_bytes_and_the_models_parameters(tmp_path: Path) -> None:
    # 5 bytes for 8 parameters are 5 bits each
    model = Geometry(layers=2, experts=8, k=2, expert_bytes=(16, 16), expert_params=8)
    trace, _ = imported(gptoss_file(tmp_path / "a.npz", [0, 5]), Options(geometry=model, expert_bytes=5))
    assert (trace.geometry.expert_bytes, trace.geometry.expert_bits) == ((5, 5), 5.0)


def test_expert_bytes_must_fit_the_layers(tmp_path: Path) -> None:
    path = gptoss_file(tmp_path / "a.npz", [0, 5])
    assert "2 layers, --expert-bytes 3 values" in refusal(path, Options(expert_bytes=(1, 2, 3)))
    assert "positive" in refusal(path, Options(expert_bytes=0))


def test_bytes_of_every_expert_are_given_or_the_models(tmp_path: Path) -> None:
    path, table = gptoss_file(tmp_path / "a.npz", [0, 5]), ((4, 1, 4, 4), (4, 4, 4, 4))
    model = Geometry(layers=2, experts=4, k=2, expert_bytes=(9, 9), expert_params=8)
    given, _ = imported(path, Options(geometry=model, expert_bytes=table))
    assert (given.geometry.bytes_by_expert, given.geometry.expert_bytes) == (table, (4, 4))
    assert given.geometry.expert_bits == 3.625  # 29 bytes for 8 experts of 8 parameters
    of_model, _ = imported(path, Options(geometry=model.sized(table)))
    assert of_model.geometry.bytes_by_expert == table
    one_size, _ = imported(path, Options(geometry=model.sized(table), expert_bytes=4))
    assert (one_size.geometry.bytes_by_expert, one_size.geometry.expert_bytes) == ((), (4, 4))
    assert "expected 4 sizes in each layer" in refusal(path, Options(geometry=model, expert_bytes=((1, 2), (1, 2))))
    assert "2 layers, --expert-bytes 1 values" in refusal(path, Options(geometry=model, expert_bytes=((1, 2, 3, 4),)))


def test_provenance_names_the_file_and_its_hash(tmp_path: Path) -> None:
    path = gptoss_file(tmp_path / "a.npz", [0, 5])
    trace, _ = imported(path)
    told = trace.header.provenance
    assert (told.importer, told.source) == ("gptoss_npz", "a.npz")
    assert told.source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------- gpt-oss


def test_gptoss_offsets_must_divide_the_rows(tmp_path: Path) -> None:
    for offsets in [[0, 2, 4], [1, 5], [0, 3, 3, 5], [5]]:
        assert "offsets do not divide 5 rows" in refusal(gptoss_file(tmp_path / "a.npz", offsets))


def test_gptoss_listing_must_match_the_arrays(tmp_path: Path) -> None:
    path = gptoss_file(tmp_path / "a.npz", [0, 2, 5])
    written(tmp_path / "a.meta.json", '[{"n_decode_steps": 2}, {"n_decode_steps": 4}]')
    assert "run 1 has another number of decode steps: expected 3" in refusal(path)


def test_a_json_run_with_a_lost_token_is_refused(tmp_path: Path) -> None:
    run = {"router_data": [run_entry(9, [2, 0]), run_entry(11, [1, 3])]}
    assert "router_data[1] is token 11: expected 10" in refusal(written(tmp_path / "run.json", json.dumps(run)))


def test_an_irregular_json_run_is_refused(tmp_path: Path) -> None:
    for entries in ["[]", '[{"token_0": {}}]', '[{"token_x": 3}]', '[{"token_0": {"layer_0": 1}}]', "{}"]:
        assert "router_data" in refusal(written(tmp_path / "run.json", f'{{"router_data": {entries}}}'))


# ---------------------------------------------------------------- the real files


@on_real_data
def test_the_real_gptoss_collection_has_346_decode_runs() -> None:
    model = Options(model="gpt-oss-20b", geometry=known_models()["gpt-oss-20b"].geometry)
    trace, _ = imported(DATA / "gpt-oss-20b", model)
    assert (trace.requests, trace.tokens) == (346, 111_934)
    assert trace.prompt_lengths.sum() == 0
    assert trace.capabilities == {"ids", "weights"}


@on_real_data
def test_the_published_json_gives_the_rows_of_its_run_in_the_npz() -> None:
    listing = json.loads((DATA / "gpt-oss-20b" / "gptoss20b_decode.meta.json").read_text())
    # row_index names the run: 13573 in the published file
    run = next(index for index, meta in enumerate(listing) if meta["row_index"] == 13573)
    _, (published,) = imported(DATA / "gpt-oss-20b" / "raw")
    packed = imported(DATA / "gpt-oss-20b")[1][run]
    assert len(published.chosen) == 243
    assert np.array_equal(published.chosen, packed.chosen)
    assert published.weights is not None
    assert packed.weights is not None
    assert np.array_equal(published.weights.astype(np.float16), packed.weights)


@on_real_data
def test_expert_counts_are_no_trace() -> None:
    assert "no importer recognises it" in refusal(DATA / "olmoe-counts" / "expert_counts.npz")
