"""Requests of saved responses: the rows of the tokens that ran, a request per completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from moereplay.traces.importers.computed import Placed, Rows
from moereplay.traces.importers.contract import Foreign, Options, Origin, Shape, header_for
from moereplay.traces.importers.flat_ids import flat_in, shape_of_flat
from moereplay.traces.importers.responses import FIELD, Response
from moereplay.traces.importers.rows import Survey
from moereplay.traces.schema import Request, TraceError

DRAFTS = (
    "speculative decoding: rows are of accepted tokens, each of which counts as a pass of its own; "
    "the engine computed several in a pass, and rejected ones beside them"
)


def read_responses(
    path: Path, files: list[Path], found: Callable[[], Iterator[Response]], options: Options, origin: Origin
) -> Foreign:
    """A request per completion. Raises TraceError naming the response that is not as documented."""
    shape, notes = _shape(found, options)
    rows, survey, model, drafts = Rows(), Survey(), None, False
    for response in found():
        model, drafts = model or response.model, drafts or response.speculative
        for each in rows.of(response, shape):
            survey.add(each.ids, f"{each.place}: {FIELD}")
    if not survey.seen:
        raise TraceError(
            f"{path}: no response has routed_experts; start the server with --enable-return-routed-experts, and send "
            "return_routed_experts: true with each request where the server asks for that"
        )
    notes = [*notes, *rows.notes(), *[DRAFTS] * drafts, *survey.notes()]
    if options.prompt_length is not None:
        notes = [note for note in notes if not note.startswith("responses without a count")]
    known = Shape(int(survey.routes.sum()), survey.k, survey.highest)
    header = header_for(known, options, Origin(origin.importer, path, files, model, decoding=origin.decoding), notes)
    return Foreign(header, _requests(found, shape, survey, options))


def _shape(found: Callable[[], Iterator[Response]], options: Options) -> tuple[tuple[int, int], list[str]]:
    """(layers, k) of flat ids, and what to say of it; nothing where every response states its shape."""
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
    """Prompt tokens that ran: --prompt-length counts those before them too."""
    if options.prompt_length is None:
        return each.prompt
    return max(min(options.prompt_length - each.skipped, len(each.ids)), 0)
