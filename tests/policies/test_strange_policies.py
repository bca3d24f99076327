"""Odd policies of users' own: the engines agree on them, or refuse them with one line; and the search that finds such.

`tests/kit/strange_policies.py` draws policy files; what these and odd files written by hand have found stands here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given

from moereplay.policies import files
from moereplay.policies.contract import Policy, PolicyError
from moereplay.policies.grammar import parse
from moereplay.results.result import Result
from moereplay.simulator.config import configure
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.replay import replay
from moereplay.traces.schema import Trace, memory_trace
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace
from tests.kit.search import CASES, searched
from tests.kit.strange_expressions import PRELUDE
from tests.kit.strange_policies import Case, policy_files, run_case

ROOT = Path(__file__).resolve().parents[2]
SIZES = Sizes(layers=3, experts=6, tokens=30, prompt=4, requests=2, depth=1, size=8)
TIMESTAMP = 'experts[expert_of(now, y)]["last_use"]'
KEY = "def key(now, experts, copies, own, y):\n    return "
SUGGEST = "def suggest(now, step, experts, copies, own, out):\n    "
RESOLVE = "def resolve(now, step, experts, copies, own, missing, free, verdict):\n    "


@pytest.fixture
def take(tmp_path: Path) -> Callable[..., Policy]:
    """Takes a policy file, whose policy is called `strange`, of hooks and what is declared beside them."""

    def taken(kind: str, hooks: str, **declared: str) -> Policy:
        given = "".join(f", {name}={value}" for name, value in declared.items())
        policy = f'POLICY = {kind}(name="strange", summary="for this test", source="here"{given})\n'
        (tmp_path / "mine.py").write_text(f"{PRELUDE}\n\n{hooks}\n\n{policy}")
        return files.register(tmp_path / "mine.py")

    return taken


def unequal(trace: Trace, *sizes: int) -> Trace:
    """Return the trace with different expert bytes by layer."""
    header = trace.header.model_copy(
        update={"geometry": trace.geometry.model_copy(update={"expert_bytes": tuple(sizes)})}
    )
    return memory_trace(header, [trace.request(at) for at in range(trace.requests)], trace.router_bias)


def both(trace: Trace | None = None, **chosen: str) -> tuple[Result, Result]:
    """One configuration replayed by both engines."""
    config, demand = configure(**({"capacity": "25%"} | chosen)), trace or random_trace(1, SIZES)
    return replay(demand, config, engine="reference"), replay(demand, config, engine="compiled")


def check_refused(said: str, **chosen: str) -> None:
    """By both engines, in the same words."""
    for engine in ("reference", "compiled"):
        with pytest.raises(PolicyError, match=said):
            replay(random_trace(1, SIZES), configure(**({"capacity": "25%"} | chosen)), engine=engine)


# -- what is only read -----------------------------------------------------------------------------------------------


@every("written", ["own.capacity[0] = 10 ** 6", "own.par[0] = 3"])
def test_parameters_and_capacities_are_only_read(written: str, take: Callable[..., Policy]) -> None:
    """The reference's pools would grow: it counted 52 hits where there are 5."""
    event = f"def on_use(now, experts, copies, own, y):\n    {written}\n\n\n"
    take("Eviction", f"{event}{KEY}{TIMESTAMP}", key="key", on_use="on_use")
    check_refused(r"mine\.py:\d+: own\.par and own\.capacity are read-only", eviction="strange")


@every("array", ["logits[0]", "choice[0]", "gate[0]", "look_order[0][0]", "look_score[0][0]"])
def test_no_array_of_a_gate_can_be_written(array: str, take: Callable[..., Policy]) -> None:
    """The reference counts fidelity by the choice scores after that."""
    needs = {"needs": 'always("logits", "lookahead")', "depth": "lambda p: 1"}
    take("Prefetch", f"{SUGGEST}step.{array}[0] = 3\n    return 0", suggest="suggest", **needs)
    said = r"mine\.py:\d+: TypeError: 'tuple' object does not support item assignment: step"
    check_refused(said, prefetch="strange", routing="cache_prior")


# -- both engines do the same ----------------------------------------------------------------------------------------

HAND = """def on_insert(now, experts, copies, own, y, prefetched):
    own.rows[y][0] = 1


def on_evict(now, experts, copies, own, y):
    own.rows[y][0] = 0
    own.regs[0][0] = y + 1


def victim(now, experts, copies, own, pool, y_in):
    for i in range(len(copies)):
        z = (own.regs[0][0] * 7 + i) % len(copies)
        if own.rows[z][0] == 1 and copies[z]["protected"] == 0:
            return z
    return NONE


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    return True"""


@pytest.mark.slow
@every("declines", [{}, {"declines": "lambda p: False"}])
def test_victims_are_named_before_one_leaves_whatever_admit_promises(
    declines: dict[str, str], take: Callable[..., Policy]
) -> None:
    """A hook that remembers who left names others otherwise."""
    hooks = {name: name for name in ("victim", "admit", "on_insert", "on_evict")}
    take("Eviction", HAND, memory="Memory(rows=1, regs=1)", **hooks, **declines)
    expected, found = both(unequal(random_trace(1, SIZES), 3, 8, 5), eviction="strange")
    assert found == expected
    assert expected.totals["evictions"] > expected.totals["misses"] // 2


