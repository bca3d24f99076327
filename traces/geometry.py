"""Sizes of known models, for traces with ids but no bytes, and how many experts fit in a given memory.

`models.toml` in this folder holds the numbers of each config.json; the formulas are here, so that a wrong number
shows in the total (`KnownModel.params`, tested against the published ones). Biases, norms of queries and keys, and
other tensors below 0.1 % of a layer are left out. `note` lists what was not read from the model's own config.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from moereplay.traces.documents import Cached, Public, Window
from moereplay.traces.schema import (
    LEAST_BITS,
    MOST_BITS,
    MOST_MATRICES,
    MOST_PART,
    Frozen,
    Geometry,
    Router,
    TraceError,
)
from moereplay.traces.texts import whole
from moereplay.traces.weight_formats import CHECKPOINT_BITS, without_format

MOST_PARAMS = 1 << 48
NEAREST = 3  #: similar names that an unknown one is answered with


class Published(Frozen):
    """Storage of experts in the model's published checkpoint, or in the file or quantisation that was asked for."""

    format: str = "BF16"  #: a name of `traces.weight_formats.CHECKPOINT_BITS`, or of the file that was read
    #: Per weight, with scales; that of the format if absent
    bits: float = Field(default_factory=lambda given: CHECKPOINT_BITS[given["format"]], ge=LEAST_BITS, le=MOST_BITS)

    @property
    def nominal(self) -> int:
        """Bits without scales, which name the precision: `Geometry.expert_bits`."""
        return max(1, int(self.bits))


class KnownModel(Public, Cached):
    """A published MoE model: its geometry in the format of its checkpoint, and the source of the numbers."""

    refused_as: ClassVar[type[Exception]] = TraceError

    name: str
    aliases: tuple[str, ...] = ()
    geometry: Geometry
    published: Published
    context: int  #: tokens
    hidden: int  #: width of the residual
    dense_layers: int = 0  #: layers without experts, which come first
    params: int = Field(le=MOST_PARAMS)  #: weights of the whole text model, embedding included
    embedding_params: int = 0  #: weights of an embedding table that is not tied to the head
    table_params: int = Field(default=0, le=MOST_PARAMS)  #: weights of look-up tables: a token reads a few rows of them
    matrices: tuple[int, ...]  #: relative sizes of an expert's matrices in reading order
    kv_bytes: int  #: KV cache per position, while every layer keeps all positions
    kv_windows: tuple[Window, ...] = ()  #: parts of it that stop growing
    kv_bits: int = 16  #: of a number in it
    quant: str = ""  #: the quantisation of its weights, if one was requested
    stored: bool = False  #: the sizes are those of a quantised file
    mtp: int = 0  #: layers that predict further tokens, which are in no size above
    source: str
    note: str = ""
    assumed: str = ""  #: what its files do not say and its sizes rest on

    @property
    def active_params(self) -> int:
        """Number of weights that a token multiplies; it reads single rows of the embedding and of look-up tables."""
        geometry = self.geometry
        each = geometry.k * (geometry.expert_params or 0) + (geometry.dense_params or 0)
        return geometry.layers * each + (geometry.head_params or 0)

    @property
    def weights(self) -> str:
        """Total and active weights in words; those of look-up tables are part of the total."""
        tables = f", {self.table_params / 1e9:.3g} of them in tables of n-grams" if self.table_params else ""
        return f"{self.params / 1e9:.4g} billion{tables}, of which a token uses {self.active_params / 1e9:.3g} billion"

    def row(self) -> dict[str, object]:
        """Return one row of `moereplay models`."""
        geometry = self.geometry
        sizes = {16: geometry.bytes_at(16), **geometry.bytes_by_bits}
        spelled = [f"{bits}-bit {max(each) / 2**20:.4g}" for bits, each in sorted(sizes.items(), reverse=True)]
        return {
            "model": self.name,
            "layers": geometry.layers,
            "experts": geometry.experts,
            "k": geometry.k,
            "shared": geometry.shared_experts,
            "weights": f"{self.params / 1e9:.4g}B",
            "active": f"{self.active_params / 1e9:.3g}B",
            "MiB per expert": ", ".join(spelled),
            "published in": self.published.format,
            "router": geometry.router.family,
            "context": self.context,
        }


