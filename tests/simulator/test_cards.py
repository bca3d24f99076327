"""Cards by the names that people and drivers give them, and machines from parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moereplay.simulator.cards import card, cards, link_rate, recognised
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.here import as_file
from moereplay.simulator.machine import (
    Cores,
    assembled,
    better,
    in_memory,
    of_platform,
    ram_rate_of,
    with_memory,
    without_gpu,
)
from moereplay.simulator.platforms import as_toml, platform
from moereplay.simulator.rates import Roofline
from tests.kit.every import every

GIB = 1 << 30


def test_cards_are_many_and_plausible() -> None:
    found = cards()
    assert len(found) >= 150
    spellings = [each.lower() for known in found.values() for each in (known.name, *known.aliases)]
    assert len(spellings) == len(set(spellings))
    for each in found.values():
        assert 14e9 <= each.bytes_per_s <= 0.9 * 8e12 and 0.3e12 <= each.flops <= 2.5e15 and each.source
        assert 3 < each.flops / (each.gb_per_s * 1e9) < 1000, each.name
        if each.is_unified:
            assert not each.pcie
        else:
            assert 3 * GIB <= each.vram_bytes <= 288 * GIB
            assert 5e9 < each.link_bytes_per_s < 60e9


@every(
    "typed, name",
    [
        ("3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX PRO 6000", "RTX PRO 6000 Blackwell"),
        ("strix halo", "Ryzen AI Max 395"),
        ("Apple M4 Max", "M4 Max"),
        ("7900 XTX", "RX 7900 XTX"),
        ("RTX 3060 12GB", "RTX 3060"),
        ("RTX 3060 (8 GB)", "RTX 3060 8GB"),
        ("3080 10GB", "RTX 3080"),
        ("3080 12GB", "RTX 3080 12GB"),
        ("4060 Ti 16G", "RTX 4060 Ti 16GB"),
        ("5060 Ti 8GB", "RTX 5060 Ti"),
        ("GeForce RTX 4090 24GB GDDR6X", "RTX 4090"),
        ("4070 mobile", "RTX 4070 Laptop"),
        ("1660ti", "GTX 1660 Ti"),
        ("RTX 6000 Pro", "RTX PRO 6000 Blackwell"),
        ("A100 SXM4 40GB", "A100 40GB"),
        ("H100 80GB PCIe", "H100 PCIe"),
        ("H100 SXM5 80GB", "H100 SXM"),
        ("Tesla V100 PCIe 16GB", "Tesla V100 16GB"),
        ("Tesla T4", "T4"),
        ("P40 24GB", "Tesla P40"),
        ("MI300X", "Instinct MI300X"),
        ("W7900", "Radeon PRO W7900"),
        ("B580", "Arc B580"),
        ("Arc 140T", "Arc 140T"),
        ("Intel(R) Arc(TM) 140V GPU", "Arc 140V"),
        ("M5 Max", "M5 Max"),
        ("Jetson Thor", "Jetson AGX Thor"),
        ("Orin Nano", "Jetson Orin Nano"),
        ("raspberry pi 5", "Raspberry Pi 5"),
        ("Snapdragon 8 Elite", "Snapdragon 8 Elite"),
    ],
)
def test_a_card_is_found_as_people_write_it(typed: str, name: str) -> None:
    assert card(typed).name == name


@every(
    "typed, says",
    [
        ("RTX 3060 16GB", "the RTX 3060 is sold with 8 or 12 GB; for a modified card, .* --vram 16GB"),
        ("3080 20GB", "the RTX 3080 is sold with 10 or 12 GB"),
        ("RTX 2080 Ti 22GB", "the RTX 2080 Ti is sold with 11 GB"),
        ("M4 Max 64GB", "the M4 Max shares the machine's memory: pass --ram 64GB"),
        ("RTX 3090, RTX 4090", "expected one kind"),
    ],
)
def test_a_size_that_the_card_does_not_have_is_answered_with_those_that_are_sold(typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        card(typed)


def test_a_misspelt_card_is_answered_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match="RTX 3090") as refused:
        card("RTX 30900")
    assert "--cards" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        card("\x1b[31m" + "9" * 5_000_000)
    assert len(str(refused.value)) < 500 and "\x1b" not in str(refused.value)


@every(
    "said, gib, name, is_exact",
    [
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8, "RTX 4060 Laptop", True),
        ("NVIDIA GeForce RTX 3080", 12, "RTX 3080 12GB", True),
        ("NVIDIA GeForce RTX 3080", 10, "RTX 3080", True),
        ("NVIDIA GeForce RTX 4060 Ti", 16, "RTX 4060 Ti 16GB", True),
        ("NVIDIA A100-SXM4-80GB", 80, "A100 80GB", True),
        ("NVIDIA A100-PCIE-40GB", 40, "A100 40GB", True),
        ("Tesla V100-SXM2-16GB", 16, "Tesla V100 16GB", True),
        ("NVIDIA H100 80GB HBM3", 80, "H100 SXM", True),
        ("NVIDIA H100 PCIe", 80, "H100 PCIe", True),
        ("NVIDIA RTX 6000 Ada Generation", 48, "RTX 6000 Ada", True),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, "RTX PRO 6000 Blackwell", True),
        ("NVIDIA GB10", 0, "GB10", True),
        ("Radeon RX 7900 XTX", 24, "RX 7900 XTX", True),
        ("AMD Radeon AI PRO R9700", 32, "Radeon AI PRO R9700", True),
        ("AMD Instinct MI50/MI60", 16, "Instinct MI50 16GB", False),
        ("Intel(R) Arc(TM) B580 Graphics", 12, "Arc B580", True),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", 0, "Ryzen AI Max 395", False),
        ("NVIDIA GeForce RTX 3050 Ti Laptop GPU", 4, "RTX 3050 6GB", False),
        ("NVIDIA GeForce RTX 4090 D", 24, "RTX 4090 D", True),
        ("NVIDIA GeForce RTX 5090 D", 32, "RTX 5090", False),
    ],
)
def test_a_driver_s_name_is_a_card(said: str, gib: int, name: str, is_exact: bool) -> None:
    """Memory chooses among cards of one name. A name with words that no card has is a guess, and is said to be one."""
    found = recognised(said, gib * GIB)
    assert found is not None and (found.card.name, found.is_exact) == (name, is_exact)


@every(
    "said", ["", "   ", "NVIDIA", "AMD EPYC 7763 64-Core Processor", "Intel(R) Xeon(R) CPU", "- / _", "Quadro P2000"]
)
def test_other_names_are_no_card(said: str) -> None:
    assert recognised(said, 8 * GIB) is None


@every(
    "name, reach, layer_ns",
    [
        *(("RTX 2080", 0.6, 105_000), ("RTX 3090", 0.6, 40_000), ("RTX 3060 Laptop", 0.6, 40_000)),
        *(("RTX 4060 Laptop", 0.9, 40_000), ("RTX 5090", 0.9, 40_000), ("RX 7900 XT", 0.6, 40_000)),
        *(
            ("M4 Max", 0.85, 105_000),
            ("M2 Ultra", 0.6, 105_000),
            ("GB10", 0.85, 40_000),
            ("Arc 140V", 0.85, 105_000),
            ("Arc B580", 0.6, 105_000),
        ),
    ],
)
def test_a_platform_charges_what_its_family_reaches(name: str, reach: float, layer_ns: int) -> None:
    """The share of the vendor's rate, for weights and KV cache, and the launches of each layer."""
    made = assembled(gpu=name, ram="64GB")
    compute, rate = made.platform.compute, round(reach * card(name).gb_per_s * 1e9)
    assert isinstance(compute, Roofline)
    assert (compute.memory_bytes_per_s, compute.kv_bytes_per_s, made.platform.loading.gate_ns) == (rate, rate, layer_ns)
    assert made.kind == "unified" or without_gpu(made).platform.loading.gate_ns == 0


