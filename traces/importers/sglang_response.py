"""Responses of SGLang with `return_routed_experts`: `meta_info["routed_experts"]`, base64 of int32.

The numbers are flat: (tokens, all hidden layers, k) of every token but the last generated one, which no pass computed.
How many tokens there are follows from `prompt_tokens` and `completion_tokens` beside it; k is the model's that
`--model` names, or else the largest width at which no row names an expert twice. Neither weights nor logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from traces.importers.contract import ASSUMED, Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from traces.importers.responses import Document, choices_of, count, documents, response_files, sniff_for, unbased
from traces.importers.survey import Survey
from traces.schema import Request, TraceError, check_values

FIELD = "routed_experts"
LARGEST_K = 128


def sniff(path: Path) -> bool:
    """JSON that holds routed_experts in meta_info."""
    return sniff_for(path, (FIELD, "meta_info"), ())


def read(path: Path, options: Options) -> Foreign:
    """A request per response, or per choice of one. Raises TraceError naming the response that is not as documented."""
    files = response_files(path)
    if not files:
        raise TraceError(f"{path}: no .json or .jsonl files; expected responses with meta_info.{FIELD}")
    k, how = _k(path, files, options)
    survey = Survey()
    for place, flat, _ in _flat(files):
        survey.add(_rows(flat, k, place), f"{place}: {FIELD}")
    shape = Shape(int(survey.routes.sum()), survey.k, survey.highest)
    origin = Origin(IMPORTER.name, path, files, decoding="served by SGLang")
    return Foreign(header_for(shape, options, origin, [how, *survey.notes()]), _requests(files, k, survey, options))


def _flat(files: list[Path]) -> Iterator[tuple[str, np.ndarray, int]]:
    """Place, ids (T, layers * k) and prompt tokens of each response."""
    width, found = 0, False
    for file in files:
        for place, document in documents(file):
            for at, choice in enumerate(choices_of(document, place)):
                ids, prompt = _ids(choice, f"{place}: choices[{at}]" if "choices" in document else place)
                if width not in (0, ids.shape[1]):
                    raise TraceError(f"{place}: {ids.shape[1]} ids per token; the first response has {width}")
                width, found = ids.shape[1], True
                yield place, ids, prompt
    if not found:
        raise TraceError(f"{files[0]}: no responses; expected some with meta_info.{FIELD}")


def _ids(choice: Document, place: str) -> tuple[np.ndarray, int]:
    meta: Any = choice.get("meta_info")
    text = meta.get(FIELD) if isinstance(meta, dict) else None
    if not isinstance(text, str):
        raise TraceError(f"{place}: no meta_info.{FIELD}; send return_routed_experts: true with the request")
    content = unbased(text, f"{place}: meta_info.{FIELD}")
    prompt, generated = count(meta, "prompt_tokens", place), count(meta, "completion_tokens", place)
    if prompt is None or generated is None:
        raise TraceError(f"{place}: meta_info has no prompt_tokens or completion_tokens; save all of it")
    tokens = prompt + max(generated - 1, 0)
    if not tokens or not content or len(content) % (4 * tokens):
        said = f"{len(content):,} bytes for {tokens} computed tokens ({prompt} of the prompt)"
        raise TraceError(f"{place}: {FIELD} has {said}; expected as many int32 for each")
    ids = np.frombuffer(content, "<i4").reshape(tokens, -1)
    check_values(ids, "chosen", f"{place}: {FIELD}")
    return ids, prompt


def _rows(flat: np.ndarray, k: int, place: str) -> np.ndarray:
    if flat.shape[1] % k:
        raise TraceError(f"{place}: {flat.shape[1]} ids per token are no whole number of layers at k = {k}")
    return flat.reshape(len(flat), -1, k)


def _k(path: Path, files: list[Path], options: Options) -> tuple[int, str]:
    """Experts per token, and the note that says where it is from."""
    if options.geometry is not None:
        k = options.geometry.k
        return k, f"{ASSUMED}k = {k} as {'--model says' if options.model else 'the geometry given has'}"
    width, possible = 0, {}
    for _, flat, _ in _flat(files):
        width = flat.shape[1]
        possible = possible or {k: Repeats() for k in range(1, min(width, LARGEST_K) + 1) if width % k == 0}
        for k, repeats in possible.items():
            repeats.add(flat.reshape(len(flat), -1, k))
    fitting = [k for k, repeats in possible.items() if repeats.fit()]
    if not fitting:
        raise TraceError(f"{path}: {width} ids per token, every layer repeats an expert; expected {FIELD} of SGLang")
    how = f"the largest at which no row of {width} ids per token repeats an expert; --model NAME says it"
    return max(fitting), f"{ASSUMED}k = {max(fitting)}, {how}"


class Repeats:
    """Whether rows (T, L, k) can be choices of distinct experts, but for layers that hold one number throughout."""

    def __init__(self) -> None:
        self._repeated: np.ndarray | bool = False  #: (L,)
        self._least: np.ndarray | float = np.inf
        self._most: np.ndarray | float = -np.inf

    def add(self, ids: np.ndarray) -> None:
        """Look at the rows of another response."""
        ordered = np.sort(ids, -1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        self._repeated = self._repeated | twice.any((0, 2))
        self._least = np.minimum(self._least, ids.min((0, 2)))
        self._most = np.maximum(self._most, ids.max((0, 2)))

    def fit(self) -> bool:
        """Whether every layer has distinct experts or none at all, and one has some."""
        constant = np.asarray(self._least == self._most)
        return bool((constant | ~np.asarray(self._repeated)).all() and not constant.all())


def _requests(files: list[Path], k: int, survey: Survey, options: Options) -> Iterator[Request]:
    for place, flat, prompt in _flat(files):
        ids = survey.kept(_rows(flat, k, place))
        yield Request(ids, prompt_tokens(options, len(ids), min(prompt, len(ids))))


IMPORTER = Importer(
    name="sglang_response",
    summary="SGLang's responses with return_routed_experts: ids of every computed token",
    formats="RESPONSES.json or .jsonl with meta_info.routed_experts (base64), or a folder of them",
    sniff=sniff,
    read=read,
)
