"""Binary traces that patched builds of llama.cpp write, by their magic numbers; both little-endian.

`MBLT` (mbolt): int32 version 1, int32 experts, then records of int32 layer, k, tokens and tokens * k ids, one layer of
a pass each, in the order of computation. The last layer of a prompt's pass is computed for its last token alone.

`RTRACE01` (fitz-tec's llama-router-trace): int32 experts, int32 version 0, then records of int32 token, int32 layer
and a float32 for each expert, the softmax of its logits. Their logarithms are the logits up to a constant, which no
softmax router sees; they are kept, and the experts follow by the router of `--model`, or are the largest k of
`--shape LAYERSxK`.

An offline `moe-trace` writes `.bin` files of records alone: int32 layer, tokens, k and the ids. It clears its context
before each chunk of text and requests every token's output, so that a pass of several tokens is a separate request, all
of it prompt; single tokens are decode steps.

Sources: the packages mbolt 0.1.0 (mbolt/trace.py) and fitz-tec 0.1.1 (fitz_tec/tools/_trace_format.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from moereplay.traces.importers.by_request import Columns, Restarts, joined, renumbering
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.router_logits import Choice, choice_for
from moereplay.traces.importers.rows import Rows, Seen, requests_in, streamed
from moereplay.traces.routers import choice_scores, choose, weigh
from moereplay.traces.schema import MOST_EXPERTS, MOST_LAYERS, TraceError, check_values
from moereplay.traces.texts import counted
from moereplay_importers.by_pass import Joined, by_pass
from moereplay_importers.llama_tables import NOTE, first_prompt, read_flat

MBOLT, FITZ = b"MBLT", b"RTRACE01"
MBOLT_HEAD, FITZ_HEAD = struct.Struct("<4sii"), struct.Struct("<8sii")
RECORD = struct.Struct("<iii")
ROWS = 1 << 14  #: read at a time
RECORDS = 1 << 10  #: read at a time, of mbolt
FORM, LONE = "int32 layer, k, tokens, then tokens * k ids", "int32 layer, tokens, k, then tokens * k ids"
CUT = b"\xff"  #: in place of bytes that are missing: makes sizes that are impossible
LEAST = np.finfo(np.float32).tiny  #: a probability of 0 is taken for this one
SOFTMAX = ("softmax_topk", "topk_softmax", "softmax_groups")


def sniff(path: Path) -> bool:
    """Return True for a file that begins with one of the magic numbers."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        start = stream.read(len(FITZ))
    return start.startswith(MBOLT) or start == FITZ


def read(path: Path, options: Options) -> Foreign:
    """Return requests that follow from passes or tokens. Raises TraceError naming the byte that is wrong."""
    if not sniff(path):
        raise TraceError(f"{path}: invalid first bytes: expected MBLT or RTRACE01, as written by mbolt or fitz-tec")
    with path.open("rb") as stream:
        is_fitz = stream.read(len(FITZ)) == FITZ
    return _of_fitz(path, options) if is_fitz else _of_mbolt(path, options)


def _head(path: Path, form: struct.Struct, version_at: int, version: int) -> int:
    """Return the number of experts. Raises TraceError for a header that is cut off, or of another version."""
    with path.open("rb") as stream:
        head = stream.read(form.size)
    if len(head) < form.size:
        raise TraceError(f"{path}: truncated header; record it again")
    fields = form.unpack(head)
    if fields[version_at] != version:
        raise TraceError(f"{path}: unknown version {fields[version_at]}: expected {version}")
    experts = fields[3 - version_at]
    if not 1 <= experts <= MOST_EXPERTS:
        raise TraceError(f"{path}: invalid number of experts {experts:,}: expected 1 to {MOST_EXPERTS:,}")
    return experts


# ---------------------------------------------------------------- mbolt


