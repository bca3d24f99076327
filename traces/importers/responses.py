"""Saved responses of inference servers, and of trainers that keep them: JSON documents, JSON lines, lists, envelopes.

A response is an object with `choices`, `meta_info` or routed experts; it may be nested in other objects (a batch's
`response.body`, a session's `records`, a trainer's steps). Token counts are where each server
puts them: `meta_info`, `usage` with `prompt_tokens_details`, or the lengths of lists of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.spelled_ids import Spelled, spelled
from moereplay.traces.importers.text import blocks, holds, parse_json, read_json, suffix_of
from moereplay.traces.schema import TraceError, shown

Document = dict[str, Any]
SUFFIXES = (".json", ".jsonl")
FIELD, PROMPT = "routed_experts", "prompt_routed_experts"
FIELDS = (FIELD, "rollout_routed_experts", "completion_routed_experts")
PLACES = ("meta_info", "sgl_ext", "sglext", "nvext", "engine_data", "message")  #: objects that may hold it, in a choice
SGLANG = ("meta_info", "sgl_ext", "sglext")  #: of these, what SGLang writes
PROMPT_IDS = ("prompt_token_ids", "prompt_ids", "input_ids")
GENERATED_IDS = (
    *("token_ids", "completion_token_ids", "completion_ids", "generation_token_ids", "output_ids", "response_ids"),
)
DEEPEST = 8  #: envelopes within envelopes
SPECULATIVE = ("spec_verify_ct", "spec_accept_token_num", "spec_accept_length")


class Answer(NamedTuple):
    """One completion: its ids, and its token counts if stated."""

    place: str
    found: Spelled | None  #: None if the server returned none
    head: int | None = None  #: rows of the prompt that were stored separately and now come first
    prompt: int | None = None
    generated: int | None = None
    cached: int | None = None  #: tokens of the prompt that lay in the prefix cache
    start: int | None = None  #: token of the first row
    aborted: bool = False


class Response(NamedTuple):
    """The completions of one prompt, and the counts that cover all of them."""

    place: str
    answers: list[Answer]
    generated: int | None = None
    cached: int | None = None
    model: str | None = None
    speculative: bool = False


def response_files(path: Path) -> list[Path]:
    """Return the file itself, or the JSON files directly in a folder, by name."""
    return sorted(file for suffix in SUFFIXES for file in files_of(path, suffix))


def sniff_for(path: Path, present: tuple[str, ...], absent: tuple[str, ...]) -> bool:
    """Return True if the first JSON file has all keys of `present` and none of `absent`."""
    files = response_files(path)
    return bool(files) and all(_has(files[0], mark) for mark in present) and not any(_has(files[0], m) for m in absent)


def has_ids(path: Path) -> bool:
    """Return True if the first file holds routed experts under one of their names."""
    return any(sniff_for(path, (name,), ()) for name in FIELDS)


def of_sglang(path: Path) -> bool:
    """Return True if the first file has an object that only SGLang writes."""
    return any(sniff_for(path, (name,), ()) for name in SGLANG)


def _has(file: Path, mark: str) -> bool:
    """Search a whole document, or the first of JSON lines."""
    if suffix_of(file) == ".json":
        return holds(file, f'"{mark}"')
    try:
        _, lines = next(blocks(file), (1, [""]))
    except TraceError:
        return False
    return f'"{mark}"' in lines[0]


def responses(files: Sequence[Path]) -> Iterator[Response]:
    """Yield every response of the files. Raises TraceError for a document that is not a server's response."""
    for file in files:
        for place, document in documents(file):
            yield from (_response(each, at) for at, each in _within(document, place))


def documents(file: Path) -> Iterator[tuple[str, Document]]:
    """Yield each object with its place in the file. Raises TraceError for anything but JSON objects."""
    if suffix_of(file) == ".jsonl":
        for number, lines in blocks(file):
            for at, line in enumerate(lines, number):
                yield from _objects(parse_json(line, f"{file} line {at}"), f"{file} line {at}")
    else:
        yield from _objects(read_json(file), str(file))


def _objects(document: Any, place: str) -> Iterator[tuple[str, Document]]:
    if isinstance(document, dict):
        yield place, document
        return
    if not isinstance(document, list) or not document:
        raise TraceError(f"{place}: not a server's response: expected a JSON object, or a list of objects")
    for number, each in enumerate(document):
        if not isinstance(each, dict):
            raise TraceError(f"{place}: [{number}] is not a JSON object: expected a server's response")
        yield f"{place}: [{number}]", each


def _within(document: Document, place: str) -> Iterator[tuple[str, Document]]:
    """Yield the object if it is a response, else the responses nested in it, else the object."""
    found = list(_inside(document, place, DEEPEST))
    yield from found or [(place, document)]


def _inside(value: Any, place: str, deeper: int) -> Iterator[tuple[str, Document]]:
    if isinstance(value, dict):
        if any(name in value for name in ("choices", "meta_info", *FIELDS)):
            yield place, value
        elif deeper:
            for name, each in value.items():
                yield from _inside(each, f"{place}: {shown(name)}", deeper - 1)
    elif isinstance(value, list) and deeper and value and isinstance(value[0], dict):
        for number, each in enumerate(value):
            yield from _inside(each, f"{place}[{number}]", deeper - 1)


