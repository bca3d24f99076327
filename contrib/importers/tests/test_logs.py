"""Importers of logs: what follows from the order of passes, what recorders leave out, and what they get wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from moereplay_importers.llama_tables import NOTE

from contrib.importers.tests.catalogue import ALL
from contrib.importers.tests.drawn_logs import Workload, workloads
from moereplay.traces.geometry import known_models
from moereplay.traces.importers import registry as importers
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry, Request, TraceError
from tests.kit.collecting import case
from tests.kit.damage import BYTES
from tests.kit.importing import imported, refusal, written

MODEL = Options(geometry=Geometry(layers=2, experts=32, k=4, expert_bytes=(9, 9)))
TIMES = 3  #: draws of every damage


def text(folder: Path, name: str, *lines: str) -> Path:
    return written(folder / name, "".join(f"{line}\n" for line in lines))


def notes_of(path: Path, options: Options | None = None) -> str:
    trace, _ = imported(path, options or Options(expert_bytes=1000))
    return "\n".join(trace.header.provenance.notes)


def assert_requests(path: Path, expected: list[Request]) -> None:
    _, found = imported(path)
    assert [request.prompt_length for request in found] == [request.prompt_length for request in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.chosen, other.chosen)


def test_passes_that_are_joined_into_a_prompt_are_warned_of(tmp_path: Path) -> None:
    def log(*passes: int) -> str:
        rows = [(layer, at) for tokens in passes for layer in range(2) for at in range(tokens)]
        lines = [f"{layer},{at % 4} {4 + at % 3}" for layer, at in rows]
        calls = [(2 * at + layer, row, layer) for at, n in enumerate(passes) for layer in range(2) for row in range(n)]
        called = [f"{call} {row} {layer} {row % 4}:0.6000 {4 + row % 3}:0.4000" for call, row, layer in calls]
        text(tmp_path, "a.route", *called)
        return "".join(
            notes_of(each) for each in (text(tmp_path, "a.log", "layer_id,expert_ids", *lines), tmp_path / "a.route")
        )

    told = "a pass of several tokens directly follows another"
    # a prompt of 6 and four steps of 3 that verify drafts; a prompt in pieces of 8, 8 and 5; two usual requests
    assert log(6, 3, 3, 3, 3).count(f"{told} 4 times") == 2 and log(8, 8, 5, 1, 1).count(f"{told} 2 times") == 2
    assert told not in log(6, 1, 1, 5, 1)


# ---------------------------------------------------------------- any workloads, in every format that can hold them


@settings(deadline=None, max_examples=40)
@given(drawn=workloads())
def test_positions_give_back_any_workloads(drawn: list[Workload], tmp_path_factory: pytest.TempPathFactory) -> None:
    lines = [
        f"{token - each.prompt},{layer},{','.join(map(str, ids))}"
        for each in drawn
        for rows in each.rows(pruned=True)
        for token, layer, ids in rows
    ]
    path = text(tmp_path_factory.mktemp("log"), "a.csv", *lines)
    assert_requests(path, [each.request(pruned=True) for each in drawn])


@settings(deadline=None, max_examples=40)
@given(drawn=workloads(steps=1))
def test_a_log_of_layers_gives_back_any_workloads(
    drawn: list[Workload], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = [row for each in drawn for found in each.rows(pruned=True) for row in found]
    folder, expected = tmp_path_factory.mktemp("log"), [each.request(pruned=True) for each in drawn]
    lists = [f"{layer},{' '.join(map(str, ids))}" for _, layer, ids in rows]
    assert_requests(text(folder, "a.log", "layer_id,expert_ids", *lists), expected)
    singles = [f"{layer},{one}" for _, layer, ids in rows for one in ids]
    assert_requests(text(folder, "b.csv", "layer,expert", *singles), expected)


@settings(deadline=None, max_examples=40)
@given(drawn=workloads(steps=1))
def test_colibris_stream_gives_back_any_workloads(
    drawn: list[Workload], tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines, call = [], 0
    for each in drawn:
        for rows in each.rows(pruned=False):
            for layer in range(each.ids.shape[1]):
                mine = [ids for _, at, ids in rows if at == layer]
                lines += [
                    f"{call} {row} {layer} " + " ".join(f"{one}:0.5000" for one in ids) for row, ids in enumerate(mine)
                ]
                call += 1
    path = text(tmp_path_factory.mktemp("log"), "a.txt", *lines)
    assert_requests(path, [each.request(pruned=False) for each in drawn])


# ---------------------------------------------------------------- a strided view read flat


def rankings(tokens: int, experts: int, k: int) -> np.ndarray:
    """(tokens, k) as a flat reading of (tokens, experts) rankings gives them: each expert equally often."""
    rng = np.random.default_rng(0)
    whole = np.concatenate([rng.permutation(experts) for _ in range(tokens)])
    return whole[: tokens * k].reshape(tokens, k)


def routed(tokens: int, experts: int, k: int) -> np.ndarray:
    """Return choices of a router that uses its experts evenly in the long run."""
    rng = np.random.default_rng(0)
    return np.array([rng.permutation(experts)[:k] for _ in range(tokens)])


def test_rankings_of_all_experts_are_said_not_to_be_choices(tmp_path: Path) -> None:
    for make, said in [(rankings, True), (routed, False)]:
        ids = [make(128, 32, 4) for _ in range(2)]
        records = [struct.pack("<iii", layer, 128, 4) + ids[layer].astype("<i4").tobytes() for layer in range(2)]
        (tmp_path / "a.bin").write_bytes(b"".join(records))
        rows = [(layer, token, ids[layer][token]) for layer in range(2) for token in range(128)]
        written(tmp_path / "b.csv", "".join(f"{t - 128},{layer},{','.join(map(str, e))}\n" for layer, t, e in rows))
        steps = [f"{layer},{one}\n" for layer in range(2) for one in ids[layer][0]]
        log = "".join(f"{layer},{one}\n" for layer, _, e in rows for one in e)
        written(tmp_path / "c.csv", f"layer,expert\n{log}{''.join(steps)}")
        for name in ("a.bin", "b.csv", "c.csv"):
            assert (NOTE in notes_of(tmp_path / name, MODEL)) is said


# ---------------------------------------------------------------- llama.cpp's logs


def test_prompts_that_follow_each_other_without_decode_steps_are_requests_of_their_own(tmp_path: Path) -> None:
    path = text(tmp_path, "a.csv", "-2,0,1", "-1,0,2", "-1,1,3", "-1,0,4", "-1,1,5", "0,0,6", "0,1,7")
    _, (first, second) = imported(path)
    assert first.chosen.tolist() == [[[1], [-1]], [[2], [3]]]
    assert second.chosen.tolist() == [[[4], [5]], [[6], [7]]] and second.prompt_length == 1


def test_a_layer_other_than_the_last_must_have_every_token(tmp_path: Path) -> None:
    assert "layer 0 has 1 tokens of 2" in refusal(text(tmp_path, "a.csv", "-2,1,1", "-1,0,2", "-1,1,3"))
    assert "layer 1 has 1 tokens of 2" in refusal(text(tmp_path, "b.csv", "-1,0,2", "-1,1,3", "0,0,1"))


def test_lines_of_positions_that_are_wrong_are_named(tmp_path: Path) -> None:
    for lines, said in [
        (("0,0,1,2", "0,1,3"), "line 2: 3 columns"),
        (("0,0,1,2", "0,1,3,3"), "line 2: expert 3 is repeated"),
        (("0,0,1,2", "0,1,3,x"), "line 2: invalid expert 1 'x'"),
        (("0,0,1,2", "0,1,3,40000"), "line 2: invalid expert 1 40000"),
        (("0,0,1,2", "2,0,1,2"), "jumps from token 0 to 2"),
    ]:
        assert said in refusal(text(tmp_path, "a.csv", *lines))


def test_rows_of_ranks_that_are_wrong_are_named(tmp_path: Path) -> None:
    for rows, said in [
        (("prefill,0,0,0,5", "prefill,0,0,1,6", "decode,1,0,1,5", "decode,1,0,0,6"), "line 4: invalid rank 1"),
        (("prefill,0,0,0,5", "prefill,0,0,1,6", "decode,1,0,0,5"), "line 4: invalid rank 0"),
        (("prefill,0,0,1,5",), "line 2: invalid rank 1"),
        (("decode,0,0,0,5", "prefill,1,0,0,5"), "returns to phase 0"),
        (("warmup,0,0,0,5",), "line 2: invalid phase 'warmup'"),
        (("decode,0,0,0,five",), "line 2: invalid expert 'five'"),
    ]:
        assert said in refusal(text(tmp_path, "a.csv", "phase,token,layer,rank,expert", *rows))


def test_the_model_says_how_many_rows_a_token_has(tmp_path: Path) -> None:
    olmoe = known_models()["olmoe-1b-7b"].geometry
    prompt = [f"{layer},{one}" for layer in range(16) for one in (*range(8), *range(8, 16))]
    path = text(tmp_path, "a.csv", "layer,expert", *prompt)
    _, (request,) = imported(path, Options(model="olmoe-1b-7b", geometry=olmoe))
    assert request.chosen.shape == (2, 16, 8) and request.prompt_length == 2
    assert "k = 16" in notes_of(path)
    other = Options(geometry=olmoe.model_copy(update={"k": 6}))
    assert "line 2: 16 rows of layer 0 begin here: expected a multiple of 6" in refusal(path, other)


def test_a_log_of_one_layer_is_said_to_show_no_passes(tmp_path: Path) -> None:
    path = text(tmp_path, "a.log", "layer_id,expert_ids", "3,5 1", "3,2 0", "3,1 5")
    _, (request,) = imported(path)
    assert request.chosen[:, 0].tolist() == [[5, 1], [2, 0], [1, 5]] and request.prompt_length == 0
    assert "with one layer" in notes_of(path)


def test_a_list_of_a_log_that_is_wrong_is_named(tmp_path: Path) -> None:
    for row in ["3,5 1 7", "3,", "x,5 1", "3,5 -1", "3,5.5 1", "4097,5 1"]:
        assert "line 3" in refusal(text(tmp_path, "a.log", "layer_id,expert_ids", "3,5 1", row))


def records(*heads: tuple[int, int, int]) -> bytes:
    """Records of so many tokens at a layer, the same ids in each row."""
    return b"".join(struct.pack(f"<iii{n * k}i", layer, n, k, *(list(range(k)) * n)) for layer, n, k in heads)


def test_records_that_are_wrong_are_named(tmp_path: Path) -> None:
    for content, said in [
        (records((0, 3, 2), (1, 3, 2), (0, 3, 2)), "request 1: layer 1 has 0 tokens of 3"),
        (records((0, 3, 2), (1, 1, 2)), "layer 1 has 1 tokens of 3"),
        (records((0, 3, 2), (1, 3, 4)), "record 1 at byte 36"),
        (records((0, 3, 2), (1, 3, 2))[:-4], "record 1 at byte 36"),
        (records((0, 3, 2)) + struct.pack("<iii", 1, 2**30, 2**10), "record 1"),
        (records((0, 3, 2)) + struct.pack("<iii2i", 1, 1, 2, -7, 3), "is -7"),
        (struct.pack("<iii2i", 0, 1, 2, -7, 3), "is -7"),
    ]:
        (tmp_path / "a.bin").write_bytes(content)
        assert said in refusal(tmp_path / "a.bin", format="llama_records")


@pytest.mark.parametrize("layers", [1, 2])
def test_single_tokens_after_a_chunk_are_its_decode_steps(layers: int, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(records(*[(layer, n, 2) for n in (3, 1, 1, 2) for layer in range(layers)]))
    _, found = imported(tmp_path / "a.bin")
    assert [(len(each.chosen), each.prompt_length) for each in found] == [(5, 3), (2, 2)]


# ---------------------------------------------------------------- colibri


def test_lines_of_colibris_stream_that_are_wrong_are_named(tmp_path: Path) -> None:
    for lines, said in [
        (("0 0 0 1:0.5", "0 2 0 1:0.5"), "line 2: call 0, row 2; expected row 1"),
        (("0 0 0 1:0.5", "1 0 1 1:0.5", "0 0 0 1:0.5"), "line 3: call 0, row 0"),
        (("0 0 0 1:0.5", "1 0 1 1:0.5 2:0.5"), "line 2"),
        (("0 0 0 1:0.5", "1 0 1 1:nan"), "line 2"),
        (("0 0 0 1:0.5", "1 0 1 40000:0.5"), "line 2: invalid expert 40000"),
        (("0 0 0 1:0.5 1:0.2",), "line 1: expert 1 is repeated"),
    ]:
        assert said in refusal(text(tmp_path, "a.txt", *lines))


# ---------------------------------------------------------------- moe-cache-lab

SWITCH = {
    "record_type": "metadata",
    "format": "moe-cache-lab.routing-jsonl",
    "format_version": 2,
    "model_id": "made/switch",
    "routing_stages": [
        {"routing_stage": stage, "num_experts": 4, "assigned_experts_per_token": 1, "allows_unassigned": True}
        for stage in ("encoder", "decoder")
    ],
}


def switch(stage: str, phase: str, token: int, layer: int, *experts: int, **more: object) -> dict[str, object]:
    """A selection of version 2."""
    return {
        "record_type": "routing_selection",
        "routing_stage": stage,
        "phase": phase,
        "token_position": token,
        "layer": layer,
        "assignment_state": "assigned" if experts else "unassigned",
        "selected_experts": list(experts),
        "selected_probabilities": [0.5] * len(experts),
        **({} if experts else {"unassigned_reason": "capacity"}),
        **more,
    }


def lab(folder: Path, metadata: dict[str, object], *rows: dict[str, object]) -> Path:
    return text(folder, "a.jsonl", *(json.dumps(row) for row in (metadata, *rows)))


DECODER = (
    switch("decoder", "decoder_prompt", 0, 1, 2),
    switch("decoder", "decoder_prompt", 0, 3),
    switch("decoder", "decoder_generated", 1, 1, 3),
    switch("decoder", "decoder_generated", 1, 3, 0),
)


def test_the_decoder_is_read_and_the_encoder_left_out(tmp_path: Path) -> None:
    path = lab(tmp_path, SWITCH, switch("encoder", "source", 0, 1, 1), switch("encoder", "source", 0, 3, 2), *DECODER)
    trace, (request,) = imported(path)
    assert request.chosen.tolist() == [[[2], [-1]], [[3], [0]]]
    assert request.weights is not None and request.weights.tolist() == [[[0.5], [0.0]], [[0.5], [0.5]]]
    assert (request.prompt_length, trace.geometry.experts) == (1, 4)
    said = notes_of(path)
    assert "2 selections of the encoder left out" in said and "1 of 4 selections unassigned" in said
    assert "layers 1, 3 of the file are MoE layers 0..1" in said


def test_an_encoder_alone_is_read_as_a_prompt(tmp_path: Path) -> None:
    alone = SWITCH | {"routing_stages": SWITCH["routing_stages"][:1]}  # type: ignore[index]
    rows = [switch("encoder", "source", token, 1, token) for token in range(3)]
    _, (request,) = imported(lab(tmp_path, alone, *rows))
    assert request.chosen.tolist() == [[[0]], [[1]], [[2]]] and request.prompt_length == 3


def test_probabilities_of_some_selections_only_are_left_out(tmp_path: Path) -> None:
    path = lab(
        tmp_path, SWITCH, *DECODER[:3], switch("decoder", "decoder_generated", 1, 3, 0, selected_probabilities=[])
    )
    assert "weights left out" in notes_of(path)
    assert imported(path)[1][0].weights is None


def test_a_selection_that_is_wrong_is_named(tmp_path: Path) -> None:
    for wrong, said in [
        ({"selected_experts": [4]}, "line 2: invalid selected_experts 4"),
        ({"selected_experts": [1, 2]}, "line 2: 2 experts"),
        ({"assignment_state": "unassigned"}, "line 2: invalid selected_experts"),
        ({"selected_experts": []}, "line 2: invalid selected_experts"),
        ({"phase": "prefill"}, "line 2: invalid phase prefill"),
        ({"phase": []}, "line 2: invalid phase"),
        ({"routing_stage": "middle"}, "line 2: invalid routing_stage middle"),
        ({"token_position": -1}, "line 2: invalid token_position -1"),
        ({"record_type": "note"}, "line 2: invalid record_type note"),
        ({"token_id": "a"}, "line 2: invalid token_id a"),
        ({"selected_probabilities": [float("nan")]}, "line 2: invalid probabilities nan"),
    ]:
        assert said in refusal(lab(tmp_path, SWITCH, DECODER[0] | wrong, *DECODER[1:]))


def test_another_version_is_refused(tmp_path: Path) -> None:
    for version in (0, 3, None):
        assert "line 1: format_version" in refusal(lab(tmp_path, {**SWITCH, "format_version": version}, *DECODER))


# ---------------------------------------------------------------- loggers of engines


def route(token: int, layer: int, *ids: int, request: str = "default") -> str:
    """A line of vLLM's loggers."""
    place = {"type": "route", "req_id": request, "token_idx": token, "layer": layer}
    return json.dumps(place | {"topk_ids": list(ids), "topk_weights": [0.5] * len(ids)})


