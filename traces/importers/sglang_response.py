"""Responses of SGLang with `return_routed_experts`: base64 of int32, flat.

`/generate` has them in `meta_info.routed_experts`; `/v1/chat/completions` and `/v1/completions` in
`choices[].sgl_ext.routed_experts` (`sglext` in some versions, `choices[].meta_info` with `return_meta_info`), with the
counts in `usage`. The numbers are (tokens, all hidden layers, k) of tokens [routed_experts_start_len, tokens - 1).
Neither weights nor logits.
"""

from __future__ import annotations

from pathlib import Path

from moereplay.traces.importers.answers import read_responses
from moereplay.traces.importers.contract import Foreign, Importer, Options, Origin
from moereplay.traces.importers.responses import FIELD, has_ids, of_sglang, response_files, responses
from moereplay.traces.schema import TraceError


def sniff(path: Path) -> bool:
    """JSON with routed experts, and an object that SGLang writes."""
    return has_ids(path) and of_sglang(path)


def read(path: Path, options: Options) -> Foreign:
    """A request per response, or per choice of one. Raises TraceError naming the response that is not as documented."""
    files = response_files(path)
    if not files:
        raise TraceError(f"{path}: no .json or .jsonl files; expected responses with {FIELD}")
    origin = Origin(IMPORTER.name, path, files, decoding="served by SGLang")
    return read_responses(path, files, lambda: responses(files), options, origin)


IMPORTER = Importer(
    name="sglang_response",
    summary="SGLang's responses with return_routed_experts: ids of every token that ran",
    formats="RESPONSES.json or .jsonl with meta_info.routed_experts or sgl_ext.routed_experts, or a folder of them",
    sniff=sniff,
    read=read,
    flat=True,
)
