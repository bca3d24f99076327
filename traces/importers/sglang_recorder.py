"""SGLang's expert distribution recorder in mode `per_token`: a torch file per rank, with a record per forward pass.

`{"records": [{"input_ids", "positions", "extend_seq_lens", "forward_mode", "topk_ids_of_layer", ...}, ...],
"last_physical_to_logical_map"}` as python/sglang/srt/eplb/expert_distribution.py of sgl-project/sglang writes it. Ids
are of physical experts, which the map turns into the model's; 8 columns wide whatever k is; neither weights nor ids of
requests are recorded. Ranks of data-parallel attention compute different sequences; other ranks compute the same ones,
which are read once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from moereplay.traces.importers.rows import Survey
from moereplay.traces.importers.sglang_passes import Follower, Pass, Sequence, follow, logical, passes_of
from moereplay.traces.importers.torch_file import Archive, Tensor, mentions, torch_files
from moereplay.traces.schema import MOST_EXPERTS, Request, TraceError

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
        prompt = prompt_tokens(options, len(ids), sequence.prompt)
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
    return Foreign(header, _requests(list(kept.values()), survey, options))


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


def _requests(files: list[Path], survey: Survey, options: Options) -> Iterator[Request]:
    for file in files:
        dump = _dump(file)
        for sequence in dump.following.sequences:
            yield dump.request(sequence, survey, options)


SGLANG_RECORDER = Importer(
    name="sglang_recorder",
    summary="SGLang's expert distribution recorder, mode per_token: ids and tokens of every pass",
    formats="expert_distribution_recorder_TIME_RANK.pt, or a folder of the ranks' files",
    sniff=sniff,
    read=read,
)
