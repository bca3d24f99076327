"""Machines: presets with sources, rates that become integer nanoseconds, and what a platform file may say."""

from __future__ import annotations

from math import inf

import pytest
from pydantic import ValidationError

from moereplay.policies.contract import UNIT
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.platform import Link, Measured, Platform, Roofline
from moereplay.simulator.platforms import NAMES, platform, presets
from moereplay.simulator.rates import Loading
from moereplay.simulator.times import Times, times_of
from moereplay.traces.geometry import known_models
from moereplay.traces.schema import Geometry
from tests.kit.cases import Cell, ListSource, Prompted, Token, at_rate, machine, replay_lists, sizes
from tests.kit.every import every

TINY = Geometry(layers=2, experts=4, k=2, expert_bytes=(1000, 3000), expert_bits=16, dense_params=50, head_params=70)


def tiers(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    return (geometry.expert_bytes,)


# ---------------------------------------------------------------- presets


@every("name", NAMES)
def test_every_preset_carries_its_name_and_sources(name: str) -> None:
    preset = platform(name)
    assert (preset.name, bool(preset.summary)) == (name, True)
    assert len(preset.source) > 40


@every("name", NAMES)
@every("model", ["mixtral-8x7b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_every_preset_moves_an_expert_slower_than_it_computes_one(name: str, model: str) -> None:
    # offloading is a problem on all of them: the link, not compute, bounds a miss
    geometry, machine = known_models()[model].geometry, platform(name)
    if any(link.layers for link in machine.links):  # halves of this model
        half = geometry.layers // 2
        machine = platform(f"{name}:links.0.layers=0-{half - 1}:links.1.layers={half}-{geometry.layers - 1}")
    times = Times(machine, geometry, tiers(geometry))
    assert times.latency_ns[0] + times.wire_ns[0][0][0] > times.expert_ns(0, 0, 1)


def test_presets_are_listed_in_one_order() -> None:
    assert tuple(preset.name for preset in presets()) == NAMES


def test_specmds_machine_moves_5_gb_per_second() -> None:
    # a Mixtral expert of 3 * 4096 * 14336 weights at 2 bytes: 352,321,536 bytes / 5e9 = 70.4643072 ms
    geometry = known_models()["mixtral-8x7b"].geometry
    assert Times(platform("a100-5gbps"), geometry, tiers(geometry)).wire_ns[0][0] == [70_464_308]


# ---------------------------------------------------------------- the link


@every("size, rate, ns", [(7, 2e9, 4), (8, 2e9, 4), (1, 3e9, 1), (10**12, 1.0, 10**21)])
def test_the_wire_rounds_up_to_a_nanosecond(size: int, rate: float, ns: int) -> None:
    assert Link(bytes_per_s=rate).wire_ns(size) == ns


def test_an_infinite_link_takes_no_time() -> None:
    assert at_rate(Link(bytes_per_s=1), inf).wire_ns(10**15) == 0


def test_the_wire_knows_layer_and_precision() -> None:
    times = Times(machine(bytes_per_ns=1), TINY, ((1000, 3000), (250, 750)))
    assert times.wire_ns == [[[1000, 250], [3000, 750]]]


# ---------------------------------------------------------------- compute


def test_a_roofline_takes_the_higher_of_its_ceilings_and_the_launch() -> None:
    # 500 weights, 1000 bytes, at 1e12 FLOP/s and 1e9 bytes/s: bytes 1000 ns; 2 * 500 * 2000 FLOPs 2000 ns
    roofline = Roofline(flops=1e12, memory_bytes_per_s=1e9, launch_ns=7)
    assert roofline.ns(500, 1000, tokens=1) == 1000 + 7
    assert roofline.ns(500, 1000, tokens=2000) == 2000 + 7


@every("params, tokens", [(0, 5), (500, 0)])
def test_a_roofline_of_nothing_launches_nothing(params: int, tokens: int) -> None:
    assert Roofline(flops=1, memory_bytes_per_s=1, launch_ns=7).ns(params, 1000, tokens) == 0


def test_times_follow_the_geometry() -> None:
    # memory-bound at 1 byte/ns: an expert costs its bytes, dense and head weights 2 bytes each
    where = Platform(name="t", links=(Link(bytes_per_s=1e9),), compute=Roofline(flops=1e18, memory_bytes_per_s=1e9))
    times = Times(where, TINY, ((1000, 3000), (250, 750)))
    assert [times.expert_ns(layer, p, 1) for layer in (0, 1) for p in (0, 1)] == [1000, 250, 3000, 750]
    assert (times.dense_ns(0, 1), times.pass_ns(1)) == (100, 140)


def test_without_known_weights_an_experts_are_reckoned_from_its_bits() -> None:
    # 1000 bytes at 16 bits are 500 weights; compute-bound at 1 FLOP/ns: 2 * 500 * 3 tokens
    where = Platform(name="t", links=(Link(bytes_per_s=1e9),), compute=Roofline(flops=1e9, memory_bytes_per_s=1e18))
    assert Times(where, TINY, tiers(TINY)).expert_ns(0, 0, 3) == 3000


@every(
    "sizes_of, bits, spent",
    [
        # stored at 8 bits; layer 0 has 8 parameters in an expert, layer 1 four: 16 and 8 ns at 1 FLOP/ns. Expert 1 has
        # the lesser half of the weight and runs at 4 bits: in layer 0 a copy of 4 bytes, as layer 1's own experts have
        ((8, 4), "cascade:bits=8/4:below=.6", [16, 16, 8, 8]),
        # 7 and 8 parameters: copies at 4 bits have 4 bytes in both layers
        ((7, 8), "fetch:bits=4", [14, 14, 16, 16]),
    ],
)
def test_copies_of_equal_bytes_take_as_long_as_their_own_parameters(
    sizes_of: tuple[int, ...], bits: str, spent: list[int]
) -> None:
    token: Token = [Cell([0, 1], [UNIT // 2, UNIT // 4])] * 2
    source = ListSource(sizes(2, 2, 2, sizes_of, expert_bits=8), [Prompted([token])])
    where = machine(prices={"roofline": {"flops": 1e9, "memory_bytes_per_s": 1e18}})
    outcome = replay_lists(source, 100, where, miss=bits)
    assert [end - begin for begin, end, _, _ in outcome.spans("expert")] == spent


def test_measured_times_are_a_constant_and_so_much_per_token() -> None:
    where = machine(dense_ns=3, pass_ns=4, expert_ns=5, expert_ns_per_token=6)
    times = Times(where, TINY, tiers(TINY))
    assert (times.dense_ns(1, 9), times.pass_ns(9), times.expert_ns(0, 0, 2)) == (3, 4, 5 + 12)


def test_measured_times_follow_their_curves() -> None:
    """3 tokens lie half way between 1 (once) and 5 (twice); beyond 5 in proportion. A copy of 8 bytes takes 3 times."""
    compute = Measured(
        dense_ns=10,
        expert_ns=100,
        expert_ns_per_token=999,  # means nothing beside a curve
        dense_by_tokens=((1, 1.0), (5, 2.0)),
        expert_by_tokens=((1, 1.0), (5, 2.0)),
        expert_by_size=((8, 3.0), (16, 1.0)),
    )
    assert [compute.dense(tokens) for tokens in (1, 3, 5, 10)] == [10, 15, 20, 40]
    assert [compute.expert(tokens, 16) for tokens in (1, 3, 5, 10)] == [100, 150, 200, 400]
    assert [compute.expert(1, size) for size in (4, 8, 12, 16, 99)] == [300, 300, 200, 100, 100]
    straight = Measured(expert_ns=100, expert_ns_per_token=7, expert_by_size=((8, 3.0), (16, 1.0)))
    assert [straight.expert(2, 16), straight.expert(2, 8)] == [114, 342]
    with pytest.raises(ValueError, match=r"\[1, 1\.0\]"):
        Measured(expert_by_tokens=((2, 1.0),))
    with pytest.raises(ValueError, match="sizes"):
        Measured(expert_by_size=((8, 1.0), (8, 2.0)))


def test_computing_on_a_cpu_that_is_not_described_is_refused() -> None:
    where = Platform(name="bare", links=(Link(bytes_per_s=1),), compute=Measured())
    with pytest.raises(ConfigError, match=r"missing \[cpu\] table in platform bare"):
        Times(where, TINY, tiers(TINY)).cpu_ns(0, 0, 1)


# ---------------------------------------------------------------- prices that are numbers of a table

DISK = Link(bytes_per_s=1e9, latency_ns=5, by_size=((100, 1e9), (300, 3e9)))


@every(
    "size, reads, ns",
    [
        (50, 1, 50),  # below the first point its rate, 1 byte/ns
        (200, 1, 100),  # half way between the points: 2 bytes/ns
        (300, 1, 100),  # on the last point: 3 bytes/ns
        (901, 1, 301),  # beyond it the same; 300.3 rounded up
        (600, 3, 300),  # three reads of 200: 2 bytes/ns
    ],
)
def test_the_rate_of_a_link_may_depend_on_the_size_of_a_read(size: int, reads: int, ns: int) -> None:
    assert DISK.model_copy(update={"reads": reads}).wire_ns(size) == ns


def test_every_read_of_an_expert_has_the_latency() -> None:
    where = machine().model_copy(update={"links": (DISK.model_copy(update={"reads": 3}),)})
    assert Times(where, TINY, tiers(TINY)).latency_ns == (15,)


def test_a_slower_link_is_slower_at_every_size() -> None:
    assert DISK.wire_ns(200, share=0.5) == 200


@every("tokens, ns", [(1, 1007), (2, 1510), (3, 2014), (4, 3021), (5, 4028), (10, 8056), (0, 0)])
def test_many_tokens_take_measured_times_of_what_one_takes(tokens: int, ns: int) -> None:
    # one token: 1000 bytes at 1 byte/ns and the launch, 1007 ns. Two: 1.5 times, 1510.5, half to even; four: 3 times;
    # ten: 4 * 10 / 5 times
    curve = ((1, 1.0), (3, 2.0), (5, 4.0))
    roofline = Roofline(flops=1e18, memory_bytes_per_s=1e9, launch_ns=7, by_tokens=curve)
    assert roofline.ns(500, 1000, tokens) == ns


def test_weights_of_a_format_are_read_at_its_own_rate() -> None:
    roofline = Roofline(flops=1e18, memory_bytes_per_s=2e9, formats={"mxfp4": 0.5e9})
    assert [roofline.ns(500, 1000, 1, weights) for weights in ("", "Q8_0", "MXFP4")] == [500, 500, 2000]
    assert roofline.ns(500, 1000, 1, "MXFP4", share=0.5) == 4000


def test_experts_may_be_read_at_another_rate_than_dense_weights() -> None:
    rates = {"expert_bytes_per_s": 1e9, "formats": {"MXFP4": 0.5e9}, "dense_formats": {"q8_0": 4e9}}
    roofline = Roofline(flops=1e18, memory_bytes_per_s=2e9, **rates)
    assert [roofline.ns(500, 1000, 1, weights) for weights in ("", "Q8_0", "MXFP4")] == [1000, 1000, 2000]
    assert [roofline.dense_ns(500, 1000, 1, weights) for weights in ("", "Q8_0", "MXFP4")] == [500, 250, 500]
    where = Platform(name="t", links=(Link(bytes_per_s=1e9),), compute=roofline, cpu=roofline_of_cpu())
    # 1000 bytes of an expert; 100 bytes of a layer's dense part and 140 of the head, at 2 bytes/ns or 4
    stored = {"": (50, 70), "Q8_0": (25, 35), "Q4_K_M": (50, 70)}
    for named, dense in stored.items():
        times = Times(where, TINY.model_copy(update={"dense_format": named}), ((1000, 3000), (250, 750)))
        assert (times.expert_ns(0, 0, 1), times.cpu_ns(0, 0, 1)) == (1000, 500)
        assert (times.dense_ns(0, 1), times.pass_ns(1)) == dense


def roofline_of_cpu() -> Roofline:
    return Roofline(flops=1e18, memory_bytes_per_s=1e9, expert_bytes_per_s=2e9)


def test_a_cpu_has_no_dense_weights() -> None:
    cpu = Roofline(flops=1e18, memory_bytes_per_s=1e9, dense_formats={"Q8_0": 1e9})
    with pytest.raises(ValidationError, match="dense_formats"):
        Platform(name="t", links=(Link(bytes_per_s=1e9),), compute=roofline_of_cpu(), cpu=cpu)


def test_only_experts_as_they_are_stored_have_the_models_format() -> None:
    roofline = Roofline(flops=1e18, memory_bytes_per_s=1e9, formats={"MXFP4": 0.5e9})
    where = Platform(name="t", links=(Link(bytes_per_s=1e9),), compute=roofline)
    of = TINY.model_copy(update={"weight_format": "MXFP4"})
    times = Times(where, of, ((1000, 3000), (250, 750)))
    assert [times.expert_ns(0, p, 1) for p in (0, 1)] == [2000, 250]
    assert times.dense_ns(0, 1) == 100


def test_dense_weights_may_have_fewer_bits() -> None:
    # 50 weights of a layer and 70 of the head at 4.5 bits: 28.125 and 39.375 bytes, rounded up
    where = Platform(name="t", links=(Link(bytes_per_s=1e9),), compute=Roofline(flops=1e18, memory_bytes_per_s=1e9))
    times = Times(where, TINY.model_copy(update={"dense_bits": 4.5}), tiers(TINY))
    assert (times.dense_ns(0, 1), times.pass_ns(1)) == (29, 40)


def test_the_gates_decisions_are_part_of_every_dense_time() -> None:
    where = machine(dense_ns=3, pass_ns=4).model_copy(update={"loading": Loading(gate_ns=10)})
    times = Times(where, TINY, tiers(TINY))
    assert (times.dense_ns(0, 1), times.dense_ns(1, 1), times.pass_ns(1)) == (13, 13, 4)


def test_loading_is_so_much_per_expert_and_per_mib() -> None:
    # 1.5 MiB at 7 ns per MiB are 10.5 ns, rounded up
    assert Loading(ns_per_expert=100, ns_per_mib=7).ns(3 << 19) == 111


def test_a_layer_reads_its_part_of_the_kv_cache() -> None:
    # 5 positions of 30 bytes in 2 layers, at 2 bytes/ns: 37.5 ns, rounded up; none where no rate is said
    of = TINY.model_copy(update={"kv_bytes": 30})
    where = machine().model_copy(update={"compute": Measured(kv_bytes_per_s=2e9)})
    assert Times(where, of, tiers(of)).kv_ns(5) == 38
    assert Times(machine(), of, tiers(of)).kv_ns(5) == 0


def test_lanes_carry_no_more_than_each_of_them() -> None:
    """A lane moves a byte per nanosecond: two take 500 ns for 1000 bytes, and eight the link's own 250 ns."""
    two = Link(bytes_per_s=4e9, depth=2, lane_bytes_per_s=1e9)
    assert [two.wire_ns(1000), two.wire_ns(1000, share=0.5)] == [500, 1000]
    assert two.model_copy(update={"depth": 8}).wire_ns(1000) == 250
    assert "lane_bytes_per_s" not in Link(bytes_per_s=4e9, depth=2).model_dump()


def test_kept_times_are_of_the_same_machine_model_and_precisions() -> None:
    model, tiers = Geometry(layers=1, experts=4, k=1, expert_bytes=(8,)), ((8,), (4,))
    first = times_of(machine(bytes_per_ns=1), model, tiers)
    assert times_of(machine(bytes_per_ns=1), model.model_copy(), tiers) is first
    others = [
        times_of(machine(bytes_per_ns=2), model, tiers),
        times_of(machine(bytes_per_ns=1), model.model_copy(update={"experts": 8}), tiers),
        times_of(machine(bytes_per_ns=1), model, ((8,),)),
        times_of(machine(bytes_per_ns=1), model, ((8,), (2,))),
    ]
    assert [each.wire_ns[0][0] for each in (first, *others)] == [[8, 4], [4, 2], [8, 4], [8], [8, 2]]
    assert len({id(each) for each in (first, *others)}) == 5
