"""Sizes of a model from the names, shapes and bytes of its tensors: exact, also where precisions are mixed.

A tensor belongs to a routed expert, to the rest of a layer, or to no layer. Layers that predict further tokens (MTP)
and towers of other modalities are left out: a token of text reads neither.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moereplay.traces.checkpoints.gguf import TYPES, Gguf
from moereplay.traces.documents import first_fault
from moereplay.traces.geometry import (
    Attention,
    KnownModel,
    LatentAttention,
    Mixer,
    ModelNumbers,
    Published,
    compressed,
    kept_by,
    known_model,
)
from moereplay.traces.schema import MOST_BYTES, MOST_EXPERTS, MOST_LAYERS, Geometry, Router, TraceError, shown
from moereplay.traces.weight_formats import BITS_PER_WEIGHT

MOST_HEADS = 1 << 16


class Stored(NamedTuple):
    """Stored bytes of a tensor, and its number of weights (0 if packed in a way that hides it)."""

    size: int
    weights: int = 0
    format: str = ""


class Sizes(NamedTuple):
    """Bytes of a model's text part. L: layers with routed experts, ascending."""

    experts: tuple[int, ...]  #: (L,) all experts of the layer
    single: tuple[Mapping[int, int], ...]  #: (L,) tensors of one expert each: their bytes by expert
    expert_weights: tuple[int, ...]  #: (L,) their weights, 0 if unknown
    dense: tuple[int, ...]  #: (L,) the rest of the layer
    head: int  #: read by every token outside of these layers: dense layers, final norm and head
    embedding: int  #: an embedding table separate from the head, of which a token reads one row
    dense_weights: int  #: in these layers
    head_weights: int
    embedding_weights: int
    table_weights: int  #: of tables that n-grams look up; their bytes are in no size
    matrices: tuple[int, ...]  #: relative sizes of an expert's matrices in the order of reading; empty if unknown
    format: str  #: in which most experts' bytes are stored
    dense_layers: int
    left_out: int  #: bytes of other modalities and of MTP layers

    @property
    def weights(self) -> int:
        """Weights of the text part."""
        outside = self.head_weights + self.embedding_weights + self.table_weights
        return sum(self.expert_weights) + self.dense_weights + outside

    @property
    def dense_total(self) -> int:
        """Bytes of all weights outside the routed experts."""
        return sum(self.dense) + self.head + self.embedding


LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|blk|h|layer)\.(\d{1,5})\.")
#: A tensor of routed experts; shared ones are spelled `shared_experts` or `shared_expert`, and `_shexp` in GGUF.
ROUTED = re.compile(r"\.experts\.|_exps\.|_exps$|block_sparse_moe\.(?:input|output)_linear\.")
SINGLE = re.compile(r"\.experts\.(\d{1,5})\.")
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|token_embd|wte|word_embeddings|embedding|embeddings)\.")
HEAD = re.compile(r"^(?:language_model\.)?(?:lm_head|output|model\.lm_head)\.")
TABLE = re.compile(r"per_layer_token_embd\.|ngram_embedding|\.engram\.embed\.")
ELSEWHERE = re.compile(r"^(?:model\.)?(?:visual|vision|audio|multi_modal|mm[._]|image|v\.|mtp\.)|\.mtp\.|\.nextn\.")
THIRDS = (1, 1, 1)  #: gate, up and down
#: Parts of an expert, in the order in which engines read them.
PARTS = (("gate_up", "gate_up_proj", "input_linear"), ("gate", "gate_proj", "w1"), ("up", "up_proj", "w3"))
DOWN = ("down", "down_proj", "w2", "output_linear")


