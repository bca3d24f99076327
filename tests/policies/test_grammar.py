"""The command-line grammar of policies: what parses, what it spells back to, and what an error says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moereplay import policies
from moereplay.policies.contract import PAR_SLOTS, Choice, Number, Numbers, Parameter, Policy, PolicyError, slot
from moereplay.policies.grammar import Chosen, parse
from moereplay.sweeps.grid import expand
from tests.kit.every import every
from tests.kit.search import searched

POLICIES = st.sampled_from(policies.catalogue())


def values(param: Parameter) -> st.SearchStrategy[Any]:
    """Everything that a parameter allows."""
    if isinstance(param, Choice):
        return st.sampled_from(param.options)
    if isinstance(param, Number) and param.integer:
        return st.integers(int(param.low), int(param.high))
    number = st.floats(param.low, param.high)
    return number if isinstance(param, Number) else st.lists(number, min_size=1, max_size=4).map(tuple)


def choices(policy: Policy) -> st.SearchStrategy[Chosen]:
    params = {param.name: values(param) for param in policy.params}
    return st.fixed_dictionaries(params).map(lambda given: Chosen(policy, given))


ANY_CHOICE = POLICIES.flatmap(choices)


def refusal(kind: str, text: str) -> str:
    with pytest.raises(PolicyError) as refused:
        parse(kind, text)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@searched(200)
@given(ANY_CHOICE)
def test_a_choice_parses_back_from_its_spellings_which_are_safe_in_a_shell_and_in_a_comma_list(chosen: Chosen):
    short, full = (parse(chosen.policy.kind, text) for text in (chosen.text(), chosen.text(full=True)))
    assert short.params == full.params == chosen.params
    assert short.par() == chosen.par()
    assert not set(chosen.text(full=True)) & set(" ,;&|<>()$`\"'\\*?[]#~!{}\n")


def test_defaults_are_left_out_unless_asked_for():
    assert parse("eviction", "least_stale:order=c").text() == "least_stale"
    full = "least_stale:order=c:current=cyclic:prefetch_evicts_current=true"
    assert parse("eviction", "least_stale").text(full=True) == full


def test_parameters_are_spelled_in_the_order_of_the_policy():
    assert parse("prefetch", "top_k:depth=2:factor=1.5").text() == "top_k:factor=1.5:depth=2"


def test_lists_are_written_with_slashes():
    cascade = parse("miss", "cascade:bits=8/4:below=.5")
    assert cascade.params == {"bits": (8, 4), "when": "importance", "below": (0.5,)}
    assert cascade.text() == "cascade:bits=8/4:below=0.5"


def test_comma_lists_are_expanded_in_order():
    configs = expand({"capacity": "5%,25%", "eviction": "lru,belady:bypass=true, lfu"}, {"seed": 3})
    evictions = ["lru", "belady:bypass=true", "lfu"]
    assert [config.policy_set().eviction.text() for config in configs] == evictions * 2
    assert [config.capacity for config in configs] == ["5%"] * 3 + ["25%"] * 3


def test_hooks_see_parameters_in_declaration_order():
    """bits=8/4/2 takes five slots: the count, the values and a zero; when=pressure is option 1."""
    par = parse("miss", "cascade:when=pressure").par()
    assert par[:11] == [3, 8, 4, 2, 0, 1, 2, 0.6, 0.3, 0, 0]
    assert par[11:] == [0] * (PAR_SLOTS - 11)


def test_slots_are_found_by_name():
    params = (Numbers("a", (1,), 0, 9), Choice("b", "x", ("x", "y")), Number("c", 0, 0, 1))
    assert [slot(params, name) for name in "abc"] == [0, 5, 6]
    with pytest.raises(KeyError):
        slot(params, "d")


@every(
    "kind, text, said",
    [
        ("eviction", "lruu", "unknown eviction policy 'lruu': did you mean lru?"),
        ("prefetch", "zzz", "unknown prefetch policy 'zzz': choose from none, top_k, score"),
        ("eviction", "", "unknown eviction policy ''"),
        ("prefetch", "top_k:factr=2", "prefetch top_k has no parameter 'factr': did you mean factor?"),
        ("prefetch", "top_k:zzz=2", "it has factor, depth, source"),
        ("eviction", "fifo:x=1", "eviction fifo has no parameters (got 'x')"),
        ("prefetch", "top_k:2", "invalid parameter '2'"),
        ("prefetch", "top_k:depth=1.5", "prefetch top_k: invalid depth=1.5: expected an integer from 1 to 8"),
        ("prefetch", "top_k:depth=9", "invalid depth=9: expected an integer from 1 to 8"),
        ("prefetch", "top_k:factor=nan", "invalid factor=nan: expected a number from 0 to 64"),
        ("prefetch", "top_k:factor=inf", "invalid factor=inf: expected a number from 0 to 64"),
        ("prefetch", "top_k:factor=", "invalid factor=: expected a number from 0 to 64"),
        ("prefetch", "top_k:source=past", "invalid source=past: expected next_gate | current_gate"),
        ("miss", "cascade:bits=8/4/2/1/1", "one to four numbers from 1 to 32, separated by /"),
        ("miss", "cascade:bits=8//2", "invalid bits=8//2: expected one to four numbers"),
        ("miss", "fetch:bits=8/4", "invalid bits=8/4: expected a number from 0 to 32"),
        ("prefetch", "top_k:factor=1:factor=2", "factor is given twice"),
    ],
)
def test_an_error_names_the_thing_and_what_is_allowed(kind: str, text: str, said: str):
    assert said in refusal(kind, text)


def test_needs_follow_the_parameters():
    assert parse("prefetch", "top_k").needs == {"lookahead"}
    assert parse("prefetch", "top_k:source=current_gate").needs == {"logits"}