@pytest.mark.slow
def test_scores_are_wide_integers_also_where_nothing_is_compiled(take: Callable[..., Policy]) -> None:
    """They are kept in 16 and 32 bits."""
    order = "step.look_order[0][0][0] * 40000 - step.look_score[0][0][1] * 129"
    counts = f"own.rows[0][0] = step.gate[0][0] * (1 << 33) + {order}"
    needs = {"needs": 'always("logits", "lookahead")', "depth": "lambda p: 1", "memory": "Memory(rows=1)"}
    take("Prefetch", f"{SUGGEST}{counts}\n    return 0", suggest="suggest", **needs)
    expected, found = both(prefetch="strange")
    assert found == expected


# -- promises and declarations ---------------------------------------------------------------------------------------


def test_keys_that_move_by_layer_stay_where_no_sum_of_them_overflows(take: Callable[..., Policy]) -> None:
    """Keys of 64 bits whose differences have more were ordered otherwise by the compiled engine, if seldom."""
    text = """x = experts[expert_of(now, y)]
    high = HIGHEST - 5 if now["layer"] == 0 else -(1 << 62)
    return high + ((1 << 62) if x["layer"] > 0 and x["last_pass"] == now["pass"] else -x["last_use"])"""
    take("Eviction", KEY.replace("return ", text), key="key", key_scope='"layer"')
    check_refused(r"mine\.py:\d+: hook key returned -?\d+ for copy \d+: key_scope='layer'", eviction="strange")


HOOKS = {
    "Eviction": (f"{KEY}{TIMESTAMP}", "key"),
    "Prefetch": (f"{SUGGEST}return 0", "suggest"),
    "Miss": (f"{RESOLVE}verdict[0] = 0", "resolve"),
}
WRONG = [
    (
        "Eviction",
        "memory",
        "Memory(rows=-1)",
        "invalid rows of memory -1: expected how many columns",
    ),
    ("Eviction", "memory", "Memory(reals=0.5)", "invalid reals of memory 0.5: expected how many columns"),
    ("Eviction", "memory", "Memory(regs=10 ** 12)", "invalid regs of memory 1000000000000: expected how many columns"),
    ("Eviction", "key_scope", "lambda p: 'now'", "unknown key_scope 'now': choose from touch, layer, step, pass"),
    ("Eviction", "profile", "lambda p: -3", "invalid profile -3: expected the tokens that it is fitted to, an integer"),
    ("Prefetch", "depth", "lambda p: -1", "invalid depth -1: expected how many layers ahead it reads"),
    ("Prefetch", "depth", "lambda p: 1.0", "invalid depth 1.0: expected how many layers ahead it reads"),
    ("Prefetch", "side_slots", "lambda p: 1.5", "invalid side_slots 1.5: expected how many buffers it has"),
    ("Prefetch", "reach", "lambda p: 10 ** 30", "invalid reach or depth 1000000000000000000000000000000: expected how"),
    ("Miss", "bits", "lambda p: (0.0,)", r"invalid bits \(0.0,\): expected a tuple of numbers above 0, up to 64"),
    ("Miss", "bits", "lambda p: (NAN,)", r"invalid bits \(nan,\): expected a tuple of numbers"),
    ("Miss", "bits", "lambda p: [8.0]", r"invalid bits \[8.0\]: expected a tuple of numbers"),
]


@every("kind, field, value, said", WRONG)
def test_numbers_that_engines_cannot_keep_are_refused_at_once(
    kind: str, field: str, value: str, said: str, take: Callable[..., Policy]
) -> None:
    hooks, hook = HOOKS[kind]
    with pytest.raises(PolicyError, match=rf"mine\.py:\d+: {said}"):
        take(kind, hooks, **{hook: hook, field: value})


def test_and_those_of_other_parameters_than_the_defaults(take: Callable[..., Policy]) -> None:
    params = '(Number("far", 1, 0, 9, integer=True),)'
    take(
        "Prefetch",
        f"{SUGGEST}return 0",
        suggest="suggest",
        params=params,
        reach='lambda p: p["far"] - 5 if p["far"] != 1 else 1',
    )
    assert parse("prefetch", "strange").params == {"far": 1}
    with pytest.raises(PolicyError, match=r"prefetch strange@\w+:far=2: invalid reach or depth -3: expected"):
        parse("prefetch", "strange:far=2")


# -- the search ------------------------------------------------------------------------------------------------------


def search(tmp_path: Path) -> None:
    """Files and replays until the engines differ."""
    endings = Counter()

    @searched(60)
    @given(policy_files(short=not IS_PYTHON))
    def agree(case: Case) -> None:
        ends = run_case(case, Path(mkdtemp(dir=tmp_path)))
        endings.update(found.ending for found in ends)
        wrong = [found for found in ends if found.ending in ("different", "unnoticed")]
        assert not wrong, "\n\n".join([str(wrong), *(file.text for file in case.given)])

    agree()
    assert endings["equal"] > endings.total() // 2


@pytest.mark.slow
def test_the_engines_agree_on_random_policy_files(tmp_path: Path) -> None:
    """As plain Python, where a case takes a fifth of a second; with the compiler, if somebody asks for new cases."""
    if IS_PYTHON or CASES:
        return search(tmp_path)
    chosen = ["-p", "no:cacheprovider", "-n0", "-m", "slow", "-k", "random_policy_files"]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *chosen, str(Path(__file__).relative_to(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert "1 passed" in done.stdout, done.stdout
    return None