def _response(document: Document, place: str) -> Response:
    choices = _choices(document, place)
    usage = document.get("usage")
    alone = len(choices) == 1
    outer = [document, *_objects_in(document)]
    asked = _count_of((usage, "prompt_tokens"), outer, PROMPT_IDS, place)
    made = _count_of((usage, "completion_tokens"), outer if alone else [], GENERATED_IDS, place)
    cached = _first(count(usage, "cached_tokens", place), _cached_in(usage, place), *_cached(outer, place))
    model = document.get("model")
    answers = []
    for at, choice in enumerate(choices):
        where = f"{place}: choices[{at}]" if "choices" in document else place
        inner = [choice, *_objects_in(choice)]
        sources = [*inner, *outer] if alone else [*inner, document]
        answer = _answer(sources, inner, where, asked)
        answers.append(answer._replace(generated=_first(answer.generated, made if alone else None)))
    if alone:
        answers[0] = answers[0]._replace(cached=_first(answers[0].cached, cached))
    named = shown(model, 200) if isinstance(model, str) else None
    nested = [each for choice in choices for each in _objects_in(choice)]
    drafts = any(name in each for each in (*outer, *nested) for name in SPECULATIVE)
    return Response(place, answers, made, None if alone else cached, named, drafts)


def _choices(document: Document, place: str) -> list[Document]:
    """Return the objects in `choices`, or the response itself where it has none. Raises TraceError."""
    choices = document.get("choices", [document])
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        raise TraceError(f"{place}: choices is not a list of objects: expected a server's response")
    return choices


def _objects_in(document: Document) -> list[Document]:
    """Return the objects of `PLACES` in it, and in those."""
    found = [each for name in PLACES if isinstance(each := document.get(name), dict)]
    return found + [inner for each in found for inner in _objects_in(each)]


def _answer(sources: list[Document], inner: list[Document], place: str, asked: int | None) -> Answer:
    """Return a completion: ids from the first object that has some, counts from the choice's own objects."""
    ids = next((each for each in sources for name in FIELDS if each.get(name) is not None), {})
    name = next((name for name in FIELDS if ids.get(name) is not None), FIELD)
    found = spelled(ids.get(name), f"{place}: {name}", ids.get("routed_experts_dtype"))
    apart = next((each[PROMPT] for each in sources if each.get(PROMPT) is not None), None)
    head = spelled(apart, f"{place}: {PROMPT}")
    if found is not None and head is not None and not (found.flat or head.flat):
        found, head_rows = Spelled(_joined(head.ids, found.ids, place), head.start), len(head.ids)
    else:
        head_rows = None
    stated = _first(*(count(each, "routed_experts_start_len", place) for each in sources))
    finish = _first(*(each.get("finish_reason") for each in inner))
    kind = finish.get("type") if isinstance(finish, dict) else finish
    prompt = _first(_count_of((None, ""), inner, PROMPT_IDS, place), asked)
    return Answer(
        place,
        found,
        head_rows,
        prompt if prompt is not None or head_rows is None else head_rows + (found.start or 0 if found else 0),
        _count_of((None, ""), inner, GENERATED_IDS, place),
        _first(*_cached(inner, place)),
        found.start if found is not None and found.start is not None else stated,
        kind == "abort",
    )


def _joined(prompt: np.ndarray, generated: np.ndarray, place: str) -> np.ndarray:
    if prompt.shape[1:] != generated.shape[1:]:
        shapes = f"(layers, k) = {prompt.shape[1:]} in {PROMPT}, {generated.shape[1:]} in {FIELD}"
        raise TraceError(f"{place}: {shapes}: expected the same shape in both")
    return np.concatenate([prompt, generated])


def _cached(objects: list[Document], place: str) -> Iterator[int | None]:
    for each in objects:
        yield _first(count(each, "cached_tokens", place), count(each, "num_cached_tokens", place))
        details = each.get("cached_tokens_details")
        if isinstance(details, dict):
            yield sum(count(details, tier, place) or 0 for tier in ("device", "host", "storage"))
        yield _cached_in(each.get("usage"), place)


def _cached_in(usage: Any, place: str) -> int | None:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return count(details, "cached_tokens", place)


def _count_of(stated: tuple[Any, str], objects: list[Document], lists: tuple[str, ...], place: str) -> int | None:
    """Return a token count: `stated`, else an object's count, else the length of its list."""
    name = "prompt_tokens" if lists is PROMPT_IDS else "completion_tokens"
    given = [count(*stated, place), *(count(each, name, place) for each in objects)]
    return _first(*given, *(_length(each.get(key)) for each in objects for key in lists))


def _length(value: Any) -> int | None:
    """Return the length of a list of token ids; None for anything else."""
    return len(value) if isinstance(value, list) and value and type(value[0]) is int else None


def _first(*values: Any) -> Any:
    """Return the first that is not None."""
    return next((value for value in values if value is not None), None)


def count(document: Any, name: str, place: str) -> int | None:
    """Return a number of tokens, None where it is missing. Raises TraceError for any other value."""
    value = document.get(name) if isinstance(document, dict) else None
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise TraceError(f"{place}: invalid {name}: expected a number of tokens, an integer of at least 0")
    return value
