"""Check the content of each format by other means: importers, regular expressions, torch, YAML."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.sweeps.experiment.file import from_yaml
from moereplay.traces.documents import content
from moereplay.traces.exporters.engines import arguments
from moereplay.traces.exporters.rows import card, number, schema_of, shards
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Header, Provenance, Trace, TraceError, memory_trace
from moereplay.traces.selection import first_requests
from moereplay.traces.summary import uses
from tests.kit.every import every
from tests.kit.exporting import exported, same_rows, whole
from tests.kit.importing import imported

BARE = Options()
DENSE = 3  #: layers without experts that a model may begin with

# -- round trips


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("csv", ("chosen", "weights")),
        ("jsonl", ("chosen", "weights", "logits")),
        ("parquet", ("chosen", "weights", "logits")),
        ("hf", ("chosen", "weights", "logits")),
    ],
)
def test_an_export_comes_back_bit_by_bit_with_its_sizes(name: str, held: tuple[str, ...], tmp_path: Path) -> None:
    trace = whole()
    out, _ = exported(trace, name, tmp_path)
    back, requests = imported(out, BARE)
    assert same_rows(requests, trace, *held)
    assert back.geometry == trace.geometry
    assert back.header.provenance.model == trace.header.provenance.model


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_number_is_written_so_that_the_same_float32_is_read(value: float) -> None:
    text = json.dumps(number(value))
    assert np.float32(json.loads(text)).tobytes() == np.float32(value).tobytes()
    assert np.float32(float(text)).tobytes() == np.float32(value).tobytes()


def test_the_first_requests_alone(tmp_path: Path) -> None:
    trace = whole()
    cut = first_requests(trace, 2)
    assert (cut.requests, cut.tokens, cut.digest != trace.digest) == (2, 15, True)
    out, _ = exported(cut, "csv", tmp_path)
    _, requests = imported(out, BARE)
    assert same_rows(requests, cut, "chosen")
    assert first_requests(trace, 3) is trace


def test_rows_that_were_moved_or_lost_are_refused(tmp_path: Path) -> None:
    out, _ = exported(whole(), "parquet", tmp_path)
    metadata, frame = pl.read_parquet_metadata(out), pl.read_parquet(out)
    for wrong in (frame.reverse(), frame[1:], frame.drop("phase"), frame.with_columns(pl.col("experts").list.head(1))):
        wrong.write_parquet(out, metadata={"moereplay": metadata["moereplay"]})
        with pytest.raises(TraceError, match=re.escape(str(out))):
            imported(out, BARE)


# -- Hugging Face


def test_a_card_has_a_head_that_the_hub_reads_and_no_prompts(tmp_path: Path) -> None:
    trace = whole()
    out, _ = exported(trace, "hf", tmp_path)
    _, head, text = (out / "README.md").read_text().split("---\n", 2)
    (tmp_path / "head.yaml").write_text(head)
    said = from_yaml(content(tmp_path / "head.yaml"))
    assert said["license"] == "mit" and said["configs"][0]["data_files"][0]["path"] == "data/train-*.parquet"
    frame = pl.read_parquet(out / "data")
    assert said["dataset_info"]["splits"][0]["num_examples"] == len(frame) == trace.tokens * trace.geometry.layers
    assert [each["name"] for each in said["dataset_info"]["features"]] == frame.columns == list(schema_of(trace))
    assert "token_id" not in "".join(frame.columns) and trace.digest in text


def test_what_others_called_a_model_is_text_in_a_card() -> None:
    hostile = '<script>`|\nlicense: mit\n---\n"'
    trace = memory_trace(Header(geometry=whole().geometry, provenance=Provenance(model=hostile)), [ids()])
    head, text = card(trace, "mit").split("\n---\n", 1)
    assert head.count("license:") == 2 and len(re.findall(r"(?m)^license:", head)) == 1
    assert all("<script>" not in re.sub("`[^`]*`", "", line) for line in text.splitlines())


def ids():
    return first_requests(whole(), 1).request(0).__class__(whole().read("chosen"), 0)


def test_shards_are_of_whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereplay.traces.exporters.rows.SHARD", 10)
    trace = whole(5, 7)  # requests of 7, 8, 9, 10 and 11 tokens
    assert shards(trace) == [(0, 15), (15, 24), (24, 34), (34, 45)]


# -- llama.cpp


def names(layers: int) -> list[str]:
    """Tensors of a model whose first layers are dense, as its files call them."""
    parts = ("attn_q", "ffn_gate_inp", "ffn_up_shexp", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps", "ffn_up_chexps")
    dense = [f"blk.{layer}.{part}.weight" for layer in range(DENSE) for part in ("attn_q", "ffn_up", "ffn_down")]
    return [*dense, *(f"blk.{DENSE + layer}.{part}.weight" for layer in range(layers) for part in parts)]


def left_to_the_cpu(words: list[str], tensors: list[str]) -> set[int]:
    """MoE layers whose experts these arguments leave there, as llama.cpp searches names: all of a layer's or none."""
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    if words[0] == "--n-cpu-moe":
        patterns = [rf"blk\.{layer}{experts}" for layer in range(int(words[1]))]
    else:
        pattern, _, place = words[1].rpartition("=")
        assert (words[0], place) == ("-ot", "CPU") and "," not in pattern
        patterns = [pattern]
    found = {tensor for tensor in tensors if any(re.search(pattern, tensor) for pattern in patterns)}
    layers = {int(tensor.split(".")[1]) for tensor in found}
    assert found == {tensor for tensor in tensors if "exps" in tensor and int(tensor.split(".")[1]) in layers}
    return {layer - DENSE for layer in layers}


