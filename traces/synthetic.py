"""Synthetic traces with chosen statistics: popularity, reuse between neighbouring tokens, look-ahead recall.

Logits are log-popularity plus Gumbel noise, so that the first choice follows the Zipf law exactly and the k choices are
a draw without replacement. Reuse comes from noise that persists: a max-autoregressive process (Davis and Resnick, 1989)
keeps the Gumbel law at any strength. Strengths are found by bisection on measured reuse and recall. The same
configuration gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from moereplay.traces.checkpoints.found import model_of
from moereplay.traces.documents import first_fault
from moereplay.traces.geometry import as_known
from moereplay.traces.routers import choice_scores, choose, weigh
from moereplay.traces.routing import RoutingModel, named, scores_of
from moereplay.traces.schema import (
    Frozen,
    Geometry,
    Header,
    Provenance,
    Request,
    Trace,
    TraceError,
    memory_trace,
    shown,
)
from moereplay.traces.summary import IMPORTER, SYNTHETIC_MODEL

MOST_LOGITS = 1 << 33  #: logits of a trace, which is made in memory
BISECTIONS = 14
TOLERANCE = 0.02
PILOT_TOKENS = 2048
PILOT_CELLS = 512  # experts x layers of a pilot token
RECALL_ROWS = 8192
CYCLE_STEP = 0.125  # between neighbours in a cycle; its multiples are bf16 numbers up to 256 experts

#: One random stream per purpose, so that adding look-ahead does not change the logits.
POPULARITY, NOISE, PILOT, LOOKAHEAD = range(4)


class Synthetic(Frozen):
    """Configuration of a synthetic trace, whose requests have equal lengths.

    `zipf`: every token draws afresh. `markov`: draws persist until `reuse`, P(used at t + 1 | used at t), is met.
    `phases`: either of them, and popularity moves to other experts every `phase_tokens`. `cyclic`: experts take turns,
    so that LRU with room for fewer than all experts of a layer never hits when replayed one token per pass. `fitted`:
    the statistics of a routing model (`traces/routing.py`), which is scaled to the geometry.
    """

    kind: Literal["zipf", "markov", "phases", "cyclic", "fitted"] = "zipf"
    geometry: Geometry
    requests: int = Field(default=1, ge=1)
    prompt_tokens: int = Field(default=32, ge=0)
    decode_tokens: int = Field(default=224, ge=0)
    seed: int = Field(default=0, ge=0)
    exponent: float = Field(
        default=0.5, ge=0, le=100
    )  #: of the Zipf law: 0 is uniform, 0.5 the skew of an OLMoE-like router
    reuse: float | None = Field(default=None, ge=0, le=1)  #: within requests; None draws every token afresh
    phase_tokens: int = Field(default=256, ge=1)
    logits: bool = True  #: False leaves ids and weights only
    recall: tuple[float, ...] = ()  #: look-ahead recall@k at depth 1, 2, ...
    like: RoutingModel | None = None  #: statistics of `fitted` routing
    bf16: bool = True  #: round logits to bf16 values, as models compute them: they compress

    @model_validator(mode="after")
    def _consistent(self) -> Synthetic:
        if self.kind == "markov" and self.reuse is None:
            raise ValueError("missing reuse: markov requires it")
        if self.kind in ("zipf", "cyclic") and self.reuse is not None:
            raise ValueError(f"reuse cannot be combined with kind {self.kind}; it applies to markov and phases")
        if (self.kind == "fitted") != (self.like is not None):
            raise ValueError("kind fitted requires a routing model, and no other kind takes one")
        if self.tokens * self.geometry.layers * self.geometry.experts > MOST_LOGITS:
            size = f"{shown(self.tokens)} tokens of {self.geometry.layers} x {self.geometry.experts} logits"
            raise ValueError(f"{size} are too many for memory; make at most {MOST_LOGITS:,} logits")
        if self.length == 0:
            raise ValueError("a request needs a token: raise prompt_tokens or decode_tokens")
        if self.recall and not self.logits:
            raise ValueError("--recall cannot be combined with --no-logits: look-ahead needs logits")
        if len(self.recall) >= self.geometry.layers:
            raise ValueError(f"{len(self.recall)} look-ahead depths need more than {self.geometry.layers} layers")
        return self

    @property
    def length(self) -> int:
        """Tokens of one request."""
        return self.prompt_tokens + self.decode_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the trace."""
        return self.requests * self.length


