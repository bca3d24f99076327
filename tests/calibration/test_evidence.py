"""Cells are predicted or refused by name; the reader takes any file and says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.calibration.evidence import document, from_fits, predictions
from moereplay.calibration.files import read_folder, read_lines, read_series
from moereplay.calibration.prediction import Prediction, rounded, summary
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platforms import platform
from tests.kit.every import every
from tests.kit.evidence_folder import EXPERTS, LAYERS, K, made, route, row

REFUSED = {
    "bytes-only": ({"clean": "counters, hits and bytes only"}, "hits and bytes only"),
    "untimed": ({"hit_pct": 50}, "time per decoded token"),
    "elsewhere": (
        {"device": "sofa", "tpot_ms": 9, "hit_pct": 50},
        "sofa: known devices are desk",
    ),
    "unknown": ({"tpot_ms": 9}, "bytes"),
    "ahead": ({"tpot_ms": 9, "hit_pct": 50, "prefetch": "next layer"}, "next layer"),
    "on-cpu": ({"tpot_ms": 9, "hit_pct": 50, "policy": "none: CPU executes"}, "CPU"),
    "mapped": ({"tpot_ms": 9, "engine": "plain mmap, kernel page cache"}, "page cache"),
    "sizeless": ({"tpot_ms": 9, "hit_pct": 50, "expert_bytes_mean": ""}, "expert_bytes_mean"),
    "layerless": (
        {"tpot_ms": 9, "hit_pct": 50, "moe_layers": ""},
        "moe_layers",
    ),
    "denseless": ({"tpot_ms": 9, "hit_pct": 50, "model": "Other", "dense_mib": ""}, "Other: set dense_mib"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    more = [row(name, **said) for name, (said, _) in REFUSED.items()]
    more.append(row("paging", tpot_ms=900, hit_pct=50, clean="the machine pages: paging"))
    return made(tmp_path / "made", more=more)


def found(folder: Path) -> dict[str, Prediction]:
    evidence = read_folder(folder)
    machines = from_fits(evidence, ["made-off*", "made-half*"], platform("phone-ufs4"))
    return {each.cell: each for each in predictions(evidence, machines)}


DARK = {"model": "Dark", "dense_mib": "", "hit_pct": 50, "quant": "Q4_K_M"}


def found_in_the_dark(tmp_path: Path, fit: list[str], more: list[dict[str, object]]) -> dict[str, Prediction]:
    evidence = read_folder(made(tmp_path / "made", more=more))
    machines = from_fits(evidence, fit, platform("phone-ufs4"))
    return {each.cell: each for each in predictions(evidence, machines)}


def test_a_run_with_unknown_dense_bytes_is_predicted_only_where_the_fit_had_its_experts_alone(tmp_path):
    changed = {"same": {}, "fewer": {"k": K - 1}, "other": {"quant": "Q8_0"}, "larger": {"expert_bytes_mean": 3 << 20}}
    changed |= {"known": {"k": K - 1, "dense_mib": 500}}
    more = [row(name, tpot_ms=90, **DARK | said) for name, said in changed.items()]
    more += [row(f"fit-{hits}", tpot_ms=190 - hits, **DARK | {"hit_pct": hits}) for hits in (20, 80)]
    cells = found_in_the_dark(tmp_path, ["fit-*"], more)
    refused = {name: cells[name].reason for name in [*changed, "fit-20"] if cells[name].refused}
    assert set(refused) == {"fewer", "other", "larger", "known"}  # the rate hides what `known` would count again
    assert all("Dark" in reason and "dense_mib" in reason for reason in refused.values())
    assert f"k = {K - 1}" in refused["fewer"] and f"k = {K}" in refused["fewer"] and "Q8_0" in refused["other"]


def test_a_rate_that_hides_unknown_dense_bytes_of_two_models_predicts_neither(tmp_path):
    more = [row(f"fit-{hits}", tpot_ms=190 - hits, **DARK | {"hit_pct": hits}) for hits in (20, 80)]
    more += [row("fit-night", tpot_ms=400, **DARK | {"model": "Night", "k": 2 * K}), row("held", tpot_ms=90, **DARK)]
    cells = found_in_the_dark(tmp_path, ["fit-*"], more)
    assert all(cells[name].refused for name in ("fit-20", "fit-night", "held"))
    assert "Night" in cells["held"].reason and "Dark" in cells["fit-night"].reason


def test_every_cell_is_predicted_or_refused_with_a_reason(folder):
    cells = found(folder)
    assert {name for name, each in cells.items() if each.refused} == set(REFUSED)
    for name, (_, reason) in REFUSED.items():
        assert reason in cells[name].reason, name
        assert cells[name].document()["status"] == "refused"


def test_a_time_that_is_not_the_machines_is_predicted_and_not_counted(folder):
    each = found(folder)["paging"]
    assert each.time_error is None and each.reason.startswith("its time is not compared: the machine pages")
    assert each.error["tpot_ms"] == pytest.approx(each.predicted["tpot_ms"] / 900 - 1)


def test_the_document_has_measured_predicted_and_their_error_by_column(folder):
    whole: Any = document(list(found(folder).values()))
    cell = next(each for each in whole["cells"] if each["cell"] == "made-tenth-ov")
    assert (cell["status"], cell["basis"], cell["role"]) == ("predicted", "published", "held_out")
    assert cell["error"].keys() == {"tpot_ms", "tpot_median_ms", "compute_ms", "stall_ms", "mgmt_ms"}
    assert cell["predicted"].keys() >= {"tpot_ms", "tok_s", "compute_ms", "stall_ms", "mgmt_ms", "tpot_median_ms"}
    for name, error in cell["error"].items():
        assert error == pytest.approx(cell["predicted"][name] / cell["measured"][name] - 1, abs=1e-4)
    assert whole["summary"]["predicted"] + whole["summary"]["refused"] == len(whole["cells"]) == 7 + len(REFUSED) + 1
    assert (whole["summary"]["over"], whole["summary"]["cells"]) == ("held_out", 3)


@pytest.mark.slow
def test_a_runs_own_routing_is_replayed_and_that_of_its_model_beside_what_it_published(tmp_path):
    said = {"tpot_ms": 90, "hit_pct": 50, "policy": "lru", "cache_mib": 1000}
    rows = [
        row("own", trace_file="routes/a.jsonl", **said),
        row("shared", notes="the model's routing is in routes/a.jsonl", **said),
        row("none", notes="routes/b.jsonl is lost", **said),
    ]
    made(tmp_path / "made", more=rows)
    (tmp_path / "made" / "routes").mkdir()
    draw = np.random.default_rng(3)
    tokens = [[sorted(draw.choice(EXPERTS, K, False).tolist()) for _ in range(LAYERS)] for _ in range(12)]
    lines = [json.dumps({"tok": at, "layers": layers}) for at, layers in enumerate(tokens)]
    (tmp_path / "made" / "routes" / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))

    own, shared, none = (found(tmp_path / "made")[name] for name in ("own", "shared", "none"))
    assert (own.basis, shared.basis, none.basis) == ("replay", "published", "published")
    assert own.predicted["hit_pct"] == pytest.approx(lru_hits(tokens, 500), rel=1e-5)
    assert shared.more["model_routing"] == {"file": "routes/a.jsonl", **rounded(own.predicted)}
    assert (shared.predicted, shared.error) == (none.predicted, none.error)
    assert (none.more, own.error["hit_pct"]) == ({}, own.predicted["hit_pct"] / 50 - 1)


@every("decoded", ["", "-1"], apart=True)
def test_routing_without_decoded_experts_is_not_replayed_and_says_why(tmp_path, decoded):
    said = {"tpot_ms": 90, "hit_pct": 50, "policy": "lru", "cache_mib": 1000}
    made(tmp_path / "made", more=[row("own", trace_file="routes/a.csv", **said)])
    route(tmp_path / "made" / "routes" / "a.csv", LAYERS, decoded)
    own = found(tmp_path / "made")["own"]
    assert own.basis == "published" and str(own.more["not_replayed"]).startswith("its routing has no decoded token")


def lru_hits(tokens: list[list[list[int]]], slots: int) -> float:
    """Percent, by a list from the least to the most recently used; a step's experts do not push one another out."""
    held: list[tuple[int, int]] = []
    hits = count = 0
    for layers in tokens:
        for layer, experts in enumerate(layers):
            count += len(experts)
            hits += sum((layer, expert) in held for expert in experts)
            held = [each for each in held if each[0] != layer or each[1] not in experts]
            held = [*held, *((layer, expert) for expert in experts)][-slots:]
    return 100 * hits / count


