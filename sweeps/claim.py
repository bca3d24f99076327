"""A claim in a file: a hypothesis about one setting, its gate, and the traces on which both values are replayed.

All settings but that one are the same on both sides by construction.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from moereplay.policies.contract import PolicyError
from moereplay.results.settings import NAMES
from moereplay.simulator.config import ReplayConfig, configure
from moereplay.simulator.errors import ConfigError
from moereplay.traces.documents import DocumentError, Frozen, Text, content, first_fault, from_toml
from moereplay.traces.files import bundled
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from moereplay.traces.synthetic import Draw, drawn_like
from moereplay.traces.texts import hint

GATE = re.compile(r"([<>])= *([+-]?[0-9]{1,4}(?:\.[0-9]{1,4})?) *%")


class Claim(Frozen):
    """The content of a claim file."""

    claim: Text
    figure: Text
    gate: Text  #: on variant's figure / base's - 1
    variable: Text  #: the setting that differs
    base: str
    variant: str
    settings: dict[str, Any] = {}  #: of both sides
    traces: tuple[str, ...] = ()  #: bundled, or relative to the file
    drawn: tuple[str, ...] = ()  #: routing models
    draw: Draw | None = None

    @field_validator("gate")
    @classmethod
    def _gate(cls, text: str) -> str:
        found = GATE.fullmatch(text)
        if not found or float(found[2]) <= -100:
            raise ValueError("expected a change of more than -100 %, such as <= -5% or >= 10%")
        return text

    @model_validator(mode="after")
    def _complete(self) -> Claim:
        if not (self.traces or self.drawn):
            raise ValueError("missing traces or drawn: a claim needs a trace, or a routing model to draw one from")
        if bool(self.drawn) != bool(self.draw):
            raise ValueError("drawn names routing models and [draw] says how to draw them: expected both or neither")
        for name in (self.variable, *self.settings):
            if name not in NAMES:
                raise ValueError(f"unknown setting {name!r}: {hint(name, NAMES)}")
        if self.variable in self.settings:
            raise ValueError(f"settings.{self.variable}: expected no value, since it is the variable")
        return self

    @property
    def limit(self) -> tuple[float, bool]:
        """The gate as a share, and whether it is at most so much or at least."""
        found = GATE.fullmatch(self.gate)
        assert found
        return float(found[2]) / 100, found[1] == "<"

    def configs(self) -> list[ReplayConfig]:
        """Return base and variant. Raises ConfigError or PolicyError, also if they are the same."""
        found = [configure(**self.settings, **{self.variable: value}) for value in (self.base, self.variant)]
        if found[0].spelled_out() == found[1].spelled_out():
            raise ConfigError(f"variant: {self.variable} {self.variant} is the same configuration as base {self.base}")
        return found


def read_claim(path: Path) -> Claim:
    """Read a claim, and check its settings. Raises ConfigError naming file and key."""
    try:
        claim = Claim.model_validate(from_toml(content(path)))
        claim.configs()
    except (OSError, DocumentError) as wrong:
        reason = wrong.strerror if isinstance(wrong, OSError) else wrong
        raise ConfigError(f"{path}: {reason}: expected a claim in TOML") from None
    except ValidationError as wrong:
        raise ConfigError(f"{path}: {first_fault(wrong)}") from None
    except (ConfigError, PolicyError) as wrong:
        raise ConfigError(f"{path}: {wrong}") from None
    return claim


def traces_of(claim: Claim, path: Path) -> list[tuple[str, Trace]]:
    """Open the traces of a claim and draw the others, with their names. Raises TraceError."""
    found = [(name, open_trace(bundled(Path(name), path.parent))) for name in claim.traces]
    return found + [(name, drawn_like(name, claim.draw)) for name in claim.drawn if claim.draw]
