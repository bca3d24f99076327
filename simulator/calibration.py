"""The measured runs that a platform's times come from, and how far those runs were from predictions.

Nothing here changes a replay. `simulator/replay.py` calls times calibrated unless `Calibration` gives a reason not to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moereplay.simulator.rates import MOST_RATE, Measured, Roofline
from moereplay.traces.documents import Name, Sparse, Text
from moereplay.traces.drafts import OFF
from moereplay.traces.passes import slots_of
from moereplay.traces.texts import between, counted, digits, size
from moereplay.traces.units import GB

Ratio = Annotated[float, Field(gt=0, le=1e6)]


class Band(Sparse):
    """Measured over predicted time per token in runs that no figure was fitted on. It does not change a replay."""

    runs: int = Field(ge=1, le=10**9)
    least: Ratio
    median: Ratio
    most: Ratio

    def in_words(self) -> str:
        """Return the range in words: measured 1.6 to 3.3 times the predicted time in 26 runs."""
        times = between(f"{self.least:.2f}", f"{self.most:.2f}")
        return f"measured {times} times the predicted time in {counted(self.runs, 'run')}"

    def as_they(self, whose: str, tokens_per_s: float) -> str:
        """Return the speeds that the runs make likely: `8 measured runs of OWNER: 12 to 18 tokens/s if ...`."""
        return f"{self._of(whose)}: {speeds(tokens_per_s, self.least, self.most)} if this one errs as they"

    def _of(self, whose: str) -> str:
        return f"{counted(self.runs, 'measured run')} of {whose}"


def speeds(tokens_per_s: float, least: float, most: float) -> str:
    """Return the tokens/s of a predicted speed, if runs take `least` to `most` times the predicted time."""
    return f"{between(digits(tokens_per_s / most, 3), digits(tokens_per_s / least, 3))} tokens/s"


class Tried(Band):
    """Runs that were predicted with an uncalibrated platform's unchanged values."""

    later: ClassVar = frozenset({"expert_rate", "population", "machines", "left_out"})

    source: Text
    population: Text = ""  #: whose runs these are: 22 of one laptop and 2 others
    machines: int = Field(default=0, ge=0)  #: on which they ran; 0: not counted
    left_out: float | None = Field(
        default=None, ge=0
    )  #: median error of a machine's runs, if it is left out of the fit
    #: Memory rate of routed experts over that of dense weights; a calibration that cannot separate the two assumes it.
    expert_rate: float | None = Field(default=None, gt=0, le=100)

    def likely(self) -> tuple[float, float]:
        """Return the range in which 4 of 5 other machines are expected, the runs' own if these are of few machines."""
        middle = (self.least * self.most) ** 0.5
        wider = WIDER.get(self.machines, 1)
        return middle * (self.least / middle) ** wider, middle * (self.most / middle) ** wider

    def as_they(self, whose: str, tokens_per_s: float) -> str:
        """Return the speeds of 4 of 5 other machines, or else, of few machines, those if this one errs as the runs."""
        if self.machines < min(WIDER):
            return super().as_they(whose, tokens_per_s)
        likely = speeds(tokens_per_s, *self.likely())
        return f"{self._of(whose)}: with errors like theirs 4 of 5 such machines give {likely}"


#: By number of machines: the interval that 80 % of others lie in, over the range of so many. Logarithms are taken as
#: normal: t(0.9, n - 1) * sqrt(1 + 1 / n) * 2 / (mean range of n); from nine machines on their range is wide enough.
WIDER = {3: 2.57, 4: 1.78, 5: 1.44, 6: 1.26, 7: 1.14, 8: 1.05}
NEAR = 0.05  #: a model whose dense weights or experts differ by more bytes is not one that a calibration was fitted on
Bytes = Annotated[float, Field(ge=0, le=2**60)]


Part = Literal["cpu", "link", "tiers"]
#: What each part does in a run, in words, and the counters that show that it did.
WORK: dict[Part, tuple[str, tuple[str, ...]]] = {
    "cpu": ("misses that the CPU computes", ("cpu_executed",)),
    "link": ("transfers into the fast tier", ("bytes_demand", "bytes_prefetch")),
    "tiers": ("transfers into lower tiers", ("bytes_lower",)),
}


def parts_of(totals: Mapping[str, int]) -> tuple[Part, ...]:
    """Return the parts that a run with these totals used."""
    return tuple(part for part, (_, counters) in WORK.items() if any(totals[name] for name in counters))


