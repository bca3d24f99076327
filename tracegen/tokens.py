"""The requests of a recording: token ids before a model runs, and appending what it gave to a trace. Without torch.

Requests are prompts to continue, or teacher-forced windows of text. Everything that can be wrong with a prompt is found
here, before the first is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moereplay.tracegen.errors import RecordError
from moereplay.tracegen.folder import one_line
from moereplay.tracegen.prompts import Prompt, Prompts, is_empty
from moereplay.traces.schema import Request
from moereplay.traces.texts import counted
from moereplay.traces.writer import TraceWriter

PIECE = 2**20  #: characters tokenised at a time: a tokenizer needs many times its text's memory
#: Some chat templates print today's date; a recording resumed tomorrow must see the same prompt.
CHAT_DATE = "2025-01-01"
FIXED_DATE = f"{{%- macro strftime_now(form) -%}}{CHAT_DATE}{{%- endmacro -%}}"  #: shadows transformers' own function


class Work(NamedTuple):
    """Input of the model: an array of int32 token ids per request, and their names in a trace."""

    sequences: tuple[np.ndarray, ...]
    prompts: str  #: name, number and hash


class Room(NamedTuple):
    """Limits of a model: its context length (None if not stated) and its number of token ids."""

    context: int | None
    vocabulary: int


def check_chat(tokenizer: Any, chat: bool) -> None:
    """Raises RecordError if a chat template is wanted where there is none."""
    if chat and not tokenizer.chat_template:
        raise RecordError("--chat: this checkpoint's tokenizer has no chat template; omit --chat")


def encode(prompts: Prompts, tokenizer: Any, room: Room, new: int, chat: bool = False, truncate: bool = False) -> Work:
    """Return the token ids of every prompt: of a text with special tokens, or as one user message of the chat template;
    token ids as they are.

    A prompt that leaves no room for `new` tokens is cut if `truncate` is set: its special first token and its end are
    kept. Raises RecordError naming the prompt if it is empty, too long or has a token id that the model does not, or
    if there is no chat template.
    """
    check_chat(tokenizer, chat)
    if not prompts.texts:
        raise RecordError(f"{prompts.name}: no prompts to run; raise --limit")
    most = None if room.context is None else room.context + 1 - new  # the last new token does not go through the model
    if most is not None and most < 1:
        raise RecordError(
            f"--max-new-tokens {new}: the model's context is {room.context} tokens; pass a smaller number"
        )
    first = opening(tokenizer) if not chat else []
    sequences = []
    for number, text in enumerate(prompts.texts, 1):
        if isinstance(text, str):
            ids = _chat(tokenizer, text) if chat else _tokenized(tokenizer, text)
        else:
            ids = _checked(text, prompts.places[number - 1], room, chat)
        _refuse_no_tokens(ids, text, f"prompt {number}")
        keep = len(first) if ids[: len(first)] == first else 0
        sequences.append(_fitted(ids, number, most, room, new, keep, truncate))
    _check_known(sequences, room)
    given = " of token ids" * any(not isinstance(text, str) for text in prompts.texts)
    how = f"{given}{', as chat' if chat else ''}, sha256 {prompts.sha256}"
    return Work(tuple(sequences), f"{prompts.name}: {counted(len(sequences), 'prompt')}{how}")


def _checked(ids: tuple[int, ...], place: str, room: Room, chat: bool) -> list[int]:
    """Return token ids that a user gave. Raises RecordError."""
    if chat:
        raise RecordError(f"{place}: --chat cannot be combined with token ids")
    if max(ids, default=0) >= room.vocabulary:
        at = next(at for at, token in enumerate(ids) if token >= room.vocabulary)
        raise RecordError(
            f"{place}: invalid token id {ids[at]} (number {at + 1}): expected 0 to {room.vocabulary - 1}, as the "
            f"vocabulary of the model has {room.vocabulary}"
        )
    return list(ids)


def windows(texts: Prompts, tokenizer: Any, room: Room, width: int, limit: int | None = None) -> Work:
    """Return consecutive windows of `width` tokens of each text; the remainder of a text is not used.

    Each begins with the token that the tokenizer puts before every text, if it has one. Raises RecordError if the
    window exceeds the context or a text is shorter than a window.
    """
    if room.context is not None and width > room.context:
        raise RecordError(f"--window {width} exceeds the model's context of {room.context} tokens; pass a smaller one")
    first = opening(tokenizer)
    if width <= len(first):
        raise RecordError(f"--window {width} has no room for text; pass a larger one")
    sequences: list[np.ndarray] = []
    for number, text in enumerate(texts.texts, 1):
        if limit is not None and len(sequences) >= limit:
            break
        assert isinstance(text, str)  # `read_texts` reads no token ids
        sequences += _cut(tokenizer, text, first, width, None if limit is None else limit - len(sequences), number)
    _check_known(sequences, room)
    return Work(tuple(sequences), f"{texts.name}: {len(sequences)} windows of {width}, sha256 {texts.sha256}")


def opening(tokenizer: Any) -> list[int]:
    """Return the beginning-of-text token if the tokenizer adds one to every text, else nothing."""
    empty = _tokenized(tokenizer, "")
    return empty[:1] if empty and empty[0] == tokenizer.bos_token_id else []


def _tokenized(tokenizer: Any, text: str, **how: bool) -> list[int]:
    try:
        return tokenizer(text, verbose=False, **how)["input_ids"]
    except Exception as refused:  # foreign data in foreign code: it can be anything
        raise RecordError(f"the checkpoint's tokenizer failed: {one_line(refused)}; download it again") from None


def _chat(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    template = FIXED_DATE + tokenizer.get_chat_template()
    try:
        made = tokenizer.apply_chat_template(
            message, chat_template=template, add_generation_prompt=True, return_dict=True, date_string=CHAT_DATE
        )
    except Exception as refused:  # a template is a program of the checkpoint's, in jinja's sandbox
        raise RecordError(f"--chat: the checkpoint's chat template failed: {one_line(refused)}") from None
    return made["input_ids"]


def _fitted(
    ids: list[int], number: int, most: int | None, room: Room, new: int, keep: int, truncate: bool
) -> np.ndarray:
    """Return the prompt's ids as int32, cut at its start if it is too long and may be cut."""
    if most is None or len(ids) <= most:
        return np.array(ids, np.int32)
    if not truncate:
        needs = f"prompt {number} has {len(ids)} tokens, with {new} new ones more than the model's context"
        raise RecordError(f"{needs} of {room.context}; use --truncate, a smaller --max-new-tokens, or remove it")
    keep = min(keep, most - 1)
    return np.array(ids[:keep] + ids[len(ids) - (most - keep) :], np.int32)


