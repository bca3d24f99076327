"""Compare an engine's own counts and times with replays of the same tokens, capacity by capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from moereplay.calibration.engine_log import HOW, EngineRun
from moereplay.calibration.prediction import REPLAY
from moereplay.calibration.rows import HELD_OUT, HITS, PRESET, TIME, Filed, Filing, Row
from moereplay.simulator.capacity import parse_capacity
from moereplay.simulator.config import configure
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.presets import preset
from moereplay.simulator.rates import MIB
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Geometry, Request, Trace, TraceError, memory_trace
from moereplay.traces.texts import counted

LLAMA_CPP = "llama.cpp-moe-cache"  #: preset
#: What builds of llama.cpp do, and how they are known.
RULES = {
    "slru:misses=by_id": "a segmented LRU, as in build 11739",
    "slru:protected=0:misses=by_id": "an LRU, as in 0.7.0 (build 11669) and before",
}
NEAR = 0.05  #: of a time, that counts as predicted
MATCHING = 0.5  #: points of a hit rate; five times the largest of the right rule, half the wrong one's (docs/logs.md)
OTHER_MODEL = 0.01  #: difference of all experts' bytes


class Counts(NamedTuple):
    """Look-ups, and bytes that misses brought."""

    hits: int
    misses: int
    read: float

    @property
    def rate(self) -> float:
        """Hits per look-up."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


class Group(NamedTuple):
    """Layers whose experts have the same bytes, and how many of them the cache holds."""

    layers: frozenset[int]
    size: int
    slots: int


@dataclass(frozen=True)
class Compared:
    """One capacity: what the engine said, and what the replay counts."""

    run: EngineRun
    label: str
    engine: Counts | None
    replayed: Counts
    tokens: int  #: decoded ones of the trace
    predicted_ms: float | None = None
    fitted: bool = False

    @property
    def misses_per_token(self) -> float:
        """By the replay; none where all experts are on the device."""
        return 0.0 if self.run.resident else self.replayed.misses / self.tokens

    @property
    def points(self) -> float | None:
        """Replay's hit rate less the engine's, in points."""
        return None if self.engine is None else 100 * (self.replayed.rate - self.engine.rate)

    @property
    def error(self) -> float | None:
        """Predicted / measured time - 1."""
        return self.predicted_ms / self.run.ms - 1 if self.predicted_ms is not None and self.run.ms else None

    @property
    def verdict(self) -> str:
        """Whether the time was fitted, or is inside the band of NEAR."""
        if self.error is None or self.fitted:
            return "fit" if self.fitted else ""
        return "inside" if abs(self.error) <= NEAR else "outside"


