"""Binary records of an offline `moe-trace` of llama.cpp: int32 layer, n_tokens, k, then n_tokens * k int32 ids.

A record is a layer of one pass. The recorder clears its context before each chunk of text and requests every token's
output, so that a pass of several tokens is a separate request, all of it prompt; single tokens are decode steps.
Little-endian. The file is read a request at a time.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import moe_layers
from moereplay.traces.importers.contract import (
    Foreign,
    Importer,
    Options,
    Origin,
    Shape,
    assumed,
    header_for,
    prompt_tokens,
)
from moereplay.traces.importers.llama_tables import NOTE, read_flat
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, Request, TraceError, check_values

SUFFIX = ".bin"
HEAD = struct.Struct("<iii")
ID = np.dtype("<i4")
CUT = b"\xff"  #: in place of bytes that are missing: makes sizes that are impossible
RECORD = "int32 layer, tokens, k, then tokens * k ids"


@dataclass(frozen=True)
class Record:
    """One layer of a pass; `offset` is the position of its ids in the file."""

    layer: int
    tokens: int
    k: int
    offset: int


def sniff(path: Path) -> bool:
    """Return True for a .bin file whose first record may be one."""
    if not path.is_file() or path.suffix != SUFFIX:
        return False
    with path.open("rb") as stream:
        head = stream.read(HEAD.size)
    layer, tokens, k = HEAD.unpack(head.ljust(HEAD.size, CUT))
    return _is_possible(layer, tokens, k, path.stat().st_size - HEAD.size)


def _is_possible(layer: int, tokens: int, k: int, left: int) -> bool:
    return 0 <= layer < MOST_LAYERS and 0 < k <= MOST_EXPERTS and tokens > 0 and tokens * k * ID.itemsize <= left


def read(path: Path, options: Options) -> Foreign:
    """Return a request per chunk. Raises TraceError naming the byte where the file stops making sense."""
    records = _records(path)
    _, said = moe_layers(np.array([record.layer for record in records]))
    passes = _passes(path, records)
    first = _ids(path, passes[0])
    highest = max(int(_ids(path, each).max()) for each in passes) if options.geometry is None else int(first.max())
    shape = Shape(first.shape[1], first.shape[2], highest, None if options.geometry else highest + 1)
    requests = [(chunk, sum(each[0].tokens > 1 for each in chunk)) for chunk in _requests(passes)]
    begun = f"{len(requests):,} requests, one per pass of several tokens, because the context is cleared before each"
    notes = [assumed(["a record is a layer of one pass", begun, *said, f"k = {shape.k}"], shape, options)]
    notes += [NOTE] if read_flat(first, highest + 1) else []
    return Foreign(
        header_for(shape, options, Origin(LLAMA_RECORDS.name, path, [path]), notes), _read(path, requests, options)
    )


def _records(path: Path) -> list[Record]:
    found, at, size = [], 0, path.stat().st_size
    with path.open("rb") as stream:
        while head := stream.read(HEAD.size):
            layer, tokens, k = HEAD.unpack(head.ljust(HEAD.size, CUT))
            at += HEAD.size
            if not _is_possible(layer, tokens, k, size - at):
                wrong = f"record {len(found)} at byte {at - HEAD.size:,} is truncated or invalid"
                raise TraceError(f"{path}: {wrong}: expected {RECORD}, little-endian")
            found.append(Record(layer, tokens, k, at))
            at += tokens * k * ID.itemsize
            stream.seek(at)
    if not found:
        raise TraceError(f"{path}: no records: expected {RECORD}")
    return found


def _passes(path: Path, records: list[Record]) -> list[list[Record]]:
    """Return the records of one pass each, layers ascending. Raises TraceError if one lacks a layer or a token."""
    edges = [at for at, (a, b) in enumerate(itertools.pairwise(records), 1) if b.layer <= a.layer]
    passes = [records[start:stop] for start, stop in itertools.pairwise([0, *edges, len(records)])]
    wanted = [(record.layer, record.k) for record in passes[0]]
    for number, each in enumerate(passes):
        tokens = {record.tokens for record in each}
        if [(record.layer, record.k) for record in each] != wanted or len(tokens) > 1:
            has = f"pass {number} has {len(each)} layers and {' or '.join(map(str, sorted(tokens)))} tokens"
            expected = f"the {len(wanted)} layers and k of the first, all of its tokens at each"
            raise TraceError(f"{path}: {has}: expected {expected}; the file may be truncated")
    return passes


def _requests(passes: list[list[Record]]) -> Iterator[list[list[Record]]]:
    starts = [at for at, each in enumerate(passes) if at == 0 or each[0].tokens > 1]
    return (passes[start:stop] for start, stop in itertools.pairwise([*starts, len(passes)]))


def _ids(path: Path, records: list[Record]) -> np.ndarray:
    """Return (T, L, k) of one pass. Raises TraceError for invalid ids."""
    parts = []
    for record in records:
        found = np.fromfile(path, ID, record.tokens * record.k, offset=record.offset)
        check_values(found, "chosen", f"{path}: layer {record.layer} at byte {record.offset:,}: ids")
        parts.append(found.reshape(record.tokens, record.k))
    return np.stack(parts, 1)


def _read(path: Path, requests: list[tuple[list[list[Record]], int]], options: Options) -> Iterator[Request]:
    for passes, prompts in requests:
        ids = np.concatenate([_ids(path, each) for each in passes])
        recorded = sum(each[0].tokens for each in passes[:prompts])
        yield Request(ids, prompt_tokens(options, len(ids), recorded))


LLAMA_RECORDS = Importer(
    name="llama_records",
    summary="binary records of an offline moe-trace of llama.cpp, a layer of a chunk each: ids in rank order",
    formats=f"FILE.bin of {RECORD}",
    sniff=sniff,
    read=read,
)