def sizes_of(tensors: Mapping[str, Stored], name: str, layers: int | None = None) -> Sizes:
    """Return the sizes of a model from its tensors; layers from `layers` on predict further tokens.

    Raises TraceError if no tensor belongs to a routed expert.
    """
    experts: dict[int, int] = defaultdict(int)
    single: dict[int, Counter[int]] = defaultdict(Counter)
    weights: dict[int, int] = defaultdict(int)
    dense: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    outside, embedding, parts, formats = [0, 0], [0, 0], Counter[str](), Counter[str]()
    head, left_out, tables = False, 0, [0, 0]
    for tensor, stored in tensors.items():
        found = LAYER.search(tensor)
        layer = int(found[1]) if found else None
        if ELSEWHERE.search(tensor) or (layer is not None and layers is not None and layer >= layers):
            left_out += stored.size
        elif TABLE.search(tensor):
            _add(tables, stored)
        elif layer is None:
            is_table = EMBEDDING.search(tensor) is not None
            head |= HEAD.search(tensor) is not None
            _add(embedding if is_table else outside, stored)
        elif ROUTED.search(tensor):
            experts[layer] += stored.size
            if one := SINGLE.search(tensor):
                single[layer][int(one[1])] += stored.size
            weights[layer] += stored.weights
            parts[_part(tensor)] += stored.size
            formats[stored.format] += stored.size
        else:
            _add(dense[layer], stored)
    if not experts:
        raise TraceError(f"{name}: missing tensors of routed experts: expected a Mixture of Experts")
    if not head:  # the table is the head, which every token reads whole
        outside, embedding = [outside[0] + embedding[0], outside[1] + embedding[1]], [0, 0]
    mixtures, plain = sorted(experts), [layer for layer in dense if layer not in experts]
    for layer in plain:
        outside = [outside[0] + dense[layer][0], outside[1] + dense[layer][1]]
    return Sizes(
        experts=tuple(experts[layer] for layer in mixtures),
        single=tuple(single[layer] for layer in mixtures),
        expert_weights=tuple(weights[layer] for layer in mixtures),
        dense=tuple(dense[layer][0] for layer in mixtures),
        head=outside[0],
        embedding=embedding[0],
        dense_weights=sum(dense[layer][1] for layer in mixtures),
        head_weights=outside[1],
        embedding_weights=embedding[1],
        table_weights=tables[1],
        matrices=_matrices(parts),
        format=formats.most_common(1)[0][0],
        dense_layers=len(plain),
        left_out=left_out,
    )


def _add(total: list[int], stored: Stored) -> None:
    total[0] += stored.size
    total[1] += stored.weights


def _part(tensor: str) -> str:
    """Return which matrix of an expert a tensor is: gate_up, gate, up, down, or empty."""
    words = re.split(r"[._](?=exps)|\.", tensor.replace("ffn_", ""))
    for spellings in (*PARTS, DOWN):
        if any(word.startswith(spellings[0]) if word.endswith("_proj") else word in spellings for word in words):
            if spellings is PARTS[1] and any("gate_up" in word for word in words):
                continue
            return spellings[0]
    return ""


def _matrices(parts: Counter[str]) -> tuple[int, ...]:
    """Return the matrices' relative sizes, 2 and 1 where gate and up are one; empty if a part is unknown."""
    if parts["gate_up"] and parts["down"]:
        return (2, 1)
    if parts["gate"] and parts["up"] and parts["down"]:
        return (1, 1, 1)
    return (1, 1) if parts["up"] and parts["down"] else ()


# -- a model of a config.json and its tensors


def with_sizes(model: KnownModel, sizes: Sizes, name: str) -> KnownModel:
    """Return the model with bytes as its files store them. Raises TraceError if they contradict its config."""
    geometry = model.geometry
    if len(sizes.experts) != geometry.layers:
        raise TraceError(
            f"{name}: tensors have routed experts in {len(sizes.experts)} layers, config.json in {geometry.layers}"
        )
    stored = _stored(geometry, sizes, name)
    form = stored.weight_format or model.published.format  # packed weights have a dtype of whole bytes
    published = Published(format=form, bits=stored.expert_bits)
    return model.model_copy(
        update={"geometry": stored, "published": published, "matrices": sizes.matrices or model.matrices}
    )


def _stored(geometry: Geometry, sizes: Sizes, name: str) -> Geometry:
    """Return the geometry with the bytes of the tensors. Raises TraceError."""
    each = [_each(layer, geometry.experts, sizes, name) for layer in range(geometry.layers)]
    params = geometry.expert_params or sum(sizes.expert_weights) // (geometry.experts * geometry.layers)
    if not params or not all(map(min, each)):
        raise TraceError(f"{name}: the experts' tensors have no bytes, or are packed so that their weights are unknown")
    stored = {
        "expert_bits": round(8 * sum(sizes.experts) / (params * geometry.layers * geometry.experts), 4),
        "bytes_by_bits": {},
        "dense_layer_bytes": sizes.dense if all(sizes.dense) else (),
        "dense_bytes": sizes.dense_total,
        "head_bytes": sizes.head if all(sizes.dense) else None,
        "dense_stated": True,
        "weight_format": sizes.format if sizes.format in BITS_PER_WEIGHT else "",
        "matrices": sizes.matrices,
    }
    try:
        return geometry.model_copy(update=stored).sized(each)
    except TraceError as wrong:
        raise TraceError(f"{name}: {wrong}") from None