def test_links_are_measured_rates() -> None:
    assert link_rate("3.0 x16") == pytest.approx(13.17e9)
    assert link_rate("4.0 x16") == pytest.approx(25.1e9)
    assert link_rate("4x8") == pytest.approx(12.55e9)
    assert link_rate("5.0x16") == pytest.approx(52.7e9)
    for wrong in ("16", "6.0x16", "4.0x3", "", "x"):
        with pytest.raises(ConfigError, match="expected a PCIe link"):
            link_rate(wrong)


# -- from parts


def test_what_is_not_said_is_assumed_and_said() -> None:
    server, desktop = (assembled(gpu="3090", ram=ram) for ram in ("256GB", "192GB"))
    assert server.ends[0][0] == ram_rate_of("8xDDR4-3200") > desktop.ends[1][0]
    whole = assembled(gpu="3090", ram="64GB", ram_rate="50GB/s", disk="7GB/s", cores="16xAVX512")
    assert whole.assumed == ()
    assert whole.kind == "gpu" and whole.memory_bytes == 24 * GIB and whole.disk_bytes_per_s == 7e9
    bare = assembled(vram="24GB")
    assert [each.rpartition("(")[2] for each in bare.assumed] == [
        *("--gpu)", "--ram)", "--disk)", "--ram-rate)", "--cores 16xAVX512)"),
    ]
    assert assembled(gpu="M4 Max", ram="128GB").kind == "unified"


