"""Reads of hooks must be declared: engines agree however a policy obtains a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moereplay.policies import files
from moereplay.policies.contract import OPTIONAL, OPTIONAL_COLUMNS, Policy, PolicyError
from moereplay.results.result import Result
from moereplay.simulator import dry_run
from moereplay.simulator.config import configure
from moereplay.simulator.jit.marks import IS_PYTHON
from moereplay.simulator.reference import engine as reference
from moereplay.simulator.replay import plan, replay
from tests.kit.every import every
from tests.kit.policy_runs import Sizes, random_trace

TRACE = random_trace(1, Sizes(layers=4, experts=8, tokens=60, prompt=4, requests=2, depth=1, size=1000))
HEAD = """from moereplay.policies.contract import DROP, Eviction, Memory, Miss, Prefetch, always, expert_of


"""
KEY = "def key(now, experts, copies, own, y):\n    return "
EVICTION = """

POLICY = Eviction(name="strange", summary="for this test", source="here", key=key{})
"""
HELPER = """COLUMN = "last_prediction"


def hint_of(experts, x):
    return experts[x]["last_prediction"]


def by_constant(experts, x):
    return experts[x][COLUMN]
"""
#: By which a key comes to read `last_prediction`.
WAYS = {
    "a constant": f"""C = "last_prediction"
{KEY}experts[expert_of(now, y)][C]""",
    "a tuple of names": f"""C = ("last_use", "last_prediction")
{KEY}experts[expert_of(now, y)][C[1]]""",
    "a default argument": """def key(now, experts, copies, own, y, column="last_prediction"):
    return experts[expert_of(now, y)][column]""",
    "a closure": """def made(column):
    def key(now, experts, copies, own, y):
        return experts[expert_of(now, y)][column]
    return key
key = made("last_prediction")""",
    "a function in a closure": """def made(column):
    def of(experts, x):
        return experts[x][column]
    def key(now, experts, copies, own, y):
        return of(experts, expert_of(now, y))
    return key
key = made("last_prediction")""",
    "a constant handed on": f"""C = "last_prediction"
def column_of(experts, x, name):
    return experts[x][name]
{KEY}column_of(experts, expert_of(now, y), C)""",
    "a module's constant": f"""import readers
{KEY}experts[expert_of(now, y)][readers.COLUMN]""",
    "a module's function": f"""import readers
{KEY}readers.hint_of(experts, expert_of(now, y))""",
    "a constant of an imported function": f"""from readers import by_constant
{KEY}by_constant(experts, expert_of(now, y))""",
}
SUGGEST = """C = "next_pass"


def suggest(now, step, experts, copies, own, out):
    count, first = 0, (now["layer"] + 1) * now["experts"]
    for x in range(first, min(first + now["experts"], len(experts))):
        if experts[x][C] == now["pass"]:
            out[count] = x * now["precisions"]
            count += 1
    return count


