"""First in, first out: the copy that arrived first is evicted, however often it was used."""

from moereplay.policies.contract import Eviction


def key(now, experts, copies, own, y):
    """Return the position in the order of arrival in the pool."""
    return copies[y]["entered"]


def queue(params):
    """Return the queue: the key is the timestamp of the arrival."""
    return "entered"


POLICY = Eviction(
    name="fifo",
    summary="evict the expert that arrived first",
    source="Belady 1966",
    key=key,
    queue=queue,
    reads=frozenset(),
)
