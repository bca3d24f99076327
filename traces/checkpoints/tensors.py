"""Sizes of a model from the names, shapes and bytes of its tensors: exact, also where precisions are mixed.

A tensor belongs to a routed expert, to the rest of a layer, or to no layer. Layers that predict further tokens (MTP)
and towers of other modalities are left out: a token of text reads neither.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from moereplay.traces.checkpoints.gguf import TYPES, Gguf
from moereplay.traces.documents import Window
from moereplay.traces.geometry import KnownModel, ModelNumbers, Published, known_model
from moereplay.traces.schema import Geometry, Router, TraceError, shown
from moereplay.traces.weight_formats import BITS_PER_WEIGHT


class Stored(NamedTuple):
    """Stored bytes of a tensor, and its number of weights (0 if packed in a way that hides it)."""

    size: int
    weights: int = 0
    format: str = ""


class Sizes(NamedTuple):
    """Bytes of a model's text part. L: layers with routed experts, ascending."""

    experts: tuple[int, ...]  #: (L,) all experts of the layer
    expert_weights: tuple[int, ...]  #: (L,) their weights, 0 if unknown
    dense: tuple[int, ...]  #: (L,) the rest of the layer
    head: int  #: read by every token outside of these layers: dense layers, final norm and head
    embedding: int  #: an embedding table separate from the head, of which a token reads one row
    dense_weights: int  #: in these layers
    head_weights: int
    embedding_weights: int
    matrices: tuple[int, ...]  #: relative sizes of an expert's matrices in the order of reading; empty if unknown
    format: str  #: in which most experts' bytes are stored
    dense_layers: int
    left_out: int  #: bytes of other modalities and of MTP layers

    @property
    def dense_total(self) -> int:
        """Bytes of all weights outside the routed experts."""
        return sum(self.dense) + self.head + self.embedding


LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|blk|h|layer)\.(\d{1,5})\.")
#: A tensor of routed experts; shared ones are spelled `shared_experts` or `shared_expert`, and `_shexp` in GGUF.
ROUTED = re.compile(r"\.experts\.|_exps\.|_exps$|block_sparse_moe\.(?:input|output)_linear\.")
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|tok_embeddings|token_embd|wte|word_embeddings|embedding|embeddings)\.")
HEAD = re.compile(r"^(?:language_model\.)?(?:lm_head|output|model\.lm_head)\.")
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
    weights: dict[int, int] = defaultdict(int)
    dense: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    outside, embedding, parts, formats = [0, 0], [0, 0], Counter[str](), Counter[str]()
    head, left_out = False, 0
    for tensor, stored in tensors.items():
        found = LAYER.search(tensor)
        layer = int(found[1]) if found else None
        if ELSEWHERE.search(tensor) or (layer is not None and layers is not None and layer >= layers):
            left_out += stored.size
        elif layer is None:
            is_table = EMBEDDING.search(tensor) is not None
            head |= HEAD.search(tensor) is not None
            _add(embedding if is_table else outside, stored)
        elif ROUTED.search(tensor):
            experts[layer] += stored.size
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
        expert_weights=tuple(weights[layer] for layer in mixtures),
        dense=tuple(dense[layer][0] for layer in mixtures),
        head=outside[0],
        embedding=embedding[0],
        dense_weights=sum(dense[layer][1] for layer in mixtures),
        head_weights=outside[1],
        embedding_weights=embedding[1],
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
    matrices = sizes.matrices or model.matrices
    return model.model_copy(update={"geometry": _stored(geometry, sizes, name), "matrices": matrices})


