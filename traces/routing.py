"""Routing models: the statistics of a model's routing in a few numbers per layer, and routing drawn from them.

An expert's score is a sum of independent parts, and each token takes the k experts of the highest scores:

    popularity   constant for an expert; `hot` scales it above the median and `cold` below
    request      normal, drawn for each request: its topic
    slow, fast   normal, and fade over `slow_tokens` and `fast_tokens` tokens
    kind         normal, drawn for each kind of token; kinds follow a Zipf law, and recur within a request (Simon, 1955)
    noise        Gumbel, of scale 1

Everything is in units of the noise. The same model, shape and seed give the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, model_validator

from moereplay.traces.documents import DocumentError, Name, Text, content, first_fault, from_toml, toml_text
from moereplay.traces.geometry import by_spelling, recognised
from moereplay.traces.schema import Frozen, Geometry, TraceError, shown
from moereplay.traces.texts import hint

FORM = "expected a routing model, as `moereplay routing show miniature` prints one"
KINDS = 3000  #: of tokens
STEP = np.float32(1 / 1024)  #: scores are rounded to multiples, so that ranks do not depend on a processor's last bit
PARTS = ("hot", "cold", "request", "slow", "fast", "kind", "slow_tokens", "fast_tokens")
FOLDER = Path(__file__).with_name("routings")
#: Routing models of no model, of one layer, from the least to the most local. `make study-routing` writes them.
GENERIC = ("generic-low", "generic-middle", "generic-high")
#: One random stream per purpose and layer.
ORDER, TOPIC, SLOW, FAST, KIND, NOISE, TEXT = range(7)

Strengths = tuple[float, ...]


class Error(Frozen):
    """Distance between drawn and real routing, on requests that were not fitted."""

    hit_points: float  #: mean |difference| of hit rates, in percentage points
    misses: float  #: median |ratio of misses - 1|
    requests: int  #: that were judged
    halves: float | None = None  #: hit_points between the real requests that were fitted and these
    halves_misses: float | None = None  #: misses between them


class RoutingModel(Frozen):
    """Statistics of a model's routing. Each of the eight parts has a number per layer (L,)."""

    name: Name
    summary: Text = ""
    source: Text = ""
    model: Name = ""  #: a known model
    trial: bool = False  #: of a test model, which represents no other model
    layers: int = Field(ge=1)
    experts: int = Field(ge=1)
    k: int = Field(ge=1)
    zipf: float = Field(default=1.0, ge=0, le=5)  #: exponent of the law of token kinds
    recur: float = Field(default=0.5, ge=0, lt=1)  #: share of tokens that repeat one of their request
    hot: Strengths
    cold: Strengths
    request: Strengths
    slow: Strengths
    fast: Strengths
    kind: Strengths
    slow_tokens: Strengths
    fast_tokens: Strengths
    #: Mean over layers of the look-ahead's recall@k at depth 1, 2, ...; None where the recording has no look-ahead.
    recall: Strengths | None = None
    error: Error | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RoutingModel:
        for part in PARTS:
            values = getattr(self, part)
            if len(values) != self.layers:
                raise ValueError(f"{part} has {len(values)} numbers: expected {self.layers}, one for each layer")
            least = 1e-3 if part.endswith("tokens") else 0
            if not all(least <= value <= 1e6 for value in values):
                raise ValueError(f"invalid {part}: expected numbers from {least:g} to 1e6")
        if not all(0 <= each <= 1 for each in self.recall or ()):
            raise ValueError("invalid recall: expected numbers from 0 to 1, one for each depth")
        if self.k > self.experts:
            raise ValueError(f"k = {self.k} exceeds experts = {self.experts}")
        return self

    def at_layers(self, places: Sequence[int]) -> RoutingModel:
        """Return the model of some of its layers."""
        parts = {part: tuple(getattr(self, part)[place] for place in places) for part in PARTS}
        return self.model_copy(update={"layers": len(places), "error": None, **parts})

    def scaled(self, layers: int, experts: int, k: int) -> RoutingModel:
        """Return the model at another shape: each layer takes the numbers of the layer at its relative depth."""
        places = [min(at * self.layers // layers, self.layers - 1) for at in range(layers)]
        same = (layers, experts, k) == (self.layers, self.experts, self.k)
        recall = self.recall if same else None  # of another shape nothing is known
        return self.at_layers(places).model_copy(update={"experts": experts, "k": k, "recall": recall})


def draw(model: RoutingModel, lengths: Sequence[int], seed: int = 0) -> np.ndarray:
    """Return ids (T, L, k) int16 of requests of these lengths, the best first."""
    return draws((model,), lengths, seed)[0]


def draws(models: Sequence[RoutingModel], lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Return what `draw` returns for each of these models, which share random numbers: of one shape, zipf and recur."""
    if len({(model.layers, model.experts, model.zipf, model.recur) for model in models}) > 1:
        raise ValueError("routing models differ in layers, experts, zipf or recur")
    text = text_of(models[0], lengths, seed)
    noises = (Noise(models[0], layer, lengths, seed, text) for layer in range(models[0].layers))
    ids = [[ranked(noise.scores(model, at), model.k) for model in models] for at, noise in enumerate(noises)]
    return [np.stack(layers, axis=1) for layers in zip(*ids, strict=True)]


def scores_of(model: RoutingModel, lengths: Sequence[int], seed: int) -> Iterator[np.ndarray]:
    """Yield the scores (T, E) float32 of each layer, multiples of STEP, for requests of these lengths."""
    text = text_of(model, lengths, seed)
    for layer in range(model.layers):
        yield Noise(model, layer, lengths, seed, text).scores(model, layer)


def ranked(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the k experts (T, k) of the highest scores (T, E); of equal ones the lower id."""
    behind = np.arange(scores.shape[1]) - (scores / STEP).astype(np.int64) * scores.shape[1]
    best = np.argpartition(behind, k - 1, axis=1)[:, :k]
    order = np.argsort(np.take_along_axis(behind, best, 1), axis=1)
    return np.take_along_axis(best, order, 1).astype(np.int16)


class Noise:
    """The random numbers of one layer, from which scores of any strengths follow. T tokens, R requests, E experts."""

    def __init__(self, model: RoutingModel, layer: int, lengths: Sequence[int], seed: int, text: np.ndarray) -> None:
        from scipy.special import ndtri  # here: importing scipy takes a moment, which every command would pay

        tokens, experts = sum(lengths), model.experts

        def normal(purpose: int, rows: int) -> np.ndarray:
            return _stream(seed, purpose, layer).standard_normal((rows, experts), np.float32)

        quantiles = ndtri((np.arange(experts) + 0.5) / experts).astype(np.float32)
        self.popular = _stream(seed, ORDER, layer).permuted(quantiles)
        self.topics = normal(TOPIC, len(lengths))
        self.slow, self.fast = normal(SLOW, tokens), normal(FAST, tokens)
        self.kinds, self.text = normal(KIND, KINDS), np.ascontiguousarray(text, np.int64)
        drawn = _stream(seed, NOISE, layer).standard_exponential((tokens, experts), np.float32)
        self.gumbel = -np.log(np.maximum(drawn, np.float32(1e-30)))
        self._lengths, self._starts = lengths, np.cumsum([0, *lengths])

    def scores(self, model: RoutingModel, layer: int) -> np.ndarray:
        """Return the scores (T, E) of the layer under the strengths of the model."""
        hot, cold, request, slow, fast, kind = (np.float32(getattr(model, part)[layer]) for part in PARTS[:6])
        total = self.gumbel + np.where(self.popular > 0, hot, cold) * self.popular
        total += request * np.repeat(self.topics, self._lengths, axis=0) + kind * self.kinds[self.text]
        total += slow * self._faded(self.slow, model.slow_tokens[layer])
        total += fast * self._faded(self.fast, model.fast_tokens[layer])
        return np.rint(total / STEP) * STEP

    def _faded(self, normals: np.ndarray, tokens: float) -> np.ndarray:
        """Return an autoregressive process (T, E) of variance 1 that restarts with each request."""
        keep = exp(-1 / tokens)
        fresh = (1 - keep * keep) ** 0.5
        out = np.empty_like(normals)
        for first, last in zip(self._starts[:-1], self._starts[1:], strict=True):
            rows = normals[first:last] * np.float32(fresh)
            rows[0] /= np.float32(fresh)
            now = np.zeros(rows.shape[1])  # of 64 bits
            for at, row in enumerate(rows, first):
                now *= keep
                now += row
                out[at] = now
        return out


def text_of(model: RoutingModel, lengths: Sequence[int], seed: int) -> np.ndarray:
    """Return the kind of each token (T,): new ones by a Zipf law, others are copies of one before in the request."""
    rng = _stream(seed, TEXT, 0)
    mass = np.arange(1, KINDS + 1) ** -model.zipf
    fresh = rng.choice(KINDS, sum(lengths), p=mass / mass.sum())
    copies, places = rng.random(sum(lengths)) < model.recur, rng.random(sum(lengths))
    first = 0
    for length in lengths:
        for at in range(1, length):
            if copies[first + at]:
                fresh[first + at] = fresh[first + int(places[first + at] * at)]
        first += length
    return fresh


def _stream(seed: int, purpose: int, layer: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, purpose, layer]))


# -- files


@cache  # an answer asks for them once per quantisation
def shipped() -> dict[str, RoutingModel]:
    """Return the routing models that ship and were fitted to a recording, by name."""
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.toml")) if path.stem not in GENERIC}


def named(name: str) -> RoutingModel:
    """Return a routing model by name, or from a file `NAME.toml`. Raises TraceError."""
    path = Path(name)
    if path.suffix == ".toml":
        return read(path)
    if (FOLDER / f"{name}.toml").is_file() and "/" not in name:
        return read(FOLDER / f"{name}.toml")
    if name.lower() in by_spelling():
        raise TraceError(
            f"no routing model of {shown(name)}; `moereplay synthesise --model {shown(name)} --like OTHER` combines "
            f"its sizes with another model's routing: {', '.join(sorted(shipped()))}"
        )
    raise TraceError(f"unknown routing model {shown(name)}; {hint(name, sorted(shipped()))}")


def read(path: Path) -> RoutingModel:
    """Read a routing model. Raises TraceError."""
    try:
        return RoutingModel.model_validate(from_toml(content(path)))
    except OSError as wrong:
        raise TraceError(f"{path}: {wrong.strerror}") from None
    except DocumentError as wrong:
        raise TraceError(f"{path} is not valid TOML: {wrong}; {FORM}") from None
    except ValidationError as wrong:
        raise TraceError(f"{path}: {first_fault(wrong)}; {FORM}") from None


def as_toml(model: RoutingModel) -> str:
    """Return the text of a routing model's file."""
    return "\n".join(_lines(model.model_dump(exclude_none=True))) + "\n"


def _lines(document: dict[str, Any]) -> Iterator[str]:
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    for name, value in document.items():
        if isinstance(value, tuple):
            yield f"{name} = [{', '.join(f'{each:.4g}' for each in value)}]"
        elif isinstance(value, str):
            yield f"{name} = {toml_text(value)}"
        elif isinstance(value, bool):
            if value:
                yield f"{name} = true"
        elif name not in tables:
            yield f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
    for name, table in tables.items():
        yield ""
        yield f"[{name}]"
        yield from _lines(table)


class Candidate(NamedTuple):
    """A routing model at a geometry's shape."""

    routing: RoutingModel
    name: str  #: of the routing model that ships
    own: bool  #: whether the model's own routing was recorded


def routings_for(name: str, geometry: Geometry) -> list[Candidate]:
    """Return the shipped routing models for a model's name and shape: its own, else GENERIC, in this order.

    Its own are those of the known model that `recognised` finds in the name, with the same layers and experts; there
    may be several, from different text, in the order of their names. Of the generic ones the second is the middle,
    and the others are the ends of a range of hit rates, whose error docs/routing.md states.
    """
    known, shape = recognised(name, geometry), (geometry.layers, geometry.experts, geometry.k)
    own = [each for each in shipped().values() if not each.trial and known and each.model == known.name]
    return [Candidate(model.scaled(*shape), model.name, bool(own)) for model in own or map(named, GENERIC)]
