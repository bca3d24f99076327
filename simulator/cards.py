"""GPUs and processors with their own memory rates, by name: `cards.toml` in this folder, with sources."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import Field

from moereplay.simulator.errors import ConfigError
from moereplay.traces.schema import Frozen, shown
from moereplay.traces.texts import nearest
from moereplay.traces.units import GB

GIB = 1 << 30
#: Bytes/s of a lane that copies from pinned memory reach. Measured over 16 lanes: 13.17 GB/s on PCIe 3 (FreeToken,
#: issue 131), 25.1 and 52.7 GB/s on PCIe 4 and 5 (arXiv 2608.16157). Eight lanes of PCIe 4 were measured at 12.5 GB/s.
LANE = {"3.0": 13.17e9 / 16, "4.0": 25.1e9 / 16, "5.0": 52.7e9 / 16}
LANES = (1, 2, 4, 8, 16)
#: How the names of several cards are written, of one kind (group `first` or `last` has their number) or of more.
SEVERAL = re.compile(r"^\s*(?P<first>\d+)\s*[x*]\s|\s[x*]\s*(?P<last>\d+)\s*$|[,+&]", re.IGNORECASE)
MOST_CARDS = 16
#: Words of a name that do not change a card's figures: form, memory, and what every name of a family has.
_IDLE = re.compile(
    r"gpu|graphics|generation|edition|workstation|server|oem|pcie|sxm\d?|hbm\d?e?|gddr\dx?|\d+gb|accelerator"
)
_BRANDS = re.compile(r"\((r|tm|c)\)|nvidia|geforce|tesla|instinct|amd|radeon(?! pro| ai)|apple|intel|qualcomm")
_FAMILIES = ("rtx", "gtx", "rx", "arc", "arcpro", "radeonpro", "radeonaipro", "jetson")  #: that a name may leave out
_DISPLAYS = re.compile("GTX|RTX|RX|Arc|Titan|Quadro|Radeon")  #: names of cards with outputs for displays
_SIZE = re.compile(r"\(?\b(\d+) ?G(?:i?B)?\b\)?", re.IGNORECASE)


class Card(Frozen):
    """One GPU, or a processor whose memory is the machine's."""

    name: str
    aliases: tuple[str, ...] = ()
    gb: float | None = Field(default=None, gt=0)
    gb_per_s: float = Field(gt=0)
    tflops: float = Field(gt=0)
    pcie: str = ""
    family: str
    source: str
    reach: float = Field(gt=0, le=1)  #: share of its memory's rate that a decoded token reaches
    layer_ns: int = Field(ge=0)  #: of a layer's launches

    @property
    def vram_bytes(self) -> int:
        """Bytes of its own memory, 0 if it has none. Vendors count in GiB."""
        return int((self.gb or 0) * GIB)

    @property
    def bytes_per_s(self) -> float:
        """Rate at which a decoded token reads its memory."""
        return round(self.reach * self.gb_per_s * GB)

    @property
    def flops(self) -> float:
        """Dense 16-bit operations per second."""
        return self.tflops * 1e12

    @property
    def is_unified(self) -> bool:
        """True if it shares the machine's memory."""
        return self.gb is None

    @property
    def keeps(self) -> str:
        """Which part of its memory others keep, for `kept_bytes`."""
        if self.is_unified:
            return "wired" if self.family.startswith("apple") else "system"
        return "display" if _DISPLAYS.match(self.name) else "compute"

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of copies from pinned main memory."""
        return link_rate(self.pcie)

    def row(self) -> dict[str, object]:
        """Return one line of `moereplay platforms --cards`."""
        return {
            "card": self.name,
            "memory GiB": "the machine's" if self.gb is None else f"{self.gb:g}",
            "GB/s": f"{self.gb_per_s:g}",
            "reached": f"{self.bytes_per_s / GB:.3g}",
            "us/layer": f"{self.layer_ns / 1000:g}",
            "TFLOP/s": f"{self.tflops:g}",
            "PCIe": self.pcie or "-",
            "link GB/s": f"{self.link_bytes_per_s / GB:.3g}" if self.pcie else "-",
            "source": self.source,
        }


def link_rate(pcie: str) -> float:
    """Return the usable bytes/s of `4.0 x16`. Raises ConfigError."""
    generation, _, lanes = pcie.lower().replace(" ", "").partition("x")
    if generation.partition(".")[1] == "":
        generation += ".0"
    if generation not in LANE or lanes not in map(str, LANES):
        raise ConfigError(
            f"invalid link {shown(pcie)!r}: expected a PCIe link such as 4.0x16 (generations 3 to 5, 1 to 16 lanes), "
            "or a rate such as 25GB/s"
        )
    return LANE[generation] * int(lanes)


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(files("moereplay.simulator").joinpath("cards.toml").read_text("utf-8"))


def kernel_rate(kind: str, weight_format: str = "") -> float:
    """Return the weights/s that a core of this kind decodes: of a format, else of most formats."""
    rates = _document()["kernels"]
    return rates[kind] * (rates["codebook"] if re.match("IQ[123]", weight_format) else 1)


def kept_bytes(memory: str, size: int) -> float:
    """Return the bytes that others than the engine keep of a memory: `display`, `compute`, `wired` or `system`."""
    kept = _document()["kept"]
    return kept["system_bytes"] if memory == "system" else round(kept[memory] * size)


@cache
def cards() -> dict[str, Card]:
    """Return every card by name."""
    document, known = _document(), dict[str, Card]()
    for name, about in document["cards"].items():
        reach, launches = document["families"][about.get("family", about["source"])]
        source = {"family": about["source"]} | about | {"source": document["sources"][about["source"]]}
        rates = {"reach": document["reach"][reach], "layer_ns": document["launches"][launches]}
        known[name] = Card(name=name, **rates, **source)
    return known


def several(name: str) -> tuple[int, str]:
    """Return the number and the name of `2x RTX 3090`, `RTX 3090 x2` or `RTX 3090`."""
    found = SEVERAL.search(name)
    many = int((found and (found["first"] or found["last"])) or 0)
    return (many, SEVERAL.sub(" ", name, 1).strip()) if 1 <= many <= MOST_CARDS else (1, name)


def card(name: str) -> Card:
    """Return a card by name or alias, ignoring case, spaces, the vendor and a size that agrees with the card.

    Raises ConfigError naming a similar one, or the sizes in which the card is sold.
    """
    found = _spellings().get(_plain(name)) or _of_size(name)
    if found is None and SEVERAL.search(name):
        raise ConfigError(
            f"invalid card {shown(name)!r}: expected one kind, 1 to {MOST_CARDS} of it, such as 2x RTX 3090; for cards "
            "that differ name the slowest, and pass their mean memory as --vram"
        )
    if found is None:
        near = nearest(_plain(name[:80]), _spellings())
        said = f"did you mean {_spellings()[near].name}?" if near else "expected a name such as RTX 3090 or M4 Max"
        raise ConfigError(f"unknown card {shown(name)!r}: {said}; `moereplay platforms --cards` lists them")
    return found


def _of_size(name: str) -> Card | None:
    """Return the card of a name that may state its memory. Raises ConfigError if it is not sold with as much."""
    sizes, bare = _SIZE.findall(name[:80]), _SIZE.sub(" ", name[:80])
    known = recognised(bare)
    if known is None or not known.is_exact or len(sizes) > 1:
        return None
    stem = re.sub(r" \d+GB$", "", known.card.name)
    among = {f"{each.gb:g}": each for each in (known.card, *_of_stem(_plain(stem))) if each.gb}
    if not sizes or sizes[0] in among:
        return among[sizes[0]] if sizes else known.card
    if known.card.is_unified:
        raise ConfigError(
            f"invalid card {shown(name)!r}: the {known.card.name} shares the machine's memory: pass --ram {sizes[0]}GB"
        )
    raise ConfigError(
        f"invalid card {shown(name)!r}: the {stem} is sold with {' or '.join(sorted(among, key=float))} GB; for a "
        f"modified card, name it without the size and pass --vram {sizes[0]}GB"
    )


class Recognised(NamedTuple):
    """A card that a driver's name means."""

    card: Card
    is_exact: bool  #: False if words of the name that may matter were left out


