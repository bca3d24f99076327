"""The answer of a search by replays: what was found, and what follows of prefetch, the CPU, memory and engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moereplay.policies.grammar import deciding
from moereplay.results.remarks import Ranked, idle, turned
from moereplay.results.settings import repeat_command
from moereplay.simulator.capacity import kv_bytes_of
from moereplay.simulator.machine import of_platform
from moereplay.simulator.platform import Platform
from moereplay.simulator.platforms import platform
from moereplay.sweeps.recommend.answer import UNKNOWN_DENSE
from moereplay.sweeps.recommend.draft_replays import Decoded
from moereplay.sweeps.recommend.engines import Placed, engines, placed
from moereplay.sweeps.recommend.load import grade_of
from moereplay.sweeps.recommend.runner import Tried
from moereplay.sweeps.recommend.search import WORTH, Answer, Question, differing, everything
from moereplay.sweeps.recommend.space import SHORT, bits_of, compulsory_limit, engines_of, start_of
from moereplay.traces.schema import Trace
from moereplay.traces.summary import synthetic
from moereplay.traces.texts import percent

FITS = "every expert fits, so that each is loaded once"
UNSEARCHED = "the search ended before it was known; --budget none searches on"
SHORT_TRACE = (
    "short trace: a cache that begins empty hits at most {} (compulsory limit), whatever its size, and "
    "makes no profile; every set here begins with a full cache, of whole layers or of arbitrary experts"
)
KNOWN = "best_known-"  #: beginning of the names of the lists of the best set that an engine has
ONE = "one request only: how far another one would differ cannot be known"
NO_DENSE = f"not compared, because {UNKNOWN_DENSE}"
UNSIZED = (
    "no memory is counted for {}: neither the trace nor its model's name gives its size; subtract it from --memory"
)


class Verdict(NamedTuple):
    """Whether something pays; None: not known, or nothing to compare."""

    pays: bool | None
    gain: float
    reason: str


class Lossy(NamedTuple):
    """The policies that a faster set changes, so that the output may change."""

    change: dict[str, str]
    gain: float
    mass_share_low_precision: float | None
    bits: float | None  #: at which all experts are fetched
    stored_bits: float


class Peak(NamedTuple):
    """The most bytes that the machine's memory holds at a time, with the system's."""

    reserve_bytes: int
    machine_bytes: int
    peak_bytes: int
    will_page: bool


@dataclass(frozen=True)
class Searched:
    """A search: its question, and the sets that it found."""

    question: Question  #: of the requests that figures are of
    answer: Answer
    name: str  #: of the trace, as it was typed
    whole: Trace  #: all of its requests
    at_most: int  #: replays, as progress counts them
    assumed: tuple[str, ...] = ()  #: parts of the memory, with the options that replace them
    lists_at: str = ""  #: beginning of the paths of the lists of experts that commands read
    decoded: Decoded | None = None  #: where drafts or streams are asked about

    @property
    def best(self) -> Tried:
        """The fastest set."""
        return self.answer.best

    @property
    def about(self) -> Mapping[str, Any]:
        """The facts about model and times in the best set's replay."""
        return self.best.result.about

    @property
    def synthetic(self) -> str:
        """How synthetic routing was made; empty for recorded routing."""
        return synthetic(self.whole.header.provenance)

    @property
    def grade(self) -> tuple[str, str]:
        """The kind of times and routing that the answer rests on, and whose routing it is."""
        return grade_of(self.about["seconds"], self.question.trace)

    @property
    def machine(self) -> Platform:
        """The platform."""
        return platform(self.question.base["platform"])

    def start(self, tried: Tried) -> str:
        """Return what a set's cache holds at the start."""
        return start_of(self.question.trace, tried.config)

    def engines(self, tried: Tried) -> list[str]:
        """Return the engines that have a set."""
        return engines_of(tried.config, self.start(tried), tried.model)

    def command(self, tried: Tried, before: str = "") -> str:
        """Return the command that replays a set; `before` begins the names of its lists."""
        return repeat_command(tried.config.model_dump(mode="json"), self.name, lists_at=f"{self.lists_at}{before}")

    def memory_with(self, tried: Tried) -> int:
        """Return the bytes of fast memory with the cache of a set."""
        memory = self.question.memory
        return memory.total_bytes - memory.cache_bytes + tried.cache_bytes

    def peak(self, used: int) -> Peak | None:
        """Return the peak of a fast memory of `used` bytes, if the platform states the memory that the system needs."""
        machine = self.machine
        if machine.memory_bytes is None or machine.reserve_bytes is None:
            return None
        reserve, size = int(machine.reserve_bytes), int(machine.memory_bytes)
        return Peak(reserve, size, used + reserve, used + reserve > machine.memory_bytes)

    @property
    def compulsory_limit(self) -> float:
        """The highest hit rate of any cache that starts empty."""
        return compulsory_limit(self.question.trace, self.best.config.schedule)

    @property
    def prefetch(self) -> Verdict:
        """Whether prefetching pays; None where the search ended too early to know."""
        best, without, recall = self.best, self.answer.without_prefetch, self.answer.recall_that_pays
        if self.question.all_fit:
            return Verdict(False, 0.0, FITS)
        if without is None or (best.config.prefetch == "none" and recall is None and self.answer.cut):
            return Verdict(None, 0.0, UNSEARCHED)
        if best.config.prefetch != "none":
            return self._gain("prefetch", without, "without")
        if recall is None:
            return Verdict(False, 0.0, "not even with every expert of the next layer predicted")
        reason = f"no prefetch that the trace can feed gains; a predictor of recall and precision {recall:g} would"
        return Verdict(False, 0.0, reason)

    @property
    def cpu(self) -> Verdict:
        """Whether computing misses on the CPU beats fetching them; None if the machine has none."""
        best, fetching = self.best, self.answer.fetching
        if self.answer.space.miss == ("fetch",):
            return Verdict(None, 0.0, "the machine has no additional CPU, or none is needed")
        if fetching is None:
            return Verdict(None, 0.0, UNSEARCHED)
        if best.config.miss == "fetch":
            return Verdict(False, 0.0, "to fetch every miss is faster than to compute any on the CPU")
        return self._gain("miss", fetching, "that fetches every miss")

    def _gain(self, kind: str, other: Tried, whose: str) -> Verdict:
        gain = self.best.tokens_per_s / other.tokens_per_s - 1
        reason = f"{self.best.policies[kind]}: {percent(gain)} more tokens/s than the best set {whose}"
        return Verdict(gain > WORTH, gain, reason)

    @property
    def lossy_left_out(self) -> str:
        """Why lossy sets are not compared: their gains would be for experts alone."""
        return "" if self.question.memory.dense_bytes else NO_DENSE

    @property
    def lossy(self) -> tuple[tuple[Tried, Lossy], ...]:
        """The faster sets that may change the output, the fastest first."""
        return () if self.lossy_left_out else tuple((tried, self._lossy(tried)) for tried in self.answer.lossy)

    def _lossy(self, tried: Tried) -> Lossy:
        best, totals = self.best, tried.result.totals
        low = totals["mass_low_precision"] / totals["mass"] if totals["mass"] else None
        changed = {kind: text for kind in ("routing", "miss") if (text := getattr(tried.config, kind)) != "standard"}
        changed = {kind: text for kind, text in changed.items() if text != getattr(best.config, kind)}
        gain = tried.tokens_per_s / best.tokens_per_s - 1
        return Lossy(changed, gain, low, bits_of(changed), self.question.trace.geometry.expert_bits)

    @property
    def held(self) -> int:
        """Bytes of experts that the best set's cache holds at most."""
        return min(self.best.cache_bytes, everything(self.question.trace.geometry))

    @property
    def placed(self) -> Placed:
        """The best set's cache in the quantities that engines name."""
        memory = self.question.memory
        return placed(self.question.trace.geometry, self.held, (memory.dense_bytes + self.held) / memory.total_bytes)

    @property
    def flags(self) -> dict[str, str]:
        """The flags that come closest to that cache, of engines that run the model on such a machine."""
        return flags(self.placed, of_platform(self.machine).kind, self.best.model)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Cases that the figures do not hold for, and orders that would turn."""
        return tuple(dict.fromkeys(filter(None, [*self._warnings(), *self._turned()])))

    def _warnings(self) -> Iterator[str]:
        trace, about = self.question.trace, self.about
        sizes = {"dense weights": self.question.memory.dense_bytes, "the KV cache": kv_bytes_of(trace)}
        yield from (UNSIZED.format(what) for what, size in sizes.items() if not size)
        if self.compulsory_limit < SHORT and self.best.config.warm:
            yield SHORT_TRACE.format(f"{100 * self.compulsory_limit:.1f}%")
        yield from idle([self.best.result.to_json()])
        said = (about["warning"] or "").split("; ")
        yield "; ".join(part for part in said if not (self.question.all_fit and part.startswith("capacity is ")))
        if "open-loop" in about["label"]:
            yield about["label"]
        if trace.requests == 1:
            yield ONE

    def _turned(self) -> Iterator[str]:
        """Yield which other set would be faster under an assumed price of decisions, if the platform states none."""
        if self.machine.decisions.of_steps:
            return
        answer, of, layers = self.answer, deciding(), self.question.trace.geometry.layers
        for other in filter(None, (answer.second, answer.without_prefetch, answer.known)):
            names = differing(self.best, other)
            first, second = (
                Ranked(
                    ", ".join(f"{name} {each.policies[name]}" for name in names) or "the same set",
                    each.tokens_per_s,
                    of(each.config.model_dump(mode="json")),
                )
                for each in (self.best, other)
            )
            yield turned(first, second, layers) or ""


def flags(where: Placed, kind: str, model: str = "") -> dict[str, str]:
    """Return the flags of the first mode of each engine for this kind of machine; an engine may need none."""
    able = (each for each in engines() if each.runs(model))
    modes = {each.name: next((mode for mode in each.modes if kind in mode.machines), None) for each in able}
    return {name: mode.render(where) for name, mode in modes.items() if mode}
