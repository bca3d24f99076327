"""Settings of a replay, each declared once: a row here, and a field of `simulator.config.ReplayConfig`, which a test
holds to it. Options, experiment files, columns of results, headings and the table of docs/settings.md follow from them.

Standard library only, because `moereplay --help` reads this file.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

#: How values are stored: keys of `results.schema.DTYPES`.
TEXT, WHOLE, EXPERTS = "text", "integer", "pairs"
#: The four kinds of policies, in the order in which a gate calls them and columns list them: `policies.hooks.KINDS`.
KINDS = ("routing", "prefetch", "eviction", "miss")


class Setting(NamedTuple):
    """A setting of a replay."""

    name: str  #: of the field, the option, the column, and in headings
    default: str | int | tuple[()]
    help: str  #: help of the option: its effect, then its values or their form
    values: tuple[str, ...] = ()  #: all that it can have; none if they have a form instead
    kind: str = TEXT
    listed: bool = True  #: whether an option may list alternatives; in an experiment any setting may vary
    of_recording: bool = False  #: whether it changes how a trace is read, which a live run does not have
    added: bool = False  #: since version 0.1; see `older`


#: In the order in which options and headings show them.
SETTINGS = (
    Setting(
        "capacity",
        "5%",
        "Cache size: comma list of 5%, 5%@16, 600MB, 1.5GiB, 51experts, 32/layer; by layer 4+4+8experts, FILE.json.",
    ),
    Setting("eviction", "lru", "Eviction policies: comma list (see `moereplay policies`)."),
    Setting("prefetch", "none", "Prefetch policies: comma list (see `moereplay policies`)."),
    Setting("miss", "fetch", "Miss policies: comma list (see `moereplay policies`)."),
    Setting("routing", "standard", "Routing policies: comma list (see `moereplay policies`)."),
    Setting("platform", "a100-5gbps", "Machines: comma list of platforms or .toml files (see `moereplay platforms`)."),
    Setting(
        "contract",
        "atomic",
        "Look up the experts of a step together (atomic) or one by one (sequential).",
        ("atomic", "sequential"),
    ),
    Setting(
        "scope",
        "global",
        "One cache for all layers (global), one per layer (per_layer), or one per link (per_link).",
        ("global", "per_layer", "per_link"),
    ),
    Setting(
        "slots",
        "exact",
        "Bytes that an expert takes of its pool: its own (exact), or those of the pool's largest (padded).",
        ("exact", "padded"),
        added=True,
    ),
    Setting(
        "passes",
        "recorded",
        "Tokens per forward pass: recorded, token, chunk:N, decode:N (decode from position N), batch:N (N requests), "
        "batch:N:chunk=C.",
        of_recording=True,
    ),
    Setting(
        "arrivals",
        "all",
        "With batch:N: when requests arrive, all (at the start), every:S (seconds), poisson:R (per second), FILE.json.",
        of_recording=True,
        added=True,
    ),
    Setting(
        "draft",
        "0",
        "Draft tokens that a decode pass verifies: N[:accept=A1/A2/...][:rejected=other|own], or recorded.",
        of_recording=True,
        added=True,
    ),
    Setting("reset", "never", "When to empty the cache: never, request, or after a number of tokens."),
    Setting(
        "prefetch_at",
        "gate",
        "Issue prefetches at the gate of a step (gate) or at its end (after_demand).",
        ("gate", "after_demand"),
    ),
    Setting(
        "prefetch_admission",
        "evict",
        "Let a prefetch evict experts (evict) or use free space only (free_only).",
        ("evict", "free_only"),
    ),
    Setting(
        "lookahead",
        "recorded",
        "Predictions: recorded, or a control (shuffled_tokens, shuffled_experts).",
        ("recorded", "shuffled_tokens", "shuffled_experts"),
        of_recording=True,
    ),
    Setting("warm", (), "JSON list of [layer, expert] that are resident at the start.", kind=EXPERTS, listed=False),
    Setting(
        "profile",
        (),
        "JSON list of [layer, expert], best first, for profile=given.",
        kind=EXPERTS,
        listed=False,
    ),
    Setting(
        "resident",
        (),
        "Experts that never leave the fast tier: layers:A-B[,C-D], all, or a JSON list of [layer, expert].",
        kind=EXPERTS,
        listed=False,
        added=True,
    ),
    Setting(
        "dense",
        "",
        "Bytes of all weights except routed experts, as stored, embedding included: 1816MiB, 11.4GB.",
        listed=False,
        added=True,
    ),
    Setting(
        "dense_bits",
        "",
        "Instead of --dense: bits of each of these weights, or their format: 4.85, Q8_0, Q4_K_M.",
        listed=False,
        added=True,
    ),
    Setting(
        "seed",
        0,
        "Seed for random policies, draft acceptance, Poisson arrivals, and sampling by a live model.",
        kind=WHOLE,
        listed=False,
    ),
)
NAMES = tuple(setting.name for setting in SETTINGS)
OF_A_FILE = "@[0-9a-f]+"  #: follows the name of a user policy: the version of its file
POLICIES = tuple(name for name in NAMES if name in KINDS)  #: in the order of options and headings
LISTED = tuple(setting.name for setting in SETTINGS if setting.listed)
#: Settings that have no effect where every expert is resident.
OF_CACHE = (*KINDS, "capacity", "scope", "warm", "profile")
#: Settings that a curve of misses depends on, in the order of its columns.
OF_CURVES = ("scope", "contract", "passes", "draft", "reset")
#: Settings that `moereplay bounds` takes, in the order of its columns.
OF_BOUNDS = ("capacity", "eviction", "miss", "platform", "contract", "scope", "slots", "passes", "draft", "reset")
OF_BOUNDS += ("dense", "dense_bits", "seed")
#: Facts and settings that lead a table.
LEADING = ("model", "trace", "eviction", "prefetch", "miss", "routing", "capacity")


def bare_names(spelled: Collection[str]) -> dict[str, str]:
    """Return policies by their name without the digest of a user's file, unless two would become equal."""
    short = {text: re.sub(OF_A_FILE, "", text) for text in spelled}
    often = Counter(short.values())
    return {text: name if often[name] == 1 else text for text, name in short.items()}


