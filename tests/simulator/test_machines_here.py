"""Cards by name, machines from parts, and this machine: what drivers print is data, and measuring fails nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moereplay.simulator import here as this
from moereplay.simulator.cards import card, cards, link_rate
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.here import detected, here, measured_disk
from moereplay.simulator.machine import assembled, of_platform
from moereplay.simulator.platforms import as_toml, platform
from tests.kit.every import every

GIB = 1 << 30


def test_cards_are_many_and_plausible() -> None:
    found = cards()
    assert len(found) >= 80
    spellings = [each.lower() for known in found.values() for each in (known.name, *known.aliases)]
    assert len(spellings) == len(set(spellings))
    for each in found.values():
        assert 50e9 <= each.bytes_per_s <= 8e12 and 2e12 <= each.flops <= 2.5e15 and each.source
        if each.is_unified:
            assert not each.pcie
        else:
            assert 6 * GIB <= each.vram_bytes <= 192 * GIB
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
    ],
)
def test_a_card_is_found_as_people_write_it(typed: str, name: str) -> None:
    assert card(typed).name == name


def test_links_are_measured_rates() -> None:
    assert link_rate("4.0 x16") == pytest.approx(25.1e9)
    assert link_rate("4x8") == pytest.approx(12.55e9)
    assert link_rate("5.0x16") == pytest.approx(52.7e9)
    with pytest.raises(ConfigError, match="expected a PCIe link"):
        link_rate("16")


def test_what_is_not_said_is_assumed_and_said() -> None:
    whole = assembled(gpu="3090", ram="64GB", ram_rate="50GB/s", disk="7GB/s")
    assert whole.assumed == ()
    assert whole.kind == "gpu" and whole.memory_bytes == 24 * GIB and whole.disk_bytes_per_s == 7e9
    bare = assembled(vram="24GB")
    assert [each.rpartition("(")[2] for each in bare.assumed] == ["--gpu)", "--ram)", "--disk)", "--ram-rate)"]
    assert assembled(gpu="M4 Max", ram="128GB").kind == "unified"


@every(
    "name, memory, ram, disk, kind, below",
    [
        ("rtx4090-pcie4", "24GB", "64GB", "", "gpu", 64 * 10**9),
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
    made = assembled(gpu="RTX 3060", ram="32GB").platform
    file.write_text(as_toml(made))
    assert platform(str(file)) == made


# -- this machine


def fake(folder: Path, name: str, prints: str, status: int = 0) -> None:
    """Put a program first on the PATH that prints a text."""
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\nexit {status}\n")
    file.chmod(0o755)


@every(
    "prints, names, link",
    [
        ("NVIDIA GeForce RTX 3090, 24576, 4, 16", ["NVIDIA GeForce RTX 3090"], "4.0x16"),
        ("NVIDIA RTX A6000, 49140, 4, 16\nTesla P40, 23040, 3, 8", ["NVIDIA RTX A6000", "Tesla P40"], "4.0x16"),
        ("Quadro P2000, 5120, [N/A], [N/A]", ["Quadro P2000"], ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver", [], ""),
        ("a, b, c, d\n,,,\n\x1b[31mred, 1e99, 4, 16", [], ""),
    ],
    apart=True,
)
def test_what_a_driver_prints_is_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, names: list[str], link: str
) -> None:
    fake(tmp_path, "nvidia-smi", prints)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = detected()
    assert [each.name for each in found.gpus] == names
    assert not names or found.gpus[0].link == link


def test_a_driver_that_fails_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "nvidia-smi", "NVIDIA GeForce RTX 3090, 24576, 4, 16", status=9)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert detected().gpus == ()


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(this, "RAM_SECONDS", 0.05)
    monkeypatch.setattr(this, "ARRAY_BYTES", 4 << 20)


def test_this_machine_is_measured_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    fake(tmp_path, "nvidia-smi", "NVIDIA GeForce RTX 4060 Laptop GPU, 8188, 4, 8")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "work"
    folder.mkdir()
    found = here(folder)
    assert found.kind == "gpu" and found.memory_bytes == 8188 << 20
    assert found.ram_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.platform.links[0].bytes_per_s == pytest.approx(12.55e9)
    assert list(folder.iterdir()) == []
    file = tmp_path / "here.toml"
    file.write_text(as_toml(found.platform))
    assert platform(str(file)).name == "here"


def test_a_disk_that_cannot_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate, why = measured_disk(tmp_path / "absent")
    assert rate is None and "No such file" in why and "--disk" in why
    monkeypatch.setattr(this, "FILE_BYTES", 1 << 60)
    rate, why = measured_disk(tmp_path)
    assert rate is None and "are free" in why
    assert list(tmp_path.iterdir()) == []
