"""Requests of saved responses: the rows of the tokens that ran, a request per completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.computed import Placed, Rows
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin, Shape, header_for
from moereplay.traces.importers.flat_ids import flat_in, shape_of_flat
from moereplay.traces.importers.responses import (
    FIELD,
    PROMPT,
    Answer,
    Response,
    has_ids,
    of_sglang,
    response_files,
    responses,
)
from moereplay.traces.importers.rows import Survey
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.spelled_ids import Spelled
from moereplay.traces.schema import Request, TraceError

DRAFTS = (
    "speculative decoding: rows are of accepted tokens, each of which counts as a pass of its own; "
    "the engine computed several in a pass, and rejected ones beside them"
)


def read_responses(
    path: Path, files: list[Path], found: Callable[[], Iterator[Response]], options: Options, origin: Origin
) -> Foreign:
    """Read a request per completion. Raises TraceError naming the response that is not as documented."""
    shape, notes = _shape(found, options)
    rows, survey, model, drafts = Rows(), Survey(), None, False
    for response in found():
        model, drafts = model or response.model, drafts or response.speculative
        for each in rows.of(response, shape):
            survey.add(each.ids, f"{each.place}: {FIELD}")
    if not survey.seen:
        raise TraceError(
            f"{path}: missing routed_experts in every response: start the server with "
            f"--enable-return-routed-experts, and send "
            "return_routed_experts: true with each request where the server asks for that"
        )
    notes = [*notes, *rows.notes(), *[DRAFTS] * drafts, *survey.notes()]
    if options.prompt_length is not None:
        notes = [note for note in notes if not note.startswith("responses without a count")]
    known = Shape(int(survey.routes.sum()), survey.k, survey.highest)
    header = header_for(known, options, Origin(origin.importer, path, files, model, decoding=origin.decoding), notes)
    return Foreign(header, _requests(found, shape, survey, options))


def _shape(found: Callable[[], Iterator[Response]], options: Options) -> tuple[tuple[int, int], list[str]]:
    """Return (layers, k) of flat ids and a note; empty if every response states its shape."""
    shaped: list[tuple[int, int]] = []

    def seen() -> Iterator[Response]:
        for response in found():
            ids = (each.found.ids for each in response.answers if each.found is not None and not each.found.flat)
            shaped.extend(each.shape[1:] for each in ids if not shaped)
            yield response

    flat = flat_in(seen())
    if not flat:
        return (1, 1), []
    shape, note = shape_of_flat(found(), flat, shaped[0] if shaped else None, options)
    return shape, [note]


def _requests(
    found: Callable[[], Iterator[Response]], shape: tuple[int, int], survey: Survey, options: Options
) -> Iterator[Request]:
    rows = Rows()
    for response in found():
        for each in rows.of(response, shape):
            yield Request(survey.kept(each.ids), _prompt(each, options))


def _prompt(each: Placed, options: Options) -> int:
    """Return prompt tokens that ran: --prompt-length counts those before them too."""
    if options.prompt_length is None:
        return each.prompt
    return max(min(options.prompt_length - each.skipped, len(each.ids)), 0)


# ---------------------------------------------------------------- SGLang


def sniff_sglang(path: Path) -> bool:
    """Return True for JSON with routed experts, and an object that SGLang writes."""
    return has_ids(path) and of_sglang(path)


def read_sglang(path: Path, options: Options) -> Foreign:
    """Read responses of SGLang with `return_routed_experts`: base64 of int32, flat.

    `/generate` has them in `meta_info.routed_experts`; `/v1/chat/completions` and `/v1/completions` in
    `choices[].sgl_ext.routed_experts` (`sglext` in some versions, `choices[].meta_info` with `return_meta_info`),
    with the counts in `usage`. The numbers are (tokens, all hidden layers, k) of tokens [routed_experts_start_len,
    tokens - 1). Neither weights nor logits.

    Return a request per response or choice. Raises TraceError naming the response that is not as documented.
    """
    files = response_files(path)
    if not files:
        raise TraceError(f"{path}: missing .json or .jsonl files: expected responses with {FIELD}")
    origin = Origin(SGLANG_RESPONSE.name, path, files, decoding="served by SGLang")
    return read_responses(path, files, lambda: responses(files), options, origin)


SGLANG_RESPONSE = Importer(
    name="sglang_response",
    summary="SGLang's responses with return_routed_experts: ids of every token that ran",
    formats="RESPONSES.json or .jsonl with meta_info.routed_experts or sgl_ext.routed_experts, or a folder of them",
    sniff=sniff_sglang,
    read=read_sglang,
    flat=True,
)


# ---------------------------------------------------------------- vLLM

NPZ = ".npz"


def sniff_vllm(path: Path) -> bool:
    """Return True for JSON with routed experts that SGLang did not write, or npz files with an array of that name."""
    archives = files_of(path, NPZ)
    if archives:
        return all(FIELD in archive.members(file) for file in archives)
    return has_ids(path) and not of_sglang(path)


def read_vllm(path: Path, options: Options) -> Foreign:
    """Read responses of vLLM with `--enable-return-routed-experts`, as JSON or as arrays in an npz, wrapped or not.

    `prompt_routed_experts` (prompt, L, k) once per response and `routed_experts` (generated, L, k) per choice; or,
    in other versions, `routed_experts` alone for prompt and generated tokens but the last. Dynamo has them in
    `nvext`, NeMo-RL in `choices[].message`, prime-rl as `{"data", "shape", "start", "dtype"}`. Some
    versions have -1 for tokens of the prefix cache, and null for a preempted request. An npz holds the arrays of one
    completion by the same names. No weights, no logits.

    Return a request per choice. Raises TraceError naming the response whose arrays are not as documented.
    """
    archives = files_of(path, NPZ)
    files = archives or response_files(path)
    if not files:
        raise TraceError(f"{path}: missing .json, .jsonl or .npz files: expected responses with {FIELD}")
    origin = Origin(VLLM_RESPONSE.name, path, files, decoding="served by vLLM")
    found = (lambda: map(_of_archive, files)) if archives else (lambda: responses(files))
    return read_responses(path, files, found, options, origin)


def _of_archive(file: Path) -> Response:
    ids = archive.expert_ids(file, FIELD)
    prompt = archive.expert_ids(file, PROMPT) if PROMPT in archive.members(file) else ids[:0]
    if prompt.shape[1:] != ids.shape[1:]:
        shapes = f"(layers, k) = {prompt.shape[1:]} in {PROMPT}, {ids.shape[1:]} in {FIELD}"
        raise TraceError(f"{file}: {shapes}: expected the same shape in both")
    head = len(prompt) or None
    return Response(str(file), [Answer(str(file), Spelled(np.concatenate([prompt, ids])), head, head)])


VLLM_RESPONSE = Importer(
    name="vllm_response",
    summary="vLLM's responses with --enable-return-routed-experts, and Dynamo's: ids of every token that ran",
    formats="RESPONSES.json or .jsonl with routed_experts, or NAME.npz with routed_experts; or a folder of either",
    sniff=sniff_vllm,
    read=read_vllm,
    flat=True,
)
