"""An exception in a hook of a user's own policy is the policy's, by file, line and text: each hook, engine and verb."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from moereplay.policies import files
from moereplay.policies.contract import PolicyError
from moereplay.policies.hooks import EVENTS, HOOKS
from moereplay.simulator import dry_run
from moereplay.simulator.config import configure
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.replay import replay
from moereplay.sweeps.jobs import Batch, compute, job_of
from moereplay.traces.schema import Trace
from moereplay.traces.store import open_trace
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, stored_trace

#: The class of a policy that gives each hook.
KINDS = {name: "Eviction" if name in EVENTS else hook.kinds[0].title() for name, hook in HOOKS.items()}
#: What a hook does where it does not raise.
BODIES = {
    "choose": "for t in range(now['tokens']):\n        out[t][:] = step.ids[t][:]",
    "suggest": "return 0",
    "want": "return 0",
    "resolve": "for m in range(len(missing)):\n        verdict[m] = VERDICT",
    "substitute": "return NONE",
    "key": "return experts[expert_of(now, y)]['last_use']",
    "victim": "return y_in",
    "admit": "return True",
}
#: The hook that a policy of each kind must have.
FIRST = {"Eviction": "key", "Miss": "resolve", "Routing": "choose", "Prefetch": "suggest"}
RAISES = "if now['step'] >= AFTER:\n        raise ValueError('of mine')"


def policy_file(folder: Path, name: str, after: int = 0, raises: str = RAISES) -> Path:
    """A policy whose hook `name` raises from step `after` on, in line 6 of its file."""
    kind = KINDS[name]
    given = [name] if name in (FIRST[kind], "victim") else [name, FIRST[kind]]
    verdict = "PER_TOKEN" if "substitute" in given else "0"
    text = f"from moereplay.policies.contract import *\n\n\ndef {name}({', '.join(HOOKS[name].arguments)}):\n"
    text += (
        f"    {raises.replace('AFTER', str(after))}\n    {BODIES.get(name, 'return').replace('VERDICT', verdict)}\n\n\n"
    )
    for other in given[1:]:
        text += (
            f"def {other}({', '.join(HOOKS[other].arguments)}):\n    {BODIES[other].replace('VERDICT', verdict)}\n\n\n"
        )
    hooks = ", ".join(f"{each}={each}" for each in given)
    declared = f"{kind}(name='mine', summary='of {folder.name}', source='s', {hooks})"
    (folder / "mine.py").write_text(f"{text}POLICY = {declared}\n")
    return folder / "mine.py"


def settings(name: str) -> dict[str, str]:
    prefetch = {"prefetch": "side_buffer"} if name in EVENTS else {}
    return {"capacity": "30%", "passes": "token", KINDS[name].lower(): "mine"} | prefetch


def said(folder: Path, error: str = "ValueError: of mine: raise ValueError('of mine')") -> str:
    return f"{folder / 'mine.py'}:6: {error}"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two requests of twelve tokens through four layers of eight experts."""
    sizes = Sizes(layers=4, experts=8, tokens=12, prompt=4, requests=2, depth=1, size=1000)
    return open_trace(stored_trace(tmp_path_factory.mktemp("small") / "small.zarr", sizes))


@pytest.mark.parametrize("name", HOOKS)
@every("engine", ("reference", "compiled"))
def test_what_a_hook_raises_is_told_by_file_line_and_text(name: str, engine: str, small: Trace, tmp_path: Path) -> None:
    """The compiled engine finds it in the dry run; processes hand the error on."""
    files.register(policy_file(tmp_path, name, after=3))
    with pytest.raises(PolicyError) as refused:
        replay(small, configure(**settings(name)), engine=engine)
    assert str(refused.value) == str(pickle.loads(pickle.dumps(refused.value))) == said(tmp_path)


def begin_with_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run, so that it ends before the hook raises."""
    monkeypatch.setattr(dry_run, "ENOUGH", 1)
    monkeypatch.setattr(dry_run, "REQUESTS", 1)


@pytest.mark.slow
@every("name", ("key", "resolve"))
def test_what_machine_code_raises_after_the_dry_run_is_told_as_well(
    name: str, small: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_with_one_token(monkeypatch)
    files.register(policy_file(tmp_path, name, after=5))
    with pytest.raises(Exception, match="of mine") as raised:
        replay(small, configure(**settings(name)), engine="compiled")
    assert files.blamed(raised.value) == said(tmp_path)


#: SimPy copies an exception by its arguments, which here are others than those that it takes.
ODD = """if now['step'] >= AFTER:
        raise type('Odd', (Exception,), {'__init__': lambda self, a, b: Exception.__init__(self, a)})('of', 'mine')"""
STRANGE = {
    "arguments": (ODD, "Odd: of: raise type('Odd'"),
    "exit": ("if now['step'] >= AFTER:\n        raise SystemExit(3)", "SystemExit: 3: raise SystemExit(3)"),
    "of two lines": (
        "if now['step'] >= AFTER:\n        raise OSError(5, 'one\\ntwo')",
        "OSError: [Errno 5] one two: raise OSError(5",
    ),
}


@every("kind", STRANGE)
def test_strange_exceptions_are_told_like_others(kind: str, small: Trace, tmp_path: Path) -> None:
    raises, error = STRANGE[kind]
    files.register(policy_file(tmp_path, "resolve", raises=raises))
    with pytest.raises(PolicyError) as refused:
        replay(small, configure(**settings("resolve")), engine="reference")
    assert str(refused.value).startswith(said(tmp_path, error))


def test_a_hook_from_another_module_is_told_by_its_place(small: Trace, tmp_path: Path, monkeypatch) -> None:
    """No line of the policy's own file is involved."""
    policy_file(tmp_path, "resolve").rename(tmp_path / "elsewhere.py")
    (tmp_path / "mine.py").write_text("from elsewhere import POLICY\n")
    monkeypatch.syspath_prepend(tmp_path)
    files.register(tmp_path / "mine.py")
    with pytest.raises(PolicyError, match=r"elsewhere\.py:4: ValueError: of mine"):
        replay(small, configure(**settings("resolve")), engine="reference")


@pytest.mark.slow
@every("name", ("resolve", "key"))
def test_a_worker_of_a_sweep_or_search_makes_it_an_error_row(
    name: str, small: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of machine code as well, after the dry run."""
    begin_with_one_token(monkeypatch)
    files.register(policy_file(tmp_path, name, after=5))
    job = job_of(small, configure(**settings(name)))
    for engine in ("reference", *(["compiled"] if not IS_PYTHON else [])):
        assert compute(Batch(0, (job,), engine, False)).headlines[0].error == said(tmp_path)