@given(st.sets(st.integers(0, 25)))
def test_patterns_find_the_experts_of_the_layers_that_are_asked_for(on_cpu: set[int]) -> None:
    assert left_to_the_cpu(arguments(sorted(on_cpu), DENSE), names(26)) == on_cpu


def test_the_layers_that_are_worth_most_per_byte_stay(tmp_path: Path) -> None:
    """Experts have 100, 200 and 300 bytes, 8 a layer, and each layer is used alike: 2,600 bytes hold layers 0 and 1."""
    out, made = exported(whole(), "llama.cpp", tmp_path, dense_layers=DENSE)
    assert out.read_text() == r"-ot blk\.(5)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU" + "\n"
    assert made.answer.notes[0] == "the experts of 2 of 3 layers stay on the GPU, 2.4e-06 GB"
    assert "placement of single experts" in made.dropped_fields
    ranked, _ = exported(whole(), "llama.cpp", tmp_path / "b", dense_layers=1, ranking=[[2, 4], [2, 1]])
    assert ranked.read_text() == "--n-cpu-moe 3\n"


def test_a_ranking_of_other_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"--profile entry \[3, 0\]: the trace has 3 layers of 8 experts"):
        exported(whole(), "llama.cpp", tmp_path, ranking=[[3, 0]])


def test_a_profile_has_a_line_per_token_and_layer(tmp_path: Path) -> None:
    trace = whole()
    out, _ = exported(trace, "llama.cpp-profile", tmp_path, dense_layers=DENSE)
    lines = [list(map(int, line.split(","))) for line in out.read_text().splitlines()]
    rows = [(request, token, layer) for request in range(3) for token in range(7 + request) for layer in range(3)]
    for line, (request, token, layer) in zip(lines, rows, strict=True):
        chosen = trace.read("chosen")[int(trace.request_offsets[request]) + token, layer]
        assert line == [token - int(trace.prompt_lengths[request]), layer + DENSE, *(x for x in chosen if x >= 0)]


# -- placements by counts


def test_counts_leave_out_what_was_not_routed() -> None:
    chosen = whole().read("chosen")
    expected = [[int((chosen[:, layer] == expert).sum()) for expert in range(8)] for layer in range(3)]
    assert uses(whole()).tolist() == expected


def test_sglang_gets_counts_of_every_layer_of_the_model(tmp_path: Path) -> None:
    out, made = exported(whole(), "sglang", tmp_path)
    assert json.loads(out.read_text()) == {"logical_count": [uses(whole()).tolist()]}
    assert made.answer.notes[0].startswith("assumed: every layer of the model has experts")
    dense, _ = exported(whole(), "sglang", tmp_path / "b", dense_layers=2)
    assert json.loads(dense.read_text())["logical_count"][0][:2] == [[0] * 8] * 2