def _of_mbolt(path: Path, options: Options) -> Foreign:
    experts = _head(path, MBOLT_HEAD, 1, 1)
    joined = Joined()
    seen = Seen(_mbolt_rows(path, experts, joined))
    shape = Shape(len(seen.layers), seen.k, seen.highest, experts)
    said = [
        "one sequence at a time, not a batch",
        joined.begun(len(seen.ends.last)),
        *renumbering(seen.layers),
        f"k = {seen.k}",
    ]
    notes = [options.assumed(said, shape, "its header states"), *joined.warnings()]
    header = header_for(shape, options, Origin(ROUTER_BINARIES.name, path, [path]), notes)
    found = streamed(path, _mbolt_rows(path, experts), seen)
    return Foreign(header, requests_in(found, header.geometry, options, pruned=True))


def _mbolt_rows(path: Path, experts: int, joined: Joined | None = None) -> Iterator[Rows]:
    for columns in by_pass(_blocks(_records(path, MBOLT_HEAD.size, experts)), found=joined):
        yield Rows(path, **columns)


def _blocks(records: Iterator[Columns]) -> Iterator[Columns]:
    """Yield the rows of some records at a time."""
    while some := list(islice(records, RECORDS)):
        yield joined(some)


def _records(path: Path, start: int, experts: int, tokens_first: bool = False) -> Iterator[Columns]:
    """Yield the rows of one record after the other; `lines` are the numbers of the records."""
    size, at, k, number, form = path.stat().st_size, start, 0, 0, LONE if tokens_first else FORM
    with path.open("rb") as stream:
        stream.seek(at)
        while head := stream.read(RECORD.size):
            layer, *sizes = RECORD.unpack(head.ljust(RECORD.size, CUT))
            width, tokens = reversed(sizes) if tokens_first else sizes
            if not _is_possible(layer, width, tokens, size - at - RECORD.size) or k not in (0, width):
                wrong = f"record {number} at byte {at:,} is truncated or invalid"
                raise TraceError(f"{path}: {wrong}: expected {form}{f', k = {k}' if k else ''}")
            ids = np.frombuffer(stream.read(tokens * width * 4), "<i4").reshape(tokens, width).astype(np.int64)
            check_values(ids, "chosen", f"{path}: record {number} at byte {at:,}")
            if ids.max() >= experts:
                raise TraceError(f"{path}: record {number} has invalid id {ids.max()}: expected less than {experts}")
            full = np.full(tokens, number)
            yield {"lines": full, "run": full, "layer": np.full(tokens, layer), "experts": ids}
            k, number, at = width, number + 1, at + RECORD.size + ids.size * 4
    if not number:
        raise TraceError(f"{path}: no records: expected {form}")


def _is_possible(layer: int, k: int, tokens: int, left: int) -> bool:
    return 0 <= layer < MOST_LAYERS and 0 < k <= MOST_EXPERTS and tokens > 0 and tokens * k * 4 <= left


# ---------------------------------------------------------------- records alone


def sniff_records(path: Path) -> bool:
    """Return True for a .bin file whose first record may be one."""
    if not path.is_file() or path.suffix != ".bin":
        return False
    with path.open("rb") as stream:
        head = stream.read(RECORD.size)
    layer, tokens, k = RECORD.unpack(head.ljust(RECORD.size, CUT))
    return _is_possible(layer, k, tokens, path.stat().st_size - RECORD.size)


def read_records(path: Path, options: Options) -> Foreign:
    """Return a request per chunk. Raises TraceError naming the record that is wrong, or the layer that lacks tokens."""
    seen = Seen(_lone_rows(path))
    shape = seen.shape(options)
    begun = f"{counted(len(seen.ends.last), 'request')}, one per pass of several tokens, because the context is cleared"
    said = ["a record is a layer of one pass", f"{begun} before each", *renumbering(seen.layers), f"k = {shape.k}"]
    first = first_prompt(next(streamed(path, _lone_rows(path), seen)), shape.layers)
    notes = [options.assumed(said, shape), *[NOTE] * read_flat(first, seen.highest + 1)]
    header = header_for(shape, options, Origin(LLAMA_RECORDS.name, path, [path]), notes)
    return Foreign(header, requests_in(streamed(path, _lone_rows(path), seen), header.geometry, options))