def _each(layer: int, experts: int, sizes: Sizes, name: str) -> list[int]:
    """Return the bytes of every expert of a layer: its own tensors, and its part of stacks. Raises TraceError."""
    single = sizes.single[layer]
    if single and set(single) != set(range(experts)):
        raise TraceError(
            f"{name}: MoE layer {layer} has tensors of {len(single)} experts: expected 0 to {experts - 1}; a file may "
            "be missing, or layers have different numbers of experts, which a trace cannot have"
        )
    stacked, rest = divmod(sizes.experts[layer] - sum(single.values()), experts)
    if rest:
        raise TraceError(f"{name}: the experts' bytes are not a multiple of {experts} experts; a file may be missing")
    return [single.get(expert, 0) + stacked for expert in range(experts)]


# -- a model of a GGUF file


def model_of_gguf(files: list[Gguf], name: str, source: str) -> KnownModel:
    """Return the model of a GGUF file, or of the parts of one that was split. Raises TraceError."""
    said: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    for file in files:
        said = {**file.metadata, **said}
        for tensor, place in file.tensors.items():
            if place.kind not in TYPES:
                known = ", ".join(found for found, _, _ in TYPES.values())
                raise TraceError(f"{name}: {shown(tensor)} has the unknown type {place.kind}; known types: {known}")
            if tensor in tensors:
                raise TraceError(f"{name}: the tensor {shown(tensor)} is repeated in its parts")
            tensors[tensor] = Stored(place.size, place.weights, TYPES[place.kind][0])
    read = _Metadata(said, name)
    mtp = read.optional("nextn_predict_layers", MOST_LAYERS) or 0
    layers = read.needed("block_count", 2 * MOST_LAYERS) - mtp
    sizes = sizes_of(tensors, name, layers)
    experts, k = read.experts(layers), read.needed("expert_used_count", MOST_EXPERTS)
    shared = read.optional("expert_shared_count", MOST_EXPERTS)
    kept = Counter(_mixers(read, tensors, layers))
    kv_bytes, kv_windows = kept_by(kept.items())
    try:
        made = Geometry(
            layers=len(sizes.experts),
            experts=experts,
            k=k,
            expert_bytes=(1,) * len(sizes.experts),
            expert_params=sum(sizes.expert_weights) // (experts * len(sizes.experts)),
            dense_params=sizes.dense_weights // len(sizes.experts),
            head_params=sizes.head_weights,
            shared_experts=shared or int(any("_shexp" in tensor for tensor in tensors)),
            router=Router(),
            kv_bytes=kv_bytes,
            kv_windows=kv_windows,
            hidden=read.needed("embedding_length"),
        )
        geometry = _stored(made, sizes, name)
        return KnownModel(
            name=name,
            geometry=geometry,
            published=Published(format=sizes.format, bits=geometry.expert_bits),
            matrices=sizes.matrices or THIRDS,
            context=read.optional("context_length", 1 << 40) or 0,
            hidden=geometry.hidden,
            dense_layers=sizes.dense_layers,
            params=sizes.weights,
            embedding_params=sizes.embedding_weights,
            table_params=sizes.table_weights,
            kv_bytes=kv_bytes,
            kv_windows=kv_windows,
            kv_bits=max((mixer.kept_bits for mixer in kept if isinstance(mixer, Attention)), default=16),
            mtp=mtp,
            stored=geometry.expert_bits < 16,
            source=source,
            note=f"{mtp} layers that predict further tokens are left out" if mtp else "",
            assumed="; ".join(read.strange()),
        )
    except TraceError as wrong:
        raise TraceError(f"{name}: {wrong}") from None


