"""Figures of replays compared with real runs: checked and measured times, miss rates by layer, and open-loop errors."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from moereplay.analysis.checks import COLUMN, error_of
from moereplay.analysis.figures.chart import (
    NO_BREAK,
    Axis,
    Chart,
    Entry,
    Panel,
    Point,
    Rule,
    Series,
    Tick,
    legend,
    spans_a_decade,
)
from moereplay.analysis.figures.facets import MOST_COLUMNS, MOST_ROWS, shared
from moereplay.analysis.metrics import measured as tidied
from moereplay.analysis.palette import MUTED, Look, looks
from moereplay.analysis.tables import DIGITS
from moereplay.results.counters import COUNTERS
from moereplay.results.errors import ResultError
from moereplay.results.settings import NAMES
from moereplay.traces.units import MB

LABELS = {"measured": "MEASURED versus SIMULATED", "live": "LIVE, emulated, versus SIMULATED"}
LABEL = "LIVE versus SIMULATED"
THROTTLES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  #: a colour per throttle
#: A dot inside a ring means agreement.
LIVE = Look("#0072B2", "o", width=1.3, size=3.6)
REPLAYED = Look("#D55E00", "o", (0, (3, 2)), width=1.1, size=7.5, hollow=True)
ERROR = Look(MUTED, "s", width=1.3)
SIDES = {"live": LIVE, "replayed": REPLAYED}


def _dots(name: str, look: Look, pairs: pl.DataFrame) -> Series:
    """Return a point for every row of two columns."""
    return Series(name, look, [Point(*pair) for pair in pairs.iter_rows()], joined=False)


def _diagonal(ends: tuple[float, float], look: Look) -> Series:
    return Series("", look, [Point(end, end) for end in ends], behind=True)


# Checks of a sweep


def checks(frame: pl.DataFrame) -> Chart:
    """Draw replayed over checked milliseconds with the diagonal of equality; one style per eviction policy.

    Raises ResultError if nothing was checked, or no check has a time.
    """
    figure, rows = _checked(frame)
    drawn, ways = looks(rows["eviction"]), sorted(set(rows["way"]), reverse=True)
    name, times = figure.partition("_")[0].upper(), [*rows["checked"], *rows["replayed"]]
    spread, scale = max(times) - min(times) or max(times), "log" if spans_a_decade(times) else "linear"
    ends = (
        (min(times) / 1.2, max(times) * 1.2) if scale == "log" else (min(times) - spread / 10, max(times) + spread / 10)
    )
    errors = "; ".join(filter(None, (error_of(frame, each) for each in (figure, "hit_rate"))))
    note = (
        "A point for every checked configuration. Both times are of the same tokens and layers, a part of the trace; "
        f"on the line the replay is right. On {', '.join(sorted(set(rows['device'])))}: {errors}."
    )
    x, y = (Axis(f"{side} {name}, ms", "number", scale, limits=ends) for side in ("checked", "replayed"))
    dots = {policy: Look(look.colour, look.marker, width=0, size=6.0, alpha=0.8) for policy, look in drawn.items()}
    series = [
        _dots(policy, look, rows.filter(pl.col("eviction") == policy).select("checked", "replayed"))
        for policy, look in dots.items()
    ]
    return Chart(
        title=f"{len(rows)} of {len(frame)} configurations checked",
        subtitle=shared(rows),
        label=" / ".join(LABELS[way] for way in ways),
        note=note,
        x=x,
        y=y,
        panels=[[Panel([_diagonal(ends, Look(MUTED, width=0.8)), *series])]],
        legend=legend(drawn),
        size=(4.0, 4.0),
    )


def _checked(frame: pl.DataFrame) -> tuple[str, pl.DataFrame]:
    """Return the time that was checked, and a tidy row per configuration that has it as `checked` and `replayed`."""
    if COLUMN not in frame.columns:
        raise ResultError("none of these configurations was checked; `sweep run --every N` checks some")
    known = frame[COLUMN].struct.unnest()
    tidy = tidied(frame).with_columns(pl.col("trace").str.head(DIGITS), known["way"], known["device"])
    for figure in ("tpot_ms", "ttft_ms"):
        sides = (known[f"{side}_{figure}"].alias(side) for side in ("checked", "replayed"))
        rows = tidy.with_columns(*sides).drop_nulls("checked")
        if not rows.is_empty():
            return figure, rows
    raise ResultError("the checks of these configurations have no times; check requests that have a prompt")


# Measured runs


def check_throttles(throttles: Sequence[float | None]) -> None:
    """Raises ResultError for more throttles than there are colours."""
    if len(throttles) > len(THROTTLES):
        raise ResultError(
            f"{len(throttles)} throttles do not fit one figure, which has {len(THROTTLES)} colours; measure fewer"
        )


def measured(frame: pl.DataFrame) -> Chart:
    """Draw simulated over measured milliseconds, for every run and for every pass, with the diagonal.

    Raises ResultError for more throttles than there are colours.
    """
    rates = sorted(frame["throttle_bytes_per_s"].unique().to_list(), key=lambda rate: rate or float("inf"))
    check_throttles(rates)
    groups = [frame.filter(pl.col("throttle_bytes_per_s").eq_missing(rate)) for rate in rates]
    names = ["raw" if rate is None else f"at {rate / MB:g} MB/s" for rate in rates]
    off = (pl.col("simulated_tpot_ms") / pl.col("measured_tpot_ms") - 1).abs().mean()
    errors = [f"{rows.select(off).item():.1%} {name}" for rows, name in zip(groups, names, strict=True)]
    times = [ms for side in ("measured", "simulated") for ms in frame[f"{side}_tokens_ms"].explode().to_list()]
    ends = (min(times) / 1.2, max(times) * 1.2)  # prompts take many times as long as a token

    def panel(kind: str, size: float) -> Panel:
        columns = [f"measured_{kind}", f"simulated_{kind}"]
        pairs = [rows.select(columns) for rows in groups]
        pairs = pairs if kind == "tpot_ms" else [rows.explode(columns) for rows in pairs]
        series = [
            _dots(name, Look(colour, "o", width=0, size=size, alpha=0.6), rows)
            for rows, name, colour in zip(pairs, names, THROTTLES, strict=False)
        ]
        return Panel([_diagonal(ends, Look("#888888", width=0.8)), *series])

    x, y = (Axis(f"{side}, ms", "number", "log", limits=ends) for side in ("measured", "simulated"))
    return Chart(
        title=f"{len(frame)} real runs: the replay's time per token is off by {', '.join(errors)}",
        subtitle=str(frame["device"][0]),
        label=LABELS["measured"],
        note=(
            "Simulated: a replay on the platform calibrated around the runs, on other tokens. Left: a point per run, "
            "right: a point per pass of every run. On the line the replay is right."
        ),
        x=x,
        y=y,
        columns=("Every run", "Every pass"),
        panels=[[panel("tpot_ms", 5.0), panel("tokens_ms", 2.0)]],
        legend=[
            Entry(name, Look(colour, "o", width=0, size=6.0)) for name, colour in zip(names, THROTTLES, strict=False)
        ],
        size=(3.2, 3.2),
    )


# Runs of others, predicted by calibrations

MACHINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  #: a colour per machine
ROLES = {"fit": True, "held out": False}  #: whether a marker is hollow
BAND = 0.1  #: relative error of the dashed lines


def predicted(rows: pl.DataFrame) -> Chart:
    """Draw predicted over measured milliseconds per token: a colour per machine, hollow markers for runs of the fit.

    `rows` have `machine`, `role`, `predicted` and `measured`. Raises ResultError for more machines than colours.
    """
    machines = list(dict.fromkeys(rows["machine"]))
    if len(machines) > len(MACHINES):
        raise ResultError(f"{len(machines)} machines do not fit one figure, which has {len(MACHINES)} colours")
    times = [*rows["predicted"], *rows["measured"]]
    ends = (min(times) / 1.2, max(times) * 1.2)
    looks_of = {
        (machine, role): Look(colour, "o", width=0, size=5.5, alpha=0.8, hollow=hollow)
        for machine, colour in zip(machines, MACHINES, strict=False)
        for role, hollow in ROLES.items()
    }
    series = [
        _dots(f"{machine}, {role}", look, rows.filter(machine=machine, role=role).select("measured", "predicted"))
        for (machine, role), look in looks_of.items()
    ]
    dashed = Look(MUTED, dash=(0, (3.7, 1.6)), width=0.7)
    bands = [Series("", dashed, [Point(end, end * (1 + off)) for end in ends], behind=True) for off in (BAND, -BAND)]
    held = rows.filter(pl.col("role") == "held out")
    errors = (held["predicted"] / held["measured"] - 1).abs()
    hollow = "Hollow: runs of the fit. " * (len(held) < len(rows))
    x, y = (Axis(f"{side} time per token, ms", "number", "log", limits=ends) for side in ("measured", "predicted"))
    return Chart(
        title=f"{len(held)} predictions of runs held out: median |error| {errors.median():.1%}",
        subtitle=f"and {len(rows) - len(held)} of runs that the figures were fitted on",
        label="PREDICTED versus MEASURED",
        note=(
            f"A point for every run and calibration. {hollow}On the line the prediction is right, between the dashed "
            f"lines within {BAND:.0%}. Runs whose time is not the machine's are left out."
        ),
        x=x,
        y=y,
        panels=[[Panel([_diagonal(ends, Look(MUTED, width=0.8)), *bands, *series])]],
        legend=[Entry(f"{machine}, {role}", look) for (machine, role), look in looks_of.items()],
        size=(4.4, 4.4),
    )


# Validations


def validation(frame: pl.DataFrame) -> Chart:
    """Draw the miss rate over layers, live and replayed; a panel per policy set.

    Raises ResultError for more sets than a page holds.
    """
    rows = _tidy(frame)
    if len(rows) > MOST_ROWS:
        raise ResultError(f"{len(rows)} policy sets do not fit a page of {MOST_ROWS} panels; validate fewer")
    misses = COUNTERS["misses"].definition.partition(";")[0]
    headings = [
        f"{row['name']} ({'must be identical' if row['exact'] else 'open loop'}): {row['verdict']}"
        for row in rows.iter_rows(named=True)
    ]
    return Chart(
        title="Live and replayed, layer by layer",
        subtitle=shared(rows),
        label=LABEL,
        note=(
            f"Miss rate: {misses}, per access. Replayed: the baseline recording under the same policies, capacity and "
            "times; policies that change the model's output are replayed open loop. Passes of either phase count."
        ),
        x=Axis("MoE layer", "whole"),
        y=Axis("miss rate", "share", zero=True),
        columns=headings if len(rows) == 1 else [""],
        rows=headings,
        panels=[[Panel(_sides(cells, "layer"))] for cells in _by_layer(rows)],
        legend=[Entry(name, look) for name, look in SIDES.items()],
        size=(6.0, 1.5),
    )


def _tidy(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a row per policy set with the fields of its configuration, as `facets.shared` needs them."""
    about = pl.col("about").struct
    named = [about.field(name) for name in ("model", "label", "identity")]
    trace = about.field("trace").str.head(DIGITS)
    return frame.select(pl.all().exclude("config", "about"), pl.col("config").struct.unnest(), *named, trace)