def test_a_summary_is_of_signed_errors():
    off = [
        Prediction(str(at), "d", "fit", predicted={"tpot_ms": 10 + at}, measured={"tpot_ms": 10}) for at in (-4, 1, 2)
    ]
    whole = summary(off)
    assert whole["median_abs_error"] == pytest.approx(0.2) and whole["bias"] == pytest.approx(-0.1 / 3)
    assert (whole["worst"], whole["worst_cell"], whole["mape"]) == (
        pytest.approx(-0.4),
        "-4",
        pytest.approx(0.7 / 3),
    )
    assert summary([])["mape"] is None


def test_runs_of_one_name_all_count_in_a_summary():
    alike = [Prediction("run", "d", "fit", predicted={"tpot_ms": 10 + at}, measured={"tpot_ms": 10}) for at in (2, -1)]
    whole = summary(alike)
    assert (whole["cells"], whole["worst"]) == (2, pytest.approx(0.2))


def test_the_first_kind_of_time_that_was_measured_counts():
    times = {"tpot_ms": 10.0, "tpot_median_ms": 9.0}
    assert Prediction("a", "d", "fit", predicted=times, measured={"tpot_ms": 20.0}).time_error == -0.5
    assert Prediction("a", "d", "fit", predicted=times, measured=times | {"tpot_ms": 20.0}).time_error == 0


