"""Files that no importer reads: each is named by its first bytes or its keys, with what the user can do."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tarfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import TraceError
from tests.kit.importing import imported, refusal, written
from tests.kit.torch_pickles import save

ROWS = [(token, layer, [token, layer + 4]) for token in range(3) for layer in range(2)]


def sqlite_file(path: Path) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("create table routes (token, layer)")
    return path


def tar_bytes() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.csv"))
    return packed.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
HEADER = b'{"a":{"dtype":"I16","shape":[1],"data_offsets":[0,2]}}'
MAGIC = {
    "a.bin": (b"\x89HDF\r\n\x1a\n" + bytes(32), "HDF5", "h5py"),
    "b.csv": (b"PAR1" + bytes(32), "Parquet", "NAME.parquet"),
    "c.npz": (LFS, "git-lfs", "git lfs pull"),
    "d.jsonl": (LFS, "git-lfs", "git lfs pull"),
    "e.json": (b"<!DOCTYPE html><html>", "web page", "download"),
    "f.csv": (b"\xef\xbb\xbf\n <HTML>", "web page", "download"),
    "g.txt": (b"%PDF-1.7", "PDF", "data"),
    "h.tar": (tar_bytes(), "tar", "tar -xf"),
    "i.csv.gz": (gzip.compress(tar_bytes()), "tar", "unpack"),
    "j.gz": (gzip.compress(b"PAR1" + bytes(32)), "Parquet", "NAME.parquet"),
    "k.bin": (b"\x93NUMPY\x01\x00", "array of numpy", "NAME.npy"),
    "l.st": (len(HEADER).to_bytes(8, "little") + HEADER + bytes(2), "safetensors", "numpy.save"),
    "m.lz4": (b"\x04\x22\x4d\x18" + bytes(8), "lz4", "lz4 -d m.lz4"),
    "n.txt": (b"GGUF\x03\x00\x00\x00", "GGUF", "NAME.gguf"),
    "o.feather": (b"ARROW1\x00\x00", "Arrow", "Parquet"),
    "p.csv": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "Excel", "CSV"),
}


def test_a_file_of_another_format_is_named_by_its_first_bytes(tmp_path: Path) -> None:
    for name in MAGIC:
        content, kind, fix = MAGIC[name]
        (tmp_path / name).write_bytes(content)
        said = refusal(tmp_path / name)
        assert name in said
        assert kind in said
        assert fix in said


def test_a_database_is_named(tmp_path: Path) -> None:
    assert "SQLite" in refusal(sqlite_file(tmp_path / "a.db"))


def test_a_zip_of_numpy_or_of_excel_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", experts=np.zeros((2, 2, 2), np.int16))
    (tmp_path / "a.npz").rename(tmp_path / "a.bin")
    assert "NAME.npz" in refusal(tmp_path / "a.bin")


def test_binary_data_and_tensors_are_described(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"Q4RT\x01\0\x04\0" + bytes(range(200)))
    (tmp_path / "b.csv").write_bytes(b"\x07\x00\x00\x00" * 8)
    save(tmp_path / "c.pt", {"ids": np.zeros((2, 14, 5, 4), np.int16), "mask": np.ones((2, 14), np.int64)})
    (tmp_path / "d" / "part").mkdir(parents=True)
    (tmp_path / "d" / "part" / "e.bin").write_bytes(len(HEADER).to_bytes(8, "little") + HEADER + bytes(2))
    for name, said in [
        ("a.bin", "binary data that begins with the bytes 51 34 52 54 01 00 04 00 ('Q4RT"),
        ("b.csv", "binary data that begins with the bytes 07 00 00 00 07"),
        ("c.pt", "its tensors are ids (2, 14, 5, 4), mask (2, 14); save the ids as an array (tokens, layers, k)"),
        ("d", "e.bin: safetensors of a [1], by its first bytes; load them; save ids"),
    ]:
        assert said in refusal(tmp_path / name)


def test_a_pointer_in_a_folder_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_bytes(LFS)
    assert "one.csv" in refusal(tmp_path)


# ---------------------------------------------------------------- keys and columns

LINES = [{"pos": token, "il": layer, "topk_ids": ids, "gate": [0.6, 0.4]} for token, layer, ids in ROWS]
EVENTS = [
    {"event_type": kind, "id": at, "payload": {"where": row if kind == "routing" else {"pos": 1, "il": 0}}}
    for at, row in enumerate(LINES)
    for kind in ("lookup", "routing")
]


def lines(path: Path, rows: list[dict[str, object]], first: dict[str, object] | None = None) -> Path:
    return written(path, "".join(f"{json.dumps(row)}\n" for row in ([first] if first else []) + rows))


def suggested(said: str) -> dict[str, str]:
    """The options that a message proposes, by name."""
    words = said.split(" --")[1:]
    return {word.split()[0]: word.split()[1] for word in words}


def test_rows_of_other_names_are_imported_as_the_message_says(tmp_path: Path) -> None:
    from moereplay.traces.importers.columns import columns_named

    kinds: dict[str, list[dict[str, object]]] = {"a.jsonl": LINES, "b.jsonl": [{"x": {"y": row}} for row in LINES]}
    for name, rows in kinds.items():
        found = suggested(refusal(lines(tmp_path / name, rows)))
        options = Options(expert_bytes=10, columns=columns_named(found["columns"]))
        assert imported(tmp_path / name, options)[1][0].chosen.shape == (3, 2, 2)


def test_events_in_an_envelope_are_imported_as_the_message_says(tmp_path: Path) -> None:
    from moereplay.traces.importers.columns import columns_named, where_named

    found = suggested(refusal(lines(tmp_path / "a.jsonl", EVENTS)))
    assert found["where"] == "event_type=routing"
    columns, where = columns_named(found["columns"]), where_named(found["where"])
    trace, (request,) = imported(tmp_path / "a.jsonl", Options(expert_bytes=10, columns=columns, where=where))
    np.testing.assert_array_equal(request.chosen.reshape(-1, 2), [ids for _, _, ids in ROWS])
    assert any("event_type = routing" in note for note in trace.header.provenance.notes)


def test_rows_of_a_csv_are_chosen_and_errors_have_the_line_in_the_file(tmp_path: Path) -> None:
    rows = "".join(f"x,0,0,9\nr,{t},{layer},{t} {layer + 4}\n" for t, layer, _ in ROWS)
    chosen = Options(expert_bytes=10, where=("kind", "r"))
    file = written(tmp_path / "a.csv", f"kind,token,layer,experts\n{rows}")
    assert imported(file, chosen)[1][0].chosen.shape == (3, 2, 2)
    wrong = written(tmp_path / "b.csv", f"kind,token,layer,experts\n{rows}x,0,0,9\nr,3,zz,1\n")
    assert "line 15" in refusal(wrong, chosen)
    assert "missing column sort" in refusal(file, Options(expert_bytes=10, where=("sort", "r")))


def test_a_value_that_no_row_has_is_refused(tmp_path: Path) -> None:
    options = Options(expert_bytes=10, columns={"experts": ("topk_ids",)}, where=("event_type", "nothing"))
    assert "event_type = nothing" in refusal(lines(tmp_path / "a.jsonl", EVENTS), options)


def test_where_means_rows_with_columns_only(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 2, 1), np.int16))
    assert "--where" in refusal(tmp_path / "a.npy", Options(expert_bytes=10, where=("a", "b")))


def test_a_first_line_that_describes_the_others_is_left_out_with_a_note(tmp_path: Path) -> None:
    columns = {"token": ("pos",), "layer": ("il",), "experts": ("topk_ids",)}
    file = lines(tmp_path / "a.jsonl", LINES, {"model_name": "m", "num_layers": 2})
    trace, requests = imported(file, Options(expert_bytes=10, columns=columns))
    assert len(requests[0].chosen) == 3
    assert any("line 1" in note for note in trace.header.provenance.notes)
    plain = [{"request": 0, "token": t, "layer": layer, "experts": ids} for t, layer, ids in ROWS]
    trace, requests = imported(lines(tmp_path / "b.jsonl", plain, {"run": 7}), Options(expert_bytes=10))
    assert len(requests[0].chosen) == 3
    assert any("line 1" in note for note in trace.header.provenance.notes)


def test_a_count_is_not_suggested_as_ids(tmp_path: Path) -> None:
    passes = {"step": 0, "layer": 3, "topk": 2, "top_indices": [[3, 1], [0, 2]]}
    said = refusal(lines(tmp_path / "a.jsonl", [passes] * 3))
    assert "experts=" not in said and "top_indices has a list of each token: a row is a pass" in said
    said = refusal(lines(tmp_path / "b.jsonl", [{"t": 0, "layer": 3, "topk": 2, "top_indices": [3, 1]}] * 3))
    assert "--columns token=t,experts=top_indices" in said
    assert "experts=expert_id" in refusal(
        lines(tmp_path / "c.jsonl", [{"t": 0, "layer": 3, "topk": 1, "expert_id": 3}] * 3)
    )


def test_a_document_of_rows_is_read_by_its_keys(tmp_path: Path) -> None:
    columns = {"token": ("pos",), "layer": ("il",), "experts": ("topk_ids",)}
    for document in (LINES, {"meta": {"k": 2}, "events": LINES}):
        file = written(tmp_path / "a.json", json.dumps(document))
        assert imported(file, Options(expert_bytes=10, columns=columns))[1][0].chosen.shape == (3, 2, 2)


def test_the_nearest_layout_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    said = refusal(lines(tmp_path / "a.jsonl", [{"layer_idx": 0, "token_idx": 0, "logit_sum": 3}]))
    assert "named_jsonl (without selected_ids)" in said
    assert "experts" in said
    assert said.count("named_jsonl") + said.count("dynande") < 4


def test_layers_with_names_are_numbered(tmp_path: Path) -> None:
    columns = {"token": ("t",), "layer": ("node",), "experts": ("e",)}
    named = "t,node,e\n" + "".join(f"{t},/model/layers.{10 - layer}/moe,{t}\n" for t, layer, _ in ROWS)
    (request,) = imported(written(tmp_path / "a.csv", named), Options(expert_bytes=10, columns=columns))[1]
    assert request.chosen.shape == (3, 2, 1)
    plain = "t,node,e\n" + "".join(f"{t},moe/{'ba'[layer]},{layer}\n" for t, layer, _ in ROWS)
    (request,) = imported(written(tmp_path / "b.csv", plain), Options(expert_bytes=10, columns=columns))[1]
    assert request.chosen[0].tolist() == [[0], [1]]  # in the order of first use


def test_a_long_word_in_place_of_a_layer_is_refused_at_once(tmp_path: Path) -> None:
    """The search for a layer's name takes the square of its length."""
    columns, began = {"token": ("t",), "layer": ("node",), "experts": ("e",)}, time.monotonic()
    table = written(tmp_path / "a.csv", f"t,node,e\n0,{'x' * 100_000},1\n")
    assert "line 2: invalid node 'xxx" in refusal(table, Options(expert_bytes=10, columns=columns))
    assert time.monotonic() - began < 10


def test_parquet_cannot_be_filtered(tmp_path: Path) -> None:
    pl.DataFrame({"token": [0], "layer": [0], "experts": [[1]]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="--where"):
        imported(tmp_path / "a.parquet", Options(expert_bytes=10, where=("a", "b")))
