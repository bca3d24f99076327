"""Measured runs of a table as settings of an engine: what is expressed, what is refused, and what two runs fit."""

from __future__ import annotations

from collections import defaultdict

import pytest

from evidence.hybrid_cells import read
from evidence.speeds import published, within
from moereplay.sweeps.recommend.answer import replayed
from moereplay.sweeps.recommend.measured import (
    Row,
    Sample,
    decoded,
    positions,
    prompt,
    samples,
    spent,
)
from moereplay.sweeps.recommend.series import fit, fit_one, rates_known
from moereplay.sweeps.recommend.settings import UNIFORM
from tests.kit.measured_series import table
from tests.kit.recordings import FOLDER

SPEEDS = FOLDER.parent / "speeds" / "cells.csv"

#: 40 layers of 64 experts of 2 MiB, 4 of them active, on a machine with known rates; other columns are empty.
KNOWN = {
    "engine": "llama.cpp b1",
    "model": "a model",
    "bits": "4.5",
    "moe_layers": "40",
    "experts": "64",
    "top_k": "4",
    "expert_mib": "2",
    "model_gib": "6",
    "gpu": "RTX 3090",
    "n_gpu": "1",
    "cpu": "EPYC 32c",
    "ram_gib": "64",
    "ram_bw_gbs": "50",
    "ram_bw_kind": "measured",
    "pcie": "4.0 x16",
    "placement": "cpu_layers",
    "cpu_moe_layers": "20",
    "on_miss": "cpu",
    "load": "ram",
    "decode_tok_s": "20",
    "question": "cpu-share",
    "clean": "A",
}


def row(**said: str) -> Row:
    return defaultdict(str, KNOWN | said)


def time_of(**said: str) -> float:
    return decoded(row(**said), strict=True).time(1, 0)


def test_a_layer_on_the_cpu_takes_the_time_of_its_active_bytes():
    # 4 experts of 2 MiB per layer: at 50 instead of 100 GB/s, 20 layers take 20 x 8 MiB x (1/50 - 1/100) ns longer
    spent = [time_of(cpu_moe_layers=str(layers)) for layers in (10, 20, 40)]
    assert (spent[2] - spent[1]) / 20 == pytest.approx((spent[1] - spent[0]) / 10)
    slower = spent[1] - time_of(ram_bw_gbs="100")
    assert slower == pytest.approx(20 * 8 * 2**20 * (1 / 50 - 1 / 100), rel=1e-3)


def test_a_prompt_streams_the_experts_that_each_batch_uses():
    # 1,000 tokens in 2 batches of 512: all 64 experts are used, so 20 layers x 64 x 2 MiB cross PCIe 4.0 x16 twice
    sample = prompt(row(prompt_tokens="1000", ubatch="512", prefill_tok_s="500"))
    assert sample.measured == 2e9
    assert sample.time(1, 0) == pytest.approx(2 * 20 * 64 * 2 * 2**20 / 25.1, rel=1e-3)
    assert sample.time(1, 7) - sample.time(1, 0) == pytest.approx(1000 * 7, rel=1e-3)


def test_what_ram_lacks_without_a_gpu_comes_from_the_disk():
    # 5,120 MiB of experts and 1 GiB of dense weights in 4 GiB: RAM holds part of the experts, and the disk the rest
    run = decoded(row(gpu="none", placement="all_cpu", ram_limit_gib="4", ssd_gbs="2"), strict=True).run
    assert run is not None and 0.3 < run.setting.fast_bytes / run.load.expert_bytes < 1
    assert spent(run).disk > 0 and spent(run).link == spent(run).cpu == 0
    assert not rates_known(decoded(row(gpu="none", placement="all_cpu", ram_limit_gib="4"), strict=True))


