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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.geometry import by_spelling
from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import (
    DECODE_ONLY,
    LAYERS_FIRST,
    Foreign,
    Importer,
    Options,
    Origin,
    Shape,
    header_for,
)
from moereplay.traces.importers.rows import Survey
from moereplay.traces.importers.torch_file import Archive, Tensor, mentions, refuse_bloat, torch_files
from moereplay.traces.routers import choice_scores, choose, weigh
from moereplay.traces.schema import Request, Router, TraceError, check_values, shown

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
    refuse_bloat(opened, [each for each in tensors if isinstance(each, Tensor)])
    plain = {name: _array(value) for name, value in fields.items() if name != FIELD}
    return plain | {FIELD: [_array(each) for each in tensors] if tensors is found else _array(found)}


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
    layers = [_flat(part) for part in parts]
    first = layers[0] if layers else None
    if first is None or not first.size:
        raise TraceError(f"{place} is not an array of logits: expected {AXES}")
    for at, layer in enumerate(layers):
        if layer is None or layer.dtype.kind != "f" or layer.shape != first.shape:
            raise TraceError(f"{place}: layer {at} differs from the first, {first.shape} real numbers: expected {AXES}")
    return [layer for layer in layers if layer is not None]


def _flat(part: Any) -> np.ndarray | None:
    """Return (T, E) of (T, E) or (batch, S, E)."""
    if not isinstance(part, np.ndarray) or part.ndim not in (2, 3) or not part.size:
        return None
    return part.reshape(-1, part.shape[-1])


def _table(value: Any, tokens: int, place: str) -> np.ndarray | None:
    """Return (batch, S) with the same number of tokens, or (S,) for one text. Raises TraceError."""
    if value is None:
        return None
    if (
        not isinstance(value, np.ndarray)
        or value.ndim not in (1, 2)
        or value.size != tokens
        or value.dtype.kind not in "iub"
    ):
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


# -- CECAR's routing histories: one torch file of decode runs, with logits of every layer

KEYS = ("routing_decode", "gen_ids_decode", "input_ids_prompt", "eos_pos_in_decode")
KINDS = {"full_logits": "logits", "topk": "idx"}
PARTIAL = "logits of the chosen experts only: left out"


@dataclass(frozen=True)
class Run:
    """One decoded answer."""

    place: str
    kind: str
    tensor: Tensor  #: (T, 1, L, E) logits or (T, 1, L, k) ids
    steps: int  #: up to the end of the text
    tokens: np.ndarray | None  #: (steps,) input tokens

    def rows(self) -> np.ndarray:
        """Return (steps, L, E) logits or (steps, L, k) ids."""
        return self.tensor.array()[: self.steps, 0]


def sniff_cecar(path: Path) -> bool:
    """Return True for a torch file with the keys of a routing history."""
    return path.is_file() and mentions(path, *KEYS)


def read_cecar(path: Path, options: Options) -> Foreign:
    """Read greedy or sampled decode runs by the keys of Src/Train/src/save_routing_logits.py of malmong/CECAR.

    `routing_decode[i]` is `{"type": "full_logits", "logits": (T, 1, L, E)}` or `{"type": "topk", "topk", "idx": (T, 1,
    L, k), "val"}`, T steps over all hidden layers. Step t has the input token t - 1 of `gen_ids_decode[i]`, step 0 the
    prompt's last. Decoding continued after the end of the text, so rows after `eos_pos_in_decode[i]` are left out.
    Prompt rows were not recorded.

    Return a request per run. Raises TraceError naming the run that is not as documented.
    """
    if not path.is_file():
        raise TraceError(f"{path}: invalid CECAR recording: expected one torch file with {', '.join(KEYS)}")
    archive = Archive(path)
    runs = _runs(archive)
    refuse_bloat(archive, [run.tensor for run in runs])
    model = archive.root.get("hf_model_id")
    named = shown(model, 200) if isinstance(model, str) else None
    cut = sum(run.steps < run.tensor.shape[0] for run in runs)
    notes = [DECODE_ONLY, *[f"{cut} of {len(runs)} runs are cut where their text ends"] * bool(cut)]
    origin = Origin(CECAR.name, path, [path], model=named, decoding="recorded decode steps")
    if runs[0].kind == "full_logits":
        return _of_logits(runs, choice_for(options, str(path), model=named or ""), options, origin, notes)
    return _of_ids(runs, options, origin, notes)


