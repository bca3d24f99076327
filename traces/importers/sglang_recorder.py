"""SGLang's expert distribution recorder in mode `per_token`: a torch file per rank, with a record per forward pass.

`{"records": [{"input_ids", "positions", "extend_seq_lens", "forward_mode", "topk_ids_of_layer", ...}, ...],
"last_physical_to_logical_map"}` as python/sglang/srt/eplb/expert_distribution.py of sgl-project/sglang writes it. Ids
are of physical experts, which the map turns into the model's; 8 columns wide whatever k is; neither weights nor ids of
requests are recorded. Ranks of data-parallel attention compute different sequences; other ranks compute the same ones,
which are read once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.rows import Survey
from moereplay.traces.importers.torch_file import Archive, Tensor, mentions, refuse_bloat, torch_files
from moereplay.traces.schema import MOST_EXPERTS, VALUES, Request, TraceError, check_values, shown

MIXED, IDLE = 3, 4  #: of SGLang's ForwardMode: 1 extends, 2 decodes, 3 does both; those above 4 are of speculation
DETAIL = ("topk_ids_of_layer", "input_ids", "positions")


@dataclass(frozen=True)
class Pass:
    """N tokens that were computed together."""

    ids: Tensor  #: (L, N, width) physical experts
    tokens: np.ndarray  #: (N,)
    positions: np.ndarray  #: (N,)
    pieces: tuple[tuple[int, int], ...]  #: first token and last + 1 of each sequence's part
    decodes: bool  #: a token of each sequence: it has no list of lengths
    mixed: bool  #: parts of one token may be decoded ones
    names: tuple[Any, ...] | None  #: of the sequences, if they were recorded


@dataclass
class Sequence:
    """One request as it was computed: parts of passes, in order."""

    parts: list[tuple[int, int, int]] = field(default_factory=list)  #: pass, first token, last + 1
    first: int = 0  #: position of its first token
    next: int = 0  #: position of the token after its last
    prompt: int = 0  #: tokens that passes extended it by
    decoded: bool = False
    last_pass: int = 0

    def extend(self, number: int, start: int, stop: int, decodes: bool) -> None:
        """Append the next tokens."""
        self.parts.append((number, start, stop))
        self.next += stop - start
        self.last_pass = number
        self.decoded |= decodes
        self.prompt += 0 if self.decoded else stop - start


def passes_of(archive: Archive) -> list[Pass]:
    """Return the passes of a file that computed anything.

    Raises TraceError for other modes of recording, and damage.
    """
    root = archive.root
    if isinstance(root, dict) and "logical_count" in root:
        said = "it holds logical_count, the use count of each expert, without tokens"
        fix = "which is a profile, not a trace: record with --expert-distribution-recorder-mode per_token"
        raise TraceError(f"{archive.file}: {said}, {fix}")
    records = root.get("records") if isinstance(root, dict) else None
    if not isinstance(records, list) or not records:
        raise TraceError(f"{archive.file}: no records: expected a dump of SGLang's expert distribution recorder")
    found = [_pass(record, f"{archive.file}: records[{number}]") for number, record in enumerate(records)]
    passes = [each for each in found if each is not None]
    refuse_bloat(archive, [pass_.ids for pass_ in passes])
    return passes


def _pass(record: Any, place: str) -> Pass | None:
    """Return the pass, or None if it has no tokens. Raises TraceError naming an invalid entry."""
    if not isinstance(record, dict) or not set(DETAIL) <= record.keys():
        said = f"{place} has no {DETAIL[0]}: a dump of mode per_pass counts experts without tokens"
        raise TraceError(f"{said}; record with --expert-distribution-recorder-mode per_token")
    mode = record.get("forward_mode")
    if type(mode) is int and mode > IDLE:
        raise TraceError(f"{place} is of forward_mode {mode}: speculative decoding; record without it")
    ids, tokens, positions = record[DETAIL[0]], _column(record, DETAIL[1], place), _column(record, DETAIL[2], place)
    if mode == IDLE or not len(tokens):
        return None
    if not isinstance(ids, Tensor) or len(ids.shape) != 3 or ids.kind not in "iu" or min(ids.shape) < 1:
        raise TraceError(f"{place}: {DETAIL[0]} is not a tensor of ids: expected axes layer, token, rank")
    if not ids.shape[1] == len(tokens) == len(positions):
        lengths = f"{ids.shape[1]} tokens in {DETAIL[0]}, {len(tokens)} input_ids, {len(positions)} positions"
        raise TraceError(f"{place}: {lengths}: expected the same number of each")
    pieces, decodes = _pieces(record, len(tokens), place)
    names = record.get("rids")
    named = isinstance(names, list) and len(names) == len(pieces) and all(isinstance(name, str | int) for name in names)
    return Pass(ids, tokens, positions, pieces, decodes, mode == MIXED, tuple(names) if named else None)


def _column(record: dict[Any, Any], name: str, place: str) -> np.ndarray:
    """Return a list of whole numbers, or a tensor of them, as (N,) int64."""
    values = record[name]
    if isinstance(values, Tensor):
        values = values.array().tolist() if len(values.shape) == 1 else None
    limits = VALUES["token_ids"]
    if not isinstance(values, list) or any(
        type(value) is not int or not limits.least <= value <= limits.most for value in values
    ):
        raise TraceError(f"{place}: {name} is not a list of integers of at least 0; record it again")
    return np.array(values, np.int64)


def _pieces(record: dict[Any, Any], tokens: int, place: str) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Return the part of each sequence, and whether the pass decodes a token of each."""
    lengths = record.get("extend_seq_lens")
    if lengths is None:
        return tuple((at, at + 1) for at in range(tokens)), True
    if isinstance(lengths, Tensor):
        lengths = lengths.array().tolist()
    if not isinstance(lengths, list) or any(type(length) is not int or length < 0 for length in lengths):
        raise TraceError(f"{place}: extend_seq_lens is not a list of lengths; record it again")
    if sum(lengths) != tokens:
        raise TraceError(
            f"{place}: extend_seq_lens sums to {shown(sum(lengths))}: expected {tokens}, the tokens of the pass"
        )
    ends = np.cumsum(lengths).tolist()
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True) if length), False