#: Architectures of llama.cpp with routed experts whose layers are read as its code builds them.
ARCHITECTURES = frozenset(
    """afmoe arctic bailingmoe bailingmoe2 cohere2moe dbrx deepseek deepseek2 deepseek32 deepseek4 dots1 ernie4_5-moe
    exaone-moe gemma4 glm-dsa glm4moe gpt-oss granitehybrid granitemoe grok grovemoe hunyuan-moe jamba kimi-linear
    laguna lfm2moe llada-moe llama llama4 mimo2 minimax-m2 mistral4 nemotron_h_moe olmoe phimoe qwen2moe qwen35moe
    qwen3moe qwen3next qwen3vlmoe smallthinker step35""".split()  # noqa: SIM905
)
#: Keys of attention that are read, or that no size depends on.
OF_ATTENTION = re.compile(
    r"^(head_count(_kv)?|(key|value)_length(_swa|_mla)?|kv_lora_rank|q_lora_rank|sliding_window(_pattern)?|compress_ratios"
    r"|indexer\..*|output_(group_count|lora_rank)|.*(eps|epsilon|scale|bias|norm|freq_base|clamp_kqv|causal|temperature"
    r"\w*)|shared_kv_layers|\w*_rank)$"
)


class _Metadata:
    """Reads figures of a file's architecture; a value per layer counts as the largest."""

    def __init__(self, said: Mapping[str, Any], name: str) -> None:
        self._said, self._name = said, name
        self.architecture = str(said.get("general.architecture", ""))

    def per_layer(self, key: str, layers: int, most: int = 1 << 24) -> list[int]:
        """Return a value for each layer, 0 if absent. Raises TraceError for a value that is not a number."""
        value = self._said.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            return [self._checked(key, each, most) for each in value[:layers]] + [0] * (layers - len(value))
        return [0 if value is None else self._checked(key, value, most)] * layers

    def optional(self, key: str, most: int = 1 << 24) -> int | None:
        """Return a number, None if absent. Raises TraceError for a value that is not a number."""
        value = self._said.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            return max((self._checked(key, each, most) for each in value), default=None)
        return None if value is None else self._checked(key, value, most)

    def _checked(self, key: str, value: Any, most: int) -> int:
        if not isinstance(value, int) or not 0 <= value <= most:
            said = f"invalid {shown(self.architecture)}.{key} {shown(value)!r}"
            raise TraceError(f"{self._name}: {said}: expected a whole number from 0 to {most:,}")
        return int(value)

    def needed(self, key: str, most: int = 1 << 24) -> int:
        """Return a number. Raises TraceError if it is absent or 0."""
        found = self.optional(key, most)
        if not found:
            said = shown(self.architecture) or "general.architecture"
            raise TraceError(f"{self._name}: missing {said}.{key} in its metadata")
        return found

    def experts(self, layers: int) -> int:
        """Return the experts of a layer. Raises TraceError where layers have different numbers of them."""
        counts = sorted(set(self.per_layer("expert_count", layers, MOST_EXPERTS)) - {0})
        if len(counts) > 1:
            said = f"layers have different numbers of experts ({', '.join(map(str, counts))})"
            raise TraceError(f"{self._name}: {said}, which a trace cannot have")
        return self.needed("expert_count", MOST_EXPERTS)

    def strange(self) -> list[str]:
        """Return what the sizes assume where the architecture or a key of its attention is not known."""
        found = []
        if self.architecture not in ARCHITECTURES:
            found.append(f"architecture {shown(self.architecture)} not known: the KV cache assumes plain attention")
        start = f"{self.architecture}.attention."
        keys = [key for key in self._said if key.startswith(start) and not OF_ATTENTION.match(key.removeprefix(start))]
        return [*found, *(f"key {shown(key)} not known: sizes do not depend on it" for key in keys[:5])]


#: Of how many layers the last attends to all positions, where a file states a window but not in which layers
#: (llama.cpp, `set_swa_pattern` in src/models).
PERIODS = {"gpt-oss": 2, "gemma3": 6, "cohere2moe": 4, "llama4": 4, "smallthinker": 4}
CHUNK = {"llama4": 8192}  #: positions of a chunk, which its files do not state