def test_ktransformers_places_experts_uniformly_unless_it_is_told_their_use():
    def holds(engine: str, policy: str) -> str:
        of = row(engine=engine, placement="expert_share", gpu_expert_share="0.3", policy=policy, cpu_moe_layers="")
        run = decoded(of, strict=True).run
        assert run is not None
        return run.setting.mode.holds

    assert holds("kt-kernel + SGLang", "static") == holds("kt-kernel + SGLang", "uniform") == UNIFORM
    assert holds("kt-kernel + SGLang", "static by frequency") == holds("llama.cpp b1", "static") == "static"


def test_a_measured_hit_rate_is_that_of_the_replay():
    of = row(**SLOTS, on_miss="fetch", hit_pct="61")
    run = decoded(of, strict=True).run
    assert run is not None and replayed(run.load, run.setting, 0).hit == pytest.approx(0.61, abs=0.02)


def test_a_token_reads_the_positions_that_are_filled():
    assert positions(row(ctx="262144", prompt_tokens="2048")) == 2048
    assert positions(row(ctx="262144")) == positions(row()) == 4096
    assert positions(row(ctx="1024")) == 1024


def test_one_run_that_waits_for_a_disk_fits_the_rate_of_its_misses():
    over = row(ram_limit_gib="2", cpu_moe_layers="40", ssd_gbs="2", load="mmap", decode_tok_s="1")
    factor, step = fit_one(decoded(over, strict=True))
    assert factor > 1 and step == 0
    assert fit_one(decoded(row(decode_tok_s="1"), strict=True))[0] == 1  # in RAM, whose rate is known


def test_one_run_of_fetches_fits_the_step_where_the_links_rate_is_published():
    fetched = {
        "engine": "FreeToken",
        "placement": "slots",
        "slots_per_layer": "16",
        "on_miss": "fetch",
        "policy": "lru",
    }
    of = row(**fetched, decode_tok_s="1", ram_bw_gbs="", cpu_moe_layers="")
    factor, step = fit_one(decoded(of, strict=False))
    assert factor == 1 and step > 0.5e9
    factor, step = fit_one(decoded(row(**{**of, "pcie": ""}), strict=False))
    assert factor > 1 and step == 0


@pytest.mark.parametrize(
    ("said", "rate"),
    [
        ("12.5 GB/s measured", 12.5e9),
        ("3.0 x16, 13.17 GB/s", 13.17e9),
        ("4.0 x16", 25.1e9),
    ],
)
def test_a_measured_rate_of_the_link_is_taken(said: str, rate: float):
    run = decoded(row(pcie=said), strict=True).run
    assert run is not None and run.machine.platform.links[0].bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize(("factor", "step"), [(0.8, 3e6), (2.5, 40e6)])
def test_two_runs_fit_the_factor_and_the_step_that_made_them(factor: float, step: float):
    """Times are made by a known factor and step; one run with a known rate of RAM fits the step alone."""

    def made(misses: float) -> Sample:
        return Sample(row(), lambda f, s: 5e6 + misses * f + s, 5e6 + misses * factor + step)

    assert fit(made(60e6), made(10e6)) == pytest.approx((factor, step), rel=1e-6)
    assert fit_one(Sample(row(), lambda f, s: 5e6 + 1e6 * f + s, 9e6)) == (1, pytest.approx(3e6))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"clean": "C"}, "incomplete"),
        ({"draft": "mtp"}, "drafts or several requests"),
        ({"concurrency": "4"}, "drafts or several requests"),
        ({"decode_tok_s": ""}, "no decode rate"),
        ({"expert_mib": ""}, "shape or bytes of the model not published"),
        ({"model_gib": "4"}, "experts larger than the file"),
        ({"excluded": "a change of threads"}, "a change of threads"),
        ({"dense_gib": "0"}, "bytes of dense weights that a token reads"),
        ({"engine": "tensorblast 2"}, "an engine whose cost per layer is not known"),
        ({"gpu": "M3 Max"}, "memory shared with the GPU"),
        ({"ram_bw_gbs": ""}, "rate of RAM not published"),
        ({"n_gpu": "2"}, "several GPUs"),
        ({"placement": "ssd"}, "placement ssd: expected cpu_layers"),
    ],
)
def test_what_no_setting_has_is_refused_by_name(said: dict[str, str], why: str):
    found, refused = samples([row(), row(**said)], strict=True)
    assert (len(found), len(refused)) == (1, 1)
    assert why in refused[0][1]