def synthesise(config: Synthetic) -> Trace:
    """Make the trace in memory. Raises TraceError if a reuse or recall is out of reach, naming the reachable range."""
    persistence = 0.0 if config.reuse is None else _persistence(config, config.reuse)
    if config.like:
        logits = _like(config, config.like)
    else:
        logits = _cycle(config) if config.kind == "cyclic" else _drawn(config, persistence)
    chosen, weights = _route(config.geometry, logits)
    if config.kind == "cyclic":
        in_turn = (_turn(config)[..., None] + np.arange(config.geometry.k)) % config.geometry.experts
        if np.any(chosen != in_turn):
            why = "the router keeps too few groups for experts to take turns"
            raise TraceError(f"cyclic: {why}; use groups_kept = groups")
    looks = [_lookahead(config, logits, depth) for depth in range(1, len(config.recall) + 1)]
    whole = Request(chosen, config.prompt_tokens, weights, logits if config.logits else None, tuple(looks))
    header = Header(
        geometry=config.geometry,
        provenance=Provenance(
            model=f"{SYNTHETIC_MODEL}{config.kind}",
            dtype="bfloat16" if config.bf16 else "float32",
            source=config.model_dump_json(exclude={"geometry", "like"}),
            synthetic=f"routing model {config.like.name}" if config.like else "",
            importer=IMPORTER,
            seed=config.seed,
        ),
        lookahead_depth=len(looks),
    )
    starts = range(0, config.tokens, config.length)
    return memory_trace(header, [_part(whole, start, config.length) for start in starts])


class Draw(Frozen):
    """How each routing model is drawn."""

    requests: int = Field(ge=1)
    prompt_tokens: int = Field(ge=0)
    decode_tokens: int = Field(ge=1)
    seed: int = Field(ge=0)
    recall: tuple[float, ...] = ()


def drawn_like(name: str, draw: Draw) -> Trace:
    """Draw a trace from a routing model at the sizes of the model it was fitted to. Raises TraceError."""
    like = named(name)
    if not like.model:
        raise TraceError(f"routing model {name} belongs to no known model, whose sizes a drawn trace needs")
    geometry = as_known(model_of(like.model).geometry, like.model)
    try:
        config = Synthetic(kind="fitted", like=like, bf16=False, geometry=geometry, **draw.model_dump())
    except ValidationError as wrong:
        raise TraceError(f"routing model {name}: {first_fault(wrong)}") from None
    return synthesise(config)


def _part(whole: Request, start: int, length: int) -> Request:
    """Return a request of `length` rows as views."""
    rows = slice(start, start + length)
    return replace(
        whole,
        chosen=whole.chosen[rows],
        weights=None if whole.weights is None else whole.weights[rows],
        logits=None if whole.logits is None else whole.logits[rows],
        lookahead=tuple(look[rows] for look in whole.lookahead),
    )


