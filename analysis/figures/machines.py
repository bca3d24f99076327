"""Figures of a quick answer: tokens/s over VRAM and RAM, what a token's time is made of, tokens/s by drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.analysis.drafting_answer import with_dense_work
from moereplay.analysis.figures.chart import (
    LETTER,
    TEXT_SIZE,
    Axis,
    Bar,
    Chart,
    Entry,
    Panel,
    Part,
    Point,
    Series,
    Tile,
    legend,
)
from moereplay.analysis.palette import DASHED, LIMIT, OUTLINE, Look
from moereplay.analysis.quick_answer import SCHEMES, SERVES
from moereplay.results.errors import ResultError
from moereplay.traces.texts import sold

Document = Mapping[str, Any]
MS = 1e6
MOST_BARS = 12
OUTLINED = Look(OUTLINE, "s", width=0, size=9.0, hollow=True)
ALONE = ("RAM", "DRAM")  #: fast memory of a processor without a GPU, whose computing is the CPU's
#: Part of a token's time -> its legend and colour, in the order of the stack.
PARTS = {
    "compute": ("GPU", "#0072B2"),
    "cpu": ("CPU", "#E69F00"),
    "link": ("link", "#009E73"),
    "disk": ("disk", "#CC79A7"),
    "sync": ("launches and waiting", "#9AA0A6"),
}


def speed_by_memory(answer: Document, points: Sequence[Document]) -> Chart:
    """Draw tokens/s over VRAM and RAM, each point the leading engine's, as the quick answer chooses it.

    `points` have `vram_bytes`, `ram_bytes`, `tokens_per_s` (0: nothing fits) and `here`. Raises ResultError for none.
    """
    if not points:
        raise ResultError("speed_by_memory requires a machine with VRAM over RAM: this one has one memory")
    tier = answer["machine"]["fast_tier"]
    tiles = [
        Tile(sold(each["vram_bytes"]), sold(each["ram_bytes"]), each["tokens_per_s"], each["here"]) for each in points
    ]
    engines = ", ".join(dict.fromkeys(each["engine"] for each in points if each["engine"]))
    absent = "; a dash: the model does not fit" * (not all(tile.value for tile in tiles))
    return Chart(
        title=f"{answer['name']}: tokens/s by {tier} and RAM",
        subtitle=f"{answer['machine']['name']}, its rates with other sizes; engine: {engines}",
        label="ESTIMATED",
        note=(
            f"A number is tokens/s of the engine that leads at that {tier} and RAM, at the middle routing. Brighter is "
            f"faster, on a logarithmic scale{absent}. A disk holds what RAM does not."
        ),
        x=Axis(tier),
        y=Axis("RAM"),
        panels=[[Panel(tiles=tiles)]],
        legend=[Entry("this machine", OUTLINED)] if any(tile.outlined for tile in tiles) else [],
        size=(0.62 * len({tile.column for tile in tiles}), 0.4 * len({tile.row for tile in tiles})),
        left=1.0,
    )


def token_time(answer: Document) -> Chart:
    """Draw what a token waits for: the best setting of each engine, and each way to use the same VRAM."""
    engines = [(each["engine"], _spent(each)) for each in answer["by_engine"]][:MOST_BARS]
    placements = answer["placements"]
    choices = placements["choices"] if placements else []
    ways = [(f"{SCHEMES[each['holds']]}: {SERVES[each['miss']]}", each["parts_ns"]) for each in choices]
    rows = {"best setting of each engine": engines} | ({"the same bytes of VRAM, at one cost": ways} if ways else {})
    used = [name for name in PARTS if any(parts[name] for _, parts in (*engines, *ways))]
    names = [name for name, _ in (*engines, *ways)]
    note = "A part is what a token waits for; work that runs beside a longer part is hidden and not drawn."
    more = " Divided: CPU and link share the misses. Listed: the most used experts, placed for good." if ways else ""
    return Chart(
        title=f"{answer['name']}: what a token's time is made of",
        subtitle=f"{answer['machine']['name']}, milliseconds at the middle routing; shorter is faster",
        label="ESTIMATED",
        note=note + more,
        x=Axis("milliseconds per token"),
        rows=tuple(rows),
        panels=[[Panel(bars=[_bar(*each) for each in bars])] for bars in rows.values()],
        legend=[Entry(*PARTS[name]) for name in used],
        size=(5.6, 0.27 * max(map(len, rows.values())) + 0.2),
        left=0.5 + max(map(len, names)) * TEXT_SIZE * LETTER,
        scales="each",
    )


def speed_by_drafts(answer: Document) -> Chart:
    """Draw tokens/s by drafts per pass on the answer's engine, and what is left if further rows cost dense work."""
    known = answer["decoding"]
    steps, streams = known["steps"], known["concurrency"]
    together = f"{streams} streams" if streams > 1 else "one stream"
    found = {
        "experts and KV cache of further rows": (Look(PARTS["compute"][1], "o"), [_speed(each) for each in steps]),
        "and a tenth of a plain pass for each": (
            Look(LIMIT, "s", DASHED, hollow=True),
            [Point(each["drafts"], with_dense_work(known, each)) for each in steps],
        ),
    }
    return Chart(
        title=f"{answer['name']}: tokens/s by drafts",
        subtitle=f"{answer['machine']['name']}, {known['engine']}, {together}",
        label="ESTIMATED",
        note="Bars: the range over routings. Dashed: rows beyond the first also cost dense work, as in measured runs.",
        x=Axis("drafts per pass", "whole"),
        y=Axis("tokens/s", "number", zero=True),
        panels=[[Panel([Series(name, look, points) for name, (look, points) in found.items()])]],
        legend=legend({name: look for name, (look, _) in found.items()}),
        size=(4.2, 2.6),
    )


def _speed(step: Document) -> Point:
    speed = step["tokens_per_s"]
    return Point(step["drafts"], speed["middle"], speed["least"], speed["most"])


def _spent(each: Document) -> dict[str, float]:
    """Return the parts of a token's time; without a GPU what computes is the CPU."""
    parts = dict(each["parts_ns"])
    if each["fast_tier"] in ALONE:
        parts |= {"cpu": parts["cpu"] + parts["compute"], "compute": 0.0}
    return parts


def _bar(name: str, parts: Mapping[str, float]) -> Bar:
    return Bar(name, [Part(PARTS[part][0], parts[part] / MS, PARTS[part][1]) for part in PARTS if parts[part]])