def _lone_rows(path: Path) -> Iterator[Rows]:
    for columns in by_pass(_blocks(_records(path, 0, MOST_EXPERTS, tokens_first=True)), alone=True):
        yield Rows(path, **columns)


LLAMA_RECORDS = Importer(
    name="llama_records",
    summary="binary records of an offline moe-trace of llama.cpp, a layer of a chunk each: ids in rank order",
    formats=f"FILE.bin of {LONE}",
    sniff=sniff_records,
    read=read_records,
)


# ---------------------------------------------------------------- fitz-tec


def _of_fitz(path: Path, options: Options) -> Foreign:
    experts = _head(path, FITZ_HEAD, 2, 0)
    if options.geometry is None and options.shape is None:
        raise TraceError(
            f"{path}: the file does not state the experts per token; pass --model NAME, or --shape LAYERSxK"
        )
    choice = choice_for(options, str(path), options.shape[1] if options.shape else None)
    if choice.router.family not in SOFTMAX:
        raise TraceError(
            f"{path}: the file has the softmax of all logits, but router {choice.router.family} needs the logits"
        )
    seen = Seen(_fitz_rows(path, experts, choice))
    shape = Shape(len(seen.layers), seen.k, experts - 1, experts, router=choice.router)
    said = [
        f"{counted(len(seen.ends.last), 'request')}, starting where the token number decreases",
        *renumbering(seen.layers),
    ]
    kept = "logits are the logarithms of the recorded softmax: exact up to a constant per token and layer"
    header = header_for(
        shape,
        options,
        Origin(ROUTER_BINARIES.name, path, [path]),
        [options.assumed(said, shape, "its header states"), choice.note, kept, *options.phase_note()],
    )
    return Foreign(
        header, requests_in(streamed(path, _fitz_rows(path, experts, choice), seen), header.geometry, options)
    )


def _fitz_rows(path: Path, experts: int, choice: Choice) -> Iterator[Rows]:
    record = np.dtype([("token", "<i4"), ("layer", "<i4"), ("shares", "<f4", (experts,))])
    count, rest = divmod(path.stat().st_size - FITZ_HEAD.size, record.itemsize)
    if rest or not count:
        wrong = f"{rest} bytes after record {count:,}" if rest else "no records"
        raise TraceError(
            f"{path}: {wrong}: expected whole records of {record.itemsize:,} bytes; the file may be truncated"
        )
    restarts = Restarts()
    for first in range(0, count, ROWS):
        found = np.fromfile(path, record, min(ROWS, count - first), offset=FITZ_HEAD.size + first * record.itemsize)
        token, layer = found["token"].astype(np.int64), found["layer"].astype(np.int64)
        shares = found["shares"]
        wrong = np.flatnonzero(
            (token < 0) | (layer < 0) | (layer >= MOST_LAYERS) | ~((shares >= 0) & (shares <= 1)).all(1)
        )
        if len(wrong):
            expected = "expected token, layer and probabilities of 0 to 1"
            raise TraceError(f"{path}: invalid record {first + wrong[0]}: {expected}; record it again")
        logits = np.log(np.maximum(shares, LEAST))
        ids = choose(choice_scores(choice.router, logits), choice.k).astype(np.int64)
        numbers = first + np.arange(len(found))
        weights = weigh(choice.router, logits, ids) if choice.weighs else None
        yield Rows(path, numbers, restarts.add(token, layer), token, layer, ids, weights, logits)


ROUTER_BINARIES = Importer(
    name="router_binaries",
    summary="mbolt's MBLT: ids of every pass; fitz-tec's RTRACE01: the softmax over all experts, kept as logits",
    formats="a file that begins with MBLT, or with RTRACE01 (and --model, or --shape LAYERSxK, as it has no k)",
    sniff=sniff,
    read=read,
    flat=True,
)
