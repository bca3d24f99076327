"""Replay measured series with drafts or several requests, after fitting the run that has neither.

    python -m evidence.draft_series FOLDER    # FOLDER holds cells.csv, a row per run

A *series* is one person's runs on one machine with one thing changed. Of each run with drafts or several requests the
*base* is the run beside it without them. It fits one figure of a platform: the step of a pass (dense weights, launches,
attention) where the rates of all that the run waits for are published, else a factor on those rates. The other run is
replayed on that platform, with routing drawn from a routing model at the model's shape, for three costs of a row beyond
the first (COSTS), none of which is fitted here.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from evidence.draft_runs import COSTS, Bench, Fit, RefusedError, geometry_of, rates_of
from moereplay.calibration.files import read_runs
from moereplay.simulator.errors import ConfigError
from moereplay.sweeps.recommend.measured import Row
from moereplay.traces.drafts import given_the_last
from moereplay.traces.schema import TraceError

NOISE = 0.03  #: smaller measured changes have no sign
#: Columns in which a run and its base are alike.
ALIKE = ("engine", "model", "load", "ram_limit_gib", "placement", "policy", "slots_per_layer")
#: The head that was measured of a model, where a run's acceptance is not published.
HEAD_OF = {"Qwen3.6-35B-A3B": "qwen3.6-mtp", "Qwen3.8-Flash-Next": "qwen3.8-mtp"}
#: What the text of a series adds to its table: 5,159 of 11,008 experts are resident (club-ladder-04), a text is copied.
FILLED = {"club-copy": {"cpu_moe_layers": "23", "slots_per_layer": "120", "hit_pct": "57", "accept_pct": "100"}}


class Drafted(NamedTuple):
    """The drafts of a run, and where their acceptance is from."""

    text: str
    source: str


class Judged(NamedTuple):
    """A run beside its base: tokens/s with drafts or requests over without, measured and predicted for each cost."""

    run: Row
    base: Row
    fit: Fit
    drafts: Drafted
    measured: float
    predicted: Mapping[str, float]


def main() -> None:
    """Print the comparison as tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--series", default="", help="beginning of the names of the series to replay")
    asked = parser.parse_args()
    judged, refused = study(read(asked.folder), asked.series)
    print("\n".join(_page(judged, refused)))


def read(folder: Path) -> list[Row]:
    """Return the runs of the table, with what their series' text adds."""
    return [defaultdict(str, {**row, **FILLED.get(row["series"], {})}) for row in read_runs(folder / "cells.csv")]


def study(rows: Sequence[Row], series: str = "") -> tuple[list[Judged], list[tuple[Row, str]]]:
    """Return what is predicted of every run with drafts or several requests, and the others with the reason."""
    judged, refused = [], []
    with TemporaryDirectory() as folder:
        for row in (each for each in rows if _is_asked(each) and each["series"].startswith(series)):
            try:
                judged.append(_judge(row, rows, Path(folder)))
            except (RefusedError, ConfigError, TraceError) as why:
                refused.append((row, str(why)))
    bases = [each.base for each in judged]
    return judged, [(row, why) for row, why in refused if row not in bases]


def _is_asked(row: Row) -> bool:
    return row["draft"] not in ("", "none") or _requests(row) > 1


def _requests(row: Row) -> int:
    return int(row["concurrency"] or 1)


# -- runs and their drafts


def base_of(row: Row, rows: Sequence[Row]) -> Row:
    """Return the run beside a run that has one request, or no drafts. Raises RefusedError."""
    alike = [each for each in rows if each["series"] == row["series"] and all(each[of] == row[of] for of in ALIKE)]
    if _requests(row) > 1:
        found = [each for each in alike if _requests(each) == 1 and each["draft_n"] == row["draft_n"]]
    else:
        found = [each for each in alike if each["draft"] == "none"]
        found = found or [each for each in alike if each["accept_pct"] and each["draft_n"] != row["draft_n"]]
    if not found:
        raise RefusedError("no run of the series beside it without drafts, or with another number of them")
    return max(found, key=lambda each: len(_words(each) & _words(row)))


def _words(row: Row) -> set[str]:
    return set(re.findall(r"[\w+]+", row["notes"]))