def test_memory_is_counted_as_it_is_sold_and_rates_in_powers_of_ten() -> None:
    """64 GB of RAM are 68.7e9 bytes, whichever way they are typed; two channels of DDR4-3600 have 57.6 GB/s at most."""
    by_gb, by_gib = (assembled(vram=f"24{unit}", ram=f"64{unit}", ram_rate="50GB/s") for unit in ("GB", "GiB"))
    assert by_gb == by_gib and (by_gb.memory_bytes, by_gb.ram_bytes) == (24 * 2**30, 64 * 2**30)
    assert assembled(gpu="3090").ram_bytes == 64 * 2**30 and "24 GB" in dict(by_gb.lines())["VRAM"]
    assert of_platform(platform("phone-ufs4"), "512MB").memory_bytes == 512 * 2**20
    for modules, rate in (("DDR4-3600", 0.7 * 57.6e9), ("8 x ddr5-4800", 0.5 * 307.2e9), ("57GB/s", 57e9)):
        compute = assembled(ram="64GB", ram_rate=modules, cores="64").platform.compute
        assert isinstance(compute, Roofline) and compute.memory_bytes_per_s == pytest.approx(rate)


@every(
    "parts, example",
    [
        ({"gpu": "3090", "ram": "64"}, "--ram '64': expected a size with a unit, such as 64GB"),
        ({"vram": "24"}, "--vram '24': expected a size with a unit, such as 24GB"),
        ({"gpu": "3090", "disk": "3.5"}, "--disk '3.5': expected a rate with a unit, such as 3.5GB/s"),
        ({"gpu": "3090", "ram_rate": "50"}, "--ram-rate '50': expected a rate with a unit, such as 50GB/s, or modules"),
        ({"gpu": "3090", "ram_rate": "DDR4"}, "such as 60GB/s, or modules such as DDR4-3600"),
        ({"gpu": "3090", "ram_rate": "0xDDR4-3600"}, "such as 60GB/s, or modules such as DDR4-3600"),
        ({"gpu": "3090", "ram": "lots"}, "such as 64GB"),
    ],
)
def test_a_number_without_a_unit_is_answered_with_the_unit(parts: dict[str, Any], example: str) -> None:
    with pytest.raises(ConfigError) as refused:
        assembled(**parts)
    assert example in str(refused.value)


def cpu_of(**parts: Any) -> Roofline:
    """The CPU beside an RTX 3090."""
    cpu = assembled(gpu="3090", ram="64GB", **parts).platform.cpu
    assert isinstance(cpu, Roofline)
    return cpu


