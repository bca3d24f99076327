"""First in, first out: the copy that arrived first leaves, however often it was used."""

from policies.contract import Eviction


def key(now, experts, copies, own, y):
    """The order of arrival."""
    return copies[y]["entered"]


def queue(params):
    """Of arrivals."""
    return "entered"


POLICY = Eviction(
    name="fifo", summary="oldest arrival leaves", source="Belady 1966", key=key, queue=queue, reads=frozenset()
)
