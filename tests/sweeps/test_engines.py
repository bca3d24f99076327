"""Engines as data, and directions of published ladders that the closed form of a token's time reproduces.

Figures of the ladder: lukaLLM/Qwen3.8-Flash-Next-VRAM-Benchmark at 518a52d, 48 layers of which a token uses 10 experts
of 2.36 MiB; a card of 96 GB whose memory was capped.
"""

from __future__ import annotations

from string import Formatter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay.simulator.machine import assembled
from moereplay.sweeps.recommend.engines import NAMES, Placed, engine, placed
from moereplay.sweeps.recommend.hits import GLOBAL_LRU, LRU, POINTS, STATIC, Hits
from moereplay.sweeps.recommend.quick import Load, quick
from moereplay.sweeps.recommend.token_time import KERNEL_NS, KERNELS, Prices, prices, token
from moereplay.traces.schema import Geometry

MIB = 2**20
LUKA = Geometry(
    layers=48, experts=512, k=10, expert_bytes=(round(2.36 * MIB),) * 48, expert_bits=4.25, dense_bytes=3_000_000_000
)

PLAIN = Prices(layers=48, k=10, dense=0, expert=0, cpu=None, link=None, latency=0, disk=None, disk_latency=0)


def concave(power: float) -> Hits:
    """Hits of reuse: a small memory holds more than its share."""
    line = np.linspace(0, 1, POINTS) ** power
    return Hits("concave", {LRU: line, GLOBAL_LRU: line, STATIC: line})


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_file_says_where_its_facts_are_from_and_names_known_quantities(name: str) -> None:
    found = engine(name)
    assert found.summary and found.home.startswith("https://")
    for mode in found.modes:
        named = {field for _, field, _, _ in Formatter().parse(mode.flags) if field}
        assert len(mode.source) > 20 and named <= set(Placed._fields)
    if found.tried:
        assert found.tried.runs > 0 and found.tried.least <= found.tried.median <= found.tried.most
        assert found.tried.source


@given(st.integers(0, 40 * 10**9), st.lists(st.integers(1, 10**8), min_size=1, max_size=9))
def test_a_placement_adds_up(size: int, sizes: list[int]) -> None:
    geometry = Geometry(layers=len(sizes), experts=16, k=2, expert_bytes=tuple(sizes))
    of = placed(geometry, size, 0.5)
    assert of.cpu_layers + of.gpu_layers == len(sizes) and of.cpu_experts + of.gpu_experts == 16
    assert 16 * sum(sizes[len(sizes) - of.gpu_layers :]) <= size or not of.gpu_layers
    assert of.gpu_experts * sum(sizes) <= size and of.slots <= 16 * len(sizes)


def ladder() -> tuple[Prices, list[float]]:
    """Milliseconds with 0, 23, 36, 42, 45, 48 layers on the CPU, at the 64.5 GB/s that its author's figures imply."""
    machine = assembled(gpu="RTX PRO 6000", ram="96GB", ram_rate="64.5GB/s")
    price, mode = prices(machine, LUKA, 2048), engine("llama.cpp").modes[0]
    steps = (0, 23, 36, 42, 45, 48)
    return price, [token(price, mode, 1 - at / 48, at / 48, 1).total / 1e6 for at in steps]


def test_a_published_ladder_from_its_own_figures() -> None:
    # measured 109.1, 51.7, 42.2, 39.0, 37.9, 35.7 tokens/s: 9.17 to 28.0 ms, .383 ms more for each layer on the CPU:
    # 10 x 2.36 MiB at 64.5 GB/s. Here a layer also costs 65 us of waiting, and its time on the GPU is saved.
    price, told = ladder()
    slope = (told[-1] - told[0]) / 48
    assert price.cpu is not None
    assert slope == pytest.approx((10 * (price.cpu - price.expert) + 65_000) / 1e6)
    assert slope == pytest.approx(0.383, rel=0.15)
    measured = [1000 / rate for rate in (109.1, 51.7, 42.2, 39.0, 37.9, 35.7)]
    assert told == pytest.approx(measured, rel=0.2)
    assert all(np.diff(told) > 0)


