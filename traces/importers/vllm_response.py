"""Responses of vLLM with `--enable-return-routed-experts`, as JSON or as arrays in an npz, and of what wraps it.

`prompt_routed_experts` (prompt, L, k) once per response and `routed_experts` (generated, L, k) per choice; or, in other
versions, `routed_experts` alone for prompt and generated tokens but the last. Dynamo has them in `nvext`, NeMo-RL in
`choices[].message`, prime-rl as `{"data", "shape", "start", "dtype"}`. -1 stands at tokens of the prefix cache in some
versions, null for a request that was preempted. An npz holds the arrays of one completion by the same names. No
weights, no logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.answers import read_responses
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin
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
from moereplay.traces.importers.sources import files_of
from moereplay.traces.importers.spelled_ids import Spelled
from moereplay.traces.schema import TraceError

NPZ = ".npz"


def sniff(path: Path) -> bool:
    """JSON with routed experts that SGLang did not write, or npz files with an array of that name."""
    archives = files_of(path, NPZ)
    if archives:
        return all(FIELD in archive.members(file) for file in archives)
    return has_ids(path) and not of_sglang(path)


def read(path: Path, options: Options) -> Foreign:
    """A request per choice. Raises TraceError naming the response whose arrays are not as documented."""
    archives = files_of(path, NPZ)
    files = archives or response_files(path)
    if not files:
        raise TraceError(f"{path}: no .json, .jsonl or .npz files; expected responses with {FIELD}")
    origin = Origin(IMPORTER.name, path, files, decoding="served by vLLM")
    found = (lambda: map(_of_archive, files)) if archives else (lambda: responses(files))
    return read_responses(path, files, found, options, origin)


def _of_archive(file: Path) -> Response:
    ids = archive.expert_ids(file, FIELD)
    prompt = archive.expert_ids(file, PROMPT) if PROMPT in archive.members(file) else ids[:0]
    if prompt.shape[1:] != ids.shape[1:]:
        shapes = f"(layers, k) = {prompt.shape[1:]} in {PROMPT}, {ids.shape[1:]} in {FIELD}"
        raise TraceError(f"{file}: {shapes}; expected the same in both")
    head = len(prompt) or None
    return Response(str(file), [Answer(str(file), Spelled(np.concatenate([prompt, ids])), head, head)])


IMPORTER = Importer(
    name="vllm_response",
    summary="vLLM's responses with --enable-return-routed-experts, and Dynamo's: ids of every token that ran",
    formats="RESPONSES.json or .jsonl with routed_experts, or NAME.npz with routed_experts; or a folder of either",
    sniff=sniff,
    read=read,
    flat=True,
)
