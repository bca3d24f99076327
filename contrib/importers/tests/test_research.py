"""CECAR, DynaNDE, streams layer first, and the profile that an exporter writes for llama-moe-trace's importer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contrib.importers.tests.catalogue import SAMPLES
from moereplay.traces.files import bundled
from moereplay.traces.geometry import known_models
from moereplay.traces.importers.contract import Options
from moereplay.traces.selection import first_requests
from moereplay.traces.store import open_trace
from tests.kit.collecting import Lazily
from tests.kit.command import moereplay_here, unfolded
from tests.kit.every import every
from tests.kit.exporting import exported, same_rows
from tests.kit.importing import DATA, imported, on_real_data, refusal, written
from tests.kit.routed import drifting
from tests.traces.test_engine_importers import MODEL, markov, notes_of

if TYPE_CHECKING:
    import torch
else:
    torch = Lazily("torch")

IMPORT = ("--expert-bytes", 100)


def layers_file(path: Path, experts: np.ndarray, **meta: object) -> Path:
    np.savez(path, experts=experts, meta=json.dumps(meta))
    return path


# ---------------------------------------------------------------- CECAR


def test_cecar_logits_are_kept_and_cut_at_the_end_of_the_text(tmp_path: Path) -> None:
    logits = torch.randn(6, 1, 3, 8).half()
    logits[:, :, 0] = 0  # dense
    run = {"type": "full_logits", "logits": logits}
    document = {
        "hf_model_id": "nobody/none",
        "batch_size": 2,
        "routing_decode": [run],
        "gen_ids_decode": [torch.arange(6)[None]],
        "input_ids_prompt": [torch.tensor([[8, 9]])],
        "eos_pos_in_decode": [3],
    }
    torch.save(document, tmp_path / "a.pt")
    trace, (request,) = imported(tmp_path / "a.pt", MODEL)
    np.testing.assert_array_equal(trace.read("logits"), logits[:4, 0, 1:].float().numpy())
    assert request.token_ids is None and trace.tokens == 4
    assert "layers 0 have only zero logits (dense): left out" in notes_of(tmp_path / "a.pt", MODEL)
    assert "pass --model NAME" in refusal(tmp_path / "a.pt")
    torch.save(document | {"eos_pos_in_decode": [6]}, tmp_path / "a.pt")
    assert "eos_pos_in_decode: expected a step from 0 to 5" in refusal(tmp_path / "a.pt", MODEL)


# ---------------------------------------------------------------- DynaNDE


def test_megatron_rows_become_texts(tmp_path: Path) -> None:
    texts = [markov(32, layers=2, experts=32, k=4, seed=seed) for seed in range(4)]
    rows = np.stack(texts, 1).reshape(-1, 2, 4)
    for layer in range(2):
        scores = torch.tensor([[0.5, 0.25, 0.125, 0.0625]]).expand(len(rows), 4)
        own = {"samples": torch.arange(len(rows)), "indices": torch.tensor(rows[:, layer]), "scores": scores}
        torch.save(own | {"layer": 7 - layer}, tmp_path / f"x{layer}.pt")
    trace, requests = imported(tmp_path)
    assert trace.requests == 4 and "rows 4 apart share most experts" in notes_of(tmp_path)
    for text, request in zip(texts, requests, strict=True):
        np.testing.assert_array_equal(request.chosen, text[:, ::-1])  # layer 6 comes first
    assert requests[1].token_ids is not None and requests[1].token_ids.tolist() == list(range(1, 128, 4))


def test_a_layer_that_is_a_copy_is_named(tmp_path: Path) -> None:
    table = (SAMPLES / "dynande.csv").read_text().splitlines(keepends=True)
    first = [line for line in table if not line.startswith("1,")]
    for layer in (3, 9):
        written(tmp_path / f"run_layer{layer}_shard0.csv", "".join(first))
    trace, _ = imported(tmp_path)
    assert trace.geometry.layers == 2
    assert "layer 9 has the rows of layer 3 throughout: a copy" in notes_of(tmp_path)
    shutil.copy(tmp_path / "run_layer9_shard0.csv", tmp_path / "also_layer9_.csv")
    assert "both layer 9" in refusal(tmp_path)
    written(tmp_path / "also_layer9_.csv", "".join(first[:-1])).rename(tmp_path / "run_layer9_shard0.csv")
    assert "has 5 tokens, 8 experts; run_layer3_shard0.csv has 6, 8" in refusal(tmp_path)


@every("score", ("65536", "1"), apart=True)
def test_an_import_says_that_one_score_too_many_made_k(tmp_path: Path, score: str) -> None:
    lines = (SAMPLES / "dynande.csv").read_text().splitlines()
    cells = lines[3].split(",")
    cells[2 + cells[2:].index("0.0")] = score
    file = tmp_path / "scores.csv"
    file.write_text("\n".join([*lines[:3], ",".join(cells), *lines[4:], ""]))
    done = moereplay_here("import", file, "--out", tmp_path / "a.zarr", *IMPORT)
    assert done.returncode == 0
    printed = unfolded(done.stdout + done.stderr)
    assert "1 of 6 rows of layer 0 have more than 2 experts" in printed
    assert ("sum to 65,536" in printed) == (score == "65536")
    sound = moereplay_here("import", SAMPLES / "dynande.csv", "--out", tmp_path / "b.zarr", *IMPORT)
    assert "experts per row" not in sound.stdout + sound.stderr


# ---------------------------------------------------------------- streams, layer first


def stream(chunks: int, length: int, seed: int = 1) -> np.ndarray:
    """(L, T, k) rows whose experts drift slowly, from a fresh start at every chunk."""
    random = np.random.Generator(np.random.PCG64(seed))
    ids = np.empty((4, chunks * length, 2), np.int16)
    for token in range(chunks * length):
        for layer in range(4):
            keep = token % length and random.random() < 0.8
            ids[layer, token] = ids[layer, token - 1] if keep else random.choice(32, 2, replace=False)
    return ids


def test_streams_are_split_where_the_context_was_cleared(tmp_path: Path) -> None:
    path = layers_file(tmp_path / "a.npz", stream(chunks=9, length=50), num_experts=32)
    trace, _ = imported(path)
    assert np.diff(trace.request_offsets).tolist() == [50] * 9
    assert trace.prompt_lengths.tolist() == [50] * 9


def test_a_stream_without_resets_stays_whole(tmp_path: Path) -> None:
    trace, _ = imported(layers_file(tmp_path / "a.npz", stream(chunks=1, length=450), num_experts=32))
    assert trace.requests == 1
    assert any("no context resets" in note for note in trace.header.provenance.notes)


def test_the_chunk_told_wins_over_the_chunk_in_meta(tmp_path: Path) -> None:
    path = layers_file(tmp_path / "a.npz", stream(1, 10), num_experts=32, chunk=4)
    assert np.diff(imported(path)[0].request_offsets).tolist() == [4, 4, 2]
    told = Options(expert_bytes=1, chunk=6, prompt_length=5)
    trace, _ = imported(path, told)
    assert np.diff(trace.request_offsets).tolist() == [6, 4]
    assert trace.prompt_lengths.tolist() == [5, 4]  # a request shorter than the prompt is all prompt


def test_streams_of_another_shape_in_the_folder_are_refused(tmp_path: Path) -> None:
    layers_file(tmp_path / "a.npz", np.zeros((1, 3, 1), np.int16), num_experts=4)
    layers_file(tmp_path / "b.npz", np.zeros((2, 3, 1), np.int16), num_experts=4)
    assert "expected (1, 1), as in a.npz" in refusal(tmp_path)


def test_meta_that_contradicts_the_rows_is_refused(tmp_path: Path) -> None:
    for meta in [{"k": 3}, {"n_moe_layers": 9}, {"num_experts": "many"}]:
        path = layers_file(tmp_path / "a.npz", np.zeros((1, 3, 1), np.int16), **meta)
        assert next(iter(meta)) in refusal(path)


def test_a_model_that_contradicts_the_file_is_refused_with_the_experts_of_its_meta(tmp_path: Path) -> None:
    path = layers_file(tmp_path / "a.npz", np.zeros((2, 3, 1), np.int16), num_experts=4)
    olmoe = Options(model="olmoe-1b-7b", geometry=known_models()["olmoe-1b-7b"].geometry)
    message = refusal(path, olmoe)
    assert "2 layers, 1 of 4 experts" in message
    assert "olmoe-1b-7b has 16 layers, 8 of 64" in message


def test_layers_first_is_the_order_of_these_files(tmp_path: Path) -> None:
    """An array with the tokens first is refused with the option that reads it."""
    right = drifting(60, 3)
    np.savez(tmp_path / "l.npz", experts=right, meta=json.dumps({"model": "x"}))
    assert "pass --axes tokens,layers,k, or" in refusal(tmp_path / "l.npz")
    _, requests = imported(tmp_path / "l.npz", Options(expert_bytes=1000, axes="tokens,layers,k"))
    np.testing.assert_array_equal(np.concatenate([request.chosen for request in requests]), right)


def test_a_chunk_beyond_every_file_means_all_of_it(tmp_path: Path) -> None:
    done = moereplay_here("import", SAMPLES / "layers_npz", "--out", tmp_path / "a.zarr", *IMPORT, "--chunk", 10**30)
    assert done.returncode == 0, done.stderr


@on_real_data
def test_the_real_qwen3_streams_are_split_every_512_tokens() -> None:
    trace, _ = imported(DATA / "qwen3-30b-a3b")
    # 8000 tokens per domain are 15 chunks of 512 and one of 320
    assert np.diff(trace.request_offsets).tolist() == ([512] * 15 + [320]) * 4
    assert (trace.geometry.layers, trace.geometry.experts, trace.geometry.k) == (48, 128, 8)


# ---------------------------------------------------------------- llama.cpp


def test_the_cache_profile_of_llama_cpp_is_read_by_the_importer_of_its_recorder(tmp_path: Path) -> None:
    """Positions of a prompt are below 0 there, so that requests begin where they fall back."""
    trace = first_requests(open_trace(bundled(Path("miniature"))), 3)
    out, _ = exported(trace, "llama.cpp-profile", tmp_path)
    foreign, requests = imported(out, Options(geometry=trace.geometry))
    assert foreign.header.provenance.importer == "llama_positions"
    assert same_rows(requests, trace, "chosen")
    assert [request.prompt_length for request in requests] == trace.prompt_lengths.tolist()
