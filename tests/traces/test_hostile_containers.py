"""Compressed files, JSON and archives made to harm their reader: each is refused by its importer, in bounded memory."""

from __future__ import annotations

import gzip
import io
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np

from tests.kit.importing import CSV, IDS, gptoss, imported, refusal, router_data, written

# ---------------------------------------------------------------- gzip


def test_a_gzip_bomb_of_one_line_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as packer:
        packer.write(CSV.encode())
        for _ in range(200):
            packer.write(b"0" * (1 << 20))
    tracemalloc.start()
    said = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "a line of more than 16,777,216 characters" in said
    assert peak < 100e6


def test_gzip_is_known_by_its_bytes_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(gzip.compress((CSV + "0,0,0,3,1\n").encode()))
    assert imported(tmp_path / "a.csv")[0].tokens == 1


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress((CSV + "0,0,0,3,1\n").encode()))
    packed[-6] ^= 1  # the checksum
    (tmp_path / "a.csv.gz").write_bytes(packed)
    assert "damaged gzip (CRC check failed" in refusal(tmp_path / "a.csv.gz")


# ---------------------------------------------------------------- JSON


DEEP, LONG = "[" * 200_000 + "]" * 200_000, "9" * 5000


def test_json_that_breaks_readers_is_refused(tmp_path: Path) -> None:
    for value, expected in [(DEEP, "nested too deep"), (LONG, "a number of thousands of digits")]:
        row = f'{{"request": {value}, "token": 0, "layer": 0, "experts": [1]}}'
        assert expected in refusal(written(tmp_path / "a.jsonl", row))
        assert expected in refusal(written(tmp_path / "b.jsonl", f'{{"moereplay": {{"layers": {value}}}}}'))
        assert expected in refusal(
            written(tmp_path / "a.csv", f'# {{"moereplay": {{"layers": {value}}}}}\n{CSV}0,0,0,3,1\n')
        )
        assert expected in refusal(written(tmp_path / "a.json", f'{{"router_data": {value}}}'))
        np.savez(tmp_path / "a.npz", experts=IDS, meta=f'{{"k": {value}}}')
        assert expected in refusal(tmp_path / "a.npz")
        written(gptoss(tmp_path / "b.npz").with_suffix(".meta.json"), value)
        assert expected in refusal(tmp_path / "b.npz")


def test_json_that_is_just_not_too_deep_is_refused_in_one_line(tmp_path: Path) -> None:
    for depth in [400, 900, 990]:
        deep = "[" * depth + "]" * depth
        row = f'{{"request": 0, "token": 0, "layer": 0, "experts": {deep}}}'
        assert "line 1: invalid experts[0] " in refusal(written(tmp_path / "a.jsonl", row)) or depth == 990
        layer = router_data({"selected_experts": "D", "selected_probs": [1]}).replace('"D"', deep)
        assert "router_data" in refusal(written(tmp_path / "a.json", layer)) or depth == 990


def test_a_published_run_with_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    for probs in ["null", "true", '"0.5"', "1e400", "{}", "[]"]:
        layer = router_data({"selected_experts": [1], "selected_probs": ["P"]}).replace('"P"', probs)
        assert "router_data[0] is not regular" in refusal(written(tmp_path / "a.json", layer))


def test_a_listing_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    for listing in ['[{"n_prompt_tokens": [1, 2]}]', '[{"n_decode_steps": {}}]', "[[]]", "{}", "3"]:
        path = gptoss(tmp_path / "a.npz", pos0=np.array([4]))
        written(tmp_path / "a.meta.json", listing)
        assert "a.meta.json" in refusal(path)


def test_prompt_lengths_of_other_runs_are_refused(tmp_path: Path) -> None:
    path = gptoss(tmp_path / "a.npz", pos0=np.array([4, 5]))
    written(tmp_path / "a.meta.json", '[{"n_prompt_tokens": 4}]')
    assert "invalid pos0 int64(2,)" in refusal(path)


# ---------------------------------------------------------------- archives


