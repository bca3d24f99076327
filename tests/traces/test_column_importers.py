"""Tables with columns of any names, and arrays: what is read, what is said of it, what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from moereplay.traces.importers.columns import columns_named
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import Geometry, TraceError
from tests.kit.collecting import case
from tests.kit.command import moereplay_here as moereplay
from tests.kit.importing import imported, refusal, written
from tests.kit.routed import EXPERTS, LAYERS, K, drifting

COLUMNS = "token=pos,layer=moe_layer,experts=topk"
IDS = np.array([[[3, 1], [0, 2]], [[2, 3], [1, 0]], [[0, 1], [3, 2]]])  #: (3 tokens, 2 layers, 2)
FORMS = {
    "[3, 1]": '"[{}, {}]"',
    "3 1": "{} {}",
    "3;1": "{};{}",
    "(3, 1)": '"({}, {})"',
    "3|1": "{}|{}",
    "[3 1]": "[{} {}]",
}


GEOMETRY = Geometry(layers=LAYERS, experts=EXPERTS, k=K, expert_bytes=(1000,) * LAYERS)


def sized(**more: object) -> Options:
    return Options.model_validate({"expert_bytes": 1000, **more})


def options(columns: str = COLUMNS, **more: object) -> Options:
    return Options.model_validate({"expert_bytes": 1000, "columns": columns_named(columns), **more})


def rows(cell: str = '"[{}, {}]"', layer_first: bool = False) -> str:
    """The ids as a CSV."""
    keys = [(token, layer) for token in range(3) for layer in range(2)]
    if layer_first:
        keys.sort(key=lambda key: key[1])
    lines = [f"{token},{layer},{cell.format(*IDS[token, layer])}" for token, layer in keys]
    return "\n".join(["pos,moe_layer,topk", *lines, ""])


def ids_of(path: Path, given: Options | None = None) -> list[list[object]]:
    return [request.chosen.tolist() for request in imported(path, given or options())[1]]


def test_lists_in_a_cell_may_be_written_in_many_ways(tmp_path: Path) -> None:
    for form in FORMS.values():
        assert ids_of(written(tmp_path / "a.csv", rows(form))) == [IDS.tolist()]


def test_every_kind_of_file_gives_the_same(tmp_path: Path) -> None:
    for layer_first in [False, True]:
        text = rows("{} {}", layer_first)
        keys = [line.split(",") for line in text.splitlines()[1:]]
        records = [{"pos": int(a), "moe_layer": int(b), "topk": [int(each) for each in c.split()]} for a, b, c in keys]
        written(tmp_path / "a.csv", text)
        written(tmp_path / "a.tsv", text.replace(",", "\t"))
        written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)))
        pl.DataFrame(records).write_parquet(tmp_path / "a.parquet")
        for path in sorted(tmp_path.iterdir()):
            assert ids_of(path) == [IDS.tolist()], path.name


def test_a_list_may_stand_in_several_columns(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", rows("{},{}").replace("topk", "first,second"))
    assert ids_of(path, options("token=pos,layer=moe_layer,experts=first+second")) == [IDS.tolist()]


def test_a_request_begins_where_the_token_falls_back(tmp_path: Path) -> None:
    """In token-first and in layer-first order."""
    for layer_first in (False, True):
        head, *lines = rows(layer_first=layer_first).splitlines()
        path = written(tmp_path / "a.csv", "\n".join([head, *lines, *lines, ""]))
        trace, requests = imported(path, options())
        assert [request.chosen.tolist() for request in requests] == [IDS.tolist()] * 2
        assert "no request column: 2 requests, a new one where the token falls back" in trace.header.provenance.notes[0]


def test_requests_may_have_any_names_and_phases_words(tmp_path: Path) -> None:
    text = "\n".join(
        ["id,pos,layer,e,stage"]
        + [f"{name},{token},5,{token},{stage}" for name in "ba" for token, stage in enumerate(("Prefill", "decode"))]
        + [""]
    )
    given = options("request=id,token=pos,experts=e,phase=stage")
    trace, requests = imported(written(tmp_path / "a.csv", text), given)
    assert [(request.chosen.tolist(), request.prompt_length) for request in requests] == [([[[0]], [[1]]], 1)] * 2
    said = trace.header.provenance.notes[0]
    assert "requests in the order of their first rows" in said and "layers 5..5 of the file are MoE layers 0..0" in said


def test_requests_whose_numbers_no_float_tells_apart_stay_apart(tmp_path: Path) -> None:
    names = (2**63 + 1, 2**63 + 2, 2**53, 2**53 + 1)
    lines = [f"{name},0,0,{expert}" for expert, name in enumerate(names)]
    path = written(tmp_path / "a.csv", "\n".join(["id,token,layer,experts", *lines, ""]))
    assert ids_of(path, options("request=id,token=token")) == [[[[expert]]] for expert in range(4)]


def test_a_shorter_list_is_filled_up_and_said(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'token,layer,experts\n0,0,"[3, 1]"\n1,0,[2]\n')
    trace, (request,) = imported(path, options("token=token"))
    assert request.chosen.tolist() == [[[3, 1]], [[2, -1]]]
    assert "k = 2 from the widest row, -1 in the others" in trace.header.provenance.notes[0]


WRONG = {
    "token,layer,ids\n0,0,1\n": "missing column experts: found token, layer, ids; pass --columns experts=NAME",
    "token,layer,experts,experts\n0,0,1,2\n": "line 1: column experts is repeated",
    "token,layer,experts\n0,0,[3, 1]\n": "line 2: 4 columns: expected 3; put a list of ids with commas in quotes",
    "token,layer,experts\n0,0,3\n1,0,x\n": "line 3: invalid experts 'x': expected numbers",
    "token,layer,experts\n0,0,3.5\n": "line 2: invalid experts 3.5",
    "token,layer,experts\n0,0,99999\n": "line 2: invalid experts 99999",
    "token,layer,experts\n0,0,[]\n": "line 2: invalid experts '[]': expected numbers",
    "token,layer,experts\n0,0,1 1\n": "line 2: expert 1 is repeated",
    "token,layer,experts\n-1,0,1\n": "line 2: invalid token -1: expected a whole number from 0",
    "token,layer,experts\n0,x,1\n": "line 2: invalid layer 'x': expected a whole number from 0",
    "token,layer,experts\n0,0,1\n0,0,2\n1,0,2\n": "line 4: its token has 1 rows at this layer, others have 2",
    "token,layer,experts\n0,0,1 2\n0,0,2 3\n": "line 3: repeats line 2 of request 0",
    "token,layer,experts\n0,0,1\n2,0,1\n": "request 0 jumps from token 0 to 2",
    "token,layer,experts\n0,0,1\n0,1,1\n1,0,1\n": "layer 1 has 1 tokens of 2",
    "token,layer,experts,phase\n0,0,1,maybe\n": "line 2: invalid phase 'maybe': expected 0, 1, prompt",
    "token,layer,experts,weights\n0,0,1 2,.5\n1,0,1 2,.5 .5\n": "line 2: 1 weights for 2 experts",
    "token,layer,experts\n0,0,1": "the last line has no line end",
    "token,layer,experts\n": "line 1: no rows follow",
    'token,layer,experts\n0,0,"1\n': "line 2: unreadable cells",
}


def test_what_is_wrong_is_refused_by_line_value_and_fix(tmp_path: Path) -> None:
    for text in WRONG:
        assert WRONG[text] in refusal(written(tmp_path / "a.csv", text), options("token=token"))


def test_columns_that_cannot_be_read_are_refused() -> None:
    for text in ["", "pos", "token=", "token=a,token=b", "token=a+b", "experts=a+", "tokens=x"]:
        with case(text), pytest.raises(TraceError, match=r"--columns .* token=NAME,layer=NAME,experts=NAME"):
            columns_named(text)


def test_plain_formats_say_how_columns_are_named(tmp_path: Path) -> None:
    row = '{"pos": 0, "moe_layer": 0, "topk": [1]}\n'
    for name, text in (("a.csv", rows()), ("a.jsonl", row), ("a.json", f"[{row}]")):
        assert "--columns token=pos,layer=moe_layer,experts=topk" in refusal(written(tmp_path / name, text))


def test_columns_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", "{}")
    said = refusal(path, options(), "gptoss_json")
    assert "--columns" in said and "gptoss_json" in said


# ---------------------------------------------------------------- arrays


def test_an_array_may_lie_in_an_archive_with_its_weights(tmp_path: Path) -> None:
    weights = np.full(IDS.shape, 0.5)
    np.savez(tmp_path / "a.npz", chosen=IDS, gates=weights, other=np.zeros(3))
    _, (request,) = imported(tmp_path / "a.npz", options("experts=chosen,weights=gates"))
    assert request.chosen.tolist() == IDS.tolist() and request.weights is not None
    assert "--columns experts=NAME" in refusal(tmp_path / "a.npz", format="arrays")


def test_an_array_of_no_ids_is_refused(tmp_path: Path) -> None:
    for array, said in [
        (IDS.astype(float), "invalid array float64(3, 2, 2): expected three axes"),
        (IDS[0], "invalid array int64(2, 2): expected three axes"),
        (np.array([{}]), "holds pickled objects, which can run code"),
        (IDS + 40_000, "[0, 0, 0] is 40003: expected a whole number"),
        (IDS[None], "four axes: expected three. If they are (batch, sequence, layers, k)"),
        ((IDS << 16) | (0x3E00 + IDS), "packed with weights, (id << 16) | bfloat16: expected ids alone"),
    ]:
        np.save(tmp_path / "a.npy", array)
        assert said in refusal(tmp_path / "a.npy", format="arrays")


def test_layers_first_are_refused_in_every_container_of_arrays(tmp_path: Path) -> None:
    right = drifting(60, 3)
    turned = right.transpose(1, 0, 2)
    usage = {"usage": {"prompt_tokens": 50, "completion_tokens": 11}}
    logits = np.random.default_rng(0).normal(size=(60, LAYERS, EXPERTS)) + 9 * (right[..., :1] == np.arange(EXPERTS))
    (tmp_path / "a.json").write_text(json.dumps({"choices": [{"routed_experts": turned.tolist()}]}))
    (tmp_path / "b.json").write_text(json.dumps({"choices": [{"routed_experts": turned.tolist()}], **usage}))
    packed = base64.b64encode(turned.astype("<i4").tobytes()).decode()
    (tmp_path / "c.json").write_text(json.dumps({"meta_info": {"routed_experts": packed}, **usage}))
    np.save(tmp_path / "a.npy", turned)
    np.savez(tmp_path / "a.npz", x=turned)
    np.savez(tmp_path / "v.npz", routed_experts=turned)
    np.save(tmp_path / "r.npy", logits.astype(np.float32))
    for name in ("a.json", "b.json", "c.json", "a.npy", "a.npz", "v.npz", "r.npy"):
        more = {"shape": (LAYERS, K)} if name == "c.json" else {"model": "qwen3-30b-a3b"} if name == "r.npy" else {}
        order = "tokens,layers,k" if name == "r.npy" else "layers,tokens,k"
        given = sized(**more, geometry=GEOMETRY if name == "r.npy" else None)
        assert f"pass --axes {order}, or" in refusal(tmp_path / name, given), name
        _, requests = imported(tmp_path / name, given.model_copy(update={"axes": order}))
        chosen = np.concatenate([request.chosen for request in requests])
        assert (chosen[..., 0] == right[..., 0]).all() and len(chosen) == len(right), name


def test_totals_beside_an_array_say_how_many_tokens_it_has(tmp_path: Path) -> None:
    iid = np.random.default_rng(1).permuted(np.tile(np.arange(EXPERTS), (40, 6, 1)), axis=-1)[..., :K]
    turned = iid.transpose(1, 0, 2)  # overlap tells nothing, counts do
    np.savez(tmp_path / "a.npz", ids=turned, input_ids=np.arange(40))
    np.save(tmp_path / "b.npy", turned)
    counted = {"usage": {"prompt_tokens": 30, "completion_tokens": 11}}
    (tmp_path / "c.json").write_text(json.dumps({"choices": [{"routed_experts": turned.tolist()}], **counted}))
    for name, given in [
        ("a.npz", sized(columns={"experts": ("ids",)})),
        ("b.npy", sized(prompt_length=30)),
        ("c.json", sized()),
    ]:
        assert "it has 40 tokens, not 6; pass --axes layers,tokens,k" in refusal(tmp_path / name, given)
    assert len(imported(tmp_path / "b.npy", sized())[1][0].chosen) == 6  # neither overlap nor a count


def test_the_model_says_which_axis_the_layers_are(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(16 * 5 * 8).reshape(16, 5, 8) % 64)
    ended = moereplay("import", tmp_path / "a.npy", "--model", "olmoe-1b-7b", "--out", tmp_path / "a.zarr")
    assert ended.returncode == 2 and "olmoe-1b-7b has 16 layers; pass --axes layers,tokens,k" in ended.stderr


def test_what_was_assumed_is_printed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", rows())
    arguments = ("import", path, "--columns", COLUMNS, "--expert-bytes", 1000, "--out", tmp_path / "a.zarr")
    ended = moereplay(*arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[0] == (
        "assumed: column pos is the token; column moe_layer is the layer; column topk has the experts; "
        "no request column: one request; k = 2; layers 0..1; experts = 4 as the largest id + 1"
    )
