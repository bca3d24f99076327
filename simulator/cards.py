"""GPUs and processors with their own memory rates, by name: `cards.toml` beside this file, with sources."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from pydantic import Field

from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Frozen, shown
from moereplay.traces.texts import hint
from moereplay.traces.units import GB

GIB = 1 << 30
#: Bytes/s of a lane that copies from pinned memory reach: 25.1 and 52.7 GB/s over 16 lanes of PCIe 4 and 5 (FreeToken,
#: arXiv 2608.16157), and half of PCIe 4's for PCIe 3.
LANE = {"3.0": 25.1e9 / 32, "4.0": 25.1e9 / 16, "5.0": 52.7e9 / 16}


class Card(Frozen):
    """One GPU, or a processor whose memory is the machine's."""

    name: str
    aliases: tuple[str, ...] = ()
    gb: float | None = Field(default=None, gt=0)
    gb_per_s: float = Field(gt=0)
    tflops: float = Field(gt=0)
    pcie: str = ""
    source: str

    @property
    def vram_bytes(self) -> int:
        """Bytes of its own memory, 0 if it has none. Vendors count in GiB."""
        return int((self.gb or 0) * GIB)

    @property
    def bytes_per_s(self) -> float:
        """Peak rate of its memory."""
        return self.gb_per_s * GB

    @property
    def flops(self) -> float:
        """Dense 16-bit operations per second."""
        return self.tflops * 1e12

    @property
    def is_unified(self) -> bool:
        """True if it shares the machine's memory."""
        return self.gb is None

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of copies from pinned main memory."""
        return link_rate(self.pcie)


def link_rate(pcie: str) -> float:
    """Return the usable bytes/s of `4.0 x16`. Raises ConfigError."""
    generation, _, lanes = pcie.lower().replace(" ", "").partition("x")
    if generation.partition(".")[1] == "":
        generation += ".0"
    if generation not in LANE or lanes not in ("1", "2", "4", "8", "16"):
        raise ConfigError(
            f"invalid link {shown(pcie)!r}: expected a PCIe link such as 4.0x16, or a rate such as 25GB/s"
        )
    return LANE[generation] * int(lanes)


@cache
def cards() -> dict[str, Card]:
    """Return every card by name."""
    document = tomllib.loads(files("moereplay.simulator").joinpath("cards.toml").read_text("utf-8"))
    sources = document["sources"]
    return {
        name: Card(name=name, **{**about, "source": sources[about["source"]]})
        for name, about in document["cards"].items()
    }


def card(name: str) -> Card:
    """Return a card by name or alias, ignoring case, spaces and the vendor. Raises ConfigError naming a similar one."""
    spellings = {_plain(each): found for found in cards().values() for each in (found.name, *found.aliases)}
    short = {each.removeprefix(start): found for each, found in spellings.items() for start in ("rtx", "gtx", "rx")}
    found = spellings.get(_plain(name)) or short.get(_plain(name))
    if found is None:
        near = {_plain(each): each for each in cards()}
        said = hint(_plain(name), list(near))
        for plain, full in near.items():
            said = said.replace(plain, full) if f"mean {plain}?" in said else said
        raise ConfigError(f"unknown card {shown(name)!r}: {said}; `moereplay platforms --cards` lists them")
    return found


def _plain(name: str) -> str:
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("amd", "").replace("apple", "")
    return "".join(letter for letter in words if letter.isalnum())