def _route(geometry: Geometry, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.empty((*logits.shape[:2], geometry.k), np.int16)
    weights = np.empty(chosen.shape, np.float32)
    for layer in range(logits.shape[1]):
        rows = logits[:, layer]
        chosen[:, layer] = _choice(geometry, rows)
        weights[:, layer] = weigh(geometry.router, rows, chosen[:, layer])
    return chosen, weights


def _choice(geometry: Geometry, logits: np.ndarray) -> np.ndarray:
    return choose(choice_scores(geometry.router, logits), geometry.k)


# Logits


def _drawn(config: Synthetic, persistence: float) -> np.ndarray:
    """Return the logits (T, L, E): popularity plus noise that restarts with each request."""
    logits = _noise(_stream(config, NOISE), (config.tokens, config.geometry.layers, config.geometry.experts))
    for start in range(0, config.tokens, config.length):
        _persist(logits[start : start + config.length], persistence)
    return _with_popularity(config, logits)


def _like(config: Synthetic, model: RoutingModel) -> np.ndarray:
    """Return the scores (T, L, E) of a routing model at the geometry's shape; rounding to bf16 would create ties."""
    scaled = model.scaled(config.geometry.layers, config.geometry.experts, config.geometry.k)
    return np.stack(list(scores_of(scaled, [config.length] * config.requests, config.seed)), axis=1)


def _with_popularity(config: Synthetic, noise: np.ndarray) -> np.ndarray:
    """Add popularity to the noise in place, phase by phase, and round."""
    span = config.phase_tokens if config.kind == "phases" else len(noise)
    rng = _stream(config, POPULARITY)
    for start in range(0, len(noise), span):
        mass = np.arange(1, config.geometry.experts + 1) ** -config.exponent
        law = np.log(mass / mass.sum()).astype(np.float32)
        noise[start : start + span] += rng.permuted(np.broadcast_to(law, (noise.shape[1], law.size)), axis=-1)
    return _rounded(config, noise)


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard Gumbel noise: minus the log of exponential draws, which single precision may round to 0."""
    return -np.log(np.maximum(rng.standard_exponential(shape, np.float32), np.float32(1e-30)))


def _persist(noise: np.ndarray, persistence: float) -> None:
    """Turn independent Gumbel draws (T, ...) into a chain of the same law, in place: max(old + ln a, new + ln(1-a))."""
    if persistence == 0:
        return
    fade, fresh = np.float32(math.log(persistence)), np.float32(math.log1p(-persistence))
    noise[1:] += fresh
    for token in range(1, len(noise)):
        np.maximum(noise[token - 1] + fade, noise[token], out=noise[token])


def _cycle(config: Synthetic) -> np.ndarray:
    """Return logits (T, L, E) that fall with the distance from the token's first expert, across all requests."""
    experts = config.geometry.experts
    distance = (np.arange(experts) - _turn(config)[..., None]) % experts
    return _rounded(config, (-CYCLE_STEP * distance).astype(np.float32))


def _turn(config: Synthetic) -> np.ndarray:
    """Return the first expert of each token and layer (T, L); layers are shifted, so that none is a copy."""
    return np.arange(config.tokens)[:, None] * config.geometry.k + np.arange(config.geometry.layers)


def _rounded(config: Synthetic, values: np.ndarray) -> np.ndarray:
    """Round the values in place to bf16 (ties to even) if the configuration says so, and return them."""
    if config.bf16:
        bits = values.view(np.uint32)
        bits += ((bits >> 16) & 1) + 0x7FFF
        bits &= 0xFFFF0000
    return values


def _stream(config: Synthetic, *purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([config.seed, *purpose]))


# Calibration


def _persistence(config: Synthetic, reuse: float) -> float:
    """Return the persistence at which a pilot of one long request has the reuse."""
    geometry = config.geometry
    layers = min(geometry.layers, max(1, PILOT_CELLS // geometry.experts))
    draws = _noise(_stream(config, PILOT), (PILOT_TOKENS, layers, geometry.experts))

    def measure(persistence: float) -> float:
        noise = draws.copy()
        _persist(noise, persistence)
        chosen = _choice(geometry, _with_popularity(config, noise))
        return _recall(chosen[:-1], chosen[1:])  # reuse by the next token

    return _solve(measure, 0.0, 1 - 2.0**-16, reuse, f"reuse {reuse} with Zipf exponent {config.exponent}")


def _lookahead(config: Synthetic, logits: np.ndarray, depth: int) -> np.ndarray:
    """Return look-ahead (T, L, E) of layer l + depth from l: true logits with noise that gives the wanted recall@k."""
    blur = _blur(config, logits[:, depth:], depth)
    rng = _stream(config, LOOKAHEAD, depth)
    look = np.zeros_like(logits)
    for layer in range(logits.shape[1] - depth):
        truth = logits[:, layer + depth]
        look[:, layer] = truth + blur * rng.standard_normal(truth.shape, np.float32)
    return _rounded(config, look)


def _blur(config: Synthetic, logits: np.ndarray, depth: int) -> np.float32:
    """Return the standard deviation of the noise at which a sample of the rows (T, L', E) has the recall."""
    every = max(1, logits.shape[0] * logits.shape[1] // RECALL_ROWS)
    rows = logits[::every].reshape(-1, logits.shape[-1])
    noise = _stream(config, PILOT, depth).standard_normal(rows.shape, np.float32)
    truth = _choice(config.geometry, rows)

    def measure(clarity: float) -> float:
        seen = _rounded(config, rows + _deviation(clarity) * noise)
        return _recall(truth, _choice(config.geometry, seen))

    recall = config.recall[depth - 1]
    return _deviation(_solve(measure, 2.0**-12, 1.0, recall, f"look-ahead recall {recall}"))


def _deviation(clarity: float) -> np.float32:
    # clarity 1 means no noise, 0 infinite noise: a bounded range for bisection
    return np.float32(1 / clarity - 1)


def _recall(truth: np.ndarray, seen: np.ndarray) -> float:
    """Return the share of the true ids (..., k) that are among the seen ones."""
    return float((truth[..., :, None] == seen[..., None, :]).any(-1).mean())


def _solve(measure: Callable[[float], float], low: float, high: float, target: float, what: str) -> float:
    """Find the target of a rising measure by bisection. Raises TraceError if it is out of range."""
    least, most = measure(low), measure(high)
    if not least - TOLERANCE <= target <= most + TOLERANCE:
        raise TraceError(f"{what} is out of reach for this geometry: expected {least:.3f} to {most:.3f}")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if measure(middle) < target else (low, middle)
    return (low + high) / 2
