"""Settings of a recording, checked before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from moereplay.traces.lock import refuse_busy
from moereplay.traces.metadata import PARTIAL
from moereplay.traces.schema import Frozen, TraceError


class Decoding(Frozen):
    """At most `max_new_tokens` tokens, fewer if the model ends; temperature 0 is greedy."""

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


class Plan(Frozen):
    """What to record. With `decoding` prompts are continued, without it sequences are teacher-forced."""

    decoding: Decoding | None = None
    prompt_tokens: int | None = Field(
        default=None, ge=1
    )  #: of a teacher-forced sequence: in one pass, the rest one by one
    look_ahead: int = Field(default=2, ge=0)
    logits: bool = True
    seed: int = Field(default=0, ge=0)
    dense_bytes: int | None = None  #: of all weights that are no routed expert, if the trace is to state others
    dense_bits: str = ""  #: instead: bits per weight of these, or a format

    @property
    def words(self) -> str:
        """How tokens came about, for provenance."""
        if self.decoding:
            return self.decoding.words
        one_by_one = f", the first {self.prompt_tokens} in one pass, the rest one by one" if self.prompt_tokens else ""
        return f"teacher-forced{one_by_one}"


def refuse_taken(out: str | Path, resume: bool, resumable: bool = True) -> None:
    """Raises TraceError for a path that cannot be recorded to: before a model is loaded, which may take minutes.

    `resumable` says whether the command has `--resume`.
    """
    out = Path(out)
    if out.exists():
        raise TraceError(f"{out} exists; choose another path or remove it")
    refuse_busy(partial_of(out))
    if partial_of(out).exists() and not resume:
        fix = "rerun with --resume, or remove it" if resumable else "remove it, or choose another path"
        raise TraceError(f"{partial_of(out)} exists, an unfinished recording; {fix}")


def partial_of(out: Path) -> Path:
    """Where an unfinished trace is kept."""
    return out.with_name(f"{out.name}{PARTIAL}")
