"""This machine: what drivers print is data, and measuring fails for no user."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moereplay.simulator import detection
from moereplay.simulator import here as measuring
from moereplay.simulator.cards import cards, recognised
from moereplay.simulator.detection import Gpu, detected
from moereplay.simulator.here import as_file, here, measured_disk, surveyed
from moereplay.simulator.machine import assembled, in_memory, of_platform, without_gpu
from moereplay.simulator.platforms import as_toml, platform
from tests.kit.command import moereplay_here
from tests.kit.every import every

GIB = 1 << 30


# -- what the system says


def fake(folder: Path, name: str, prints: str, status: int = 0) -> None:
    """Put a program first on the PATH that prints a text."""
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\nexit {status}\n")
    file.chmod(0o755)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine: no tools but those put into bin/, and its own /proc and /sys."""
    tools, root = tmp_path / "bin", tmp_path / "root"
    tools.mkdir()
    root.mkdir()
    (tools / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(detection, "ROOT", root)
    return tmp_path


def put(other: Path, path: str, text: str) -> None:
    """Write a file of the system."""
    file = other / "root" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


@every(
    "prints, gpus",
    [
        ("NVIDIA GeForce RTX 3090, 24576, 4, 16, 16", [("NVIDIA GeForce RTX 3090", 24576 << 20, "4.0x16")]),
        ("NVIDIA GeForce RTX 3090, 24576, 4, 16, 4", [("NVIDIA GeForce RTX 3090", 24576 << 20, "4.0x4")]),
        (
            "NVIDIA RTX A6000, 49140, 4, 16, 16\nTesla P40, 23040, 3, 16, 8",
            [("NVIDIA RTX A6000", 49140 << 20, "4.0x16"), ("Tesla P40", 23040 << 20, "3.0x8")],
        ),
        ("NVIDIA GB10, [N/A], 1, 1, 1", [("NVIDIA GB10", 0, "")]),
        ("Quadro P2000, 5120, [N/A], [N/A], [N/A]", [("Quadro P2000", 5120 << 20, "")]),
        ("No devices were found", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", []),
        ("a, b, c, d, e\n,,,,\n\x1b[31mred, 1e99, 4, 16, 16\nx, 99999999999999999999, 4, 16, 16", []),
    ],
    apart=True,
)
def test_what_nvidia_smi_prints(other: Path, prints: str, gpus: list[tuple[str, int, str]]) -> None:
    fake(other / "bin", "nvidia-smi", prints)
    assert detected().gpus == tuple(Gpu(*each) for each in gpus)


def test_a_driver_that_fails_is_no_gpu(other: Path) -> None:
    fake(other / "bin", "nvidia-smi", "NVIDIA GeForce RTX 3090, 24576, 4, 16, 16", status=9)
    fake(
        other / "bin",
        "lspci",
        '0000:01:00.0 "VGA compatible controller" "NVIDIA Corporation" "GA102 [GeForce RTX 3090]" -ra1 "" ""',
    )
    found = detected()
    assert found.gpus == () and "GeForce RTX 3090" in found.remarks[0] and "nvidia-smi" in found.remarks[0]


NAVI = (
    '0000:03:00.0 "VGA compatible controller" "Advanced Micro Devices, Inc. [AMD/ATI]" '
    '"Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]" -rc8 -p00 "Sapphire" "NITRO+"'
)


def test_amd_s_cards_are_found_by_driver_tool_or_bus(other: Path) -> None:
    """The bus names all cards of a chip: 20 GiB make this one a 7900 XT. The processor's own 512 MiB are no card."""
    device = "sys/devices/pci0000:00/0000:03:00.0"
    for name, text in {
        "vendor": "0x1002",
        "mem_info_vram_total": str(20 * GIB),
        "max_link_speed": "16.0 GT/s PCIe",
        "max_link_width": "16",
        "current_link_width": "8",
    }.items():
        put(other, f"{device}/{name}", text)
    put(other, "sys/devices/apu/vendor", "0x1002")
    put(other, "sys/devices/apu/mem_info_vram_total", str(GIB // 2))
    for index, target in enumerate(("pci0000:00/0000:03:00.0", "apu")):
        folder = other / f"root/sys/class/drm/card{index}"
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(other / "root/sys/devices" / target)
    assert detected().gpus == () and "in no table" in detected().remarks[0]
    fake(other / "bin", "lspci", NAVI)
    assert detected().gpus == (Gpu("Radeon RX 7900 XT", 20 * GIB, "4.0x8"),)
    about = {"Card Series": "AMD Radeon RX 7900 XT", "Card Model": "0x744c", "VRAM Total Memory (B)": str(20 * GIB)}
    fake(other / "bin", "rocm-smi", json.dumps({"card0": about}))
    assert detected().gpus == (Gpu("AMD Radeon RX 7900 XT", 20 * GIB, "4.0x8"),)
    for broken in ("{", "[]", '{"card0": 7}', "[" * 100_000, '{"card0": {"Card Series": "x"}}'):
        fake(other / "bin", "rocm-smi", broken)
        assert detected().gpus == (Gpu("Radeon RX 7900 XT", 20 * GIB, "4.0x8"),)


def test_an_intel_card_has_the_memory_of_its_table(other: Path) -> None:
    fake(
        other / "bin",
        "lspci",
        '0000:00:02.0 "VGA compatible controller" "Intel Corporation" "Raptor Lake-S GT1 [UHD Graphics 770]" -r04\n'
        '0000:03:00.0 "VGA compatible controller" "Intel Corporation" "Battlemage G21 [Arc B580]" -r00',
    )
    put(other, "sys/bus/pci/devices/0000:03:00.0/max_link_speed", "16.0 GT/s PCIe")
    put(other, "sys/bus/pci/devices/0000:03:00.0/max_link_width", "8")
    assert detected().gpus == (Gpu("Arc B580", 12 * GIB, "4.0x8"),)


@pytest.mark.parametrize(
    "file, text, name",
    [
        ("proc/cpuinfo", "model name\t: AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "Ryzen AI Max 395"),
        ("proc/device-tree/model", "NVIDIA Jetson AGX Orin Developer Kit\0", "Jetson AGX Orin"),
        ("sys/class/dmi/id/product_name", "NVIDIA_DGX_Spark", "GB10"),
    ],
)
def test_processors_whose_gpu_shares_the_memory(other: Path, file: str, text: str, name: str) -> None:
    put(other, file, text)
    (gpu,) = detected().gpus
    found = recognised(gpu.name.replace("_", " "))
    assert gpu.vram_bytes == 0 and found is not None and found.card.name == name


def test_a_mac_is_known_by_sysctl(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection.system, "system", lambda: "Darwin")
    fake(other / "bin", "sysctl", "Apple M2 Ultra")
    assert detected().gpus == (Gpu("Apple M2 Ultra", 0, ""),)


def test_limits_of_a_container_count(other: Path) -> None:
    """Groups are nested: the smallest limit of the own group and of those above it."""
    put(other, "proc/self/cgroup", "0::/a/b")
    put(other, "sys/fs/cgroup/a/b/memory.max", "max")
    put(other, "sys/fs/cgroup/a/memory.max", str(64 << 20))
    put(other, "sys/fs/cgroup/a/b/cpu.max", "50000 100000")
    assert (detected().ram_bytes, detected().cores) == (64 << 20, 1)
    put(other, "proc/self/cgroup", "9:memory:/c\n8:cpu,cpuacct:/c\n1:name=systemd:/")
    put(other, "sys/fs/cgroup/memory/c/memory.limit_in_bytes", str(32 << 20))
    assert detected().ram_bytes == 32 << 20
    put(other, "proc/self/cgroup", "::::\n\n0\n0::/../../x")
    put(other, "sys/fs/cgroup/memory.max", "9" * 30)
    assert detected().ram_bytes > 64 << 20


# -- measured


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little."""
    monkeypatch.setattr(measuring, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(measuring, "RAM_SECONDS", 0.05)
    monkeypatch.setattr(measuring, "ARRAY_BYTES", 4 << 20)


def test_this_machine_is_measured_and_leaves_nothing(other: Path, small: None) -> None:
    fake(other / "bin", "nvidia-smi", "NVIDIA GeForce RTX 4060 Laptop GPU, 8188, 4, 8, 8")
    folder = other / "work"
    folder.mkdir()
    survey = surveyed(folder)
    found = survey.machine
    assert found.kind == "gpu" and found.memory_bytes == 8188 << 20
    assert found.ram_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.platform.links[0].bytes_per_s == pytest.approx(12.55e9)
    assert found.platform.cpu and survey.disk
    assert found.platform.tiers[0].bytes_per_s == int(survey.disk.bytes_per_s)
    assert found.platform.tiers[0].latency_ns == survey.disk.latency_ns
    assert list(folder.iterdir()) == []
    file = other / "here.toml"
    file.write_text(as_file(found))
    assert platform(str(file)).name == "here"


@every(
    "prints, rate",
    [
        (
            "  MUL_MAT_ID(type_a=q4_K,n_mats=8,m=768,n=1,k=2048): 852 runs - 9.9 us/run - 25 MFLOP/run - 210.5 GFLOPS",
            105.25e9,
        ),
        ("MUL_MAT_ID(type_a=q4_0,m=9,n=1,k=2):  8 runs - 9 us/run - \x1b[1;34m  1.20 TFLOPS\x1b[0m", 0.6e12),
        ("MUL_MAT_ID(type_a=q4_K,m=9,n=512,k=2):  8 runs - 9 us/run - 1.20 TFLOPS", 0),
        ("MUL_MAT_ID(type_a=q4_K,m=9,n=1,k=2): not supported\nother: 1.2.3 GFLOPS", 0),
        ("usage: test-backend-ops [mode]", 0),
    ],
    apart=True,
)
def test_llama_cpp_s_kernel_is_measured_where_its_tool_is(other: Path, small: None, prints: str, rate: float) -> None:
    """Two operations a weight. Its rate replaces that of the cores' kind."""
    fake(other / "bin", "test-backend-ops", prints)
    put(other, "proc/cpuinfo", "model name : A\nsiblings : 16\ncpu cores : 8\nflags : avx avx2")
    survey = surveyed(other)
    assert survey.weights_per_s == rate and (survey.found.kind, survey.found.threads) in {("avx2", 2), ("neon", 1)}
    assert survey.machine.cores and (not rate or survey.machine.cores.decoded() == rate)
    assert ("kernel" in dict(survey.lines())) == bool(rate) != any("decodes" in each for each in survey.machine.assumed)


def test_an_unmeasured_link_and_an_unknown_card_are_said(other: Path, small: None) -> None:
    fake(other / "bin", "nvidia-smi", "NVIDIA GeForce RTX 4090 D, 24564, 2, 16, 16\nTesla P40, 23040, 3, 16, 16")
    said = " ".join(here(other).assumed)
    assert "2.0x16 has no measured rate" in said and "1 more GPU" in said
    fake(other / "bin", "nvidia-smi", "NVIDIA Something 9000, 24564, 4, 16, 16")
    found = here(other)
    assert found.memory_bytes == 24564 << 20 and "Something 9000" in " ".join(found.assumed)


def test_a_disk_that_cannot_be_measured_is_said(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rate, why = measured_disk(tmp_path / "absent")
    assert rate is None and "No such file" in why and "--disk" in why

    def refused(*_: object, **__: object) -> object:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "TemporaryFile", refused)
        assert measured_disk(tmp_path) == (None, "the disk was not measured: Read-only file system (--disk)")
    with monkeypatch.context() as patch:
        patch.setattr(measuring.os, "fsync", lambda _: refused())
        assert measured_disk(tmp_path)[0] is None
    monkeypatch.setattr(measuring, "FILE_BYTES", 1 << 60)
    rate, why = measured_disk(tmp_path)
    assert rate is None and "are free" in why
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_measurement_leaves_no_file(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured_disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- the command


def test_the_file_of_this_machine_replays(tmp_path: Path, small: None) -> None:
    done = moereplay_here("platforms", "--here", "--out", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0 and "(measured)" in done.stdout and "mine.toml" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]
    ran = moereplay_here("replay", "miniature", "--platform", "mine.toml", "--capacity", "20%", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@every(
    "parts, disk", [(("--gpu", "RTX 3090", "--ram", "64GB"), "3.5GB/s"), (("--vram", "24GB", "--ram", "64GB"), "none")]
)
def test_the_cpu_of_a_machine_from_parts_computes_misses(parts: tuple[str, ...], disk: str, tmp_path: Path) -> None:
    made = moereplay_here("platforms", *parts, "--disk", disk, "--out", "parts.toml", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    machine = platform(str(tmp_path / "parts.toml"))
    assert machine.cpu is not None
    assert (machine.cpu.tier, len(machine.tiers)) == (("", 0) if disk == "none" else ("RAM", 1))
    done = moereplay_here(
        *("replay", "miniature", "--platform", "parts.toml", "--capacity", "20%", "--engine", "reference", "--json"),
        *("--miss", "cpu", "--prefetch", "missed"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout)["totals"]
    assert totals["cpu_executed"] == totals["misses"] > 0
    assert (totals["cpu_absent"] > 0, totals["bytes_lower"] > 0) == ((False, False) if disk == "none" else (True, True))


def test_a_machine_without_its_gpu_or_its_disk_reads_no_tier(tmp_path: Path) -> None:
    for made in (of_platform(platform("desktop-24gb"), "24GB"), assembled(gpu="RTX 3090", ram="64GB")):
        for machine in (made.replayable, without_gpu(made).platform, in_memory(made).platform):
            (tmp_path / "again.toml").write_text(as_toml(machine))
            again = platform(str(tmp_path / "again.toml"))
            assert again == machine
            assert (again.tiers, again.cpu_tier) == ((), -1)


def test_parts_are_printed_in_three_ways(tmp_path: Path) -> None:
    parts = ("platforms", "--gpu", "RTX 3090", "--ram", "64GB", "--disk", "3.5GB/s")
    document = json.loads(moereplay_here(*parts, "--json", cwd=tmp_path).stdout)
    assert document["platform"]["memory_bytes"] == 24 * GIB and "--ram-rate" in document["assumed"][0]
    text = moereplay_here(*parts, "--toml", cwd=tmp_path).stdout
    assert text == moereplay_here(*parts, "--out", "-", cwd=tmp_path).stdout
    (tmp_path / "a.toml").write_text(text)
    assert platform(str(tmp_path / "a.toml")) == assembled(gpu="3090", ram="64GB", disk="3.5GB/s").platform
    rows = json.loads(moereplay_here("platforms", "--cards", "--json", cwd=tmp_path).stdout)
    assert len(rows) == len(cards()) and all(row["source"] for row in rows)


@every(
    "words",
    [
        ("--here", "--gpu", "3090"),
        ("--here", "--cards"),
        ("phone-ufs4", "--here"),
        ("--folder", "."),
        ("--here", "--folder", "absent"),
        ("--out", "x.toml"),
        ("phone-ufs4", "--out", "x.toml"),
        ("--here", "--out", "x.json"),
        ("--here", "--out", "."),
        ("--here", "--toml", "--json"),
        ("--ram", "64GB", "--out", "-", "--json"),
        ("--cards", "--toml"),
        ("--toml",),
        ("--ram", "64GB", "--disk", "none"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_is_measured(words: tuple[str, ...]) -> None:
    done = moereplay_here("platforms", *words)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_is_said_takes_the_place_of_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    said = here(tmp_path, {"ram_rate": "50GB/s", "disk": "7GB/s", "ram": "64GB"})
    assert (said.ram_bytes or said.memory_bytes, said.disk_bytes_per_s) == (64 * 2**30, 7e9)
    assert not any("other work" in each for each in said.assumed)
    assert here(tmp_path).assumed[0].startswith(measuring.DISTURBED) and "load 99.0" in here(tmp_path).assumed[0]
