"""The tool chain: the trial of Numba's private parts, and the fallback without them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moereplay.simulator.compiled import engine
from moereplay.simulator.jit import canary, trial
from moereplay.simulator.jit.marks import IS_PYTHON

pytestmark = pytest.mark.skipif(IS_PYTHON, reason="there is no compiler in plain Python")
ROOT = Path(__file__).resolve().parents[2]
INTERNALS = ROOT / "simulator" / "jit" / "internals.py"
PUBLIC = ("numba", "numba.extending", "llvmlite")
#: Private attributes of Numba that `internals` and `compiling` use.
ATTRIBUTES = (
    ("numba.core.codegen", "JITCodeLibrary", "_get_module_for_linking"),
    ("numba.core.compiler", "DefaultPassBuilder", "define_nopython_pipeline"),
    ("numba.core.base", "BaseContext", "make_array"),
)


def private_names() -> list[tuple[str, str]]:
    """Private modules of Numba, each with a name that `internals` imports from it."""
    return [
        (node.module, alias.name)
        for node in ast.parse(INTERNALS.read_text()).body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("numba")
        for alias in node.names
        if node.module not in PUBLIC
    ]


def tried(before: str) -> subprocess.CompletedProcess[str]:
    """Run the trial in a child process, after the statements `before`."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport numba\n{before}\n{trial.RUN}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)


def test_this_version_of_numba_passes() -> None:
    ended = tried("")
    assert (ended.returncode, ended.stdout.strip()) == (0, trial.PASSED), ended.stderr


def test_private_names_stand_in_one_file() -> None:
    """Only `compiling` and `plain` may also import errors, which have no public name."""
    allowed = {"internals.py": None, "compiling.py": {"numba.core.errors"}, "plain.py": {"numba.core.errors"}}
    for path in sorted((ROOT / "simulator").rglob("*.py")):
        modules = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numba")
        }
        private = {name for name in modules if name not in PUBLIC}
        assert not private or allowed.get(path.name, set()) is None or private <= allowed[path.name], path


@pytest.mark.long
@pytest.mark.parametrize(("module", "name"), private_names())
def test_a_private_name_that_is_gone_is_noticed(module: str, name: str) -> None:
    assert (
        tried(f"import {module} as module\nsys.modules[f'{module}.{name}'] = None\ndel module.{name}").returncode != 0
    )


@pytest.mark.long
@pytest.mark.parametrize(("module", "name", "attribute"), ATTRIBUTES)
def test_a_private_attribute_that_changed_is_noticed(module: str, name: str, attribute: str) -> None:
    changed = (
        f"def changed(*given, **named): raise TypeError('it takes something else now')\nfound.{attribute} = changed"
    )
    assert tried(f"from {module} import {name} as found\n{changed}").returncode != 0


@pytest.mark.filterwarnings("ignore:.*First-class function type feature is experimental")
def test_public_names_alone_compute_the_same() -> None:
    from moereplay.simulator.jit import plain

    listener = plain.hook(canary.notify, canary.STATE, canary.EVENT, [], False)
    hooks = canary.Hooks(plain.hook(canary.ask, canary.STATE, canary.SHAPE, [], False), (listener, listener))
    kernel = plain.kernel(canary.kernel, {"frozen": 0})
    state, (table, _, box) = canary.example(7)
    kernel(state[0], hooks)
    found = (int(state["inner"]["sum"][0]), int(state["inner"]["last"][0]), int(box["value"][0]))
    assert found == canary.expected(7)
    assert table["weight"].tolist() == [0.5] * 7
    state, _ = canary.example(canary.LIMIT + 2)
    with pytest.raises(ValueError) as raised:
        kernel(state[0], hooks)
    assert raised.value.args == ("beyond the limit", canary.LIMIT)


def replayed(folder: Path, kind: str, *options: str) -> str:
    """Return the output of `replay --json` from a child process."""
    environment = os.environ | {"MOEREPLAY_JIT": kind}
    command = [sys.executable, "-m", "moereplay", "replay", "miniature", "--capacity", "25%", "--json", *options]
    command += ["--events", str(folder / f"{kind}.csv")] if "--prefetch" in options else []
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.longest
@pytest.mark.parametrize(
    "options",
    [
        ("--passes", "token"),
        ("--prefetch", "top_k", "--eviction", "least_stale", "--miss", "fetch"),
    ],
)
def test_replays_without_private_names_have_the_same_bytes(options: tuple[str, ...], tmp_path: Path) -> None:
    """The fast path, and the general kernel with its log."""
    plain, usual = (replayed(tmp_path, kind, *options) for kind in ("plain", "internals"))
    assert plain == usual and json.loads(plain)["totals"]["accesses"] > 0
    logs = [path.read_bytes() for path in tmp_path.glob("*.csv")]
    assert len(set(logs)) <= 1


def test_a_kernel_is_compiled_once_by_another_process_meanwhile(tmp_path, monkeypatch):
    """A program that takes the compiler's place waits for a file that this process makes in the context."""
    asked, done = tmp_path / "asked", tmp_path / "done"
    program = f"""
import sys, time
from pathlib import Path
while not Path({str(asked)!r}).exists():
    time.sleep(0.01)
Path({str(done)!r}).write_text(sys.argv[1])
"""
    monkeypatch.setattr(engine, "is_sound", lambda: True)
    monkeypatch.setattr(engine, "is_kept", lambda name: False)
    monkeypatch.setattr(engine, "_wanted", set())
    monkeypatch.setattr(engine, "BUILD", program)
    with engine.compiled_apart(engine.fast_path):
        assert not done.exists()
        asked.touch()
    assert done.read_text() == "fast_path"
    done.unlink()
    with engine.compiled_apart(engine.fast_path):  # it was asked for: this process now compiles it itself
        pass
    assert not done.exists()


def test_nobody_waits_for_a_kernel_after_an_error(monkeypatch):
    children = []
    monkeypatch.setattr(engine, "is_kept", lambda name: False)
    monkeypatch.setattr(engine, "_wanted", set())
    monkeypatch.setattr(engine, "BUILD", "import time; time.sleep(600)")
    monkeypatch.setattr(engine, "started", lambda *given: children.append(trial.started(*given)) or children[0])
    with pytest.raises(LookupError), engine.compiled_apart(engine.kernel):
        raise LookupError
    assert children[0].returncode


def test_a_version_that_fails_the_trial_is_logged_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trials: list[str] = []
    monkeypatch.delenv("MOEREPLAY_JIT", raising=False)
    monkeypatch.setattr(trial, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(trial, "_tried", lambda: trials.append("once") or "Traceback\nImportError: no JITCodeLibrary")
    assert [trial.is_sound.__wrapped__() for _ in range(2)] == [False, False]
    assert trials == ["once"]
    assert "ImportError: no JITCodeLibrary" in caplog.text
