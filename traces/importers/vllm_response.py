"""Responses of vLLM with `--enable-return-routed-experts`, as JSON or as arrays in an npz.

`prompt_routed_experts` (prompt, L, k) once per response and `routed_experts` (generated, L, k) per choice; or, in other
versions, `routed_experts` alone for prompt and generated tokens, over all hidden layers. In JSON each is nested lists,
base64 of an npy file, or `{"encoding": "base64", "dtype", "shape", "data"}`. -1 stands at tokens of the prefix cache,
null for a request that was preempted. An npz holds the arrays of one completion by the same names. No weights, no
logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traces.importers import archive
from traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for, prompt_tokens
from traces.importers.responses import Document, choices_of, count, documents, response_files, sniff_for, unbased
from traces.importers.sources import files_of
from traces.importers.survey import Survey, cached_note
from traces.schema import Request, TraceError, shown

PROMPT, GENERATED = "prompt_routed_experts", "routed_experts"
NPZ = ".npz"
UNKNOWN = "responses without a count of prompt tokens: every token of theirs counts as decoded"
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16")


class Completion(NamedTuple):
    """The rows of one choice."""

    place: str
    ids: np.ndarray | None  #: (T, L, k), None if it was preempted
    prompt: int
    counted: bool = True  #: whether the number of prompt tokens is known
    model: str | None = None


def sniff(path: Path) -> bool:
    """JSON that holds routed_experts in choices, or npz files with an array of that name."""
    archives = files_of(path, NPZ)
    if archives:
        return all(GENERATED in archive.members(file) for file in archives)
    return sniff_for(path, (GENERATED,), ("meta_info",))


def read(path: Path, options: Options) -> Foreign:
    """A request per choice. Raises TraceError naming the response whose arrays are not as documented."""
    files = files_of(path, NPZ) or response_files(path)
    if not files:
        raise TraceError(f"{path}: no .json, .jsonl or .npz files; expected responses with {GENERATED}")
    survey, preempted, cached, notes, model = Survey(), 0, 0, [], None
    for each in _completions(files):
        model = model or each.model
        if each.ids is None:
            preempted += 1
            continue
        survey.add(each.ids, f"{each.place}: {GENERATED}")
        cached += int((each.ids[: each.prompt] < 0).all((1, 2)).sum())
        notes += [] if each.counted or options.prompt_length is not None else [UNKNOWN]
    if not survey.seen:
        raise TraceError(f"{path}: no {GENERATED} but null; requests that are preempted have none")
    notes += [f"{preempted} choices have no {GENERATED} (preempted, or not asked for): left out"] * bool(preempted)
    notes = [*dict.fromkeys(notes), *cached_note(cached), *survey.notes()]
    shape = Shape(int(survey.routes.sum()), survey.k, survey.highest)
    origin = Origin(IMPORTER.name, path, files, model=model, decoding="served by vLLM")
    return Foreign(header_for(shape, options, origin, notes), _requests(files, survey, options))


def _requests(files: list[Path], survey: Survey, options: Options) -> Iterator[Request]:
    for each in _completions(files):
        if each.ids is not None:
            yield Request(survey.kept(each.ids), prompt_tokens(options, len(each.ids), each.prompt))


def _completions(files: list[Path]) -> Iterator[Completion]:
    for file in files:
        if file.suffix == NPZ:
            yield _of_archive(file)
        else:
            for place, document in documents(file):
                yield from _of_response(document, place)


def _of_archive(file: Path) -> Completion:
    generated = archive.expert_ids(file, GENERATED)
    if PROMPT not in archive.members(file):
        return Completion(str(file), generated, 0, counted=False)
    prompt = archive.expert_ids(file, PROMPT)
    return Completion(str(file), _joined(prompt, generated, str(file)), len(prompt))


def _of_response(document: Document, place: str) -> Iterator[Completion]:
    prompt = _array(document.get(PROMPT), f"{place}: {PROMPT}")
    usage = document.get("usage")
    before, after = count(usage, "prompt_tokens", place), count(usage, "completion_tokens", place)
    model = document.get("model")
    named = shown(model, 200) if isinstance(model, str) else None
    for at, choice in enumerate(choices_of(document, place)):
        where = f"{place}: choices[{at}]"
        ids = _array(choice.get(GENERATED), f"{where}.{GENERATED}")
        if ids is None:
            yield Completion(where, None, 0)
        elif prompt is not None:
            yield Completion(where, _joined(prompt, ids, where), len(prompt), model=named)
        else:
            whole = before is not None and after is not None and len(ids) > after
            yield Completion(where, ids, min(before or 0, len(ids)) if whole else 0, before is not None, named)


def _joined(prompt: np.ndarray, generated: np.ndarray, place: str) -> np.ndarray:
    if prompt.shape[1:] != generated.shape[1:]:
        shapes = f"(layers, k) = {prompt.shape[1:]} in {PROMPT}, {generated.shape[1:]} in {GENERATED}"
        raise TraceError(f"{place}: {shapes}; expected the same in both")
    return np.concatenate([prompt, generated])


def _array(value: Any, place: str) -> np.ndarray | None:
    """Ids (tokens, L, k) however they are spelled; None for null and for no tokens. Raises TraceError."""
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return archive.checked_ids(archive.array_of(unbased(value, place), place), place)
    if isinstance(value, dict):
        return archive.checked_ids(_typed(value, place), place)
    if not _nested(value):
        raise TraceError(f"{place} is no array; expected lists of lists of lists of whole numbers")
    try:
        return archive.checked_ids(np.array(value), place)
    except (ValueError, OverflowError):
        raise TraceError(f"{place} is ragged; expected as many layers of every token, and k ids of each") from None


def _nested(tokens: Any) -> bool:
    """Whether it is lists of tokens, layers and whole numbers; numpy would make numbers of other things too."""
    if not isinstance(tokens, list) or not all(isinstance(layers, list) for layers in tokens):
        return False
    rows = (ids for layers in tokens for ids in layers)
    return all(isinstance(ids, list) and set(map(type, ids)) == {int} for ids in rows)


def _typed(value: dict[str, Any], place: str) -> np.ndarray:
    dtype, shape, text = value.get("dtype"), value.get("shape"), value.get("data")
    plain = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if value.get("encoding") != "base64" or dtype not in DTYPES or not plain or not isinstance(text, str):
        raise TraceError(f"{place} is spelled in an unknown way; expected encoding base64, dtype, shape and data")
    content = unbased(text, place)
    try:
        return np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    except (ValueError, OverflowError):
        raise TraceError(f"{place}: {len(content):,} bytes are no {dtype} of that shape; save it again") from None


IMPORTER = Importer(
    name="vllm_response",
    summary="vLLM's responses with --enable-return-routed-experts: ids of every computed token",
    formats="RESPONSES.json or .jsonl with routed_experts, or NAME.npz with routed_experts; or a folder of either",
    sniff=sniff,
    read=read,
)