def _mixers(read: _Metadata, tensors: Mapping[str, Stored], layers: int) -> list[Mixer]:
    """Return what each layer with attention keeps of a position; of these mixers only the caches are the file's."""
    kv_heads = read.per_layer("attention.head_count_kv", layers, MOST_HEADS)
    latent, rotary = read.optional("attention.kv_lora_rank"), read.optional("rope.dimension_count") or 0
    index = read.optional("attention.indexer.key_length") or 0
    ratios = read.per_layer("attention.compress_ratios", layers)
    windows, widths = _layer_windows(read, layers), (_widths(read, False), _widths(read, True))
    shared = layers - (read.optional("attention.shared_kv_layers") or 0)
    found: list[Mixer] = []
    for at in range(layers):
        attends = any(
            f"blk.{at}.{each}.weight" in tensors for each in ("attn_k", "attn_kv", "attn_kv_a_mqa", "attn_qkv")
        )
        if not attends or f"blk.{at}.ssm_out.weight" in tensors or at >= shared:
            continue
        indexed = index if any(ratios) or f"blk.{at}.indexer.attn_k.weight" in tensors else 0
        if latent:
            found.append(LatentAttention(heads=1, key_rank=latent, plain=0, rotary=rotary, value=0, index=indexed))
        elif any(ratios):
            found.append(compressed(kv_heads[at], widths[0][0], windows[at], ratios[at], index))
        else:
            key, value = widths[bool(windows[at])]
            found.append(Attention(heads=1, kv_heads=kv_heads[at], head_dim=key, value_dim=value, window=windows[at]))
    return found


def _widths(read: _Metadata, windowed: bool) -> tuple[int, int]:
    """Return the widths of a key and a value; layers with a window may have their own."""
    heads = read.optional("attention.head_count", MOST_HEADS)
    plain = (read.optional("embedding_length") or 0) // heads if heads else 0
    key, value = (
        (read.optional(f"attention.{each}_length_swa") if windowed else None)
        or read.optional(f"attention.{each}_length")
        or plain
        for each in ("key", "value")
    )
    return key, value


def _layer_windows(read: _Metadata, layers: int) -> list[int]:
    """Return the window of each layer, 0 if it attends to all positions."""
    window = read.optional("attention.sliding_window", 1 << 40) or CHUNK.get(read.architecture, 0)
    stated = read.per_layer("attention.sliding_window_pattern", layers)
    if len(set(stated)) == 1:  # a period, or nothing
        period = stated[0] or PERIODS.get(read.architecture, 1)
        stated = [(at + 1) % period != 0 for at in range(layers)]
    return [window if each else 0 for each in stated]


# -- tensors of safetensors files

#: Bits of a stored element by the dtype's name in a safetensors header.
DTYPES = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F4": 4,
}
FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def tensors_of(header: Mapping[str, Any], name: str, end: int = MOST_BYTES) -> dict[str, Stored]:
    """Return the tensors of a safetensors header, whose `data_offsets` say their bytes, at most `end`.

    Raises TraceError.
    """
    found: dict[str, Stored] = {}
    for tensor, said in header.items():
        if tensor == "__metadata__":
            continue
        try:
            place = _Place.model_validate(said)
        except ValidationError as wrong:
            raise TraceError(f"{name}: tensor {shown(tensor)}: {first_fault(wrong)}; the file may be damaged") from None
        first, last = place.data_offsets
        size, weights = last - first, math.prod(place.shape)
        known = DTYPES.get(place.dtype)
        if last > end:
            raise TraceError(f"{name}: tensor {shown(tensor)} ends beyond the file: it is truncated; download it again")
        if size < 0 or (known and size != -(-weights * known // 8)):
            text = f"{shown(place.shape)} {shown(place.dtype)} cannot have {size:,} bytes"
            raise TraceError(f"{name}: tensor {shown(tensor)} of {text}")
        is_plain = place.dtype in FLOATS and not tensor.endswith(("_scale", "_scale_inv", "_scales"))
        found[tensor] = Stored(size, weights if is_plain else 0, place.dtype)
    return found


class _Place(BaseModel):
    """A tensor in the header of a safetensors file."""

    model_config = ConfigDict(strict=True)

    dtype: Annotated[str, Field(max_length=32)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=1 << 40)]], Field(max_length=8)]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0, le=MOST_BYTES)]], Field(min_length=2, max_length=2)]


def known_of(numbers: ModelNumbers, name: str) -> KnownModel:
    """Return the model of a `config.json` alone, with experts as its checkpoint stores them. Raises TraceError."""
    try:
        model = known_model(name, numbers)
    except TraceError as wrong:
        raise TraceError(f"{name}: {wrong}") from None
    cached = {"kv_bytes": model.kv_bytes, "kv_windows": model.kv_windows, "hidden": model.hidden}
    return model.model_copy(update={"geometry": model.geometry.model_copy(update=cached)})
