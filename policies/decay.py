"""Use counts that halve every so many tokens: what is left of them, and their logarithm, in + - * / alone."""

ONE = 1 << 32  # counts are kept as integers of this unit
BITS = 32  # of a logarithm's fraction


def left(factor, tokens):
    """factor ** tokens for an integer `tokens` >= 0, by repeated squaring."""
    power = 1.0
    while tokens > 0:
        if tokens % 2 == 1:
            power *= factor
        factor *= factor
        tokens //= 2
    return power


def log2(value):
    """The logarithm to base 2 of a positive integer, in units of 2**-BITS, rounded down."""
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
