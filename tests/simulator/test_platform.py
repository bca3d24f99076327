"""Machines: presets with sources, rates that become integer nanoseconds, and what a platform file may say."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

import pytest

from simulator.errors import ConfigError
from simulator.platform import Contention, Link, Measured, Platform, Roofline, Times
from simulator.platform_files import as_toml, platform, presets
from simulator.platforms import NAMES
from tests.kit.cases import machine
from traces.geometry import MODELS
from traces.schema import Geometry

TINY = Geometry(layers=2, experts=4, k=2, expert_bytes=(1000, 3000), expert_bits=16, dense_params=50, head_params=70)


def tiers(geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    return (geometry.expert_bytes,)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        platform(text)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_carries_its_name_and_sources(name: str) -> None:
    preset = platform(name)
    assert (preset.name, bool(preset.summary)) == (name, True)
    assert len(preset.source) > 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["mixtral-8x7b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_every_preset_moves_an_expert_slower_than_it_computes_one(name: str, model: str) -> None:
    # offloading is a problem on all of them: the link, not compute, bounds a miss
    geometry = MODELS[model].geometry
    times = Times(platform(name), geometry, tiers(geometry))
    assert times.latency_ns[0] + times.wire_ns[0][0][0] > times.expert_ns(0, 0, 1)


def test_presets_are_listed_in_one_order() -> None:
    assert tuple(preset.name for preset in presets()) == NAMES


def test_specmds_machine_moves_5_gb_per_second() -> None:
    # a Mixtral expert of 3 * 4096 * 14336 weights at 2 bytes: 352,321,536 bytes / 5e9 = 70.4643072 ms
    geometry = MODELS["mixtral-8x7b"].geometry
    assert Times(platform("a100-5gbps"), geometry, tiers(geometry)).wire_ns[0][0] == [70_464_308]


# ---------------------------------------------------------------- the link


@pytest.mark.parametrize(("size", "rate", "ns"), [(7, 2e9, 4), (8, 2e9, 4), (1, 3e9, 1), (10**12, 1.0, 10**21)])
def test_the_wire_rounds_up_to_a_nanosecond(size: int, rate: float, ns: int) -> None:
    assert Link(bytes_per_s=rate).wire_ns(size) == ns


def test_an_infinite_link_takes_no_time() -> None:
    assert Link(bytes_per_s=inf).wire_ns(10**15) == 0


def test_the_wire_knows_layer_and_precision() -> None:
    times = Times(machine(bytes_per_ns=1), TINY, ((1000, 3000), (250, 750)))
    assert times.wire_ns == [[[1000, 250], [3000, 750]]]


# ---------------------------------------------------------------- compute


def test_a_roofline_takes_the_higher_of_its_ceilings_and_the_launch() -> None:
    # 500 weights, 1000 bytes, at 1e12 FLOP/s and 1e9 bytes/s: bytes 1000 ns; 2 * 500 * 2000 FLOPs 2000 ns
    roofline = Roofline(flops=1e12, memory_bytes_per_s=1e9, launch_ns=7)
    assert roofline.ns(500, 1000, tokens=1) == 1000 + 7
    assert roofline.ns(500, 1000, tokens=2000) == 2000 + 7


@pytest.mark.parametrize(("params", "tokens"), [(0, 5), (500, 0)])
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


def test_measured_times_are_a_constant_and_so_much_per_token() -> None:
    where = machine(dense_ns=3, pass_ns=4, expert_ns=5, expert_ns_per_token=6)
    times = Times(where, TINY, tiers(TINY))
    assert (times.dense_ns(1, 9), times.pass_ns(9), times.expert_ns(0, 0, 2)) == (3, 4, 5 + 12)


def test_computing_on_a_cpu_that_is_not_described_is_refused() -> None:
    where = Platform(name="bare", links=(Link(bytes_per_s=1),), compute=Measured())
    with pytest.raises(ConfigError, match=r"platform bare has no \[cpu\] table"):
        Times(where, TINY, tiers(TINY)).cpu_ns(0, 0, 1)


# ---------------------------------------------------------------- platform files

FILE = """name = "mine"
[link]
bytes_per_s = inf
[compute]
kind = "measured"
expert_ns = 5
"""


def written(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


def test_a_platform_may_be_a_file(tmp_path: Path) -> None:
    where = platform(written(tmp_path, FILE))
    assert (where.name, where.links[0].bytes_per_s, where.compute) == ("mine", inf, Measured(expert_ns=5))


def test_an_unknown_platform_names_the_nearest() -> None:
    assert "did you mean h100-pcie5?" in refusal("h100_pcie5")
    assert "give a .toml file, or choose from " in refusal("quantum")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "is no valid TOML"),
        (FILE.replace("inf", "0"), "link.bytes_per_s: expected at least 1 (got 0)"),
        (FILE.replace("inf", "nan"), "link.bytes_per_s"),
        (FILE.replace("expert_ns", "expert_nanoseconds"), "expert_nanoseconds: nothing is called so here"),
        (FILE.replace("measured", "guessed"), "compute: kind 'guessed' is unknown: choose from 'roofline', "),
        (FILE.replace("[link]\nbytes_per_s = inf\n", ""), "link: it is missing"),
    ],
)
def test_a_wrong_platform_file_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(written(tmp_path, text))


def test_a_platform_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "cannot read platform file" in refusal(str(tmp_path / "absent.toml"))


def test_a_platform_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    assert "is no valid TOML: 'utf-8' codec can't decode byte" in refusal(str(tmp_path / "mine.toml"))


# files that extend others, and files that are written


def extending(folder: Path, text: str) -> str:
    (folder / "base.toml").write_text(as_toml(platform("rtx4090-pcie4")))
    (folder / "mine.toml").write_text(text)
    return str(folder / "mine.toml")


@pytest.mark.parametrize("base", ["rtx4090-pcie4", "base.toml"])
def test_a_file_lays_its_figures_over_those_of_its_base(base: str, tmp_path: Path) -> None:
    mine = platform(extending(tmp_path, f'name = "mine"\nbase = "{base}"\n[link]\nbytes_per_s = 1e9\n'))
    old = platform("rtx4090-pcie4")
    assert mine.name == "mine"
    assert mine.links[0] == old.links[0].model_copy(update={"bytes_per_s": 1e9})
    assert (mine.compute, mine.cpu, mine.source) == (old.compute, old.cpu, old.source)


def test_a_table_of_another_kind_replaces_that_of_the_base(tmp_path: Path) -> None:
    text = 'name = "mine"\nbase = "phone-ufs4"\n[compute]\nkind = "measured"\nexpert_ns = 7\n'
    assert platform(extending(tmp_path, text)).compute == Measured(expert_ns=7)


def test_several_links_replace_the_one_of_the_base(tmp_path: Path) -> None:
    rows = "[[links]]\nbytes_per_s = 1e9\n[[links]]\nbytes_per_s = 2e9\n"
    mine = platform(extending(tmp_path, f'name = "mine"\nbase = "phone-ufs4"\n{rows}'))
    assert [link.bytes_per_s for link in mine.links] == [1e9, 2e9]


def test_a_file_that_extends_itself_is_refused_by_its_chain(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('name = "o"\nbase = "mine.toml"\n')
    mine = extending(tmp_path, 'name = "m"\nbase = "other.toml"\n')
    with pytest.raises(ConfigError, match=r"extends itself: .*mine\.toml -> .*other\.toml -> .*mine\.toml; remove one"):
        platform(mine)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "phone-ufs4"\n', "name: it is missing"),
        ('name = "m"\nbase = "fone-ufs4"\n', "no platform called 'fone-ufs4': did you mean phone-ufs4?"),
        ('name = "m"\nbase = "absent.toml"\n', "cannot read platform file"),
        ('name = "m"\nbase = 3\n', "base is 3; expected the name of a preset or a .toml file"),
        ('name = "m"\nbase = "phone-ufs4"\n[link]\nspeed = 1\n', "link.speed"),
    ],
)
def test_what_is_wrong_with_a_base_is_said(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        platform(extending(tmp_path, text))


@pytest.mark.parametrize("machine", presets(), ids=lambda machine: machine.name)
def test_what_is_written_reads_back_as_the_same_machine(machine: Platform, tmp_path: Path) -> None:
    (tmp_path / "written.toml").write_text(as_toml(machine))
    assert platform(str(tmp_path / "written.toml")) == machine


def test_several_links_and_strange_names_are_written_too(tmp_path: Path) -> None:
    rows = (
        Link(bytes_per_s=float("inf"), share=1),
        Link.model_validate({"bytes_per_s": 5e9, "share": 0.5, "from": "NVMe"}),
    )
    machine = Platform(name='a "b"\x7f\n\u00e9', links=rows, compute=Measured(), contention=Contention(cpu=0.5))
    (tmp_path / "written.toml").write_text(as_toml(machine))
    assert platform(str(tmp_path / "written.toml")) == machine
