"""`moe-cache-lab.routing-jsonl`, versions 1 and 2: a line that describes the run, then a line per token and layer.

Version 1: phase prompt or generated; `num_experts` and `experts_per_token` may be on the first line. Version 2 has
the stages encoder and decoder, each with its own sizes, layers and tokens; so only the
decoder is read, or the encoder if there is no decoder. A selection that a full expert rejected is
"unassigned": -1 throughout. Probabilities are the gate weights; they are left out unless every selection has them.
Layers are the model's own numbers. A file is one request, and may be packed with gzip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from moereplay.traces.documents import first_fault
from moereplay.traces.importers.by_request import renumbering
from moereplay.traces.importers.contract import ASSUMED, Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.rows import Rows, Seen, emptied, fits, requests_in, streamed
from moereplay.traces.importers.table import COUNT, LAYER, ids_below, json_lines
from moereplay.traces.importers.text import blocks, parse_json, start_of, suffix_of
from moereplay.traces.schema import MOST_EXPERTS, VALUES, TraceError, shown

FORMAT = "moe-cache-lab.routing-jsonl"
START = re.compile(rb'\s*\{.*"format"\s*:\s*"' + re.escape(FORMAT).encode() + rb'"', re.DOTALL)
LONGEST_START = 1 << 16  #: bytes: the run's texts may precede the format
PHASES = {"prompt": 0, "generated": 1, "source": 0, "decoder_prompt": 0, "decoder_generated": 1}
ROWS = 1 << 14  #: read at a time
SELECTION = "routing_selection"
ENCODER, DECODER = "encoder", "decoder"


class Stage(BaseModel):
    """Sizes of one stack of layers."""

    routing_stage: str = DECODER
    num_experts: int | None = Field(default=None, ge=1, le=MOST_EXPERTS)
    assigned_experts_per_token: int | None = Field(default=None, ge=1, le=MOST_EXPERTS)


class Metadata(BaseModel):
    """The keys of the first line that are used; others are ignored."""

    format_version: int = Field(ge=1, le=2)
    model_id: str
    model_revision: str | None = None
    num_experts: int | None = Field(default=None, ge=1, le=MOST_EXPERTS)
    experts_per_token: int | None = Field(default=None, ge=1, le=MOST_EXPERTS)
    routing_stages: list[Stage] = Field(default_factory=list)

    def stage(self) -> Stage:
        """Return the one that is read."""
        if self.format_version == 1:
            return Stage(num_experts=self.num_experts, assigned_experts_per_token=self.experts_per_token)
        by_name = {stage.routing_stage: stage for stage in self.routing_stages}
        return by_name.get(DECODER) or by_name.get(ENCODER) or Stage()


@dataclass(frozen=True)
class Selection:
    """One token at one layer."""

    line: int
    phase: int
    token: int
    layer: int
    experts: list[int]
    weights: list[float]
    token_id: int | None


def sniff(path: Path) -> bool:
    """Return True for JSON lines whose first names the format."""
    return (
        path.is_file()
        and suffix_of(path) == ".jsonl"
        and bool(START.match(start_of(path, LONGEST_START).split(b"\n", 1)[0]))
    )


def read(path: Path, options: Options) -> Foreign:
    """Return one request. Raises TraceError naming the line that is not as documented."""
    if not sniff(path):
        raise TraceError(f"{path}: invalid line 1: expected the format {FORMAT}")
    metadata = _metadata(path)
    stage = metadata.stage()
    said = _Said()
    held = [rows.narrowed() for rows in _pieces(path, metadata, stage, said)]  # all of one request
    if not held:
        raise TraceError(f"{path}: missing selections of the {stage.routing_stage}: expected at least one")
    held = [replace(rows, **said.lacking()) for rows in held]
    seen = Seen(held, keep=False)
    notes = [f"{ASSUMED}{each}" for each in renumbering(seen.layers)] + said.notes()
    shape = Shape(len(seen.layers), seen.k, seen.highest, stage.num_experts)
    origin = Origin(
        CACHE_LAB.name, path, [path], model=shown(metadata.model_id), revision=shown(metadata.model_revision or "")
    )
    header = header_for(shape, options, origin, notes)
    return Foreign(header, requests_in(streamed(path, emptied(held), seen), header.geometry, options))


def _metadata(path: Path) -> Metadata:
    _, lines = next(blocks(path))
    try:
        return Metadata.model_validate(parse_json(lines[0], f"{path} line 1"))
    except ValidationError as wrong:
        raise TraceError(f"{path} line 1: {first_fault(wrong)} ({FORMAT} version 1 or 2)") from wrong


@dataclass
class _Said:
    """Selections of which something is said: how many were read, are another stage's, or lack something."""

    read: int = 0
    others: int = 0
    unassigned: int = 0
    weightless: int = 0
    nameless: int = 0

    def count(self, found: Selection) -> None:
        """Count a selection of the stage."""
        self.read += 1
        self.unassigned += not found.experts
        self.weightless += bool(found.experts and not found.weights)
        self.nameless += found.token_id is None

    def lacking(self) -> dict[str, None]:
        """Return the arrays that not every selection has."""
        return {name: None for name, lack in (("weights", self.weightless), ("token_ids", self.nameless)) if lack}

    def notes(self) -> list[str]:
        """Return notes, the most important first."""
        full = f"{self.unassigned:,} of {self.read:,} selections unassigned because their expert was full: stored as -1"
        weights = "weights left out: not every selection has its probabilities"
        others = f"{self.others:,} selections of the {ENCODER} left out: its tokens and layers are not the {DECODER}'s"
        said = ((full, self.unassigned), (weights, self.weightless), (others, self.others))
        return [note for note, count in said if count]