class Follower:
    """Sequences in the order in which they began."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.doubtful = 0  #: decoded tokens that several sequences waited for
        self.cached = 0  #: sequences that begin after the first position, because their prefix was not computed
        self._open: list[Sequence] = []  #: in the order of the batch
        self._named: dict[Any, Sequence] = {}

    def add(self, number: int, each: Pass, place: str) -> None:
        """Add a pass. Raises TraceError if the positions of a part do not rise by one."""
        taken: set[int] = set()
        for at, (start, stop) in enumerate(each.pieces):
            if (np.diff(each.positions[start:stop]) != 1).any():
                raise TraceError(f"{place}: positions of tokens {start} to {stop - 1} do not rise by one")
            first, name = int(each.positions[start]), each.names[at] if each.names else None
            one = each.decodes or (each.mixed and stop - start == 1)
            if name is None:
                known = self._waiting(first, one, taken)
            else:
                known = named if (named := self._named.get(name)) and named.next == first else None
            sequence = known or self._begun(first, name)
            sequence.extend(number, start, stop, each.decodes or (one and known is not None))
            taken.add(id(sequence))
        if each.decodes:  # close the others, except a prompt whose next chunk is still to come
            newest = max((one.last_pass for one in self._open if not one.decoded), default=-1)
            kept = (one for one in self._open if id(one) in taken or (not one.decoded and one.last_pass == newest))
            self._open = list(kept)

    def _waiting(self, first: int, one: bool, taken: set[int]) -> Sequence | None:
        """Return the open sequence whose next position this is; several tokens only continue a prompt."""
        if not first:
            return None
        fits = [open_ for open_ in self._open if open_.next == first and id(open_) not in taken]
        if not one:
            return next((open_ for open_ in reversed(fits) if not open_.decoded), None)
        self.doubtful += len(fits) > 1
        return fits[0] if fits else None

    def _begun(self, first: int, name: Any) -> Sequence:
        sequence = Sequence(first=first, next=first)
        self.cached += first > 0
        self.sequences.append(sequence)
        self._open.append(sequence)
        if name is not None:
            self._named[name] = sequence
        return sequence


def follow(passes: Iterable[Pass], place: str) -> Follower:
    """Return the sequences of all passes of one rank.

    Raises TraceError naming a pass whose positions are impossible.
    """
    follower = Follower()
    for number, each in enumerate(passes):
        follower.add(number, each, f"{place}: pass {number}")
    return follower


def logical(ids: np.ndarray, mapping: np.ndarray | None, place: str) -> np.ndarray:
    """Return experts (N, L, k) of physical ones (L, N, k), by the map (L, P) of each layer. Raises TraceError."""
    check_values(ids, "chosen", place)
    if mapping is None:
        return ids.transpose(1, 0, 2)
    if ids.shape[0] != mapping.shape[0] or int(ids.max()) >= mapping.shape[1]:
        said = f"{ids.shape[0]} layers and id {ids.max()}, last_physical_to_logical_map {mapping.shape}"
        raise TraceError(f"{place} has {said}: expected ids of that map; shared experts may be fused")
    layer = np.arange(len(mapping))[:, None, None]
    return np.where(ids >= 0, mapping[layer, ids], -1).transpose(1, 0, 2)


# -- Requests of a dump: sequences of all ranks.

MAP = "last_physical_to_logical_map"
ORDER = "requests were not recorded: tokens are assigned by their positions, in batch order"
COUNTS = "logical_count"


@dataclass(frozen=True)
class Dump:
    """The file of one rank."""

    file: Path
    passes: list[Pass]
    mapping: np.ndarray | None  #: (L, P) logical expert of each physical one
    following: Follower

    def ids(self, number: int) -> np.ndarray:
        """Return experts (N, L, width) of a pass. Raises TraceError for ids that the map does not have."""
        place = f"{self.file}: {number}: topk_ids_of_layer"
        return logical(self.passes[number].ids.array(), self.mapping, place)

    def request(self, sequence: Sequence, survey: Survey, options: Options) -> Request:
        """Return one sequence as a request."""
        ids = np.concatenate([self.ids(number)[start:stop] for number, start, stop in sequence.parts])
        tokens = np.concatenate([self.passes[number].tokens[start:stop] for number, start, stop in sequence.parts])
        prompt = options.prompt_of(len(ids), sequence.prompt)
        return Request(survey.kept(ids), prompt, token_ids=tokens)


def sniff(path: Path) -> bool:
    """Return True for torch files, alone or in a folder, the first of which has the recorder's keys."""
    return mentions(path, "records", MAP) or mentions(path, COUNTS, "rank")