@dataclass(frozen=True)
class Verified:
    """All capacities, the rule that was replayed, and the time per token as base + per_miss x misses."""

    trace: Trace
    rule: str
    rows: tuple[Compared, ...]
    line: tuple[float, float] | None
    remarks: tuple[str, ...]
    points: float | None = None  #: largest difference of a hit rate, in points; None without counts of the engine

    @property
    def matches(self) -> bool:
        """Whether the hit rates of the replay are those of the engine, at every capacity that it counted."""
        return self.points is not None and self.points <= MATCHING

    def document(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        fitted = self.line and dict(zip(("base_ms", "ms_per_miss"), self.line, strict=True))
        rows = [
            {
                "name": row.run.name,
                "capacity": row.label,
                "engine": row.engine and row.engine._asdict() | {"hit_rate": row.engine.rate},
                "replay": row.replayed._asdict() | {"hit_rate": row.replayed.rate},
                "points": row.points,
                "ms": row.run.ms,
                "predicted_ms": row.predicted_ms,
                "error": row.error,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]
        about = {"trace": self.trace.digest, "rule": self.rule, "time": fitted, "near": NEAR}
        about |= {"points": self.points, "matches": self.matches, "matching": MATCHING}
        return about | {"capacities": rows, "remarks": list(self.remarks)}

    def counts(self) -> list[dict[str, Any]]:
        """Return a row of look-ups per capacity, for people."""
        return [
            {
                "capacity": row.label,
                "hits": row.engine and row.engine.hits,
                "replayed": row.replayed.hits,
                "misses": row.engine and row.engine.misses,
                "replayed ": row.replayed.misses,
                "hit rate": row.engine and f"{row.engine.rate:.2%}",
                "points": None if row.points is None else f"{row.points:+.3f}",
            }
            for row in self.rows
        ]

    def times(self) -> list[dict[str, Any]]:
        """Return a row of bytes and times per capacity, for people."""
        return [
            {
                "capacity": row.label,
                "MiB": row.engine and f"{row.engine.read / MIB:.2f}",
                "replayed": f"{row.replayed.read / MIB:.2f}",
                "ms per token": row.run.ms and f"{row.run.ms:.3f}",
                "predicted": row.predicted_ms and f"{row.predicted_ms:.3f}",
                "error": None if row.error is None or row.fitted else f"{row.error:+.1%}",
                f"within {NEAR:.0%}": row.verdict or None,
            }
            for row in self.rows
        ]

    def filed(self, machine: str, by: Filing) -> Iterator[Filed]:
        """Yield a row for each capacity and quantity on which nothing was fitted. Raises ConfigError."""
        model = self.trace.header.provenance.model
        rule = self.rule.partition(" ")[0]
        chosen = f"{self.rule}, {f'the nearest of {len(RULES)} rules' if rule in RULES else 'not fitted'}"
        for row in self.rows:
            name = "-".join(f"{rule.partition(':')[0]} {row.label}".replace("%", "pct").split())
            about = (f"{model}-{name}", "", machine, model)
            settings = {"capacity": row.label, "rule": self.rule, "trace": self.trace.digest}
            if row.engine:
                of = (HITS, chosen, PRESET, REPLAY)
                hits = (100 * row.replayed.rate, 100 * row.engine.rate)
                yield by.filed(Row(*about, *of, *hits, True, ""), settings)
            if row.error is not None and not row.fitted:
                of = (TIME, f"2 capacities of {model}", HELD_OUT, REPLAY)
                yield by.filed(Row(*about, *of, row.predicted_ms, row.run.ms, True, ""), settings)


class Verifier:
    """Replays one trace under a preset, or under llama.cpp's rules, for runs of an engine."""

    def __init__(self, trace: Trace, name: str = LLAMA_CPP) -> None:
        trace.geometry.refuse_uneven("verify")
        self.trace, self._name, self._known = trace, name, {}
        self._settings = preset(name).values()
        self._experts = trace.geometry.total_bytes
        self.tokens = trace.tokens - int(trace.prompt_lengths.sum())
        if not self.tokens:
            raise ConfigError("the trace has no decoded tokens; record with --max-new-tokens, or with --prompt-tokens")

    @cached_property
    def _rules(self) -> dict[str, str]:
        return RULES if self._name == LLAMA_CPP else {self._settings["eviction"]: f"preset {self._name}"}

    def verify(self, runs: Sequence[EngineRun]) -> Verified:
        """Compare all runs, the smallest capacity first. Raises ConfigError for a run of another model."""
        merged = self._merged(runs)
        by_rule = {rule: [self._compared(run, groups, rule) for run, groups in merged] for rule in self._rules}
        rule = min(by_rule, key=lambda each: sum(abs(row.points or 0) for row in by_rule[each]))
        rows, line, remarks = _timed(by_rule[rule])
        words = f"{rule} ({self._rules[rule]})"
        remarks += _other_rules(by_rule, rule, self._rules) + self._other_tokens(rows)
        return Verified(self.trace, words, tuple(rows), line, tuple(remarks), _farthest(rows))

    def _merged(self, runs: Iterable[EngineRun]) -> list[tuple[EngineRun, tuple[Group, ...]]]:
        """Join what several files say of one capacity; of repeated runs the shortest time counts."""
        alike: dict[tuple[Group, ...], list[EngineRun]] = {}
        for run in runs:
            alike.setdefault(self._groups(run), []).append(run)
        found = []
        for groups, same in alike.items():
            counts = next((run for run in same if run.misses is not None), same[0])
            for other in same:
                if other.misses is not None and (other.hits, other.misses) != (counts.hits, counts.misses):
                    raise ConfigError(
                        f"{counts.name} and {other.name} have other counts at one capacity; pass one of them"
                    )
            times = [run.ms for run in same if run.ms is not None]
            found.append((replace(counts, ms=min(times, default=None)), groups))
        return sorted(found, key=lambda pair: sum(group.size * group.slots for group in pair[1]))

    def _groups(self, run: EngineRun) -> tuple[Group, ...]:
        """Return how many experts the cache holds, for each size of experts."""
        geometry = self.trace.geometry
        if run.experts is not None and abs(run.experts / self._experts - 1) > OTHER_MODEL:
            has = f"{run.experts / MIB:,.2f} MiB of experts; the trace's model has {self._experts / MIB:,.2f}"
            raise ConfigError(f"{run.name} is the log of another model: {has}")
        sizes = dict.fromkeys(geometry.expert_bytes)
        layers = [frozenset(at for at, own in enumerate(geometry.expert_bytes) if own == size) for size in sizes]
        if run.slots:
            if [len(each) for each in layers] != [count for count, _ in run.slots]:
                groups = ", ".join(f"{count} layers" for count, _ in run.slots)
                raise ConfigError(f"{run.name} is the log of another model: its experts lie in groups of {groups}")
            slots = [count for _, count in run.slots]
        else:
            budget = float(2 * self._experts) if run.resident else self._budget(run)
            shares = [
                len(each) * size * geometry.experts / self._experts for each, size in zip(layers, sizes, strict=True)
            ]
            most = [len(each) * geometry.experts for each in layers]
            # one slot of each group is kept empty; a log's size is rounded to hundredths of a MiB
            found = [int((budget * share + 0.005 * MIB) / size) - 1 for share, size in zip(shares, sizes, strict=True)]
            slots = [min(each, limit) for each, limit in zip(found, most, strict=True)]
        groups = tuple(Group(*each) for each in zip(layers, sizes, slots, strict=True))
        if run.held and run.capacity:
            self._check_size(run)
        return groups

    def _budget(self, run: EngineRun) -> float:
        if run.held is not None:
            return run.held
        if not run.capacity:
            raise ConfigError(
                f"{run.name} does not say how large its cache is; pass --log {run.name}@SIZE, as @24MiB or @25%"
            )
        return float(self._bytes(run.capacity))

    def _bytes(self, text: str) -> int:
        geometry = self.trace.geometry
        return parse_capacity(text, geometry, "global", (geometry.expert_bytes,)).total

    def _check_size(self, run: EngineRun) -> None:
        typed, held, each = self._bytes(run.capacity), run.held or 0, max(self.trace.geometry.expert_bytes)
        if not held - 0.005 * MIB <= typed < held + 2 * each:
            says = f"{run.name} has a cache of {held / MIB:,.2f} MiB"
            raise ConfigError(f"{says}, and not {run.capacity} ({typed / MIB:,.2f} MiB); leave @{run.capacity} out")

    def _compared(self, run: EngineRun, groups: tuple[Group, ...], rule: str) -> Compared:
        key = (groups, rule)
        if key not in self._known:
            by_llama = self._name == LLAMA_CPP
            self._known[key] = self._counts(groups, rule) if by_llama else self._by_preset(groups)
        replayed, engine = self._known[key], None
        if run.hits is not None and run.misses is not None:
            engine = Counts(run.hits, run.misses, run.read or 0.0)
        elif run.read_per_token is not None:
            read = run.read_per_token * self.tokens
            misses = round(read * self.trace.geometry.layers / sum(self.trace.geometry.expert_bytes))
            engine = Counts(max(0, replayed.hits + replayed.misses - misses), misses, read)
        return Compared(run, self._label(groups), engine, replayed, self.tokens)

    def _label(self, groups: tuple[Group, ...]) -> str:
        slots = sum(group.slots for group in groups)
        held = sum(group.size * group.slots for group in groups)
        return f"{100 * held / self._experts:.3g}% {counted(slots, 'expert')}"

    def _counts(self, groups: tuple[Group, ...], rule: str) -> Counts:
        """Replay what llama.cpp's cache sees, each group of layers by itself."""
        hits = misses = 0
        read = 0.0
        for group in groups:
            if group.slots < self.trace.geometry.k:
                raise ConfigError(
                    f"a cache of {counted(group.slots, 'expert')} is too small for one token; llama.cpp refuses it"
                )
            seen = small_batches(self.trace, most_tokens(self.trace.geometry, group.slots), group.layers)
            config = configure(**self._settings | {"eviction": rule, "capacity": f"{group.slots * group.size}B"})
            totals = replay(seen, config).totals
            hits, misses = hits + totals["hits"], misses + totals["misses"]
            read += totals["bytes_demand"]
        return Counts(hits, misses, read)

    def _by_preset(self, groups: tuple[Group, ...]) -> Counts:
        """Replay the trace under another engine's preset; decoded tokens count."""
        held = sum(group.size * (group.slots + 1) for group in groups)
        result = replay(self.trace, configure(**self._settings | {"capacity": f"{min(held, self._experts)}B"}))
        rows = [row for row in result.per_layer if row["phase"] == "decode"]
        return Counts(*(sum(row[name] for row in rows) for name in ("hits", "misses", "bytes_demand")))

    def _other_tokens(self, rows: Sequence[Compared]) -> list[str]:
        for row in rows:
            looked = row.engine and row.engine.hits + row.engine.misses
            mine = row.replayed.hits + row.replayed.misses
            if looked and looked != mine:
                other = f"{row.run.name} has {looked:,} look-ups and the trace {mine:,}"
                return [f"{other}: the engine ran other tokens, so compare rates and not counts"]
        return []


def _timed(rows: Sequence[Compared]) -> tuple[list[Compared], tuple[float, float] | None, list[str]]:
    """Fit the time to the fewest and the most misses per token, and predict it at all capacities."""
    timed = sorted((row for row in rows if row.run.ms is not None), key=lambda row: row.misses_per_token)
    ends = [timed[0], timed[-1]] if timed else []
    if not timed or ends[0].misses_per_token == ends[1].misses_per_token:
        found = len({row.misses_per_token for row in timed})
        return list(rows), None, [f"times are not predicted: expected times at two capacities or more, found {found}"]
    (few, base), (many, slow) = ((row.misses_per_token, row.run.ms or 0.0) for row in ends)
    slope = (slow - base) / (many - few)
    line = (base - slope * few, slope)
    found = [
        replace(row, predicted_ms=line[0] + slope * row.misses_per_token, fitted=any(row is end for end in ends))
        for row in rows
    ]
    odd = ["a miss takes no time by this fit: the times are noise, or the cache is not what they wait for"]
    return found, line, odd if slope <= 0 else []


def _farthest(rows: Iterable[Compared]) -> float | None:
    return max((abs(row.points) for row in rows if row.points is not None), default=None)


def _other_rules(by_rule: dict[str, list[Compared]], chosen: str, rules: dict[str, str]) -> list[str]:
    """Say how far off the rules are, if there are several or none matches."""
    far = {rule: _farthest(rows) for rule, rows in by_rule.items()}
    found = [f"{rules[rule]}: up to {off:.2f} points off" for rule, off in far.items() if off and rule != chosen]
    if (off := far[chosen]) is not None and off > MATCHING:
        nearest = f"no rule matches this engine: the nearest, {rules[chosen]}, is up to {off:.2f} points off"
        found.insert(0, f"{nearest}, and up to {MATCHING:g} is a match; check that trace, capacity and engine fit")
    return found


def check_counted(runs: Sequence[EngineRun]) -> None:
    """Raises ConfigError if no run has counts or bytes."""
    if all(run.misses is None and run.read_per_token is None for run in runs):
        raise ConfigError(f"no counters in {', '.join(sorted({run.name for run in runs}))}; {HOW}")


# -- Batches that llama.cpp's expert cache sees: those of few tokens; longer prompts bypass it. Read
# in llama.cpp's src/llama-moe-cache.cpp of October 2026, and confirmed by its own counts (docs/logs.md).


MOST_TOKENS = 32  #: of a batch that looks experts up; larger ones only copy what happens to be there
AT_ONCE = 512  #: tokens of a batch at most


def most_tokens(geometry: Geometry, slots: int) -> int:
    """Return the largest batch that a cache of `slots` experts takes: all experts that it may choose must fit."""
    fits = [tokens for tokens in range(1, MOST_TOKENS + 1) if min(tokens * geometry.k, geometry.experts) <= slots]
    if not fits:
        raise TraceError(f"a cache of {slots} experts cannot hold the {geometry.k} of one token; llama.cpp refuses it")
    return max(fits)


def small_batches(trace: Trace, most: int, layers: frozenset[int] | None = None) -> Trace:
    """Return in memory what batches of at most `most` tokens choose, of these layers, as prompts and single tokens.

    Of a longer prompt only its last layer's choice for its last token is left: that layer runs for this token alone,
    because nothing else is asked for.
    """
    header = trace.header
    other = [layer for layer in range(trace.geometry.layers) if layers is not None and layer not in layers]
    requests = []
    for (first, last), length in zip(
        pairwise(trace.request_offsets.tolist()), trace.prompt_lengths.tolist(), strict=True
    ):
        rows, prompt = _of_request(trace.read("chosen", first, last), length, most)
        rows[:, other] = -1
        requests.append(Request(rows, prompt))
    return memory_trace(header.model_copy(update={"lookahead_depth": 0}), requests)


def _of_request(chosen: np.ndarray, prompt: int, most: int) -> tuple[np.ndarray, int]:
    """Return the rows of a request (T, L, k) that the cache sees, and how many of them are the prompt's."""
    if not prompt:
        return chosen.copy(), 0
    part = (prompt - 1) % AT_ONCE + 1  # the last batch of the prompt
    kept = chosen[prompt - (part if part <= most else 1) :].copy()
    if part > most:
        kept[0, :-1] = -1
        return kept, 1
    kept[: part - 1, -1] = -1
    return kept, part