def recognised(name: str, memory_bytes: int = 0) -> Recognised | None:
    """Return the card of a driver's name, such as `NVIDIA A100-SXM4-80GB`; None if no card is like it.

    If cards differ only in memory, the one nearest to `memory_bytes` is returned.
    """
    words = re.sub(r"[-_/,]", " ", name).split()[:12]
    for last in range(len(words), 0, -1):
        found = list(_of_stem(_plain(" ".join(words[:last]))))
        if found:
            best = min(found, key=lambda each: abs(each.vram_bytes - memory_bytes)) if memory_bytes else found[0]
            return Recognised(best, all(_IDLE.fullmatch(word.lower()) for word in words[last:]))
    return None


def _of_stem(plain: str) -> Iterator[Card]:
    """Yield the card of a spelling, and those that differ from it in the size of the memory only."""
    if not plain:
        return
    exact = _spellings().get(plain)
    if exact is not None:
        yield exact
    yield from (found for found in cards().values() if found is not exact and plain in _stems(found))


def _stems(found: Card) -> list[str]:
    names = (found.name, *found.aliases)
    return [_plain(stem) for each in names if (stem := re.sub(r" \d+GB$", "", each)) != each]


@cache
def _spellings() -> dict[str, Card]:
    full = {_plain(each): found for found in cards().values() for each in (found.name, *found.aliases)}
    short = {each.removeprefix(start): found for each, found in full.items() for start in _FAMILIES}
    return short | full


def _plain(name: str) -> str:
    plain = _BRANDS.sub("", name.lower()).replace("mobile", "laptop")
    return "".join(letter for letter in plain if letter.isalnum())


def markdown() -> str:
    """Return the table of docs/cards.md."""
    listed = [each.row() for each in cards().values()]
    heading = list(listed[0])[:-1]
    lines = [heading, ["---"] * len(heading)]
    lines += [[str(row[column]) for column in heading] for row in listed]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
