"""Saved responses of inference servers, and of trainers that keep them: JSON documents, JSON lines, lists, envelopes.

A response is an object with `choices`, `meta_info` or routed experts; it may be nested in other objects (a batch's
`response.body`, a session's `records`, a trainer's steps). Token counts are where each server
puts them: `meta_info`, `usage` with `prompt_tokens_details`, or the lengths of lists of token ids.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.text import blocks, holds, parse_json, read_json, suffix_of
from moereplay.traces.schema import TraceError, check_values, shown

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

    @property
    def ran(self) -> int | None:
        """Tokens that a pass computed: the last generated one is not among them. None if they are not counted."""
        if self.prompt is None or self.generated is None:
            return None
        return self.prompt + max(self.generated - 1, 0)

    def may_have(self, rows: int) -> bool:
        """Return whether all tokens that ran, from the first row on, can have so many rows."""
        return self.ran is None or rows - self.ran + (self.start or 0) in (0, 1)


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


def has_key(path: Path, *keys: str) -> bool:
    """Return True if the first file, a whole document or the first of JSON lines, has one of these keys."""
    files = response_files(path)
    if not files or suffix_of(files[0]) == ".json":
        return bool(files) and any(holds(files[0], f'"{key}"') for key in keys)
    try:
        _, lines = next(blocks(files[0]), (1, [""]))
    except TraceError:
        return False
    return any(f'"{key}"' in lines[0] for key in keys)


def has_ids(path: Path) -> bool:
    """Return True if the first file holds routed experts under one of their names."""
    return has_key(path, *FIELDS)


def responses(files: Sequence[Path]) -> Iterator[Response]:
    """Yield every response of the files. Raises TraceError for a document that is not a server's response."""
    for file in files:
        for place, document in documents(file):
            inner = list(_inside(document, place, DEEPEST)) or [(place, document)]
            yield from (_response(response, at) for at, response in inner)


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


def _inside(value: Any, place: str, deeper: int) -> Iterator[tuple[str, Document]]:
    """Yield the object if it is a response, else the responses nested in it."""
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
    choices = document.get("choices", [document])
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise TraceError(f"{place}: choices is not a list of objects: expected a server's response")
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


def _objects_in(document: Document) -> list[Document]:
    """Return the objects of `PLACES` in it, and in those."""
    found = [each for name in PLACES if isinstance(each := document.get(name), dict)]
    return found + [inner for each in found for inner in _objects_in(each)]


def _answer(sources: list[Document], inner: list[Document], place: str, asked: int | None) -> Answer:
    """Return a completion: ids from the first object that has some, counts from the choice's own objects."""
    ids = next((source for source in sources for name in FIELDS if source.get(name) is not None), {})
    name = next((name for name in FIELDS if ids.get(name) is not None), FIELD)
    found = spelled(ids.get(name), f"{place}: {name}", ids.get("routed_experts_dtype"))
    apart = next((source[PROMPT] for source in sources if source.get(PROMPT) is not None), None)
    head = spelled(apart, f"{place}: {PROMPT}")
    if found is not None and head is not None and not (found.flat or head.flat):
        found, head_rows = Spelled(joined(head.ids, found.ids, place), head.start), len(head.ids)
    else:
        head_rows = None
    stated = _first(*(count(source, "routed_experts_start_len", place) for source in sources))
    prompt = _first(_count_of((None, ""), inner, PROMPT_IDS, place), asked)
    return Answer(
        place,
        found,
        head_rows,
        prompt if prompt is not None or head_rows is None else head_rows + (found.start or 0 if found else 0),
        _count_of((None, ""), inner, GENERATED_IDS, place),
        _first(*_cached(inner, place)),
        found.start if found is not None and found.start is not None else stated,
    )


def joined(prompt: np.ndarray, generated: np.ndarray, place: str) -> np.ndarray:
    """Return ids of prompt and generated tokens. Raises TraceError for other layers or another k."""
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
    ids = (each.get(key) for each in objects for key in lists)
    return _first(*given, *(len(value) for value in ids if isinstance(value, list) and value and type(value[0]) is int))


def _first(*values: Any) -> Any:
    """Return the first that is not None."""
    return next((value for value in values if value is not None), None)


def count(document: Any, name: str, place: str) -> int | None:
    """Return a number of tokens, None where it is missing. Raises TraceError for any other value."""
    value = document.get(name) if isinstance(document, dict) else None
    if value is not None and (type(value) is not int or not 0 <= value < 2**31):
        raise TraceError(f"{place}: invalid {name}: expected a number of tokens, an integer of at least 0")
    return value


