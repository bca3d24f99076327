"""Read what engines print about their expert cache and time: llama.cpp's log, server and bench JSON, CSV of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moereplay.calibration.files import read_series
from moereplay.simulator.capacity import check_readable
from moereplay.simulator.errors import ConfigError
from moereplay.simulator.rates import MIB
from moereplay.traces.documents import DocumentError, content, from_json
from moereplay.traces.texts import shown

SIZED = re.compile(r"(\S+) MoE cache size = +([0-9.]{1,20}) MiB for ([0-9.]{1,20}) MiB of host experts")
SLOTS = re.compile(r"\b([0-9]{1,5}) layers, (\w{1,16}): +([0-9]{1,9}) slots \(")
COUNTED = re.compile(
    r"llama_moe_cache: ubatch +(?:<=|>) 8: hits = ([0-9]{1,18}), misses = ([0-9]{1,18}), "
    r".{0,40}uploaded = ([0-9.]{1,20}) MiB"
)
TIMED = re.compile(r"(?<!prompt )eval time = +([0-9.]{1,20}) ms / +([0-9]{1,12}) (?:runs|tokens)")
COUNTS = "llama_moe_cache: ubatch <= 8: hits = H, misses = M, hit rate = R%, uploaded = U MiB"
HOW = f"expected '{COUNTS}', which llama.cpp prints as it ends (llama-completion -lv 4; llama-server after Ctrl-C)"


@dataclass(frozen=True)
class EngineRun:
    """A run of an engine at one size of its cache; what it did not print is None."""

    name: str  #: the file, or the library, that says so
    capacity: str = ""  #: as typed, in a form of --capacity
    held: float | None = None  #: bytes that the engine says its cache has
    experts: float | None = None  #: bytes of all experts that it says may be cached
    slots: tuple[tuple[int, int], ...] = ()  #: (layers, slots) of each group of layers whose experts have one layout
    hits: int | None = None
    misses: int | None = None
    read: float | None = None  #: bytes brought into the cache
    read_per_token: float | None = None
    ms: float | None = None  #: per decoded token
    timed: int = 0  #: decoded tokens of that time, 0 if it does not say
    resident: bool = False  #: all experts were on the device, without a cache

    @property
    def empty(self) -> bool:
        """True if there is nothing to compare."""
        return self.misses is None and self.ms is None and self.read_per_token is None

    def with_time(self, ms: float | None) -> EngineRun:
        """Return the run with a time per token that was taken from outside."""
        return replace(self, ms=ms)


def runs_of(text: str) -> list[EngineRun]:
    """Read a file, named FILE or FILE@SIZE, SIZE being the cache's. Raises ConfigError."""
    path, capacity = _named(text)
    try:
        raw = content(path)
    except OSError as wrong:
        raise ConfigError(f"--log {path}: {wrong.strerror}; check the path") from None
    written = raw.decode("utf-8-sig", errors="replace")
    if path.suffix == ".csv":
        series = read_series(path)
        read, ms = float(series.read_bytes.mean()), float(series.wall_ms.mean())
        found = [EngineRun(path.name, read_per_token=read, ms=ms)]
    elif written.lstrip()[:1] in ("{", "["):
        found = list(_of_json(path, raw))
    else:
        found = runs_of_lines(path.name, written.splitlines())
    if capacity and len(found) > 1:
        raise ConfigError(f"--log {text}: {path.name} has {len(found)} runs; a size can be given for one")
    return [replace(run, capacity=capacity or run.capacity) for run in found]


def _named(text: str) -> tuple[Path, str]:
    file, at, size = text.rpartition("@")
    if not at or Path(text).exists():
        return Path(text), ""
    check_readable(size)
    return Path(file), size


def runs_of_lines(name: str, lines: list[str] | tuple[str, ...]) -> list[EngineRun]:
    """Read the runs in lines of llama.cpp's log, one after the other. Raises ConfigError if there are none."""
    found, run = [], EngineRun(name)
    device = ""
    for line in lines:
        if sized := SIZED.search(line):
            if not run.empty:
                found, run = [*found, run], EngineRun(name)
            elif run.held is not None and sized[1] != device:
                raise ConfigError(
                    f"{name}: caches on {shown(device)} and {shown(sized[1])}; expected one on one device"
                )
            device = sized[1]
            run = replace(run, held=_number(sized[2]) * MIB, experts=_number(sized[3]) * MIB, slots=())
        elif group := SLOTS.search(line):
            run = replace(run, slots=(*run.slots, (int(group[1]), int(group[3]))))
        elif counts := COUNTED.search(line):
            run = _counted(run, int(counts[1]), int(counts[2]), _number(counts[3]) * MIB)
        elif (timed := TIMED.search(line)) and int(timed[2]):
            spent, tokens = (run.ms or 0) * run.timed + _number(timed[1]), run.timed + int(timed[2])
            run = replace(run, ms=spent / tokens, timed=tokens)
    found += [] if run.empty else [run]
    if not found:
        raise ConfigError(f"{name}: no counters and no times; {HOW}")
    return found


def _counted(run: EngineRun, hits: int, misses: int, read: float) -> EngineRun:
    """Add a line's counts: small batches have one, those of 9 to 32 tokens another."""
    return replace(run, hits=(run.hits or 0) + hits, misses=(run.misses or 0) + misses, read=(run.read or 0) + read)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # 1.2.3
        raise ConfigError(f"{shown(text)} in a log of llama.cpp is not a number; is the log damaged?") from None


def _of_json(path: Path, raw: bytes) -> Iterator[EngineRun]:
    """Read `timings` of llama-server, or the tests of `llama-bench -o json`."""
    try:
        said = from_json(raw)
    except DocumentError as wrong:
        raise ConfigError(f"{path}: {wrong}; expected llama-server's answer or `llama-bench -o json`") from None
    if isinstance(said, Mapping):
        ms = _positive(said.get("timings", said), "predicted_per_token_ms")
        found = [] if ms is None else [EngineRun(path.name, ms=ms)]
    else:
        found = [run for test in said if isinstance(test, Mapping) and (run := _of_bench(path, test))]
    if not found:
        raise ConfigError(
            f"{path}: no time per decoded token; expected timings.predicted_per_token_ms, or n_gen and avg_ns"
        )
    yield from found


def _of_bench(path: Path, test: Mapping[str, Any]) -> EngineRun | None:
    """Return a test of decoding; its experts are all on the GPU, or on the CPU."""
    generated, spent = _positive(test, "n_gen"), _positive(test, "avg_ns")
    if generated is None or spent is None or test.get("n_prompt"):
        return None
    if test.get("n_cpu_moe") or test.get("n_gpu_layers") == 0:
        raise ConfigError(
            f"{path}: llama-bench left experts to the CPU; it has no cache to compare. Leave that test out"
        )
    return EngineRun(path.name, capacity="100%", ms=spent / generated / 1e6, resident=True)


def _positive(of: Any, key: str) -> float | None:
    value = of.get(key) if isinstance(of, Mapping) else None
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e18
    return float(value) if good else None  # type: ignore[arg-type]
