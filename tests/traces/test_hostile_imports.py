"""Files made to break an import: numbers that would wrap, claims that would fill the memory, pickles that would run."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moereplay import command as entry
from moereplay.traces.importers import text
from moereplay.traces.importers.contract import Options
from moereplay.traces.schema import MOST_EXPERTS, Header
from moereplay.traces.writer import TraceWriter
from tests.kit.every import every
from tests.kit.importer_formulas import SAMPLES
from tests.kit.importing import CSV, IDS, gptoss, imported, refusal, router_data, written

WEIGHED = "request,token,layer,expert_0,weight_0\n"
NOT_FINITE = ["nan", "inf", "-inf", "1e300"]


def run(*arguments: str) -> str:
    """Return the error of a verb that exits with code 2, as `moereplay` does."""
    outcome = CliRunner().invoke(entry.application(), list(arguments))
    assert outcome.exit_code != 0
    if outcome.exception is None or isinstance(outcome.exception, SystemExit):
        return outcome.output
    assert entry._message(outcome.exception) is not None, repr(outcome.exception)  # type: ignore[arg-type]
    return str(outcome.exception)


def route(**changes: str) -> str:
    """The sample with other words in it."""
    whole = (SAMPLES / "route_trace.csv").read_text()
    for old, new in changes.items():
        assert old in whole
        whole = whole.replace(old, new, 1)
    return whole


# ---------------------------------------------------------------- numbers that no trace holds


def test_an_id_that_would_wrap_is_refused_by_file_line_and_value(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", CSV + "0,0,0,5,7\n0,1,0,40000,65537\n")
    said = run("import", str(path), "--expert-bytes", "1000", "--out", str(tmp_path / "a.zarr"))
    assert said == f"{path} line 3: invalid expert_0 40000: expected a whole number from -1 to 32766"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


def test_an_id_out_of_range_is_refused_in_every_format(tmp_path: Path) -> None:
    for value in [MOST_EXPERTS, 10**9, 2**40, 2**53, 2**63, 10**300, -2]:
        row = json.dumps({"request": 0, "token": 0, "layer": 0, "experts": [value, 1]})
        layer = {"selected_experts": [value, 1], "selected_probs": [0.5, 0.5]}
        for file in (
            written(tmp_path / "a.csv", f"{CSV}0,0,0,{value},1\n"),
            written(tmp_path / "a.jsonl", row),
            written(tmp_path / "a.json", router_data(layer)),
            written(tmp_path / "r.csv", route(**{",4,0.875,0,128": f",{value},0.875,0,128"})),
        ):
            assert "expected a whole number from -1 to" in refusal(file) or "not a whole number from" in refusal(file)


def test_ids_of_archives_are_refused_before_they_are_narrowed(tmp_path: Path) -> None:
    for value, dtype in [(40_000, "u2"), (2**31, "i8"), (2**63, "u8"), (-2, "i1"), (-(2**40), "i8")]:
        ids = np.array([[[3, 1]], [[0, value]]], dtype)
        assert f"ids[1, 0, 1] is {value}: expected a whole number" in refusal(gptoss(tmp_path / "a.npz", ids))
        np.savez(tmp_path / "b.npz", experts=ids, meta="{}")
        assert f"experts[1, 0, 1] is {value}: expected a whole number" in refusal(tmp_path / "b.npz")


def test_the_last_id_that_fits_comes_back(tmp_path: Path) -> None:
    trace, _ = imported(written(tmp_path / "a.csv", f"{CSV}0,0,0,{MOST_EXPERTS - 1},0\n"))
    assert trace.read("chosen").tolist() == [[[32_766, 0]]]
    assert trace.geometry.experts == 32_767


def test_more_experts_than_a_trace_holds_are_refused_wherever_they_are_stated(tmp_path: Path) -> None:
    for experts in [32_768, 10**9, 10**12, 10**300]:
        sizes = json.dumps({"moereplay": {"layers": 1, "experts": experts, "k": 2, "expert_bytes": [1]}})
        np.savez(tmp_path / "a.npz", experts=IDS, meta=json.dumps({"num_experts": experts}))
        found = [refusal(written(tmp_path / "a.csv", f"# {sizes}\n{CSV}0,0,0,3,1\n")), refusal(tmp_path / "a.npz")]
        if experts < 10**18:
            found.append(refusal(written(tmp_path / "r.csv", route(**{"n_expert=8": f"n_expert={experts}"}))))
        assert all("experts; a trace holds at most 32,767" in said for said in found)


def test_more_layers_than_a_trace_holds_are_refused(tmp_path: Path) -> None:
    assert "line 2: invalid layer 4096: expected a whole number from 0 to 4095" in refusal(
        written(tmp_path / "a.csv", f"{CSV}0,0,4096,3,1\n")
    )
    np.savez(tmp_path / "a.npz", experts=np.zeros((5000, 1, 1), np.int8), meta="{}")
    assert "5000 layers; a trace holds at most 4,096" in refusal(tmp_path / "a.npz")


def test_a_gate_weight_that_is_none_is_refused_by_its_line(tmp_path: Path) -> None:
    for weight in ["-0.5", *NOT_FINITE]:
        said = refusal(written(tmp_path / "a.csv", f"{WEIGHED}0,0,0,3,{weight}\n"))
        assert "line 2: invalid weight_0 " in said
        assert "expected a number from 0 to 65536" in said
        cell = weight.replace("inf", "Infinity").replace("nan", "NaN")
        row = f'{{"request": 0, "token": 0, "layer": 0, "experts": [1], "weights": [{cell}]}}'
        assert "line 1: invalid weights[0] " in refusal(written(tmp_path / "a.jsonl", row))
        layer = router_data({"selected_experts": [1], "selected_probs": ["W"]}).replace('"W"', cell)
        assert "router_data[0] is not regular" in refusal(written(tmp_path / "a.json", layer))
        probs = np.array([[[0.5, float(weight)]]])
        assert "probs[0, 0, 1] is " in refusal(gptoss(tmp_path / "a.npz", probs=probs))
        if weight != "nan":  # the format's word for "not seen"
            said = refusal(written(tmp_path / "r.csv", route(**{",0.875,0,96": f",{weight},0,96"})), Options())
            assert "line 7: invalid weight " in said


def test_columns_of_no_numbers_are_refused(tmp_path: Path) -> None:
    for dtype in ["c8", "?", "M8[s]", "U3", "V4"]:
        probs = np.zeros(IDS.shape, dtype)
        assert "expected numbers" in refusal(gptoss(tmp_path / "a.npz", probs=probs))
        assert "expected three axes of integers" in refusal(
            gptoss(tmp_path / "b.npz", IDS.astype(float).astype(dtype) if dtype == "?" else probs)
        )
        assert "offsets do not divide" in refusal(gptoss(tmp_path / "c.npz", offsets=np.zeros(2, dtype)))


def test_a_cell_that_is_no_number_is_refused_by_its_line(tmp_path: Path) -> None:
    for cell in ["True", "1+2j", "2024-01-01", "0x10", "1_0", "٣", "", '"3,1"', "3 1"]:
        assert "line 2: " in refusal(written(tmp_path / "a.csv", f"{CSV}0,0,0,{cell},1\n"))


def test_a_residency_that_is_none_is_refused_by_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "r.csv", route(**{",0.125,1,0,0": ",0.125,9,0,0"}))
    assert "line 8: invalid residency 9: expected a whole number from -1 to 2" in refusal(path, Options())


def test_runs_that_overlap_are_refused_in_unsigned_numbers_too(tmp_path: Path) -> None:
    ids = np.tile(IDS, (10, 1, 1))
    path = gptoss(tmp_path / "a.npz", ids, offsets=np.array([0, 5, 3, 10], np.uint64))
    assert "offsets do not divide 10 rows" in refusal(path)


def test_what_the_writer_refuses_is_told_with_the_file(tmp_path: Path) -> None:
    path = gptoss(tmp_path / "a.npz", np.array([[[3, 3]]]))
    said = run("import", str(path), "--expert-bytes", "1000", "--out", str(tmp_path / "a.zarr"))
    assert said == f"{path}: request 0: chosen[0, 0] repeats an expert: [3, 3] (token 0, layer 0)"


# ---------------------------------------------------------------- options


@pytest.mark.slow
def test_bits_that_are_no_precision_are_refused_in_our_words(tmp_path: Path) -> None:
    for bits in ["inf", "-inf", "nan", "0", "-4", "1e300", "1e-9"]:
        for verb in ["import", "synthesise"]:
            source = [str(SAMPLES / "generic.csv")] if verb == "import" else []
            said = run(verb, *source, f"--expert-bits={bits}", "--out", str(tmp_path / "a.zarr"))
            assert "invalid precision" in said and "expected 0.1 to 64" in said
            assert not list(tmp_path.iterdir())


def test_bytes_that_are_none_are_refused_in_our_words(tmp_path: Path) -> None:
    for sizes in ["0", "-1", "1e6", "0.5kB", "9" * 23, "100/x", "", "/", "1.5", "100/0", "9" * 5000]:
        said = run("import", str(SAMPLES / "generic.csv"), f"--expert-bytes={sizes}", "--out", str(tmp_path / "a.zarr"))
        assert "--expert-bytes" in said
        assert len(said) < 300


def test_bytes_that_no_sum_can_hold_are_refused(tmp_path: Path) -> None:
    said = run(
        "import", str(SAMPLES / "generic.csv"), f"--expert-bytes={10**18 - 1}", "--out", str(tmp_path / "a.zarr")
    )
    assert "are more than 2**60 for all experts" in said


def test_counts_out_of_range_are_refused_by_their_option(tmp_path: Path) -> None:
    for option in ["--chunk=0", "--prompt-length=-1", "--limit=0", "--chunk=x"]:
        said = run("import", str(SAMPLES / "gptoss_npz"), "--expert-bytes=9", option, "--out", str(tmp_path / "a.zarr"))
        assert option.partition("=")[0] in said


@every("option", ["--chunk", "--prompt-length", "--limit"], apart=True)
def test_a_count_beyond_every_file_means_all_of_it(tmp_path: Path, option: str) -> None:
    command = ["import", str(SAMPLES / "gptoss_npz"), "--expert-bytes=9", "--out", str(tmp_path / "a.zarr")]
    assert CliRunner().invoke(entry.application(), [*command, option, str(10**30)]).exit_code == 0


# ---------------------------------------------------------------- two imports at once


@every("resume", [[], ["--resume"]], apart=True)
def test_an_import_is_refused_while_another_writes_the_trace(tmp_path: Path, resume: list[str]) -> None:
    trace, requests = imported(SAMPLES / "generic.csv", Options())
    out = tmp_path / "a.zarr"
    with TraceWriter.create(out, Header(geometry=trace.geometry)) as first:
        first.append(requests[0])
        first.commit()
        said = run("import", str(SAMPLES / "generic.csv"), "--out", str(out), *resume)
        assert f"{out}.partial is being written by process " in said
        first.append(requests[1])
        assert first.finish().requests == 2


# ---------------------------------------------------------------- text


def test_quoted_cells_are_read(tmp_path: Path) -> None:
    rows = '"0",0,"0","3"," 1"\n0, "1",0,4,"2"\n'
    trace, _ = imported(written(tmp_path / "a.csv", CSV + rows))
    assert trace.read("chosen").tolist() == [[[3, 1]], [[4, 2]]]


def test_quoted_cells_that_are_wrong_are_refused_by_their_line(tmp_path: Path) -> None:
    for row, expected in [
        ('0,0,0,"3,1",1', "line 2: invalid expert_0 '3,1'"),
        ('0,0,0,"3","1","2"', "line 2: 6 columns: expected 5"),
        ('0,0,0,"3,1\n0,1,0,"4,2', "line 2: unreadable cells (unexpected end of data)"),
        ('0,0,0,"3"x,1', "line 2: unreadable cells"),
        ("0,0,0,3," + "9" * 200_000, "line 2: "),
    ]:
        assert expected in refusal(written(tmp_path / "a.csv", f"{CSV}{row}\n"))


def test_line_ends_of_other_systems_are_read(tmp_path: Path) -> None:
    for ends in ["\r\n", "\r"]:
        (tmp_path / "a.csv").write_bytes((CSV + "0,0,0,3,1\n0,1,0,4,2\n\n\n").replace("\n", ends).encode())
        assert imported(tmp_path / "a.csv")[0].tokens == 2


def test_a_table_of_several_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 7)
    trace, _ = imported(
        written(tmp_path / "a.csv", CSV + "".join(f"0,{token},0,3,{token % 3}\n" for token in range(50)))
    )
    assert trace.read("chosen")[:, 0, 1].tolist() == [token % 3 for token in range(50)]
    assert "line 12: 1 columns" in refusal(written(tmp_path / "b.csv", CSV + "0,0,0,3,1\n" * 10 + "\n" * 30 + "x\n"))


def test_a_route_trace_that_ends_inside_a_token_was_cut_off(tmp_path: Path) -> None:
    lines = (SAMPLES / "route_trace.csv").read_text().splitlines(keepends=True)
    said = refusal(written(tmp_path / "r.csv", "".join(lines[:-2])), Options())
    assert "turn 1: its last token, step 7, has 2 rows of 4" in said


def test_a_route_trace_without_rows_for_a_layer_of_experts_was_cut_off(tmp_path: Path) -> None:
    lines = (SAMPLES / "route_trace.csv").read_text().splitlines(keepends=True)
    said = refusal(written(tmp_path / "r.csv", "".join(lines[:8])), Options())
    assert "layer 2 has experts but no rows" in said


def test_few_rows_that_name_many_cells_are_refused_before_they_are_spread(tmp_path: Path) -> None:
    rows = "".join(f"0,{token},0,3,1\n" for token in range(4000))
    rows += "".join(f"0,0,{layer},3,1\n" for layer in range(1, 4000))
    tracemalloc.start()
    assert "layer 1 has 1 tokens of 4000 (token 1 is missing)" in refusal(written(tmp_path / "a.csv", CSV + rows))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6