# -- Routed experts as servers and trainers spell them in JSON: nested lists (tokens, layers, k); base64 of an npy file;
# -- `{"data", "shape", "dtype"}` with base64 of raw numbers, in which `dtype` may be missing and `start` may name the
# -- token of the first row; `nrlre1:DTYPE:TxLxK:BASE64` (NeMo-RL); and flat numbers without a shape, as a list or as
# -- base64 of little-endian int32 (SGLang).

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
BY_SIZE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  #: where the dtype is not stated
NPY = b"\x93NUMPY"
NEMO = re.compile(r"nrlre1:(u?int(?:8|16|32|64)):([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9}):")
PACKED = "expected base64, with dtype, shape and data"


class Spelled(NamedTuple):
    """Ids as they were spelled."""

    ids: np.ndarray  #: (T, L, k), or (n,) where no shape is stated
    start: int | None = None  #: token of the first row, where it is stated

    @property
    def flat(self) -> bool:
        """True if layers and k have to be found elsewhere."""
        return self.ids.ndim == 1


def spelled(value: Any, place: str, dtype: Any = None) -> Spelled | None:
    """Return the ids, None for null and for no tokens; `dtype` of flat numbers, int32 by default. Raises TraceError."""
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return Spelled(_of_text(value, place, dtype))
    if isinstance(value, dict):
        return _of_object(value, place)
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return Spelled(_checked(_numbers(value, place), place))
    first, depth = value, 0
    while isinstance(first, list) and first:
        first, depth = first[0], depth + 1
    if depth > 3:
        raise TraceError(f"{place}: {archive.BATCHED}")
    if not _nested(value):
        raise TraceError(f"{place} is not an array: expected three nested lists of integers")
    return Spelled(archive.checked_ids(_numbers(value, place), place))


def _numbers(value: list[Any], place: str) -> np.ndarray:
    try:
        return np.array(value)
    except (ValueError, OverflowError):
        raise TraceError(f"{place} is ragged: expected the same layers and k for every token") from None


def _nested(tokens: Any) -> bool:
    """Return True for lists of tokens of layers of integers; numpy would accept other types too."""
    if not isinstance(tokens, list) or not all(isinstance(layers, list) for layers in tokens):
        return False
    rows = (ids for layers in tokens for ids in layers)
    return all(isinstance(ids, list) and set(map(type, ids)) == {int} for ids in rows)


def _of_text(text: str, place: str, dtype: Any) -> np.ndarray:
    if head := NEMO.match(text):
        shape = [int(size) for size in head.groups()[1:]]
        return _shaped(unbased(text[head.end() :], place), head[1], shape, place)
    content = unbased(text, place)
    if content.startswith(NPY):
        return archive.checked_ids(archive.array_of(content, place), place)
    kind = dtype if dtype in DTYPES else "int32"
    size = np.dtype(kind).itemsize
    if not content or len(content) % size:
        said = f"{len(content):,} bytes, which are neither an npy file nor a whole number of {kind}"
        raise TraceError(f"{place} has {said}: expected the server's output, unchanged")
    return _checked(np.frombuffer(content, np.dtype(kind).newbyteorder("<")), place)


def _of_object(value: dict[str, Any], place: str) -> Spelled:
    dtype, shape, text, start = (value.get(name) for name in ("dtype", "shape", "data", "start"))
    plain = isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size >= 0 for size in shape)
    encoding = value.get("encoding", "base64")
    if (
        encoding not in ("base64", "base85")
        or dtype not in (None, "", *DTYPES)
        or not plain
        or not isinstance(text, str)
    ):
        raise TraceError(f"{place} has an unknown encoding: {PACKED}")
    if start is not None and (type(start) is not int or not 0 <= start < 2**31):
        raise TraceError(f"{place}: invalid start: expected a number of tokens, an integer of at least 0")
    assert isinstance(shape, list)
    content = unbased(text, place, encoding)
    return Spelled(_shaped(content, dtype or None, shape, place), start)


def _shaped(content: bytes, dtype: str | None, shape: list[int], place: str) -> np.ndarray:
    """Return raw numbers of that shape; without a dtype, integers of the matching size."""
    places = prod(shape)
    known = dtype or BY_SIZE.get(len(content) // places if places and len(content) % places == 0 else 0)
    if known is None or not places or len(content) != places * np.dtype(known).itemsize:
        raise TraceError(f"{place}: {len(content):,} bytes are not {dtype or 'ids'} of shape {shape}; save it again")
    ids = np.frombuffer(content, np.dtype(known).newbyteorder("<")).reshape(shape)
    return archive.checked_ids(ids, place)


def _checked(ids: np.ndarray, place: str) -> np.ndarray:
    """Return flat ids. Raises TraceError for others."""
    archive.refuse_packed(ids, place)
    check_values(ids, "chosen", place)
    return ids


def unbased(text: str, place: str, encoding: str = "base64") -> bytes:
    """Return the bytes of a base64 or base85 text. Raises TraceError."""
    try:
        return base64.b64decode(text, validate=True) if encoding == "base64" else base64.b85decode(text)
    except ValueError:
        raise TraceError(f"{place} is not {encoding}: expected the server's output, unchanged") from None
