"""Standard: the experts that the router chose when the trace was recorded."""

from moereplay.policies.contract import Routing

POLICY = Routing(name="standard", summary="run the recorded choice", source="the trace", reads=frozenset())
