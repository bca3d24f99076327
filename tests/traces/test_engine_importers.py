"""Importers of what engines and research code write: the traps of each format, beside slow readings of the samples."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moereplay.traces.geometry import known_models
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.patterns import interleaved
from moereplay.traces.routers import weigh
from moereplay.traces.schema import Geometry, Router
from tests.kit.collecting import Lazily
from tests.kit.importer_engines import WIDTH
from tests.kit.importer_formulas import EXPERTS, LAYERS, SAMPLES, K, ids
from tests.kit.importing import SIZED, imported, refusal, written

if TYPE_CHECKING:
    import torch
else:
    torch = Lazily("torch")


def notes_of(path: Path, options: Options = SIZED) -> str:
    return " | ".join(importers.read(path, options).notes)


def markov(tokens: int, layers: int = LAYERS, experts: int = EXPERTS, k: int = K, seed: int = 0) -> np.ndarray:
    """(T, L, k) ids of which most stay from one token to the next."""
    random = np.random.default_rng(seed)
    rows = [np.stack([random.permutation(experts)[:k] for _ in range(layers)])]
    for _ in range(tokens - 1):
        fresh = np.stack([random.permutation(experts)[:k] for _ in range(layers)])
        stays = random.random((layers, 1)) < 0.8
        rows.append(np.where(stays, rows[-1], fresh))
    return np.stack(rows)


# ---------------------------------------------------------------- the samples: as torch writes them, and read slowly


def test_samples_are_files_that_torch_loads() -> None:
    for name in ["router_logits.pt", "sglang_recorder/expert_distribution_recorder_1.5_0.pt"]:
        assert isinstance(torch.load(SAMPLES / name, weights_only=True), dict)


def test_every_token_of_every_pass_is_in_one_request() -> None:
    """A plain reading with torch: each (token id, logical experts) of the passes, in any order."""
    found = []
    for file in sorted((SAMPLES / "sglang_recorder").glob("*.pt")):
        document = torch.load(file, weights_only=True)
        table = document["last_physical_to_logical_map"]
        for record in document["records"]:
            topk = record["topk_ids_of_layer"]
            for at, token in enumerate(record["input_ids"]):
                layers = [[int(table[layer, one]) for one in topk[layer, at] if one >= 0] for layer in range(len(topk))]
                found.append((token, [layer for layer in layers if layer]))
    _, requests = imported(SAMPLES / "sglang_recorder")
    given = []
    for request in requests:
        assert request.token_ids is not None
        given += list(zip(request.token_ids.tolist(), request.chosen.tolist(), strict=True))
    assert sorted(given) == sorted(found)


# ---------------------------------------------------------------- SGLang's recorder


def recording(path: Path, passes: list[dict[str, Any]], mapping: Any = None) -> Path:
    """A dump of passes; what a pass does not say is filled in. Identity map of 8 experts, one layer, k = 2."""
    records = []
    for number, each in enumerate(passes):
        tokens = len(each["positions"])
        chosen = torch.full((1, tokens, WIDTH), -1, dtype=torch.int32)
        chosen[0, :, 0] = torch.tensor([each.get("expert", position % 4) for position in each["positions"]])
        chosen[0, :, 1] = chosen[0, :, 0] + 4
        plain = {"forward_pass_id": number, "input_ids": [7] * tokens, "extend_seq_lens": None, "forward_mode": 2}
        records.append(plain | {"topk_ids_of_layer": chosen} | {key: each[key] for key in each if key != "expert"})
    table = torch.arange(8)[None] if mapping is None else mapping
    torch.save({"records": records, "last_physical_to_logical_map": table}, path)
    return path


def lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt, tokens) of each request."""
    return [(request.prompt_length, len(request.chosen)) for request in imported(path)[1]]


def extends(positions: list[int], *sizes: int, mode: int = 1) -> dict[str, Any]:
    return {"positions": positions, "extend_seq_lens": list(sizes), "forward_mode": mode}