def _pieces(path: Path, metadata: Metadata, stage: Stage, said: _Said) -> Iterator[Rows]:
    """Yield the rows of the stage's selections in the order of the file, some at a time."""
    selections = _selections(path, metadata, stage, said)
    while found := list(islice(selections, ROWS)):
        yield _rows(path, found, stage)


def _selections(path: Path, metadata: Metadata, stage: Stage, said: _Said) -> Iterator[Selection]:
    """Return the selections of the stage."""
    for at, place, record in json_lines(path, skip=1, ended=True):
        if record.get("record_type") != SELECTION:
            raise TraceError(f"{place}: invalid record_type {shown(record.get('record_type'))}: expected {SELECTION}")
        if metadata.format_version == 2 and record.get("routing_stage") not in (ENCODER, DECODER):
            wrong = shown(record.get("routing_stage"))
            raise TraceError(f"{place}: invalid routing_stage {wrong}: expected {ENCODER} or {DECODER}")
        selection = _selection(at, record, stage, place)
        if record.get("routing_stage", stage.routing_stage) == stage.routing_stage:
            said.count(selection)
            yield selection
        else:
            said.others += 1


def _selection(at: int, record: dict[str, Any], stage: Stage, place: str) -> Selection:
    """Raises TraceError naming the key whose value is none of the format."""
    phase = record.get("phase")
    if not isinstance(phase, str) or phase not in PHASES:
        raise TraceError(f"{place}: invalid phase {shown(phase)}: expected one of {', '.join(PHASES)}")
    for key, allowed in (("token_position", COUNT), ("layer", LAYER)):
        if not fits(record.get(key), allowed):
            raise TraceError(f"{place}: invalid {key} {shown(record.get(key))}: expected {allowed.expected}")
    experts, weights = record.get("selected_experts"), record.get("selected_probabilities", [])
    unassigned = record.get("assignment_state") == "unassigned"
    if not isinstance(experts, list) or not isinstance(weights, list) or bool(experts) == unassigned:
        expected = "lists: empty if unassigned, otherwise non-empty"
        raise TraceError(f"{place}: invalid selected_experts {shown(experts)}: expected {expected}")
    own = stage.routing_stage == record.get("routing_stage", stage.routing_stage)
    _check_experts(experts, weights, stage if own else Stage(), place)
    token_id = record.get("token_id")
    if token_id is not None and not fits(token_id, VALUES["token_ids"]):
        raise TraceError(f"{place}: invalid token_id {shown(token_id)}: expected {VALUES['token_ids'].expected}")
    return Selection(at, PHASES[phase], record["token_position"], record["layer"], experts, weights, token_id)


def _check_experts(experts: list[Any], weights: list[Any], stage: Stage, place: str) -> None:
    allowed = ids_below(stage.num_experts)._replace(least=0)
    for name, values, each in (("selected_experts", experts, allowed), ("probabilities", weights, VALUES["weights"])):
        if wrong := [value for value in values if not fits(value, each)]:
            raise TraceError(f"{place}: invalid {name} {shown(wrong[0])}: expected {each.expected}")
    width = stage.assigned_experts_per_token or len(experts)
    if (experts and len(experts) != width) or (weights and len(weights) != len(experts)):
        raise TraceError(f"{place}: {len(experts)} experts and {len(weights)} probabilities: expected {width} of each")


def _rows(path: Path, found: list[Selection], stage: Stage) -> Rows:
    """Return the rows, with 0 for a weight or a token id that a selection lacks."""
    k = stage.assigned_experts_per_token or max(len(each.experts) for each in found) or 1
    return Rows(
        path,
        np.array([each.line for each in found]),
        request=np.zeros(len(found), np.int64),
        token=np.array([each.token for each in found]),
        layer=np.array([each.layer for each in found]),
        experts=np.array([each.experts + [-1] * (k - len(each.experts)) for each in found]),
        weights=np.array([each.weights + [0.0] * (k - len(each.weights)) for each in found]),
        phase=np.array([each.phase for each in found]),
        token_ids=np.array([each.token_id or 0 for each in found]),
    )


CACHE_LAB = Importer(
    name="cache_lab",
    summary="moe-cache-lab.routing-jsonl 1 and 2: ids, probabilities, token ids, prompt and decode steps",
    formats=f"FILE.jsonl whose first line names {FORMAT}",
    sniff=sniff,
    read=read,
)
