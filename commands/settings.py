"""Options for the settings of a replay, made from `results/settings.py`, and what was given for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moereplay.commands.groups import Group, is_typed, option
from moereplay.commands.options import named_experts
from moereplay.results.settings import EXPERTS, LISTED, OF_BOUNDS, OF_CURVES, SETTINGS, TEXT, WHOLE, Setting

if TYPE_CHECKING:
    from moereplay.simulator.config import ReplayConfig

PRESETS = "Comma list; `moereplay presets` names them; options beside it win."
#: What an option takes, by how its setting is stored; a comma list is a text.
TYPES: dict[str, Any] = {TEXT: str, WHOLE: int, EXPERTS: Path | None}


class Given(NamedTuple):
    """What the options of a verb say of a replay's settings."""

    values: Mapping[str, Any]  #: by name, defaults included
    typed: frozenset[str]  #: names of those that the user typed, which win over a preset
    preset: str  #: comma list; empty for none

    def lists(self) -> dict[str, str]:
        """The comma lists, as `sweeps.grid.expand` takes them."""
        return {name: text for name, text in self.values.items() if name in LISTED}

    def fixed(self) -> dict[str, Any]:
        """The other settings, their files read. Raises ConfigError if one holds no JSON."""
        return {name: _read(name, value) for name, value in self.values.items() if name not in LISTED}

    def of_presets(self, fixed: Mapping[str, object]) -> dict[str, ReplayConfig]:
        """Every preset by its name and what varies, without settings that the verb lacks. Raises ConfigError."""
        from moereplay.simulator.preset import settings
        from moereplay.sweeps.policy_sets import named_sets

        lists = self.lists()
        own = {name: text for name, text in lists.items() if name in self.typed}
        sets = {
            name: {each: text for each, text in values.items() if each in lists} | own
            for name, values in settings(self.preset)
        }
        return named_sets(sets, fixed)

    def called(self) -> dict[ReplayConfig, str]:
        """Every configuration, with the names of the presets that ask for it. Raises ConfigError or PolicyError."""
        from moereplay.sweeps.grid import expand

        fixed = self.fixed()
        if not self.preset:
            return dict.fromkeys(expand(self.lists(), fixed), "")
        called: dict[ReplayConfig, str] = {}
        for name, config in self.of_presets(fixed).items():
            preset = name.partition(" ")[0]  # what varies has columns of its own
            called[config] = f"{called[config]}, {preset}" if config in called else preset
        return called


def offered(settings: Iterable[Setting], blank: bool = False, preset: bool = True) -> Group:
    """An option for each of these settings, empty unless given if `blank`, and one for presets before them."""
    options = [option("preset", Annotated[str, typer.Option(help=PRESETS)], "")] if preset else []
    return Group([*options, *(_option(each, blank) for each in settings)], _given)


def _read(name: str, value: Any) -> Any:
    return named_experts(f"--{name.replace('_', '-')}", value) if KINDS[name] == EXPERTS else value


def _option(setting: Setting, blank: bool) -> Any:
    kind, default = TYPES[setting.kind], setting.default
    if setting.kind == EXPERTS:
        default = None
    elif setting.listed:
        kind, default = str, "" if blank else str(default)
    return option(setting.name, Annotated[kind, typer.Option(help=setting.help)], default)


def _given(context: typer.Context, values: dict[str, Any]) -> Given:
    preset = values.pop("preset", "")
    return Given(values, frozenset(name for name in values if is_typed(context, name)), preset)


KINDS = {each.name: each.kind for each in SETTINGS}
LIVE = [each for each in SETTINGS if not each.of_recording]
Settings = Annotated[Given, offered(SETTINGS)]
LiveSettings = Annotated[Given, offered(LIVE)]
#: Of policy sets, which have settings of their own: what is not typed is empty.
ListedSettings = Annotated[Given, offered((each for each in LIVE if each.listed), blank=True)]
#: What a recommendation does not choose.
GIVEN = (
    "platform",
    "contract",
    "scope",
    "passes",
    "reset",
    "prefetch_at",
    "prefetch_admission",
    "lookahead",
    "dense",
    "dense_bits",
    "seed",
)
OfRecommendation = Annotated[Given, offered((each for each in SETTINGS if each.name in GIVEN), preset=False)]
OfBounds = Annotated[Given, offered((each for each in SETTINGS if each.name in OF_BOUNDS), preset=False)]
CurveSettings = Annotated[Given, offered((each for each in SETTINGS if each.name in OF_CURVES), preset=False)]