def test_a_cpu_reads_experts_at_the_lesser_of_ram_and_its_kernels() -> None:
    """Cores decode 5e9 weights/s with AVX2, 7e9 with AVX-512, grids of points (IQ1 to IQ3) .65 of that."""
    old = cpu_of(ram_rate="50GB/s", cores="4xAVX2")
    assert old.expert_rate("Q4_0") == 4 * 5e9 * 4.5 / 8
    assert old.expert_rate("IQ3_XXS") == pytest.approx(0.65 * 4 * 5e9 * 3.0625 / 8)
    assert old.expert_rate("BF16") == 4 * 5e9 * 16 / 8 < old.expert_rate("") == 50e9
    new = cpu_of(ram_rate="50GB/s", cores="16 x amx")
    assert new.expert_rate("Q4_0") == 50e9 and "MXFP4" not in new.formats
    alone = without_gpu(assembled(gpu="3090", ram="64GB", ram_rate="50GB/s", cores="4xAVX2")).platform.compute
    assert isinstance(alone, Roofline) and alone.kv_bytes_per_s == 50e9
    assert alone.memory_bytes_per_s == 16.4e9 == alone.dense_formats["Q6_K"]
    assert alone.expert_rate("Q4_0") == old.expert_rate("Q4_0") == alone.dense_formats["Q4_0"]


def test_what_is_not_said_of_a_cpu_is_a_range_with_a_middle() -> None:
    bare = assembled(gpu="3090", ram="64GB")
    slow, fast = bare.range()
    rates = [of.platform.cpu.memory_bytes_per_s for of in (slow, bare, fast) if isinstance(of.platform.cpu, Roofline)]
    assert rates == [pytest.approx(each, rel=1e-6) for each in (35.84e9, (35.84e9 * 67.2e9) ** 0.5, 67.2e9)]
    assert [each and each.decoded() for each in (slow.cores, bare.cores, fast.cores)] == [6 * 5e9, 8 * 7e9, 16 * 7e9]
    assert slow.range() == () == assembled(gpu="3090", ram="64GB", ram_rate="50GB/s", cores="8xAVX2").range()
    said = assembled(ram="64GB", ram_rate="DDR5-6000..DDR4-3200", cores="8xAVX2")
    assert [of.platform.compute.kv_bytes_per_s for of in said.range()] == pytest.approx([35.84e9, 67.2e9])
    (at_least, at_most) = assembled(ram="64GB", ram_rate="50GB/s", cores="8").range()
    assert (at_least.cores, at_most.cores) == (Cores(8, "avx2"), Cores(8, "vnni"))
    for wrong in ("0", "8xMMX", "x8", "8.5", "9" * 9):
        with pytest.raises(ConfigError, match=r"invalid --cores .* expected a number from 1 to 4096"):
            assembled(ram="64GB", cores=wrong)


def test_several_cards_have_the_memory_of_all_and_the_rates_of_one() -> None:
    one = assembled(gpu="3090", ram="64GB")
    for typed in ("2x RTX 3090", "RTX 3090 x2", "2 * 3090"):
        two = assembled(gpu=typed, ram="64GB")
        assert (two.count, two.memory_bytes) == (2, 48 * GIB)
        assert two.free_bytes == 2 * one.free_bytes and two.platform.name == "2 x RTX 3090"
        assert (two.platform.compute, two.platform.links) == (one.platform.compute, one.platform.links)
    assert assembled(gpu="2x 2080 Ti", vram="22GB", ram="64GB").memory_bytes == 44 * GIB
    for wrong, says in (("2x M4 Max", "its own memory"), ("99x 3090", "1 to 16"), ("3090 + 4090", "expected one kind")):
        with pytest.raises(ConfigError, match=says):
            assembled(gpu=wrong, ram="64GB")