META = json.dumps({"type": "meta", "model_id": "made-up", "top_k": 2})
WARM = [route(token, 0, 0, 1) for token in range(40)]
TEXT = [route(0, 0, 3, 1), route(1, 0, 2, 1), route(0, 0, 5, 0)]


def test_the_warm_up_of_an_engine_is_left_out(tmp_path: Path) -> None:
    path = text(tmp_path, "a.jsonl", META, *WARM, *TEXT)
    assert [each.chosen[:, 0].tolist() for each in imported(path)[1]] == [[[3, 1], [2, 1]], [[5, 0]]]
    assert "left out: the first 40 tokens, a warm-up pass" in notes_of(path)
    assert "all 40 tokens have identical routing" in refusal(text(tmp_path, "b.jsonl", META, *WARM))
    few = text(tmp_path, "c.jsonl", META, *WARM[:5], *TEXT)
    assert [len(each.chosen) for each in imported(few)[1]] == [5, 2, 1]


def test_lines_of_requests_that_run_beside_each_other_are_parted_by_their_ids(tmp_path: Path) -> None:
    lines = [route(t, 0, t + shift, 7, request=name) for t in range(3) for name, shift in (("a", 0), ("b", 3))]
    _, (first, second) = imported(text(tmp_path, "a.jsonl", META, *lines))
    assert first.chosen[:, 0, 0].tolist() == [0, 1, 2] and second.chosen[:, 0, 0].tolist() == [3, 4, 5]