def read(path: Path, options: Options) -> Foreign:
    """Return a request per sequence, rank by rank, in the order in which they began.

    Raises TraceError naming the record.
    """
    files = torch_files(path)
    if not files:
        raise TraceError(f"{path}: missing torch files: expected expert_distribution_recorder_TIME_RANK.pt")
    survey, kept, notes, experts = Survey(), dict[str, Path](), [ORDER], None
    for file in files:
        dump = _dump(file)
        digest = _surveyed(dump, survey)
        notes += _notes(dump, kept.get(digest))
        kept.setdefault(digest, file)
        experts = experts if dump.mapping is None else int(dump.mapping.max()) + 1
    shape = Shape(int(survey.routes.sum()), survey.k, survey.highest, experts)
    origin = Origin(SGLANG_RECORDER.name, path, files, decoding="served by SGLang")
    header = header_for(shape, options, origin, [*dict.fromkeys(notes), *survey.notes()])
    again = (_dump(file) for file in kept.values())
    found = (dump.request(one, survey, options) for dump in again for one in dump.following.sequences)
    return Foreign(header, found)


def _dump(file: Path) -> Dump:
    archive = Archive(file)
    passes = passes_of(archive)
    if not passes:
        raise TraceError(f"{file}: no pass computed a token; record while requests are served")
    return Dump(file, passes, _mapping(archive), follow(passes, str(file)))


def _mapping(archive: Archive) -> np.ndarray | None:
    tensor = archive.root.get(MAP)
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor) or len(tensor.shape) != 2 or tensor.kind not in "iu" or min(tensor.shape) < 1:
        raise TraceError(f"{archive.file}: {MAP} is not a table of experts: expected (layers, physical experts)")
    mapping = tensor.array().astype(np.int64)
    if mapping.min() < 0 or mapping.max() >= MOST_EXPERTS:
        raise TraceError(f"{archive.file}: {MAP} has expert {mapping.max()}, or one below 0; record it again")
    return mapping


def _surveyed(dump: Dump, survey: Survey) -> str:
    """Return a hash of the dump's content; it is equal for ranks that computed the same passes."""
    seen = hashlib.blake2b()
    for number, each in enumerate(dump.passes):
        ids = dump.ids(number)
        survey.add(ids, f"{dump.file}: {number}: topk_ids_of_layer")
        for part in (ids, each.tokens, each.positions):
            seen.update(np.ascontiguousarray(part).tobytes())
    return seen.hexdigest()


def _notes(dump: Dump, twin: Path | None) -> Iterator[str]:
    if twin is not None:
        yield f"{dump.file.name} has the same passes as {twin.name}: read once"
        return
    if dump.following.cached:
        count = dump.following.cached
        yield f"{dump.file.name}: {count} requests begin after a cached or unrecorded prefix, which has no rows"
    if dump.following.doubtful:
        count = dump.following.doubtful
        yield f"{dump.file.name}: {count} decoded tokens match several requests; assigned in batch order"
    if dump.mapping is not None and dump.mapping.shape[1] != dump.mapping.max() + 1:
        yield f"copies of experts are mapped to the model's own by {MAP}, as it was at the end"


SGLANG_RECORDER = Importer(
    name="sglang_recorder",
    summary="SGLang's expert distribution recorder, mode per_token: ids and tokens of every pass",
    formats="expert_distribution_recorder_TIME_RANK.pt, or a folder of the ranks' files",
    sniff=sniff,
    read=read,
)