def _stored(geometry: Geometry, sizes: Sizes, name: str) -> Geometry:
    """Return the geometry with the bytes of the tensors."""
    if any(size % geometry.experts for size in sizes.experts):
        raise TraceError(
            f"{name}: the experts' bytes are not a multiple of {geometry.experts} experts; a file may be missing"
        )
    each = tuple(size // geometry.experts for size in sizes.experts)
    params = geometry.expert_params or sum(sizes.expert_weights) // (geometry.experts * geometry.layers)
    return geometry.model_copy(
        update={
            "expert_bytes": each,
            "expert_bits": round(8 * sum(each) / (params * geometry.layers), 4),
            "bytes_by_bits": {},
            "dense_layer_bytes": sizes.dense if all(sizes.dense) else (),
            "dense_bytes": sizes.dense_total,
            "head_bytes": sizes.head if all(sizes.dense) else None,
            "dense_stated": True,
            "weight_format": sizes.format if sizes.format in BITS_PER_WEIGHT else "",
            "matrices": sizes.matrices,
        }
    )


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
            tensors[tensor] = Stored(place.size, place.weights, TYPES[place.kind][0])
    read = _Metadata(said, name)
    mtp = read.optional("nextn_predict_layers") or 0
    layers = read.needed("block_count") - mtp
    sizes = sizes_of(tensors, name, layers)
    experts, k = read.needed("expert_count"), read.needed("expert_used_count")
    expert_params = sum(sizes.expert_weights) // (experts * len(sizes.experts))
    shared = read.optional("expert_shared_count") or int(any("_shexp" in tensor for tensor in tensors))
    cached = _cached(read, tensors, layers)
    made = Geometry(
        layers=len(sizes.experts),
        experts=experts,
        k=k,
        expert_bytes=(1,) * len(sizes.experts),
        expert_params=expert_params,
        dense_params=sizes.dense_weights // len(sizes.experts),
        head_params=sizes.head_weights,
        shared_experts=shared,
        router=Router(),
        kv_bytes=sum(kept for kept, _ in cached),
        kv_windows=_windows(cached),
        hidden=read.needed("embedding_length"),
    )
    geometry = _stored(made, sizes, name)
    total = sum(sizes.expert_weights) + sizes.dense_weights + sizes.head_weights + sizes.embedding_weights
    return KnownModel(
        name=name,
        geometry=geometry,
        published=Published(format=geometry.weight_format or "F16", bits=round(geometry.expert_bits)),
        matrices=sizes.matrices or THIRDS,
        context=read.optional("context_length") or 0,
        hidden=read.needed("embedding_length"),
        dense_layers=sizes.dense_layers,
        params=total,
        embedding_params=sizes.embedding_weights,
        kv_bytes=geometry.kv_bytes,
        kv_windows=geometry.kv_windows,
        mtp=mtp,
        stored=geometry.expert_bits < 16,
        source=source,
        note=f"{mtp} layers that predict further tokens are left out" if mtp else "",
    )


class _Metadata:
    """Reads metadata of a file's architecture; a value per layer counts as the largest."""

    def __init__(self, said: Mapping[str, Any], name: str) -> None:
        self._said, self._name = said, name
        self.architecture = str(said.get("general.architecture", ""))

    def per_layer(self, key: str, layers: int) -> list[int]:
        """Return a value for each layer, 0 if absent."""
        value = self._said.get(f"{self.architecture}.{key}")
        if isinstance(value, list):
            return [int(each) for each in value[:layers]] + [0] * (layers - len(value))
        return [value if isinstance(value, int) else 0] * layers

    def optional(self, key: str) -> int | None:
        """Return a number, None if absent."""
        value = self._said.get(f"{self.architecture}.{key}")
        value = max(value, default=None) if isinstance(value, list) else value
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31):
            raise TraceError(f"{self._name}: invalid {self.architecture}.{key} {shown(value)}: expected a whole number")
        return value

    def needed(self, key: str) -> int:
        """Return a number. Raises TraceError if it is absent or 0."""
        found = self.optional(key)
        if not found:
            raise TraceError(
                f"{self._name}: missing {self.architecture or 'general.architecture'}.{key} in its metadata"
            )
        return found


#: Of how many layers the last attends to all positions, where a file states a window but not in which layers
#: (llama.cpp, `set_swa_pattern` in src/models).
PERIODS = {"gpt-oss": 2, "gemma3": 6, "cohere2moe": 4, "llama4": 4, "smallthinker": 4}
CHUNK = {"llama4": 8192}  #: positions of a chunk, which its files do not state


