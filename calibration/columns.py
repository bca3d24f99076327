"""Columns of the files that measured runs come in: what each means, and which numbers it may hold.

`rows.Line` reads no column that is not declared here, and docs/logs.md shows these tables.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS

File = Literal["cells", "models", "tokens"]
MOST_MS = 1e9  #: of a token, eleven days
MOST_MIB = float(1 << 42)  #: 2**62 bytes
MOST_BYTES = float(1 << 62)
MOST_COUNT = 10**12  #: of tokens, slots or page faults


class Range(NamedTuple):
    """Numbers of a column, both ends included."""

    least: float
    most: float
    whole: bool = False

    def __str__(self) -> str:
        """As an error and a table say it."""
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {_written(self.least)} to {_written(self.most)}"


class Column(NamedTuple):
    """One column; without a range it holds text."""

    meaning: str
    range: Range | None = None
    needed: bool = False


def _written(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) and number < 1e9 else f"{number:g}"


MS, MIB, BYTES = Range(0, MOST_MS), Range(0, MOST_MIB), Range(1, MOST_BYTES)
TIME = Range(1e-6, MOST_MS)  #: of a token: a nanosecond or more

CELLS: dict[str, Column] = {
    "cell": Column("name of the run, unlike all others; `--fit` takes patterns of these", needed=True),
    "device": Column("machine that it ran on; a calibration is of one", needed=True),
    "model": Column("model that it ran; a known one fills in what the row leaves empty", needed=True),
    "quant": Column("weight format of the file, as `Q4_K_M`; a format of the experts alone goes in parentheses"),
    "date": Column("day of the run, kept in `[calibration]`"),
    "engine": Column("name of the engine; one that reads through the kernel's `page cache` is not predicted"),
    "moe_layers": Column("layers with experts", Range(1, MOST_LAYERS, whole=True)),
    "experts": Column("experts of a layer", Range(1, MOST_EXPERTS, whole=True)),
    "k": Column("experts per token and layer in this run", Range(1, MOST_EXPERTS, whole=True)),
    "expert_bytes_mean": Column("bytes of an expert, mean over layers; else from `model` and `quant`", BYTES),
    "dense_mib": Column("MiB of all that is no routed expert", MIB),
    "token_demand_mib": Column("MiB of the experts that a token computes; else layers x k x bytes of an expert", MIB),
    "cache_mib": Column("MiB of the expert cache; 0 where it is off", MIB),
    "cache_slots": Column("experts that the cache holds, over all layers", Range(0, MOST_COUNT, whole=True)),
    "cache_scope": Column("`per layer...` for a pool of each layer, anything else for one pool"),
    "policy": Column("what evicts: `lru` or `lfu with recency (LFRU)` can be replayed; `cache off` keeps nothing"),
    "lanes": Column("reads at once", Range(1, 4096, whole=True)),
    "overlap": Column("`no` where the engine reads, then computes; `yes` where it does both at once"),
    "prefetch": Column("`none` or empty; a run that prefetches is not predicted"),
    "trace_file": Column("file with the routing of this run, from the folder; it is replayed"),
    "per_token_file": Column("log of its tokens (below), within the folder"),
    "prompt_tokens": Column("tokens of the prompt; checked, not used", Range(0, MOST_COUNT, whole=True)),
    "decode_tokens": Column("decoded tokens; checked, not used", Range(0, MOST_COUNT, whole=True)),
    "hit_pct": Column("hits in percent of look-ups", Range(0, 100)),
    "hit_scope": Column("`decode` where hits are of decoded tokens alone, else of the prompt too"),
    "read_mib_per_token": Column("MiB that a decoded token read", MIB),
    "tok_s": Column("decoded tokens per second", Range(1e-6, 1e9)),
    "tpot_ms": Column("ms of the mean decoded token", TIME),
    "tpot_median_ms": Column("ms of the median decoded token", TIME),
    "compute_ms": Column("ms of compute per token", MS),
    "io_ms": Column("ms per token that a serial engine reads", MS),
    "stall_ms": Column("ms per token that an overlapped engine waits for reads", MS),
    "mgmt_ms": Column("ms per token that loading takes of compute", MS),
    "clean": Column("what is wrong with the run's time, in words: `hits and bytes only` refuses it, `paging` and others"
                    " leave its time out"),
    "notes": Column("remarks; a `routes/NAME.csv` or `.jsonl` in them is routing of the same model"),
}  # fmt: skip

MODELS: dict[str, Column] = {
    "model": Column("as in cells.csv", needed=True),
    "quant": Column("as in cells.csv; rows of one model are told apart by it"),
    "dense_read_per_token_mib": Column("MiB that every token reads and that are no routed expert", MIB),
    "file_bytes": Column("bytes of the whole file, from which the dense part follows", BYTES),
}

TOKENS: dict[str, Column] = {
    "wall_ms": Column("ms that the token took", MS, needed=True),
    "read_bytes": Column("bytes of experts that it read", Range(0, MOST_BYTES), needed=True),
    "compute_ms": Column("ms of compute", MS),
    "io_ms": Column("ms of reading, of a serial engine's wait for it", MS),
    "stall_ms": Column("ms that an overlapped engine waited", MS),
    "mgmt_ms": Column("ms that loading took of compute", MS),
    "majflt": Column("major page faults", Range(0, MOST_COUNT, whole=True)),
}

FILES: dict[File, dict[str, Column]] = {"cells": CELLS, "models": MODELS, "tokens": TOKENS}


def needed(file: File) -> tuple[str, ...]:
    """Columns that every such file has."""
    return tuple(name for name, column in FILES[file].items() if column.needed)


def amounts(file: File) -> tuple[str, ...]:
    """Columns of numbers."""
    return tuple(name for name, column in FILES[file].items() if column.range is not None)


def markdown(file: File) -> str:
    """The table of a file's columns in docs/logs.md."""
    rows = [f"| `{name}` | {_kind(column)} | {column.meaning} |" for name, column in FILES[file].items()]
    return "\n".join(["| column | holds | meaning |", "|---|---|---|", *rows])


def _kind(column: Column) -> str:
    kind = "text" if column.range is None else str(column.range)
    return f"{kind}; needed" if column.needed else kind