def decodes(*positions: int) -> dict[str, Any]:
    return {"positions": list(positions)}


def test_sequences_are_followed_by_their_positions(tmp_path: Path) -> None:
    for passes, expected in [
        ([extends([0, 1, 2, 0, 1], 3, 2), decodes(3, 2), decodes(4, 3), decodes(4)], [(3, 5), (2, 5)]),
        ([extends([0, 1], 2), extends([2, 3], 2), extends([4], 1), decodes(5)], [(5, 6)]),  # a chunked prompt
        ([extends([0, 1], 2), decodes(2), extends([0], 1), decodes(3, 1), decodes(2)], [(2, 4), (1, 3)]),
        ([extends([0, 1], 2), decodes(2), extends([0, 1, 2, 3], 3, 1, mode=3), decodes(4, 3)], [(2, 5), (3, 4)]),
        ([extends([0, 1], 2), decodes(2), extends([5, 6], 2), decodes(3, 7)], [(2, 4), (2, 3)]),  # a cached prefix
        ([decodes(9), decodes(10)], [(0, 2)]),  # recording began while a request ran
        ([extends([0, 1], 2), decodes(2), decodes(9)], [(2, 3), (0, 1)]),
        ([extends([], mode=4), extends([0, 1], 0, 2)], [(2, 2)]),  # idle; an empty part
    ]:
        assert lengths(recording(tmp_path / "a.pt", passes)) == expected


def test_tokens_at_one_position_are_taken_in_the_order_of_the_batch(tmp_path: Path) -> None:
    both = [extends([0, 1, 0, 1], 2, 2), {"positions": [2, 2], "input_ids": [50, 60]}]
    path = recording(tmp_path / "a.pt", both)
    assert [request.token_ids.tolist() for request in imported(path)[1]] == [[7, 7, 50], [7, 7, 60]]  # type: ignore[union-attr]
    assert "1 decoded tokens match several requests" in notes_of(path)


def test_recorded_names_of_requests_are_followed(tmp_path: Path) -> None:
    passes = [
        extends([0, 1, 0, 1], 2, 2) | {"rids": ["a", "b"]},
        {"positions": [2, 2], "input_ids": [60, 50], "rids": ["b", "a"]},
    ]
    requests = imported(recording(tmp_path / "a.pt", passes))[1]
    assert [request.token_ids.tolist() for request in requests] == [[7, 7, 50], [7, 7, 60]]  # type: ignore[union-attr]


def test_ranks_that_computed_the_same_are_read_once(tmp_path: Path) -> None:
    passes = [extends([0, 1], 2), decodes(2)]
    for rank in range(2):
        recording(tmp_path / f"expert_distribution_recorder_1_{rank}.pt", passes)
    assert lengths(tmp_path) == [(2, 3)]
    assert "expert_distribution_recorder_1_1.pt has the same passes as expert_distribution_recorder_1_0.pt" in notes_of(
        tmp_path
    )


def test_passes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for passes, expected in [
        ([extends([0, 1], 3)], "records[0]: extend_seq_lens sums to 3: expected 2"),
        ([extends([0, 5], 2)], "pass 0: positions of tokens 0 to 1 do not rise by one"),
        ([{"positions": [0], "input_ids": [1, 2]}], "1 tokens in topk_ids_of_layer, 2 input_ids, 1 positions"),
        ([{"positions": [0], "input_ids": [-1]}], "input_ids"),
        ([{"positions": [0], "forward_mode": 5}], "is of forward_mode 5: speculative decoding"),
        ([extends([], mode=4)], "no pass computed a token"),
        ([], "no records"),
    ]:
        assert expected in refusal(recording(tmp_path / "a.pt", passes))


