"""None: every expert is fetched when its gate demands it."""

from moereplay.policies.contract import Prefetch

POLICY = Prefetch(name="none", summary="prefetch nothing", source="the baseline of every paper", reads=frozenset())