def test_a_known_model_says_how_many_layers_are_dense(tmp_path: Path) -> None:
    named = Header(geometry=whole().geometry, provenance=Provenance(model="deepseek-v3"))
    trace = memory_trace(named, [ids()])
    out, made = exported(trace, "sglang", tmp_path)
    assert len(json.loads(out.read_text())["logical_count"][0]) == 3 + 3
    assert made.answer.notes == ("deepseek-v3: its first 3 layers have no experts",)


def test_ktransformers_chooses_what_was_used_most_from_the_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    out, made = exported(whole(), "ktransformers", tmp_path, dense_layers=1)
    counts = torch.load(out, map_location="cpu", weights_only=True)["logical_count"]
    assert counts.dtype == torch.int64 and counts.is_contiguous()
    assert counts.tolist() == [[[0] * 8, *uses(whole()).tolist()]]
    assert "--kt-num-gpu-experts 4 " in made.answer.typed  # 600 bytes an expert of every layer
    share = sum(sorted(uses(whole()).ravel().tolist())[-12:]) / uses(whole()).sum()
    assert f"{share:.1%}" in made.answer.notes[0]


def test_rules_of_ktransformers_cover_every_layer_once(tmp_path: Path) -> None:
    out, _ = exported(whole(), "ktransformers-rules", tmp_path, dense_layers=10)
    rules = from_yaml(content(out))
    placed = {}
    for layer in range(10, 13):
        (found,) = [rule for rule in rules if re.match(rule["match"]["name"], f"model.layers.{layer}.mlp.experts")]
        placed[layer] = found["replace"]["kwargs"]["generate_device"]
    assert placed == {10: "cuda:0", 11: "cuda:0", 12: "cpu"}


# -- libCacheSim's format; what its reader makes of it is in tests/simulator/test_libcachesim.py


def records(path: Path) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("<IQIq", path.read_bytes()))


def accesses(trace: Trace) -> list[tuple[int, int, int]]:
    """(pass, layer, expert) of one token after the other, by descending weight."""
    found = []
    for at, (layers, shares) in enumerate(zip(trace.read("chosen"), trace.read("weights"), strict=True)):
        for layer, (chosen, mass) in enumerate(zip(layers, shares, strict=True)):
            routed = [rank for rank in range(len(chosen)) if chosen[rank] >= 0]
            found += [(at, layer, int(chosen[rank])) for rank in sorted(routed, key=lambda rank: -mass[rank])]
    return found


@every("layer", [None, 0, 2], apart=True)
def test_records_of_accesses_and_their_next(tmp_path: Path, layer: int | None) -> None:
    trace = whole()
    out, _ = exported(trace, "oracle-general", tmp_path, passes="token", **({} if layer is None else {"layer": layer}))
    stream = [each for each in accesses(trace) if layer in (None, each[1])]
    objects = [of * 8 + expert for _, of, expert in stream]
    following = [
        next((later + 1 for later in range(at + 1, len(objects)) if objects[later] == each), -1)
        for at, each in enumerate(objects)
    ]
    sizes = [trace.geometry.expert_bytes[of] for _, of, _ in stream]
    assert records(out) == list(zip([number for number, _, _ in stream], objects, sizes, following, strict=True))


def test_records_have_the_bytes_of_their_own_expert(tmp_path: Path) -> None:
    trace = whole()
    table = [[100 * layer + expert + 1 for expert in range(8)] for layer in range(3)]
    header = trace.header.model_copy(update={"geometry": trace.geometry.sized(table)})
    out, _ = exported(replace(trace, header=header), "oracle-general", tmp_path, passes="token")
    assert {(at, size) for _, at, size, _ in records(out)} == {
        (8 * layer + expert, table[layer][expert]) for _, layer, expert in accesses(trace)
    }


def test_what_the_records_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--layer 3: the trace has layers 0 to 2"):
        exported(whole(), "oracle-general", tmp_path, layer=3)
    large = whole().geometry.model_copy(update={"expert_bytes": (1, 1, 2**32)})
    trace = memory_trace(Header(geometry=large), [ids()])
    with pytest.raises(TraceError, match=r"4,294,967,296 bytes; oracleGeneral holds at most 4,294,967,295"):
        exported(trace, "oracle-general", tmp_path)