def setting_kinds() -> dict[str, str]:
    """Return the storage type of each setting, in the order of the columns of results."""
    kinds = {setting.name: setting.kind for setting in SETTINGS}
    return {name: kinds[name] for name in (*KINDS, *NAMES)}


def older() -> dict[str, str | int | tuple[()]]:
    """Return the settings that results of earlier versions lack, with their implicit value, the default.

    At its default such a setting is not part of a configuration's identity, so that stored results stay valid.
    """
    return {setting.name: setting.default for setting in SETTINGS if setting.added}


def markdown() -> str:
    """Return the Markdown table of settings in docs/settings.md."""
    rows = [
        f"| `{setting.name}` | {_shown(setting.default)} | {setting.help} | {_listed(setting)} |"
        for setting in SETTINGS
    ]
    return "\n".join(["| setting | default | meaning | in `replay` |", "|---|---|---|---|", *rows])


def _shown(default: str | int | tuple[()]) -> str:
    return "none" if default in ((), "") else f"`{default}`"


def _listed(setting: Setting) -> str:
    if setting.listed:
        return "comma list"
    return "file" if setting.kind == EXPERTS else "one value"


# -- The command that repeats a replay, made from its stored settings. Standard library only.

LISTS = tuple(name for name, kind in setting_kinds().items() if kind == EXPERTS)


def repeat_command(config: Mapping[str, Any], trace: str, policy_files: Sequence[str] = (), lists_at: str = "") -> str:
    """Return the command that replays a configuration. Defaults are left out; `trace` is the user's name for it.

    Lists of experts are named as `expert_lists` names them, after `lists_at`, the beginning of their paths; user
    policies are named without the hash of their file.
    """
    words = ["moereplay", "replay", trace]
    for setting in SETTINGS:
        value = config.get(setting.name)
        if value is not None and _plain(value) != _plain(setting.default):
            words += [
                f"--{setting.name.replace('_', '-')}",
                f"{lists_at}{setting.name}.json" if setting.name in LISTS else _typed(setting.name, value),
            ]
    return shlex.join([*words, *(word for path in policy_files for word in ("--policy-file", path))])


def expert_lists(config: Mapping[str, Any]) -> dict[str, list[list[int]]]:
    """Return the contents of the files that the command names: lists of [layer, expert]."""
    return {f"{name}.json": _plain(config[name]) for name in LISTS if config.get(name)}


def _plain(value: Any) -> Any:
    """Return lists for tuples, as stored results have them."""
    return [list(pair) for pair in value] if isinstance(value, list | tuple) else value


def _typed(name: str, value: Any) -> str:
    text = str(value)
    if name not in KINDS:
        return text
    label, *parameters = text.split(":")
    return ":".join([label.partition("@")[0], *parameters])