SPARSE, HEAVY = 4, 128  #: positions of a compressed row of DeepSeek-V4


class Attention(Frozen):
    """Query, key, value and output projections; `kv_projections` is 1 if the key is also the value.

    `query_rank` and `output_rank` compress queries and outputs, the latter in `output_groups` parts (DeepSeek-V4).
    With `every`, the cache has one compressed row for so many positions, beside the last `window` ones (DeepSeek-V4).
    """

    layers: float | None = None
    heads: int
    kv_heads: int  #: 0 in a layer that uses the keys and values of another
    head_dim: int
    value_dim: int = 0  #: 0: as wide as the keys
    kv_projections: int = 2
    kept: int = 0  #: cached tensors of key and value, if not as many as projections (Gemma 4 norms them separately)
    kept_bits: int = 16  #: of a cached number
    window: int = 0  #: positions that a sliding window keeps; 0 keeps all
    every: int = 0
    index: int = 0  #: width of the key by which an indexer finds a row
    pooled: int = 1  #: positions that share a key of the indexer
    query_rank: int = 0
    output_rank: int = 0
    output_groups: int = 1

    def params(self, hidden: int) -> int:
        """Number of weights of one layer at that hidden size."""
        inner, keys = self.heads * self.head_dim, self.kv_heads * self._width(self.kv_projections)
        values = self.heads * (self.value_dim or self.head_dim)
        queries = (hidden + inner) * self.query_rank if self.query_rank else hidden * inner
        output = (values + hidden * self.output_groups) * self.output_rank if self.output_rank else values * hidden
        return queries + hidden * keys + output

    def _width(self, tensors: int) -> int:
        """Return the width of a key head, and of its value head where there are two tensors."""
        return self.head_dim + (tensors - 1) * (self.value_dim or self.head_dim)

    @property
    def cached(self) -> tuple[Fraction, int]:
        """Bytes that one layer keeps of every position, and of each in its window."""
        row = self.kv_heads * self._width(self.kept or self.kv_projections) * self.kept_bits // 8
        if self.every:
            return Fraction((self.kv_heads * self.head_dim + self.index) * self.kept_bits, 8 * self.every), row
        found = Fraction(self.index * self.kept_bits, 8 * self.pooled)
        return (Fraction(0), row) if self.window else (row + found, 0)


def compressed(kv_heads: int, head_dim: int, window: int, every: int, index: int, **weights: Any) -> Attention:
    """Return DeepSeek-V4's attention: one key is also the value, and an indexer chooses among rows of few positions."""
    return Attention(
        **{"heads": 1, "kept_bits": 32, **weights},
        kv_heads=kv_heads,
        head_dim=head_dim,
        kv_projections=1,
        window=window,
        every=every,
        index=index if 0 < every < HEAVY else 0,
    )


class LatentAttention(Frozen):
    """DeepSeek's multi-head latent attention (arXiv 2405.04434); queries are compressed if `query_rank` is not 0."""

    layers: float | None = None
    heads: int
    query_rank: int = 0
    key_rank: int
    plain: int
    rotary: int
    value: int
    index: int = 0  #: width of the key by which an indexer finds a position (DeepSeek-V3.2)
    pooled: int = 1  #: positions that share a key of the indexer (GLM-5.3-Flash)
    gated: bool = False  #: the output has a gate as wide as the values (Kimi K3)

    def params(self, hidden: int) -> int:
        """Number of weights of one layer at that hidden size."""
        query = self.heads * (self.plain + self.rotary)
        queries = (hidden + query) * self.query_rank if self.query_rank else hidden * query
        keys_values = hidden * (self.key_rank + self.rotary) + self.key_rank * self.heads * (self.plain + self.value)
        return queries + keys_values + (1 + self.gated) * self.heads * self.value * hidden

    @property
    def cached(self) -> tuple[Fraction, int]:
        """Bytes that one layer keeps of every position, and of each in a window."""
        return 2 * (self.key_rank + self.rotary) + Fraction(2 * self.index, self.pooled), 0


