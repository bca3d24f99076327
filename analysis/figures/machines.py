"""Figures of an answer: tokens/s over VRAM and RAM, what a token's time is made of, tokens/s by drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.analysis.answer import SCHEMES, SERVES
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
)
from moereplay.analysis.palette import OUTLINE, Look
from moereplay.results.errors import ResultError
from moereplay.sweeps.recommend.answer import Answer, Estimate
from moereplay.traces.texts import sold

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


def speed_by_memory(answer: Answer, points: Sequence[Mapping[str, Any]]) -> Chart:
    """Draw tokens/s over VRAM and RAM, each point the answer's engine's.

    `points` have `vram_bytes`, `ram_bytes`, `tokens_per_s` (0: nothing fits) and `here`. Raises ResultError for none.
    """
    if not points:
        raise ResultError("speed_by_memory requires a machine with VRAM over RAM: this one has one memory")
    tier = answer.machine.platform.fast_tier
    tiles = [
        Tile(sold(point["vram_bytes"]), sold(point["ram_bytes"]), point["tokens_per_s"], point["here"])
        for point in points
    ]
    absent = "; a dash: the model does not fit" * (not all(tile.value for tile in tiles))
    return Chart(
        title=f"{answer.load.name}: tokens/s by {tier} and RAM",
        subtitle=f"{answer.machine.platform.name}, its rates with other sizes; {answer.best.setting.engine}",
        label="ESTIMATED",
        note=(
            f"A number is tokens/s of a replay at that {tier} and RAM, at the middle routing. Brighter is faster, on a "
            f"logarithmic scale{absent}. A disk holds what RAM does not."
        ),
        x=Axis(tier),
        y=Axis("RAM"),
        panels=[[Panel(tiles=tiles)]],
        legend=[Entry("this machine", OUTLINED)] if any(tile.outlined for tile in tiles) else [],
        size=(0.62 * len({tile.column for tile in tiles}), 0.4 * len({tile.row for tile in tiles})),
        left=1.0,
    )


def token_time(answer: Answer) -> Chart:
    """Draw what a token waits for: the best setting of each engine, and each way to use the same VRAM."""
    engines = [(estimate.setting.engine, _spent(estimate)) for estimate in answer.engines][:MOST_BARS]
    schemes = [way.estimate for way in answer.ways]
    ways = [(f"{SCHEMES[of.setting.mode.holds]}: {SERVES[of.setting.mode.miss]}", _spent(of)) for of in schemes]
    rows = {"best setting of each engine": engines} | ({"the same bytes of VRAM, at one cost": ways} if ways else {})
    used = [name for name in PARTS if any(parts[name] for _, parts in (*engines, *ways))]
    names = [name for name, _ in (*engines, *ways)]
    note = "A part is what a token waits for; work that runs beside a longer part is hidden and not drawn."
    more = " Split: CPU and link share the misses. Listed: the most used experts, placed for good." if ways else ""
    return Chart(
        title=f"{answer.load.name}: what a token's time is made of",
        subtitle=f"{answer.machine.platform.name}, milliseconds at the middle routing; shorter is faster",
        label="ESTIMATED",
        note=note + more,
        x=Axis("milliseconds per token"),
        rows=tuple(rows),
        panels=[[Panel(bars=[_bar(*bar) for bar in bars])] for bars in rows.values()],
        legend=[Entry(*PARTS[name]) for name in used],
        size=(5.6, 0.27 * max(map(len, rows.values())) + 0.2),
        left=0.5 + max(map(len, names)) * TEXT_SIZE * LETTER,
        scales="each",
    )


def speed_by_drafts(answer: Answer) -> Chart:
    """Draw tokens/s by drafts per pass on the answer's engine."""
    streams = answer.load.decoding.streams
    together = f"{streams} streams" if streams > 1 else "one stream"
    look = Look(PARTS["compute"][1], "o")
    points = [Point(step.drafts, step.estimate.tokens_per_s.middle, *_ends(step.estimate)) for step in answer.steps]
    return Chart(
        title=f"{answer.load.name}: tokens/s by drafts",
        subtitle=f"{answer.machine.platform.name}, {answer.best.setting.engine}, {together}",
        label="ESTIMATED",
        note="Bars: the range over routings. Dense work of further rows is not counted (measured: a tenth of a pass).",
        x=Axis("drafts per pass", "whole"),
        y=Axis("tokens/s", "number", zero=True),
        panels=[[Panel([Series("", look, points)])]],
        legend=[],
        size=(4.2, 2.6),
    )


def _ends(of: Estimate) -> tuple[float, float]:
    return of.tokens_per_s.least, of.tokens_per_s.most


def _spent(of: Estimate) -> dict[str, float]:
    """Return the parts of a token's time; without a GPU what computes is the CPU."""
    parts = of.parts._asdict()
    if of.setting.machine.platform.fast_tier in ALONE:
        parts |= {"cpu": parts["cpu"] + parts["compute"], "compute": 0.0}
    return parts


def _bar(name: str, parts: Mapping[str, float]) -> Bar:
    return Bar(name, [Part(PARTS[part][0], parts[part] / MS, PARTS[part][1]) for part in PARTS if parts[part]])
