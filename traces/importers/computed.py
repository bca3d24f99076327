"""Match the rows of a response to the tokens that a pass computed.

A server returns rows for tokens [start, tokens - 1): the last generated token went through no pass. Tokens of the
prompt in the prefix cache were not computed for this request, although SGLang and newer versions of vLLM return
their rows; the request begins after them. Tokens that ran but have no row are kept as not routed (-1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moereplay.traces.importers.responses import Answer, Response
from moereplay.traces.patterns import beginnings
from moereplay.traces.schema import TraceError

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
    prompt, made = answer.prompt, answer.generated
    if prompt is None or made is None:
        start = answer.start or 0
        if prompt is not None and start + rows < prompt - 1:
            raise TraceError(_misfit(answer, rows, f"at least {prompt - 1 - start:,}"))
        return Window(start, rows, prompt)
    ran = prompt + made - 1 if made else prompt
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

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()  #: tokens, by why they are not as they were returned
        self._beginnings: set[int] = set()

    def of(self, response: Response, shape: tuple[int, int]) -> Iterator[Placed]:
        """Yield the rows of every answer with rows, flat ids by (layers, k). Raises TraceError naming the answer."""
        cached = _shares(response)
        for answer, known in zip(response.answers, cached, strict=True):
            if answer.found is None:
                self.left["missing"] += 1
                continue
            yield self._placed(answer, known, _shaped(answer, shape))

    def _placed(self, answer: Answer, cached: int | None, ids: np.ndarray) -> Placed:
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
        self.left["cached"] += begin + blank
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


def _shaped(answer: Answer, shape: tuple[int, int]) -> np.ndarray:
    assert answer.found is not None
    ids = answer.found.ids.astype(np.int16)  # as stored; they were checked
    if not answer.found.flat:
        return ids
    layers, k = shape
    if len(ids) % (layers * k):
        said = f"{len(ids):,} ids do not divide into rows of {layers} layers and {k} experts"
        raise TraceError(f"{answer.place}: {said}; pass --model with the recorded model, or --shape LAYERSxK")
    return ids.reshape(-1, layers, k)


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