def _by_layer(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return `live` and `replayed` miss rates by layer, for each policy set."""
    cells = rows.select("name", "layers").explode("layers").unnest("layers")
    rates = cells.with_columns(
        pl.when(pl.col(f"{side}_accesses") > 0).then(pl.col(f"{side}_misses") / pl.col(f"{side}_accesses")).alias(side)
        for side in SIDES
    )
    return [rates.filter(pl.col("name") == name) for name in rows["name"]]


def _sides(rows: pl.DataFrame, x: str) -> list[Series]:
    """Return the replayed and the live line; the live one lies in front."""
    return [
        Series(side, SIDES[side], [Point(*row) for row in rows.select(x, side).iter_rows()])
        for side in ("replayed", "live")
    ]


def open_loop_error(frame: pl.DataFrame) -> Chart:
    """Draw miss rates, their difference and the perplexity over lambda, the strength of cache-aware routing.

    A column of panels per combination of the other settings. Raises ResultError unless two lambdas or more were run
    with the rest of a set unchanged.
    """
    families = _families(_with_errors(_tidy(frame)))
    if not families:
        raise ResultError(
            "open_loop_error needs two lambdas or more of one policy set; "
            "validate several, for example --routing cache_prior:lam=0,cache_prior:lam=.1,cache_prior:lam=.25"
        )
    if len(families) > MOST_COLUMNS:
        raise ResultError(f"{len(families)} policy sets do not fit a page of {MOST_COLUMNS} columns; validate fewer")
    rows = pl.concat(families)
    headings = ["miss rate", "error of the miss rate, percentage points", "perplexity, % above the model alone"]
    scored = not rows["perplexity"].drop_nulls().is_empty()
    ran = rows["lam"].unique().sort().to_list()
    widest = 100 * float(rows["error"].abs().to_numpy().max())
    limits = (-1.2 * widest or -0.1, 1.2 * widest or 0.1)
    panels = [_loop_panels(family, limits)[: 2 + scored] for family in families]
    settings = [name for name in ("rest", *NAMES) if name in rows.columns and name != "routing"]
    varying = [name for name in settings if len({family[name][0] for family in families}) > 1]
    return Chart(
        title="The open-loop error of cache-aware routing",
        subtitle=_common(families),
        label=LABEL,
        note=(
            "Replayed: the baseline recording, whose logits do not react to the changed mixture. Perplexity: of the "
            "recorded tokens, live under the policy, above that of the model alone."
        ),
        x=Axis("lambda", ticks=[Tick(lam, f"{lam:g}") for lam in ran]),
        columns=[", ".join(str(family[name][0]) for name in varying) for family in families],
        rows=headings[: 2 + scored],
        panels=[list(row) for row in zip(*panels, strict=True)],
        legend=[*(Entry(name, look) for name, look in SIDES.items()), Entry("replayed - live", ERROR)],
        size=(6.0 if len(families) == 1 else 3.0, 1.5),
        scales="rows",
    )


def _with_errors(rows: pl.DataFrame) -> pl.DataFrame:
    """Return sets with a lambda: miss rates, their `error`, and `perplexity` in % above the model's."""
    sums = pl.col("layers").list
    rates = [
        (
            sums.eval(pl.element().struct.field(f"{side}_misses")).list.sum()
            / sums.eval(pl.element().struct.field(f"{side}_accesses")).list.sum()
        ).alias(side)
        for side in SIDES
    ]
    quality = pl.col("quality").struct
    alone = quality.field("perplexity_base")
    return (
        rows.drop_nulls("lam")
        .with_columns(*rates, (100 * (quality.field("perplexity") / alone - 1)).alias("perplexity"))
        .with_columns((pl.col("replayed") - pl.col("live")).alias("error"))
    )


def _families(rows: pl.DataFrame) -> list[pl.DataFrame]:
    """Return groups of rows that differ in lambda alone, by rising lambda; single rows are left out."""
    rest = pl.col("routing").str.replace(r":lam=[^:]+", "").alias("rest")
    settings = [name for name in NAMES if name in rows.columns and name != "routing"]
    parts = rows.with_columns(rest).partition_by("rest", *settings)
    return [part.sort("lam") for part in parts if part["lam"].n_unique() > 1]


def _common(families: Sequence[pl.DataFrame]) -> str:
    """Return the settings that all panels share, with the eviction policy, which has no legend here."""
    rows = pl.concat(families)
    evictions = rows["eviction"].unique()
    eviction = f"eviction {evictions[0]}{NO_BREAK}· " if len(evictions) == 1 else ""
    return eviction.replace(" ", NO_BREAK, 1) + shared(rows)


def _loop_panels(family: pl.DataFrame, limits: tuple[float, float]) -> list[Panel]:
    zero = [Rule(0.0, Look(MUTED, width=0.8))]
    errors = [Point(lam, 100 * error) for lam, error in family.select("lam", "error").iter_rows()]
    perplexities = [Point(*row) for row in family.select("lam", "perplexity").iter_rows()]
    return [
        Panel(_sides(family, "lam"), y=Axis("", "share", zero=True)),
        Panel([Series("replayed - live", ERROR, errors)], zero, y=Axis(limits=limits)),
        Panel([Series("live", LIVE, perplexities)], zero),
    ]