class Calibration(Sparse):
    """Provenance of measured figures. It does not change a replay."""

    later: ClassVar = frozenset(
        {"slow_tier", "throttle_bytes_per_s", "digest", "models", "expert_bytes", "serial_bytes_per_s", "held_out"}
        | {"parts"}
    )

    device: Text
    method: Text = ""
    date: Text = ""
    cells: int = Field(default=0, ge=0, le=10**9)  #: runs that the figures were fitted on
    mape: float | None = Field(default=None, ge=0)  #: of the time per token; `method` says over which runs
    slow_tier: Text = ""  #: what experts were read from: disk, disk:buffered or pinned
    throttle_bytes_per_s: float | None = Field(default=None, gt=0, le=MOST_RATE)  #: of that slow tier, if it had one
    #: The link's rate in runs that do not overlap reads with compute, where it differs from `link.bytes_per_s`.
    serial_bytes_per_s: float | None = Field(default=None, gt=0, le=MOST_RATE)
    held_out: Band | None = None  #: of runs of the device that the figures were not fitted on
    digest: Name = Field(default="", max_length=64)  #: of the platform's figures and of the rest (`Platform.seal`)
    #: Models of the runs, with the bytes of dense weights that each of their tokens read; 0 where these are not known.
    models: dict[Text, Bytes] = Field(default_factory=dict)
    #: That the runs waited for, besides the accelerator: only their figures were measured. None: not stated.
    parts: tuple[Part, ...] | None = None
    #: Of the same models, the bytes of an expert in the runs: the fewest and the most, each the mean over layers.
    expert_bytes: dict[Text, tuple[Bytes, Bytes]] = Field(default_factory=dict)

    def in_one_line(self) -> str:
        """Return device, number of runs, error, date, and whether a digest protects the figures."""
        error = None if self.mape is None else f"mean error {self.mape:.1%}"
        runs = counted(self.cells, "run") if self.cells else None
        unverified = None if self.digest else "figures unverified (no digest)"
        return ", ".join(filter(None, (self.device, runs, error, self.date, unverified)))

    def unlike(self, name: str, dense: int) -> str | None:
        """Return why the figures do not hold for a model with `dense` bytes of dense weights; None if they do.

        A model without a name is judged by its bytes alone; 0 bytes are unknown.
        """
        if not self.models:
            return None
        if name and name not in self.models:
            return f"not calibrated for this model: {name}, fitted with {', '.join(self.models)}"
        fitted = [self.models[name]] if name else list(self.models.values())
        if any(not size or not dense or abs(dense / size - 1) <= NEAR for size in fitted):
            return None
        sizes = ", ".join(f"{size / GB:.3g} GB" for size in fitted)
        return f"not calibrated for this model: dense {dense / GB:.3g} GB, fitted with {sizes}"

    def unlike_experts(self, name: str, own: float, copies: Sequence[float]) -> str | None:
        """Return why the figures do not hold for copies of experts of these bytes; None if they do.

        A calibration that does not state the bytes of its experts was fitted on the model's `own`, not converted ones.
        """
        spans = [self.expert_bytes[name]] if name in self.expert_bytes else list(self.expert_bytes.values())
        spans = spans or [(own, own)]
        held = [(least * (1 - NEAR), most * (1 + NEAR)) for least, most in spans]
        other = [size(each) for each in copies if not any(least <= each <= most for least, most in held)]
        sizes = ", ".join(between(size(least), size(most)) for least, most in spans)
        return f"not calibrated for experts of {', '.join(other)}: fitted with {sizes}" if other else None

    def unmeasured(self, parts: Collection[Part]) -> str | None:
        """Return why the figures do not hold for a run that uses these parts; None if they do."""
        if self.parts is None or not (other := [WORK[part][0] for part in parts if part not in self.parts]):
            return None
        known = " and ".join(WORK[part][0] for part in self.parts) or "the accelerator alone"
        return f"not calibrated for {' and '.join(other)}: fitted on runs that waited for {known}"


def one_token_only(compute: Roofline | Measured) -> bool:
    """Return whether the times of several tokens are derived from those of one, without a measured curve."""
    return not (compute.dense_by_tokens if isinstance(compute, Measured) else compute.by_tokens)


def unlike_passes(compute: Roofline | Measured, passes: str, draft: str) -> str | None:
    """Return why figures fitted on one decoded token per pass do not hold for passes of several, else None."""
    slots = slots_of(passes)
    what = "drafts" if draft != OFF else f"passes {passes}" if slots and slots.many > 1 else ""
    if not what or not one_token_only(compute):
        return None
    return f"not calibrated for {what}: fitted on passes of one decoded token"