WRONG = {
    "cell,device,model\na,d\n": "line 2: 2 cells: expected 3",
    "cell,device\n": "missing column 'model'",
    "": "no rows",
    'cell,device,model\n"a,b,c\n': "line 2: ",
    "cell,device,model,k\na,d,m,four\n": "line 2: invalid k 'four': expected a whole number",
    "cell,device,model,k\na,d,m,-1\n": "line 2: invalid k '-1'",
    "cell,device,model,k\na,d,m,inf\n": "line 2: invalid k 'inf'",
    "cell,device,model,hit_pct\na,d,m,100.5\n": "line 2: invalid hit_pct '100.5': expected a number from 0 to 100",
    "cell,device,model\na,d,m\n# b\na,d,m\n": "line 4: cell 'a'",
    "cell,device,model\n": "no cells",
}


@every("text, said", WRONG.items(), apart=True)
def test_a_wrong_table_is_refused_by_file_and_line(tmp_path, text, said):
    (tmp_path / "cells.csv").write_text(text)
    with pytest.raises(ConfigError, match="cells") as error:
        read_folder(tmp_path)
    assert said in str(error.value)


LOG = "token,wall_ms,read_bytes,mgmt_ms,majflt\n1,10,100,,7\n2,20,0,,8\n"


def test_a_log_has_arrays_of_the_columns_that_it_has(tmp_path):
    (tmp_path / "log.csv").write_text("# remark\n" + LOG + "# summary 2 tokens\n")
    series = read_series(tmp_path / "log.csv")
    assert (series.wall_ms.tolist(), series.read_bytes.tolist(), series.mgmt_ms) == ([10, 20], [100, 0], None)
    assert series.part(slice(1, None)).wall_ms.tolist() == [20]


@every(
    "text, said",
    [
        (LOG.replace("2,20", "2,"), "line 3: empty wall_ms"),
        (LOG.replace("wall_ms", "wall"), "missing column 'wall_ms'"),
        (LOG.replace("1,10", "1,x"), "line 2: invalid wall_ms 'x'"),
        ("wall_ms,read_bytes\n,\n", "empty wall_ms: expected a number for each token"),
        ("wall_ms,read_bytes\n", "no tokens"),
    ],
    apart=True,
)
def test_a_wrong_log_is_refused_by_file_and_line(tmp_path, text, said):
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_series(tmp_path / "log.csv")
    assert said in str(error.value) and "log.csv" in str(error.value)


@settings(max_examples=150, deadline=None)
@given(text=st.binary(max_size=80) | st.text("ab,1\n\"'#.-e", max_size=80).map(str.encode))
def test_any_bytes_are_rows_or_one_line_of_complaint(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("any") / "any.csv"
    file.write_bytes(text)
    try:
        lines = read_lines(file, "cells")
    except ConfigError as wrong:
        assert str(wrong).startswith(str(file)) and "\n" not in str(wrong)
    else:
        assert all(line.number > 1 and len(line.cells) <= len(text) + 1 for line in lines)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_a_log_is_read_as_it_was_written(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("log") / "log.csv"
    file.write_text("wall_ms,read_bytes\n" + "".join(f"{wall!r},{read}\n" for wall, read in rows))
    series = read_series(file)
    assert np.array_equal(np.c_[series.wall_ms, series.read_bytes], np.array(rows, float))