class Mamba2(Frozen):
    """Input projection to gate, x, B, C and dt, convolution over x, B and C, output projection (arXiv 2405.21060)."""

    layers: float | None = None
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    def params(self, hidden: int) -> int:
        """Number of weights of one layer at that hidden size."""
        inner = self.heads * self.head_dim
        convolved = inner + 2 * self.groups * self.state
        return hidden * (inner + convolved + self.heads) + convolved * self.kernel + inner * hidden

    @property
    def cached(self) -> tuple[Fraction, int]:
        """Nothing: its state does not grow with positions."""
        return Fraction(0), 0


Mixer = Attention | LatentAttention | Mamba2


def kept_by(mixers: Iterable[tuple[Mixer, float]]) -> tuple[int, tuple[Window, ...]]:
    """Return the KV cache per position of mixers with their numbers of layers, and the parts of windows in it."""
    everywhere, windows = Fraction(0), Counter[int]()
    for mixer, layers in mixers:
        always, last = mixer.cached
        everywhere += always * Fraction(layers)
        if isinstance(mixer, Attention) and last:
            windows[mixer.window] += round(last * layers)
    parts = tuple(Window(positions, size) for positions, size in sorted(windows.items()))
    return ceil(everywhere) + sum(windows.values()), parts


class ModelNumbers(Frozen):
    """One table of models.toml; the head of that file explains the keys."""

    aliases: tuple[str, ...] = ()
    source: str
    note: str = ""
    assumed: str = ""
    layers: int
    experts: int
    k: int
    hidden: int
    width: int
    latent: int = 0
    matrices: int = 3
    read_as: tuple[int, ...] = ()
    shared: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    residual: int = 0
    tables: int = 0
    mixers: tuple[Mixer, ...] = Field(min_length=1)
    vocab: int
    tied: bool = False
    context: int
    mtp: int = 0
    router: Router = Router()
    published: Published = Published()
    bytes_by_bits: dict[int, int | tuple[int, ...]] = Field(default_factory=dict)

    def mlp(self, width: int) -> int:
        """Return the parameters of an MLP of that width."""
        return self.matrices * self.hidden * width

    def expert(self) -> int:
        """Return the parameters of a routed expert, which may read a narrower projection of the residual."""
        return self.matrices * (self.latent or self.hidden) * self.width

    def mixer(self) -> int:
        """Return the parameters of attention per layer, on average if kinds alternate."""
        total = sum(mixer.params(self.hidden) * layers for mixer, layers in self._counted())
        return int(total // (self.layers + self.dense_layers))

    def cached(self) -> tuple[int, tuple[Window, ...]]:
        """Return the KV cache of all layers per position, and the parts of it that stop growing."""
        return kept_by(self._counted())

    def _counted(self) -> list[tuple[Mixer, float]]:
        every = self.layers + self.dense_layers
        return [(mixer, every if mixer.layers is None else mixer.layers) for mixer in self.mixers]

    def dense(self) -> int:
        """Return the always-resident parameters per MoE layer: attention, norms, residual, gate and shared experts."""
        routing = self.hidden * (self.experts + 2 * self.latent)
        return self.mixer() + 2 * self.hidden + self.residual + routing + self.mlp(self.shared_width)

    def head(self) -> int:
        """Return the parameters outside the MoE layers that every token uses: the head and the dense layers."""
        return self.vocab * self.hidden + self.dense_layers * (
            self.mixer() + 2 * self.hidden + self.residual + self.mlp(self.dense_width)
        )

    def total(self) -> int:
        """Return the parameters of the whole model."""
        outside = self.head() + self.embedding() + self.tables
        return self.layers * (self.experts * self.expert() + self.dense()) + outside

    def embedding(self) -> int:
        """Return the parameters of an embedding table that is not tied to the head."""
        return 0 if self.tied else self.vocab * self.hidden

    def geometry(self) -> Geometry:
        """Return the geometry with experts in the published format."""
        weights, stored = self.expert(), self.published.nominal
        formats = {bits: self._per_layer(size) for bits, size in self.bytes_by_bits.items()}
        published = self._per_layer(ceil(weights * Fraction(self.published.bits) / 8))
        if stored != 16:
            formats |= {16: self._per_layer(2 * weights), stored: published}
        return Geometry(
            layers=self.layers,
            experts=self.experts,
            k=self.k,
            expert_bytes=published,
            expert_bits=stored,
            bytes_by_bits=formats,
            expert_params=weights,
            dense_params=self.dense(),
            head_params=self.head(),
            shared_experts=self.shared,
            router=self.router,
        )

    def _per_layer(self, size: int | tuple[int, ...]) -> tuple[int, ...]:
        return (size,) * self.layers if isinstance(size, int) else size


def known(name: str) -> KnownModel:
    """Return the model of a name, alias or Hugging Face id, ignoring case. Raises TraceError naming similar ones."""
    if name.lower() in by_spelling():
        return by_spelling()[name.lower()]
    near = dict.fromkeys(
        by_spelling()[each].name for each in difflib.get_close_matches(name.lower(), by_spelling(), n=9)
    )
    others = f"nearest names, which are other models: {', '.join(list(near)[:NEAREST])}; " if near else ""
    raise TraceError(f"unknown model {name!r}; {others}`moereplay models` lists known models")


def as_known(geometry: Geometry, name: str) -> Geometry:
    """Return the geometry with missing KV bytes and weight format filled in, if `name` is a known model.

    The weight format is that of the checkpoint if the experts are stored at its bits.
    """
    model = by_spelling().get(name.lower())
    if model is None:
        return geometry
    named = model.published.format if geometry.expert_bits == model.published.nominal else ""
    return _with_kv(geometry, model).model_copy(update={"weight_format": geometry.weight_format or named})


def _with_kv(geometry: Geometry, model: KnownModel) -> Geometry:
    """Return the geometry with the model's KV cache, unless it states another one."""
    if geometry.kv_bytes not in (0, model.kv_bytes):
        return geometry
    return geometry.model_copy(update={"kv_bytes": model.kv_bytes, "kv_windows": model.kv_windows})


def with_hidden(geometry: Geometry, name: str) -> Geometry:
    """Return the geometry with the hidden size of the known model of that name, if it lacks one."""
    like = None if geometry.hidden else recognised(name, geometry)
    return geometry.model_copy(update={"hidden": like.hidden}) if like else geometry


def matrices_of(text: str) -> tuple[int, ...]:
    """Return relative sizes of matrices from a text such as `2,1`. Raises ValueError."""
    sizes = tuple(whole(part) or 0 for part in text.split(","))
    if len(sizes) > MOST_MATRICES or not all(0 < size <= MOST_PART for size in sizes):
        raise ValueError(
            f"invalid --matrices {text[:40]!r}: expected up to {MOST_MATRICES} whole numbers from 1 to {MOST_PART:,}, "
            "such as 2,1 where gate and up are one matrix"
        )
    return sizes


def with_matrices(geometry: Geometry, name: str) -> Geometry:
    """Return the geometry with `matrices` of the known model of that name, if it lacks them."""
    like = None if geometry.matrices else recognised(name, geometry)
    return geometry.model_copy(update={"matrices": like.matrices}) if like else geometry


def recognised(name: str, geometry: Geometry | None = None) -> KnownModel | None:
    """Return the known model that the name of a model or weight file refers to, or None.

    `google_gemma-4-26B-A4B-it-Q4_K_M.gguf` is gemma-4-26b-a4b: the ending, the number of a part, the weight format and
    the publisher before `_` are ignored. With `geometry`, layers and experts must agree.
    """
    file = name.replace("\\", "/").rpartition("/")[2]
    stem = re.sub(r"(-\d{5}-of-\d{5})?(\.gguf|\.safetensors)?$", "", file, flags=re.IGNORECASE)
    plain = without_format(stem)
    for spelling in (name, stem, plain, plain.partition("_")[2]):
        model = by_spelling().get(spelling.lower())
        agrees = geometry is None or (model and _shape(model.geometry) == _shape(geometry))
        if model and agrees:
            return model
    return None


def _shape(geometry: Geometry) -> tuple[int, int]:
    return geometry.layers, geometry.experts


def _spellings(model: KnownModel) -> set[str]:
    full = {spelling.lower() for spelling in (model.name, *model.aliases)}
    return full | {spelling.rpartition("/")[2] for spelling in full}


def _read(path: Path) -> dict[str, KnownModel]:
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: known_model(name, ModelNumbers.model_validate(table)) for name, table in tables.items()}


