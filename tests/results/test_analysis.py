"""Analysis: result files come back whole or are refused in one line, and metrics equal hand-worked numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from moereplay.analysis import ranking as ranking_module
from moereplay.analysis.metrics import measured, ranked, with_ratios
from moereplay.results.errors import ResultError
from moereplay.results.files import write_frame
from moereplay.results.read import fields, layers, only, requests, runs
from moereplay.results.result import ALIASES, DOCUMENTED, METRICS, RANKED, Row, formula, named
from moereplay.results.schema import BOUNDS, row_digest, rows_schema
from moereplay.results.settings import setting_kinds
from moereplay.results.stored import NEEDED, load
from moereplay.simulator.config import KINDS
from tests.kit.tiny_runs import by_hand, frame_of, replayed, small_trace, written_before


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    return frame_of(small_trace(), eviction=["lru", "belady"], prefetch=["none", "top_k"], capacity=["25%", "50%"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written_before(tmp_path, *replayed(small_trace(), eviction=["lru", "fifo"], capacity=["25%"]))
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(ResultError) as caught:
        load(folder)
    return str(caught.value)


def rewritten(part: Path, change: Callable[[Row], None]) -> None:
    """A part as another version could have written it, under its right digest."""
    (row,) = pl.read_parquet(part).drop("digest").to_dicts()
    change(row)
    frame = pl.DataFrame([row], schema_overrides={"bounds": pl.Struct(BOUNDS)})
    write_frame(frame.with_columns(pl.lit(row_digest(frame.row(0, named=True))).alias("digest")), part)


def value(table: pl.DataFrame, name: str) -> object:
    return table[name].item()


# Files


def test_parts_come_back_in_the_order_of_their_names(folder: Path) -> None:
    loaded = load(folder)
    assert sorted(loaded["config"].struct.field("eviction")) == ["fifo", "lru"]
    names = [f"part-{identity}.parquet" for identity in loaded["about"].struct.field("identity")]
    assert names == sorted(path.name for path in folder.iterdir())


def test_a_folder_without_results_says_how_to_make_them(tmp_path: Path) -> None:
    (tmp_path / ".part-1.parquet.77.tmp").write_bytes(b"a write that never ended")
    assert refusal(tmp_path) == f"no results in {tmp_path}; make some with: moereplay replay TRACE --out {tmp_path}"


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_a_truncated_part_is_named(folder: Path, kept: int) -> None:
    part = sorted(folder.iterdir())[1]
    part.write_bytes(part.read_bytes()[:kept])
    what = "is damaged: its content does not match its digest" if kept == -1 else "as Parquet"
    message = refusal(folder)
    assert str(part) in message and what in message and "delete it and replay again" in message


def test_no_flipped_bit_gives_other_numbers(folder: Path) -> None:
    """A flip is refused, or lies where no number comes from: Parquet's own statistics and padding."""
    part, truth = sorted(folder.iterdir())[0], load(folder)
    whole = part.read_bytes()
    refused = 0
    for position in range(0, len(whole), len(whole) // 60):
        part.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            assert load(folder).equals(truth)
        except ResultError as error:
            refused += 1
            assert str(error).startswith(str(part))
    assert refused > 10


def test_a_foreign_part_is_named_with_what_it_lacks(folder: Path) -> None:
    part = folder / "part-mine.parquet"
    pl.DataFrame({"rows_version": [1], "config": ["lru"]}).write_parquet(part)
    assert refusal(folder) == f"{part} holds no replay results (config.eviction is missing); move it elsewhere"
    pl.DataFrame({"some": [1]}).write_parquet(part)
    assert f"{part} holds no replay results" in refusal(folder)


def test_a_newer_part_asks_for_an_upgrade(folder: Path) -> None:
    part = sorted(folder.iterdir())[0]
    pl.read_parquet(part).with_columns(rows_version=pl.lit(2, pl.Int64)).write_parquet(part)
    assert refusal(folder) == f"{part} has rows_version 2, newer than 1; upgrade moereplay to read it"


def test_a_part_with_a_column_of_another_type_is_named(folder: Path) -> None:
    part = sorted(folder.iterdir())[1]
    rewritten(part, lambda row: row["totals"].update(hits="many"))
    assert refusal(folder).startswith(f"{part} has unexpected columns: hits holds String, not Int64")


def test_parts_of_before_a_counter_was_added_have_null_for_it(folder: Path) -> None:
    """Nor does it keep old and new parts apart, whatever the counter."""
    old = sorted(folder.iterdir())[0]

    def forget(row: Row) -> None:
        for counted in (row["totals"], *row["per_layer"], *row["per_request"]):
            del counted["predictable"], counted["variation"]

    rewritten(old, forget)
    loaded = load(folder)
    for tidy in (runs(loaded), layers(loaded), requests(loaded)):
        first = tidy["identity"] == tidy["identity"][0]
        for counter in ("predictable", "variation"):
            assert tidy.filter(first)[counter].null_count() == first.sum()
            assert tidy.filter(~first)[counter].null_count() == 0
    assert measured(loaded)["hit_rate"].null_count() == 0


def test_what_a_newer_version_counts_and_sets_is_passed_on(folder: Path) -> None:
    new = sorted(folder.iterdir())[0]

    def add(row: Row) -> None:
        row["config"]["colour"] = "blue"
        for counted in (row["totals"], *row["per_layer"], *row["per_request"]):
            counted["spilled"] = 7

    rewritten(new, add)
    loaded = load(folder)
    assert runs(loaded).select("colour", "spilled").rows() == [("blue", 7), (None, None)]
    assert layers(loaded)["spilled"].null_count() == len(loaded["per_layer"][1])
    assert set(requests(loaded)["spilled"]) == {7, None}
    assert len(only(loaded, colour="blue")) == 1
    assert "colour" in fields(loaded)


def test_the_layout_that_is_read_is_the_layout_that_is_written() -> None:
    schema = rows_schema(setting_kinds(), KINDS)
    for column, names in NEEDED.items():
        dtype = schema[column]
        inner = dtype.inner if isinstance(dtype, pl.List) else dtype
        assert isinstance(inner, pl.Struct) and set(names) <= {field.name for field in inner.fields}


# Tidy frames


def test_runs_keep_the_capacity_asked_for_apart_from_capacity_misses(frame: pl.DataFrame) -> None:
    tidy = runs(frame)
    assert set(tidy["capacity"]) == {"25%", "50%"}
    assert tidy["capacity_misses"].to_list() == [totals["capacity"] for totals in frame["totals"]]


def test_layers_and_requests_sum_to_the_totals(frame: pl.DataFrame) -> None:
    for tidy in (layers(frame), requests(frame)):
        sums = tidy.group_by("identity", maintain_order=True).agg(pl.col("hits", "misses", "capacity_misses").sum())
        assert sums.drop("identity").equals(runs(frame).select("hits", "misses", "capacity_misses"))


def test_layers_have_a_row_per_layer_and_phase(frame: pl.DataFrame) -> None:
    counted = layers(frame).group_by("phase").len().sort("phase")
    assert counted.rows() == [("decode", 8 * 4), ("prefill", 8 * 4)]


def test_only_keeps_the_wanted_configurations(frame: pl.DataFrame) -> None:
    kept = runs(only(frame, prefetch="none", eviction=["lru", "belady"], trace=runs(frame)["trace"][0][:6]))
    assert (len(kept), set(kept["prefetch"])) == (4, {"none"})


def test_only_says_which_fields_and_values_there_are(frame: pl.DataFrame) -> None:
    with pytest.raises(ResultError, match=r"^unknown configuration field 'evict': did you mean eviction[?]$"):
        only(frame, evict="lru")
    for wanted in ("mru", ["lru", "mru"]):
        with pytest.raises(ResultError, match=r"^no result has eviction = mru; found belady, lru$"):
            only(frame, eviction=wanted)


def test_drafts_are_found_by_the_parts_that_are_named() -> None:
    stored = ("0", "2:accept=0.7:rejected=other", "2:accept=0.8:rejected=own", "12:accept=0.8/0.2:rejected=other")
    frames = [by_hand({}).with_columns(pl.col("config").struct.with_fields(draft=pl.lit(text))) for text in stored]
    frame = pl.concat(
        [*frames, by_hand({}).with_columns(pl.col("config").struct.with_fields(draft=pl.lit("recorded:rejected=own")))]
    )
    counts = {"0": 1, "2": 2, "2:accept=.80": 1, "2:rejected=own": 1, "12:accept=.8/.2": 1, "recorded": 1}
    assert {typed: len(only(frame, draft=typed)) for typed in counts} == counts
    assert len(only(frame, draft=stored[1])) == 1
    for absent in ("8", "accept=0.8", "12:accept=.8", "0.2", "2:kept=own"):
        with pytest.raises(ResultError, match="no result has draft = "):
            only(frame, draft=absent)


def test_warm_content_is_text_in_tidy_frames() -> None:
    warm = by_hand({}).with_columns(pl.col("config").struct.with_fields(warm=pl.lit([[0, 3], [1, 5]])))
    assert value(runs(warm), "warm") == "0:3 1:5"
    assert len(only(warm, warm="0:3 1:5")) == 1


# Metrics


def test_ratios_of_counters() -> None:
    counters = {"accesses": 40, "hits": 10, "late": 6, "misses": 24, "collisions": 3}
    counters |= {"prefetch_started": 20, "prefetch_used": 8, "predicted": 50, "predicted_demanded": 30}
    seen = measured(by_hand(counters))
    assert (value(seen, "hit_rate"), value(seen, "late_rate")) == (10 / 40, 6 / 40)
    assert (value(seen, "collisions_per_miss"), value(seen, "collisions_per_access")) == (3 / 24, 3 / 40)
    # 8 of 20 transfers paid; 8 of the 8 + 24 experts that had to be fetched were fetched ahead of their gate
    assert (value(seen, "prefetch_precision"), value(seen, "prefetch_recall")) == (0.4, 0.25)
    assert value(seen, "predictor_precision") == 0.6


def test_an_oracle_recalls_everything_from_however_far_it_looks() -> None:
    prefetches = ["oracle", "oracle:horizon=2", "oracle:horizon=3", "oracle:recall=0.5:horizon=3", "top_k:depth=1"]
    seen = measured(frame_of(small_trace(), prefetch=prefetches, capacity=["50%"]))
    recalls = seen["predictor_recall"].to_list()
    assert recalls[:3] == [1.0] * 3
    assert 0.4 < recalls[3] < 0.6 and 0.7 < recalls[4] < 0.9


def test_who_predicts_nothing_has_no_recall(frame: pl.DataFrame) -> None:
    seen = measured(frame).filter(pl.col("prefetch") == "none")
    assert seen["predictor_recall"].null_count() == len(seen) > 0


def test_bounds_as_hit_rates() -> None:
    seen = measured(by_hand({}, bound={"belady_hits": 30, "accesses": 40, "compulsory": 4}))
    assert (value(seen, "belady_hit_rate"), value(seen, "compulsory_limit")) == (0.75, 0.9)


def test_latencies_over_requests() -> None:
    # TTFT 1, 2 and 6 ms: mean 3, median 2; the fourth request has no prompt. Decoding: 40 ms for 8 passes
    times = [(1_000_000, 10_000_000, 1), (2_000_000, 10_000_000, 3), (6_000_000, 0, 0), (None, 20_000_000, 4)]
    seen = measured(
        by_hand({}, (), [dict(zip(("ttft_ns", "decode_ns", "decode_tokens"), t, strict=True)) for t in times])
    )
    assert (value(seen, "ttft_mean_ms"), value(seen, "ttft_median_ms")) == (3.0, 2.0)
    assert (value(seen, "tpot_ms"), value(seen, "tokens_per_s")) == (5.0, 200.0)


def test_what_never_happened_is_null() -> None:
    seen = measured(by_hand({"steps": 0}, [{"layer": 0}], [{}]))
    assert {name for name in DOCUMENTED if value(seen, name) is not None} == {"gb_moved", "gb_lower"}


def test_every_ratio_is_documented_by_its_formula() -> None:
    assert formula("prefetch_recall") == "prefetch_used / (prefetch_used + misses)"
    assert all(formula(name) for name in DOCUMENTED) and set(DOCUMENTED) <= set(measured(by_hand({})).columns)


def test_layers_and_requests_have_the_ratios_that_their_counters_feed(frame: pl.DataFrame) -> None:
    for tidy in (layers(frame), requests(frame)):
        seen = with_ratios(tidy)
        assert seen["hit_rate"].to_list() == [h / a for h, a in tidy.select("hits", "accesses").iter_rows()]
        assert "belady_hit_rate" not in seen.columns and "stall_share" not in seen.columns


def test_time_is_dense_expert_and_stall(frame: pl.DataFrame) -> None:
    seen = runs(frame)
    assert (seen["dense_ns"] + seen["expert_ns"] + seen["stall_ns"]).equals(seen["time_ns"].alias("dense_ns"))
    assert seen["time_ns"].equals(
        requests(frame).group_by("identity", maintain_order=True).last()["end_ns"].alias("time_ns")
    )


# Ranking


def ranking(frame: pl.DataFrame, by: str = "hit_rate") -> pl.DataFrame:
    return pl.DataFrame(ranking_module.ranking(frame.to_dicts(), by))


def test_the_ranking_has_the_figures_that_frames_have(frame: pl.DataFrame) -> None:
    """Two ways to the same numbers: one for a table without polars, one for thousands of rows."""
    for row in frame.iter_slices(1):
        (line,), (expected,) = ranking_module.ranking(row.to_dicts()), measured(row).select(list(RANKED)).to_dicts()
        assert {name: line[name] for name in RANKED} == pytest.approx(expected, rel=1e-15, nan_ok=False)


def test_what_is_not_defined_comes_last_and_is_null(frame: pl.DataFrame) -> None:
    rows = frame.to_dicts()
    rows[0]["totals"]["accesses"] = 0
    rows[0]["bounds"] = None
    for request in rows[0]["per_request"]:
        request["ttft_ns"], request["decode_ns"] = None, 0
    first = rows[0]["about"]["capacity_bytes"]
    *_, last = ranking_module.ranking([row for row in rows if row["about"]["capacity_bytes"] == first])
    empty = {name for name in RANKED if last[name] is None}
    assert empty == {"hit_rate", "belady_hit_rate", "compulsory_limit", "ttft_mean_ms", "tokens_per_s"}
    assert last["tpot_ms"] == 0


def test_the_ranking_shows_what_varies_and_starts_with_the_best(frame: pl.DataFrame) -> None:
    table = ranking(frame)
    assert table.columns == ["identity", "capacity", "eviction", "prefetch", *RANKED]
    assert table["capacity"].to_list() == ["25%"] * 4 + ["50%"] * 4
    assert all(rows["hit_rate"].is_sorted(descending=True) for _, rows in table.group_by("capacity"))
    assert {table["eviction"][at] for at in (0, 4)} == {"belady"}


def test_a_policy_of_a_file_is_found_without_its_digest(frame: pl.DataFrame) -> None:
    config = pl.col("config").struct
    named = pl.when(config.field("eviction") == "lru").then(pl.lit("often@9c93721586c2:a=1")).otherwise(pl.lit("lru"))
    own = frame.with_columns(config.with_fields(eviction=named))
    for name in ("often:a=1", "often@9c93721586c2:a=1"):
        assert len(only(own, eviction=name)) == len(only(own, eviction="lru")) == 4
    assert len(only(own, eviction=["often:a=1", "lru"])) == len(own)


def test_a_single_result_is_ranked_by_its_eviction_alone(frame: pl.DataFrame) -> None:
    table = ranking(only(frame, eviction="lru", prefetch="none", capacity="25%"))
    assert table.columns == [
        "identity",
        "eviction",
        *RANKED,
    ]


def test_without_prefetch_no_policy_beats_the_bounds(frame: pl.DataFrame) -> None:
    table = ranking(only(frame, prefetch="none"))
    assert (table["hit_rate"] <= table["belady_hit_rate"]).all()
    assert (table["belady_hit_rate"] <= table["compulsory_limit"]).all()


def test_the_ranking_can_be_by_time_and_refuses_other_columns(frame: pl.DataFrame) -> None:
    assert ranking(only(frame, capacity="25%"), by="tpot_ms")["tpot_ms"].is_sorted()
    with pytest.raises(ResultError, match=r"^unknown ranking column 'tpot': did you mean tpot_ms[?]$"):
        ranking(frame, by="tpot")


def test_the_order_of_rows_in_files_does_not_matter(frame: pl.DataFrame) -> None:
    assert ranking(frame.reverse()).equals(ranking(frame))


def test_fields_start_with_what_a_reader_compares(frame: pl.DataFrame) -> None:
    assert fields(frame)[:4] == ["model", "trace", "eviction", "prefetch"]


@pytest.mark.parametrize(("earlier", "present"), ALIASES.items())
def test_earlier_names_of_metrics_are_read(earlier: str, present: str, frame: pl.DataFrame) -> None:
    assert earlier not in METRICS and named(earlier) == present in METRICS
    if present in RANKED:
        assert ranked(frame, earlier).equals(ranked(frame, present))
