"""Find layers and k of flat ids, which state neither: from --shape, the model, or the token counts of responses.

With `routed_experts_start_len` a response has the rows of its last tokens only. Flat ids of half the tokens are as long
as those of all tokens with half the layers. A response gives the number of ids per token only if its rows are known
to be complete: by another response in the file, or because neighbouring tokens share experts only at the right number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from moereplay.traces.importers.contract import ASSUMED, Options
from moereplay.traces.importers.responses import Response
from moereplay.traces.patterns import Likeness, shared
from moereplay.traces.schema import TraceError

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
    spare: int  #: rows that may follow them: one for each answer
    fewest: int  #: rows of the tokens that were generated alone
    stated: bool  #: whether the start is
    cached: int | None

    @property
    def total(self) -> int:
        """Ids of all answers."""
        return sum(self.places)

    def width(self) -> int | None:
        """Return ids per token if every token that ran has a row; None if the ids cannot be divided so."""
        rows = [] if self.rows is None else [self.rows, self.rows - (not self.spare)]
        return next((self.total // each for each in rows if each > 0 and self.total % each == 0), None)

    def fits(self, width: int) -> bool:
        """Return True if a response can consist of rows of that width."""
        if any(each % width for each in self.places):
            return False
        return self.rows is None or self.fewest <= self.total // width <= self.rows + self.spare


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
    answers = [(each, each.found.ids) for each in response.answers if each.found is not None and each.found.flat]
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
    fitting = _fitting(width, (ids.reshape(-1, width) for ids in _ids_of(found)))
    if not fitting:
        said = f"{width} ids per token, every layer repeats an expert"
        raise TraceError(
            f"{flat[0].place}: {said}: expected SGLang's routed_experts; rows may have been omitted, {FIX}"
        )
    k = max(fitting)
    how = f"the largest at which no row of {width} ids per token repeats an expert; pass --model NAME to state it"
    return (width // k, k), f"{ASSUMED}k = {k}, {how}"


def _ids_of(found: Iterable[Response]) -> Iterator[np.ndarray]:
    answers = (each.found for response in found for each in response.answers)
    return (each.ids for each in answers if each is not None and each.flat)


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
    if any(each.stated for each in witnesses) or len({each.rows for each in witnesses}) > 1:
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
    for fewer in range(max(each.fewest, 2), each.total // width):
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
    for each in rows:
        for k, repeats in possible.items():
            repeats.add(each.reshape(len(each), -1, k))
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