def known_model(name: str, numbers: ModelNumbers) -> KnownModel:
    """Return the model of these numbers, with experts in the published format."""
    kv_bytes, kv_windows = numbers.cached()
    return KnownModel(
        name=name,
        aliases=numbers.aliases,
        geometry=numbers.geometry(),
        published=numbers.published,
        context=numbers.context,
        hidden=numbers.hidden,
        dense_layers=numbers.dense_layers,
        params=numbers.total(),
        embedding_params=numbers.embedding(),
        table_params=numbers.tables,
        matrices=numbers.read_as or (1,) * numbers.matrices,
        kv_bytes=kv_bytes,
        kv_windows=kv_windows,
        kv_bits=max((mixer.kept_bits for mixer in numbers.mixers if isinstance(mixer, Attention)), default=16),
        mtp=numbers.mtp,
        source=numbers.source,
        note=numbers.note,
        assumed=numbers.assumed,
    )


@cache
def known_models() -> dict[str, KnownModel]:
    """Return the known models by name. They are read when first needed: a replay needs none."""
    return _read(Path(__file__).with_name("models.toml"))


@cache
def by_spelling() -> dict[str, KnownModel]:
    """Return the known models by each spelling of their names, in lower case."""
    return {spelling: model for model in known_models().values() for spelling in _spellings(model)}


