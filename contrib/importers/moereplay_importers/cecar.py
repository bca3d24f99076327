"""CECAR's routing histories: one torch file of decode runs, with logits of every layer or the ids of the largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moereplay.traces.importers.contract import DECODE_ONLY, Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.router_logits import Choice, choice_for
from moereplay.traces.importers.rows import Survey
from moereplay.traces.importers.torch_file import Archive, Tensor, mentions, refuse_bloat
from moereplay.traces.schema import Request, TraceError, check_values, shown

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