def test_a_line_of_a_logger_that_is_wrong_is_named(tmp_path: Path) -> None:
    for line, said in [
        (route(9, 0, 3, 1), "request 1 jumps from token 0 to 9"),
        (route(2, 0, 3, 3), "line 5: expert 3 is repeated"),
        (route(2, 0, 3, 40000), "line 5"),
        ('{"type": "route", "req_id": "default", "token_idx": 2}', "line 5: missing 'layer'"),
        ("[]", "line 5: not a JSON object"),
        ('{"type": ', "line 5: not JSON"),
    ]:
        assert said in refusal(text(tmp_path, "a.jsonl", META, *TEXT, line))


def test_a_prompt_with_other_layers_than_the_first_is_refused(tmp_path: Path) -> None:
    head = "Layer ID,Batch Number,Token,Activated Expert IDs"
    text(tmp_path, "a.csv", head, '1,0,x,"[3, 1]"', '2,0,x,"[0, 1]"')
    text(tmp_path, "b.csv", head, '1,0,x,"[3, 1]"')
    text(tmp_path, "c.csv", head, '1,0,x,"[3, 1]"', '2,0,x,"[0, 1, 2]"')
    assert "b.csv: (1, 2) (layers, k): expected (2, 2)" in refusal(tmp_path)


# ---------------------------------------------------------------- damaged


def test_a_damaged_log_is_refused_in_one_line_or_is_a_trace(tmp_path: Path) -> None:
    for sample in ALL:
        path, rng = tmp_path / sample.name, Random(sample.name)
        sample.write(path)
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            whole = file.read_bytes()
            for how, damage in list(BYTES.items()) * TIMES:
                file.write_bytes(damage(whole, rng))
                with case(file.name, how):
                    try:
                        assert list(importers.load(sample.importer).read(path, sample.options).requests)
                    except TraceError as refused:
                        assert "\n" not in str(refused) and len(str(refused)) < 1000
            file.write_bytes(whole)