def drafts_of(row: Row, base: Row, rows: Sequence[Row]) -> Drafted:
    """Return the drafts of a run; acceptance is its own, that of runs of its source, or its model's head's."""
    if row["draft"] in ("", "none"):
        return Drafted("0", "")
    if row["draft"] == "lookup":
        raise RefusedError("drafts only where the text repeats: how many rows a pass has is not published")
    many = row["draft_n"] or ("1" if 1 < float(row["tokens_per_pass"] or 0) <= 2 else "")
    if not many.isdecimal():
        raise RefusedError("a number of drafts that varies" if many or row["accept_pct"] else "no number of drafts")
    stated = "assumed" if "accept_pct" in FILLED.get(row["series"], {}) else "the run"
    own, others = (row["accept_pct"], many, stated), (_mean(row, rows), many, "its source")
    for said, of, source in (own, (base["accept_pct"], base["draft_n"], "its base"), others):
        if said:
            return Drafted(f"{many}:accept={'/'.join(map(str, chances(said, int(of))))}", source)
    if row["model"] not in HEAD_OF or row["draft"] != "mtp":
        raise RefusedError("acceptance not published")
    return Drafted(f"{many}:accept={HEAD_OF[row['model']]}", HEAD_OF[row["model"]])


def _mean(row: Row, rows: Sequence[Row]) -> str:
    """Return the mean acceptance of as many drafts in runs of the same source, in percent."""
    alike = [each for each in rows if all(each[of] == row[of] for of in ("source", "model", "draft", "draft_n"))]
    said = [float(each["accept_pct"]) for each in alike if re.fullmatch(r"[\d.]+", each["accept_pct"])]
    return f"{sum(said) / len(said):.1f}" if said else ""


def chances(said: str, many: int) -> tuple[float, ...]:
    """Return the chance of each draft, if the one before is right, by percent of passes or the mean of all drafts."""
    if "/" in said:
        return given_the_last([min(1.0, float(each) / 100) for each in said.split("/")])
    mean, low, high = float(said.split()[0]) / 100, 0.0, 1.0
    for _ in range(40):  # one chance c for every draft: the mean of c, c^2, ..., c^many
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(1, many + 1)) / many < mean else (low, middle)
    return (round(high, 3),)


# -- fit and prediction


def _judge(row: Row, rows: Sequence[Row], folder: Path) -> Judged:
    """Fit the base of a run for every cost and replay the run. Raises RefusedError or ConfigError."""
    base = base_of(row, rows)
    geometry = geometry_of(base)
    drafts, before = drafts_of(row, base, rows), drafts_of(base, base, rows)
    requests, prompt = _requests(row), _prompt_ns(row, rows)
    told, fit = {}, Fit()
    for cost in COSTS:
        bench = Bench(base, geometry, folder, cost)
        if not told or before.text != "0":  # one row to a pass costs the same
            fit = fitted_on(bench, rows, before.text, prompt)
        fit = with_drafter(bench, fit, row, rows)
        told[cost] = (1e9 / _rate(base)) / (prompt + bench.token_ns(fit, drafts.text, requests))
    return Judged(row, base, fit, drafts, _rate(row) / _rate(base), told)


def fitted_on(bench: Bench, rows: Sequence[Row], drafts: str = "0", prompt: float = 0) -> Fit:
    """Return the figure with which a base is as measured."""
    row, target = bench.row, 1e9 / _rate(bench.row) - prompt
    at = bench.placed
    step = None
    if at.ram:  # the CPU's rate is published; how fast a disk serves it is not: the step is that of more RAM
        above = [each for each in rows if each["draft"] == "none" and _but_ram(each) == _but_ram(row)]
        step = fitted_on(bench._replace(row=max(above, key=lambda each: float(each["ram_limit_gib"]))), rows).step
    elif at.waited <= rates_of(row).known:
        plain, more = (bench.token_ns(Fit(step=ns), drafts) for ns in (0, 1e6))
        if target > plain:  # of a token that shares its pass a millisecond is less
            return Fit(step=(target - plain) / (more - plain) * 1e6)
        step = 0.0
    low, high = 1e-3, 1e3
    while high > 1.002 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if bench.token_ns(Fit(middle, step), drafts) < target else (low, middle)
    return Fit(low, step)


