"""Settings of a recording, checked before torch is imported, which takes seconds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from pydantic import Field

from moereplay.tracegen.errors import RecordError, require
from moereplay.traces.dense import with_stored
from moereplay.traces.lock import refuse_busy
from moereplay.traces.schema import Frozen, Geometry, TraceError
from moereplay.traces.stored import partial_of
from moereplay.traces.texts import counted, hint, whole
from moereplay.traces.values import MOST_DRAFTS

NGRAM = "ngram"


class Decoding(Frozen):
    """Decoding of at most `max_new_tokens` tokens, fewer if the model ends; temperature 0 is greedy."""

    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)  #: 0 = all tokens

    @property
    def words(self) -> str:
        """The settings as provenance states them."""
        if not self.temperature:
            return f"greedy, max_new_tokens={self.max_new_tokens}"
        drawn = f"sampled, temperature={self.temperature:g}, top_p={self.top_p:g}, top_k={self.top_k}"
        return f"{drawn}, max_new_tokens={self.max_new_tokens}"


class Drafting(Frozen):
    """Drafts that every decode pass verifies: `many` tokens of the draft model `model`, or of n-grams of the text."""

    many: int = Field(default=3, ge=1, le=MOST_DRAFTS)
    model: str = NGRAM  #: name of the draft model, or NGRAM
    ngram: int = Field(default=2, ge=1)  #: tokens that must agree, at most

    @property
    def is_ngram(self) -> bool:
        """True if drafts come from the text itself."""
        return self.model == NGRAM

    @property
    def words(self) -> str:
        """The settings as provenance states them."""
        by = f"{NGRAM}:{self.ngram}" if self.is_ngram else self.model
        return f"{counted(self.many, 'draft')} by {by}"


def drafting_of(model: str, many: int | None) -> Drafting:
    """Return the drafts of `--draft-model MODEL|ngram[:N] --draft-tokens MANY`. Raises RecordError."""
    name, _, size = model.partition(":")
    if name != NGRAM:
        return Drafting(many=many or 3, model=model)
    if size and not whole(size):
        raise RecordError(f"invalid --draft-model {model!r}: expected a model, or ngram[:N] with N of at least 1")
    return Drafting(many=many or 3, ngram=int(size or 2))


class Plan(Frozen):
    """Options of a recording. With `decoding` prompts are continued, without it sequences are teacher-forced."""

    decoding: Decoding | None = None
    drafting: Drafting | None = None  #: with `decoding`
    prompt_tokens: int | None = Field(
        default=None, ge=1
    )  #: of a teacher-forced sequence: in one pass, the rest one by one
    look_ahead: int = Field(default=2, ge=0)
    logits: bool = True
    seed: int = Field(default=0, ge=0)
    dense_bytes: int | None = None  #: of all weights outside the routed experts, if the trace must state others
    dense_bits: str = ""  #: instead: bits per weight of these, or a format
    matrices: tuple[int, ...] = ()  #: `Geometry.matrices`

    @property
    def words(self) -> str:
        """Describe how tokens were made, for provenance."""
        if self.decoding:
            return self.decoding.words
        one_by_one = f", the first {self.prompt_tokens} in one pass, the rest one by one" if self.prompt_tokens else ""
        return f"teacher-forced{one_by_one}"

    def stated(self, geometry: Geometry, model: str) -> Geometry:
        """Return a model's geometry with the dense weights and the matrices that the options state."""
        geometry = with_stored(geometry, model, self.dense_bytes, self.dense_bits)
        return geometry.model_copy(update={"matrices": self.matrices}) if self.matrices else geometry


def seed_of(seed: int, request: int) -> int:
    """Return a 64-bit seed per request, so that a resumed recording equals an uninterrupted one."""
    return int(np.random.SeedSequence([seed, request]).generate_state(1, np.uint64)[0])


def refuse_taken(out: str | Path, resume: bool, resumable: bool = True) -> None:
    """Raise TraceError for a path that cannot be recorded to, before a model is loaded, which may take minutes.

    `resumable`: the command has `--resume`.
    """
    out = Path(out)
    if out.exists():
        raise TraceError(f"{out} exists; choose another path or remove it")
    refuse_busy(partial_of(out))
    if partial_of(out).exists() and not resume:
        fix = "rerun with --resume, or remove it" if resumable else "remove it, or choose another path"
        raise TraceError(f"{partial_of(out)} exists, an unfinished recording; {fix}")


# -- Options for dtype, quantisation and device of the weights, checked before torch is imported.

DTYPES = ("auto", "float32", "bfloat16", "float16")
#: Values of --quantise, with the library that each needs in addition to accelerate.
QUANTISERS = {"bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes", "fp8": "accelerate"}

#: torch's names of devices that compute, its own and plug-ins'.
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "xla", "mtia", "maia", "privateuseone")
NUMBERED = re.compile(r"([a-z]+)(:\d{1,3})?")


def check_device(device: str) -> None:
    """Raise RecordError for an invalid device name; torch checks later whether the device exists."""
    named = NUMBERED.fullmatch(device)
    if device != "auto" and not (named and named[1] in DEVICES):
        raise RecordError(f"invalid --device {device!r}: expected auto, cpu or another device of torch")


def check_placement(dtype: str = "auto", device_map: str | None = None, quantise: str | None = None) -> None:
    """Raises RecordError for an unknown dtype or quantiser, or naming the library that is not installed."""
    if dtype not in DTYPES:
        raise RecordError(f"unknown --dtype {dtype!r}: {hint(dtype, DTYPES)}")
    if quantise is not None:
        if quantise not in QUANTISERS:
            raise RecordError(f"unknown --quantise {quantise!r}: {hint(quantise, QUANTISERS)}")
        require(QUANTISERS[quantise], f"--quantise {quantise}")
        require("accelerate", f"--quantise {quantise}")
    elif device_map is not None:
        require("accelerate", f"--device-map {device_map}")
