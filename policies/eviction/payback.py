"""Payback: `lfu_decay` that admits only experts whose uses pay for their transfer; the others stay where they are.

A decayed count is about how often an expert is used in half_life / ln 2 tokens, and so how often it will be. A copy of
count c replaces a victim of count v if c >= margin * (v + price): it saves what the victim does and its own transfer.
`price` is a transfer in uses, load / (CPU - fast tier) for one token of the mean expert; -1 takes the platform's times.
There it is 0 without a CPU, as what is missing is fetched in any case; where misses are fetched on a platform with a
CPU, give `price=0`. Where the CPU is as fast as the fast tier, nothing pays. `margin=0` admits all and is `lfu_decay`.

In neurall/llama.cpp a newcomer must lead the victim by `swap-lead` uses in the last 64 tokens, -2 for the speeds of CPU
and link: `half_life=64` and `price=N`, or -1. (There a tie does not win.) A prefetch pays like a miss: under
`--miss cpu --prefetch missed` all copies come by prefetch.
"""

from moereplay.policies.blocks import ONE, home, left
from moereplay.policies.contract import Eviction, Memory, Number, slot
from moereplay.policies.eviction import lfu_decay
from moereplay.policies.eviction.lfu_decay import COUNT, HALF_LIFE, SINCE

PARAMS = (*lfu_decay.PARAMS, Number("margin", 1, 0, 1024), Number("price", -1, -1, 1e6))
MARGIN, PRICE = slot(PARAMS, "margin"), slot(PARAMS, "price")
NEVER_PAYS = 1e6


def admit(now, experts, copies, own, y_in, prefetched, y_out):
    """Admit what is worth the victim and a transfer."""
    return count(now, own, y_in) >= own.par[MARGIN] * (count(now, own, y_out) + own.par[PRICE])


def count(now, own, y):
    """Return the decayed count of y's expert."""
    row = own.rows[home(now, y)]
    return row[COUNT] * left(own.par[HALF_LIFE + 1], now["clock"] - row[SINCE]) / ONE


def declines(params):
    """Return whether there is a margin."""
    return params["margin"] > 0


def priced(params, costs):
    """Return the platform's price, if the parameter leaves it open."""
    if params["price"] >= 0:
        return params
    if costs.cpu == 0:
        return {**params, "price": 0}
    saved = costs.cpu - costs.compute
    return {**params, "price": min(costs.load / saved, NEVER_PAYS) if saved > 0 else NEVER_PAYS}


POLICY = Eviction(
    name="payback",
    summary="lfu_decay, but an expert must be used often enough to pay its transfer",
    source="neurall/llama.cpp (pay-back eviction); counts of LRFU: Lee et al., IEEE Transactions on Computers 2001",
    params=PARAMS,
    memory=Memory(rows=2),
    on_use=lfu_decay.on_use,
    key=lfu_decay.key,
    admit=admit,
    declines=declines,
    priced=priced,
    reads=frozenset(),
)
