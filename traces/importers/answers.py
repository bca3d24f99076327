"""Requests of saved responses: the rows of the tokens that ran, a request per completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moereplay.traces.importers import archive
from moereplay.traces.importers.contract import (
    ASSUMED,
    LAYERS_FIRST,
    Foreign,
    Importer,
    Options,
    Origin,
    Shape,
    header_for,
)
from moereplay.traces.importers.responses import (
    FIELD,
    PROMPT,
    SGLANG,
    Answer,
    Response,
    Spelled,
    has_ids,
    has_key,
    joined,
    response_files,
    responses,
)
from moereplay.traces.importers.rows import Survey
from moereplay.traces.importers.sources import files_of
from moereplay.traces.patterns import Likeness, beginnings, shared
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
    rows, survey, model, drafts = Rows(options), Survey(), None, False
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
            ids = (
                answer.found.ids for answer in response.answers if answer.found is not None and not answer.found.flat
            )
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
    rows = Rows(options)
    for response in found():
        for each in rows.of(response, shape):
            prompt = each.prompt
            if options.prompt_length is not None:  # counts the tokens before those that ran, too
                prompt = max(min(options.prompt_length - each.skipped, len(each.ids)), 0)
            yield Request(survey.kept(each.ids), prompt)


# ---------------------------------------------------------------- SGLang


def sniff_sglang(path: Path) -> bool:
    """Return True for JSON with routed experts, and an object that SGLang writes."""
    return has_ids(path) and has_key(path, *SGLANG)


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
    arrays=True,
)


# ---------------------------------------------------------------- vLLM

NPZ = ".npz"


def sniff_vllm(path: Path) -> bool:
    """Return True for JSON with routed experts that SGLang did not write, or npz files with an array of that name."""
    archives = files_of(path, NPZ)
    if archives:
        return all(FIELD in archive.members(file) for file in archives)
    return has_ids(path) and not has_key(path, *SGLANG)


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
    head = len(prompt) or None
    return Response(str(file), [Answer(str(file), Spelled(joined(prompt, ids, str(file))), head, head)])


VLLM_RESPONSE = Importer(
    name="vllm_response",
    summary="vLLM's responses with --enable-return-routed-experts, and Dynamo's: ids of every token that ran",
    formats="RESPONSES.json or .jsonl with routed_experts, or NAME.npz with routed_experts; or a folder of either",
    sniff=sniff_vllm,
    read=read_vllm,
    flat=True,
    arrays=True,
)


# -- Match the rows of a response to the tokens that a pass computed. A server returns rows for tokens
# -- [start, tokens - 1): the last generated token went through no pass. Tokens of the prompt in the prefix cache were
# -- not computed for this request, although SGLang and newer versions of vLLM return their rows; the request begins
# -- after them. Tokens that ran but have no row are kept as not routed (-1).

FEWEST_SHARED = 4  #: rows of a common beginning that count as a prefix
MOST_HELD = 1 << 18  #: beginnings that are remembered


class Placed(NamedTuple):
    """Rows of the tokens that ran."""

    place: str
    ids: np.ndarray  #: (T, L, k)
    prompt: int  #: of these, tokens of the prompt
    skipped: int  #: tokens of the prompt before the first


class Window(NamedTuple):
    """Position of an answer's rows among its tokens."""

    start: int  #: token of the first row
    rows: int  #: of tokens that were computed; more may follow
    prompt: int | None


def window(answer: Answer, rows: int) -> Window:
    """Find where `rows` rows lie by the counts that the response states. Raises TraceError if they fit nowhere."""
    prompt, made, ran = answer.prompt, answer.generated, answer.ran
    if prompt is None or made is None or ran is None:
        start = answer.start or 0
        if prompt is not None and start + rows < prompt - 1:
            raise TraceError(_misfit(answer, rows, f"at least {prompt - 1 - start:,}"))
        return Window(start, rows, prompt)
    for start in [0] if answer.start is None else [answer.start, 0]:
        if rows in (ran - start, ran - start + bool(made)):
            return Window(start, ran - start, prompt)
    if not made and rows == ran - 1:
        return Window(0, rows, prompt)
    if answer.start is None and ran - prompt <= rows < ran:
        return Window(ran - rows, rows, prompt)
    least = max(ran - prompt, 1) if answer.start is None else ran - answer.start
    raise TraceError(_misfit(answer, rows, f"{least:,} to {ran:,}" if least < ran else f"{ran:,}"))