#: Names and remarks of published tables, which once decided what a run was taken for.
STRANGE = {
    "engine": "tensorblast 2",
    "model": "Qwen3.8-Flash-Next",
    "series": "kt-codernext",
    "varied": "threads",
    "notes": "cold; dense trunk on CPU; cpu + cache; a working set",
    "ram_bw_kind": "measured, 2 socket(s) x 8ch (307 GB/s each)",
}
SLOTS = {"placement": "slots", "slots_per_layer": "16", "cpu_moe_layers": "", "policy": "lru"}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"load": "lookup table"},
        SLOTS | {"on_miss": "fetch"},
        SLOTS | {"on_miss": "hybrid"},
        SLOTS | {"on_miss": "cpu", "policy": "static by frequency"},
        SLOTS | {"placement": "expert_share", "gpu_expert_share": "0.3", "policy": "random"},
        {"gpu": "none", "placement": "all_cpu"},
        {"question": "prefill", "prompt_tokens": "1000", "prefill_tok_s": "300"},
    ],
)
def test_names_and_remarks_of_a_run_change_nothing(said: dict[str, str]):
    plain = {"engine": "abc", "model": "xyz"}
    found, refused = samples([row(**said, **plain), row(**{**STRANGE, **said})], strict=False)
    assert not refused
    assert found[0].time(1, 0) == found[1].time(1, 0) > 0


def test_who_serves_a_miss_is_what_the_column_says():
    # llama.cpp's own mode computes misses on the CPU; these slots are filled over the link at 25.1 GB/s
    fetched = decoded(row(**SLOTS, on_miss="fetch"), strict=True).run
    assert fetched is not None and fetched.setting.mode.miss == "fetch"
    parts = spent(fetched)
    assert parts.link > 0 and parts.cpu == 0
    computed = decoded(row(**SLOTS, on_miss="cpu"), strict=True).run
    assert computed is not None and spent(computed).link == 0
    _, refused = samples([row(**SLOTS, on_miss="a wizard"), row(**{**SLOTS, "policy": "hot"})], strict=True)
    assert [why.partition(":")[0] for _, why in refused] == ["on_miss a wizard", "policy hot"]


def test_the_memory_of_a_card_is_the_runs():
    # slots of unknown number fill what 4 of the card's 24 GiB leave: 2,560 experts of 2 MiB are 5 GiB, 1 GiB is dense,
    # and the runtime takes 500 MB: (4 - 1 - .466) / 5 = .507
    bare = SLOTS | {"slots_per_layer": "", "on_miss": "fetch", "engine": "FreeToken"}
    runs = [decoded(row(**bare, vram_gib=size), strict=True).run for size in ("4", "")]
    held = [run.setting.fast_bytes / run.load.expert_bytes for run in runs if run]
    assert held == [pytest.approx(0.507, abs=0.001), 1]


def test_a_table_of_strangers_needs_no_column_of_ours(tmp_path):
    table(tmp_path).rename(tmp_path / "cells.csv")
    found, refused = samples(read(tmp_path / "cells.csv"), strict=False)
    assert len(found) == 5 and not refused


@pytest.mark.slow
@pytest.mark.skipif(not SPEEDS.exists(), reason="other people's measured runs are not here")
def test_four_of_five_runs_lie_in_the_range_that_other_machines_give() -> None:
    found = within(published(SPEEDS)[0])
    assert set(found) == {"hybrid", "resident", "unified"}
    assert all(inside >= 0.8 * runs for inside, runs in found.values())
