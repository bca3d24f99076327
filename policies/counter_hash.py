"""Randomness without state: a hash of counters, the same in Python and in machine code."""

MODULUS = 2147483647  # 2^31 - 1: every product below fits int64


def counter_hash(seed, a, b, c):
    """A number in [0, MODULUS) from a seed and three counters (pass, layer, expert)."""
    mixed = (seed % MODULUS * 69621 + 12345) % MODULUS
    for counter in (a, b, c):
        mixed = ((mixed ^ (counter % MODULUS)) * 48271 + 11) % MODULUS
        mixed = ((mixed ^ (mixed >> 15)) * 39373 + 7) % MODULUS
    return mixed
