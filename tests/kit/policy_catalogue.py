"""Every policy of the catalogue, and every spelling of its parameters, for the suites that run on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import pytest

from moereplay import policies
from moereplay.policies.contract import Choice, Number, Parameter, Policy
from moereplay.policies.grammar import Chosen
from moereplay.policies.hooks import given_by

CATALOGUE = policies.catalogue()


def hook_of(policy: Policy, name: str) -> FunctionType:
    """A hook that the policy is known to give."""
    return dict(given_by(policy))[name]


def label(policy: Policy) -> str:
    return f"{policy.kind}-{policy.name}"


every_policy = pytest.mark.parametrize("policy", CATALOGUE, ids=label)
with_key = pytest.mark.parametrize("policy", [p for p in CATALOGUE if getattr(p, "key", None)], ids=label)


def by_policy(texts: Iterable[str]) -> pytest.MarkDecorator:
    """One item per policy, with all of its `texts` as one argument; a test loops over them and says which one fails."""
    names = dict.fromkeys(text.partition(":")[0] for text in texts)
    groups = [tuple(text for text in texts if text.partition(":")[0] == name) for name in names]
    return pytest.mark.parametrize("texts", groups, ids=list(names))


def spellings(param: Parameter) -> list[Any]:
    """The default and the ends of what a parameter allows."""
    if isinstance(param, Choice):
        return list(param.options)
    whole = not isinstance(param, Number) or param.integer
    ends = [int(param.low), int(param.high)] if whole else [float(param.low), float(param.high)]
    return [param.default, *ends] if isinstance(param, Number) else [param.default, *[(end,) for end in ends]]


def variants(policy: Policy) -> Iterator[Chosen]:
    """The policy with each parameter in turn at each of its spellings, the others at their defaults; none twice."""
    defaults = {param.name: param.default for param in policy.params}
    yield Chosen(policy, defaults)
    for param in policy.params:
        others = [value for value in spellings(param) if value != param.default]
        yield from (Chosen(policy, defaults | {param.name: value}) for value in others)