def test_a_resident_token_has_launches_and_bytes_alone() -> None:
    machine = assembled(gpu="RTX PRO 6000", ram="96GB")
    price = prices(machine, LUKA, 0)
    parts = token(price, engine("llama.cpp").modes[0], 1, 0, 1)
    assert (parts.cpu, parts.link, parts.disk) == (0, 0, 0)
    assert parts.sync == 48 * KERNELS * KERNEL_NS
    assert prices(assembled(gpu="none", ram="96GB"), LUKA, 0).launches == 0  # a CPU's kernels are calls


def test_fixed_sets_beat_uniform_more_as_more_fits_and_front_layers_save_the_wait() -> None:
    # direction 3: by frequency 2 to 4 % faster than uniform at 10 to 20 % of the experts, 27 to 32 % at 80 to 90 %
    price = prices(assembled(gpu="RTX 4090", ram="512GB", ram_rate="150GB/s"), LUKA, 0)
    mode, used = engine("ktransformers").modes[0], concave(0.6)

    def time(hit: float, missing: float) -> float:
        return token(price, mode, hit, missing, 1).total

    gains = []
    for share in (0.1, 0.5, 0.9):
        hit = used.at(STATIC, share)
        gains.append(time(share, 1 - share**10) / time(hit, 1 - hit**10))
        assert time(share, 1 - share) < time(share, 1 - share**10)  # whole layers: others need no CPU
    assert all(gain > 1 for gain in gains)


def test_a_cache_that_fetches_wins_over_a_fast_link_and_loses_where_nearly_all_fits() -> None:
    # direction 4, at equal bytes
    load = Load(LUKA, 2048, 500_000_000, (concave(0.4),))
    everything = load.expert_bytes

    def speed(name: str, share: float, **parts: str) -> float:
        size = load.fixed_bytes + int(share * everything) + 1
        machine = assembled(gpu="RTX PRO 6000", vram=f"{size}B", ram="256GB", **parts)
        return quick(load, machine, name).best.tokens_per_s.middle

    slow_cpu = {"ram_rate": "25GB/s", "link": "5.0 x16"}
    assert speed("llama.cpp-moe-cache", 0.3, **slow_cpu) > speed("llama.cpp", 0.3, **slow_cpu)
    fast_cpu = {"ram_rate": "100GB/s", "link": "3.0 x16"}
    assert speed("llama.cpp-moe-cache", 0.12, **fast_cpu) < speed("llama.cpp", 0.12, **fast_cpu)


def test_a_long_context_flattens_the_ladder() -> None:
    # direction 13: a term of its own, the same for every step
    with_cache = LUKA.model_copy(update={"kv_bytes": 30_000})
    machine = assembled(gpu="RTX PRO 6000", ram="96GB", ram_rate="64.5GB/s")
    mode = engine("llama.cpp").modes[0]
    ratios = []
    for context in (2048, 245_760):
        price = prices(machine, with_cache, context)
        ratios.append(token(price, mode, 0, 1, 1).total / token(price, mode, 1, 0, 1).total)
    assert ratios[1] < ratios[0]


def test_ram_tiers_gain_less_than_their_hits_where_something_else_is_waited_for() -> None:
    # direction 7: a third of the misses in RAM where four fifths of a token are reads: about 1.4 to 1.6 times
    price = Prices(
        layers=48, k=10, dense=20e6, expert=0.05e6, cpu=None, link=0.1e6, latency=0, disk=0.4e6, disk_latency=0
    )
    mode = engine("crow").modes[0]
    none, third = (token(price, mode, 0.6, 1, held).total for held in (0, 0.36))
    assert 1.2 < none / third < 1 / (1 - 0.36)