def npz(path: Path, **members: bytes) -> Path:
    """An archive of members as they are given, broken or not."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def npy(header: str, data: bytes = b"") -> bytes:
    """An array file with that header."""
    encoded = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(encoded)) + encoded + data


def plain(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


GOOD = {"probs": plain(np.full((1, 1, 2), 0.5)), "offsets": plain(np.array([0, 1]))}


def test_a_header_that_claims_715_gib_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    claim = npy("{'descr': '<i8', 'fortran_order': False, 'shape': (96000000, 1000, 1), }", b"\0" * 64)
    tracemalloc.start()
    said = refusal(npz(tmp_path / "a.npz", ids=claim, **GOOD))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "ids claims to be int64(96000000, 1000, 1), which is not the size of its data" in said
    assert peak < 5e6


def test_a_directory_that_agrees_with_the_claim_is_refused_too(tmp_path: Path) -> None:
    shape, size = (96_000_000, 1000, 1), 96_000_000 * 1000 * 8
    claim = npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}")
    path = npz(tmp_path / "a.npz", ids=claim, **GOOD)
    whole = bytearray(path.read_bytes())
    entry = whole.index(b"PK\x01\x02")  # of the central directory: compressed and whole size at 20 and 24
    whole[entry + 20 : entry + 28] = struct.pack("<II", 0xFFFFFFF0, min(size, 0xFFFFFFF0))
    path.write_bytes(whole)
    assert "claims more bytes than the file has" in refusal(path)


def test_an_archive_that_expands_a_thousandfold_is_refused(tmp_path: Path) -> None:
    probs = np.zeros((1, 1, 6_000_000))
    np.savez_compressed(tmp_path / "a.npz", ids=IDS, probs=probs, offsets=[0, 1])
    assert "probs expands more than 100-fold" in refusal(tmp_path / "a.npz")


def test_a_broken_header_is_refused(tmp_path: Path) -> None:
    for header in [
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-1, 1, 1), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1, '2'), }",
        f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({'9' * 5000},), }}",
        f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({'9' * 400},), }}",
        f"{{'descr': '<i8', 'fortran_order': False, 'shape': {'(' * 3000}{')' * 3000}, }}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1, 2)",
        "{'descr': '<i8', 'fortran_order': False, 'shape': __import__('os'), }",
        "{'descr': '<i8', 'fortran_order': False}",
        "{'descr': 'nonsense', 'fortran_order': False, 'shape': (1, 1, 2), }",
        "  '''\n",
        "\t\x00",
        "",
    ]:
        said = refusal(npz(tmp_path / "a.npz", ids=npy(header, b"\0" * 16), **GOOD))
        assert "a.npz: ids " in said
        assert len(said) < 400


def test_what_is_no_array_is_refused(tmp_path: Path) -> None:
    for content in [b"", b"\x93NUMPY", b"\x93NUMPY\x03\x00" + b"\0" * 80, b"\x93NUMPY\x02\x00\xff\xff\xff\xff"]:
        assert "ids is a broken array" in refusal(npz(tmp_path / "a.npz", ids=content, **GOOD))


def test_a_header_as_python_2_wrote_it_is_read(tmp_path: Path) -> None:
    header = "{'descr': '<i8', 'fortran_order': False, 'shape': (1L, 1L, 2L), }"
    path = npz(tmp_path / "a.npz", ids=npy(header, IDS.astype("<i8").tobytes()), **GOOD)
    assert imported(path)[0].read("chosen").tolist() == [[[3, 1]]]


def test_pickled_columns_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", ids=IDS, probs=np.array([[[{}, 1]]], object), offsets=[0, 1])
    assert "probs holds pickled objects, which can run code" in refusal(tmp_path / "a.npz")


def test_a_meta_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for meta in [np.array(["{}", "{}"]), np.array(3.5), np.array(b"{}"), np.zeros(0, "U2")]:
        np.savez(tmp_path / "a.npz", experts=IDS, meta=meta)
        assert "expected one string" in refusal(tmp_path / "a.npz")


def test_a_text_of_no_characters_is_refused(tmp_path: Path) -> None:
    broken = npy("{'descr': '<U1', 'fortran_order': False, 'shape': (), }", b"\xff\xff\xff\x7f")
    said = refusal(npz(tmp_path / "a.npz", experts=plain(IDS), meta=broken))
    assert "a.npz: invalid meta" in said


def test_a_stream_of_one_token_is_read_without_a_warning(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", experts=IDS, meta="{}")
    assert imported(tmp_path / "a.npz")[0].tokens == 1


def test_only_ids_that_were_not_routed_are_no_trace(tmp_path: Path) -> None:
    assert "every id is -1" in refusal(gptoss(tmp_path / "a.npz", np.full((1, 1, 2), -1)))
