"""The closed form of a token's time, the hits it expects, and the settings of engines that the quick answer tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moereplay.analysis.quick_answer import lines
from moereplay.simulator.calibration import Calibration
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.machine import Machine, assembled, of_platform
from moereplay.simulator.platforms import platform
from moereplay.sweeps.recommend import hits as expected
from moereplay.sweeps.recommend.engines import NAMES, Mode, engine, engines
from moereplay.sweeps.recommend.hits import GLOBAL_LRU, LAYERS, LRU, STATIC, Hits, of_model
from moereplay.sweeps.recommend.quick import Estimate, Load, quick
from moereplay.sweeps.recommend.quick_document import quick_document
from moereplay.sweeps.recommend.token_time import CPU_LEFT, LINK_LEFT, MAPPED, Parts, Prices, bound_by, prices, token
from moereplay.traces.routing import RoutingModel, named
from moereplay.traces.schema import Geometry
from tests.kit.every import every

GB = 10**9
PRICE = Prices(layers=10, k=4, dense=1000, expert=10, cpu=50, link=40, latency=5, disk=200, disk_latency=30)


def mode(**change: Any) -> Mode:
    base = {"name": "a", "flags": "-x", "holds": LAYERS, "miss": "cpu", "source": "a test"}
    return Mode.model_validate(base | change)


def model(layers: int = 8, experts: int = 16, k: int = 2, size: int = 100_000_000, dense: int = GB) -> Geometry:
    return Geometry(
        layers=layers, experts=experts, k=k, expert_bytes=(size,) * layers, expert_bits=4.5, dense_bytes=dense
    )


def linear(name: str = "a line") -> Hits:
    """Hits in proportion to the share that is held."""
    line = np.linspace(0, 1, expected.POINTS)
    return Hits(name, {LRU: line, GLOBAL_LRU: line, STATIC: line})


def load(geometry: Geometry | None = None, hits: tuple[Hits, ...] = (linear(),)) -> Load:
    return Load(geometry or model(), 0, 0, hits)


# -- a token


def test_a_token_worked_out_by_hand() -> None:
    # 40 experts, half of them in fast memory, in every layer a miss: 20 x 10 on the GPU, 20 x 50 on the CPU
    assert token(PRICE, mode(layer_us=0.002), 0.5, 1, 1) == Parts(1200, 1000, 0, 0, 10 * 2)
    # with overlap the CPU's 1000 hide the GPU's 200
    assert token(PRICE, mode(overlap=True), 0.5, 1, 1) == Parts(1000, 1000, 0, 0, 0)
    # fetched: 20 x 40 and ten latencies of 5, less the 200 of the experts that are there; 20 more are computed
    assert token(PRICE, mode(miss="fetch"), 0.5, 1, 1) == Parts(1000 + 200 + 200, 0, 850 - 200, 0, 0)
    # a fifth of the misses from the disk, 4 x 200 and four latencies of 30, before the CPU's work
    assert token(PRICE, mode(below="direct"), 0.5, 1, 0.8).disk == pytest.approx(4 * 200 + 4 * 30)
    assert token(PRICE, mode(below="mmap"), 0.5, 1, 0.8).disk == pytest.approx(4 * 200 / MAPPED + 4 * 30)
    # divided: 20 experts at the sum of both rates
    both = token(PRICE, mode(miss="split", overlap=True), 0.5, 1, 1)
    assert both.cpu + both.link == pytest.approx(20 / (CPU_LEFT / 50 + LINK_LEFT / 40))


def test_everything_in_fast_memory_leaves_its_own_time_alone() -> None:
    for miss in ("cpu", "fetch", "split"):
        assert token(PRICE, mode(miss=miss, layer_us=9), 1, 0, 0) == Parts(1000 + 40 * 10, 0, 0, 0, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["cpu", "fetch", "split"]),
    st.booleans(),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["dense", "expert", "cpu", "link", "disk"]),
)
def test_dearer_parts_and_fewer_hits_never_make_a_token_faster(
    miss: str, overlap: bool, hit: float, more: float, in_memory: float, part: str
) -> None:
    of = mode(miss=miss, overlap=overlap, below="direct", layer_us=0.003)

    def total(price: Prices, hit: float, held: float) -> float:
        return token(price, of, hit, 1 - hit, held).total

    now = total(PRICE, hit, in_memory)
    assert total(replace(PRICE, **{part: 1.5 * getattr(PRICE, part)}), hit, in_memory) >= now * (1 - 1e-9)
    assert total(PRICE, hit, in_memory * more) >= now * (1 - 1e-9)
    if miss != "fetch" and not overlap:  # elsewhere work of another part may be hidden
        assert total(PRICE, hit * more, in_memory) >= now * (1 - 1e-9)


def test_prices_are_those_of_a_replay_on_the_platform() -> None:
    machine = assembled(gpu="RTX 3090", ram="64GB", ram_rate="50GB/s")
    price = prices(machine, model(), 0)
    assert price.cpu == pytest.approx(100e6 / 50 + 1000)  # 100 MB at 50 GB/s, and a launch
    assert price.link == pytest.approx(100e6 / 25.1, abs=1)
    assert price.expert == pytest.approx(100e6 / 936 + 1000, abs=1)
    assert bound_by(machine, model(), Parts(1, 2, 0, 0, 0)) == "RAM bandwidth"
    slow = assembled(gpu="RTX 3090", ram="64GB", ram_rate="5000GB/s", cores="1")
    assert bound_by(slow, model(), Parts(1, 2, 0, 0, 0)) == "CPU cores"


# -- expected hits


def steady(**strengths: float) -> RoutingModel:
    from tests.traces.test_routing import model as of_strengths

    return of_strengths(layers=2, experts=16, k=3, **strengths)


def test_a_fixed_set_of_experts_is_held_by_as_much_memory() -> None:
    found = of_model(steady(hot=1e5, cold=1e5))
    for filled in (LRU, STATIC):
        assert found.at(filled, 3 / 16) == pytest.approx(1)
        assert found.at(filled, 1.5 / 16) < 0.6
    assert found.at(GLOBAL_LRU, 3 / 32) == 0  # a pool of three slots, asked for three experts of each layer in turn
    assert found.at(LAYERS, 0.25) == 0.25


def test_expected_hits_are_close_to_those_of_a_replay_of_the_same_tokens() -> None:
    from moereplay.simulator.config import configure
    from moereplay.simulator.replay import replay
    from moereplay.traces.recorder import from_arrays
    from moereplay.traces.routing import draw

    routing = named("olmoe-1b-7b").at_layers([2, 9])
    chosen = draw(routing, [400] * 6, 5)
    trace = from_arrays(chosen, model(2, 64, 8, 1 << 20), lengths=[400] * 6)
    found = of_model(routing)
    for share in (0.25, 0.5, 0.75):
        config = configure(capacity=f"{100 * share}%", eviction="lru", scope="per_layer", passes="token")
        totals = replay(trace, config).totals
        assert found.at(LRU, share) == pytest.approx(totals["hits"] / totals["accesses"], abs=0.03)


# -- engines


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_has_sources_and_settings_that_fit(name: str) -> None:
    found = engine(name)
    assert found.name == name and found.home.startswith("https://") and all(each.source for each in found.modes)
    kind = found.modes[0].machines[0]
    machine = assembled(gpu="RTX 3090" if kind == "gpu" else "none", ram="64GB", disk="3GB/s")
    if kind == "unified":
        machine = assembled(gpu="M4 Max", ram="64GB")
    answer = quick(load(), machine, name)
    for each in answer.ladder:
        assert each.setting.engine == name and "{" not in each.setting.flags
        assert each.peak_fast_bytes <= machine.memory_bytes
        assert each.peak_ram_bytes <= (machine.ram_bytes or machine.memory_bytes)
        parts = each.setting.fast_bytes + each.setting.ram_bytes + each.setting.disk_bytes
        assert parts >= load().expert_bytes or each.setting.mode.copies


def test_an_engine_is_found_by_any_case_and_a_wrong_one_is_named() -> None:
    assert engine("LLAMA.CPP") is engine("llama.cpp")
    with pytest.raises(ConfigError, match=r"llama\.ccp.*did you mean llama\.cpp"):
        engine("llama.ccp")


# -- answers: 12.8 GB of experts in eight layers of 1.6 GB


def answer(only: str = "", of: Load | None = None, **parts: str) -> Any:
    return quick(of or load(), assembled(**parts), only)


def steps(found: Any) -> list[Estimate]:
    return list(found.ladder)


def test_layers_on_the_cpu_cost_the_same_each() -> None:
    # direction 1 of measured ladders: milliseconds are linear in the number of layers on the CPU
    found = steps(answer("llama.cpp", gpu="RTX 3090", ram="64GB"))
    assert [each.setting.flags.split()[-1] for each in found] == [str(count) for count in range(9)]
    times = [1000 / each.tokens_per_s.middle for each in found]
    slopes = np.diff(times)
    assert slopes == pytest.approx(np.full(8, slopes[0]))
    price = prices(assembled(gpu="RTX 3090", ram="64GB"), model(), 0)
    assert price.cpu is not None
    assert slopes[0] == pytest.approx((2 * (price.cpu - price.expert) + 65_000) / 1e6)


def test_no_gpu_is_slower_than_all_experts_on_the_cpu() -> None:
    with_gpu = steps(answer("llama.cpp", gpu="RTX 3090", ram="64GB"))[-1].tokens_per_s.middle
    assert answer("llama.cpp", gpu="none", ram="64GB").best.tokens_per_s.middle < with_gpu


def test_frequency_beats_uniform_and_a_cache_beats_both_where_reuse_is_high() -> None:
    routing = named("gpt-oss-20b")
    found = of_model(routing)
    shape = model(routing.layers, routing.experts, routing.k, 13_000_000)
    slow_cpu = {"gpu": "RTX 3060", "vram": "6GB", "ram": "64GB", "ram_rate": "10GB/s", "link": "4.0x16"}
    by_scheme = {each.scheme: each for each in answer("", load(shape, (found,)), **slow_cpu).schemes}
    frequent = answer("ktransformers", load(shape, (found,)), **slow_cpu).best
    assert frequent.scheme == (STATIC, "cpu") and frequent.hit.middle > by_scheme[LAYERS, "cpu"].hit.middle
    assert by_scheme[GLOBAL_LRU, "fetch"].tokens_per_s.middle > by_scheme[LAYERS, "cpu"].tokens_per_s.middle


def test_half_the_model_in_memory_costs_page_faults_more_than_whole_reads() -> None:
    of = load(model(size=500_000_000))  # 64 GB of experts
    mapped = answer("llama.cpp", of, gpu="none", ram="32GB").best
    direct = answer("colibri", of, gpu="none", ram="32GB").best
    assert 2.5 < direct.tokens_per_s.middle / mapped.tokens_per_s.middle <= 1 / MAPPED


def test_more_of_what_binds_gains_and_more_of_the_rest_does_not() -> None:
    found = answer("llama.cpp", gpu="RTX 3090", ram="64GB", vram="4GB")
    assert found.binds == "RAM bandwidth"
    said = {each.what.split(" of ")[0].split(" read")[0] for each in found.more}
    assert {"RAM", "VRAM"} <= said and not any("disk" in each.what or "link" in each.what for each in found.more)
    assert all(each.gain > 0.01 for each in found.more)


def test_ranges_hold_every_routing() -> None:
    none = Hits("nothing", {filled: np.zeros(expected.POINTS) for filled in (LRU, GLOBAL_LRU, STATIC)})
    found = answer("freetoken", load(hits=(linear(), none)), gpu="RTX 3090", vram="6GB", ram="64GB").best
    alone = [
        answer("freetoken", load(hits=(each,)), gpu="RTX 3090", vram="6GB", ram="64GB").best.tokens_per_s.middle
        for each in (linear(), none)
    ]
    assert (found.tokens_per_s.least, found.tokens_per_s.most) == (min(alone), max(alone))


@every(
    "parts, told",
    [
        ({"gpu": "RTX 3090", "ram": "64GB", "only": "vllm"}, "unknown engine 'vllm'"),
        (
            {"gpu": "RTX 3090", "vram": "6GB", "ram": "8GB", "only": "ktransformers"},
            "no setting of engine ktransformers fits",
        ),
        ({"gpu": "none", "ram": "64GB", "only": "crow"}, "no setting of engine crow fits"),
        ({"gpu": "RTX 3099", "ram": "64GB"}, "unknown card"),
        ({"vram": "24GB", "ram": "lots"}, "invalid --ram"),
        ({"vram": "24GB", "disk": "3GB"}, "invalid --disk"),
        ({"gpu": "RTX 3090", "link": "7.0x16"}, "invalid link"),
        ({"gpu": "RTX 3090", "cores": "-1"}, "invalid --cores"),
        ({"gpu": "none"}, "missing size of the memory"),
        ({"gpu": "2x RTX 3090", "ram": "64GB"}, "expected one; for several name one"),
        ({"gpu": "RTX 3090, RTX 3090", "ram": "64GB"}, "and their memory together as --vram"),
        (
            {
                "gpu": "RTX 3090",
                "ram": "64GB",
                "only": "mixtral-offloading",
                "of": Load(model(), 0, 0, (linear(),), "gpt-oss"),
            },
            "invalid --engine mixtral-offloading: it runs only mixtral, not gpt-oss",
        ),
    ],
)
def test_what_cannot_be_answered_is_a_line(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        answer(**{"only": "", **parts})
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_dense_weights_that_fit_no_gpu_leave_it_out() -> None:
    found = answer("", load(model(dense=10 * GB)), gpu="RTX 3070", ram="64GB")
    assert found.best.setting.engine == "llama.cpp" and "-ngl 0" in found.best.setting.flags
    assert any("the GPU is left out" in each for each in found.warnings)


def test_a_phone_and_a_unified_memory_read_from_flash() -> None:
    phone = of_platform(platform("phone-ufs4"), memory="4GB")
    found = quick(load(), phone)
    assert phone.kind == "cpu" and found.binds == "disk reads" and found.best.setting.disk_bytes > 0
    cases: tuple[tuple[dict[str, float], Any, bool], ...]
    cases = (({}, ("link",), True), ({"a": 1e9}, None, True), ({"a": 2e9}, None, False), ({}, ("cpu",), False))
    for models, parts, calibrated in cases:
        about = Calibration(device="d", models=models, parts=parts)
        machine = of_platform(platform("phone-ufs4").model_copy(update={"calibration": about}), memory="4GB")
        found = quick_document(load(), machine, quick(load(), machine))["machine"]
        assert (found["calibrated"], found["uncalibrated"] is None) == (calibrated, calibrated)
    mac: Machine = assembled(gpu="M4 Max", ram="64GB")
    assert quick(load(), mac).best.setting.disk_bytes == 0


def test_every_engine_renders_in_the_same_order_each_time() -> None:
    assert [each.name for each in engines()] == list(NAMES)
    first, again = (answer(gpu="RTX 3090", vram="8GB", ram="64GB") for _ in range(2))
    assert first == again


def test_an_answer_names_one_speed_and_the_memory_that_its_engine_uses() -> None:
    half = Hits("half", {filled: np.sqrt(np.linspace(0, 1, expected.POINTS)) for filled in (LRU, GLOBAL_LRU, STATIC)})
    of = load(hits=(linear(), half))
    machine = assembled(gpu="RTX 3090", vram="8GB", ram="64GB")
    document = quick_document(of, machine, quick(of, machine))
    for each in (document["best"], *document["by_engine"], *document["ladder"]["steps"]):
        assert each["tokens_per_s"]["middle"] == pytest.approx(1e9 / sum(each["parts_ns"].values()))
    for name, tier, size in (("colibri", "RAM", 64 << 30), ("llama.cpp", "VRAM", 8 << 30)):
        best = quick_document(of, machine, quick(of, machine, name))["best"]
        assert (best["fast_tier"], best["fast_tier_bytes"]) == (tier, size)
        assert best["peak_fast_bytes"] <= size
    alone = quick(of, assembled(gpu="none", ram="8GB"), "llama.cpp")
    assert len(alone.ladder) == 1  # its flags have nothing to turn
    assert not answer("llama.cpp", of, gpu="none", ram="64GB").best.setting.disk_bytes


def test_a_gain_that_depends_on_the_routing_is_not_claimed() -> None:
    none = Hits("nothing", {filled: np.zeros(expected.POINTS) for filled in (LRU, GLOBAL_LRU, STATIC)})
    cached = {filled: np.ones(expected.POINTS) for filled in (LRU, GLOBAL_LRU)}
    every_hit = Hits("all", cached | {STATIC: np.zeros(expected.POINTS)})
    machine = assembled(gpu="RTX 3090", vram="6GB", ram="64GB")
    both = load(hits=(none, every_hit, every_hit))
    found: Any = quick_document(both, machine, quick(both, machine)) | {"name": "a", "grade": "b", "routing": "c"}
    cache = found["pays"]["cache"]
    assert cache["least"] < 0 < cache["most"] and cache["pays"] is None
    compared = found["placements"]["cache"]
    assert compared["least"] < 0 < compared["most"] and compared["pays"] is None
    text = "\n".join(lines(found | {"assumed": []}))
    assert "a cache of the last used experts: depends on the routing" in text and "e+0" not in text
