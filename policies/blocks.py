"""Building blocks of several policies: look-ups, gate scores, decaying counts, a hash, profiles, queues.

`experts[x]["profile"]` is the bytes of x's pool that the profile ranks before x, NEVER for an expert that it does not
list.
"""

from moereplay.policies.contract import DROP, GIVEN_PROFILE, RESIDENT, Choice, Number, expert_of


def home(now, y):
    """Return the row of own memory that all copies of y's expert share: its most precise copy's."""
    return y - y % now["precisions"]


def is_here(now, copies, y):
    """Return whether any copy of y's expert is resident."""
    first = home(now, y)
    for copy in range(first, first + now["precisions"]):
        if copies[copy]["state"] == RESIDENT:
            return True
    return False


def is_predicted(now, experts, copies, y):
    """Return whether a prefetch of this pass suggested or fetched y for a layer whose gate is still to come."""
    expert = experts[expert_of(now, y)]
    if expert["layer"] < now["layer"] or (expert["layer"] == now["layer"] and now["gated"] == 1):
        return False
    brought = copies[y]["prefetched"] == 1 and expert["last_pass"] == now["pass"]
    return brought or expert["prediction_pass"] == now["pass"]


# gate scores


def mean_score(step, e):
    """Return the router's probability of expert e in UNITs, averaged over tokens, rounded down."""
    total = 0
    for t in range(len(step.gate)):
        total += step.gate[t][e]
    return total // len(step.gate)


# importance


def scored_tier(ahead, total, t1, t2, lowest):
    """Return the precision by HOBBIT's expert scorer (arXiv 2411.01433 §3.2).

    Experts with `ahead` of their token's gate weight `total` before them get the highest precision up to the share t1,
    the lowest up to t2, else DROP.
    """
    if ahead <= t1 * total:
        return 0
    return lowest if ahead <= t2 * total else DROP


# decaying counts, in + - * / alone

ONE = 1 << 32  # counts are kept as integers of this unit
BITS = 32  # of a logarithm's fraction


def left(factor, tokens):
    """Return factor ** tokens for an integer `tokens` >= 0, by repeated squaring."""
    power = 1.0
    while tokens > 0:
        if tokens % 2 == 1:
            power *= factor
        factor *= factor
        tokens //= 2
    return power


def log2(value):
    """Return the logarithm to base 2 of a positive integer, in units of 2**-BITS, rounded down."""
    whole = 0
    while value >> whole > 1:
        whole += 1
    mantissa, result = value / (1 << whole), whole
    for _ in range(BITS):
        mantissa *= mantissa
        result *= 2
        if mantissa >= 2.0:
            mantissa /= 2.0
            result += 1
    return result


# randomness without state: the same in Python and in machine code

MODULUS = 2147483647  # 2^31 - 1: every product below fits int64


def counter_hash(seed, a, b, c):
    """Return a number in [0, MODULUS) from a seed and three counters (pass, layer, expert)."""
    mixed = (seed % MODULUS * 69621 + 12345) % MODULUS
    for counter in (a, b, c):
        mixed = ((mixed ^ (counter % MODULUS)) * 48271 + 11) % MODULUS
        mixed = ((mixed ^ (mixed >> 15)) * 39373 + 7) % MODULUS
    return mixed


# profiles

#: The demand of the trace to be replayed, the most often chosen first: of its first `tokens`, 0 for all. Or a file.
PROFILE_PARAMS = (
    Choice("profile", "trace", ("trace", "given")),
    Number("tokens", 0, 0, 1 << 40, integer=True),
)


def profile(params):
    """Return the source of the profile, as the contract defines it."""
    return GIVEN_PROFILE if params["profile"] == "given" else params["tokens"]


def needs(params):
    """Return the needs: the trace's own demand is known in advance only if the future is."""
    return frozenset(() if params["profile"] == "given" else ("future",))


def is_within(now, experts, copies, y, limit):
    """Return whether y's expert is among those that fill the first `limit` bytes of its pool."""
    before = experts[expert_of(now, y)]["profile"]
    return before + copies[home(now, y)]["bytes"] <= limit


# -- Queues threaded through a policy's own rows, for policies whose order is a queue rather than a key
#
# A copy is in at most one of a pool's lists. Columns of own.rows[y]: PREV, NEXT, LIST; list i of a pool keeps its
# newest and oldest member and its bytes in own.regs[pool]. Links hold y + 1, so that zeroed memory is an empty list.

PREV, NEXT, LIST = 0, 1, 2
ROW_COLUMNS = 3
NEWEST, OLDEST, BYTES = 0, 1, 2
REGISTERS_PER_LIST = 3
NOWHERE = 0  # lists are numbered from 1


def register(which, field):
    """Return the register of a field of list `which`."""
    return (which - 1) * REGISTERS_PER_LIST + field


def push(own, pool, which, y, size):
    """Put y, which is in no list, at the newest end."""
    row, regs = own.rows[y], own.regs[pool]
    newest = regs[register(which, NEWEST)]
    row[PREV], row[NEXT], row[LIST] = 0, newest, which
    if newest:
        own.rows[newest - 1][PREV] = y + 1
    else:
        regs[register(which, OLDEST)] = y + 1
    regs[register(which, NEWEST)] = y + 1
    regs[register(which, BYTES)] += size


def unlink(own, pool, y, size):
    """Take y out of its list."""
    row, regs = own.rows[y], own.regs[pool]
    which, newer, older = row[LIST], row[PREV], row[NEXT]
    if newer:
        own.rows[newer - 1][NEXT] = older
    else:
        regs[register(which, NEWEST)] = older
    if older:
        own.rows[older - 1][PREV] = newer
    else:
        regs[register(which, OLDEST)] = newer
    row[LIST] = NOWHERE
    regs[register(which, BYTES)] -= size


def move(copies, own, y, which):
    """Make y, which is in some list of its pool, the newest of list `which`."""
    pool, size = copies[y]["pool"], copies[y]["bytes"]
    unlink(own, pool, y, size)
    push(own, pool, which, y, size)


def held(own, pool, which):
    """Return the bytes of the copies in a list."""
    return own.regs[pool][register(which, BYTES)]


def oldest(own, pool, which):
    """Return the oldest member, or -1."""
    return own.regs[pool][register(which, OLDEST)] - 1


def oldest_candidate(copies, own, pool, which):
    """Return the oldest evictable member, or -1; members may be in flight, in use, or ghosts."""
    y = oldest(own, pool, which)
    while y >= 0 and (copies[y]["protected"] == 1 or copies[y]["state"] != RESIDENT):
        y = own.rows[y][PREV] - 1
    return y