def _misfit(answer: Answer, rows: int, expected: str) -> str:
    counts = f"{answer.prompt:,} prompt tokens"
    counts += "" if answer.generated is None else f" and {answer.generated:,} generated ones"
    counts += "" if answer.start is None else f" from token {answer.start:,} (routed_experts_start_len) on"
    fix = "save the response unchanged, and check whether routed_experts_start_len was set"
    return f"{answer.place}: {rows:,} rows of routed experts for {counts}: expected {expected} rows; {fix}"


class Rows:
    """The rows that ran, answer by answer, and what was left out of them."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.left: Counter[str] = Counter()  #: tokens, by why they are not as they were returned
        self._beginnings: set[int] = set()

    def of(self, response: Response, shape: tuple[int, int]) -> Iterator[Placed]:
        """Yield the rows of every answer with rows, flat ids by (layers, k). Raises TraceError naming the answer."""
        cached = _shares(response)
        for at, (answer, known) in enumerate(zip(response.answers, cached, strict=True)):
            if answer.found is None:
                self.left["missing"] += 1
                continue
            why = "shared" if at and answer.cached is None else "cached"
            yield self._placed(answer, known, _shaped(answer, shape, self._options), why)

    def _placed(self, answer: Answer, cached: int | None, ids: np.ndarray, why: str) -> Placed:
        within = window(answer, len(ids))
        self.left["uncounted"] += within.prompt is None
        self.left["surplus"] += len(ids) - within.rows
        ids = ids[: within.rows]
        padded = padding_of(ids)
        self.left["padding"] += padded
        ids = ids[: len(ids) - padded]
        prompt = within.prompt or 0
        if cached is None:
            cached = within.start or self._known_beginning(ids, prompt)
            self.left["assumed"] += min(within.start, prompt)
        begin = min(cached, max(prompt - 1, 0), within.start + len(ids) - 1)
        ids, lacking = ids[max(begin - within.start, 0) :], max(within.start - begin, 0)
        self.left["lacking"] += lacking
        blank = _leading(ids, prompt - begin - lacking) if not lacking else 0
        self.left[why] += begin
        self.left["blank"] += blank
        ids = np.concatenate([np.full((lacking, *ids.shape[1:]), -1, ids.dtype), ids[blank:]])
        return Placed(answer.place, ids, max(min(prompt - begin - blank, len(ids)), 0), begin + blank)

    def _known_beginning(self, ids: np.ndarray, prompt: int) -> int:
        """Return how many prompt tokens have the same rows as an earlier response; remember the rows of this one."""
        hashes = beginnings(ids)
        known = 0
        for at, value in enumerate(hashes[: max(prompt - 1, 0)].tolist()):
            if value not in self._beginnings:
                break
            known = at + 1
        if len(self._beginnings) < MOST_HELD:
            self._beginnings.update(hashes[:MOST_HELD].tolist())
        self.left["repeated"] += known if known >= FEWEST_SHARED else 0
        return known if known >= FEWEST_SHARED else 0

    def notes(self) -> list[str]:
        """Return notes about rows that were left out."""
        said = {
            "missing": "{} choices have no routed_experts (preempted, aborted, or not requested): left out",
            "cached": "{} prompt tokens came from the engine's prefix cache and were not computed: left out, "
            "so that the request begins after them",
            "shared": "{} prompt tokens of later choices were computed for the first one: left out; each choice begins "
            "at the prompt's last token",
            "blank": "{} prompt tokens have no experts in any layer (computed by another server, or cached): left out, "
            "so that the request begins after them",
            "repeated": "of these, {} repeat the rows with which an earlier response begins; the responses do not "
            "state cached_tokens",
            "assumed": "of these, {} have no row, and the responses do not state cached_tokens",
            "lacking": "{} tokens ran and have no row (routed_experts_start_len): kept as not routed (-1), "
            "which makes demand too low",
            "surplus": "{} rows follow the last token that a pass computed: left out",
            "padding": "{} rows at the ends of responses are padding, with the same ids in all layers: left out",
            "uncounted": "responses lack a prompt token count: all of their tokens count as decoded",
        }
        return [text.format(f"{self.left[name]:,}") for name, text in said.items() if self.left[name]]


def _shaped(answer: Answer, shape: tuple[int, int], options: Options) -> np.ndarray:
    assert answer.found is not None
    ids = answer.found.ids.astype(np.int16)  # as stored; they were checked
    layers, k = shape
    if not answer.found.flat:
        return options.token_first(ids, f"{answer.place}: {FIELD}", fits=answer.may_have)
    if len(ids) % (layers * k):
        said = f"{len(ids):,} ids do not divide into rows of {layers} layers and {k} experts"
        raise TraceError(f"{answer.place}: {said}; pass --model with the recorded model, or --shape LAYERSxK")
    sizes = (layers, -1, k) if options.axes == LAYERS_FIRST else (-1, layers, k)
    return options.token_first(ids.reshape(sizes), f"{answer.place}: {FIELD}")


def _shares(response: Response) -> list[int | None]:
    """Return the cached tokens of each answer; if they are counted over all answers, the later ones get most of them.

    Answers share their prompt: it is computed once, except its last token, from which each answer starts.
    """
    own = [answer.cached for answer in response.answers]
    if len(own) == 1 or any(known is not None for known in own):
        return own
    left = response.cached
    for at in range(len(own) - 1, -1, -1):
        whole = max((response.answers[at].prompt or 0) - 1, 0)
        if left is None:
            own[at] = whole if at else None
        else:
            own[at] = min(whole, left)
            left -= min(whole, left)
    return own


def padding_of(ids: np.ndarray) -> int:
    """Return the padding rows at the end of (T, L, k): one number throughout, or 0, 1, ... k - 1."""
    padding = _is_filler(ids) | ((ids == np.arange(ids.shape[2])).all((1, 2)) & (ids.shape[1] > 1))
    return int(np.argmin(padding[::-1])) if not padding.all() else 0


def _is_filler(ids: np.ndarray) -> np.ndarray:
    """Return (T,) which rows (T, L, k) hold one id in all places, as no row of several experts can."""
    first = ids[:, :1, :1]
    return (ids == first).all((1, 2)) & (first[:, 0, 0] >= 0) & (ids.shape[2] > 1)


def _leading(ids: np.ndarray, prompt: int) -> int:
    """Return tokens at the head of the prompt that have no expert in any layer: a cache or another server had them."""
    head = ids[: max(min(prompt, len(ids) - 1), 0)]
    empty = (head < 0).all((1, 2)) | _is_filler(head)
    return int(np.argmin(empty)) if not empty.all() else len(head)


# -- Find layers and k of flat ids, which state neither: from --shape, the model, or the token counts of responses.
# -- With `routed_experts_start_len` a response has the rows of its last tokens only. Flat ids of half the tokens are as
# -- long as those of all tokens with half the layers. A response gives the number of ids per token only if its rows are
# -- known to be complete: by another response in the file, or because neighbouring tokens share experts only at the
# -- right number.

LARGEST_K = 128
MOST_DENSE = 8  #: hidden layers without experts, in addition to a model's MoE layers
SURELY, CLEARLY = 5.0, 3.0  #: standard errors at which another reading is right, and at which none is
SAMPLED = 1 << 20  #: ids of a response that are kept
FIX = "pass --model NAME or --shape LAYERSxK"


class Flat(NamedTuple):
    """Number of flat ids of a response, and the counts that it states."""

    place: str
    places: tuple[int, ...]  #: ids of each answer
    sample: np.ndarray | None  #: the first ids of a lone answer
    rows: int | None  #: of all answers together, if all tokens that ran have one
    extra_rows: int  #: rows that may follow them: one for each answer
    min_rows: int  #: rows of the tokens that were generated alone
    has_start: bool
    cached: int | None

    @property
    def total(self) -> int:
        """Ids of all answers."""
        return sum(self.places)

    def width(self) -> int | None:
        """Return ids per token if every token that ran has a row; None if the ids cannot be divided so."""
        rows = [] if self.rows is None else [self.rows, self.rows - (not self.extra_rows)]
        return next((self.total // row for row in rows if row > 0 and self.total % row == 0), None)

    def fits(self, width: int) -> bool:
        """Return True if a response can consist of rows of that width."""
        if any(place % width for place in self.places):
            return False
        return self.rows is None or self.min_rows <= self.total // width <= self.rows + self.extra_rows


def flat_in(found: Iterable[Response]) -> list[Flat]:
    """Return the responses with flat ids; the first of each number of ids per token keeps a sample of them."""
    flat: list[Flat] = []
    sampled: set[int | None] = set()
    for response in found:
        each = _flat(response)
        if each is not None:
            again = each.width() in sampled
            sampled.add(each.width())
            flat.append(each._replace(sample=None) if again else each)
    return flat


def _flat(response: Response) -> Flat | None:
    answers = [
        (answer, answer.found.ids) for answer in response.answers if answer.found is not None and answer.found.flat
    ]
    if not answers:
        return None
    made = [each.generated for each, _ in answers]
    total = sum(n or 0 for n in made) if None not in made else None
    if total is None and len(answers) == len(response.answers):
        total = response.generated
    prompts = [each.prompt for each, _ in answers]
    rows, passes = None, max((total or 0) - len(answers), 0)
    if None not in prompts and total is not None:
        rows = sum(n or 0 for n in prompts) + passes - sum(each.start or 0 for each, _ in answers)
    cached = [each.cached for each, _ in answers if each.cached is not None]
    cached += [] if response.cached is None else [response.cached]
    return Flat(
        response.place,
        tuple(len(ids) for _, ids in answers),
        answers[0][1][:SAMPLED].copy() if len(answers) == 1 else None,
        rows,
        len(answers) if total else 0,
        max(passes, 1),
        all(each.start is not None for each, _ in answers),
        sum(cached) if cached else None,
    )


def shape_of_flat(
    found: Iterable[Response], flat: list[Flat], shaped: tuple[int, int] | None, options: Options
) -> tuple[tuple[int, int], str]:
    """Return (layers, k) of flat ids, and a note on their source.

    Raises TraceError if they cannot be determined.
    """
    if options.shape is not None:
        return options.shape, f"{ASSUMED}{_named(options.shape)} as --shape says"
    if shaped is not None:
        return shaped, f"{ASSUMED}{_named(shaped)} as other responses of the file have"
    if options.geometry is not None:
        layers, k = _of_model(flat, options.geometry.layers, options.geometry.k), options.geometry.k
        return (layers, k), f"{ASSUMED}k = {k} as {'--model says' if options.model else 'the geometry given has'}"
    width = _width(flat)
    answers = (answer.found for response in found for answer in response.answers)
    fitting = _fitting(width, (spelt.ids.reshape(-1, width) for spelt in answers if spelt is not None and spelt.flat))
    if not fitting:
        said = f"{width} ids per token, every layer repeats an expert"
        raise TraceError(
            f"{flat[0].place}: {said}: expected SGLang's routed_experts; rows may have been omitted, {FIX}"
        )
    k = max(fitting)
    how = f"the largest at which no row of {width} ids per token repeats an expert; pass --model NAME to state it"
    return (width // k, k), f"{ASSUMED}k = {k}, {how}"


def _named(shape: tuple[int, int]) -> str:
    return f"{shape[0]} layers and k = {shape[1]}"


def _of_model(found: list[Flat], layers: int, k: int) -> int:
    """Return the number of layers: MoE layers, or all hidden layers if only that fits the counts. Raises TraceError."""
    full = {width // k for each in found if (width := each.width()) and width % k == 0}
    for hidden in [*sorted(each for each in full if each >= layers), *range(layers, layers + MOST_DENSE + 1)]:
        if all(each.fits(hidden * k) for each in found):
            return hidden
    wrong = next((each for each in found if not each.fits(layers * k)), found[0])
    said = (
        f"{wrong.total:,} ids for {_counted(wrong)}, which do not divide into rows of {layers} layers and {k} experts"
    )
    raise TraceError(f"{wrong.place}: {said}; pass the model that it was recorded with, or --shape LAYERSxK")


def _counted(each: Flat) -> str:
    return "tokens that are not counted" if each.rows is None else f"{each.rows:,} computed tokens"


def _width(found: list[Flat]) -> int:
    """Return ids per token: the most that a response has if its rows are all there.

    Raises TraceError if that is not sure.
    """
    widths = {}
    for each in found:
        if width := each.width():
            widths.setdefault(width, []).append(each)
    uncounted = next((each for each in found if each.rows is None), None)
    if not widths and uncounted is not None:
        raise TraceError(
            f"{uncounted.place}: missing prompt_tokens and completion_tokens for {uncounted.total:,} ids; "
            f"save the whole response, or {FIX}"
        )
    best = max(widths, default=0)
    wrong = next((each for each in found if not best or not each.fits(best)), None)
    if wrong is not None:
        raise TraceError(_partial(wrong, "the ids do not divide into whole tokens"))
    witnesses = widths[best]
    if any(witness.has_start for witness in witnesses) or len({each.rows for each in witnesses}) > 1:
        return best
    judged = _judged(witnesses[0], best)
    if judged is not None:
        raise TraceError(_partial(witnesses[0], judged))
    return best


def _partial(wrong: Flat, why: str) -> str:
    cause = "with routed_experts_start_len the server returns the last rows only"
    return f"{wrong.place}: {wrong.total:,} ids for {_counted(wrong)}: {why}; {cause}; {FIX} to have the rows counted"


def _judged(each: Flat, width: int) -> str | None:
    """Return why the ids may belong to fewer tokens with more ids each; None if they do not.

    Neighbouring tokens share experts. Read at a wrong width, a row holds parts of two tokens and shares none.
    """
    if each.sample is None or each.rows is None:
        return None
    own = _likeness(each.sample, width)
    doubtful = False
    for fewer in range(max(each.min_rows, 2), each.total // width):
        other = each.total // fewer
        theirs = _likeness(each.sample, other) if each.total % fewer == 0 else None
        if theirs is None:
            continue
        apart = own.above(theirs) if own is not None else -SURELY
        if apart <= -SURELY:
            return f"neighbouring tokens share experts at {other} ids per token, {fewer:,} rows, and not at {width}"
        doubtful |= apart < CLEARLY
    if not doubtful or not each.cached:
        return None
    return f"{each.cached:,} prompt tokens were cached, and it is unknown whether their rows are included"


def _likeness(ids: np.ndarray, width: int) -> Likeness | None:
    """Return the likeness at that width, with the largest k that fits; None if none does, or without two rows."""
    rows = ids[: min(len(ids) // width, max(SAMPLED // 8 // width, 2)) * width].reshape(-1, width)
    fitting = _fitting(width, [rows]) if len(rows) > 1 else []
    if not fitting:
        return None
    k = max(fitting)
    layers = rows.reshape(len(rows), -1, k)
    places = (len(rows) - 1) * width
    return Likeness(float(shared(layers[:-1], layers[1:]).sum()) / places, k / (int(ids.max()) + 1), places)


def _fitting(width: int, rows: Iterable[np.ndarray]) -> list[int]:
    """Return every k at which rows (T, W) repeat no expert within a layer."""
    possible = {k: Repeats() for k in range(1, min(width, LARGEST_K) + 1) if width % k == 0}
    for row in rows:
        for k, repeats in possible.items():
            repeats.add(row.reshape(len(row), -1, k))
    return [k for k, repeats in possible.items() if repeats.fit()]


class Repeats:
    """Test whether rows (T, L, k) can be choices of distinct experts, but for layers of one number throughout."""

    def __init__(self) -> None:
        self._repeated: np.ndarray | bool = False  #: (L,)
        self._least: np.ndarray | float = np.inf
        self._most: np.ndarray | float = -np.inf

    def add(self, ids: np.ndarray) -> None:
        """Add the rows of another response, without padding."""
        one = (ids == ids[:, :1, :1]).all((1, 2))
        ids = ids[~one] if not one.all() else ids
        ordered = np.sort(ids, -1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        self._repeated = self._repeated | twice.any((0, 2))
        self._least = np.minimum(self._least, ids.min((0, 2)))
        self._most = np.maximum(self._most, ids.max((0, 2)))

    def fit(self) -> bool:
        """True if every layer has distinct experts or none at all, and one has some."""
        constant = np.asarray(self._least == self._most)
        return bool((constant | ~np.asarray(self._repeated)).all() and not constant.all())
