"""The format of conformance cases (docs/conformance.md), and what is said of a file that is not in it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from moereplay.policies.contract import UNIT
from moereplay.traces.importers.contract import first_fault
from tests.kit.cases import Cell, Prompted

LONGEST = 10**9  #: nanoseconds, bytes and scores: what no sum of a case can overflow
AMOUNT, COUNT = Field(ge=0, le=LONGEST), Field(ge=1, le=1024)
Score = Annotated[float, Field(ge=0, le=LONGEST)]


class CaseError(Exception):
    """A file is not in the format of cases; the message names the case and what is wrong in it."""


class Strict(BaseModel):
    """No field too few or too many, and no text where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Routed(Strict):
    """One token at one layer."""

    chosen: list[Annotated[int, Field(ge=0)]]  #: distinct experts in rank order
    weights: list[Score]  #: of the chosen
    look: dict[str, list[Score]]  #: "1": a score for every expert of the next layer, "2": of the one after it

    def cell(self) -> Cell:
        """The same in UNITs."""
        look = [units(self.look[depth]) for depth in sorted(self.look, key=int)]
        return Cell(self.chosen, units(self.weights), look)

    def fault(self, layer: int, case: Shape) -> str | None:
        """What cannot be replayed, in words."""
        if not 1 <= len(set(self.chosen)) == len(self.chosen) <= case.k or max(self.chosen) >= case.experts:
            return f"chosen is {self.chosen}, expected 1 to {case.k} distinct experts below {case.experts}"
        if len(self.weights) != len(self.chosen):
            return f"{len(self.weights)} weights for {len(self.chosen)} chosen experts"
        ahead = [str(depth) for depth in range(1, min(case.looks_ahead, case.layers - 1 - layer) + 1)]
        if set(self.look) != set(ahead):
            return f"look has {sorted(self.look)}, expected {ahead}, as far as the first token"
        lengths = {len(scores) for scores in self.look.values()}
        return None if lengths <= {case.experts} else f"look has {lengths} scores, expected {case.experts}"


class CaseRequest(Strict):
    """One request."""

    prompt_length: int = AMOUNT
    tokens: list[Annotated[list[Routed], Field(min_length=1)]] = Field(min_length=1)  #: a cell per layer of every token

    def prompted(self) -> Prompted:
        """As replays take it."""
        return Prompted([[routed.cell() for routed in token] for token in self.tokens], self.prompt_length)


class Shape(Strict):
    """Model and requests of a case."""

    name: str
    layers: int = COUNT
    experts: int = COUNT
    k: int = COUNT
    expert_bytes: list[Annotated[int, Field(ge=1, le=LONGEST)]]
    requests: list[CaseRequest] = Field(min_length=1)

    @property
    def looks_ahead(self) -> int:
        """Layers ahead that gates have scores for, as far as layers follow."""
        return len(self.requests[0].tokens[0][0].look)

    @model_validator(mode="after")
    def _replayable(self) -> Self:
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        if len(self.expert_bytes) != self.layers:
            yield f"{len(self.expert_bytes)} expert_bytes for {self.layers} layers"
        yield from self._other_faults()
        for number, request in enumerate(self.requests):
            yield from (f"request {number}: {fault}" for fault in self._faults_of(request))

    def _other_faults(self) -> Iterator[str]:
        """Faults of a kind of cases alone."""
        yield from ()

    def _faults_of(self, request: CaseRequest) -> Iterator[str]:
        if request.prompt_length > len(request.tokens):
            yield f"a prompt of {request.prompt_length} in {len(request.tokens)} tokens"
        for at, token in enumerate(request.tokens):
            if len(token) != self.layers:
                yield f"token {at} has {len(token)} cells for {self.layers} layers"
            for layer, routed in enumerate(token):
                if fault := routed.fault(layer, self):
                    yield f"token {at}, layer {layer}: {fault}"


class Case(Shape):
    """One replay."""

    eviction: str
    prefetch: str
    miss: Literal["fetch"]
    routing: Literal["standard"]
    contract: Literal["atomic", "sequential"]
    scope: Literal["global", "per_layer"]
    capacity_bytes: Annotated[int, AMOUNT] | None
    capacity_bytes_per_layer: Annotated[int, AMOUNT] | list[Annotated[int, AMOUNT]] | None
    start: Literal["cold"]
    reset: str
    passes: str
    prefetch_at: Literal["gate", "after_demand"]
    latency_ns: int = AMOUNT
    bytes_per_ns: Annotated[float, Field(gt=0, le=LONGEST)]
    dense_ns: int = AMOUNT
    expert_ns_per_token: int = AMOUNT
    pass_ns: int = AMOUNT

    @property
    def pools(self) -> tuple[int, ...]:
        """Bytes of the one pool, or of each layer's."""
        given = self.capacity_bytes if self.scope == "global" else self.capacity_bytes_per_layer
        if given is None:
            return ()
        count = 1 if self.scope == "global" else self.layers
        return (given,) * count if isinstance(given, int) else tuple(given)

    def _other_faults(self) -> Iterator[str]:
        largest = [max(self.expert_bytes)] if self.scope == "global" else self.expert_bytes
        if len(self.pools) != len(largest) or any(map(int.__lt__, self.pools, largest)):
            yield f"pools of {list(self.pools)} bytes, expected {len(largest)} of at least {largest}"


Read = TypeVar("Read", bound=Shape)


def read_cases(path: Path, kind: Callable[[Any], type[Read]] = lambda document: Case) -> list[Read]:
    """Return the cases of a file, which may be gzipped, of a kind that each may decide on. Raises CaseError."""
    try:
        text = path.read_bytes()
        documents = TypeAdapter(list[Any]).validate_json(gzip.decompress(text) if path.suffix == ".gz" else text)
    except (OSError, EOFError, zlib.error) as error:
        raise CaseError(f"{path}: {getattr(error, 'strerror', None) or error}; expected a file of cases") from error
    except ValidationError as wrong:
        raise CaseError(f"{path}: {one_line(first_fault(wrong))}; expected a JSON list of cases") from wrong
    return [_case(path, number, document, kind(document)) for number, document in enumerate(documents)]


def _case(path: Path, number: int, document: Any, kind: type[Read]) -> Read:
    try:
        return kind.model_validate(document)
    except ValidationError as wrong:
        name = document.get("name", number) if isinstance(document, dict) else number
        raise CaseError(f"{path}: case {one_line(str(name))}: {one_line(first_fault(wrong))}") from wrong


def one_line(text: str) -> str:
    """Shorten a file's text to one printable line."""
    return " ".join(text.split())[:300]


def units(values: Iterable[float]) -> list[int]:
    """Weights and scores as engines take them."""
    return [round(value * UNIT) for value in values]