def _of_logits(runs: list[Run], choice: Choice, options: Options, origin: Origin, notes: list[str]) -> Foreign:
    """Yield requests from logits. Layers whose logits are all 0 have no router."""
    routes = np.zeros(runs[0].tensor.shape[2], bool)
    for run in runs:
        routes |= run.rows().any((0, 2))
    experts = runs[0].tensor.shape[3]
    dense = np.flatnonzero(~routes).tolist()
    said = f"layers {', '.join(map(str, dense))} have only zero logits (dense): left out"
    notes = [*notes, choice.note, *[said] * bool(dense)]
    shape = Shape(int(routes.sum()), choice.k, experts - 1 if routes.any() else -1, experts, router=choice.router)

    def requests() -> Iterator[Request]:
        for run in runs:
            prompt = options.prompt_of(run.steps, 0)
            yield choice.request(run.rows()[:, routes], prompt, f"{run.place}.logits", run.tokens)

    return Foreign(header_for(shape, options, origin, notes), requests())


def _of_ids(runs: list[Run], options: Options, origin: Origin, notes: list[str]) -> Foreign:
    survey = Survey()
    for run in runs:
        survey.add(run.rows(), f"{run.place}.idx")
    shape = Shape(int(survey.routes.sum()), survey.k, survey.highest)

    def requests() -> Iterator[Request]:
        for run in runs:
            yield Request(survey.kept(run.rows()), options.prompt_of(run.steps, 0), token_ids=run.tokens)

    return Foreign(header_for(shape, options, origin, [*notes, PARTIAL, *survey.notes()]), requests())


def _runs(archive: Archive) -> list[Run]:
    """Return all runs, of one kind and one number of layers. Raises TraceError."""
    root = archive.root
    lists = [root.get(key) for key in KEYS] if isinstance(root, dict) else [None]
    if not all(isinstance(each, list) and each and len(each) == len(lists[0] or ()) for each in lists):
        raise TraceError(f"{archive.file}: {', '.join(KEYS)} are not lists of the same length; record it again")
    # the last token of a padded prompt is not where it seems
    alone = root.get("batch_size") == 1
    columns = zip(*lists, strict=True)  # type: ignore[arg-type]
    runs = [_run(run, f"{archive.file}: routing_decode[{at}]", alone) for at, run in enumerate(columns)]
    first = (runs[0].kind, runs[0].tensor.shape[1:])
    for run in runs:
        if (run.kind, run.tensor.shape[1:]) != first:
            raise TraceError(
                f"{run.place}: invalid {run.kind} {run.tensor.shape}: expected {first[0]} (steps, *{first[1]})"
            )
    return runs


def _run(columns: tuple[Any, ...], place: str, alone: bool) -> Run:
    pack, generated, prompt, end = columns
    kind = pack.get("type") if isinstance(pack, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise TraceError(f"{place} lacks {' or '.join(KINDS)}: expected a CECAR run")
    tensor = pack.get(KINDS[kind])
    if not isinstance(tensor, Tensor) or len(tensor.shape) != 4 or tensor.shape[1] != 1 or min(tensor.shape) < 1:
        raise TraceError(f"{place}.{KINDS[kind]} is not a tensor (steps, 1, layers, experts or k); record it again")
    if type(end) is not int or not -1 <= end < tensor.shape[0]:
        raise TraceError(f"{place}: invalid eos_pos_in_decode: expected a step from 0 to {tensor.shape[0] - 1}, or -1")
    steps = end + 1 if end >= 0 else tensor.shape[0]
    inputs = [_tokens(prompt, place)[-1:], _tokens(generated, place)[: steps - 1]]
    tokens = np.concatenate(inputs)
    if len(tokens) != steps:
        raise TraceError(
            f"{place}: {len(tokens)} input tokens for {steps} steps: expected gen_ids_decode of the same length"
        )
    return Run(place, kind, tensor, steps, tokens if alone else None)


def _tokens(tensor: Any, place: str) -> np.ndarray:
    """Return token ids (1, n) as (n,)."""
    if not isinstance(tensor, Tensor) or len(tensor.shape) != 2 or tensor.shape[0] != 1 or tensor.kind not in "iu":
        raise TraceError(
            f"{place}: its input_ids_prompt or gen_ids_decode is not a tensor (1, tokens); record it again"
        )
    tokens = tensor.array()[0]
    check_values(tokens, "token_ids", f"{place}: token ids")
    return tokens


CECAR = Importer(
    name="cecar",
    summary="CECAR's routing histories: decode steps with router logits, or the ids of the largest",
    formats="MODEL_DATASET.pt with routing_decode, gen_ids_decode, ...",
    sniff=sniff_cecar,
    read=read_cecar,
)
