"""The command that repeats a replay, made from its stored settings. Standard library only."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from moereplay.results.settings import EXPERTS, KINDS, SETTINGS, setting_kinds

LISTS = tuple(name for name, kind in setting_kinds().items() if kind == EXPERTS)


def command(config: Mapping[str, Any], trace: str, policy_files: Sequence[str] = ()) -> str:
    """What replays the configuration, typed: settings at their default are left out, `trace` is as a user names it.

    Lists of experts are read from the files that `files` says; a user's own policy goes without the hash of its file.
    """
    words = ["moereplay", "replay", trace]
    for each in SETTINGS:
        value = config.get(each.name)
        if value is not None and _plain(value) != _plain(each.default):
            words += [
                f"--{each.name.replace('_', '-')}",
                f"{each.name}.json" if each.name in LISTS else _typed(each.name, value),
            ]
    return shlex.join([*words, *(word for path in policy_files for word in ("--policy-file", path))])


def files(config: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """What the files of that command must hold, by their names: lists of [layer, expert]."""
    return {f"{name}.json": _plain(config[name]) for name in LISTS if config.get(name)}


def _plain(value: Any) -> Any:
    """Lists for tuples, as stored results have them."""
    return [list(pair) for pair in value] if isinstance(value, list | tuple) else value


def _typed(name: str, value: Any) -> str:
    text = str(value)
    if name not in KINDS:
        return text
    label, *parameters = text.split(":")
    return ":".join([label.partition("@")[0], *parameters])
