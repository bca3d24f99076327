"""The table of hooks: documents show it, engines call what it lists, and call every event in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from moereplay import policies
from moereplay.policies import contract, files
from moereplay.policies.declaration import check_result
from moereplay.policies.hooks import AT_GATE, EVENTS, HOOKS, KINDS, TABLES, given_by, markdown
from moereplay.results import settings as results_settings
from moereplay.simulator import dry_run
from moereplay.simulator.compiled.hooks import BoundHooks
from moereplay.simulator.config import configure
from moereplay.simulator.replay import plan
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace

ROOT = Path(__file__).resolve().parents[2]
TRACE = random_trace(1, Sizes(layers=4, experts=8, tokens=60, prompt=4, requests=2, depth=1, size=1000))
#: A policy that counts each event, and adds up the numbers that come with it.
LISTENER = """from moereplay.policies.contract import Eviction, Memory


def key(now, experts, copies, own, y):
    return copies[y]["entered"]
"""


def test_the_kinds_of_policies_have_one_order():
    """Rows of memory, listeners and columns are numbered by it; `results.settings` may import no policies."""
    assert KINDS == results_settings.KINDS == tuple(policies.NAMES)


def listener(folder: Path) -> Path:
    """A policy file with a hook for every event of the table."""
    text = LISTENER
    for at, name in enumerate(EVENTS):
        numbers = " + ".join(each.name for each in HOOKS[name].own_arguments) or "0"
        text += f"\n\ndef {name}({', '.join(HOOKS[name].arguments)}):\n"
        text += (
            f"    own.regs[0][{2 * at}] += 1\n    own.regs[0][{2 * at + 1}] += (1 + {numbers}) * (now['step'] + 1)\n"
        )
    given = ", ".join(f"{name}={name}" for name in EVENTS)
    text += "\n\nPOLICY = Eviction(name='listener', summary='counts events', source='this test', key=key, "
    (folder / "listener.py").write_text(f"{text}memory=Memory(regs={2 * len(EVENTS)}), {given})\n")
    return folder / "listener.py"


@every("table, made", [("hooks", markdown()), ("columns", contract.markdown())])
def test_the_page_on_policies_shows_the_table(table: str, made: str) -> None:
    page = (ROOT / "docs" / "policies.md").read_text().split(f"<!-- {table}:")[1]
    assert page.split("-->\n", 1)[1].split("<!-- end -->")[0].strip() == made, "run `make tables`"


@pytest.mark.slow
def test_both_engines_tell_every_event_alike(tmp_path: Path) -> None:
    """Compare number, copies and steps of events; each event occurs in this replay."""
    files.register(listener(tmp_path))
    config = configure(capacity="25%", eviction="listener", prefetch="side_buffer")
    ready = plan(TRACE, config)
    expected, found = dry_run.end_states(TRACE, ready.spec(log=False))
    assert dry_run.difference(expected, found) == ""
    _, regs, _ = expected.memories[KINDS.index("eviction")]
    assert min(regs[0][::2]) > 0, dict(zip(EVENTS, regs[0][::2], strict=True))


@every("name", HOOKS)
def test_a_row_says_what_a_hook_takes_and_returns(name: str) -> None:
    hook = HOOKS[name]
    first = AT_GATE if hook.at_gate else TABLES
    assert hook.arguments == first + tuple(each.name for each in hook.own_arguments)
    assert (hook.result is type(None)) == (not hook.meaning)
    with pytest.raises(ValueError, match=f"hook {name} returned 'text'"):
        check_result(hook, "text")


def test_kernels_take_a_pointer_for_every_hook() -> None:
    assert BoundHooks._fields == tuple(HOOKS)


def test_what_a_policy_gives_is_found_by_the_table(tmp_path: Path) -> None:
    assert [name for name, _ in given_by(files.register(listener(tmp_path)))] == [*EVENTS, "key"]