# -- Static placement: experts that a memory holds in engines that do not move them while they run


def experts_per_layer(geometry: Geometry, cache_bytes: int) -> int:
    """Return how many experts of each layer are held if every layer gets the same number."""
    return min(cache_bytes * geometry.experts // geometry.total_bytes, geometry.experts)


def mean_experts(geometry: Geometry, cache_bytes: int) -> int:
    """Return how many experts of mean size fit, at most all of them."""
    everything = geometry.layers * geometry.experts
    return min(cache_bytes * everything // geometry.total_bytes, everything)


def last_layers(geometry: Geometry, cache_bytes: int) -> int:
    """Return how many layers, from the last one backwards, have all their experts held."""
    needed = np.cumsum(geometry.layer_bytes[::-1])
    return int(np.searchsorted(needed, cache_bytes, "right"))


def held_layers(geometry: Geometry, cache_bytes: int, order: Iterable[int]) -> list[int]:
    """Return the layers whose experts are all held, ascending: layers of `order` are taken while they fit."""
    held, left = [], cache_bytes
    for layer in order:
        size = geometry.layer_bytes[layer]
        if size <= left:
            held.append(layer)
            left -= size
    return sorted(held)


def layers_by_worth(geometry: Geometry, scores: np.ndarray) -> list[int]:
    """Return all layers by `scores` (L, E) per byte, descending; ties favour later layers, as `--n-cpu-moe` does."""
    worth = scores.sum(axis=1) / np.array(geometry.mean_bytes)
    return sorted(range(geometry.layers), key=lambda layer: (-worth[layer], -layer))
