"""Columns of the files of measured runs: meaning and range of each.

`files.Line` reads declared columns only. `make tables` writes the tables into docs/logs.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS

File = Literal["cells", "models", "tokens", "series"]
MOST_MS = 1e9  #: per token; eleven days
MOST_MIB = float(1 << 42)  #: 2**62 bytes
MOST_BYTES = float(1 << 62)
MOST_COUNT = 10**12  #: tokens, slots or page faults


class Range(NamedTuple):
    """Range of a column, both ends included."""

    least: float
    most: float
    whole: bool = False

    def __str__(self) -> str:
        """Return the range in words, for errors and tables."""
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {_written(self.least)} to {_written(self.most)}"


class Column(NamedTuple):
    """A column; without a range it holds text."""

    meaning: str
    range: Range | None = None
    needed: bool = False


def _written(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) and number < 1e9 else f"{number:g}"


MS, MIB, BYTES = Range(0, MOST_MS), Range(0, MOST_MIB), Range(1, MOST_BYTES)
TIME = Range(1e-6, MOST_MS)  #: per token; at least a nanosecond

CELLS: dict[str, Column] = {
    "cell": Column("unique name of the run; `--fit` takes patterns of names", needed=True),
    "source": Column("where the run was published; for tables of predictions"),
    "device": Column("machine of the run; a calibration covers one device", needed=True),
    "model": Column("model of the run; a known model supplies empty columns", needed=True),
    "quant": Column("weight format of the file, such as `Q4_K_M`; another format of experts in parentheses"),
    "date": Column("day of the run, stored in `[calibration]`"),
    "engine": Column("name of the engine; engines that use the kernel's `page cache` are not predicted"),
    "moe_layers": Column("number of MoE layers", Range(1, MOST_LAYERS, whole=True)),
    "experts": Column("experts per layer", Range(1, MOST_EXPERTS, whole=True)),
    "k": Column("experts per token and layer in this run", Range(1, MOST_EXPERTS, whole=True)),
    "expert_bytes_mean": Column("mean bytes of an expert (default: from `model` and `quant`)", BYTES),
    "dense_mib": Column("MiB of all weights except routed experts", MIB),
    "token_demand_mib": Column("MiB of the experts of a token (default: layers x k x bytes of an expert)", MIB),
    "cache_mib": Column("MiB of the expert cache; 0 if there is none", MIB),
    "cache_slots": Column("capacity of the cache in experts, over all layers", Range(0, MOST_COUNT, whole=True)),
    "cache_scope": Column("`per layer...` for one cache per layer, any other text for one cache"),
    "policy": Column("eviction policy: `lru` and `lfu with recency (LFRU)` are replayed; `cache off` for none"),
    "lanes": Column("concurrent reads", Range(1, 4096, whole=True)),
    "overlap": Column("`yes` if the engine overlaps reads with compute, else `no`"),
    "prefetch": Column("`none` or empty; prefetching runs are not predicted"),
    "trace_file": Column("routing of this run, to be replayed: a path in the folder"),
    "per_token_file": Column("per-token log of this run (below), a path in the folder"),
    "prompt_tokens": Column("prompt tokens; checked, not used", Range(0, MOST_COUNT, whole=True)),
    "decode_tokens": Column("decoded tokens; checked, not used", Range(0, MOST_COUNT, whole=True)),
    "hit_pct": Column("hits in percent of accesses", Range(0, 100)),
    "hit_scope": Column("`decode` if hits exclude the prompt"),
    "read_mib_per_token": Column("MiB read per decoded token", MIB),
    "tok_s": Column("decoded tokens per second", Range(1e-6, 1e9)),
    "tpot_ms": Column("mean ms per decoded token", TIME),
    "tpot_median_ms": Column("median ms per decoded token", TIME),
    "compute_ms": Column("ms of compute per token", MS),
    "io_ms": Column("ms of reading per token, for an engine without overlap", MS),
    "stall_ms": Column("ms of stall per token, for an engine with overlap", MS),
    "mgmt_ms": Column("ms per token that compute spends on loading experts", MS),
    "clean": Column("problem with the run's time, in words: `hits and bytes only` excludes the run, `paging` and others"
                    " exclude its time"),
    "notes": Column("remarks; a `routes/NAME.csv` or `.jsonl` in them is replayed as routing of the same model"),
}  # fmt: skip

MODELS: dict[str, Column] = {
    "model": Column("as in cells.csv", needed=True),
    "quant": Column("as in cells.csv; distinguishes rows of one model"),
    "dense_read_per_token_mib": Column("MiB of dense weights that every token reads", MIB),
    "reads_per_expert": Column(
        "matrices of an expert, read one after the other: 2 if gate and up are one matrix, else 3",
        Range(1, 64, whole=True),
    ),
    "file_bytes": Column("bytes of the whole file, from which dense bytes follow", BYTES),
}

TOKENS: dict[str, Column] = {
    "wall_ms": Column("ms of the token", MS, needed=True),
    "read_bytes": Column("bytes of experts that the token read", Range(0, MOST_BYTES), needed=True),
    "compute_ms": Column("ms of compute", MS),
    "io_ms": Column("ms of reading, for an engine without overlap", MS),
    "stall_ms": Column("ms of stall, for an engine with overlap", MS),
    "mgmt_ms": Column("ms that compute spent on loading experts", MS),
    "majflt": Column("major page faults", Range(0, MOST_COUNT, whole=True)),
}

GIB = Range(0, MOST_MIB / 1024)
RATE = Range(0, 1e9)

SERIES: dict[str, Column] = {
    "id": Column("unique name of the run, for `--fit`", needed=True),
    "series": Column("runs of one machine with one thing changed; `--series` takes its name"),
    "source": Column("where the run was published; for tables of predictions"),
    "date": Column("day of the run, stored in `[calibration]`"),
    "engine": Column(
        "`llama.cpp`, `ik_llama.cpp`, `ktransformers`, `FreeToken`, ...; its version may follow. Any other name has no"
        " costs of its own",
        needed=True,
    ),
    "model": Column("model of the run; a known model supplies empty columns", needed=True),
    "quant": Column("weight format of the file, such as `Q4_K_M`"),
    "bits": Column("bits per weight of the experts", Range(0, 64)),
    "moe_layers": Column("number of MoE layers", Range(1, MOST_LAYERS, whole=True)),
    "experts": Column("experts per layer", Range(1, MOST_EXPERTS, whole=True)),
    "top_k": Column("experts per token and layer", Range(1, MOST_EXPERTS, whole=True)),
    "expert_mib": Column("MiB of one expert, all matrices, mean over layers", MIB),
    "model_gib": Column("GiB of the file", GIB),
    "dense_gib": Column(
        "GiB of other weights that a token reads (default: the file without its experts); 0 if unknown: then they are"
        " part of the fixed step",
        GIB,
    ),
    "gpu": Column("card, as `platforms --cards` lists it; `none` for the CPU alone", needed=True),
    "n_gpu": Column("number of cards that divide the layers", Range(0, 4096, whole=True)),
    "vram_gib": Column("GiB of a card's memory that the run may use (default: all)", GIB),
    "cpu": Column("processor; its cores are a number before `c`, as in `Ryzen 9 9950X 16c`"),
    "ram_gib": Column("GiB of main memory", GIB),
    "ram_bw_gbs": Column("GB/s at which the CPU reads main memory", RATE),
    "ram_bw_kind": Column("`measured`, or what else the rate is: then .7 of it is taken"),
    "pcie": Column("link of the card: `4.0 x16`, or a measured rate: `12.5 GB/s`"),
    "ssd_gbs": Column("GB/s of sequential reads of the disk", RATE),
    "ram_limit_gib": Column("GiB that the process may use, if less than all", GIB),
    "placement": Column(
        "`cpu_layers`: whole layers of experts in main memory; `slots`: a cache in VRAM; `expert_share`: chosen experts"
        " of every layer; `ssd_slots`: a cache over the disk; `all_cpu`",
        needed=True,
    ),
    "cpu_moe_layers": Column("layers whose experts lie in main memory: a number, or `all`"),
    "gpu_expert_share": Column("share of all experts in VRAM, or percent of them", Range(0, 100)),
    "slots_per_layer": Column("experts of a layer that fast memory holds, mean", Range(0, MOST_EXPERTS)),
    "cache_gib": Column("GiB of experts that fast memory holds", GIB),
    "policy": Column(
        "`lru ...`, `static by frequency`, `uniform`, `random`, `front` (default: `lru` for slots, `static` for shares)"
    ),
    "on_miss": Column("`cpu`: the CPU computes; `fetch`: the GPU waits; `hybrid`: both; `cpu, upload in background`"),
    "fetched_pct": Column(
        "percent of the misses that the GPU fetches while the CPU computes the others", Range(0, 100)
    ),
    "load": Column("`ram`: read in at start; `mmap`; `direct ssd`"),
    "ctx": Column("positions in the KV cache", Range(0, MOST_COUNT)),
    "prompt_tokens": Column("prompt tokens", Range(0, MOST_COUNT)),
    "ubatch": Column("tokens of a batch of the prompt", Range(0, MOST_COUNT)),
    "draft": Column("`none` or empty; runs with drafts are not predicted"),
    "concurrency": Column("1 or empty; several requests at once are not predicted", Range(0, MOST_COUNT)),
    "decode_tok_s": Column("decoded tokens per second", RATE),
    "prefill_tok_s": Column("prompt tokens per second; predicted where it is the question, or alone", RATE),
    "hit_pct": Column("percent of accesses that fast memory served, where the engine counts them", Range(0, 100)),
    "question": Column("`prefill` if the prompt's rate is meant; else what the series asks"),
    "clean": Column("`C` excludes the run: incomplete, or several things changed"),
    "excluded": Column("why no setting of an engine describes the run, in words; excludes it"),
    "notes": Column("remarks"),
}

FILES: dict[File, dict[str, Column]] = {"cells": CELLS, "models": MODELS, "tokens": TOKENS, "series": SERIES}


def needed(file: File) -> tuple[str, ...]:
    """Return the required columns of a file."""
    return tuple(name for name, column in FILES[file].items() if column.needed)


def amounts(file: File) -> tuple[str, ...]:
    """Return the columns of numbers."""
    return tuple(name for name, column in FILES[file].items() if column.range is not None)


def markdown(file: File) -> str:
    """Return the Markdown table of a file's columns for docs/logs.md."""
    rows = [f"| `{name}` | {_kind(column)} | {column.meaning} |" for name, column in FILES[file].items()]
    return "\n".join(["| column | holds | meaning |", "|---|---|---|", *rows])


def _kind(column: Column) -> str:
    kind = "text" if column.range is None else str(column.range)
    return f"{kind}; required" if column.needed else kind
