"""Router logits as transformers returns them (`output_router_logits=True`), saved with torch or numpy.

`router_logits`: (layers, tokens, E), or a tuple over MoE layers of (tokens, E) or (batch, tokens, E); optionally
with `k`, `input_ids` (batch, tokens), which divides rows into texts, and `attention_mask`, whose zeros are padding:

    out = model(**batch, output_router_logits=True)
    torch.save({"router_logits": out.router_logits, "k": model.config.num_experts_per_tok, **batch}, "a.pt")

Logits are kept; the experts follow from them by the router of `--model`, or else are the k largest. One pass over
whole texts made them, so every token is prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.geometry import by_spelling
from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import LAYERS_FIRST, Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.torch_file import Archive, Tensor, mentions, refuse_bloat, torch_files
from moereplay.traces.routers import choice_scores, choose, weigh
from moereplay.traces.schema import Request, Router, TraceError, check_values

FIELD, TOKENS, MASK, K = "router_logits", "input_ids", "attention_mask", "k"
AXES = "(layers, tokens, experts), or one (tokens, experts) per layer"
FORCED = "logits of whole texts: every token is prompt; replay it token by token"


class Saved(NamedTuple):
    """Logits or ids of a file, and the facts stored with them."""

    layers: list[np.ndarray]  #: (T, E) each
    k: int | None
    tokens: np.ndarray | None  #: (batch, S) input tokens
    mask: np.ndarray | None  #: (batch, S), 0 where a text is padded


def sniff(path: Path) -> bool:
    """Return True for an npz or a torch file with router_logits, or an npy of three axes of real numbers."""
    if not path.is_file():
        return False
    if path.suffix == ".npz":
        return FIELD in archive.members(path)
    shape, kind = archive.described(path) if path.suffix == ".npy" else ((), "")
    return mentions(path, FIELD) or (kind == "f" and len(shape) == 3)


def read(path: Path, options: Options) -> Foreign:
    """Return a request per text. Raises TraceError for arrays that are not logits, or of different lengths."""
    saved = _saved(path, options)
    tokens, experts = saved.layers[0].shape
    choice = choice_for(options, str(path), saved.k)
    texts, length = saved.tokens.shape if saved.tokens is not None else (1, tokens)
    how = f"rows are {texts} texts of {length} tokens, as {TOKENS} has them" if saved.tokens is not None else "one text"
    shape = Shape(len(saved.layers), choice.k, experts - 1, experts, router=choice.router)
    header = header_for(shape, options, Origin(ROUTER_LOGITS.name, path, [path]), [FORCED, how, choice.note])
    return Foreign(header, _requests(path, saved, choice, options))


def _requests(path: Path, saved: Saved, choice: Choice, options: Options) -> Iterator[Request]:
    tokens = len(saved.layers[0])
    texts, length = saved.tokens.shape if saved.tokens is not None else (1, tokens)
    for text in range(texts):
        rows = np.arange(text * length, (text + 1) * length)
        rows = rows if saved.mask is None else rows[saved.mask[text] != 0]
        if not len(rows):
            raise TraceError(f"{path}: {MASK} leaves no token of text {text}: expected at least one")
        logits = np.stack([layer[rows] for layer in saved.layers], 1)
        ids = saved.tokens.reshape(-1)[rows] if saved.tokens is not None else None
        yield choice.request(logits, options.prompt_of(len(rows), len(rows)), f"{path}: {FIELD}", ids)


def _saved(path: Path, options: Options) -> Saved:
    fields = _of_torch(path) if torch_files(path) else _of_numpy(path)
    if isinstance(found := fields.get(FIELD), np.ndarray) and found.ndim == 3 and found.size:
        fields[FIELD] = options.token_first(
            found, f"{path}: {FIELD}", LAYERS_FIRST, ids=found.argmax(-1)[..., None]
        ).transpose(1, 0, 2)
    layers = _layers(fields.get(FIELD), f"{path}: {FIELD}")
    k = fields.get(K)
    if k is not None and (type(k) is not int or not 1 <= k <= layers[0].shape[1]):
        raise TraceError(f"{path}: invalid {K}: expected a number of experts from 1 to {layers[0].shape[1]}")
    tokens, mask = (_table(fields.get(name), len(layers[0]), f"{path}: {name}") for name in (TOKENS, MASK))
    if tokens is not None:
        check_values(tokens, "token_ids", f"{path}: {TOKENS}")
    if mask is not None and (tokens is None or mask.shape != tokens.shape):
        raise TraceError(f"{path}: {MASK} without {TOKENS} of its shape; save both")
    return Saved(layers, k, tokens, mask)


def _of_torch(path: Path) -> dict[Any, Any]:
    opened = Archive(path)
    fields = opened.root if isinstance(opened.root, dict) else {FIELD: opened.root}
    found = fields.get(FIELD)
    tensors = found if isinstance(found, list | tuple) else [found]
    refuse_bloat(opened, [tensor for tensor in tensors if isinstance(tensor, Tensor)])
    plain = {name: _array(value) for name, value in fields.items() if name != FIELD}
    return plain | {FIELD: [_array(tensor) for tensor in tensors] if tensors is found else _array(found)}


def _array(value: Any) -> Any:
    return value.array() if isinstance(value, Tensor) else value


def _of_numpy(path: Path) -> dict[str, Any]:
    if path.suffix == ".npy":
        return {FIELD: archive.lone(path)}
    present = archive.members(path)
    if path.suffix != ".npz" or FIELD not in present:
        raise TraceError(f"{path}: invalid file: expected .pt, .npz or .npy with {FIELD} {AXES}")
    names = [name for name in (FIELD, K, TOKENS, MASK) if name in present]
    fields: dict[str, Any] = dict(zip(names, archive.arrays(path, *names), strict=True))
    if K in fields:
        fields[K] = fields[K].item() if fields[K].size == 1 else 0
    return fields


def _layers(value: Any, place: str) -> list[np.ndarray]:
    """Return (T, E) per layer, from any of the layouts. Raises TraceError."""
    parts = list(value) if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim == 3) else []
    arrays = [part if isinstance(part, np.ndarray) and part.ndim in (2, 3) and part.size else None for part in parts]
    layers = [part if part is None else part.reshape(-1, part.shape[-1]) for part in arrays]
    first = layers[0] if layers else None
    if first is None or not first.size:
        raise TraceError(f"{place} is not an array of logits: expected {AXES}")
    for at, layer in enumerate(layers):
        if layer is None or layer.dtype.kind != "f" or layer.shape != first.shape:
            raise TraceError(f"{place}: layer {at} differs from the first, {first.shape} real numbers: expected {AXES}")
    return [layer for layer in layers if layer is not None]


def _table(value: Any, tokens: int, place: str) -> np.ndarray | None:
    """Return (batch, S) with the same number of tokens, or (S,) for one text. Raises TraceError."""
    if value is None:
        return None
    is_table = isinstance(value, np.ndarray) and value.ndim in (1, 2) and value.dtype.kind in "iub"
    if not is_table or value.size != tokens:
        raise TraceError(f"{place} is not (batch, tokens) whole numbers for {tokens} rows of {FIELD}")
    return value.reshape(-1, value.shape[-1])


# ---------------------------------------------------------------- ids from logits, by the model's router


class Choice(NamedTuple):
    """Router and k that make ids of logits."""

    k: int
    router: Router
    weighs: bool  #: whether the router is the model's, so that gate weights follow too
    note: str

    def request(self, logits: np.ndarray, prompt: int, place: str, tokens: np.ndarray | None = None) -> Request:
        """Return a request of logits (T, L, E), which are kept. Raises TraceError for nan and infinities."""
        check_values(logits, "logits", place)
        raw = np.ascontiguousarray(logits, np.float32)
        ids = choose(choice_scores(self.router, raw), self.k)
        return Request(ids, prompt, weigh(self.router, raw, ids) if self.weighs else None, raw, token_ids=tokens)


def choice_for(options: Options, place: str, k: int | None = None, model: str = "") -> Choice:
    """Return the router of the model that the user or the file names, or the k largest logits.

    Raises TraceError if k is unknown, or if the router needs a correction bias, which was not recorded.
    """
    named = by_spelling().get(model.lower())
    geometry = options.geometry or (named and named.geometry)
    router = geometry.router if geometry else Router()
    if router.family == "sigmoid_groups":
        raise TraceError(
            f"{place}: this model's router adds a bias that was not recorded; record ids with `moereplay record`"
        )
    if geometry is None and k is None:
        raise TraceError(f"{place}: logits do not state the experts per token; pass --model NAME, or save k with them")
    count = k or (geometry.k if geometry else 1)
    source = f"the router {router.family} of the model" if geometry else "order of size"
    weights = ", and so are gate weights" if geometry else "; no gate weights, because the router is unknown"
    return Choice(
        count,
        router,
        geometry is not None,
        f"k = {count} experts per token are chosen from the logits by {source}{weights}",
    )


ROUTER_LOGITS = Importer(
    name="router_logits",
    summary="router logits of transformers' output_router_logits, kept; ids follow from them",
    formats="FILE.pt or FILE.npz with router_logits (and k, input_ids), or FILE.npy of (layers, tokens, experts)",
    sniff=sniff,
    read=read,
    arrays=True,
)