def _cached(read: _Metadata, tensors: Mapping[str, Stored], layers: int) -> list[tuple[int, int]]:
    """Return for each layer the bytes that it keeps of a position at 16 bits, and its window (0: all positions).

    Layers without attention keep nothing.
    """
    heads = read.per_layer("attention.head_count_kv", layers)
    latent = read.optional("attention.kv_lora_rank")
    windows = _layer_windows(read, layers)
    return [
        (
            2
            * (
                latent + (read.optional("rope.dimension_count") or 0)
                if latent
                else heads[at] * _width(read, bool(window))
            ),
            window,
        )
        if _keeps(tensors, at)
        else (0, 0)
        for at, window in enumerate(windows)
    ]


def _keeps(tensors: Mapping[str, Stored], layer: int) -> bool:
    """Return whether a layer has attention, and not a state that does not grow."""
    attends = any(f"blk.{layer}.{each}.weight" in tensors for each in ("attn_k", "attn_kv_a_mqa", "attn_qkv"))
    return attends and f"blk.{layer}.ssm_out.weight" not in tensors


def _width(read: _Metadata, windowed: bool) -> int:
    """Return the width of a key and a value together; layers with a window may have their own."""
    keys = ("attention.key_length", "attention.value_length")
    own = [read.optional(f"{key}_swa") if windowed else None for key in keys]
    found = sum(each or read.optional(key) or 0 for each, key in zip(own, keys, strict=True))
    heads = read.optional("attention.head_count")
    return found or (2 * (read.optional("embedding_length") or 0) // heads if heads else 0)


def _layer_windows(read: _Metadata, layers: int) -> list[int]:
    """Return the window of each layer, 0 if it attends to all positions."""
    window = read.optional("attention.sliding_window") or CHUNK.get(read.architecture, 0)
    stated = read.per_layer("attention.sliding_window_pattern", layers)
    if len(set(stated)) == 1:  # a period, or nothing
        period = stated[0] or PERIODS.get(read.architecture, 1)
        stated = [(at + 1) % period != 0 for at in range(layers)]
    return [window if each else 0 for each in stated]


def _windows(cached: list[tuple[int, int]]) -> tuple[Window, ...]:
    found: Counter[int] = Counter()
    for kept, window in cached:
        found[window] += kept
    return tuple(Window(window, kept) for window, kept in sorted(found.items()) if window and kept)


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


def tensors_of(header: Mapping[str, Any], name: str) -> dict[str, Stored]:
    """Return the tensors of a safetensors header, whose `data_offsets` say their bytes. Raises TraceError."""
    found: dict[str, Stored] = {}
    for tensor, said in header.items():
        if tensor == "__metadata__":
            continue
        try:
            first, last = said["data_offsets"]
            shape, dtype = said["shape"], said["dtype"]
            size, weights = int(last) - int(first), 1
            for each in shape:
                weights *= int(each)
        except (KeyError, TypeError, ValueError):
            raise TraceError(
                f"{name}: {shown(tensor)} lacks dtype, shape or data_offsets; the file may be damaged"
            ) from None
        if size < 0 or (dtype in DTYPES and size != -(-weights * DTYPES[dtype] // 8)):
            raise TraceError(f"{name}: {shown(tensor)} of {shown(shape)} {shown(dtype)} cannot have {size:,} bytes")
        is_plain = dtype in FLOATS and not tensor.endswith(("_scale", "_scale_inv", "_scales"))
        found[tensor] = Stored(size, weights if is_plain else 0, str(dtype))
    return found


def known_of(numbers: ModelNumbers, name: str) -> KnownModel:
    """Return the model of a `config.json` alone, with experts as its checkpoint stores them where that is known."""
    geometry = numbers.geometry()
    if numbers.published.bits != 16 and numbers.published.bits not in geometry.bytes_by_bits:
        geometry = geometry.stored_at(numbers.published.bits)
    cached = {"kv_bytes": numbers.kv_bytes(), "kv_windows": numbers.kv_windows(), "hidden": numbers.hidden}
    return known_model(name, numbers).model_copy(update={"geometry": geometry.model_copy(update=cached)})
