"""This machine as its system describes it: CPU, cores, memory within a container's limits, GPUs and their links.

Everything is read from system files or from the output of system tools. Both are untrusted: missing, truncated or
invalid data is left out, and a GPU that cannot be used is named in a remark.
"""

from __future__ import annotations

import json
import os
import platform as system
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moereplay.simulator.cards import recognised
from moereplay.simulator.errors import ConfigError
from moereplay.traces.texts import sold

TIMEOUT_S, KERNEL_S = 5, 30  #: of a tool, and of one that measures
ROOT = Path("/")  #: of /proc and /sys
LONGEST = 80  #: characters of a name
LEAST_VRAM = 2 << 30  #: a GPU with less is a part of the processor, and computes no experts
GENERATIONS = {
    "2.5": "1.0",
    "5.0": "2.0",
    "8.0": "3.0",
    "16.0": "4.0",
    "32.0": "5.0",
    "64.0": "6.0",
}  #: by GT/s of a lane


class Gpu(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    vram_bytes: int  #: 0 if it shares the machine's memory, or if nothing says how many
    link: str  #: PCIe generation and lanes such as 4.0x16, "" if unknown


class Found(NamedTuple):
    """Description of this machine by its system."""

    cpu: str
    cores: int  #: that run threads of their own, two of one core counted twice
    ram_bytes: int
    gpus: tuple[Gpu, ...]
    remarks: tuple[str, ...] = ()
    kind: str = "vnni"  #: of a core, of `cards.toml`
    threads: int = 1  #: that a core runs at once


def detected() -> Found:
    """Return CPU, cores, RAM within the limits of a container, and GPUs. Raises ConfigError if RAM is unknown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpu, ram = _cpu_name(), _ram_bytes()
    remarks: list[str] = []
    gpus = [*_whole_processors(cpu)] or [*_nvidia(), *_amd(remarks)]
    if not gpus:
        gpus = [*_on_the_bus(remarks)]
    return Found(cpu, _limited_cores(cores), ram, tuple(gpus), tuple(remarks), *_kind())


def _text(path: str) -> str:
    """Return the beginning of a file of the system, "" if it cannot be read."""
    with suppress(OSError), (ROOT / path).open(errors="replace") as file:
        return file.read(1 << 16).strip("\0\n ")
    return ""


def _said(*command: str, seconds: float = TIMEOUT_S) -> str:
    """Return the output of a command; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout[: 1 << 20] if done.returncode == 0 else ""


def _name(text: str) -> str:
    return " ".join("".join(each for each in text if each.isprintable() or each.isspace()).split())[:LONGEST]


# -- processor and memory


def _cpu_name() -> str:
    if found := re.search(r"model name\s*: (.+)", _text("proc/cpuinfo")):
        return _name(found[1])
    if system.system() == "Darwin" and (said := _said("sysctl", "-n", "machdep.cpu.brand_string")):
        return _name(said)
    return _name(system.processor() or system.machine())


def _kind() -> tuple[str, int]:
    """Return the kind of the cores, and how many threads one of them runs."""
    about = _text("proc/cpuinfo")
    if system.machine().lower() in ("arm64", "aarch64"):
        return "neon", 1
    newer = re.search(r"^flags\s*:.*\b(avx_vnni|avx512f)\b", about, re.MULTILINE) or not about
    threads, cores = (re.search(rf"^{name}\s*: (\d+)", about, re.MULTILINE) for name in ("siblings", "cpu cores"))
    each = int(threads[1]) // max(1, int(cores[1])) if threads and cores else 1
    return "vnni" if newer else "avx2", max(1, each)


def kernel_rate_here() -> float:
    """Return the weights/s of llama.cpp's kernel, one row by 4-bit experts; 0 without `test-backend-ops`."""
    words = ("test-backend-ops", "perf", "-b", "CPU", "-o", "MUL_MAT_ID", "-p", "type_a=(q4_K|q4_0).*n=1,")
    printed = re.sub(r"\x1b\[[\d;]*m", "", _said(*words, seconds=KERNEL_S))
    line = r"MUL_MAT_ID\(type_a=q4_[K0],[^)]*\bn=1,[^)]*\):.* (\d{1,6}(?:\.\d{1,6})?) ([MGT])FLOPS"
    per_second = {"M": 1e6, "G": 1e9, "T": 1e12}
    return max((float(many) * per_second[unit] / 2 for many, unit in re.findall(line, printed)), default=0.0)


def _own_groups() -> Iterator[str]:
    """Yield folders of the control group of this process and those above it, for both versions of control groups."""
    for line in _text("proc/self/cgroup").splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        kind = next((each for each in kinds.split(",") if each in ("memory", "cpu")), "")
        if kinds and not kind:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for last in range(len(parts), -1, -1):
            yield "/".join(["sys/fs/cgroup", *([kind] if kind else []), *parts[:last]])
    yield from (
        "sys/fs/cgroup",
        "sys/fs/cgroup/memory",
        "sys/fs/cgroup/cpu",
    )  # in a container its own group is the root


def _ram_bytes() -> int:
    sizes = []
    with suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if not sizes and (said := _said("sysctl", "-n", "hw.memsize").strip()).isdecimal():
        sizes.append(int(said))
    for group in _own_groups():
        for file in ("memory.max", "memory.limit_in_bytes"):
            if (limit := _text(f"{group}/{file}")).isdecimal() and 0 < int(limit) < 1 << 62:
                sizes.append(int(limit))
    if not sizes:
        raise ConfigError("the size of this machine's memory cannot be read; describe the machine: --ram 64GB")
    return min(sizes)


def _limited_cores(cores: int) -> int:
    """Return the cores allowed by a quota of processor time, rounded up, if there are fewer."""
    for group in _own_groups():
        quota, period = [*_text(f"{group}/cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = _text(f"{group}/cpu.cfs_quota_us"), _text(f"{group}/cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


# -- GPUs


def _whole_processors(cpu: str) -> Iterator[Gpu]:
    """Yield the GPU of a processor that shares its memory: Apple's, NVIDIA's Jetson and GB10, AMD's Ryzen AI Max."""
    for name in (cpu, _text("proc/device-tree/model"), _text("sys/class/dmi/id/product_name")):
        found = recognised(name.replace("NVIDIA_", "").replace("_", " "))
        if found and found.card.is_unified:
            yield Gpu(_name(name), 0, "")
            return


def _nvidia() -> Iterator[Gpu]:
    """Yield the GPUs that nvidia-smi lists; none if it is missing or fails."""
    query = "name,memory.total,pcie.link.gen.max,pcie.link.width.max,pcie.link.width.current"
    for line in _said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 5 or not parts[0]:
            continue
        name, memory, generation, *widths = parts
        known = recognised(name)
        if memory.isdecimal() and 0 < int(memory) < 1 << 30:
            # an idle GPU lowers its generation, but keeps the lanes that its slot has
            lanes = [int(width) for width in widths if width.isdecimal() and int(width)]
            link = f"{generation}.0x{min(lanes)}" if generation.isdecimal() and lanes else ""
            yield Gpu(_name(name), int(memory) << 20, link)
        elif known and known.card.is_unified:
            yield Gpu(_name(name), 0, "")


def _amd(remarks: list[str]) -> Iterator[Gpu]:
    """Yield AMD's GPUs with their own memory: from the driver's files, with names from rocm-smi or lspci.

    A GPU of unknown name may be integrated, with slow memory: it is left out with a remark.
    """
    names = _rocm_names()
    folders = sorted((ROOT / "sys/class/drm").glob("card[0-9]*/device"))
    if not folders:
        yield from (Gpu(_name(name), memory, "") for memory, name in names.items())
    for folder in folders:
        at = folder.relative_to(ROOT).as_posix()
        memory = _text(f"{at}/mem_info_vram_total")
        if _text(f"{at}/vendor") != "0x1002" or not memory.isdecimal() or int(memory) < LEAST_VRAM:
            continue
        of_bus = _pci_name(folder.resolve().name, int(memory))
        name = _name(names.get(int(memory), "") or _text(f"{at}/product_name") or of_bus or "an AMD GPU")
        if recognised(name):
            yield Gpu(name, int(memory), _link_of(at))
        else:
            remarks.append(f"{name} with {sold(int(memory))} is in no table and is left out (--gpu names a card)")


def _rocm_names() -> dict[int, str]:
    """Return the names that rocm-smi gives, by bytes of VRAM."""
    try:
        document = json.loads(_said("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json") or "{}")
    except (ValueError, RecursionError):
        return {}
    named = {}
    for about in document.values() if isinstance(document, dict) else ():
        if not isinstance(about, dict):
            continue
        spelled = {str(key).lower(): str(value) for key, value in about.items()}
        memory = spelled.get("vram total memory (b)", "")
        name = next((spelled[key] for key in ("card series", "card model") if recognised(spelled.get(key, ""))), "")
        name = name or spelled.get("card series", "")
        if memory.isdecimal() and name and int(memory) >= LEAST_VRAM:
            named[int(memory)] = name
    return named


def _link_of(folder: str) -> str:
    """Return the link of a device of the system's bus: its fastest generation, and the lanes that it has."""
    speed = _text(f"{folder}/max_link_speed").split(" ")[0]
    lanes = [int(each) for end in ("max", "current") if (each := _text(f"{folder}/{end}_link_width")).isdecimal()]
    generation = GENERATIONS.get(speed if "." in speed else f"{speed}.0", "")
    return f"{generation}x{min(lanes)}" if generation and lanes and min(lanes) else ""


def _listed() -> Iterator[tuple[str, str, str]]:
    """Yield slot, vendor and name of the GPUs that lspci lists."""
    for line in _said("lspci", "-D", "-mm").splitlines():
        parts = re.findall(r'"([^"]*)"', line)
        if len(parts) >= 3 and re.search("VGA|3D|Display", parts[0]):
            yield line.split(" ", 1)[0], parts[1], parts[2]


def _pci_name(slot: str, memory: int) -> str:
    """Return the name of a GPU from lspci, which lists the cards of one chip: the one whose memory is nearest."""
    for at, _, name in _listed():
        if at == slot:
            return _of_chip(name, memory)
    return ""


def _of_chip(name: str, memory: int) -> str:
    """Return one card of `Navi 31 [Radeon RX 7900 XT/7900 XTX/7900M]`: the known one whose memory is nearest."""
    inside = re.search(r"\[(.+)\]", name)
    if not inside:
        return name
    known = {each.strip(): found for each in inside[1].split("/") if (found := recognised(each.strip()))}
    exact = {each: found.card for each, found in known.items() if found.is_exact}
    if not exact:
        return inside[1]
    return min(exact, key=lambda each: abs(exact[each].vram_bytes - memory)) if memory else next(iter(exact))


def _on_the_bus(remarks: list[str]) -> Iterator[Gpu]:
    """Yield known GPUs that no driver's tool listed, with the memory of their card; a remark for NVIDIA's."""
    for slot, vendor, chip in _listed():
        name = _of_chip(chip, 0)
        known = recognised(name)
        if "NVIDIA" in vendor.upper():
            remarks.append(f"{_name(name)} is left out: nvidia-smi does not answer (install its driver, or pass --gpu)")
        elif known and known.is_exact and not known.card.is_unified:
            yield Gpu(_name(name), known.card.vram_bytes, _link_of(f"sys/bus/pci/devices/{slot}"))