POLICY = Prefetch(name="strange", summary="for this test", source="here", needs=always("future"), suggest=suggest)
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Policy]:
    """Takes the text of a policy file that may import a module of its own."""
    (tmp_path / "readers.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))

    def take(text: str) -> Policy:
        (tmp_path / "mine.py").write_text(HEAD + text)
        return files.register(tmp_path / "mine.py")

    return take


def both(**chosen: str) -> tuple[Result, Result]:
    config = configure(capacity="25%", **chosen)
    return replay(TRACE, config, engine="reference"), replay(TRACE, config, engine="compiled")


# -- every way of reading ------------------------------------------------------------------------------------------


@pytest.mark.slow
@every("way", WAYS)
def test_engines_agree_however_a_key_reads_a_column(way: str, strange: Callable[[str], Policy]) -> None:
    strange(WAYS[way] + EVICTION.format(""))
    expected, found = both(eviction="strange", prefetch="top_k")
    assert found == expected


@pytest.mark.slow
def test_engines_agree_however_a_prefetch_reads_the_future(strange: Callable[[str], Policy]) -> None:
    strange(SUGGEST)
    expected, found = both(prefetch="strange")
    assert found == expected
    assert found.totals["prefetch_used"] > 0


# -- what is declared ------------------------------------------------------------------------------------------------


@every("way", ["a constant", "a closure"])
def test_a_column_that_is_not_declared_is_refused_at_its_line(way: str, strange: Callable[[str], Policy]) -> None:
    strange(WAYS[way] + EVICTION.format(', reads=frozenset({"needed"})'))
    for engine in ("reference", "compiled"):
        with pytest.raises(PolicyError, match=r"mine\.py:\d+: undeclared read of 'last_prediction'"):
            replay(TRACE, configure(capacity="25%", eviction="strange"), engine=engine)


@pytest.mark.slow
@every("way", WAYS)
def test_no_way_leads_to_a_column_that_is_not_declared(
    way: str, strange: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the dry run had not seen it."""
    strange(WAYS[way] + EVICTION.format(", reads=frozenset()"))
    monkeypatch.setattr("moereplay.simulator.dry_run.dry_run", lambda *_: None)
    with pytest.raises(ValueError if IS_PYTHON else PolicyError, match=r"no field of name|declared reads: none"):
        replay(TRACE, configure(capacity="25%", eviction="strange"))


def test_an_array_that_is_not_declared_is_refused_at_its_line(strange: Callable[[str], Policy]) -> None:
    strange(
        SUGGEST.replace("experts[x][C] == now", "step.ids[0][0] + experts[x][C] == now").replace(
            "suggest=suggest", 'suggest=suggest, reads=frozenset({"next_pass"})'
        )
    )
    with pytest.raises(PolicyError, match=r"mine\.py:10: undeclared read of 'ids'"):
        replay(TRACE, configure(capacity="25%", prefetch="strange"))


def test_what_is_declared_is_read_by_both(strange: Callable[[str], Policy]) -> None:
    strange(WAYS["a constant"] + EVICTION.format(', reads=frozenset({"last_prediction"})'))
    expected, found = both(eviction="strange", prefetch="top_k")
    assert found == expected


@every("reads", ['"last_prediction"', "frozenset('last_prediction')", "frozenset({'last_use'})", "{'ids'}"])
def test_a_declaration_of_anything_else_is_refused(reads: str, strange: Callable[[str], Policy]) -> None:
    with pytest.raises(PolicyError, match=r"mine\.py:\d+: invalid reads .*: expected reads=frozenset"):
        strange(WAYS["a constant"] + EVICTION.format(f", reads={reads}"))


def test_engines_keep_current_what_any_of_the_four_reads() -> None:
    assert configure(eviction="lru").policy_set().reads == {"last_prediction"}
    assert configure(eviction="fifo", routing="prune").policy_set().reads == {"ids"}


def test_without_a_declaration_everything_is_kept_current(strange: Callable[[str], Policy]) -> None:
    strange(WAYS["a constant"] + EVICTION.format(""))
    assert configure(eviction="strange").policy_set().reads == OPTIONAL >= OPTIONAL_COLUMNS


# -- promises that are not kept ----------------------------------------------------------------------------------------

TIMESTAMP = 'experts[expert_of(now, y)]["last_use"]'
ADMIT = "\n\n\ndef admit(now, experts, copies, own, y_in, prefetched, y_out):\n    return y_in % 3 > 0"
LIES = {
    "touch": (
        f'{KEY}{TIMESTAMP} % (2 + now["layer"])',
        "",
        "hook key returned .* did not change: key_scope='touch' promises",
    ),
    "pass": (
        f'{KEY}(y + now["layer"]) % 8',
        ", key_scope='pass'",
        "hook key returned .*: key_scope='pass' promises",
    ),
    "step": (
        f"def on_evict(now, experts, copies, own, y):\n    own.regs[0][0] += 1\n\n\n{KEY}(y + own.regs[0][0]) % 8",
        ", key_scope='step', memory=Memory(regs=1), on_evict=on_evict",
        "key_scope='step' promises",
    ),
    "layer": (
        f'{KEY}(y + now["layer"]) % 8',
        ", key_scope='layer'",
        "hook key .* by 1 and by -7 .* layer 1: key_scope='layer'",
    ),
    "queue": (
        f"{KEY}-{TIMESTAMP}",
        ", queue=lambda p: 'last_use'",
        "whose last_use is .*: `queue` promises",
    ),
    "queue by entry": (f"{KEY}{TIMESTAMP}", ", queue=lambda p: 'entered'", "whose entered is .*: `queue` promises"),
    "declines": (
        KEY + TIMESTAMP + ADMIT,
        ", admit=admit, declines=lambda p: False",
        "hook admit rejected copy .* never does",
    ),
    "key that writes": (
        f"{KEY}own.rows[y].__setitem__(0, 1) or 1",
        ", memory=Memory(rows=1)",
        "hook key may not write.*return own.rows",
    ),
}


@every("lie", LIES)
def test_a_promise_that_is_not_kept_is_refused(lie: str, strange: Callable[[str], Policy]) -> None:
    text, declared, said = LIES[lie]
    strange(text + EVICTION.format(declared))
    with pytest.raises(PolicyError, match=rf"mine\.py:\d+: .*{said}"):
        replay(TRACE, configure(capacity="25%", eviction="strange", prefetch="top_k"))


def test_who_promises_to_fetch_all_and_drops_is_refused(strange: Callable[[str], Policy]) -> None:
    strange("""def resolve(now, step, experts, copies, own, missing, free, verdict):
    verdict[0] = DROP if now["layer"] == 2 else 0


POLICY = Miss(name="strange", summary="for this test", source="here", resolve=resolve, fetches_all=True)
""")
    with pytest.raises(PolicyError, match=r"mine\.py:4: hook resolve returned verdict -1; fetches_all"):
        replay(TRACE, configure(capacity="25%", miss="strange"))


WRITES = {
    "half a number": ("own.rows[y][0] = 0.5", "cannot write 0.5 to own.rows: expected an integer of 64 bits"),
    "a long number": (
        "own.rows[y][0] = 1 << 63",
        "cannot write 9223372036854775808 to own.rows",
    ),
    "a table": ("experts[0]['uses_ever'] = 1", "cannot write column 'uses_ever' of a table"),
}


@every("what", WRITES)
def test_what_machine_code_would_write_otherwise_is_refused(what: str, strange: Callable[[str], Policy]) -> None:
    statement, said = WRITES[what]
    event = f"def on_use(now, experts, copies, own, y):\n    {statement}\n\n\n"
    strange(event + KEY + TIMESTAMP + EVICTION.format(", on_use=on_use, memory=Memory(rows=1)"))
    with pytest.raises(PolicyError, match=rf"mine\.py:5: {said}"):
        replay(TRACE, configure(capacity="25%", eviction="strange"))


@pytest.mark.skipif(IS_PYTHON, reason="integers are Python's")
def test_what_nobody_can_check_is_refused_if_the_engines_disagree(strange: Callable[[str], Policy]) -> None:
    """Machine code loses the bits above 64 in passing, Python does not."""
    strange(f"{KEY}({TIMESTAMP} << 62) >> 62{EVICTION.format('')}")
    said = r"mine\.py: eviction strange@\w+ promises key_scope='touch', reads everything; the engines disagree, "
    with pytest.raises(PolicyError, match=said):
        replay(TRACE, configure(capacity="25%", eviction="strange"))


# -- the dry run ------------------------------------------------------------------------------------------------------


def test_the_opening_is_short_and_has_prompts_and_what_follows() -> None:
    long = random_trace(2, Sizes(layers=8, experts=16, k=4, tokens=300, prompt=200, requests=3, depth=1))
    short = dry_run.opening(long)
    assert (short.requests, short.prompt_lengths.tolist()) == (2, [26, 26])
    assert short.tokens * 8 * (4 + 1) <= dry_run.ENOUGH
    assert short.read("chosen", 0, 26).tolist() == long.read("chosen", 0, 26).tolist()
    assert short.read("logits", 26, 51).tolist() == long.read("logits", 200, 225).tolist()


def test_something_leaves_in_the_opening_even_of_a_cache_that_holds_it_all(
    strange: Callable[[str], Policy],
) -> None:
    strange(LIES["touch"][0] + EVICTION.format(""))
    with pytest.raises(PolicyError, match="key_scope='touch' promises"):
        replay(TRACE, configure(capacity="100%", eviction="strange"))


def test_a_grid_over_capacities_and_seeds_has_one_dry_run(
    strange: Callable[[str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    strange(KEY + TIMESTAMP + EVICTION.format(""))
    runs = []
    monkeypatch.setattr(reference, "run_with_state", lambda *given: runs.append(given) or compared(*given))
    for capacity, seed in (("25%", 0), ("50%", 0), ("50%", 1)):
        replay(TRACE, configure(capacity=capacity, eviction="strange", seed=seed))
    assert len(runs) == 1
    replay(TRACE, configure(capacity="25%", eviction="strange", scope="per_layer"))
    assert len(runs) == 2


compared = reference.run_with_state


@pytest.mark.slow
def test_the_engines_leave_the_same_state_behind() -> None:
    """So that a difference means something: residents and memories of policies that keep count."""
    for eviction in ("arc", "s3fifo", "lru_k", "class_lru"):
        config = configure(capacity="25%", eviction=eviction, prefetch="coactivation", routing="cache_prior")
        ready = plan(TRACE, config)
        left = dry_run.end_states(TRACE, ready.spec(log=False))
        assert dry_run.difference(*left) == ""
        assert any(len(rows) for memory in left[0].memories for rows in memory)


def test_a_verdict_below_the_wanted_precision_is_refused(strange: Callable[[str], Policy]) -> None:
    """Nobody would find the copy good enough: it would be missing again, and enter its pool a second time."""
    strange("""def resolve(now, step, experts, copies, own, missing, free, verdict):
    verdict[0] = 1


POLICY = Miss(
    name="strange", summary="for this test", source="here", resolve=resolve, bits=lambda params: (8.0, 4.0),
    changes_output=True,
)
""")
    with pytest.raises(PolicyError, match=r"mine\.py:4: hook resolve returned verdict 1 where `want`"):
        replay(TRACE, configure(capacity="25%", miss="strange"), engine="reference")


@pytest.mark.slow
@pytest.mark.skipif(IS_PYTHON, reason="nothing is compiled")
@every("text, said", [
        (f"{KEY}{TIMESTAMP} if y < 1000 else 0.5", r"float64.*integer"),
        ("def on_gate(now, step, experts, copies, own):\n    if y_is_large(now):\n        step.expert[0] = 1\n\n\n"
         f"def y_is_large(now):\n    return now['pass'] > 1000\n\n\n{KEY}{TIMESTAMP}", "Cannot modify readonly array"),
    ])  # fmt: skip
def test_what_would_go_wrong_later_does_not_compile(text: str, said: str, strange: Callable[[str], Policy]) -> None:
    """In a branch that no dry run takes."""
    strange(text + EVICTION.format(", on_gate=on_gate" if "on_gate" in text else ""))
    with pytest.raises(PolicyError, match=rf"mine\.py:\d+: hook \w+ does not compile \(.*{said}"):
        replay(TRACE, configure(capacity="25%", eviction="strange"))


def test_a_mixture_is_not_changed_without_logits(strange: Callable[[str], Policy]) -> None:
    unweighed = """def choose(now, step, experts, copies, own, out):
    for t in range(now["tokens"]):
        for j in range(now["k"]):
            out[t][j] = (step.ids[t][j] + 1) % now["experts"]


POLICY = Routing(name="strange", summary="for this test", source="here", choose=choose)
"""
    strange("from moereplay.policies.contract import Routing\n\n\n" + unweighed)
    for engine in ("reference", "compiled"):
        with pytest.raises(PolicyError, match=r"must declare that it needs logits: needs=always\('logits'\)"):
            replay(TRACE, configure(capacity="25%", routing="strange"), engine=engine)
