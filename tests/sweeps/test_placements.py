"""The same bytes of VRAM placed for good or as a cache: costs, where a cache begins to lose, text and figures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moereplay.analysis.figures.chart import rows_of
from moereplay.analysis.figures.drawing import rendered, save
from moereplay.analysis.figures.machines import speed_by_memory, token_time
from moereplay.analysis.quick_answer import placement_lines
from moereplay.simulator.capacity import of_layers
from moereplay.simulator.config import configure
from moereplay.simulator.machine import Machine, assembled, of_platform
from moereplay.simulator.platforms import platform
from moereplay.simulator.replay import replay
from moereplay.sweeps.recommend.engines import Mode
from moereplay.sweeps.recommend.hits import GLOBAL_LRU, LAYERS, LRU, POINTS, STATIC, Hits
from moereplay.sweeps.recommend.placements import CACHE_US, SCHEMES, Scheme, placements, surface
from moereplay.sweeps.recommend.quick import Load, quick
from moereplay.sweeps.recommend.quick_document import quick_document
from moereplay.sweeps.recommend.token_time import CPU_LEFT, Prices, prices, token
from moereplay.traces.recorder import from_arrays
from moereplay.traces.schema import Geometry
from tests.kit.command import moereplay_here as moereplay
from tests.kit.command import unfolded
from tests.kit.every import every

GB = 10**9
PRICE = Prices(layers=10, k=4, dense=1000, expert=10, cpu=50, link=40, latency=5, disk=200, disk_latency=30)
LINE = np.linspace(0, 1, POINTS)
#: Hits of a cache that is better while it is small, and of a list that is better once it holds the popular experts.
CACHED = np.interp(LINE, (0, 0.5, 0.7, 1), (0, 0.8, 0.86, 1))
LISTED = np.interp(LINE, (0, 0.5, 0.7, 1), (0, 0.5, 0.95, 1))


def mode(**change: Any) -> Mode:
    base = {"name": "a", "flags": "", "holds": GLOBAL_LRU, "miss": "cpu", "overlap": True, "source": "a test"}
    return Mode.model_validate(base | change)


def load(cached: np.ndarray = LINE, listed: np.ndarray = LINE) -> Load:
    """Eight layers of 16 experts of 100 MB, 2 active, over 1 GB of dense weights: 12.8 GB of experts."""
    geometry = Geometry(layers=8, experts=16, k=2, expert_bytes=(100_000_000,) * 8, expert_bits=4.5, dense_bytes=GB)
    return Load(geometry, 0, 0, (Hits("a curve", {LRU: cached, GLOBAL_LRU: cached, STATIC: listed}),))


def machine(vram: str = "6GB", ram: str = "64GB") -> Machine:
    """Sizes are in powers of ten, as those of the models here."""
    vram, ram = (each.replace("GB", "000000000B") for each in (vram, ram))
    return assembled(gpu="RTX 3090", vram=vram, ram=ram, ram_rate="50GB/s", disk="3GB/s")


# -- costs


def test_uploads_for_later_take_their_share_of_the_bus_from_the_cpu() -> None:
    # half of 40 experts miss: the CPU needs 20 x 50, their uploads 20 x 40 and ten latencies of 5 of the link
    work, wire = 1000, 850
    assert token(PRICE, mode(), 0.5, 1, 1).cpu == pytest.approx(work + (1 - CPU_LEFT) * wire)
    # a link twice as slow is busy all the time that the CPU works, and longer
    slow = Prices(**{**PRICE.__dict__, "link": 80})
    assert token(slow, mode(), 0.5, 1, 1).cpu == pytest.approx(work / CPU_LEFT)
    assert token(PRICE, mode(holds=STATIC), 0.5, 1, 1).cpu == work  # nothing is uploaded
    assert token(PRICE, mode(miss="fetch"), 0.5, 1, 1).cpu == 0


def test_a_cache_pays_in_every_layer_and_a_list_in_those_with_a_miss() -> None:
    # half of the ten layers have a miss: .003 us each; the cache's .002 us are of all ten
    parts = token(PRICE, mode(layer_us=0.003, step_us=0.002), 0.5, 0.5, 1)
    assert parts.sync == pytest.approx(5 * 3 + 10 * 2)
    assert token(PRICE, mode(step_us=0.002), 1, 0, 1).sync == 0  # where all fit nothing is looked up


# -- schemes at the same bytes


def test_every_scheme_has_the_same_bytes_and_names_the_engines_that_have_it() -> None:
    found = placements(load(), machine())
    assert found is not None and found.size == 5 * GB
    by = {each.scheme: each for each in found.choices}
    assert set(by) == set(SCHEMES)
    layers = by[Scheme(LAYERS, "cpu")].estimate.setting
    assert (layers.gpu_layers, layers.fast_bytes) == (3, 4_800_000_000)  # three layers of 1.6 GB fit into 5 GB
    assert all(each.estimate.setting.fast_bytes == 5 * GB for of, each in by.items() if of.holds != LAYERS)
    assert {"llama.cpp", "ik_llama.cpp"} == set(by[Scheme(LAYERS, "cpu")].engines)
    assert by[Scheme(STATIC, "cpu")].engines == ("ktransformers",)
    assert "freetoken" in by[Scheme(GLOBAL_LRU, "split")].engines
    speeds = [each.estimate.tokens_per_s.middle for each in found.choices]
    assert speeds == sorted(speeds, reverse=True)
    # an expert of 100 MB: 2 ms at 50 GB/s on the CPU, 4 ms over 25.1 GB/s, 33 ms at 3 GB/s
    assert found.expert_us == pytest.approx({"cpu": 2000, "link": 3984, "disk": 33333}, rel=0.01)


def test_equal_hits_never_make_a_cache_faster() -> None:
    found = placements(load(), machine())
    assert found is not None and {turn.faster for turn in found.turns} <= {"placed", "tie"}


def test_a_cache_begins_to_lose_where_a_list_of_the_same_bytes_hits_as_much() -> None:
    found = placements(load(CACHED, LISTED), machine())
    assert found is not None
    last = found.turns[-1]
    # at five of eight layers the cache hits .84 and the list .78, at six .88 and .96
    assert last.faster == "placed" and last.layers == 6 and (last.size, last.slots) == (9_600_000_000, 96)
    assert "cache" in {turn.faster for turn in found.turns[:-1]}

    def gain(layers: int) -> float:
        of = placements(load(CACHED, LISTED), machine(f"{layers * 1_600_000_000 + GB}B"))
        assert of is not None
        best = {c: max(x.estimate.tokens_per_s.middle for x in of.choices if x.scheme.is_cache == c) for c in (0, 1)}
        return best[1] / best[0] - 1

    assert all(gain(layers) < -0.01 for layers in range(6, 8)) and gain(5) > 0.01
    # where the cache hits everything before the model fits, it never begins to lose
    always = placements(load(np.minimum(1, LINE * 1.6)), machine())
    assert always is not None and [turn.faster for turn in always.turns] == ["cache"]


def test_a_cache_keeps_copies_in_ram_and_reads_the_disk_where_they_do_not_fit() -> None:
    found = placements(load(), machine(ram="12GB"))  # 10 GB of RAM for 12.8 GB of experts, or for the 7.8 below VRAM
    assert found is not None
    for each in found.choices:
        setting = each.estimate.setting
        assert setting.disk_bytes == (2_800_000_000 if each.scheme.is_cache else 0)
        assert (each.estimate.parts.disk > 0) is (each.scheme.is_cache and each.scheme.miss == "cpu") or (
            each.scheme.miss != "cpu"
        )


def test_one_memory_over_a_disk_has_nothing_to_compare() -> None:
    assert placements(load(), assembled(gpu="M4 Max", ram="64GB")) is None
    assert placements(load(), assembled(gpu="none", ram="64GB")) is None
    assert placements(load(), machine("1GB")) is None  # dense weights leave nothing


# -- the closed form beside replays on a machine of three tiers


def replayed(tokens: tuple[int, int], geometry: Geometry, **said: Any) -> dict[str, float]:
    """Return what a replay on desktop-24gb adds between two numbers of tokens, when RAM has filled, per token."""
    drawn = np.random.default_rng(1)
    ids = np.stack([[drawn.choice(16, 2, replace=False) for _ in range(8)] for _ in range(tokens[1])])
    found = []
    for count in tokens:
        trace = from_arrays(ids[:count], geometry, lengths=[count])
        config = configure(platform=f"{PLATFORM}:tiers.0.capacity=2GB", passes="token", **said)
        found.append(replay(trace, config, engine="reference").totals)
    spent = {name: float(found[1][name] - found[0][name]) for name in ("time_ns", "hits", "cpu_executed", "accesses")}
    return {name: value / (tokens[1] - tokens[0]) for name, value in spent.items()}


PLATFORM = "desktop-24gb"


@pytest.mark.slow
@every(
    "said, scheme, within",
    [
        # whole layers: 6 hits x 14,921 ns, 10 misses x 172,117 ns, 119,368 ns dense, five nodes of 39 us: 2,125,064 ns
        ({"capacity": "480MB", "resident": of_layers("layers:5-7"), "miss": "cpu"}, Scheme(LAYERS, "cpu"), 1e-6),
        ({"capacity": "640MB", "eviction": "lru", "miss": "fetch"}, Scheme(GLOBAL_LRU, "fetch"), 0.03),
        ({"capacity": "960MB", "eviction": "lru", "miss": "fetch"}, Scheme(GLOBAL_LRU, "fetch"), 0.08),
        ({"capacity": "640MB", "miss": "cpu", "prefetch": "missed"}, Scheme(GLOBAL_LRU, "cpu"), 0.08),
        ({"capacity": "960MB", "miss": "cpu", "prefetch": "missed"}, Scheme(GLOBAL_LRU, "cpu"), 0.15),
    ],
)
def test_the_closed_form_takes_the_time_of_a_replay(said: dict[str, Any], scheme: Scheme, within: float) -> None:
    geometry = Geometry(
        layers=8, experts=16, k=2, expert_bytes=(10_000_000,) * 8, expert_bits=4.5, dense_bytes=80_000_000
    )
    spent = replayed((80, 120), geometry, **said)
    hit = (spent["hits"] if scheme.miss == "fetch" else spent["accesses"] - spent["cpu_executed"]) / spent["accesses"]
    node = 39 if scheme.miss == "cpu" else 0  # `sync_ns` of the platform
    of = scheme.mode.model_copy(update={"layer_us": node, "step_us": 0})
    price = prices(of_platform(platform(PLATFORM)), geometry, 0)
    told = token(price, of, hit, 1 - hit if scheme.holds == LAYERS else 1 - hit**2, 1).total - price.launches
    assert told == pytest.approx(spent["time_ns"], rel=within)


# -- text and figures


def answer(of: Load, on: Machine) -> dict[str, Any]:
    return quick_document(of, on, quick(of, on)) | {"name": "a model", "grade": "g", "routing": "r", "assumed": []}


def test_the_text_says_what_to_place_and_from_where_on() -> None:
    said = answer(load(CACHED, LISTED), machine())
    text = unfolded("\n".join(placement_lines(said)))
    assert (
        "a cache wins up to 9.6 GB of experts in VRAM (6 of 8 layers' bytes, 96 slots), fixed placement above" in text
    )
    assert "fastest use of VRAM by the closed form: a cache of the last used experts, misses split" in text
    assert (
        "published runs: caches gained less than this" in text and "whole layers, with the rest on the CPU: 44" in text
    )
    assert "slots), fixed placement above; you have" in text and "3 whole layers" in text and "ktransformers" in text
    assert "a missing expert takes 2 ms on the CPU, 3.98 ms over the link, 33.3 ms from the disk" in text
    worse = answer(load(cached=np.interp(LINE, (0, 0.99, 1), (0, 0.3, 1))), machine())
    other = unfolded("\n".join(placement_lines(worse)))
    assert "the cache loses at every size of VRAM" in other and "published runs" not in other
    assert list(placement_lines(answer(load(), machine("24GB")))) == []  # every expert fits


def test_bars_add_up_to_the_time_of_a_token_and_name_the_processor() -> None:
    said = answer(load(), machine())
    rows = rows_of(token_time(said))
    for name, panel in (("llama.cpp", "best setting of each engine"), ("most used, listed: on the CPU", "the same")):
        spent = sum(row["x"] for row in rows if row["name"] == name and row["panel"].startswith(panel))
        known = [each for each in said["by_engine"] if each["engine"] == name] or [
            each for each in said["placements"]["choices"] if (each["holds"], each["miss"]) == (STATIC, "cpu")
        ]
        assert spent == pytest.approx(1000 / known[0]["tokens_per_s"]["middle"])
    alone = [row for row in rows if row["name"] == "colibri"]  # no GPU: what computes is the CPU
    assert {row["part"] for row in alone} <= {"CPU", "disk", "launches and waiting"} and alone


def test_the_map_has_the_machine_itself_and_more_memory_is_never_slower(tmp_path: Path) -> None:
    of, on = load(), machine("8GB", "12GB")
    points = surface(of, on, "llama.cpp")
    own = [each for each in points if each["here"]]
    assert len(own) == 1 and own[0]["tokens_per_s"] == pytest.approx(
        quick(of, on, "llama.cpp").best.tokens_per_s.middle
    )
    sizes = {(each["vram_bytes"], each["ram_bytes"]): each["tokens_per_s"] for each in points}
    vrams = sorted({vram for vram, _ in sizes})
    assert vrams[0] == 8e9 and min(more / less for less, more in pairwise(vrams)) > 1.1  # 8 GiB is left out
    for vram, ram in sizes:
        for more, larger in sizes:
            if more >= vram and larger >= ram:
                assert sizes[more, larger] >= sizes[vram, ram] * (1 - 1e-6)
    chart = speed_by_memory(answer(of, on), points)
    assert [row["y"] for row in rows_of(chart)] == [pytest.approx(each["tokens_per_s"]) for each in points]
    assert save(rendered(chart), tmp_path / "map", ("png",))[0].read_bytes().startswith(b"\x89PNG")
    assert surface(of, assembled(gpu="M4 Max", ram="64GB")) == []


@pytest.mark.slow
def test_the_command_draws_both_figures_with_their_numbers(tmp_path: Path) -> None:
    ended = moereplay("recommend", "miniature", "--vram", "1GB", "--ram", "2.5GB", "--figures", tmp_path / "f")
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in (tmp_path / "f").iterdir()} == {
        f"{name}.{kind}" for name in ("token_time", "speed_by_memory") for kind in ("png", "svg", "csv")
    }
    ended = moereplay("recommend", "miniature", "--platform", "phone-ufs4", "--memory", "1GB", "--figures", tmp_path)
    assert ended.returncode == 2 and "--figures requires an estimate by the closed form" in unfolded(ended.stderr)


def test_platforms_with_vram_state_its_size_and_what_ram_is_left() -> None:
    for name, gib in (("desktop-24gb", 24), ("desktop-mmap", 24), ("laptop-8gb", 8), ("workstation-8ch", 48)):
        found = of_platform(platform(name))
        assert found.memory_bytes == gib << 30 and found.ram_bytes > 20 * GB
        assert any("(--ram)" in each for each in found.assumed)
    assert not of_platform(platform("desktop-24gb"), ram="64GB").assumed
    assert CACHE_US > 0