def test_others_keep_a_part_of_the_memory() -> None:
    """A desktop of its card, macOS a quarter, any other system 2 GB; the same share of an upgrade."""
    cases: tuple[tuple[dict[str, Any], float], ...] = (
        ({"gpu": "RTX 3090"}, 0.08 * 24 * GIB),
        ({"gpu": "H100 PCIe"}, 0.01 * 80 * GIB),
        ({"gpu": "M4 Max"}, 16 * GIB),
        ({"gpu": "GB10"}, 2e9),
        ({}, 2e9),
    )
    for parts, kept in cases:
        made = assembled(**parts, ram="64GB")
        assert made.memory_bytes - made.free_bytes == pytest.approx(kept, abs=1)
        larger = with_memory(made, 2 * made.memory_bytes)
        assert larger.free_bytes == pytest.approx(2 * made.free_bytes, abs=2)


def test_upgrades_are_sold() -> None:
    """No desktop, two larger cards, a kit of twice the size, modules, a full slot of PCIe 4, a drive of PCIe 5."""
    found = assembled(gpu="RTX 3060", ram="24GB", ram_rate="DDR4-3200", link="4.0x8", disk="7GB/s")
    said = [what.partition(" in place of")[0] for what, _ in better(found, 100 * GIB)]
    assert said == [
        "no desktop on the card (--headless)",
        *("VRAM of 16 GB", "VRAM of 24 GB", "RAM of 48 GB", "RAM read at 62.7 GB/s (2xDDR5-5600)"),
        *("twice the CPU's cores", "a link of 25.1 GB/s (PCIe 4.0 x16)", "VRAM read at 432 GB/s", "a disk of 14 GB/s"),
    ]
    assert all(changed != found for _, changed in better(found, 100 * GIB))
    best = assembled(gpu="B200", ram="2048GB", ram_rate="600GB/s", link="5.0x16", disk="14GB/s")
    assert not [what for what, _ in better(best, 10_000 * GIB) if re.match("RAM|a link|a disk", what)]


def test_a_machine_whose_ram_holds_every_expert_has_no_disk() -> None:
    found = in_memory(assembled(gpu="3090", ram="64GB"))
    assert not found.platform.tiers and found.platform.cpu and found.disk_bytes_per_s is None
    assert [each.rpartition("(")[2] for each in found.assumed] == ["--ram-rate)", "--cores 16xAVX512)"]


@every(
    "parts",
    [
        {"vram": "0GB"},
        {"vram": "24"},
        {"gpu": "3090", "ram": "9999999999TB"},
        {"gpu": "3090", "disk": "7"},
        {"gpu": "3090", "disk": "0GB/s"},
        {"gpu": "3090", "ram_rate": "99999999999TB/s"},
        {"gpu": "3090", "link": "6.0x16"},
        {"gpu": "3090", "cores": "0"},
        {"gpu": "3090", "cores": "-1"},
        {"gpu": "M4", "vram": "8GB", "ram": "16GB"},
        {"gpu": "none", "vram": "8GB", "ram": "16GB"},
        {"ram": "16GB", "link": "4.0x16"},
        {"ram_rate": "50GB/s"},
    ],
)
def test_parts_that_fit_no_machine_are_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        assembled(**parts)


@every(
    "name, memory, ram, disk, kind, below",
    [
        ("rtx4090-pcie4", "24GB", "64GB", "", "gpu", 64 * GIB),
        ("phone-ufs4", "4GB", "", "", "cpu", 0),
        ("mac-nvme", "64GB", "", "5GB/s", "unified", 0),
    ],
)
def test_presets_are_machines_too(name: str, memory: str, ram: str, disk: str, kind: str, below: int) -> None:
    found = of_platform(platform(name), memory, ram, disk)
    assert (found.kind, found.ram_bytes) == (kind, below)
    assert (found.disk_bytes_per_s == 5e9) == bool(disk)


def test_an_assembled_machine_is_an_ordinary_platform_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    made = assembled(gpu="RTX 3060", ram="32GB")
    file.write_text(as_toml(made.platform))
    assert platform(str(file)) == made.platform
    file.write_text(as_file(made._replace(assumed=(*made.assumed, "a\nb = 1"))))
    assert platform(str(file)) == made.platform
    again = of_platform(platform(str(file)))
    assert (again.kind, again.ram_bytes, again.disk_bytes_per_s) == ("gpu", 32 * GIB, made.disk_bytes_per_s)
