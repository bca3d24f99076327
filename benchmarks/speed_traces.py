"""Make the synthetic traces of speed measurements, and the same accesses in libCacheSim's format."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.traces.geometry import known
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Synthetic, synthesise
from moereplay.traces.writer import write_trace

#: Recall of look-ahead and reuse of experts, as measured on OLMoE-like models.
RECALL, REUSE = (0.87,), 0.31
#: libCacheSim's binary format of requests that know their next use.
ORACLE_GENERAL = np.dtype([("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
OLMOE, DEEPSEEK = 0, 1  #: places in FULL and QUICK


class Size(NamedTuple):
    """A model's shape, and how much of it: tokens in all, and in the request that the reference replays."""

    model: str
    tokens: int
    first: int


class Made(NamedTuple):
    """A trace on disk, its first request alone, and its stream of experts for libCacheSim."""

    name: str
    whole: Trace
    first: Trace
    stream: Path


FULL = (Size("olmoe-1b-7b", 30_000, 500), Size("deepseek-v3", 3_000, 100))
QUICK = (Size("olmoe-1b-7b", 60, 20), Size("deepseek-v3", 20, 10))


def make(size: Size, folder: Path) -> Made:
    requests = size.tokens // size.first
    drawn = Synthetic(
        kind="markov",
        geometry=known(size.model).geometry,
        requests=requests,
        prompt_tokens=0,
        decode_tokens=size.first,
        reuse=REUSE,
        recall=RECALL,
    )
    whole = written(folder / f"{size.model}-{size.tokens}.zarr", drawn, requests)
    first = written(folder / f"{size.model}-{size.first}.zarr", drawn, 1)
    return Made(size.model, whole, first, write_stream(whole, folder / f"{size.model}.bin"))


def written(path: Path, drawn: Synthetic, requests: int) -> Trace:
    """Write the first requests of a synthetic trace, unless the file exists."""
    if path.exists():
        return open_trace(path)
    made = synthesise(drawn)
    return write_trace(path, made.header, map(made.request, range(requests)), made.router_bias)


def write_stream(trace: Trace, path: Path) -> Path:
    """Write every demanded expert of every token and layer, all of size 1; ids start at 1."""
    first_of_layer = np.arange(trace.geometry.layers) * trace.geometry.experts
    experts = (trace.read("chosen").astype(np.int64) + first_of_layer[None, :, None]).ravel()
    requests = np.zeros(len(experts), ORACLE_GENERAL)
    requests["object"], requests["size"], requests["next"] = experts + 1, 1, -1
    requests.tofile(path)
    return path