def _cut(
    tokenizer: Any, text: str, first: list[int], width: int, limit: int | None, number: int
) -> Iterator[np.ndarray]:
    step = width - len(first)
    waiting = np.empty(0, np.int32)
    made = 0
    for piece in _pieces(text):
        waiting = np.concatenate([waiting, np.array(_ids(tokenizer, piece), np.int32)])
        while len(waiting) >= step:
            yield np.concatenate([np.array(first, np.int32), waiting[:step]])
            waiting, made = waiting[step:], made + 1
            if made == limit:
                return
    if not made:
        _refuse_no_tokens(waiting, text, f"text {number}")
        raise RecordError(
            f"text {number} has {len(waiting)} tokens, less than one --window of {width}; pass a smaller one"
        )


def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    return _tokenized(tokenizer, text, add_special_tokens=False)


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces of about a million characters, each ending with a line where possible."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + PIECE) + 1 if start + PIECE < len(text) else len(text)
        end = end if end > start else start + PIECE
        yield text[start:end]
        start = end


def _refuse_no_tokens(ids: Sequence[int] | np.ndarray, text: Prompt, called: str) -> None:
    if len(ids):
        return
    if is_empty(text):
        raise RecordError(f"{called} is empty: expected at least one token")
    why = "the checkpoint's tokenizer has no token for anything in it"
    raise RecordError(f"{called} has no tokens: {why}; check the tokenizer files of the checkpoint")


def _check_known(sequences: Sequence[np.ndarray], room: Room) -> None:
    highest = max((int(ids.max()) for ids in sequences), default=0)
    if highest >= room.vocabulary:
        why = f"the tokenizer gives token {highest}; the vocabulary of the model has {room.vocabulary}"
        raise RecordError(f"{why}; the checkpoint's tokenizer belongs to another model")


# -- Append requests to a trace one by one: progress, commits at most a minute apart, clean-up after a stop.

SECONDS_BETWEEN_COMMITS = 60.0


class Progress(NamedTuple):
    """Progress of a recording; tokens and seconds are of this run, without the requests of an earlier one."""

    done: int
    total: int
    skipped: int  #: requests recorded by an earlier run, part of `done`
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of this run so far."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float:
        """Estimate from the requests of this run; 0 before the first."""
        made = self.done - self.skipped
        return self.seconds / made * (self.total - self.done) if made else 0.0


def appended(
    writer: TraceWriter,
    run: Callable[[int, np.ndarray], Request],
    work: Work,
    progress: Callable[[Progress], None],
    seconds: float,
) -> None:
    """Append every missing request, recorded by `run`; commit at least every `seconds`."""
    skipped, total, tokens = writer.requests_done, len(work.sequences), 0
    began = committed = time.monotonic()
    progress(Progress(skipped, total, skipped, 0, 0.0))
    for number in range(skipped, total):
        try:
            request = run(number, work.sequences[number])
        except BaseException:
            writer.commit()  # appended requests are complete even if this one was stopped, also by Ctrl-C
            raise
        writer.append(request)
        tokens += len(request.chosen)
        now = time.monotonic()
        if now - committed > seconds:
            writer.commit()
            committed = now
        progress(Progress(number + 1, total, skipped, tokens, now - began))