def with_drafter(bench: Bench, fit: Fit, row: Row, rows: Sequence[Row]) -> Fit:
    """Return the fit with what a draft of a model of its own takes, by the first run with it. Raises RefusedError."""
    if "external" not in row["draft"]:
        return fit
    first = next(each for each in rows if each["series"] == row["series"] and each["draft"] == row["draft"])
    if first is row:
        raise RefusedError("a drafter of its own, of unknown cost: this run fits what a draft takes")
    drafts = drafts_of(first, bench.row, rows)
    plain, more = (bench.token_ns(fit._replace(drafter=ns), drafts.text) for ns in (0, 1_000_000))
    return fit._replace(drafter=max(0, round((1e9 / _rate(first) - plain) / (more - plain) * 1e6)))


def _but_ram(row: Row) -> list[str]:
    return [row["series"], *(row[of] for of in ALIKE if of != "ram_limit_gib")]


def _rate(row: Row) -> float:
    if not row["decode_tok_s"]:
        raise RefusedError("no decode rate")
    return float(row["decode_tok_s"])


def _prompt_ns(row: Row, rows: Sequence[Row]) -> float:
    """Return what a request's prompt takes per decoded token, where rates include it. Raises RefusedError."""
    if "prefill" not in row["decode_scope"]:
        return 0.0
    alike = ("source", "model", "cpu_moe_layers", "ubatch", "gpu")
    found = [each for each in rows if each["prefill_tok_s"] and all(each[of] == row[of] for of in alike)]
    if not found:
        raise RefusedError("how long prompts take is not published")
    return float(row["prompt_tokens"]) / float(found[0]["prefill_tok_s"]) / float(row["gen_tokens"]) * 1e9


# -- tables


def _page(judged: Sequence[Judged], refused: Sequence[tuple[Row, str]]) -> Iterator[str]:
    yield f"{len(judged)} runs are replayed beside their base, {len(refused)} are not.\n"
    alone = [each for each in judged if _requests(each.run) == 1]
    together = [each for each in judged if each not in alone]
    for name, these in (("Drafts", alone), ("Requests", together)):
        yield from _tables(name, these)
    yield "\n| runs | not replayed because |\n|---|---|"
    for why in dict.fromkeys(why for _, why in refused):
        ids = [row["id"] for row, reason in refused if reason == why]
        yield f"| {', '.join(ids)} | {why} |"


def _tables(name: str, these: Sequence[Judged]) -> Iterator[str]:
    yield f"\n## {name}: tokens/s over those of the base\n"
    yield f"| run | base | fitted | drafts | requests | acceptance of | measured | {' | '.join(COSTS)} |"
    yield "|---" * (7 + len(COSTS)) + "|"
    for each in these:
        told = " | ".join(f"{ratio:.2f}" for ratio in each.predicted.values())
        many = each.drafts.text.partition(":")[0], str(_requests(each.run)), each.drafts.source
        names = each.run["id"], each.base["id"], each.fit.in_words
        yield f"| {' | '.join((*names, *many))} | {each.measured:.2f} | {told} |"
    yield "\n| cost of a row beyond the first | signs right | median error of ratios | of series |\n|---|---|---|---|"
    for cost in COSTS:
        yield f"| {cost} | {' | '.join(summary(these, cost))} |"


def summary(these: Sequence[Judged], cost: str) -> tuple[str, str, str]:
    """Return signs right of those with one, the median error of ratios, and of the medians by series."""
    moved = [each for each in these if abs(each.measured - 1) > NOISE]
    right = sum((each.measured > 1) == (each.predicted[cost] > 1) for each in moved)
    errors = {each.run["id"]: abs(each.predicted[cost] / each.measured - 1) for each in these}
    series = {each.run["series"] for each in these}
    middles = [median(errors[each.run["id"]] for each in these if each.run["series"] == one) for one in series]
    each, once = (f"{median(of):.1%}" if of else "" for of in (list(errors.values()), middles))
    return f"{right} of {len(moved)}", each, once


if __name__ == "__main__":
    main()