def test_physical_experts_beyond_the_map_are_refused(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.pt", [extends([0, 1], 2)], torch.arange(4)[None])
    assert "expected ids of that map; shared experts may be fused" in refusal(path)


def test_counts_are_no_trace(tmp_path: Path) -> None:
    stat = {
        "rank": 0,
        "logical_count": torch.ones(3, 2, 8, dtype=torch.int32),
        "average_utilization_rate_over_window": None,
    }
    torch.save(stat, tmp_path / "a.pt")
    assert "it holds logical_count" in refusal(tmp_path / "a.pt")
    each = {"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.ones(2, 8)}
    torch.save({"records": [each], "last_physical_to_logical_map": torch.arange(8)[None]}, tmp_path / "b.pt")
    assert "a dump of mode per_pass counts experts without tokens" in refusal(tmp_path / "b.pt")


# ---------------------------------------------------------------- responses


def sglang(path: Path, rows: np.ndarray, prompt: int, **changed: Any) -> Path:
    packed = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    meta = {"prompt_tokens": prompt, "completion_tokens": len(rows) + 1 - prompt, "routed_experts": packed} | changed
    return written(path, json.dumps({"meta_info": meta}))


def test_k_is_found_where_no_row_repeats_an_expert(tmp_path: Path) -> None:
    for k in [1, 2, 4, 6]:
        rows = markov(60, layers=4, experts=16, k=k, seed=k)
        trace, _ = imported(sglang(tmp_path / "a.json", rows, 20))
        if k > 1:
            np.testing.assert_array_equal(trace.read("chosen"), rows)


def test_k_is_the_models_where_it_is_named(tmp_path: Path) -> None:
    model = Geometry(layers=2, experts=8, k=1, expert_bytes=(7, 7))
    trace, _ = imported(sglang(tmp_path / "a.json", ids(0, 6)[:, :, :1], 2), Options(geometry=model))
    assert (trace.geometry.layers, trace.geometry.k) == (2, 1)


def test_responses_of_sglang_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for changed, expected in [
        ({"prompt_tokens": None}, "missing prompt_tokens and completion_tokens"),
        ({"completion_tokens": 8}, "24 ids for 11 computed tokens"),
        ({"prompt_tokens": True}, "prompt_tokens"),
        ({"routed_experts": "!"}, "routed_experts is not base64"),
        ({"routed_experts": None}, "send return_routed_experts: true"),
        ({"routed_experts": ""}, "0 bytes, which are neither an npy file"),
    ]:
        assert expected in refusal(sglang(tmp_path / "a.json", ids(0, 6), 4, **changed))


def vllm(path: Path, **fields: Any) -> Path:
    return written(path, json.dumps({"choices": [{"routed_experts": ids(1, 3).tolist()}]} | fields))


def test_arrays_of_vllm_that_are_none_are_refused(tmp_path: Path) -> None:
    for value, expected in [
        ([[[0, 1], [2]]], "is ragged"),
        ([[[0, True], [2, 3]]], "expected three nested lists of integers"),
        ([[["x" * 1000, 1], [2, 3]]], "expected three nested lists of integers"),
        ([[0, 1]], "expected three nested lists"),
        ([[[0, 40000], [1, 2]]], "expected a whole number from -1 to"),
        ("AAAA", "3 bytes, which are neither an npy file"),
        ({"encoding": "base64", "dtype": "int16", "shape": [1, 2, 2], "data": "AAAA"}, "3 bytes are not int16"),
        ({"encoding": "base64", "dtype": "object", "shape": [1], "data": "AAAA"}, "unknown encoding"),
        ({"encoding": "base64", "dtype": "int16", "shape": [-1, 2, 2], "data": ""}, "unknown encoding"),
    ]:
        assert expected in refusal(vllm(tmp_path / "a.json", prompt_routed_experts=value))


def test_every_spelling_of_an_array_is_read(tmp_path: Path) -> None:
    data = base64.b64encode(ids(1, 3).astype("<i2").tobytes()).decode()
    spelled = {"encoding": "base64", "dtype": "int16", "shape": [3, LAYERS, K], "data": data}
    trace, _ = imported(vllm(tmp_path / "a.json", prompt_routed_experts=spelled))
    np.testing.assert_array_equal(trace.read("chosen"), np.concatenate([ids(1, 3)] * 2))
    np.savez(tmp_path / "a.npz", prompt_routed_experts=ids(0, 4).astype(np.int16), routed_experts=ids(1, 3))
    trace, (request,) = imported(tmp_path / "a.npz")
    np.testing.assert_array_equal(trace.read("chosen"), np.concatenate([ids(0, 4), ids(1, 3)]))
    assert request.prompt_length == 4


def test_nothing_but_preempted_requests_is_refused(tmp_path: Path) -> None:
    said = refusal(vllm(tmp_path / "a.json", choices=[{"routed_experts": None}]))
    assert "missing routed_experts" in said and "--enable-return-routed-experts" in said


def test_prompt_and_answer_of_other_layers_are_refused(tmp_path: Path) -> None:
    said = refusal(vllm(tmp_path / "a.json", prompt_routed_experts=ids(0, 2)[:, :1].tolist()))
    assert "(layers, k) = (1, 2) in prompt_routed_experts, (2, 2) in routed_experts" in said


# ---------------------------------------------------------------- logits

MODEL = Options(
    model="made-up", geometry=Geometry(layers=2, experts=8, k=2, expert_bytes=(7, 7), router=Router(renormalise=True))
)


def test_experts_and_weights_follow_from_the_logits_by_the_models_router(tmp_path: Path) -> None:
    logits = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(3))
    torch.save({"router_logits": tuple(logits)}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", router_logits=logits.numpy())
    np.save(tmp_path / "a.npy", logits.numpy())
    wanted = torch.topk(logits.transpose(0, 1), 2).indices.numpy()
    for name in ("a.pt", "a.npz", "a.npy"):
        trace, (request,) = imported(tmp_path / name, MODEL)
        np.testing.assert_array_equal(trace.read("chosen"), wanted)
        np.testing.assert_array_equal(trace.read("logits"), logits.transpose(0, 1).numpy())
        expected = weigh(Router(renormalise=True), trace.read("logits"), wanted)
        np.testing.assert_array_equal(trace.read("weights"), expected)
        assert request.prompt_length == 9


def test_logits_of_half_precision_are_widened(tmp_path: Path) -> None:
    logits = torch.randn(2, 9, 8).bfloat16()
    torch.save({"router_logits": logits, "k": 2}, tmp_path / "a.pt")
    np.testing.assert_array_equal(imported(tmp_path / "a.pt")[0].read("logits"), logits.float().transpose(0, 1).numpy())


def test_logits_that_say_too_little_or_too_much_are_refused(tmp_path: Path) -> None:
    def said(options: Options = SIZED, **fields: Any) -> str:
        torch.save({"router_logits": torch.zeros(2, 9, 8)} | fields, tmp_path / "a.pt")
        return refusal(tmp_path / "a.pt", options)

    assert "logits do not state the experts per token; pass --model NAME" in said()
    assert "number of experts from 1 to 8" in said(k=9)
    assert "is nan: expected a finite number" in said(k=2, router_logits=torch.full((2, 9, 8), torch.nan))
    assert "(batch, tokens) whole numbers for 9 rows" in said(k=2, input_ids=torch.zeros(2, 4, dtype=torch.int64))
    assert "layer 1 differs from" in said(k=2, router_logits=[torch.zeros(9, 8), torch.zeros(8, 8)])
    known = known_models()["deepseek-v3"]
    assert "adds a bias that was not recorded" in said(Options(model=known.name, geometry=known.geometry))


# ---------------------------------------------------------------- rows by sequence before batch


def test_texts_that_alternate_are_found() -> None:
    for batch in [1, 2, 8, 31]:
        texts = [markov(40, layers=4, experts=32, k=4, seed=seed) for seed in range(batch)]
        rows = np.stack(texts, 1).reshape(-1, 4, 4)
        assert interleaved(rows) == batch
        assert interleaved(np.random.default_rng(0).permutation(rows)) == 1
